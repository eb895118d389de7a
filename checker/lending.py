"""A monitor for a pool part of which is lent: pool and elastic memory, stepping together.

Judges what `kvclaims.spec.composed` declares of the two: a lent block is handed out, found and held
only while it is mapped, the fence comes while the base covers every promise, nothing is drained
that a request holds or a lookup finds, hard claims lie in the base (E1 to E4, F2).  Steps on blocks
are taken from the allocator; only what the memory does by itself is taken from its own word.

The composed machine has the lent blocks in the pool's queue at all times, here as in an engine they
come into it and go: a pool has the blocks that may be handed out or are held, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from kvclaims.checker.monitor import Monitor, shown_step
from kvclaims.checker.stepcode import Compiler, Shadow, Step
from kvclaims.checker.verdicts import Violation
from kvclaims.spec import elastic, pool
from kvclaims.spec.composed import ELASTIC, POOL, RUNTIME
from kvclaims.spec.composition import Composition
from kvclaims.spec.interface import MemoryStep, PoolSnapshot, PoolStep, Reserve
from kvclaims.spec.language import (
    Action,
    Property,
    symbols_of,
)
from kvclaims.spec.vocabulary import Phase

HEARD: Final[Composition] = RUNTIME.only(POOL.name, ELASTIC.name)
"""Pool and elastic memory."""

_PROMISED: Final = ELASTIC.symbol(elastic.promised)
"""Not looked at: it counts blocks that two claims share twice, where an engine may count them once.
That hard claims fit the base is judged by headroom instead."""

ENGINE: Final = "(engine)"
"""Who holds blocks for the runtime itself, while it moves what nobody else holds."""

_MOVES: Final[Mapping[str, str]] = {
    **{name: name for name in ("admit", "take", "draw", "drop", "give_back", "register")},
    "share": "hit",
    "accept": "accept",
    "cover": "cover",
}
"""Allocator step → the move of the two; others are the pool's alone."""

_ENDS: Final = {
    Phase.RELEASED.value: "release",
    Phase.DEMOTED.value: "demote",
    Phase.EXPIRED.value: "expire",
}
_NAMED: Final = {"give_back": "fence", "drain": "drain", "done": "done", "touch": "dispatch"}
"""Step of the memory → the move; others have their own name."""

_HIT: Final = "hit"
"""The job that a hit starts.  Jobs in flight are told by the memory itself."""

_OF_EVENTS: Final = "T1"
_free: Final = ELASTIC.symbol(elastic.free)
_mode: Final = ELASTIC.symbol(elastic.mode)
_touches: Final = ELASTIC.symbol(elastic.touches)
_LENT: Final = elastic.MODE.values.index("lent")


