"""The monitor held against the machine it was compiled from.

In reachable states of small instances every step is told to it: one whose guards hold has to
pass in silence and leave the machine's next state, any other has to be reported by the rules of
exactly the guards that fail.  Facts and snapshots that differ from the state in one place have to
be reported by the rule of that place.  Nothing here trusts the monitor: what is expected comes
from `checker.finite`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclaims.checker.finite import Compiled, Instance, State, compile_instance, evaluator
from kvclaims.checker.instances import PINNED
from kvclaims.checker.monitor import Monitor
from kvclaims.spec import claims, pool
from kvclaims.spec.interface import BlockFacts, PoolSnapshot, PoolStep
from kvclaims.spec.language import BOOL, NUMERIC, Sort, Symbol

NULL: Final = 0
"""The null block of every pinned instance of the pool."""


class Stage:
    """An instance of the pool, and the names under which an engine would tell of it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.compiled: Compiled = compile_instance(instance)
        self.slots = [
            (symbol, tuple(map(self.name, symbol.domain, args)))
            for symbol, args in self.compiled.slots
        ]
        actions = {action.name: action for action in instance.machine.actions}
        self.steps = []
        terms, self.guards = [], []
        for ground in self.compiled.actions:
            action = actions[ground.name]
            values = dict(zip(action.params, ground.args, strict=True))
            args = {p.name: self._argument(p.sort, v) for p, v in values.items()}
            self.steps.append(PoolStep(action.name, args))
            self.guards.append([guard.protects[0] for guard in action.guards])
            terms += [(guard.condition, values) for guard in action.guards]
        self._holding = evaluator(instance, terms)

    def name(self, sort: Sort, index: int) -> Any:
        return (
            index if sort == pool.BLOCK or sort in NUMERIC else self.instance.element(sort, index)
        )

    def _argument(self, sort: Sort, value: int) -> Any:
        return bool(value) if sort == BOOL else self.name(sort, value)

    def expected(self, state: State) -> Iterator[list[str]]:
        """For each ground action the rules of the guards that fail, in their order."""
        holding = iter(self._holding(state))
        for rules in self.guards:
            yield [rule for rule in rules if not next(holding)]

    def monitor(self) -> Monitor:
        watching = Monitor(range(self.instance.sizes["Block"]), null_block=NULL)
        for sort, symbol in ((claims.CLAIM, claims.hard), (pool.REQUEST, pool.admit_reuse)):
            for (i,), flag in self.instance.rigid[symbol.name].items():
                watching.introduce(sort, self.instance.element(sort, i), bool(flag))
        return watching

    def put(self, watching: Monitor, state: State) -> None:
        """Bring the shadow into a state, forgetting what was reported before."""
        for (symbol, place), value in zip(self.slots, state, strict=True):
            watching.shadow.set(symbol, place, bool(value) if symbol.range == BOOL else value)
        watching.violations.clear()

    def shadow(self, watching: Monitor) -> dict[tuple[Symbol, Any], int]:
        """What the shadow holds: every place with another value than the default."""
        rigid = {claims.hard, pool.admit_reuse, pool.null}
        return {
            (symbol, place): int(value)
            for symbol, values in watching.shadow.values.items()
            if symbol not in rigid
            for place, value in values.items()
        }

    def values(self, state: State) -> dict[tuple[Symbol, Any], int]:
        return {slot: value for slot, value in zip(self.slots, state, strict=True) if value}

    def states(self, nth: int) -> Iterator[State]:
        """Every `nth` reachable state, in the order of a breadth-first search."""
        seen = dict.fromkeys(self.compiled.initial)
        for state in (order := list(seen)):
            for _, after in self.compiled.successors(state):
                if after not in seen:
                    seen[after] = None
                    order.append(after)
        yield from order[::nth]


def check_monitor(name: str, nth: int) -> str | None:
    """What the monitor says wrongly in every `nth` state of a pinned instance, None if nothing."""
    world = Stage(PINNED[name]())
    for state in world.states(nth):
        watching = world.monitor()
        wrong = (
            _unknown(world, watching)
            or _steps(world, watching, state)
            or _told(world, watching, state)
        )
        if wrong:
            return f"{name}: {wrong}"
    return None


