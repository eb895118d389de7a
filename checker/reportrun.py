"""A counterexample run again for a report, with everything that was told and seen on the way.

It runs in a process of its own: an engine that dies takes no report with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvclaims.checker.counterexample import Counterexample, read
from kvclaims.checker.reporttimeline import Operation
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.telemetry import Event, TraceError, parse_event
from kvclaims.spec.vocabulary import RULES

TIME_LIMIT_S: Final = 300


@dataclass(frozen=True)
class Recorded:
    """What a run told.  `operations` begin with the opening of the pool."""

    engine: str
    events: tuple[Event, ...]
    operations: tuple[Operation, ...]
    findings: tuple[Violation, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "events": [event.to_json() for event in self.events],
            "operations": [
                [o.text, o.events, None if o.resident is None else sorted(o.resident)]
                for o in self.operations
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }


def record(example: Counterexample, engine: str | None = None) -> Recorded:
    """Run the operations under a supervisor until one breaks a rule, in this process."""
    from kvclaims.checker import engines, faults
    from kvclaims.checker.supervise import Crash, open_supervised, oracle_for

    found, info = engines.ready(engine or example.engine)
    name = f"{info.name} {info.version}"
    planted: AbstractContextManager[None] = nullcontext()
    if example.fault is not None:
        planted = faults.planted(faults.named(example.fault, found), found)
    with planted:
        try:
            supervisor = open_supervised(found, oracle_for(found), example.program.config)
        except Crash as crash:
            return Recorded(name, (), (), (Violation("B9", str(crash), operation=0),))
        done = [_seen("the pool is opened", supervisor)]
        for operation in example.program.operations:
            if supervisor.findings or not supervisor.is_alive:
                break
            supervisor.do(operation)
            done.append(_seen(str(operation), supervisor))
        events = tuple(supervisor.runtime.events())
        if not supervisor.findings:
            supervisor.close()
            events = tuple(supervisor.runtime.events())
    return Recorded(name, events, tuple(done), tuple(supervisor.findings))


def _seen(text: str, supervisor: Any) -> Operation:
    resident = frozenset(supervisor.seen.resident.values())
    return Operation(text, supervisor.events, resident if supervisor.is_alive else None)


def again(file: Path, engine: str | None = None) -> Recorded:
    """Run a counterexample file again.  `EngineMissing` where its engine cannot run here,
    `BadOperation` where the process ends without an answer; the message says why."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "run.json"
        command = [sys.executable, "-m", "kvclaims.checker.reportrun", str(file), str(answer)]
        try:
            ended = subprocess.run(
                [*command, *([engine] if engine else [])],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BadOperation(f"it ran longer than {TIME_LIMIT_S} s") from None
        if not answer.is_file():
            last = (ended.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            raise BadOperation(f"the process ended with exit code {ended.returncode}: {last}")
        told = json.loads(answer.read_text(encoding="utf-8"))
    if "missing" in told:
        raise EngineMissing(told["missing"])
    if "error" in told:
        raise BadOperation(told["error"])
    return _recorded(told)


def _recorded(told: Mapping[str, Any]) -> Recorded:
    return Recorded(
        told["engine"],
        tuple(parse_event(line) for line in told["events"]),
        tuple(
            Operation(text, events, None if resident is None else frozenset(resident))
            for text, events, resident in told["operations"]
        ),
        tuple(violation_of(finding) for finding in told["findings"]),
    )


def violation_of(raw: Mapping[str, Any]) -> Violation:
    """A violation as commands print it; `BadOperation` for a rule that the contract lacks."""
    if raw.get("rule") not in RULES:
        raise BadOperation(f"a violation of no known rule: {raw.get('rule')!r}")
    return Violation(
        rule=raw["rule"],
        message=str(raw.get("message") or raw.get("property") or ""),
        step=raw.get("step") or "",
        before=raw.get("before") or {},
        after=raw.get("after") or {},
        run_id=raw.get("run_id") or "",
        seq=raw.get("seq"),
        operation=raw.get("operation"),
    )


def main(arguments: Sequence[str]) -> None:
    """FILE OUT [ENGINE]: run FILE again and write what was told to OUT as one JSON object."""
    file, out, *engine = arguments
    try:
        told = record(read(Path(file)), *engine).to_json()
    except EngineMissing as error:
        told = {"missing": str(error)}
    except (BadOperation, TraceError) as error:
        told = {"error": str(error)}
    Path(out).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
