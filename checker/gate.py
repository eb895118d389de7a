"""Everything at once: each part in a process of its own, one table, and files in gate/.

A part is another command of this package, run with `--json`: what it prints is its result, and
if it dies instead, that is a result too.  An engine that cannot run here is left out and named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from kvclaims.checker import children, engines, gatefiles, tiers
from kvclaims.checker.baseline import read_baseline
from kvclaims.checker.verdicts import EXIT_WRONG_USE, Progress, counted, worst
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.vocabulary import Verdict

WORKERS: Final = 2
"""Processes at a time: the gate is sized for two cores."""

TIER_ACTS: Final = 6000
"""Acts on an engine's tier, where it has one: a few seconds of them."""

TIME_LIMIT_S: Final = 900
"""A part that takes longer is ended and reported as UNKNOWN."""

OWN_PARTS: Final = ("prove", "explore", "conform", "twins")
"""The parts that need no engine but the reference, in the order of the table."""

LONGEST_FIRST: Final = ("twins", "conform", "prove", "explore")
"""The same in the order of their start, so that no long one is left to the end."""

_OPTIONS: Final = {"prove": ["--no-cache"]}
"""What a part is run with: the gate proves anew whatever was proved before."""

_TITLES: Final = {"prove": "proofs", "explore": "exploration", "conform": "conformance"}

_COUNTED: Final = {
    "obligations": "obligation",
    "states": "state",
    "transitions": "transition",
    "progress": "progress check",
    "twins": "twin",
    "programs": "program",
    "runs": "run",
    "operations": "operation",
    "steps": "step",
    "events": "event",
    "monitored_steps": "monitored step",
    "edges": "replayed step",
    "refused": "refusal",
    "faults": "planted fault",
}
"""Fields of a command's JSON that say what it did, with the word for one of them."""


@dataclass(frozen=True)
class Part:
    """One row of the table: a command, and what came of it.

    `data` is the command's own JSON object; `missing` says why an engine was not run.
    """

    command: str
    engine: str | None
    verdict: Verdict
    seconds: float
    data: Mapping[str, Any]
    missing: str = ""
    error: str = ""
    of: str = ""
    """Which part of the engine, where it is not the whole."""

    @property
    def name(self) -> str:
        title = _TITLES.get(self.command, self.command)
        return " ".join(filter(None, (title, self.engine, self.of)))

    @property
    def shown(self) -> str:
        return "not run" if self.missing else str(self.verdict)

    @property
    def did(self) -> str:
        """What the part covered, in numbers, or why it did not run."""
        if self.missing or self.error:
            return self.missing or self.error
        amounts = [(_amount(self.data.get(field)), word) for field, word in _COUNTED.items()]
        return ", ".join(counted(amount, word) for amount, word in amounts if amount is not None)

    @property
    def violations(self) -> list[dict[str, Any]]:
        """Every broken rule, in one shape for all commands."""
        found = [*self.data.get("violations", ()), *self.data.get("counterexamples", ())]
        if self.verdict is Verdict.VIOLATED and not found and "findings" not in self.data:
            found.append({"rule": "B9", "message": self.error or f"{self.name} was violated"})
        return [
            {
                **violation,
                "message": str(violation.get("message") or violation.get("property", "")),
                "operations": violation.get("operations") or violation.get("steps") or [],
            }
            for violation in found
        ]

    def counterexample(self, number: int) -> str:
        """Where the file of the part's violation `number` lies, in the gate's folder."""
        return f"counterexamples/{self.name.replace(' ', '-')}-{number}.json"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.shown,
            "seconds": round(self.seconds, 3),
            "did": self.did,
            **{k: v for k, v in self.data.items() if k not in ("verdict", "exit", "seconds")},
        }


def _amount(value: object) -> int | None:
    if isinstance(value, list):
        return len(value)
    return value if type(value) is int else None