def check_reports() -> str | None:
    """A report of a block that many refer to, and of many that no longer do, names all of them in
    order."""
    names = [f"{letter}{i}" for letter in "badc" for i in range(3)]
    watching = Monitor(range(3), null_block=NULL)
    for name in names:
        watching.introduce(claims.CLAIM, name, True)
        watching.introduce(pool.REQUEST, name, True)
        watching.shadow.set(pool.held, (name, 1), True)
        watching.shadow.set(pool.covers, (name, 1), True)
    watching(PoolStep("evict", {"b": 1, "k": "A"}))
    for violation in watching.violations:
        for what in ("holders", "covered by"):
            if violation.before[what] != sorted(names):
                return f"{what} are {violation.before[what]}, not {sorted(names)}"
    if not watching.violations:
        return "a step that must not be is not reported"
    watching.violations.clear()
    watching.audit(PoolSnapshot(NULL, (), 0, facts={}, holders={}, pins={}, lookup={}))
    missing = f"also {sorted((name, 1) for name in names)}"
    told = [violation.message for violation in watching.violations]
    if len(told) == 2 and all(missing in message for message in told):
        return None
    return f"an audit of an empty pool reports {told}, not that each lacks {missing}"


def _unknown(world: Stage, watching: Monitor) -> str | None:
    """Whoever was introduced is known, before any step speaks of it."""
    for sort in (pool.BLOCK, claims.CLAIM, pool.REQUEST):
        there = {world.name(sort, i) for i in range(world.instance.sizes[sort.name])}
        if (found := set(watching.shadow.known[sort])) != there:
            return f"knows {sorted(found)}, not {sorted(there)}"
    return None


def _steps(world: Stage, watching: Monitor, state: State) -> str | None:
    """Tell every step, in the state where it starts."""
    moved = dict(world.compiled.successors(state))
    for number, rules in enumerate(world.expected(state)):
        world.put(watching, state)
        step, told = world.steps[number], watching.steps
        watching(step)
        label = world.compiled.actions[number].label
        found = [violation.rule for violation in watching.violations]
        if found != rules:
            return f"{label}: reported {found}, expected {rules}"
        if watching.steps != told + 1 or sum(watching.fired.values()) != watching.steps:
            return f"{label}: not counted"
        if not rules and world.shadow(watching) != world.values(moved.get(number, state)):
            return f"{label}: leaves another state than the machine"
        if wrong := _report(world, watching, state, step):
            return f"{label}: {wrong}"
    return None


def _report(world: Stage, watching: Monitor, state: State, step: PoolStep) -> str | None:
    """A report of a step tells what the block was like before it."""
    values = world.values(state)
    for violation in watching.violations:
        if "b" not in step.args:
            expected: Mapping[str, Any] = {}
        else:
            block = step.args["b"]
            expected = {
                "ref": values.get((pool.ref, (block,)), 0),
                "queued": bool(values.get((pool.queued, (block,)), 0)),
                "holders": _first_of(values, pool.held, block),
                "covered by": _first_of(values, pool.covers, block),
            }
        if dict(violation.before) != expected:
            return f"tells {dict(violation.before)} of the state before, not {expected}"
        if not violation.step.startswith(f"{step.action}("):
            return f"names the step {violation.step}"
    return None


def _first_of(values: Mapping[tuple[Symbol, Any], int], symbol: Symbol, block: int) -> list[str]:
    return sorted(place[0] for of, place in values if of == symbol and place[1] == block)


# --- facts and snapshots -----------------------------------------------------------------


@dataclass(frozen=True)
class _Lie:
    """What an engine tells wrongly, and the rules by which that is reported.

    `says` is a part of the report: what the engine holds, and what it lacks."""

    what: str
    rules: list[str]
    tell: Callable[[Monitor], None]
    says: str = "engine"


def _told(world: Stage, watching: Monitor, state: State) -> str | None:
    for lie in _lies(world, state):
        world.put(watching, state)
        lie.tell(watching)
        found = [violation.rule for violation in watching.violations]
        if found != lie.rules:
            return f"{lie.what}: reported {found}, expected {lie.rules}"
        if lie.rules and lie.says not in watching.violations[0].message:
            return f"{lie.what}: the report does not say {lie.says!r}"
    return None


def _lies(world: Stage, state: State) -> Iterator[_Lie]:
    snapshot = snapshot_of(world, state)
    for what, rules, told, says in _snapshots(snapshot):
        yield _Lie(what, rules, lambda watching, told=told: watching.audit(told), says)  # type: ignore[misc]
    for what, rules, step in _idle_steps(world, state, snapshot):
        yield _Lie(what, rules, lambda watching, step=step: watching(step))  # type: ignore[misc]


