"""A monitor: an engine's steps judged by the declared machine, over a shadow state.

`kvclaims.checker.stepcode` compiles guards and updates of `kvclaims.spec.pool` over a sparse
shadow state with an index for each place of each relation, so that a step costs what it touches
and not what the pool holds (refusals and deferrals count what is queued or covered once).  The
invariants need no look at run time: `kvclaims prove` shows that every step whose guards hold
keeps them.  What the engine says of the touched blocks is compared with the shadow, and `audit`
compares the whole pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvclaims.checker.stepcode import Compiler, Shadow, Step
from kvclaims.checker.verdicts import Violation
from kvclaims.spec import claims, pool
from kvclaims.spec.interface import BlockFacts, PoolSnapshot, PoolStep
from kvclaims.spec.language import Sort

_ACTIONS: Final = {action.name: action for action in pool.ACTIONS}


class Monitor:
    """Judges the steps of one runtime.  `violations` collects what was found, in order.

    `blocks` are the usable block ids, all free and blank; `null_block` is the one nobody may
    use.  Claims and requests introduce themselves through `introduce`.
    """

    def __init__(self, blocks: Iterable[int], null_block: int | None = None) -> None:
        self.shadow = Shadow(pool.POOL)
        self.violations: list[Violation] = []
        self.steps = 0
        self.fired: dict[str, int] = dict.fromkeys(_ACTIONS, 0)
        self._compiler = Compiler(self.shadow)
        self._compiled: dict[str, Step] = {}
        self._taking: PoolStep
        tables = self.shadow.tables
        self._ref, self._queued = tables[pool.ref], tables[pool.queued]
        self._free, self._keys = tables[pool.free], tables[pool.key].by(0)
        everything = [b for b in blocks if b != null_block]
        for block in everything:
            self.shadow.meet(pool.BLOCK, block)
            self.shadow.set(pool.queued, (block,), True)
        if null_block is not None:
            self.shadow.meet(pool.BLOCK, null_block)
            self.shadow.set(pool.null, (null_block,), True)
        self.shadow.set(pool.free, (), len(everything))

    def introduce(self, sort: Sort, element: str, flag: bool) -> None:
        """Say of a claim whether it is hard, of a request whether it admits reuse."""
        symbol = claims.hard if sort == claims.CLAIM else pool.admit_reuse
        self.shadow.meet(sort, element)
        self.shadow.set(symbol, (element,), flag)

    def __call__(self, step: PoolStep) -> None:
        """Take one step: guards, updates, then the engine's facts against the shadow."""
        action, args, facts, free = step
        self.steps += 1
        self.fired[action] += 1
        compiled = self._compiled.get(action) or self._compile(action)
        self._taking = step
        compiled.take(args, self._report)
        if facts or free is not None:
            self._compare(step)

    def _compile(self, action: str) -> Step:
        """The action over this shadow, when it is first taken."""
        self._compiled[action] = self._compiler.action(_ACTIONS[action])
        return self._compiled[action]

    def audit(self, snapshot: PoolSnapshot) -> None:
        """Compare the whole pool with the shadow, and the pool with itself (B1 to B3, B6)."""
        self._audit_queue(snapshot)
        for block, facts in snapshot.facts.items():
            self._compare_block(None, block, facts)
        holders = {(request, block) for request, held in snapshot.holders.items() for block in held}
        self._same("B2", "holders", holders, set(self.shadow.values[pool.held]))
        hard = self.shadow.values[claims.hard]
        pins = {place for place in self.shadow.values[pool.covers] if (place[0],) in hard}
        named = {(claim, block) for claim, held in snapshot.pins.items() for block in held}
        self._same("B2", "pins", named, pins)
        found = {(content, b) for content, blocks in snapshot.lookup.items() for b in blocks}
        self._same("B3", "lookup", found, set(self.shadow.values[pool.entry]))

    # -- comparing

    def _compare(self, step: PoolStep) -> None:
        for block, facts in step.facts.items():
            self._compare_block(step, block, facts)
        free = self._free.values.get((), 0)
        if step.free is not None and step.free != free:
            self._differ("B1", "the free counter", step, free, step.free)

    def _compare_block(self, where: PoolStep | None, block: int, facts: BlockFacts) -> None:
        place = (block,)
        ref = self._ref.values.get(place, 0)
        if ref != facts.ref:
            self._differ("B2", f"ref of block {block}", where, ref, facts.ref)
        queued = place in self._queued.values
        if queued != facts.queued:
            self._differ("B1", f"queued of block {block}", where, queued, facts.queued)
        carried, found = self._keys.get(block, ()), facts.keys
        if carried or found:
            keys = {key for _, key in carried}
            if keys != set(found):
                self._differ("B3", f"keys of block {block}", where, keys, set(found))

    def _audit_queue(self, snapshot: PoolSnapshot) -> None:
        queue = list(snapshot.queue)
        if len(set(queue)) != len(queue):
            self._differ("B1", "the free queue", None, "distinct blocks", queue)
        if len(queue) != snapshot.counter:
            self._differ("B1", "the queue's counter", None, len(queue), snapshot.counter)
        if snapshot.null_block in queue:
            self._differ("B6", "the null block", None, "not in the queue", "queued")

    def _same(self, rule: str, what: str, found: set[Any], expected: set[Any]) -> None:
        if found != expected:
            extra, missing = sorted(found - expected), sorted(expected - found)
            self._differ(rule, what, None, f"also {missing}", f"also {extra}")

    def _differ(
        self, rule: str, what: str, where: PoolStep | None, expected: Any, found: Any
    ) -> None:
        """Report a difference after a step, or in an audit of the whole pool."""
        self.violations.append(
            Violation(
                rule,
                f"{what}: the machine says {_plain(expected)}, the engine {_plain(found)}",
                "deep audit" if where is None else shown_step(where),
                {what: _plain(expected)},
                {what: _plain(found)},
            )
        )

    def _report(self, broken: Sequence[int]) -> None:
        """Guards of the step being taken that do not hold, with what its block was like before."""
        step, before = self._taking, dict[str, Any]()
        block = step.args.get(pool.b.name)
        if block is not None:
            index = self.shadow.index
            before = {
                "ref": self.shadow.get(pool.ref, (block,)),
                "queued": bool(self.shadow.get(pool.queued, (block,))),
                "holders": sorted(p[0] for p in index[pool.held, 1].get(block, ())),
                "covered by": sorted(p[0] for p in index[pool.covers, 1].get(block, ())),
            }
        for number in broken:
            guard = _ACTIONS[step.action].guards[number]
            message = f"not so: {guard.why}"
            self.violations.append(
                Violation(guard.protects[0], message, shown_step(step), dict(before))
            )


def shown_step(step: PoolStep) -> str:
    """A step as violations name it: `take(r1, 3)`."""
    return f"{step.action}({', '.join(str(v) for v in step.args.values())})"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