class Board:
    """What runs now, since when, and how much is done: told in one line at each change."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._started = time.monotonic()
        self._running: dict[str, float] = {}
        self._done = 0
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        with self._lock:
            self._running[name] = time.monotonic()
            self._tell("")

    def end(self, name: str, shown: str) -> None:
        with self._lock:
            seconds = time.monotonic() - self._running.pop(name)
            self._done += 1
            self._tell(f"{name} {shown} in {seconds:.0f} s; ")

    def _tell(self, news: str) -> None:
        now = time.monotonic()
        running = ", ".join(f"{n} ({now - since:.0f} s)" for n, since in self._running.items())
        done = counted(self._done, "check")
        spent = now - self._started
        self._progress(f"{news}{done} done in {spent:.0f} s, running: {running or 'none'}")


@dataclass(frozen=True)
class GateReport:
    parts: tuple[Part, ...]
    output: Path
    seed: int = 0
    baselines: tuple[Path, ...] = ()
    """The files of known findings that were allowed."""

    @property
    def verdict(self) -> Verdict:
        return worst(part.verdict for part in self.parts if not part.missing)

    @property
    def missing(self) -> dict[str, str]:
        """Engines that could not run, each with the reason."""
        return {part.engine: part.missing for part in self.parts if part.engine and part.missing}

    @property
    def known(self) -> dict[str, int]:
        """Known findings that were met, each with how often."""
        met: Counter[str] = Counter()
        for part in self.parts:
            met.update(part.data.get("known") or {})
        return dict(met)

    @property
    def notes(self) -> Iterator[str]:
        checked = {p.engine for p in self.parts if p.engine and not p.missing}
        if checked == {engines.REFERENCE} and self.missing:
            yield "only the reference was checked:"
        for name, reason in self.missing.items():
            yield f"{name} was not run: {reason}"

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "baselines": [str(path) for path in self.baselines],
            "known": self.known,
            "engines": [
                part.data["engine"]
                for part in self.parts
                if part.command == "litmus" and isinstance(part.data.get("engine"), dict)
            ],
            "missing": self.missing,
            "parts": [part.to_json() for part in self.parts],
            "steps": self._sum("steps"),
            "operations": self._sum("operations"),
            "violations": [
                {
                    **violation,
                    "part": part.name,
                    "file": str(self.output / part.counterexample(number)),
                }
                for part in self.parts
                for number, violation in enumerate(part.violations, 1)
            ],
            "not_exposed": [
                f"{part.name}: {what}" for part in self.parts for what in _names(part.data)
            ],
            "output": str(self.output),
        }

    def _sum(self, field: str) -> int:
        return sum(_amount(part.data.get(field)) or 0 for part in self.parts)

    def lines(self) -> Iterator[str]:
        width = max(len(part.name) for part in self.parts)
        for part in self.parts:
            yield f"{part.name:{width}}  {part.shown:13} {part.seconds:6.1f} s  {part.did}"
        yield from self._tail()

    def renderable(self) -> Table:
        table = Table(
            title="kvclaims gate", caption="\n".join(self._tail()), caption_justify="left"
        )
        for heading in ("check", "verdict", "seconds", "what it did"):
            table.add_column(heading, justify="right" if heading == "seconds" else "left")
        for part in self.parts:
            style = _style(part)
            table.add_row(part.name, Text(part.shown, style), f"{part.seconds:.1f}", Text(part.did))
        return table

    def _tail(self) -> Iterator[str]:
        for part in self.parts:
            for violation in part.violations:
                yield f"VIOLATED {violation['rule']} in {part.name}: {violation['message']}"
        for name, times in self.known.items():
            files = ", ".join(str(path) for path in self.baselines)
            yield f"known finding {name}: {counted(times, 'time')}, allowed by {files}"
        for part in self.parts:
            if part.command == "fuzz" and (lacking := _names(part.data)):
                yield f"{Verdict.NOT_EXPOSED} by {part.engine}: {', '.join(lacking)}"
        yield f"seed {self.seed}"
        yield from self.notes
        yield f"{self.verdict}: details in {self.output / 'report.html'}"


def _names(data: Mapping[str, Any]) -> list[str]:
    found = data.get("not_exposed", [])
    return [str(name) for name in found] if isinstance(found, list) else []


def _style(part: Part) -> str:
    if part.missing:
        return "cyan"
    return {Verdict.PROVED: "green", Verdict.HOLDS: "green", Verdict.VIOLATED: "bold red"}.get(
        part.verdict, "yellow"
    )


def gate(
    chosen: Sequence[str],
    budget: float,
    seed: int,
    output: Path,
    progress: Progress,
    baseline: Path | None = None,
    own: bool = True,
) -> GateReport:
    """Run every part and write the files.  `EngineMissing` if a chosen engine cannot run.

    `baseline` names the findings that are allowed; without one each engine's own file does.
    Without `own` the parts that say nothing of an engine are left out.
    """
    known = engines.names()
    for name in chosen:
        if name not in known:
            raise BadOperation(f"unknown engine {name!r} (known: {', '.join(known)})")
    names = tuple(dict.fromkeys(chosen)) or known
    allowed = _baselines(names, baseline)
    folder = gatefiles.prepare(output)
    with children.stopping(), tempfile.TemporaryDirectory() as scratch:
        traces = {name: Path(scratch) / f"{name}.jsonl" for name in names}
        parts = _run_all(names, traces, budget / len(names), seed, progress, allowed, own)
        report = GateReport(parts, folder, seed, tuple(dict.fromkeys(allowed.values())))
        for name, reason in report.missing.items():
            if name in chosen:
                raise EngineMissing(reason)
        _require_engine_path_used(report)
        gatefiles.write(report, [path for path in traces.values() if path.exists()], progress)
    return report


def _baselines(names: Sequence[str], baseline: Path | None) -> dict[str, Path]:
    """The file of known findings for each engine that has one.  `BaselineError` where the one
    that was asked for cannot be read."""
    if baseline is not None:
        read_baseline(baseline)
        return dict.fromkeys(names, baseline)
    found = {name: _own_findings(name) for name in names}
    return {name: path for name, path in found.items() if path is not None}


def _own_findings(name: str) -> Path | None:
    try:
        path = getattr(engines.find(name), "findings", None)
    except EngineMissing:
        return None  # its own part says so
    return path if isinstance(path, Path) else None


def _require_engine_path_used(report: GateReport) -> None:
    """With `--engine-path`, at least one engine must have run from there."""
    wanted = engines.given_path()
    if wanted is None:
        return
    ran = {p.engine for p in report.parts if p.engine and not p.missing}
    if ran <= {engines.REFERENCE}:
        raise EngineMissing(f"no engine ran from {wanted}: " + "; ".join(report.missing.values()))


def _run_all(
    names: Sequence[str],
    traces: Mapping[str, Path],
    fuzz_seconds: float,
    seed: int,
    progress: Progress,
    allowed: Mapping[str, Path],
    with_own: bool,
) -> tuple[Part, ...]:
    """The parts in the order of the table, two processes at a time, long ones started first."""
    board = Board(progress)
    own = {part: _own_job(part, board) for part in LONGEST_FIRST if with_own}
    of_engines = {
        f"engine {name}": _engine_job(
            name, traces[name], fuzz_seconds, seed, board, allowed.get(name)
        )
        for name in reversed(names)
    }
    jobs = {**own, **of_engines}
    with ThreadPoolExecutor(WORKERS) as pool:
        try:  # the first child may run, and Ctrl-C come, before the last job is submitted
            futures = {key: pool.submit(job) for key, job in jobs.items()}
            done = {key: future.result() for key, future in futures.items()}
        except BaseException:
            children.end_all()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    order = [*(OWN_PARTS if with_own else ()), *(f"engine {name}" for name in names)]
    parts = [part for key in order for part in done[key]]
    return (*parts, _monitor(parts))


def _monitor(parts: Sequence[Part]) -> Part:
    """What the monitor judged beside the engines' runs; its findings stand with those."""
    steps = sum(_amount(part.data.get("monitored_steps")) or 0 for part in parts)
    found = sum(bool(violation.get("step")) for part in parts for violation in part.violations)
    verdict = Verdict.HOLDS if steps else Verdict.VACUOUS
    data = {"monitored_steps": steps, "findings": found}
    return Part("monitor", None, Verdict.VIOLATED if found else verdict, 0.0, data)


