"""What finds mutants of an engine: our checks, and the engine's own tests.

    .venv/bin/python tools/detection.py ours [--limit N] [--operations N] [--seconds S]
    .venv/bin/python tools/detection.py theirs --tests DIR [--limit N] [--seconds S]
    .venv/bin/python tools/detection.py clean [--seeds N] [--operations N] [--engine-path DIR]
    .venv/bin/python tools/detection.py faults | reach | page

Every result is a line in a file, written as soon as it is known; a later run does what is
missing.  A mutant that lives is tried again where a larger budget is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import coverage

from kvclaims.checker import detection, detectionpage, engines
from kvclaims.checker.baseline import KnownFinding
from kvclaims.checker.enginemutants import places_of, sample
from kvclaims.checker.faults import faults_of
from kvclaims.checker.supervise import warm_up
from kvclaims.spec.interface import Engine

ROOT: Final = Path(__file__).resolve().parents[1]
ENGINE: Final = "vllm"
RESULTS: Final = ROOT / "docs" / "detection.jsonl"
PAGE: Final = ROOT / "docs" / "detection.md"
SEEDS: Final = 10
CLEAN_OPERATIONS: Final = 1500
"""Seeds of fuzzing on the engine as it is, and operations of each."""
SCRATCH: Final = ROOT / "build" / "detection"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("ours", "theirs", "clean", "faults", "reach", "page"))
    parser.add_argument("--engine-path", type=Path, help="where another version lies, for clean")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of clean: 0 up to before this")
    parser.add_argument("--limit", type=int, help="mutants to run at most")
    parser.add_argument("--operations", type=int)
    parser.add_argument("--seconds", type=float, help="leave off after so many")
    parser.add_argument("--tests", type=Path, help="a source distribution with the engine's tests")
    parser.add_argument("--junit", type=Path, help="an earlier run of these tests, not measured")
    parser.add_argument("--tests-seconds", type=int, help="only the quickest tests, so many s")
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        help="our checks once more on what lives and has this in its name: they have grown",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.operations is None:
        given.operations = CLEAN_OPERATIONS if given.what == "clean" else detection.OPERATIONS
    if given.jobs > 1:
        return spread(given.jobs)
    doing = {
        "ours": ours,
        "theirs": theirs,
        "clean": clean,
        "faults": planted,
        "reach": reach,
        "page": page,
    }
    return doing[given.what](given)


def spread(jobs: int) -> int:
    """The same command in several processes, each with its share of the mutants."""
    rest = [a for i, a in enumerate(sys.argv[1:]) if not _is_jobs(i)]
    started = [
        subprocess.Popen([sys.executable, __file__, *rest, "--share", f"{i}/{jobs}"])
        for i in range(jobs)
    ]
    return max(process.wait() for process in started)


def _is_jobs(index: int) -> bool:
    arguments = sys.argv[1:]
    return arguments[index].startswith("--jobs") or (index > 0 and arguments[index - 1] == "--jobs")


def drawn() -> tuple[detection.Drawn, str]:
    """The sample of the installed engine, kept between runs, and the engine's version."""
    engine, info = engines.ready(ENGINE)
    kept = SCRATCH / f"sample-{info.version}.json"
    places = places_of(engine)
    found = detection.Drawn.read(kept, places)
    if found is None:
        mutants, total = sample(places, Path(info.path).parent)
        found = detection.Drawn(mutants, total)
        found.write(kept, places)
    return found, info.version


def ours(given: argparse.Namespace) -> int:
    engine, info = engines.ready(ENGINE)
    results = detection.Results(RESULTS, info.version)
    mutants = drawn()[0].mutants
    warm_up(engine, engine.block_size)
    known = detection.known_findings(engine)
    if given.again:
        return once_more(given, engine, known, results)
    clean = detection.judge_clean(engine, known, given.operations, results)
    if clean.by:
        print(f"the engine as it is: {clean.by}: {clean.detail}")
        return 1
    for stage in detection.stages(given.operations):
        for line in detection.pass_over(mutants, stage.effort, Path(info.path).parent, results):
            print(line)
        waiting = [m for m in mutants if results.wants("ours", m, stage.effort)]
        waiting.sort(key=lambda m: not (results.last("theirs", m.name) or {"by": ""})["by"])
        for mutant in detection.share(waiting, given.share)[: given.limit]:
            if given.seconds and time.monotonic() - STARTED > given.seconds:
                return 0
            print(detection.judge(mutant, engine, known, stage, results), flush=True)
    return 0


