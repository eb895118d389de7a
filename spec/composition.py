"""Composition: machines side by side, some of whose steps are taken together.

A `Part` is a machine whose changing symbols are renamed apart (`phase` of the pool becomes
`pool_phase`); sorts and rigid symbols are shared by all parts.  A `Move` is one step of the whole:
it lists what each part does in it, one `Step` after the other, and may add guards of its own that
couple the parts.  What a move does not mention stands still.

    guards of a move  = the guards of its steps, each told in the state before the move, and its own
    updates of a move = the updates of its steps, all at once

So whatever holds in every state of a part holds in every state of the whole.  That is not assumed:
`kvclaims.spec.abstractions` declares that the whole refines each part, and the checker proves it
move by move.  A composition is data; `Composition.machine` reads it as a machine like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from kvclaims.spec.language import (
    TRUE,
    Action,
    App,
    Bind,
    Guard,
    Lit,
    Machine,
    MachineError,
    Partition,
    Property,
    Symbol,
    Term,
    Update,
    Var,
    children,
    every,
    ite,
    rebuild,
    substitute,
    subterms,
    symbols_of,
    told_before,
)

AT_REST: Final = "rest"
"""A step that changes nothing."""


@dataclass(frozen=True)
class Part:
    """A machine in a larger one.  Called on a term, it tells the term in the larger vocabulary."""

    machine: Machine

    @property
    def name(self) -> str:
        return self.machine.name

    def __call__(self, term: Term) -> Any:
        """The term with the part's own names.  (Any: a term of the same kind as was given.)"""
        parts = tuple(self(child) for child in children(term))
        term = rebuild(term, parts)
        return replace(term, symbol=self.symbol(term.symbol)) if isinstance(term, App) else term

    def symbol(self, symbol: Symbol) -> Symbol:
        """What the symbol is called in the whole."""
        return symbol if symbol.rigid else replace(symbol, name=f"{self.name}_{symbol.name}")

    def update(self, update: Update) -> Update:
        return replace(update, target=self(update.target), value=self(update.value))

    def property(self, prop: Property) -> Property:
        return replace(prop, formula=self(prop.formula))

    def partition(self, partition: Partition) -> Partition:
        return Partition(self(partition.whole), tuple(self(part) for part in partition.parts))


@dataclass(frozen=True)
class Step:
    """A step of a machine, taken as part of a step of another.

    `args` gives the action's parameters as terms of the other's state before its step (and of the
    parameters of that step); those not named stand for themselves.  It is taken only where `when`
    holds.  With `each` it is taken for every value of that variable for which `when` holds, which
    must be steps that do not touch each other.
    """

    action: str
    args: Mapping[str, Term] = field(default_factory=dict)
    when: Term = TRUE
    each: Var | None = None


@dataclass(frozen=True)
class Trail:
    """Several steps of a part in a row, as one: told in the state before the first."""

    guards: tuple[Guard, ...]
    updates: tuple[Update, ...]


def trail(part: Part, steps: Iterable[Step]) -> Trail:
    """The steps one after the other.  Raises MachineError where `each` steps touch each other."""
    guards: list[Guard] = []
    updates: tuple[Update, ...] = ()
    for step in steps:
        action = part.machine.action(step.action)
        given = _Arguments(part, action, step)
        for guard in action.guards:
            condition = told_before(given.into(part(guard.condition)), updates)
            condition = given.out_of(_conditional(step, condition))
            if condition != TRUE:
                guards.append(replace(guard, condition=condition, part=part.name))
        taken = [given.update(part.update(update)) for update in action.updates]
        updates += tuple(_under(step, given, update, updates) for update in taken)
    return Trail(tuple(guards), updates)


class _Arguments:
    """What stands for the parameters of an action.  A term that speaks of the state is plugged in
    last, so that no step before it changes what it means."""

    def __init__(self, part: Part, action: Action, step: Step) -> None:
        unknown = set(step.args) - {param.name for param in action.params}
        if unknown:
            raise MachineError(f"{part.name}.{action.name} has no parameters {sorted(unknown)}")
        if step.each is not None:
            _require_apart(part.machine, action, step)
        self._into: dict[Var, Term] = {}
        self._out: dict[Var, Term] = {}
        for param in action.params:
            arg = step.args.get(param.name, param)
            if not isinstance(arg, Var | Lit):
                marked = Var(f"{param.name} of {step.action}", param.sort)
                self._out[marked] = arg
                arg = marked
            self._into[param] = arg

    def into(self, term: Term) -> Term:
        _forbid_capture(term, self._into)
        return substitute(term, self._into)

    def out_of(self, term: Term) -> Term:
        _forbid_capture(term, self._out)
        return substitute(term, self._out)

    def update(self, update: Update) -> Update:
        target = self.into(update.target)
        assert isinstance(target, App)
        return replace(update, target=target, value=self.into(update.value))


