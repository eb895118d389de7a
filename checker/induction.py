"""One obligation for each property and action of a machine, and how it is decided.

The obligation: from the axioms, every invariant before the step and the action's guards, the
property after the step.  A solver is asked whether all that and the negation of the property
can be together.  First quickly and without the facts about sums, which few proofs need; then
with them; then, before it is given its whole time, a search for a small counterexample.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import z3

from kvclaims.checker import smtlib
from kvclaims.checker.ground import Gap, find_gap
from kvclaims.checker.logic import BEFORE, Logic, Side
from kvclaims.checker.smtlib import Premise, Written
from kvclaims.checker.solvers import (
    CVC5,
    DEFAULT,
    PORTFOLIO,
    Z3,
    Answer,
    Options,
    Reply,
    ask_cvc5,
    ask_z3,
    chosen,
)
from kvclaims.spec.language import (
    INITIALLY,
    Action,
    Machine,
    Property,
    Symbol,
    Var,
    show,
    symbols_of,
)
from kvclaims.spec.vocabulary import Verdict

TIMEOUT_MS: Final = 20_000
QUICK_MS: Final = 500

_TOTAL: Final = re.compile(r"total(\d+)")
_MOST_FACTS: Final = 6
"""How many facts a group of them holds at most, so that each has a number of its own."""

Facts = tuple[int, ...]
"""Which of the facts about sums a proof takes as premises, by their numbers in the setting."""


class Given(StrEnum):
    """How much of what holds before a step a proof takes as premises: axioms always."""

    ITSELF = "itself"
    """An invariant alone, of a step nothing: enough where the step touches no symbol of it."""
    ALONE = "alone"
    """And the guards: enough for most other steps, whatever the other invariants say."""
    ALL = "all"
    """And every other invariant."""


@dataclass(frozen=True)
class Taken:
    """What a proof takes as premises."""

    facts: Facts = ()
    given: Given = Given.ALL


_STATUS: Final = {Verdict.PROVED: "unsat", Verdict.NOT_INDUCTIVE: "sat"}


@dataclass(frozen=True)
class Shown:
    """What one solver made of an obligation, and from which premises."""

    solver: str
    answer: Answer
    taken: Taken = Taken()
    reason: str = ""
    cached: bool = False


@dataclass(frozen=True)
class Obligation:
    """One thing to show, and what came of it."""

    machine: str
    rule: str
    name: str
    action: str
    verdict: Verdict
    seconds: float
    gap: Gap | None = None
    reason: str = ""
    solver: str = Z3
    shown: tuple[Shown, ...] = ()
    file: str = ""

    @property
    def cached(self) -> bool:
        """Whether nothing was left to ask a solver."""
        return bool(self.shown) and all(shown.cached for shown in self.shown)

    @property
    def disagree(self) -> bool:
        """Whether one solver proves what another refutes, from the same premises."""
        return {Answer.UNSAT, Answer.SAT} <= {shown.answer for shown in self.shown}

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "machine": self.machine,
            "rule": self.rule,
            "property": self.name,
            "action": self.action,
            "verdict": self.verdict,
            "solver": self.solver,
            "seconds": round(self.seconds, 4),
            "cached": self.cached,
        }
        if self.file:
            found["file"] = self.file
        if self.disagree:
            found["answers"] = {shown.solver: shown.answer for shown in self.shown}
        if self.gap:
            found["before"], found["after"] = dict(self.gap.before), dict(self.gap.after)
        if self.reason:
            found["reason"] = self.reason
        return found


def obligations(machine: Machine, rule: str | None = None) -> Iterator[tuple[Property, str]]:
    """Every (property, action name) that has to be shown, the initial state included."""
    for prop in machine.properties:
        if rule is not None and prop.rule != rule:
            continue
        if not prop.of_steps:
            yield prop, INITIALLY
        for action in machine.actions:
            if prop.speaks_of(action.name):
                yield prop, action.name


@dataclass(frozen=True)
class _Setting:
    """The premises that the obligations of one action share."""

    prover: Prover
    name: str
    env: Mapping[Var, z3.ExprRef]
    side: Side
    given: tuple[Premise, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        """Where facts about sums are given: after the step and before it."""
        return (self.side,) if self.name == INITIALLY else (self.side, BEFORE)

    def facts(self, about: frozenset[int] | None = None) -> Iterator[tuple[int, Premise]]:
        """Facts about sums by number: all, or those that speak of some totals only."""
        ghosts = self.prover.logic.ghosts
        for which, side in enumerate(self.sides):
            for group in range(ghosts.groups):
                if about is None or ghosts.about(group) <= about:
                    first = (2 * group + which) * _MOST_FACTS
                    yield from enumerate(self.prover.facts(side, group)[0], first)

    def fact(self, number: int) -> Premise | None:
        """The fact of that number; None where there is none."""
        found, place = self._group(number)[0], number % _MOST_FACTS
        return found[place] if place < len(found) else None

    def lemmas(self, facts: Facts) -> frozenset[int]:
        """The totals whose lemma the facts rest on."""
        return frozenset[int]().union(*(self._group(number)[1] for number in facts))

    def _group(self, number: int) -> tuple[tuple[Premise, ...], frozenset[int]]:
        group, which = divmod(number // _MOST_FACTS, 2)
        known = which < len(self.sides) and group < self.prover.logic.ghosts.groups
        return self.prover.facts(self.sides[which], group) if known else ((), frozenset())

    def leaves(self, prop: Property) -> bool:
        """Whether the step changes no symbol that the property speaks of."""
        stated = prop.of_steps or prop in self.prover.machine.invariants
        if self.name == INITIALLY or prop.on or not stated:
            return False
        changed = {update.target.symbol for update in self.side.updates}
        return changed.isdisjoint(self.prover.speaks_of(prop))

    def given_to(self, prop: Property, given: Given) -> tuple[Premise, ...]:
        """So much of what is given for `prop`."""
        if given is Given.ITSELF:
            return self.prover.itself(prop)
        others = self.prover.others(prop) if given is Given.ALONE else frozenset[int]()
        return tuple(premise for premise in self.given if id(premise) not in others)


@dataclass(frozen=True)
class _Goal:
    """A property to show in a setting, as the negation of it that must be impossible.

    `totals` are those whose lemma the negation rests on.
    """

    prop: Property
    setting: _Setting
    refuted: Premise
    totals: frozenset[int]
    untouched: bool
    """Whether the step changes no symbol that the property speaks of."""

    def premises(self, taken: Taken) -> tuple[Premise, ...]:
        given = self.setting.given_to(self.prop, taken.given)
        more = [fact for i in taken.facts if (fact := self.setting.fact(i))]
        return (*given, *more, self.refuted)

    @property
    def near(self) -> Facts:
        """The facts that speak of no other sums than the property does."""
        named = _sums(self.refuted)
        facts = self.setting.facts(named)
        return tuple(number for number, fact in facts if _sums(fact) <= named)

    def lemmas(self, taken: Taken) -> list[int]:
        return sorted(self.totals | self.setting.lemmas(taken.facts))

    def text(self, taken: Taken, status: str | None = None) -> str:
        setting, prop = self.setting, self.prop
        logic = setting.prover.logic
        when = setting.name if setting.name == INITIALLY else f"under {setting.name}"
        about = [f"{logic.machine.name}: {prop.rule} '{prop.name}' {when}", prop.meaning]
        return smtlib.script(logic, about, self.premises(taken), setting.env.values(), status)


class Prover:
    """The obligations of one machine."""

    def __init__(
        self,
        machine: Machine,
        timeout_ms: int = TIMEOUT_MS,
        quick_ms: int = QUICK_MS,
        solver: str = Z3,
    ) -> None:
        self.machine = machine
        self.logic = Logic(machine)
        self.timeout_ms = timeout_ms
        self.quick_ms = min(quick_ms, timeout_ms)
        self.solvers = chosen(solver)
        self._settings: dict[str, _Setting] = {}
        self._facts: dict[tuple[str, int], tuple[tuple[Premise, ...], frozenset[int]]] = {}
        self._lemmas: dict[tuple[str, int], Reply] = {}
        self._unmoved: dict[Property, Premise] = {}
        self._symbols: dict[Property, frozenset[Symbol]] = {}
        self._by_itself: dict[tuple[str, Property], Shown] = {}
        self._latest: _Goal | None = None

    def initially(self, prop: Property) -> Obligation:
        return self.examine(prop, INITIALLY)

    def step(self, prop: Property, action: Action) -> Obligation:
        """The property after `action`, given every invariant before it."""
        return self.examine(prop, action.name)

    def usable(self, name: str, known: Mapping[str, Shown]) -> dict[str, Shown]:
        """Those of the kept proofs under the action `name` that take no facts but those that
        there are."""
        return {
            solver: shown
            for solver, shown in known.items()
            if all(self._setting(name).fact(number) for number in shown.taken.facts)
        }

    def examine(
        self, prop: Property, name: str, known: Mapping[str, Shown] | None = None
    ) -> Obligation:
        """The property after the action `name`; solvers in `known` are not asked again."""
        start = time.perf_counter()
        goal = self._goal(prop, name)
        shown: list[Shown] = []
        gap = None
        for solver in self.solvers:
            found = (known or {}).get(solver)
            if found is None and shown:
                found = self._confirm(goal, solver, shown[0].taken)
            elif found is None:
                found, gap = self._show(goal, solver)
            shown.append(found)
            if found.answer is not Answer.UNSAT:
                break
        verdict, reason = _judge(shown, gap)
        return Obligation(
            self.machine.name,
            prop.rule,
            prop.name,
            name,
            verdict,
            time.perf_counter() - start,
            gap,
            reason,
            "+".join(self.solvers),
            tuple(shown),
        )

    def emit(self, found: Obligation, prop: Property) -> Iterator[tuple[Written, str]]:
        """The obligation as a file, after the lemmas that it rests on."""
        machine, name = self.machine.name, found.action
        goal = self._goal(prop, name)
        taken = found.shown[-1].taken
        lemmas = []
        for total in goal.lemmas(taken):
            lemmas.append(smtlib.lemma_file(machine, name, total))
            about = {"kind": "lemma", "total": show(self.logic.ghosts.body(total))}
            where = {"machine": machine, "action": name}
            yield (
                Written(lemmas[-1], "unsat", {**about, **where}),
                self._lemma_text(total, goal.setting, "unsat"),
            )
        status = _STATUS.get(found.verdict, "unknown")
        about = {"kind": "obligation", "machine": machine, "rule": prop.rule}
        more = {"property": prop.name, "action": name, "facts": len(taken.facts), "lemmas": lemmas}
        file = smtlib.obligation_file(machine, name, prop)
        yield Written(file, status, {**about, **more}), goal.text(taken, status)

    # -- building

    def _goal(self, prop: Property, name: str) -> _Goal:
        latest, setting = self._latest, self._setting(name)
        if latest and latest.prop is prop and latest.setting is setting:
            return latest
        if setting.leaves(prop):
            if prop not in self._unmoved:
                self._unmoved[prop] = self._refuted(prop, {}, BEFORE)
            self._latest = _Goal(prop, setting, self._unmoved[prop], frozenset(), True)
            return self._latest
        relied = self.logic.ghosts.relied
        relied.clear()
        refuted = self._refuted(prop, setting.env, setting.side)
        self._latest = _Goal(prop, setting, refuted, frozenset(relied), False)
        return self._latest

    def _refuted(self, prop: Property, env: Mapping[Var, z3.ExprRef], side: Side) -> Premise:
        wanted = (
            self.logic.term(prop.formula, env, BEFORE, side)
            if prop.of_steps
            else self.logic.term(prop.formula, env, side)
        )
        return Premise("to be refuted: the property fails", z3.Not(wanted))

    def _setting(self, name: str) -> _Setting:
        """What is given, built once for each action and shared by its obligations."""
        if name not in self._settings:
            logic, machine = self.logic, self.machine
            given = [*self._axioms]
            env: dict[Var, z3.ExprRef] = {}
            side = logic.initially()
            if name != INITIALLY:
                action = machine.action(name)
                env, side = logic.after(action)
                given += [Premise("a parameter is natural", term) for term in logic.typed(env)]
                given += self._invariants
                given += [
                    Premise(f"guard: {guard.why}", logic.term(guard.condition, env))
                    for guard in action.guards
                ]
            self._settings[name] = _Setting(self, name, env, side, tuple(given))
        return self._settings[name]

    @cached_property
    def _axioms(self) -> tuple[Premise, ...]:
        return tuple(Premise("axiom", self.logic.term(a, {})) for a in self.machine.axioms)

    @cached_property
    def _invariants(self) -> tuple[Premise, ...]:
        return tuple(
            Premise(f"{inv.rule} {inv.name}", self.logic.term(inv.formula, {}))
            for inv in self.machine.invariants
        )

    def others(self, prop: Property) -> frozenset[int]:
        """Which premises, by identity, are invariants other than `prop`."""
        own = self._own.get(prop)
        return frozenset(id(premise) for premise in self._invariants if premise is not own)

    def itself(self, prop: Property) -> tuple[Premise, ...]:
        """The axioms and, of an invariant, the property before a step."""
        return self._axioms if prop.of_steps else (*self._axioms, self._own[prop])

    def speaks_of(self, prop: Property) -> frozenset[Symbol]:
        """The symbols that a property speaks of."""
        if prop not in self._symbols:
            self._symbols[prop] = frozenset(symbols_of(prop.formula))
        return self._symbols[prop]

    @cached_property
    def _own(self) -> dict[Property, Premise]:
        """The invariants, each as a premise."""
        return dict(zip(self.machine.invariants, self._invariants, strict=True))

    def facts(self, side: Side, group: int) -> tuple[tuple[Premise, ...], frozenset[int]]:
        """A group of facts about sums, and the totals whose lemma they rest on.  Built where
        they are needed: they are the larger part by far, and few proofs take any."""
        key = (side.name, group)
        if key not in self._facts:
            ghosts = self.logic.ghosts
            ghosts.relied.clear()
            terms = tuple(Premise("a fact about sums", t) for t in ghosts.facts(side, group))
            self._facts[key] = terms, frozenset(ghosts.relied)
        return self._facts[key]

    def _lemma_text(self, total: int, setting: _Setting, status: str | None = None) -> str:
        constants, terms = self.logic.ghosts.lemma(total, setting.side)
        about = [
            f"{self.machine.name}: total{total} moves only at the places that {setting.name} names",
            f"the total of {show(self.logic.ghosts.body(total))}",
        ]
        premises = [Premise("the summand changes at a place not named", term) for term in terms]
        return smtlib.script(
            self.logic, about, premises, [*constants, *setting.env.values()], status
        )

    # -- deciding: of the proofs only `unsat` counts

    def _show(self, goal: _Goal, solver: str) -> tuple[Shown, Gap | None]:
        """What the first solver makes of it, and a counterexample if there is a small one."""
        if goal.setting.name != INITIALLY:
            enough = Given.ITSELF if goal.untouched else Given.ALONE
            few = self._ask(goal, solver, Taken(given=enough), self.quick_ms // 10)
            if few.answer is Answer.UNSAT:
                return few, None
        quick = self._ask(goal, solver, Taken(), self.quick_ms)
        if quick.answer is Answer.UNSAT:
            return quick, None
        with_facts = self._by_facts(goal, solver, 4 * self.quick_ms)
        if with_facts.answer is Answer.UNSAT:
            return with_facts, None
        action = None if goal.setting.name == INITIALLY else self.machine.action(goal.setting.name)
        if gap := find_gap(self.machine, goal.prop, action):
            return replace(with_facts, reason=""), gap
        if solver == CVC5 and quick.answer is Answer.UNKNOWN:
            share = min(self.timeout_ms // len(PORTFOLIO), 2 * self.quick_ms)
            found = self._try_all(goal, Taken(), share)
            if found.answer is Answer.UNSAT:
                return found, None
        return self._by_facts(goal, solver, self.timeout_ms), None

    def _by_facts(self, goal: _Goal, solver: str, timeout_ms: int) -> Shown:
        """With the facts about sums, those about the sums of the property first.  There are
        many, and few are used: Z3 finds out which, and where it does cvc5 is given those alone."""
        timeout_ms = min(timeout_ms, self.timeout_ms)
        found = self._ask(goal, Z3, Taken(goal.near), min(timeout_ms, self.quick_ms))
        if found.answer is not Answer.UNSAT:
            every = Taken(tuple(number for number, _ in goal.setting.facts()))
            found = self._ask(goal, Z3, every, timeout_ms)
        if solver == Z3:
            return found
        return self._try_all(goal, found.taken, timeout_ms // len(PORTFOLIO))

    def _confirm(self, goal: _Goal, solver: str, taken: Taken) -> Shown:
        """What the second solver makes of the premises from which the first one proved it: its
        `sat` is a disagreement.  Where it cannot tell, the other invariants may help it."""
        found = self._ask(goal, solver, taken, self.quick_ms)
        if found.answer is Answer.UNKNOWN and taken.given is not Given.ALL:
            taken = replace(taken, given=Given.ALL)
            found = self._ask(goal, solver, taken, self.quick_ms)
        if found.answer is not Answer.UNKNOWN:
            return found
        return self._try_all(goal, taken, self.timeout_ms // len(PORTFOLIO))

    def _try_all(self, goal: _Goal, taken: Taken, timeout_ms: int) -> Shown:
        """What cvc5 makes of it by each of its ways, up to the first answer."""
        found = Shown(CVC5, Answer.UNKNOWN)
        for options in PORTFOLIO:
            found = self._ask(goal, CVC5, taken, max(1, timeout_ms), options)
            if found.answer is not Answer.UNKNOWN:
                break
        return found

    def _ask(
        self, goal: _Goal, solver: str, taken: Taken, timeout_ms: int, options: Options = DEFAULT
    ) -> Shown:
        if taken.given is not Given.ITSELF:
            return self._put(goal, solver, taken, timeout_ms, options)
        key = (solver, goal.prop)  # the same question, whatever the step
        if key not in self._by_itself:
            self._by_itself[key] = self._put(goal, solver, taken, timeout_ms, options)
        return self._by_itself[key]

    def _put(
        self, goal: _Goal, solver: str, taken: Taken, timeout_ms: int, options: Options
    ) -> Shown:
        if solver == Z3:
            given = [premise.term for premise in goal.premises(replace(taken, facts=()))]
            tracked = {i: fact.term for i in taken.facts if (fact := goal.setting.fact(i))}
            reply, used = ask_z3(given, self.logic.context, timeout_ms, tracked)
            return Shown(solver, reply.answer, replace(taken, facts=used), reply.reason)
        reply = ask_cvc5(goal.text(taken), timeout_ms, options)
        if reply.answer is Answer.UNSAT:
            for total in goal.lemmas(taken):
                lemma = self._lemma(total, goal.setting).answer
                if lemma is not Answer.UNSAT:
                    why = f"cvc5 does not show that total{total} moves only where the step says"
                    reply = Reply(lemma, why)
        return Shown(solver, reply.answer, taken, reply.reason)

    def _lemma(self, total: int, setting: _Setting) -> Reply:
        """What cvc5 says of a lemma that Z3 proved when it built the obligation."""
        key = (setting.name, total)
        if key not in self._lemmas:
            text = self._lemma_text(total, setting)
            for options in (DEFAULT, *PORTFOLIO):
                self._lemmas[key] = ask_cvc5(text, 2 * self.quick_ms, options)
                if self._lemmas[key].answer is not Answer.UNKNOWN:
                    break
        return self._lemmas[key]


def _sums(premise: Premise) -> frozenset[int]:
    """The totals that a premise speaks of, before or after a step."""
    return frozenset(int(found[1]) for name in premise.names if (found := _TOTAL.match(name)))


def _judge(shown: list[Shown], gap: Gap | None) -> tuple[Verdict, str]:
    last = shown[-1]
    if last.answer is Answer.UNSAT:
        return Verdict.PROVED, ""
    if gap:
        return Verdict.NOT_INDUCTIVE, ""
    if last.answer is Answer.SAT and len(shown) > 1:
        said = ", ".join(f"{s.solver} says {s.answer}" for s in shown)
        why = f" ({last.reason})" if last.reason else ""
        return Verdict.VIOLATED, f"the solvers disagree: {said}{why}"
    reason = last.reason
    if last.answer is Answer.SAT and not reason:
        reason = "the facts about sums do not decide it, and no small state refutes it"
    if len(shown) > 1:
        reason = f"{last.solver} does not confirm it: {reason}"
    return Verdict.UNKNOWN, reason