def snapshot_of(world: Stage, state: State) -> PoolSnapshot:
    """What an engine in that state would show of its structures."""
    values = world.values(state)
    blocks = [b for b in range(world.instance.sizes["Block"]) if b != NULL]
    places = {s: [p for of, p in values if of == s] for s in (pool.held, pool.covers, pool.entry)}
    hard = {i for (i,), flag in world.instance.rigid["hard"].items() if flag}
    names = {world.instance.element(claims.CLAIM, i) for i in hard}
    return PoolSnapshot(
        null_block=NULL,
        queue=tuple(b for b in blocks if (pool.queued, (b,)) in values),
        counter=values.get((pool.free, ()), 0),
        facts={b: _facts(values, b) for b in blocks},
        holders=_by_first(places[pool.held]),
        pins=_by_first([place for place in places[pool.covers] if place[0] in names]),
        lookup=_by_first(places[pool.entry]),
    )


def _facts(values: Mapping[tuple[Symbol, Any], int], block: int) -> BlockFacts:
    return BlockFacts(
        values.get((pool.ref, (block,)), 0),
        (pool.queued, (block,)) in values,
        tuple(place[1] for of, place in values if of == pool.key and place[0] == block),
    )


def _by_first(places: list[Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for first, second in places:
        found.setdefault(first, []).append(second)
    return {first: tuple(seconds) for first, seconds in found.items()}


_Told = tuple[str, list[str], PoolSnapshot, str]
_ENGINE: Final = "the engine"


def _snapshots(true: PoolSnapshot) -> Iterator[_Told]:
    yield "a true snapshot", [], true, _ENGINE
    yield "a wrong counter", ["B1"], replace(true, counter=true.counter + 1), _ENGINE
    longer = true.counter + 1
    yield (
        "the null block in the queue",
        ["B6"],
        replace(true, queue=(NULL, *true.queue), counter=longer),
        _ENGINE,
    )
    for block in true.queue[:1]:
        twice = replace(true, queue=(block, *true.queue), counter=longer)
        yield "a block twice", ["B1"], twice, _ENGINE
    for name, rule in (("holders", "B2"), ("pins", "B2"), ("lookup", "B3")):
        held: Mapping[str, tuple[int, ...]] = getattr(true, name)
        more = replace(true, **{name: {**held, "nobody": range(6, 0, -1)}})  # type: ignore[arg-type]
        yield f"some too many in {name}", [rule], more, _also("nobody", range(6, 0, -1))
        for first in list(held)[:1]:
            less = replace(true, **{name: {k: v for k, v in held.items() if k != first}})  # type: ignore[arg-type]
            yield f"some too few in {name}", [rule], less, _also(first, held[first])
    for what, rule, facts, says in _wrong_facts(true.facts[1]):
        wrong = replace(true, facts={**true.facts, 1: facts})
        yield f"{what} in a snapshot", [rule], wrong, says


def _also(first: str, seconds: Iterable[int]) -> str:
    """Pairs as a report lists them, in their order."""
    return f"also {sorted((first, second) for second in seconds)}"


def _wrong_facts(true: BlockFacts) -> Iterator[tuple[str, str, BlockFacts, str]]:
    yield "another ref", "B2", true._replace(ref=true.ref + 1), _ENGINE
    yield "another place", "B1", true._replace(queued=not true.queued), _ENGINE
    keys = (*true.keys, *"badcfehgji")
    yield "another content", "B3", true._replace(keys=keys), f"{_ENGINE} {sorted(keys)}"
    if true.keys:
        yield "no content", "B3", true._replace(keys=()), f"{_ENGINE} []"


def _idle_steps(
    world: Stage, state: State, snapshot: PoolSnapshot
) -> Iterator[tuple[str, list[str], PoolStep]]:
    """Facts told with a step that changes no block: the refusal of a request or of a claim."""
    rules = list(world.expected(state))
    for number, step in enumerate(world.steps):
        if step.action in ("refuse", "submit", "overflow", "admit") and not rules[number]:
            facts, free = snapshot.facts, snapshot.counter
            yield "true facts", [], step._replace(facts=facts, free=free)
            yield "a wrong count of free blocks", ["B1"], step._replace(free=free + 1)
            for what, rule, wrong, _ in _wrong_facts(facts[1]):
                yield what, [rule], step._replace(facts={1: wrong})
            return
