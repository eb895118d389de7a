"""Refinement: one machine seen as another, by an abstraction function that is declared as data.

A `Refinement` says what each symbol of the abstract machine is in the concrete one (`images`), and
what the abstract machine does in each concrete step (`steps`): some actions with arguments, one
after the other, or nothing.  It holds if at the start the image is an initial state, if every
abstract action so taken is enabled, and if it leads to the image of the next concrete state: then
every run of the concrete machine, seen through the images, is a run of the abstract one.

Where the concrete machine forgets what the abstract one remembers, `with_history` adds variables
that only record.  `hide` forgets symbols of the abstract machine, with the conditions on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvclaims.spec.composition import Part, Step, standing_still, trail
from kvclaims.spec.language import (
    NAT,
    TRUE,
    Action,
    App,
    Guard,
    Machine,
    MachineError,
    Property,
    Symbol,
    Term,
    Update,
    Var,
    View,
    both,
    children,
    eq,
    every,
    new,
    rebuild,
    substitute,
    symbols_of,
    told_before,
)


@dataclass(frozen=True)
class Image:
    """What a symbol is at some places, as a term of the concrete machine."""

    places: tuple[Var, ...]
    term: Term


@dataclass(frozen=True)
class Refinement:
    """`concrete` seen as `abstract`.  `images` covers every abstract symbol by name, `steps` every
    concrete action.  `lemmas` are further invariants of the concrete machine, shown by induction
    with the rest; `corollaries` follow in each state from its invariants, which is shown once, so
    they hold before and after every step.  With `coarse`, what one concrete action must do is
    one obligation."""

    concrete: Machine
    abstract: Machine
    images: Mapping[str, Image]
    steps: Mapping[str, tuple[Step, ...]]
    meaning: str
    lemmas: tuple[Property, ...] = ()
    corollaries: tuple[Property, ...] = ()
    coarse: bool = False
    apart: Mapping[str, str] = field(default_factory=dict)
    """For each abstract action that no concrete step takes, why."""

    def __post_init__(self) -> None:
        for symbol in self.abstract.symbols:
            image = self.images.get(symbol.name)
            if image is None or tuple(v.sort for v in image.places) != symbol.domain:
                raise MachineError(f"{self.name}: {symbol.name} has no image at its places")
            if symbol.rigid and any(not s.rigid for s in symbols_of(image.term)):
                raise MachineError(f"{self.name}: {symbol.name} never changes, its image may")
        missing = {action.name for action in self.concrete.actions} ^ set(self.steps)
        if missing:
            raise MachineError(f"{self.name}: steps of {', '.join(sorted(missing))}")

    @property
    def name(self) -> str:
        return f"{self.concrete.name}-refines-{self.abstract.name}"

    @cached_property
    def machine(self) -> Machine:
        """The concrete machine, with what each of its steps must do as properties."""
        return replace(
            self.concrete,
            name=self.name,
            meaning=self.meaning,
            properties=(
                *self.lemmas,
                *(p for a in self.concrete.actions for p in self._of_action(a)),
            ),
            given=(*self.concrete.invariants, *self.corollaries),
            views=self.views,
            derived=True,
        )

    @property
    def obligations(self) -> tuple[Machine, ...]:
        """The machines whose properties together say that the refinement holds."""
        return tuple(m for m in (self.start, self.still, self.machine) if m.properties)

    @cached_property
    def still(self) -> Machine:
        """The concrete machine standing still, with what follows from its invariants."""
        named = replace(self.concrete, name=self.name)
        return standing_still(named, self.corollaries)

    @cached_property
    def start(self) -> Machine:
        """The concrete machine before its first step, with what must hold of its image there."""
        properties = tuple(self._at_the_start())
        return replace(
            self.machine, name=f"{self.name}-start", actions=(), properties=properties, given=()
        )

    @property
    def views(self) -> tuple[View, ...]:
        """The abstract state, for showing."""
        return tuple(
            View(f"{self.abstract.name}.{s.name}", *vars(self.images[s.name]).values())
            for s in self.abstract.symbols
            if not s.rigid
        )

    # -- what has to be shown

    def _at_the_start(self) -> Iterator[Property]:
        init = tuple(self._part.update(update) for update in self.abstract.init)
        for symbol in self.abstract.symbols:
            if not symbol.rigid:
                yield self._alike(symbol, init, started=True)
        for number, axiom in enumerate(self.abstract.axioms):
            yield Property(
                self._rule(symbols_of(axiom)),
                f"axiom {number}",
                self._seen(self._part(axiom)),
                "What the abstract machine assumes holds of the image.",
            )

    def _of_action(self, action: Action) -> Iterator[Property]:
        """What the concrete action must do: one property for each guard and symbol, or one."""
        made = list(self._finely(action))
        if not self.coarse or not made:
            yield from made
            return
        names = ", ".join(step.action for step in self.steps[action.name]) or "nothing"
        yield Property(
            made[0].rule,
            f"{action.name} is {names}",
            both(*(prop.formula for prop in made)),
            f"In the step {action.name} the part does what {self.abstract.name} allows.",
            on=action.name,
        )

    def _finely(self, action: Action) -> Iterator[Property]:
        steps = self.steps[action.name]
        taken = trail(self._part, steps)
        yield from self._typed(action, steps)
        for number, guard in enumerate(taken.guards):
            yield self._enabled(action, number, guard)
        changed = {update.target.symbol for update in action.updates}
        written = {update.target.symbol for update in taken.updates}
        for symbol in self.abstract.symbols:
            moved = bool(changed & symbols_of(self.images[symbol.name].term))
            if not symbol.rigid and (moved or self._part.symbol(symbol) in written):
                yield replace(self._alike(symbol, taken.updates), on=action.name)

    def _typed(self, action: Action, steps: tuple[Step, ...]) -> Iterator[Property]:
        """Arguments that stand for natural numbers are none below zero."""
        for number, step in enumerate(steps):
            params = {p.name: p for p in self.abstract.action(step.action).params}
            for name, arg in step.args.items():
                if params[name].sort == NAT and arg.sort != NAT:
                    if step.each is not None:
                        raise MachineError(f"{self.name}: a number for each of a sort")
                    yield Property(
                        self._rule(symbols_of(arg)),
                        f"{action.name}, {number + 1}. {step.action}: {name} is natural",
                        _if(step.when, arg >= 0),
                        "A natural number is at least zero.",
                        on=action.name,
                    )

    def _enabled(self, action: Action, number: int, guard: Guard) -> Property:
        enabled = self._seen(guard.condition)
        if enabled.speaks_of_new:
            enabled = _if(self._after, enabled)
        return Property(
            guard.protects[0],
            f"{action.name}, guard {number + 1}: {guard.why}",
            enabled,
            "The abstract step is enabled where the concrete one is taken.",
            on=action.name,
        )

    def _alike(
        self, symbol: Symbol, updates: tuple[Update, ...], *, started: bool = False
    ) -> Property:
        """After the steps the abstract symbol is what its image is then."""
        image = self.images[symbol.name]
        wanted = told_before(self._part.symbol(symbol)(*image.places), updates)
        after = image.term if started else new(image.term)
        formula = eq(after, self._seen(wanted))
        for var in reversed(image.places):
            formula = every(var, formula)
        return Property(
            self._rule({symbol}),
            f"{symbol.name} is as {self.abstract.name} has it",
            formula,
            "After the step the abstract symbol has the value that its image has.",
        )

    @cached_property
    def _after(self) -> Term:
        """What follows from the invariants in the state after a step."""
        return new(both(*(p.formula for p in self.corollaries))) if self.corollaries else TRUE

    @cached_property
    def _part(self) -> Part:
        return Part(self.abstract)

    def _seen(self, term: Term) -> Term:
        """The abstract symbols in the term replaced by their images."""
        parts = tuple(self._seen(child) for child in children(term))
        term = rebuild(term, parts)
        if not isinstance(term, App):
            return term
        image = self._images.get(term.symbol)
        if image is None:
            return term
        return substitute(image.term, dict(zip(image.places, term.args, strict=True)))

    @cached_property
    def _images(self) -> dict[Symbol, Image]:
        return {self._part.symbol(s): self.images[s.name] for s in self.abstract.symbols}

    def _rule(self, symbols: set[Symbol]) -> str:
        """The rule that is at stake: the first that the abstract machine states of a symbol."""
        for prop in self.abstract.properties:
            if symbols & symbols_of(prop.formula):
                return prop.rule
        return self.abstract.properties[0].rule


def _if(condition: Term, then: Term) -> Term:
    return then if condition == TRUE else condition >> then


def same(machine: Machine, part: Part | None = None) -> dict[str, Image]:
    """Each symbol as itself, or as a part of a composition calls it."""
    images = {}
    for symbol in machine.symbols:
        places = tuple(Var(f"at{i}", sort) for i, sort in enumerate(symbol.domain))
        called = part.symbol(symbol) if part else symbol
        images[symbol.name] = Image(places, called(*places))
    return images


@dataclass(frozen=True)
class History:
    """Variables that record what a machine does and that nothing in it reads."""

    symbols: tuple[Symbol, ...]
    init: tuple[Update, ...]
    updates: Mapping[str, tuple[Update, ...]] = field(default_factory=dict)


def with_history(machine: Machine, history: History) -> Machine:
    """The machine with variables added.  Raises MachineError where one could change its steps."""
    for updates in history.updates.values():
        for update in updates:
            if update.target.symbol not in history.symbols:
                raise MachineError(f"{update.target.symbol.name} is no history variable")
    if set(history.symbols) & set(machine.symbols):
        raise MachineError(f"{machine.name} has these symbols: {history.symbols}")
    return replace(
        machine,
        symbols=(*machine.symbols, *history.symbols),
        init=(*machine.init, *history.init),
        actions=tuple(
            replace(a, updates=(*a.updates, *history.updates.get(a.name, ())))
            for a in machine.actions
        ),
    )
