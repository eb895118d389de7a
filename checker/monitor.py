"""A monitor: an engine's steps judged by the declared machine, over a shadow state.

Guards and updates of `kvclaims.spec.pool` are compiled to closures over a sparse shadow state
with an index for each place of each relation, so that a step costs what it touches and not what
the pool holds (refusals and deferrals count the pool once).  The invariants need no look at run
time: `kvclaims prove` shows that every step whose guards hold keeps them.  What the engine says
of the touched blocks is compared with the shadow, and `audit` compares the whole pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.checker.verdicts import Violation
from kvclaims.spec import claims, pool
from kvclaims.spec.interface import BlockFacts, PoolSnapshot, PoolStep
from kvclaims.spec.language import (
    BOOL,
    NUMERIC,
    TRUE,
    Action,
    App,
    Bind,
    Guard,
    Lit,
    Machine,
    Op,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
)

Element = Any
Env = dict[Var, Element]
Reader = Callable[[Env], Any]
Place = tuple[Element, ...]


class Shadow:
    """A sparse state: places whose value is not the default (false, zero, first value)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.values: dict[Symbol, dict[Place, Any]] = {s: {} for s in machine.symbols}
        self.sums: dict[Symbol, int] = defaultdict(int)
        self.index: dict[tuple[Symbol, int], dict[Element, set[Place]]] = {
            (s, i): defaultdict(set) for s in machine.symbols for i in range(len(s.domain))
        }
        self.known: dict[Sort, dict[Element, None]] = {s: {} for s in machine.sorts}

    def get(self, symbol: Symbol, place: Place) -> Any:
        return self.values[symbol].get(place, 0)

    def set(self, symbol: Symbol, place: Place, value: Any) -> None:
        old = self.values[symbol].get(place, 0)
        if old == value:
            return
        self.sums[symbol] += int(value) - int(old)
        if value:
            self.values[symbol][place] = value
            for i, element in enumerate(place):
                self.index[symbol, i][element].add(place)
        else:
            del self.values[symbol][place]
            for i, element in enumerate(place):
                self.index[symbol, i][element].discard(place)

    def meet(self, sort: Sort, element: Element) -> None:
        """Make an element known: quantifiers without a better source range over these."""
        if sort in self.known:
            self.known[sort].setdefault(element)


@dataclass(frozen=True)
class Step:
    """An action, compiled."""

    action: Action
    guards: tuple[tuple[Guard, Reader], ...]
    updates: tuple[Callable[[Env], Iterable[tuple[Symbol, Place, Any]]], ...]

    def changes(self, env: Env) -> list[tuple[Symbol, Place, Any]]:
        """What the step writes, read in the state before it."""
        return [change for update in self.updates for change in update(env)]


