"""Ranking arguments as obligations: why a goal is reached, for any number of anything.

A `Ranking` (`spec.progress`) becomes properties of states and steps of its machine, and these are
discharged like all others: in parallel, kept, confirmed by a second solver, written as files.
That they suffice is the response rule for justice: the rank cannot fall for ever, so it stays the
same from some point on, so some case applies for good, so its fair steps stay enabled (or are
recurring) and one is taken, and the rank falls after all, unless the goal was reached.  An
`Urgency` needs no rank: a recurring step is taken in the end, and none is possible before the goal.

That recurring steps recur is an assumption about runs, and empty if no run fulfils it.  So it is
shown that from each state one can be reached, by steps that bring it nearer.

What concerns a single state is asked under an action that does nothing, `STAY`.  Nothing here is
assumed that the machine's own obligations do not prove: its invariants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvclaims.spec import admission, claims, elastic, ends, events
from kvclaims.spec.language import (
    TRUE,
    Action,
    Machine,
    MachineError,
    Property,
    Term,
    Var,
    both,
    either,
    eq,
    every,
    new,
    some,
    substitute,
)
from kvclaims.spec.progress import Helpful, Ranking, Recurring, Response, Steps, Urgency

RESPONSES: Final[Mapping[str, tuple[Response, ...]]] = {
    claims.CLAIMS.name: claims.RESPONSES,
    admission.ADMISSION.name: admission.RESPONSES,
    elastic.ELASTIC.name: elastic.RESPONSES,
    events.EVENTS.name: events.RESPONSES,
    ends.ENDS.name: ends.RESPONSES,
}
"""What must happen in the end, by machine."""

STAY: Final = Action("stay", (), (), (), "nothing happens: what is asked of single states")


def ranked(machine: Machine, responses: Sequence[Response]) -> Machine:
    """The machine with its invariants to start from, and every ranking as properties of steps."""
    found = (p for response in responses for p in ranking_properties(machine, response))
    return replace(
        machine,
        name=f"{machine.name}/progress",
        actions=(*machine.actions, STAY),
        properties=(*machine.invariants, *found),
    )


def ranking_obligations(
    machines: Iterable[Machine], rule: str | None = None
) -> Iterator[tuple[Machine, Property, str]]:
    """What the rankings of these machines ask a solver to show: the ranked machine, the property
    and the action under which it has to hold."""
    for machine in machines:
        if machine.name in RESPONSES:
            whole = ranked(machine, RESPONSES[machine.name])
            for prop in whole.step_properties:
                if rule in (None, prop.rule) and prop.on:
                    yield whole, prop, prop.on


def ranking_properties(machine: Machine, response: Response) -> Iterator[Property]:
    if response.ranking is not None:
        yield from _argument(machine, response, response.ranking).properties()
        for fair in response.fair:
            if isinstance(fair, Recurring):
                yield from _Reach(machine, response, fair).properties()


@dataclass(frozen=True)
class Taken:
    """What must be possible for a ranking to say anything: a condition that some state has, or
    one that some step of the actions named has, each in terms of its parameters."""

    what: str
    of_state: Term | None = None
    of_steps: tuple[tuple[Action, Term], ...] = ()


def possible(machine: Machine, response: Response, ranking: Ranking | Urgency) -> Iterator[Taken]:
    """What the ranking speaks of: its premise before its goal, each case with its step, and how a
    recurring step comes nearer."""
    yield from _argument(machine, response, ranking).possible()
    for fair in response.fair:
        if isinstance(fair, Recurring):
            yield from _Reach(machine, response, fair).possible()


def _argument(
    machine: Machine, response: Response, ranking: Ranking | Urgency
) -> _Falling | _Before:
    if isinstance(ranking, Urgency):
        return _Before(machine, response, ranking)
    return _Falling(machine, response, ranking)


@dataclass(frozen=True)
class _Case:
    """A helpful case with its variables renamed, so that no parameter has the same name."""

    number: int
    helpful: Helpful
    when: Term
    at: tuple[Var, ...]
    chosen: tuple[Var, ...]


class _Argument:
    """What every argument shows: the goal is reached, or pending, from the premise on."""

    def __init__(self, machine: Machine, response: Response, pending: Term) -> None:
        self.machine = machine
        self.response = response
        self.names = {v: Var(f"the_{v.name}", v.of) for v in response.over}
        self.over = tuple(self.names.values())
        self.premise, self.goal, self.pending = (
            substitute(term, self.names) for term in (response.premise, response.goal, pending)
        )

    def _begins(self) -> Property:
        return self._says(
            STAY,
            "the premise begins it",
            self.premise >> (self.goal | self.pending),
            "Where the premise holds the goal is reached or pending.",
        )

    def _goes_on(self, action: Action) -> Property:
        return self._says(
            action,
            "pending until the goal",
            self._open() >> new(self.goal | self.pending),
            "The goal stays pending until it is reached.",
        )

    def _begun(self) -> Taken:
        begins = _some(self.over, self.premise & ~self.goal)
        return Taken("the premise holds before the goal does", of_state=begins)

    def _open(self) -> Term:
        return self.pending & ~self.goal

    def _says(
        self, action: Action, what: str, formula: Term, meaning: str, chosen: tuple[Var, ...] = ()
    ) -> Property:
        for variable in reversed((*self.over, *chosen)):
            formula = every(variable, formula)
        return _obligation(self.response, action, what, formula, meaning)


class _Before(_Argument):
    """The goal is reached before a recurring step is."""

    def __init__(self, machine: Machine, response: Response, urgency: Urgency) -> None:
        super().__init__(machine, response, urgency.pending)
        self.before = urgency.before
        if urgency.before not in response.fair:
            raise MachineError(f"{response.name}: {urgency.before.name} is not assumed")

    def properties(self) -> Iterator[Property]:
        yield self._begins()
        yield self._says(
            STAY,
            f"not before: {self.before.name}",
            self._open() >> ~_enabled(self.machine, self.before.actions),
            f"While the goal is pending this is not possible: {self.before.name}.",
        )
        for action in self.machine.actions:
            yield self._goes_on(action)

    def possible(self) -> Iterator[Taken]:
        yield self._begun()
        steps = tuple((self.machine.action(name), TRUE) for name in self.before.actions)
        yield Taken(f"what is not done before is, {self.before.name}", of_steps=steps)


class _Reach:
    """Whatever was done, a recurring step can still come: the assumption that it does is not
    empty."""

    def __init__(self, machine: Machine, response: Response, fair: Recurring) -> None:
        self.machine = machine
        self.response = response
        self.fair = fair
        if fair.by or fair.strong:
            raise MachineError(f"{response.name}: {fair.name} recurs, be it for whom it may")
        ceasing = {name for steps in response.ceasing for name in steps.actions}
        if ceasing & set(fair.nearer):
            raise MachineError(f"{response.name}: {fair.name} comes nearer by steps that cease")
        if fair.nearer and fair.distance is None:
            raise MachineError(f"{response.name}: {fair.name} comes nearer by no distance")

    def properties(self) -> Iterator[Property]:
        name, held_up = self.fair.name, ~_enabled(self.machine, self.fair.actions)
        yield self._says(
            STAY,
            "is never stopped",
            held_up >> _enabled(self.machine, self.fair.nearer),
            f"While this is not possible, a step is that brings it nearer: {name}.",
        )
        if self.fair.distance is None:
            return
        yield self._says(
            STAY,
            "is at a distance",
            self.fair.distance >= 0,
            f"How far this is away is not below zero: {name}.",
        )
        for action in map(self.machine.action, self.fair.nearer):
            yield self._says(
                action,
                "comes nearer",
                held_up >> (new(self.fair.distance) < self.fair.distance),
                f"The step brings this nearer: {name}.",
            )

    def possible(self) -> Iterator[Taken]:
        held_up = ~_enabled(self.machine, self.fair.actions)
        for action in map(self.machine.action, self.fair.nearer):
            what = f"{action.name} brings nearer that {self.fair.name}"
            yield Taken(what, of_steps=((action, held_up),))

    def _says(self, action: Action, what: str, formula: Term, meaning: str) -> Property:
        what = f"{self.fair.name}: {what}"
        return _obligation(self.response, action, what, formula, meaning)


def _obligation(
    response: Response, action: Action, what: str, formula: Term, meaning: str
) -> Property:
    name = f"{response.name}: {what}"
    return Property(response.rule, name, formula, meaning, on=action.name)


def _enabled(machine: Machine, names: Sequence[str]) -> Term:
    """One of these actions is possible, for some values."""
    return either(*(_is_possible(machine.action(name), {}) for name in names))


def _is_possible(action: Action, values: Mapping[Var, Term]) -> Term:
    """The action's guards hold for these values of parameters, and some of the others."""
    others = {p: Var(f"{action.name}_{p.name}", p.of) for p in action.params if p not in values}
    return _some(tuple(others.values()), substitute(action.enabled, {**values, **others}))


