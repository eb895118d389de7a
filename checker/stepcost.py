"""What a step costs the monitor: instructions of its text, in a small pool and in a larger one.

A step costs what it touches and not what the pool holds.  Refusals count once what is queued or
covered; what is held beside that costs nothing either.
"""

from __future__ import annotations

import sys
from itertools import count
from types import FrameType
from typing import Any, Final

from kvclaims.checker.behaviour import HEARD
from kvclaims.checker.monitor import Monitor
from kvclaims.checker.stepcode import ORIGIN, Compiler, Shadow
from kvclaims.spec import claims, pool
from kvclaims.spec.composed import CLAIMS
from kvclaims.spec.interface import PoolStep
from kvclaims.spec.vocabulary import Phase

Told = tuple[Any, ...]

_GROUP: Final = 10
"""How much more there is in the larger pool."""

COUNTING: Final = frozenset({"turn_away"})
"""Steps that count what is queued or covered."""

_ACCEPTED: Final = claims.PHASE.values.index(Phase.ACCEPTED)

_A_LIFE: Final[tuple[Told, ...]] = (
    *(("admit", "r", 1), ("take", "r", 1), ("register", "r", 1, "A"), ("drop", "r", 1)),
    *(("retire", "r"), ("submit", "c"), ("accept", "c", 1), ("cover", "c", 1, True)),
    *(("materialize", "c"), ("admit", "r", 0), ("share", "r", 1, "A"), ("drop", "r", 1)),
    *(("finish", "c", "released"), ("uncover", "c", 1), ("evict", 1, "A")),
    *(("submit", "d"), ("accept", "d", 1), ("draw", "r", "d", 2), ("give_back", "r", "d", 2)),
    *(("draw", "r", "d", 2), ("register", "r", 2, "B"), ("cover", "d", 2, False)),
    *(("drop", "r", 2), ("materialize", "d"), ("lose", 2, "B"), ("uncover", "d", 2)),
    *(("admit", "r", 1), ("take", "r", 1), ("register", "r", 1, "A"), ("drop", "r", 1)),
    *(("submit", "e"), ("accept", "e", 1), ("cover", "e", 1, True), ("lose", 1, "A")),
    *(("forsake", "e", 1), ("finish", "e", "expired"), ("submit", "f"), ("refuse", "f")),
    *(("admit", "r", 1), ("take", "r", 3), ("register", "r", 3, "C"), ("drop", "r", 3)),
    *(("submit", "soft"), ("accept", "soft", 0), ("cover", "soft", 3, False)),
    *(("materialize", "soft"), ("evict", 3, "C"), ("retire", "r")),
)
"""Every step of blocks 1 to 3 and of who uses them; what is refused comes after it."""


def check_cost() -> str | None:
    """Which step costs more where the pool holds more, though it touches no more; None if none."""
    if (cost := tick_costs(_GROUP)) != (wanted := tick_costs(1)):
        return f"tick: {cost} instructions, not {wanted}, where more claims have no duration"
    small, much = costs(1, 1, 1), costs(_GROUP, 1, 1)
    more = costs(_GROUP, _GROUP, _GROUP)
    for step, cost in small.items():
        if much[step] != cost:
            return f"{step}: {much[step]} instructions, not {cost}, where more is held"
        if more[step] != cost and step[1] not in COUNTING:
            return f"{step}: {more[step]} instructions, not {cost}, where more is there"
    return None


def costs(held: int, covered: int, free: int) -> dict[tuple[int, str], int]:
    """Instructions for each step of a life, by its number and action, in a pool that holds so
    much beside it.  Raises AssertionError where the monitor objects to one."""
    usable = 3 + held + 2 * covered + free
    watching = Monitor(range(usable + 1), null_block=0)
    _introduce(watching, ("r", "w", "v", "u"), ("c", "d", "e", "f"), ("soft",))
    blocks = count(4)
    for _ in range(held):
        _hold(watching, next(blocks))
    for _ in range(covered):
        _cover(watching, next(blocks), hard=True)
        _cover(watching, next(blocks), hard=False)
    refused = (("turn_away", "w", usable), ("defer", "v", usable), ("overflow", "u", usable + 1))
    found = {}
    for number, told in enumerate((*_A_LIFE, *refused)):
        with _Instructions() as counted:
            _tell(watching, told)
        found[number, told[0]] = counted.count
    if watching.violations:
        raise AssertionError(f"the monitor objects to a lawful life: {watching.violations[0]}")
    return found


def tick_costs(timeless: int) -> int:
    """Instructions of one unit of time, which one claim has left, beside so many without end; all
    of them were accepted."""
    machine = HEARD.machine
    shadow = Shadow(machine)
    for i in range(1 + timeless):
        shadow.meet(claims.CLAIM, f"c{i}")
        shadow.set(CLAIMS.symbol(claims.phase), (f"c{i}",), _ACCEPTED)
    shadow.set(CLAIMS.symbol(claims.left), ("c0",), 2)
    step = Compiler(shadow).action(machine.action("tick"))
    with _Instructions() as counted:
        if step.broken(0):
            raise AssertionError("time may not pass, though every claim is decided")
        step.changes(0)
    return counted.count


def _introduce(
    watching: Monitor, requests: tuple[str, ...], hard: tuple[str, ...], soft: tuple[str, ...]
) -> None:
    for name in requests:
        watching.introduce(pool.REQUEST, name, True)
    for name in (*hard, *soft):
        watching.introduce(claims.CLAIM, name, name in hard)


def _hold(watching: Monitor, block: int) -> None:
    """A request of its own computes and holds the block."""
    name = f"holder of {block}"
    _introduce(watching, (name,), (), ())
    _tell(watching, ("admit", name, 1), ("take", name, block))
    _tell(watching, ("register", name, block, f"content of {block}"))


def _cover(watching: Monitor, block: int, *, hard: bool) -> None:
    """A claim of its own covers the block, which nobody holds any more."""
    _hold(watching, block)
    holder, claim = f"holder of {block}", f"claim on {block}"
    _tell(watching, ("drop", holder, block), ("retire", holder))
    _introduce(watching, (), (claim,) if hard else (), () if hard else (claim,))
    _tell(watching, ("submit", claim), ("accept", claim, int(hard)))
    _tell(watching, ("cover", claim, block, hard), ("materialize", claim))


def _tell(watching: Monitor, *told: Told) -> None:
    for name, *args in told:
        params = pool.POOL.action(name).params
        watching(PoolStep(name, dict(zip((p.name for p in params), args, strict=True))))


class _Instructions:
    """Counts the instructions of text made from declarations while it is entered."""

    count = 0

    def __enter__(self) -> _Instructions:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename != ORIGIN:
            return None
        frame.f_trace_opcodes = True
        return self._inside

    def _inside(self, _frame: FrameType, event: str, _arg: object) -> Any:
        self.count += event == "opcode"
        return self._inside