def _conditional(step: Step, condition: Term) -> Term:
    if condition == TRUE or step.when == TRUE:
        return condition
    met = step.when >> condition
    return met if step.each is None else every(step.each, met)


def _under(step: Step, given: _Arguments, update: Update, earlier: tuple[Update, ...]) -> Update:
    """The update of a step that comes after others, is taken under a condition, or for each of
    a sort."""
    value = given.out_of(told_before(update.value, earlier))
    if step.when != TRUE:
        value = ite(step.when, value, told_before(update.target, earlier))
    over = update.over if step.each is None else (*update.over, step.each)
    return Update(update.target, value, over)


def _require_apart(machine: Machine, action: Action, step: Step) -> None:
    """Steps for different values of a parameter read and write different places."""
    params = {param.name: param for param in action.params}
    varied = [params[name] for name, arg in step.args.items() if arg == step.each]
    sources = [guard.condition for guard in action.guards]
    sources += [term for update in action.updates for term in (update.target, update.value)]
    for source in sources:
        for term in subterms(source):
            if not isinstance(term, App) or term.symbol.rigid:
                continue
            if not any(param in term.args for param in varied):
                raise MachineError(
                    f"{machine.name}.{action.name} touches {term.symbol.name} for all alike"
                )


def _forbid_capture(term: Term, values: Mapping[Var, Term]) -> None:
    bound = {part.var for part in subterms(term) if isinstance(part, Bind)}
    for param, arg in values.items():
        if param != arg and bound & set(arg.free):
            raise MachineError(f"{arg!r} for {param.name} would be bound in {term!r}")


