"""Proofs: every invariant holds initially and is kept by every action, for any sizes.

One obligation for each action and property.  What cannot be shown is told apart: NOT INDUCTIVE
comes with two states and the action between them, UNKNOWN says that the solver gave up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import z3

from kvclaims.checker.ground import Gap, find_gap
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.logic import BEFORE, Logic, Side
from kvclaims.checker.verdicts import Progress, worst
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Action, Machine, Property, Var
from kvclaims.spec.vocabulary import RULES, Verdict

TIMEOUT_MS: Final = 20_000
QUICK_MS: Final = 500
INITIALLY: Final = "initially"


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
    solver: str = "z3"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "machine": self.machine,
            "rule": self.rule,
            "property": self.name,
            "action": self.action,
            "verdict": self.verdict,
            "solver": self.solver,
            "seconds": round(self.seconds, 4),
        }
        if self.gap:
            found["before"], found["after"] = dict(self.gap.before), dict(self.gap.after)
        if self.reason:
            found["reason"] = self.reason
        return found


@dataclass(frozen=True)
class ProofReport:
    obligations: tuple[Obligation, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """PROVED only if everything was; an empty selection is VACUOUS."""
        return worst(obligation.verdict for obligation in self.obligations)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "obligations": [obligation.to_json() for obligation in self.obligations],
        }

    def lines(self) -> Iterator[str]:
        """A line for each rule and machine, then what was not proved, in full."""
        groups: dict[tuple[str, str], list[Obligation]] = {}
        for obligation in self.obligations:
            groups.setdefault((obligation.rule, obligation.machine), []).append(obligation)
        for (rule, machine), group in sorted(groups.items()):
            proved = sum(o.verdict is Verdict.PROVED for o in group)
            seconds = sum(o.seconds for o in group)
            yield (
                f"{rule:4} {machine:12} {proved:4}/{len(group):<4} {seconds:6.2f} s  "
                f"{RULES[rule].meaning}"
            )
        for obligation in self.obligations:
            if obligation.verdict is not Verdict.PROVED:
                yield (
                    f"{obligation.verdict}: {obligation.rule} {obligation.name!r} of "
                    f"{obligation.machine} under {obligation.action}: "
                    + RULES[obligation.rule].meaning
                    + (f" ({obligation.reason})" if obligation.reason else "")
                )
                if obligation.gap:
                    yield from obligation.gap.lines()
        yield f"{self.verdict}: {len(self.obligations)} obligations in {self.seconds:.2f} s"


class Prover:
    """The obligations of one machine."""

    def __init__(
        self, machine: Machine, timeout_ms: int = TIMEOUT_MS, quick_ms: int = QUICK_MS
    ) -> None:
        self.machine = machine
        self.logic = Logic(machine)
        self.timeout_ms = timeout_ms
        self.quick_ms = min(quick_ms, timeout_ms)
        self._settings: dict[str, _Setting] = {}

    def initially(self, prop: Property) -> Obligation:
        return self._discharge(prop, self._setting(INITIALLY))

    def step(self, prop: Property, action: Action) -> Obligation:
        """The property after `action`, given every invariant before it."""
        return self._discharge(prop, self._setting(action.name))

    def _setting(self, name: str) -> _Setting:
        """What is given, built once for each action and shared by its obligations."""
        if name not in self._settings:
            logic, machine = self.logic, self.machine
            given = [logic.term(axiom, {}) for axiom in machine.axioms]
            env: dict[Var, z3.ExprRef] = {}
            side = logic.initially()
            if name != INITIALLY:
                action = machine.action(name)
                env, side = logic.after(action)
                given += logic.typed(env)
                given += [logic.term(inv.formula, {}) for inv in machine.invariants]
                given.append(logic.term(action.enabled, env))
            facts = [*logic.ghosts.facts(side)]
            if name != INITIALLY:
                facts += logic.ghosts.facts(BEFORE)
            self._settings[name] = _Setting(name, env, side, given, facts)
        return self._settings[name]

    def _discharge(self, prop: Property, setting: _Setting) -> Obligation:
        start = time.perf_counter()
        wanted = (
            self.logic.term(prop.formula, setting.env, BEFORE, setting.side)
            if prop.of_steps
            else self.logic.term(prop.formula, setting.env, setting.side)
        )
        verdict, gap, reason = self._decide(prop, setting, z3.Not(wanted))
        seconds = time.perf_counter() - start
        return Obligation(
            self.machine.name, prop.rule, prop.name, setting.name, verdict, seconds, gap, reason
        )

    def _decide(
        self, prop: Property, setting: _Setting, refuted: z3.ExprRef
    ) -> tuple[Verdict, Gap | None, str]:
        """Quickly without the facts about sums, which most proofs do not need; then a search
        for a small counterexample; then with the facts.  Of the proofs only `unsat` counts."""
        answer, _ = self._ask([*setting.given, refuted], self.quick_ms)
        if answer == z3.unsat:
            return Verdict.PROVED, None, ""
        action = None if setting.name == INITIALLY else self.machine.action(setting.name)
        if gap := find_gap(self.machine, prop, action):
            return Verdict.NOT_INDUCTIVE, gap, ""
        answer, reason = self._ask([*setting.given, *setting.facts, refuted], self.timeout_ms)
        if answer == z3.unsat:
            return Verdict.PROVED, None, ""
        if answer == z3.sat:
            reason = "the facts about sums do not decide it, and no small state refutes it"
        return Verdict.UNKNOWN, None, reason

    def _ask(self, assertions: list[z3.ExprRef], timeout_ms: int) -> tuple[z3.CheckSatResult, str]:
        solver = z3.Solver(ctx=self.logic.context)
        solver.set("timeout", timeout_ms)
        solver.add(*assertions)
        answer = solver.check()
        return answer, solver.reason_unknown() if answer == z3.unknown else ""


@dataclass(frozen=True)
class _Setting:
    """The premises that the obligations of one action share."""

    name: str
    env: Mapping[Var, z3.ExprRef]
    side: Side
    given: list[z3.ExprRef]
    facts: list[z3.ExprRef]


def obligations(machine: Machine, rule: str | None = None) -> Iterator[tuple[Property, str]]:
    """Every (property, action name) that has to be shown, the initial state included."""
    for prop in machine.properties:
        if rule is not None and prop.rule != rule:
            continue
        if not prop.of_steps:
            yield prop, INITIALLY
        for action in machine.actions:
            if prop.on in (None, action.name):
                yield prop, action.name


def prove(
    rule: str | None = None,
    machine: str | None = None,
    progress: Progress | None = None,
    timeout_ms: int = TIMEOUT_MS,
) -> ProofReport:
    """Discharge every obligation of a rule and machine, or of all.

    An obligation that takes the solver longer than `timeout_ms` is UNKNOWN.  Raises
    BadOperation for an unknown rule or machine.
    """
    if rule is not None and rule not in RULES:
        raise BadOperation(f"unknown rule {rule!r} (known: {', '.join(RULES)})")
    if machine is not None and machine not in MACHINES:
        raise BadOperation(f"unknown machine {machine!r} (known: {', '.join(MACHINES)})")
    start = time.perf_counter()
    done: list[Obligation] = []
    for name, declared in MACHINES.items():
        if machine not in (None, name):
            continue
        done += prove_machine(declared, rule, progress, timeout_ms)
    if rule is not None and not done:
        raise BadOperation(f"no machine states rule {rule} yet")
    return ProofReport(tuple(done), time.perf_counter() - start)


def prove_machine(
    machine: Machine,
    rule: str | None = None,
    progress: Progress | None = None,
    timeout_ms: int = TIMEOUT_MS,
) -> list[Obligation]:
    prover = Prover(machine, timeout_ms)
    done = []
    for prop, action in obligations(machine, rule):
        found = (
            prover.initially(prop)
            if action == INITIALLY
            else prover.step(prop, machine.action(action))
        )
        done.append(found)
        if progress:
            progress(f"{found.rule} {found.name} under {found.action}: {found.verdict}")
    return done