class Compiler:
    """Closures over a shadow for the terms of its machine."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    def term(self, term: Term) -> Reader:
        match term:
            case Var():
                return lambda env: env[term]
            case Lit(literal, _):
                return lambda _: literal
            case App(symbol, args):
                return self._application(symbol, args)
            case Op(kind, args):
                return _operation(kind, [self.term(a) for a in args])
            case Bind("some", var, body):
                return self._some(var, body)
            case Bind("every", var, body):
                witness = self._some(var, negation(body))
                return lambda env: not witness(env)
            case Bind("total", var, body):
                return self._total(var, body)
        raise TypeError(f"cannot be monitored: {term!r}")

    def _application(self, symbol: Symbol, args: tuple[Term, ...]) -> Reader:
        values = self.shadow.values[symbol]
        if all(isinstance(a, Var) for a in args):
            if not args:
                return lambda _: values.get((), 0)
            if len(args) == 1:
                (only,) = args
                return lambda env: values.get((env[only],), 0)  # type: ignore[index]
            if len(args) == 2:
                a, b = args
                return lambda env: values.get((env[a], env[b]), 0)  # type: ignore[index]
        readers = [self.term(a) for a in args]
        return lambda env: values.get(tuple(read(env) for read in readers), 0)

    def _some(self, var: Var, body: Term) -> Reader:
        source = self.source(var, body)
        holds = self.term(body)

        def some(env: Env) -> bool:
            inner = dict(env)
            return any(holds(inner) for inner[var] in source(env))

        return some

    def _total(self, var: Var, body: Term) -> Reader:
        match body:
            case App(symbol, (argument,)) if argument == var:
                return lambda _: self.shadow.sums[symbol]
            case Op("ite", (App(symbol, (argument,)), Lit(1, _), Lit(0, _))) if argument == var:
                return lambda _: self.shadow.sums[symbol]
            case Op("ite", (condition, Lit(1, _), Lit(0, _))):
                source = self.source(var, condition)
            case _:
                source = self.source(var, TRUE)
        value = self.term(body)

        def total(env: Env) -> int:
            inner, found = dict(env), 0
            for inner[var] in source(env):
                found += value(inner)
            return found

        return total

    def action(self, action: Action) -> Step:
        """The guards and updates of an action as closures."""
        guards = tuple((guard, self.term(guard.condition)) for guard in action.guards)
        return Step(action, guards, tuple(self._update(update) for update in action.updates))

    def _update(self, update: Update) -> Callable[[Env], Iterable[tuple[Symbol, Place, Any]]]:
        symbol, value = update.target.symbol, self.term(update.value)
        places: list[Var] = [a for a in update.target.args if isinstance(a, Var)]

        def point(env: Env) -> Iterable[tuple[Symbol, Place, Any]]:
            return ((symbol, tuple(env[v] for v in places), value(env)),)

        if not update.over:
            return point
        (var,) = update.over
        source = self.source(var, _where(update))

        def bulk(env: Env) -> Iterable[tuple[Symbol, Place, Any]]:
            inner = dict(env)
            for inner[var] in source(env):
                yield symbol, tuple(inner[v] for v in places), value(inner)

        return bulk

    def source(self, var: Var, condition: Term) -> Callable[[Env], Iterable[Element]]:
        """Where to look for values of `var` that can satisfy the condition: an index of a
        relation that the condition asserts, or everything known of the sort."""
        for part in conjuncts(condition):
            match part:
                case Op("lt", (Lit(0, _), App(symbol, (argument,)))) if argument == var:
                    values = self.shadow.values[symbol]
                    return lambda _: [place[0] for place in values]
            if not isinstance(part, App) or var not in part.args or part.symbol.range != BOOL:
                continue
            mine = part.args.index(var)
            for i, other in enumerate(part.args):
                if i != mine and isinstance(other, Var) and other != var:
                    index = self.shadow.index[part.symbol, i]
                    return _from_index(index, other, mine)
        sort = var.sort
        if sort in self.shadow.known:
            known = self.shadow.known[sort]
            return lambda _: tuple(known)
        domain = range(2) if sort == BOOL else range(len(sort.values))
        return lambda _: domain


def _from_index(
    index: Mapping[Element, set[Place]], other: Var, mine: int
) -> Callable[[Env], Iterable[Element]]:
    def elements(env: Env) -> Iterable[Element]:
        places = index.get(env[other])
        return [place[mine] for place in places] if places else ()

    return elements


def conjuncts(term: Term) -> Iterator[Term]:
    if isinstance(term, Op) and term.kind == "and":
        for part in term.args:
            yield from conjuncts(part)
    else:
        yield term


def negation(term: Term) -> Term:
    """¬term with the negation pushed inwards, so that sources can be found in it."""
    match term:
        case Op("not", (a,)):
            return a
        case Op("implies", (a, b)):
            return a & negation(b)
        case Op("or", (a, b)):
            return negation(a) & negation(b)
        case Bind("every", var, body):
            return Bind("some", var, negation(body))
    return ~term


def _operation(kind: str, args: list[Reader]) -> Reader:
    a = args[0]
    if kind == "not":
        return lambda env: not a(env)
    b = args[1]
    match kind:
        case "and":
            return lambda env: a(env) and b(env)
        case "or":
            return lambda env: a(env) or b(env)
        case "implies":
            return lambda env: not a(env) or b(env)
        case "ite":
            c = args[2]
            return lambda env: b(env) if a(env) else c(env)
        case "eq":
            return lambda env: a(env) == b(env)
        case "le":
            return lambda env: a(env) <= b(env)
        case "lt":
            return lambda env: a(env) < b(env)
        case "add":
            return lambda env: a(env) + b(env)
        case "sub":
            return lambda env: a(env) - b(env)
    raise TypeError(f"unknown operator {kind!r}")


FACT_RULES: Final = {"ref": "B2", "queued": "B1", "keys": "B3", "free": "B1"}
"""Which rule is broken when what the engine holds of a block differs from the shadow."""


class Monitor:
    """Judges the steps of one runtime.  `violations` collects what was found, in order.

    `blocks` are the usable block ids, all free and blank; `null_block` is the one nobody may
    use.  Claims and requests introduce themselves through `introduce`.
    """

    def __init__(self, blocks: Iterable[int], null_block: int | None = None) -> None:
        self.shadow = Shadow(pool.POOL)
        self.violations: list[Violation] = []
        self.steps = 0
        self.fired: dict[str, int] = {action.name: 0 for action in pool.ACTIONS}
        self._compiler = Compiler(self.shadow)
        self._compiled = {a.name: self._compiler.action(a) for a in pool.ACTIONS}
        self._sorts = {action.name: action.params for action in pool.ACTIONS}
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
        self.steps += 1
        compiled = self._compiled[step.action]
        self.fired[step.action] += 1
        env = {p: self._argument(p, step.args[p.name]) for p in self._sorts[step.action]}
        for guard, holds in compiled.guards:
            if not holds(env):
                self._report(guard.protects[0], f"not so: {guard.why}", step, env)
        for symbol, place, value in compiled.changes(env):
            self.shadow.set(symbol, place, value)
        self._compare(step)

    def audit(self, snapshot: PoolSnapshot) -> None:
        """Compare the whole pool with the shadow, and the pool with itself (B1 to B3, B6)."""
        self._audit_queue(snapshot)
        for block, facts in snapshot.facts.items():
            self._compare_block("deep audit", block, facts)
        holders = {(request, block) for request, held in snapshot.holders.items() for block in held}
        self._same("B2", "holders", holders, set(self.shadow.values[pool.held]))
        hard = self.shadow.values[claims.hard]
        pins = {place for place in self.shadow.values[pool.covers] if (place[0],) in hard}
        named = {(claim, block) for claim, held in snapshot.pins.items() for block in held}
        self._same("B2", "pins", named, pins)
        found = {(content, b) for content, blocks in snapshot.lookup.items() for b in blocks}
        self._same("B3", "lookup", found, set(self.shadow.values[pool.entry]))

    def state(self) -> dict[str, Any]:
        """The shadow under the machine's names, for reports."""
        return {
            symbol.name: dict(values) for symbol, values in self.shadow.values.items() if values
        }

    def _argument(self, param: Var, given: Any) -> Any:
        if param.sort.values:
            return param.sort.values.index(given)
        if param.sort not in NUMERIC and param.sort != BOOL:
            self.shadow.meet(param.sort, given)
        return given

    # -- comparing

    def _compare(self, step: PoolStep) -> None:
        for block, facts in step.facts.items():
            self._compare_block(shown_step(step), block, facts)
        if step.free is not None:
            free = self.shadow.get(pool.free, ())
            if step.free != free:
                self._differ("B1", "the free counter", shown_step(step), free, step.free)

    def _compare_block(self, where: str, block: int, facts: BlockFacts) -> None:
        get = self.shadow.get
        keys = {place[1] for place in self.shadow.index[pool.key, 0].get(block, ())}
        for name, expected, found in (
            ("ref", get(pool.ref, (block,)), facts.ref),
            ("queued", bool(get(pool.queued, (block,))), facts.queued),
            ("keys", keys, set(facts.keys)),
        ):
            if expected != found:
                self._differ(FACT_RULES[name], f"{name} of block {block}", where, expected, found)

    def _audit_queue(self, snapshot: PoolSnapshot) -> None:
        queue = list(snapshot.queue)
        if len(set(queue)) != len(queue):
            self._differ("B1", "the free queue", "deep audit", "distinct blocks", queue)
        if len(queue) != snapshot.counter:
            self._differ("B1", "the queue's counter", "deep audit", len(queue), snapshot.counter)
        if snapshot.null_block is not None and snapshot.null_block in queue:
            self._differ("B6", "the null block", "deep audit", "not in the queue", "queued")

    def _same(self, rule: str, what: str, found: set[Any], expected: set[Any]) -> None:
        if found != expected:
            extra, missing = sorted(found - expected, key=str), sorted(expected - found, key=str)
            self._differ(rule, what, "deep audit", f"also {missing}", f"also {extra}")

    def _differ(self, rule: str, what: str, where: str, expected: Any, found: Any) -> None:
        self.violations.append(
            Violation(
                rule,
                f"{what}: the machine says {_plain(expected)}, the engine {_plain(found)}",
                where,
                {what: _plain(expected)},
                {what: _plain(found)},
            )
        )

    def _report(self, rule: str, message: str, step: PoolStep, env: Env) -> None:
        before = {}
        for block in (v for p, v in env.items() if p.sort == pool.BLOCK):
            before = {
                "ref": self.shadow.get(pool.ref, (block,)),
                "queued": bool(self.shadow.get(pool.queued, (block,))),
                "holders": sorted(p[0] for p in self.shadow.index[pool.held, 1][block]),
                "covered by": sorted(p[0] for p in self.shadow.index[pool.covers, 1][block]),
            }
        self.violations.append(Violation(rule, message, shown_step(step), before))


def _where(update: Update) -> Term:
    """A condition without which a bulk update changes nothing at a place."""
    match update.value:
        case Op("ite", (condition, _, otherwise)) if otherwise == update.target:
            return condition
        case Op("ite", (Op("lt", (Lit(0, _), counter)) as condition, _, Lit(0, _))) if (
            counter == update.target
        ):
            return condition
        case Lit(literal, of) if of == BOOL and not literal:
            return update.target
        case Op("and", _) if update.target in conjuncts(update.value):
            return update.target
    return TRUE


def shown_step(step: PoolStep) -> str:
    """A step as violations name it: `take(r1, 3)`."""
    return f"{step.action}({', '.join(str(v) for v in step.args.values())})"


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else value