# --- the whole -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One step of the whole.  `shares` are the steps of its parts; those of one part are taken in
    the order given.  `guards` are what the move asks for beside the guards of its steps."""

    name: str
    params: tuple[Var, ...]
    shares: tuple[tuple[Part, Step], ...]
    meaning: str
    guards: tuple[Guard, ...] = ()

    def steps_of(self, part: Part) -> tuple[Step, ...]:
        return tuple(step for owner, step in self.shares if owner == part)

    @property
    def action(self) -> Action:
        parts = list(dict.fromkeys(part.name for part, _ in self.shares))
        owners = {part.name: part for part, _ in self.shares}
        trails = [trail(owners[name], self.steps_of(owners[name])) for name in parts]
        guards = [guard for each in trails for guard in each.guards]
        updates = [update for each in trails for update in each.updates]
        return Action(self.name, self.params, (*self.guards, *guards), tuple(updates), self.meaning)


def alone(part: Part, *actions: str, guards: tuple[Guard, ...] = (), name: str = "") -> list[Move]:
    """Moves in which only this part steps, each by one action."""
    made = []
    for action in map(part.machine.action, actions):
        share = (part, Step(action.name))
        called = name or f"{part.name}_{action.name}"
        made.append(Move(called, action.params, (share,), action.meaning, guards))
    return made


@dataclass(frozen=True)
class Composition:
    """Parts and the moves of the whole.

    `symbols` are rigid ones that no part knows; guards of moves may speak of them.  `apart` says,
    for each action of a part that no move takes, why it has no place here.
    """

    name: str
    meaning: str
    parts: tuple[Part, ...]
    moves: tuple[Move, ...]
    properties: tuple[Property, ...]
    apart: Mapping[str, str] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    corollaries: tuple[Property, ...] = ()
    """What follows, for a part, from its invariants: shown there (`standing_still`)."""

    def __post_init__(self) -> None:
        taken = {f"{part.name}.{step.action}" for move in self.moves for part, step in move.shares}
        known = {f"{part.name}.{a.name}" for part in self.parts for a in part.machine.actions}
        for wrong in sorted((known - taken) ^ set(self.apart)):
            raise MachineError(f"{self.name}: {wrong} must be in a move, or have a reason not to")

    @cached_property
    def machine(self) -> Machine:
        """The whole as a machine.  The invariants of the parts are given."""
        return Machine(
            name=self.name,
            meaning=self.meaning,
            symbols=tuple(self._symbols()),
            init=tuple(part.update(u) for part in self.parts for u in part.machine.init),
            actions=tuple(move.action for move in self.moves),
            properties=self.properties,
            partitions=(
                *(part.partition(p) for part in self.parts for p in part.machine.partitions),
                *self.partitions,
            ),
            axioms=_once(axiom for part in self.parts for axiom in part.machine.axioms),
            given=(
                *(part.property(prop) for part in self.parts for prop in part.machine.invariants),
                *self.corollaries,
            ),
            derived=True,
        )

    def _symbols(self) -> Iterator[Symbol]:
        found: dict[str, Symbol] = {}
        for part in self.parts:
            for symbol in map(part.symbol, part.machine.symbols):
                if symbol.name not in found:
                    yield symbol
                elif found[symbol.name] != symbol:
                    raise MachineError(f"{self.name}: two symbols are called {symbol.name}")
                found[symbol.name] = symbol
        yield from self.symbols

    def steps_of(self, part: Part) -> dict[str, tuple[Step, ...]]:
        """What the part does in each move; nothing where it stands still."""
        return {move.name: move.steps_of(part) for move in self.moves}

    def seen_without(self, *hidden: Symbol) -> Composition:
        """The same seen by somebody who cannot see some symbols of its parts (`hide`), nor say
        what speaks of them."""
        seen = {part.name: Part(hide(part.machine, *hidden)) for part in self.parts}
        moves = tuple(
            replace(move, shares=tuple((seen[part.name], step) for part, step in move.shares))
            for move in self.moves
        )
        parts = tuple(seen.values())
        symbols = _symbols_of_all(parts) | set(self.symbols)
        told = tuple(p for p in self.properties if _speaks_of(p.formula, symbols))
        return replace(self, parts=parts, moves=moves, properties=told)

    def only(self, *names: str, without: Collection[str] = ()) -> Composition:
        """The same with other parts left out, and some moves: whatever the whole does by the moves
        that stay, seen through the parts that stay, is what this does.  Guards that speak of a
        part that is left out go with it, and so do moves in which it decides what others do."""
        parts = tuple(part for part in self.parts if part.name in names)
        symbols = _symbols_of_all(parts) | set(self.symbols)
        moves = [_within(move, parts, symbols) for move in self.moves if move.name not in without]
        kept = tuple(move for move in moves if move.shares and _is_told(move, symbols))
        taken = {move.name for move in kept}
        return replace(
            self,
            parts=parts,
            moves=kept,
            properties=tuple(
                prop
                for prop in self.properties
                if _speaks_of(prop.formula, symbols)
                and (prop.of_all or any(map(prop.speaks_of, taken)))
            ),
            apart=_missing(parts, kept),
            partitions=(),
            corollaries=(),
        )


def standing_still(machine: Machine, corollaries: Sequence[Property]) -> Machine:
    """The machine in which nothing happens: what follows from its invariants is to be shown."""
    rest = Action(AT_REST, (), (), (), "nothing happens")
    return replace(
        machine,
        name=f"{machine.name}-still",
        actions=(rest,),
        properties=tuple(replace(prop, on=AT_REST) for prop in corollaries),
        given=machine.invariants,
        views=(),
        derived=True,
    )


def hide(machine: Machine, *hidden: Symbol) -> Machine:
    """The machine as seen by somebody who cannot see some symbols: conditions and updates that
    speak of them are left out, so it can do whatever the whole machine can, and maybe more."""

    def sees(term: Term) -> bool:
        return not symbols_of(term) & set(hidden)

    def action(whole: Action) -> Action:
        guards = tuple(guard for guard in whole.guards if sees(guard.condition))
        updates = tuple(u for u in whole.updates if u.target.symbol not in hidden)
        for update in updates:
            if not sees(update.value):
                raise MachineError(f"{machine.name}.{whole.name} shows what it hides")
        used = {v for u in updates for v in (*u.target.args, *_variables(u.value))}
        used |= {v for guard in guards for v in _variables(guard.condition)}
        params = tuple(param for param in whole.params if param in used)
        return replace(whole, params=params, guards=guards, updates=updates)

    return replace(
        machine,
        symbols=tuple(s for s in machine.symbols if s not in hidden),
        init=tuple(u for u in machine.init if u.target.symbol not in hidden),
        actions=tuple(action(whole) for whole in machine.actions),
        properties=tuple(p for p in machine.properties if sees(p.formula)),
    )


def _variables(term: Term) -> set[Term]:
    return {part for part in subterms(term) if isinstance(part, Var)}


def _within(move: Move, parts: Sequence[Part], symbols: set[Symbol]) -> Move:
    """The move as these parts see it."""
    shares = tuple((part, step) for part, step in move.shares if part in parts)
    guards = tuple(guard for guard in move.guards if _speaks_of(guard.condition, symbols))
    return replace(move, shares=shares, guards=guards)


def _is_told(move: Move, symbols: set[Symbol]) -> bool:
    """What each part does in the move depends on these symbols only."""
    terms = [term for _, step in move.shares for term in (step.when, *step.args.values())]
    return all(_speaks_of(term, symbols) for term in terms)


def _speaks_of(term: Term, symbols: set[Symbol]) -> bool:
    """The term speaks of these symbols only."""
    return symbols_of(term) <= symbols


def _symbols_of_all(parts: Sequence[Part]) -> set[Symbol]:
    return {part.symbol(s) for part in parts for s in part.machine.symbols}


def _missing(parts: Sequence[Part], moves: Sequence[Move]) -> dict[str, str]:
    taken = {f"{part.name}.{step.action}" for move in moves for part, step in move.shares}
    known = {f"{part.name}.{action.name}" for part in parts for action in part.machine.actions}
    return dict.fromkeys(sorted(known - taken), "left out of the whole")


def _once(terms: Iterable[Term]) -> tuple[Term, ...]:
    return tuple(dict.fromkeys(terms))