def once_more(
    given: argparse.Namespace,
    engine: Engine,
    known: tuple[KnownFinding, ...],
    results: detection.Results,
) -> int:
    """All our checks on the engine as it is, and on mutants of these names that live."""
    stage = detection.whole(given.operations)
    print(detection.judge(None, engine, known, stage, results), flush=True)
    for mutant in drawn()[0].mutants:
        row = results.last("ours", mutant.name)
        lives = row is not None and not row["by"]
        if lives and any(text in mutant.name for text in given.again):
            print(detection.judge(mutant, engine, known, stage, results), flush=True)
    return 0


def theirs(given: argparse.Namespace) -> int:
    """The engine's own tests, in a pytest that forks for each mutant (`enginetests`)."""
    if given.tests is None:
        print("give the folder of a source distribution: --tests DIR")
        return 2
    _, version = drawn()
    job = {
        "results": str(RESULTS),
        "baseline": str(SCRATCH / f"tests-{version}.json"),
        "sample": str(SCRATCH / f"sample-{version}.json"),
        "version": version,
        "limit": given.limit,
        "share": given.share,
        "seconds": given.seconds,
        "tests_s": given.tests_seconds,
        "junit": given.junit and str(given.junit.resolve()),
    }
    environment = {
        **os.environ,
        "KVCLAIMS_ENGINE_TESTS": json.dumps(job),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:timeout", "-p", "no:xdist", "-p", "enginetests", "--tb=no"]
    command += ["--continue-on-collection-errors", f"--rootdir={given.tests}"]
    files = [str(f) for f in detection.test_files(given.tests)]
    work = SCRATCH / "models"
    detection.write_models(work)
    return subprocess.run([*command, *files], cwd=work, env=environment, check=False).returncode


def clean(given: argparse.Namespace) -> int:
    """The engine as it is, the installed one or the one that `--engine-path` names, by seeds."""
    if given.engine_path is not None and engines.given_path() is None:
        folder = str(given.engine_path.resolve())
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, engines.PATH_VARIABLE: folder}
        again = [sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(again, env=environment, check=False).returncode
    engine, info = engines.ready(ENGINE)
    results = detection.Results(RESULTS, info.version)
    kept = SCRATCH / f"clean-{info.version}"
    seeds = range(given.seeds)
    for line in detection.fuzz_clean(engine, results, seeds, given.operations, kept):
        print(line, flush=True)
    rows = [results.last(detection.CLEAN, detection.seed_name(seed)) for seed in seeds]
    return int(any(row is None or row["by"] for row in rows))


def planted(given: argparse.Namespace) -> int:
    """Every planted fault, by its own program and by fuzzing alone."""
    engine, info = engines.ready(ENGINE)
    warm_up(engine, engine.block_size)
    results = detection.Results(RESULTS, info.version)
    for line in detection.hunt_faults(engine, results, given.operations, given.limit):
        print(line, flush=True)
    return 0


def reach(given: argparse.Namespace) -> int:
    """Which lines of the engine our checks get to."""
    engine, info = engines.ready(ENGINE)
    results = detection.Results(RESULTS, info.version)
    row = results.last("reach", detection.CONTROL)
    if row is not None and row["effort"] >= given.operations and not given.again:
        return 0
    warm_up(engine, engine.block_size)
    paths = sorted({mutant.path for mutant in drawn()[0].mutants})
    cover = coverage.Coverage(data_file=None, include=[f"*/{path}" for path in paths])
    cover.start()
    known = detection.known_findings(engine)
    answer = detection.check(engine, known, detection.stages(given.operations))
    cover.stop()
    data = cover.get_data()
    lines = {
        path: sorted(data.lines(file) or ())
        for file in data.measured_files()
        for path in paths
        if file.endswith(path)
    }
    results.put("reach", detection.CONTROL, given.operations, answer, 0, lines=lines)
    return 0


def page(_: argparse.Namespace) -> int:
    found, version = drawn()
    engine, info = engines.ready(ENGINE)
    reference = engines.find(engines.REFERENCE)
    planted = {e.name: faults_of(e) for e in (engine, reference)}
    findings = {finding.name: finding.rule for finding in detection.known_findings(engine)}
    results = detection.Results(RESULTS, version)
    root = Path(info.path).parent
    assert engine.faults is not None
    reasons = detectionpage.read_reasons(engine.faults.with_name(detectionpage.WHY), found)
    told = detectionpage.page(found, results, root, planted, findings, reasons)
    PAGE.write_text(told, encoding="utf-8")
    return 0


STARTED: Final = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