class LendingMonitor(Monitor):
    """Judges a `Lender`: told its allocator's steps and, in between, those of its memory."""

    def __init__(self, snapshot: PoolSnapshot, reserve: Reserve) -> None:
        super().__init__(snapshot.facts, snapshot.null_block)
        self.reserve = frozenset(reserve.blocks)
        self.longest = reserve.longest
        self.memory_fired: dict[str, int] = {}
        self._whole = Shadow(HEARD.machine)
        for symbol in pool.POOL.symbols:
            self._whole.adopt(POOL.symbol(symbol), self.shadow.tables[symbol])
        self._whole.known |= {**self.shadow.known, pool.BLOCK: self.shadow.known[pool.BLOCK].copy()}
        self._compile_move = Compiler(self._whole).action
        self._moves: dict[str, Step] = {}
        term = Compiler(self._whole).term
        self._facts = [(prop, term(prop.formula)) for prop in _facts()]
        self._begin(reserve, snapshot.null_block)
        self._come_and_go()
        self.introduce(pool.REQUEST, ENGINE, True)
        self.shadow.set(pool.active, (ENGINE,), True)

    def __call__(self, step: PoolStep) -> None:
        name = _ENDS[step.args["how"]] if step.action == "finish" else _MOVES.get(step.action)
        if name is not None:
            args = {**step.args, "size": step.args.get("n"), "j": _HIT}
            self._move(name, args, shown_step(step))
            self._whole.set(_touches, (_HIT, step.args.get("b")), False)
        super().__call__(step)
        self._come_and_go()

    def memory(self, step: MemoryStep) -> None:
        """Take one step of the memory."""
        self.memory_fired[step.action] = self.memory_fired.get(step.action, 0) + 1
        name = _NAMED.get(step.action, f"{ELASTIC.name}_{step.action}")
        shown = f"{step.action}({', '.join(str(v) for v in step.args.values())})"
        self._move(name, step.args, shown)
        self._come_and_go()

    def audit(self, snapshot: PoolSnapshot) -> None:
        """The whole pool, and what holds of pool and memory together."""
        super().audit(snapshot)
        for prop, holds in self._facts:
            if not holds({}):
                self.violations.append(
                    Violation(prop.rule, f"not so: {prop.meaning}", "deep audit")
                )

    # -- what others ask

    @property
    def is_lent(self) -> bool:
        return bool(self._whole.get(_mode, ()) == _LENT)

    @property
    def headroom(self) -> int:
        """Free blocks of the base less every promise and grant: what hard claims count on (E3)."""
        get = self.shadow.tables
        free = sum(place[0] not in self.reserve for place in get[pool.queued].values)
        return int(free - get[pool.reserve].total - get[pool.owed].total)

    @property
    def lent_free(self) -> int:
        """Lent blocks that may be handed out."""
        queued = self.shadow.values[pool.queued]
        return sum((b,) in queued for b in self.reserve)

    @property
    def lent_held(self) -> int:
        """Lent blocks that requests hold."""
        return len({b for _, b in self.shadow.values[pool.held] if b in self.reserve})

    def in_base(self) -> dict[str, int]:
        """Every content that lies in the base, with the block it was first found in there."""
        found: dict[str, int] = {}
        for content, block in self.shadow.values[pool.entry]:
            if block not in self.reserve:
                found.setdefault(content, block)
        return found

    # -- parts

    def _begin(self, reserve: Reserve, null_block: int | None) -> None:
        whole = self._whole
        for layer in range(reserve.layers):
            whole.meet(elastic.LAYER, layer)
            whole.set(ELASTIC.symbol(elastic.act_mapped), (layer,), True)
            whole.set(ELASTIC.symbol(elastic.act_access), (layer,), True)
        for block in self._whole.known[pool.BLOCK]:
            if block in self.reserve:
                whole.set(elastic.lent, (block,), True)
            elif block != null_block:
                whole.set(_free, (block,), True)

    def _move(self, name: str, args: Mapping[str, Any], where: str) -> None:
        move = self._moves.get(name)
        if move is None:
            move = self._moves[name] = self._compile_move(_own(name))
        values = [args.get(param.name) for param in move.action.params]
        for number in move.broken(*values):
            guard = move.action.guards[number]
            self.violations.append(Violation(guard.protects[0], f"not so: {guard.why}", where))
        for table, place, value in move.changes(*values):
            table.set(place, value)

    def _come_and_go(self) -> None:
        """A lent block that nobody holds is in the pool exactly while it may be handed out."""
        shadow, there = self.shadow, self._whole.values[_free]
        for block in self.reserve:
            place = (block,)
            queued, is_there = bool(shadow.get(pool.queued, place)), place in there
            if shadow.get(pool.ref, place) == 0 and queued != is_there:
                shadow.set(pool.queued, place, is_there)
                shadow.set(pool.free, (), shadow.get(pool.free, ()) + is_there - queued)
            if is_there or shadow.get(pool.ref, place):
                shadow.known[pool.BLOCK].setdefault(block)
            else:
                shadow.known[pool.BLOCK].pop(block, None)

    def _compare(self, step: PoolStep) -> None:
        self._come_and_go()
        super()._compare(step)


@cache
def _own(name: str) -> Action:
    """The move without what the monitor does by itself, and without the event that tells of it."""
    action = HEARD.machine.action(name)
    apart = {POOL.symbol(symbol) for symbol in pool.POOL.symbols} | {_PROMISED}
    return replace(
        action,
        guards=tuple(
            guard
            for guard in action.guards
            if guard.part != POOL.name
            and _OF_EVENTS not in guard.protects
            and _PROMISED not in symbols_of(guard.condition)
        ),
        updates=tuple(u for u in action.updates if u.target.symbol not in apart),
    )


@cache
def _facts() -> tuple[Property, ...]:
    """What holds of pool and memory in every state."""
    memory = set(map(ELASTIC.symbol, elastic.ELASTIC.symbols)) - {_PROMISED}
    of_memory = map(ELASTIC.property, elastic.PROPERTIES)
    return tuple(
        prop
        for prop in (*HEARD.properties, *of_memory)
        if not prop.of_steps
        and symbols_of(prop.formula) & memory
        and _PROMISED not in symbols_of(prop.formula)
    )
