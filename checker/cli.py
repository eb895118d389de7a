"""The command line: one command a function, one place where expected errors become one line.

Exit codes: 0 holds; 1 violated; 2 wrong usage, or something needed is missing; 3 not shown.
With `--json` a command prints one object on stdout and nothing else: whatever an engine prints
meanwhile goes to stderr.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, cast

import click
from rich.console import Console
from rich.control import strip_control_codes
from rich.text import Text

from kvclaims.checker import engines
from kvclaims.checker.verdicts import EXIT_WRONG_USE, Progress, Report, Several, exit_code
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.telemetry import TraceError
from kvclaims.spec.vocabulary import RULES, Verdict

EXPECTED: Final = (BadOperation, EngineMissing, TraceError)
"""Errors that are the user's to mend: one line on stderr and exit 2, never a traceback."""

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""As a shell counts the end by SIGPIPE."""

PLAIN_PROGRESS_EVERY_S: Final = 5.0

_STYLES: Final = {
    Verdict.PROVED: "bold green",
    Verdict.HOLDS: "green",
    Verdict.VIOLATED: "bold red",
    Verdict.NOT_INDUCTIVE: "bold yellow",
    Verdict.VACUOUS: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.NOT_EXPOSED: "cyan",
}


@dataclass(frozen=True)
class Invocation:
    """The command line as given, and where the result goes."""

    arguments: tuple[str, ...]
    out: TextIO


def main() -> None:
    """Entry point of the `kvclaims` script."""
    arguments = sys.argv[1:]
    sys.unraisablehook = _unraisable
    out = _keep_stdout() if "--json" in arguments else sys.stdout
    try:
        code = run(arguments, out)
        out.flush()
    except (BrokenPipeError, _ReaderGone):
        # The reader has gone (`| head`); what is still in the buffer must not be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        code = BROKEN_PIPE
    sys.exit(code)


class _ReaderGone(Exception):
    """Nobody reads the result any more.  No OSError: click and rich would end with 1 for one, as
    for VIOLATED."""


class _Console(Console):
    """One that leaves a reader who has gone to `main`."""

    def on_broken_pipe(self) -> None:
        raise _ReaderGone


class _Commands(click.Group):
    """Commands that leave a reader who has gone to `main`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as gone:
            raise _ReaderGone from gone


