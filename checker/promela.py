"""A finite instance as Promela, so that SPIN counts the same states from the same declaration.

One process repeats guarded steps, each indivisible; a slot is one byte that holds the distance
from its domain's lower bound.  Where several slots change at once the new values are put aside
first, in variables that are zero again after the step.  Properties are asserted in every step,
invariants after it.  A first step chooses the initial state, so that SPIN counts one state more
than there are, and a transition for each initial state and one more; `count_with_spin` takes
them off again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclaims.checker.finite import Instance, State, initial_states
from kvclaims.checker.grounded import Grounded, Node, Step, Value, ground
from kvclaims.spec.interface import BadOperation


@dataclass(frozen=True)
class SpinCount:
    """What SPIN found: states and transitions as this checker counts them, time of the search
    alone, and of everything with translation and compilation."""

    states: int
    transitions: int
    errors: int
    seconds: float
    whole_seconds: float
    version: str


def promela(instance: Instance, *, check: bool = True) -> str:
    """The instance as Promela; without `check` nothing is asserted.

    Raises BadOperation where a counter has no bounds or a domain has more than 256 values.
    """
    return "\n".join(_lines(ground(instance), initial_states(instance), check)) + "\n"


def _lines(grounded: Grounded, initial: Sequence[State], check: bool) -> Iterator[str]:
    machine = grounded.instance.machine
    yield f"/* {machine.name}: {machine.meaning} */"
    for i, slot in enumerate(grounded.slots):
        if slot.size > 256:
            raise BadOperation(f"{slot.name} has {slot.size} values, a byte holds 256")
        yield f"byte s{i}; /* {slot.name} - ({slot.lo}) */"
    for i in range(max((len(step.changes) for step in grounded.steps), default=0)):
        yield f"byte n{i};"
    yield "bit started;"
    yield "active proctype machine() {"
    yield "end:"
    yield "  do"
    sound = grounded.invariant if check else 1
    asserted = "" if sound == 1 else f"assert({_write(grounded, sound)}); "
    for state in initial:
        values = zip(grounded.slots, state, strict=True)
        sets = "".join(f"s{i} = {v - slot.lo}; " for i, (slot, v) in enumerate(values))
        yield f"  :: d_step {{ !started -> started = 1; {sets}{asserted}}}"
    for step in grounded.steps:
        yield from _step(grounded, step, check, asserted)
    yield "  od"
    yield "}"


def _step(grounded: Grounded, step: Step, check: bool, asserted: str) -> Iterator[str]:
    fine = [v for v in (step.inside, step.kept if check else 1) if v != 1]
    asserts = "".join(f"assert({_write(grounded, v)}); " for v in fine)
    values = [
        (slot, _less(_write(grounded, new), grounded.slots[slot].lo)) for slot, new in step.changes
    ]
    if len(values) == 1 or all(isinstance(new, int) for _, new in step.changes):
        sets = "".join(f"s{slot} = {code}; " for slot, code in values)
    else:
        sets = "".join(f"n{i} = {code}; " for i, (_, code) in enumerate(values))
        sets += "".join(f"s{slot} = n{i}; " for i, (slot, _) in enumerate(values))
        sets += "".join(f"n{i} = 0; " for i in range(len(values)))
    guard = _write(grounded, step.guard)
    yield f"  :: d_step {{ started && {guard} -> {asserts}{sets}{asserted}}} /* {step.action} */"


def _less(code: str, lo: int) -> str:
    return f"{code} - ({lo})" if lo else code


def _write(grounded: Grounded, value: Value) -> str:
    if isinstance(value, int):
        return str(value)
    return _node(grounded, value)


def _node(grounded: Grounded, node: Node) -> str:
    args: Any = node.args

    def code(value: Value) -> str:
        return _write(grounded, value)

    match node.kind:
        case "slot":
            lo = grounded.slots[args[0]].lo
            return f"(s{args[0]} + ({lo}))" if lo else f"s{args[0]}"
        case "in":
            slot, values = args
            places = [p for p in range(grounded.slots[slot].size) if values >> p & 1]
            return f"({' || '.join(f's{slot} == {place}' for place in places)})"
        case "not":
            return f"(!{code(args[0])})"
        case "and" | "or":
            sign = " && " if node.kind == "and" else " || "
            return f"({sign.join(map(code, args))})"
        case "sum":
            return f"({' + '.join(f'({factor}) * {code(part)}' for factor, part in args)})"
        case "plus":
            return f"({code(args[0])} + ({args[1]}))"
        case "le" | "eq":
            return f"({code(args[0])} {'<=' if node.kind == 'le' else '=='} {args[1]})"
        case "if":
            condition, then, otherwise = map(code, args)
            return f"({condition} -> {then} : {otherwise})"
    raise TypeError(f"not a node: {node!r}")


def spin() -> str | None:
    """Where SPIN is, if it and a C compiler are there."""
    return shutil.which("spin") if shutil.which("gcc") else None


def count_with_spin(
    instance: Instance,
    *,
    breadth_first: bool = False,
    check: bool = False,
    memory: int = 8192,
    optimized: bool = True,
) -> SpinCount:
    """Have SPIN cover the instance, without any reduction; `memory` in MB.

    Without `optimized` its C is compiled as fast as can be, which pays on small instances.

    Raises BadOperation without SPIN and gcc, and where SPIN did not finish.
    """
    program = spin()
    if program is None:
        raise BadOperation("needs spin and gcc (on Debian or Ubuntu: apt install spin gcc)")
    start = time.perf_counter()
    options = ["-DSAFETY", "-DNOREDUCE", "-DNOFAIR", "-DNOCLAIM", f"-DMEMLIM={memory}"]
    if breadth_first:
        options += ["-DBFS"]
    with tempfile.TemporaryDirectory() as place:
        Path(place, "machine.pml").write_text(promela(instance, check=check), encoding="utf-8")
        version = _run([program, "-V"], place)
        _run([program, "-o2", "-a", "machine.pml"], place)  # keeps variables that nothing reads
        _run(["gcc", "-O2" if optimized else "-O0", "-w", *options, "-o", "pan", "pan.c"], place)
        said, seconds = _search(place)
    return SpinCount(
        states=_number(r"(\d+) states, stored", said) - 1,
        transitions=_number(r"(\d+) transitions", said) - 1 - len(initial_states(instance)),
        errors=_number(r"errors: (\d+)", said),
        seconds=seconds,
        whole_seconds=time.perf_counter() - start,
        version=version.removeprefix("Spin Version ").split(" ")[0],
    )


def _search(place: str) -> tuple[str, float]:
    """What the search said, and its seconds; a stack that was too small is made larger."""
    depth = 100_000
    while True:
        begun = time.perf_counter()
        said = _run(["./pan", f"-m{depth}", "-w22", "-n"], place)
        if "max search depth too small" not in said:
            return said, time.perf_counter() - begun
        depth *= 10


def _run(command: Sequence[str], place: str) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadOperation(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout.strip()


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise BadOperation(f"SPIN did not say what was expected: {text[-500:]}")
    return int(found[1])