def _own_job(command: str, board: Board) -> Callable[[], list[Part]]:
    return lambda: [_run(command, None, _OPTIONS.get(command, []), board)]


def _engine_job(
    name: str,
    trace: Path,
    fuzz_seconds: float,
    seed: int,
    board: Board,
    baseline: Path | None,
) -> Callable[[], list[Part]]:
    """Litmus; then, if the engine runs here, fuzzing, and the faults that are planted in it."""

    def job() -> list[Part]:
        programs = _run("litmus", name, ["--trace", str(trace)], board)
        if programs.missing:
            return [programs]
        options = ["--seconds", f"{fuzz_seconds:.3f}", "--seed", str(seed)]
        options += ["--output", str(trace.parent)]
        options += ["--baseline", str(baseline)] if baseline else []
        parts = [programs, _run("fuzz", name, options, board)]
        if tiers.has_tier(engines.find(name)):
            tier = ["--tier", "--steps", str(TIER_ACTS), "--seed", str(seed)]
            tier += ["--output", str(trace.parent)]
            parts.append(_run("fuzz", name, tier, board, "tier"))
        if engines.find(name).faults is not None:
            faults = _run("faults", name, ["--output", str(trace.parent)], board)
            parts.append(faults)
        return parts

    return job


def _run(command: str, engine: str | None, options: list[str], board: Board, of: str = "") -> Part:
    """One part in its own process, told on the board; `of` says which part of the engine."""
    name = " ".join(filter(None, (command, engine, of)))
    board.begin(name)
    part = replace(_part(command, engine, options), of=of)
    board.end(name, part.shown)
    return part