def _unraisable(raised: sys.UnraisableHookArgs) -> None:
    """Ctrl-C inside a destructor (a solver's terms have them) is lost there: say it again."""
    if issubclass(raised.exc_type, KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    else:
        sys.__unraisablehook__(raised)


def run(arguments: Sequence[str], out: TextIO) -> int:
    """Run one command, its result printed to `out`; the exit code."""
    invocation = Invocation(tuple(arguments), out)
    try:
        code = commands.main(list(arguments), "kvclaims", standalone_mode=False, obj=invocation)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return EXIT_WRONG_USE
    except click.ClickException as error:
        return _fail(error.format_message(), arguments, out)
    except EXPECTED as error:
        return _fail(str(error), arguments, out)
    except (click.Abort, KeyboardInterrupt) as error:
        said = str(error) or str(error.__cause__ or "") or "interrupted"
        return _fail(said, arguments, out, INTERRUPTED)
    return code if isinstance(code, int) else 0


def _fail(message: str, arguments: Sequence[str], out: TextIO, code: int = EXIT_WRONG_USE) -> int:
    line = " ".join(message.split())
    print(f"kvclaims: {line}", file=sys.stderr)
    if "--json" in arguments:
        print(
            json.dumps({"verdict": "ERROR", "exit": code, "seconds": 0.0, "error": line}), file=out
        )
    return code


def _keep_stdout() -> TextIO:
    """The real stdout for the result alone: from now on all else that is printed, also by an
    engine's C code while it is torn down, goes to stderr."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


# --- what every command shares -----------------------------------------------------------


def _checks(function: Callable[..., Report]) -> Callable[..., int]:
    """A command that prints a report: adds `--json`, times it, shows progress and the result."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    @functools.wraps(function)
    def command(*, as_json: bool, **options: Any) -> int:
        started = time.monotonic()
        with _progress() as progress:
            report = function(progress=progress, **options)
        code = (
            EXIT_WRONG_USE if getattr(report, "lacks_needed", False) else exit_code(report.verdict)
        )
        _print(report, code, time.monotonic() - started, as_json)
        return code

    return command


def _invocation() -> Invocation:
    return cast("Invocation", click.get_current_context().obj)


def _print(report: Report, code: int, seconds: float, as_json: bool) -> None:
    out = _invocation().out
    if as_json:
        head = {"verdict": report.verdict, "exit": code, "seconds": round(seconds, 3)}
        print(json.dumps({**report.to_json(), **head}), file=out)
        return
    console = _Console(file=out, highlight=False, soft_wrap=True)
    renderable = getattr(report, "renderable", None)
    if renderable is not None and console.is_terminal:
        console.print(renderable())
        return
    if not console.is_terminal:  # a line for each request of a long trace, in no colour
        out.writelines(f"{strip_control_codes(line)}\n" for line in report.lines())
        return
    for line in report.lines():
        text = Text(line)
        for verdict, style in _STYLES.items():
            text.highlight_words([verdict], style)
        console.print(text)


class _Doing:
    """What is being done, and for how long the command has run; drawn anew at each refresh."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._text = "…"

    def tell(self, text: str) -> None:
        self._text = text

    def __rich__(self) -> Text:
        return Text(f"{self._text}  {time.monotonic() - self._started:.0f} s")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A status line on a terminal; elsewhere a plain line now and then (logs stay short)."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        line = _Doing()
        with console.status(line):
            yield line.tell
        return
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_PROGRESS_EVERY_S:
            last = time.monotonic()
            console.print(Text(text))

    yield tell


def _report_page(function: Callable[..., Report]) -> Callable[..., Report]:
    """Adds `--report FILE`: what was found is written as one page, too."""

    @click.option(
        "--report",
        "page",
        type=_Target(makes_folders=True),
        help="Write what was found to this file as one self-contained HTML page.",
    )
    @functools.wraps(function)
    def command(*, page: Path | None, **options: Any) -> Report:
        found = function(**options)
        if page is not None:
            from kvclaims.checker import report as reporter

            options["progress"](f"writing {page}")
            name = click.get_current_context().info_name or ""
            reporter.write_report(name, options, found, page)
        return found

    return command


def _engine_path(function: Callable[..., Report]) -> Callable[..., Report]:
    """Adds `--engine-path`: the command runs again in a process that imports from there first."""

    @click.option(
        "--engine-path",
        type=click.Path(path_type=Path),
        help="Folder to import the engine's package from.",
    )
    @functools.wraps(function)
    def command(*, engine_path: Path | None, **options: Any) -> Report:
        if engine_path is not None:
            chosen = options.get("engine") or engines.names()
            names = [chosen] if isinstance(chosen, str) else list(chosen)
            engines.check_path(engine_path, names)
            code = engines.rerun_with_path(engine_path, _invocation().arguments, _invocation().out)
            if code is not None:
                raise click.exceptions.Exit(code)
        return function(**options)

    return command


def _rule(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in RULES:
        raise click.BadParameter(f"unknown rule {value!r} (known: {', '.join(RULES)})")
    return value


def _settings(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> Mapping[str, str]:
    """`name=value` pairs; whole numbers in a value are sizes and must not be negative."""
    settings = {}
    for text in values:
        name, equals, setting = text.partition("=")
        if not name or not equals or not setting:
            raise click.BadParameter(f"{text!r} is not name=value")
        if any(part.strip().startswith("-") for part in setting.split(",")):
            raise click.BadParameter(f"{text!r}: a size is at least 0")
        settings[name] = setting
    return settings


class _Seconds(click.FloatRange):
    """A finite number in the range: `inf` and `nan` are no times."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number of seconds", param, ctx)
        return number


_SECONDS: Final = _Seconds(min=0, min_open=True)


