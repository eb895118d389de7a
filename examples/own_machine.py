"""A machine of one's own: blocks that are filled, promised, released and evicted.

    python examples/own_machine.py

It is declared once and read three ways: proved for any number of blocks, explored on four, and
broken on purpose, guard by guard.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvclaims.checker.explore import ExploreReport, explore_instance
from kvclaims.checker.finite import Instance
from kvclaims.checker.prove import prove_machine
from kvclaims.spec.language import (
    NAT,
    Action,
    Guard,
    Machine,
    Property,
    Sort,
    Symbol,
    Var,
    becomes,
    count,
    eq,
    every,
    without_guard,
)

BLOCK = Sort("Block")
b = Var("b", BLOCK)
x = Var("x", BLOCK)

# --- state

cached = Symbol("cached", (BLOCK,), meaning="the block holds content that can be found")
promised = Symbol("promised", (BLOCK,), meaning="somebody was promised that content")
owed = Symbol("owed", (), NAT, meaning="the engine's own count of its promises")

# --- actions

FILL = Action("fill", (b,), (), (becomes(cached(b), True),), "content is written into a block")
PROMISE = Action(
    "promise",
    (b,),
    (
        Guard(("P1",), cached(b), "the block holds content"),
        Guard(("B1",), ~promised(b), "it was not promised before"),
    ),
    (becomes(promised(b), True), becomes(owed(), owed() + 1)),
    "the content of a block is promised",
)
RELEASE = Action(
    "release",
    (b,),
    (Guard(("B1",), promised(b), "the block was promised"),),
    (becomes(promised(b), False), becomes(owed(), owed() - 1)),
    "a promise ends",
)
EVICT = Action(
    "evict",
    (b,),
    (Guard(("P1",), ~promised(b), "nobody was promised the block"),),
    (becomes(cached(b), False),),
    "a block loses its content",
)

# --- rules

KEPT = Property(
    "P1",
    "promises are kept",
    every(x, promised(x) >> cached(x)),
    "Whatever was promised is still cached.",
)
COUNTED = Property(
    "B1",
    "promises are counted",
    eq(owed(), count(x, promised(x))),
    "The count of promises is the number of promised blocks.",
)

SHELF = Machine(
    "shelf",
    "blocks that are filled, promised, released and evicted",
    (cached, promised, owed),
    (
        becomes(cached(x), False, (x,)),
        becomes(promised(x), False, (x,)),
        becomes(owed(), 0),
    ),
    (FILL, PROMISE, RELEASE, EVICT),
    (KEPT, COUNTED),
)

# --- three readings


def explored(machine: Machine) -> ExploreReport:
    """Every state of the machine on four blocks."""
    return explore_instance(Instance(machine, {"Block": 4}, limits={"owed": 4}), machine.name)


def twins(machine: Machine) -> Iterator[tuple[str, str]]:
    """Each guard left out in turn: what breaks, and whether it is what the guard declares."""
    for action in machine.actions:
        for index, guard in enumerate(action.guards):
            found = explored(without_guard(machine, action.name, index)).counterexamples
            broken = sorted({each.prop.rule for each in found})
            as_declared = "" if broken == sorted(guard.protects) else ", NOT AS DECLARED"
            fate = f"breaks {' '.join(broken) or 'nothing'}{as_declared}"
            yield action.name, f"{action.name} without “{guard.why}” {fate}"


def show(machine: Machine, *actions: Action) -> None:
    """All three readings; of proofs and twins those of some actions, or of all."""
    names = {action.name for action in actions}
    for each in prove_machine(machine):
        if not names or each.action in names:
            print(f"{each.rule} under {each.action}: {each.verdict}")
        for line in each.gap.lines() if each.gap else ():
            print(line)
    report = explored(machine)
    print(f"{report.states} states, {report.transitions} transitions: {report.verdict}")
    for shortest in report.counterexamples:
        print("\n".join(shortest.lines()))
    for action, line in twins(machine):
        if not names or action in names:
            print(line)


if __name__ == "__main__":
    show(SHELF)