def _part(command: str, engine: str | None, options: list[str]) -> Part:
    arguments = [command, *options, *(["--engine", engine] if engine else []), "--json"]
    started = time.monotonic()
    try:
        call = [sys.executable, "-m", "kvclaims.checker.cli", *arguments]
        # Threads of engines that share cores wait for each other by turning round.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        ended = children.run(call, timeout=TIME_LIMIT_S, environment=environment)
    except subprocess.TimeoutExpired:
        error = f"took longer than {TIME_LIMIT_S} s"
        return Part(command, engine, Verdict.UNKNOWN, TIME_LIMIT_S, {}, error=error)
    seconds = time.monotonic() - started
    data = _result(ended.stdout)
    if data is None:
        verdict = Verdict.VIOLATED if engine else Verdict.UNKNOWN
        return Part(command, engine, verdict, seconds, {}, error=_death(ended))
    if ended.returncode == EXIT_WRONG_USE:
        error = str(data.get("error", "cannot run"))
        missing = error if engine and command == "litmus" else ""
        return Part(command, engine, Verdict.UNKNOWN, seconds, {}, missing, error)
    return Part(command, engine, Verdict(data["verdict"]), seconds, data)


def _result(stdout: str) -> Mapping[str, Any] | None:
    """The JSON object that a command prints; None if it died before."""
    try:
        data = json.loads(stdout)
    except json.JSONDecodeError:
        return None
    return data if isinstance(data, dict) and "verdict" in data else None


def _death(ended: subprocess.CompletedProcess[str]) -> str:
    how = f"ended with exit code {ended.returncode}"
    if ended.returncode < 0:
        how = f"was killed by {signal.Signals(-ended.returncode).name}"
    last = ended.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
    return f"the process {how}: {last[0]}"