class _Source(click.Path):
    """A file that is read to its end: what may have none, a pipe or a device, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = cast("Path", super().convert(value, param, ctx))
        _has_an_end(path)
        return path


def _sources(
    _context: click.Context, _parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """The same for what may be a name, an address or a file."""
    for one in (value,) if isinstance(value, str) else value or ():
        _has_an_end(Path(one))
    return value


def _has_an_end(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # who opens it says why it cannot be
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise BadOperation(f"{path}: not a regular file")


class _Target(click.Path):
    """Where a result will be written: that it can be is looked at before the work begins.

    With `makes_folders`, as for a folder, missing folders on the way are made by then.
    """

    def __init__(self, *, is_folder: bool = False, makes_folders: bool = False) -> None:
        super().__init__(path_type=Path, file_okay=not is_folder, dir_okay=is_folder)
        self._makes_folders = makes_folders or is_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = cast("Path", super().convert(value, param, ctx))
        at = path
        while not at.exists() and (at is path or self._makes_folders):
            at = at.parent
        if not at.exists():
            why = errno.ENOENT
        elif at != path and not at.is_dir():
            why = errno.ENOTDIR
        elif not os.access(at, os.W_OK):
            why = errno.EACCES
        else:
            return path
        raise BadOperation(f"cannot write {path}: {os.strerror(why)}")


def _traces(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[Path | str, ...]:
    """Files, and as texts the endpoints of publishers, such as tcp://127.0.0.1:5557."""
    _sources(_context, _parameter, value)
    return tuple(one if "://" in one else Path(one) for one in value)


def _ray(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int:
    """How many workers on Ray, 0 where none were asked for."""
    if value is None:
        return 0
    from kvclaims.checker.distributed import ray_workers

    return ray_workers(value)


_workers = click.option(
    "--workers", callback=_ray, metavar="ray:N", help="Work on N processes of Ray."
)

_output = click.option(
    "--output",
    type=_Target(is_folder=True),
    default=Path("counterexamples"),
    show_default=True,
    help="Folder for counterexamples.",
)


# --- the commands ------------------------------------------------------------------------


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="kvclaims")
def commands() -> None:
    """Check the resident-KV contract: proofs, exploration, litmus, fuzzing, traces."""