class _Falling(_Argument):
    """A rank falls until the goal is reached."""

    def __init__(self, machine: Machine, response: Response, ranking: Ranking) -> None:
        super().__init__(machine, response, ranking.pending)
        self.rank = tuple(substitute(term, self.names) for term in ranking.rank)
        self.cases = tuple(self._case(i, case) for i, case in enumerate(ranking.helpful, 1))

    def _case(self, number: int, helpful: Helpful) -> _Case:
        if len(helpful.at) != len(helpful.fair.by):
            raise MachineError(f"{self.response.name}, case {number}: at does not fit by")
        if helpful.fair not in self.response.fair:
            raise MachineError(f"{self.response.name}, case {number}: {helpful.fair.name} unfair")
        chosen = tuple(v for v in helpful.at if v not in self.names)
        names = {**self.names, **{v: Var(f"some_{v.name}", v.of) for v in chosen}}
        return _Case(
            number,
            helpful,
            substitute(helpful.when, names),
            tuple(names[v] for v in helpful.at),
            tuple(names[v] for v in chosen),
        )

    def properties(self) -> Iterator[Property]:
        yield from self._of_states()
        for action in self.machine.actions:
            yield from self._of_steps(action)

    def possible(self) -> Iterator[Taken]:
        yield self._begun()
        for case in self.cases:
            steps = []
            for action in map(self.machine.action, case.helpful.fair.actions):
                here = both(self._open(), case.when, self._same(action, case))
                steps.append((action, _some((*self.over, *case.chosen), here)))
            what = f"case {case.number}, {case.helpful.fair.name}, is taken"
            yield Taken(what, of_steps=tuple(steps))

    # -- single states

    def _of_states(self) -> Iterator[Property]:
        yield self._begins()
        yield self._says(
            STAY,
            "the rank is natural",
            self._open() >> both(*(term >= 0 for term in self.rank)),
            "While the goal is pending no part of the rank is below zero.",
        )
        yield self._says(
            STAY,
            "some case applies",
            self._open() >> either(*(_some(case.chosen, case.when) for case in self.cases)),
            "While the goal is pending some fair step helps.",
        )
        for case in self.cases:
            if isinstance(case.helpful.fair, Recurring):
                continue  # it comes, be it enabled now or not
            enabled = either(*(self._enabled(case, name) for name in case.helpful.fair.actions))
            yield self._says(
                STAY,
                f"case {case.number} is enabled",
                (self._open() & case.when) >> enabled,
                f"While the case applies this is possible: {case.helpful.fair.name}.",
                case.chosen,
            )

    def _enabled(self, case: _Case, name: str) -> Term:
        """The action's guards hold for the case's values, and some values of the others."""
        action = self.machine.action(name)
        params = _params(action, case.helpful.fair.by)
        return _is_possible(action, dict(zip(params, case.at, strict=True)))

    # -- steps

    def _of_steps(self, action: Action) -> Iterator[Property]:
        exempt = either(*(self._match(action, steps) for steps in self.response.ceasing))
        yield self._goes_on(action)
        yield self._says(
            action,
            "the rank never rises",
            self._open() >> either(new(self.goal), self._falls(), self._stays(), exempt),
            "While the goal is pending no step raises the rank, ceasing steps excepted.",
        )
        for case in self.cases:
            here = self._open() & case.when
            yield self._says(
                action,
                f"case {case.number} goes on",
                here >> either(new(self.goal), self._falls(), new(case.when), exempt),
                "A case goes on applying until the rank has fallen.",
                case.chosen,
            )
            if action.name in case.helpful.fair.actions:
                yield self._says(
                    action,
                    f"case {case.number} helps",
                    (here & self._same(action, case)) >> either(new(self.goal), self._falls()),
                    "The helpful step makes the rank fall.",
                    case.chosen,
                )

    def _same(self, action: Action, case: _Case) -> Term:
        """The step is one for the values that the case speaks of."""
        params = _params(action, case.helpful.fair.by)
        return both(*(eq(p, v) for p, v in zip(params, case.at, strict=True)))

    def _match(self, action: Action, steps: Steps) -> Term:
        """Whether a step is one of those that cease."""
        if action.name not in steps.actions:
            return either()
        pairs = zip(steps.by, _params(action, steps.by), strict=True)
        return both(
            *(eq(p, v) for name, p in pairs for o, v in self.names.items() if o.name == name)
        )

    def _falls(self) -> Term:
        return either(
            *(
                both(*(eq(new(t), t) for t in self.rank[:i]), new(term) < term)
                for i, term in enumerate(self.rank)
            )
        )

    def _stays(self) -> Term:
        return both(*(eq(new(term), term) for term in self.rank))


def _some(variables: tuple[Var, ...], term: Term) -> Term:
    for variable in reversed(variables):
        term = some(variable, term)
    return term


def _params(action: Action, names: Sequence[str]) -> tuple[Var, ...]:
    """The parameters of those names, in that order."""
    found = {p.name: p for p in action.params}
    missing = [name for name in names if name not in found]
    if missing:
        raise MachineError(f"{action.name} has no parameter {', '.join(missing)}")
    return tuple(found[name] for name in names)