@commands.command()
@click.option("--rule", callback=_rule, help="Only this rule, such as F2.")
@click.option("--machine", help="Only this machine.")
@click.option(
    "--timeout",
    type=_SECONDS,
    default=20.0,
    show_default=True,
    help="Seconds for one obligation; past them it is UNKNOWN.",
)
@click.option(
    "--solver",
    type=click.Choice(["z3", "cvc5", "both"]),
    default="z3",
    show_default=True,
    help="Who decides; both have to agree.",
)
@click.option(
    "--emit",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write every obligation to this folder as an SMT-LIB file.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of proofs kept from before (default: the user's cache folder).",
)
@click.option("--no-cache", is_flag=True, help="Prove everything anew, and keep nothing.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes (default: one for each core).")
@_workers
@_checks
def prove(
    rule: str | None,
    machine: str | None,
    timeout: float,
    solver: str,
    emit: Path | None,
    cache: Path | None,
    no_cache: bool,
    jobs: int | None,
    workers: int,
    progress: Progress,
) -> Report:
    """Prove that every invariant is inductive, for any number of blocks, claims and requests."""
    from kvclaims.checker import prove as prover
    from kvclaims.checker.proofcache import default_folder

    if cache is not None and no_cache:
        raise click.UsageError("give --cache or --no-cache, not both")
    ways = prover.Ways(
        timeout_ms=max(1, round(timeout * 1000)),
        solver=solver,
        emit=emit,
        cache=None if no_cache else cache or default_folder(),
        jobs=jobs or os.cpu_count() or 1,
        workers=workers,
    )
    return prover.prove(rule, machine, progress, ways)


@commands.command()
@click.argument("machine", required=False)
@click.option("--set", "sets", multiple=True, callback=_settings, help="Size, as name=value.")
@click.option(
    "--export",
    "wanted",
    metavar="FILE|FORMAT",
    help="Write the instance as tla, promela, smt2, or its graph as graphml, dot or html: to "
    "FILE by its ending (.tla .pml .smt2 .graphml .dot .html), or to a file named after it.",
)
@click.option(
    "--by",
    type=click.Choice(["python", "native", "symbolic", "torch", "ray"]),
    help="Search with compiled Python (default for pinned instances), with native code (default "
    "with --set or an option of its own), with BDDs, on tensors, or on Ray.",
)
@click.option("--memory", help="Bytes that a search may take, such as 500M or 8G.")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads (native, torch).")
@click.option("--symmetry", is_flag=True, help="States that differ in names only count as one.")
@click.option(
    "--checkpoint",
    type=_Target(),
    help="Where Ctrl-C leaves a native search (default: MACHINE.checkpoint.npz).",
)
@click.option(
    "--resume",
    type=_Source(path_type=Path, dir_okay=False),
    help="Go on from this checkpoint.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where torch computes.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes on Ray.")
@_checks
def explore(
    machine: str | None,
    sets: Mapping[str, str],
    wanted: str | None,
    by: str | None,
    memory: str | None,
    progress: Progress,
    **chosen: Any,
) -> Report:
    """Visit every state of a finite instance of MACHINE, or of all pinned instances."""
    from kvclaims.checker import explore as explorer
    from kvclaims.checker import exploring, exports
    from kvclaims.checker.instances import KNOWN, PINNED
    from kvclaims.checker.progress import with_progress

    options = exploring.Options(exploring.in_bytes(memory) if memory else None, **chosen)
    if machine is None and (sets or wanted or by):
        raise click.UsageError("--set, --by and --export need a MACHINE")
    if machine is None and options.asked:
        raise click.UsageError(f"--{options.asked[0]} needs a MACHINE")
    if machine is not None:
        where = None if wanted is None else exports.target(wanted, machine)
        report = exploring.explore_by(by, machine, sets, options, progress)
        if where is None and machine not in PINNED:
            return report  # parts of a whole, and what they refine: their progress is the whole's
        if where is None:
            return with_progress(report, machine, sets, progress)
        return exports.ExportReport(report, exports.export(machine, sets, where))
    explored = ((name, explorer.explore(name, {}, progress)) for name in PINNED)
    parts: list[Report] = [with_progress(report, name, {}, progress) for name, report in explored]
    parts += [explorer.explore(name, {}, progress) for name in KNOWN if name not in PINNED]
    return Several("instances", tuple(parts), sums=("states", "transitions"))


@commands.command()
@_checks
def conform(progress: Progress) -> Report:
    """Replay every step of a bounded instance on the reference, in both directions."""
    from kvclaims.checker import conform as conformance

    progress("replaying every step on the reference")
    return conformance.conform(progress=progress)


@commands.command()
@click.option(
    "--target",
    type=click.Choice(["machines", "reference", "monitor", "all"]),
    default="all",
    show_default=True,
    help="What to mutate.",
)
@click.option("--machine", help="Only this machine.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes (default: one for each core).")
@click.option("--seconds", type=_SECONDS, help="Time to spend; what is left then is counted.")
@click.option(
    "--resume",
    type=_Target(is_folder=True),
    help="Folder in which fates are kept; a later run over the same text goes on from there.",
)
@click.option(
    "--output",
    type=_Target(),
    help="Write the whole report, every mutant in it, to this file as JSON; `report` makes a page "
    "of it, and a gate's page shows the mutation.json in its folder.",
)
@click.option(
    "--propose",
    is_flag=True,
    help="Mutate nothing else: look for the must-fail twins that properties lack.",
)
@_checks
def mutate(
    target: str,
    machine: str | None,
    jobs: int | None,
    seconds: float | None,
    resume: Path | None,
    output: Path | None,
    propose: bool,
    progress: Progress,
) -> Report:
    """Change machines, reference and monitor in small ways: a check has to notice each."""
    from kvclaims.checker import mutate as mutator

    if propose:
        return mutator.propose(machine, progress)
    report = mutator.mutate(target, machine, progress, jobs or os.cpu_count() or 1, seconds, resume)
    if output is not None:
        mutator.write(report, output)
    return report


@commands.command()
@_checks
def twins(progress: Progress) -> Report:
    """Break each rule on purpose: every must-fail twin has to fail."""
    from kvclaims.checker import twins as must_fail
    from kvclaims.checker.unfair import run_unfair

    progress("breaking each rule on purpose")
    guards = must_fail.run_twins(progress)
    return Several("tables", (guards, run_unfair(progress)), sums=("killed",))


@commands.command()
@click.argument("programs", nargs=-1, metavar="[PROGRAM]...", callback=_sources)
@click.option("--engine", default=engines.REFERENCE, show_default=True, help="Engine to run on.")
@click.option("--trace", "trace_file", type=_Target(), help="Write the traces to this file.")
@_checks
@_engine_path
@_report_page
def litmus(
    programs: tuple[str, ...], engine: str, trace_file: Path | None, progress: Progress
) -> Report:
    """Run litmus programs (all, or those named by id or TOML file) and judge every number."""
    from kvclaims.checker import litmus as runner
    from kvclaims.checker.programs import select

    chosen = select(programs)
    found, info = engines.ready(engine)
    report = runner.litmus(found, info, chosen, progress)
    if trace_file is not None:
        if trace_file.suffix == ".parquet":
            from kvclaims.checker.rows import write_parquet

            try:
                write_parquet(report.events, trace_file)
            except OSError as error:
                raise BadOperation(f"cannot write {trace_file}: {error.strerror}") from None
        else:
            _write(trace_file, "".join(f"{event.to_json()}\n" for event in report.events))
    return report


@commands.command()
@click.option("--engine", required=True, help="Engine to run on.")
@click.option("--steps", type=click.IntRange(min=1), help="Operations to do.")
@click.option("--seconds", type=_SECONDS, help="Time to spend.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@_workers
@click.option(
    "--floor",
    type=click.IntRange(min=0),
    help="Kinds of allocator step that must be taken, or the run shows nothing (exit 3).",
)
@click.option(
    "--baseline",
    type=_Source(path_type=Path, dir_okay=False),
    help="File of known findings that are allowed, by name (default: the engine's own).",
)
@click.option("--no-baseline", is_flag=True, help="Allow no finding.")
@click.option(
    "--examples",
    type=_Target(is_folder=True),
    help="Folder in which examples are kept for later runs, which begin with them.",
)
@click.option(
    "--tier",
    is_flag=True,
    help="Random acts on offloadable claims and the files that keep them.",
)
@_output
@_checks
@_engine_path
@_report_page
def fuzz(
    engine: str,
    steps: int | None,
    seconds: float | None,
    seed: int,
    workers: int,
    floor: int | None,
    baseline: Path | None,
    no_baseline: bool,
    examples: Path | None,
    tier: bool,
    output: Path,
    progress: Progress,
) -> Report:
    """Drive an engine with random operations, each judged by all there is to judge by.

    On N workers N seeds are tried, from --seed on.
    """
    from kvclaims.checker import fuzz as fuzzer
    from kvclaims.checker import tiers

    if steps is not None and seconds is not None:
        raise click.UsageError("give --steps or --seconds, not both")
    if baseline is not None and no_baseline:
        raise click.UsageError("give --baseline or --no-baseline, not both")
    if tier:
        if workers or floor is not None or baseline is not None or no_baseline or examples:
            raise click.UsageError("--tier goes with --steps or --seconds, --seed and --output")
        return tiers.fuzz(engine, steps, seconds, seed, progress, output)
    if workers:
        from kvclaims.checker.distributed import fuzz_seeds

        seeds = range(seed, seed + workers)
        return fuzz_seeds(engine, steps, seconds, seeds, workers, progress, output)
    found, _ = engines.ready(engine)
    ways = fuzzer.Ways(steps, seconds, seed, output, floor, examples=examples)
    if no_baseline:
        ways.known = ()
    elif baseline is not None:
        from kvclaims.checker.baseline import read_baseline

        ways.known = read_baseline(baseline).findings
    return fuzzer.fuzz(found, steps, seconds, seed, progress, output, ways)


@commands.command()
@click.argument("programs", nargs=-1)
@click.option("--engine", required=True, help="Engine whose tier is tried.")
@_checks
@_engine_path
def tier(programs: tuple[str, ...], engine: str, progress: Progress) -> Report:
    """Run what shows that an engine's tier keeps offloadable claims (default: all of it)."""
    from kvclaims.checker import tiers

    return tiers.run_all(engine, programs, progress)


@commands.command()
@click.argument("file", type=_Source(path_type=Path))
@click.option("--engine", help="Engine to run on (default: the one that the file names).")
@_checks
@_engine_path
def replay(file: Path, engine: str | None, progress: Progress) -> Report:
    """Run the operations of a counterexample FILE again."""
    from kvclaims.checker import replay as replayer
    from kvclaims.checker import tiers

    progress(f"replaying {file.name}")
    run_of_tier = tiers.read(file)
    if run_of_tier is not None:
        return tiers.replay(file, run_of_tier, engine)
    return replayer.replay(file, engine)


@commands.command()
@click.option("--engine", default=engines.REFERENCE, show_default=True, help="Engine to break.")
@_output
@_checks
@_engine_path
def faults(engine: str, output: Path, progress: Progress) -> Report:
    """Plant faults in an engine: each has to be caught by the rule that it breaks."""
    from kvclaims.checker import faults as planter

    return planter.run_faults(engine, progress, output)


@commands.command()
@click.argument("traces", nargs=-1, required=True, callback=_traces)
@click.option(
    "--seconds",
    type=_Seconds(min=0, min_open=True, max=86_400),
    default=10.0,
    show_default=True,
    help="How long to listen to an endpoint.",
)
@click.option(
    "--replay", metavar="ENDPOINT", help="Where lost batches can be had; else a gap is UNKNOWN."
)
@click.option("--save", type=click.Path(path_type=Path), help="New file for what was heard.")
@_workers
@_checks
@_report_page
def audit(
    traces: tuple[Path | str, ...],
    seconds: float,
    replay: str | None,
    save: Path | None,
    workers: int,
    progress: Progress,
) -> Report:
    """Fold each TRACE and judge it by the rules that events can decide.

    KV events of vLLM, Dynamo and TensorRT-LLM are told by their first line and replayed (B8, T1).
    Those of a vLLM that publishes them are heard at its endpoint, such as tcp://127.0.0.1:5557.
    """
    live = [trace for trace in traces if isinstance(trace, str)]
    if live and len(traces) > 1:
        raise BadOperation("an endpoint is listened to alone, beside no other trace")
    if live:
        from kvclaims.checker import subscribed

        return subscribed.audit(live[0], replay, seconds, save, progress)
    if replay or save:
        raise BadOperation("--replay and --save go with an endpoint, such as tcp://127.0.0.1:5557")
    return _audited([Path(trace) for trace in traces], workers, progress)


def _audited(traces: Sequence[Path], workers: int, progress: Progress) -> Report:
    from kvclaims.checker import audit as auditor
    from kvclaims.checker import foreign

    if any(foreign.recognises(path) for path in traces):
        return foreign.audit(traces)
    if workers:
        from kvclaims.checker.distributed import audit_traces

        return audit_traces(traces, workers, progress)
    runs: list[auditor.AuditedRun] = []
    for number, trace in enumerate(traces, 1):
        progress(f"folding {trace.name} ({number} of {len(traces)})")
        runs += auditor.audit([trace]).runs
    return auditor.AuditReport(tuple(runs))


@commands.command()
@click.argument("profiles", nargs=-1, metavar="[PROFILE]...", callback=_sources)
@click.option("--mechanism", multiple=True, help="Mechanism to measure, such as kivi; or all.")
@click.option(
    "--without", multiple=True, metavar="EVIDENCE", help="Leave evidence out: the verdict falls."
)
@_checks
def lower(
    profiles: tuple[str, ...],
    mechanism: tuple[str, ...],
    without: tuple[str, ...],
    progress: Progress,
) -> Report:
    """Judge what an engine's profile, or a mechanism by measurement, really offers claims."""
    from kvclaims.checker import lower as lowering
    from kvclaims.checker import profiles as known

    if mechanism and not profiles:
        try:
            from kvclaims.checker import measure
        except ImportError:
            raise EngineMissing(
                "mechanisms need torch (install: pip install 'kvclaims[mechanisms]')"
            ) from None
        names = measure.names() if mechanism == ("all",) else mechanism
        mechanisms = [measure.find(name) for name in names]
        return Several(
            "mechanisms", tuple(measure.measure(m, without, progress) for m in mechanisms), ()
        )
    if mechanism or without or not profiles:
        raise click.UsageError(
            f"give profiles (known: {', '.join(known.names())}; or a .toml file), or --mechanism"
        )
    read = [known.load(profile) for profile in profiles]
    return Several("profiles", tuple(lowering.lower(p, progress=progress) for p in read), ())


@commands.command()
@click.option("--engine", multiple=True, help="Engine to check (default: all that run here).")
@click.option(
    "--budget",
    type=_SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds of fuzzing, over all engines.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--output",
    type=_Target(is_folder=True),
    default=Path("gate"),
    show_default=True,
    help="Folder for the reports.",
)
@click.option(
    "--baseline",
    type=_Source(path_type=Path, dir_okay=False),
    help="File of known findings that are allowed, by name (default: the engine's own).",
)
@click.option(
    "--engine-only",
    is_flag=True,
    help="Leave out proofs, exploration, conformance and twins: they say nothing of an engine.",
)
@_checks
@_engine_path
def gate(
    engine: tuple[str, ...],
    budget: float,
    seed: int,
    output: Path,
    baseline: Path | None,
    engine_only: bool,
    progress: Progress,
) -> Report:
    """Everything at once: one table, and reports in gate/."""
    from kvclaims.checker import gate as gatekeeper

    own = not engine_only
    return gatekeeper.gate(engine, budget, seed, output, progress, baseline, own)


@commands.group()
def elastic() -> None:
    """Memory lent to the KV cache while batches only decode: plan, measure, watch."""


@elastic.command()
@click.option("--model", callback=_sources, help="A config.json, its folder, or a preset: 7b, 32b.")
@click.option("--memory", type=float, help="Memory of a device, GiB (default: 39.39).")
@click.option("--utilization", type=float, help="Share of it that the engine uses (default: 0.9).")
@click.option("--tensor-parallel", type=int, help="Devices (default: 1).")
@click.option("--chunk", type=int, help="Tokens of the largest prefill chunk (default: 32768).")
@click.option("--small-chunk", type=int, help="The alternative (default: 2048).")
@click.option("--sequences", type=int, help="Sequences in a batch (default: 256).")
@click.option("--overhead", "overhead_gib", type=float, help="Other memory, GiB (default: 0.9).")
@click.option(
    "--slowdown", type=float, help="Measured time to first token: small chunk over large chunk."
)
@_checks
def plan(model: str | None, progress: Progress, **options: Any) -> Report:
    """What the activation reserve costs in KV, and what to do; without --model, the published
    configurations beside their estimate."""
    from kvclaims.checker import plan as planner

    given = {name: value for name, value in options.items() if value is not None}
    progress("estimating")
    if model is None:
        if given:
            raise click.UsageError("the sizes belong to a --model")
        return planner.published()
    if "memory" in given:
        given["memory_gib"] = given.pop("memory")
    setting = planner.Setting(planner.read_model(model), **given)
    return planner.PlanReport(plans=(planner.Plan.of(setting),))


@elastic.command()
@click.option(
    "--chunk",
    "chunks",
    type=click.IntRange(min=32, max=8192),
    multiple=True,
    default=(128, 512, 2048),
    show_default=True,
    help="Tokens of a prefill chunk; the smallest is the baseline.",
)
@_checks
def bench(chunks: tuple[int, ...], progress: Progress) -> Report:
    """Static, elastic and over-committed memory on a whole vLLM, against a lower chunk."""
    return engines.extension("elastic-bench")(progress, chunks)


@elastic.command()
@click.option(
    "--pace", type=_Seconds(0, 60), default=1.0, show_default=True, help="Seconds a scene."
)
@_checks
def demo(pace: float, progress: Progress) -> Report:
    """Scenes on the CPU twin of the allocator."""
    return engines.extension("elastic-demo")(progress, pace)


@commands.command()
@click.argument("file", type=_Source(path_type=Path))
@click.option(
    "--output",
    type=_Target(makes_folders=True),
    default=Path("report.html"),
    show_default=True,
    help="The page to write.",
)
@click.option("--run", "run_id", metavar="ID", help="Only this run of a trace.")
@_checks
def report(file: Path, output: Path, run_id: str | None, progress: Progress) -> Report:
    """Make one page of FILE: a trace, a counterexample (run again), a gate's gate.json, or what
    `mutate --output` wrote."""
    from kvclaims.checker import report as reporter

    return reporter.report(file, output, run_id, progress)


@commands.command()
@click.argument("source", metavar="TRACE|URL", callback=_sources)
@click.option("--once", is_flag=True, help="Print one snapshot and end.")
@click.option(
    "--every", type=_SECONDS, default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--json", "as_json", is_flag=True, help="Print one snapshot as a JSON object.")
def watch(source: str, once: bool, every: float, as_json: bool) -> int:
    """Claims, phases, headroom and refusals of a running engine, until Ctrl-C: from the TRACE
    that it writes, or from its metrics at an http(s) URL."""
    from kvclaims.checker import watch as watcher

    started = time.monotonic()
    console = _Console(file=_invocation().out, highlight=False, soft_wrap=True)
    opened = watcher.open_source(source)
    seen = watcher.watch(opened, console, once=once or as_json, every=every)
    code = exit_code(seen.verdict)
    _print(seen, code, time.monotonic() - started, as_json)
    return code


@commands.command()
@_checks
def doctor(progress: Progress) -> Report:
    """What this machine can check, and the command that installs what is missing."""
    from kvclaims.checker import doctor as physician

    progress("looking around")
    return physician.doctor()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None


if __name__ == "__main__":
    main()
