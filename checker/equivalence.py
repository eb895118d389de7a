"""Whether an altered action is the same action: proved for any sizes, under what is proved.

Two versions of an action are equivalent if in every state that satisfies the invariants both
guards hold or neither, and where they hold every symbol has the same value afterwards.  The
invariants are the machine's own, and lemmas read off the pinned instances, which are proved
inductive before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
import z3

from kvclaims.checker.altered import instances_of, pinned
from kvclaims.checker.logic import BEFORE, Logic
from kvclaims.checker.solvers import Answer, ask_z3
from kvclaims.spec.language import (
    BOOL,
    Action,
    Lit,
    Machine,
    Property,
    Symbol,
    Term,
    Var,
    every,
    one_of,
    show,
)

QUICK_MS: Final = 1_000
SLOW_MS: Final = 4_000


class Equivalence:
    """Decides for one machine whether an altered action does what the declared one does."""

    def __init__(self, machine: Machine) -> None:
        self.machine = with_lemmas(machine)
        self.lemmas = len(self.machine.properties) - len(machine.properties)
        self.logic = Logic(self.machine)

    def proved(self, action: Action) -> bool:
        """Whether the action of this name in the machine and `action` are equivalent."""
        original = self.machine.action(action.name)
        given, env = self._given(original)
        old = self.logic.term(original.enabled, env)
        new = self.logic.term(action.enabled, env)
        if original.enabled != action.enabled and not self._impossible([*given, old != new]):
            return False
        if original.updates == action.updates:
            return True
        return all(
            self._impossible([*given, old, different])
            for different in self._different_values(original, action)
        )

    def _given(self, action: Action) -> tuple[list[z3.ExprRef], dict[Var, z3.ExprRef]]:
        logic = self.logic
        env, _ = logic.after(action)
        given = [logic.term(axiom, {}) for axiom in self.machine.axioms]
        given += [logic.term(inv.formula, {}) for inv in self.machine.invariants]
        return [*given, *logic.typed(env)], env

    def _different_values(self, original: Action, action: Action) -> Iterator[z3.ExprRef]:
        """For each symbol that the two treat differently: its values at some place differ."""
        _, before = self.logic.after(original)
        _, after = self.logic.after(action)
        symbols = {u.target.symbol for u in (*original.updates, *action.updates)}
        for symbol in sorted(symbols, key=lambda s: s.name):
            if _of(original, symbol) == _of(action, symbol):
                continue
            place = tuple(
                self.logic.constant(f"place{i}", sort) for i, sort in enumerate(symbol.domain)
            )
            read = self.logic.read
            yield read(symbol, place, before) != read(symbol, place, after)

    def _impossible(self, assertions: list[z3.ExprRef]) -> bool:
        """Without the facts about sums, which few proofs need, then with them."""
        context = self.logic.context
        reply, _ = ask_z3(assertions, context, QUICK_MS)
        if reply.answer is Answer.UNSAT:
            return True
        ghosts = self.logic.ghosts
        facts = [term for i in range(ghosts.groups) for term in ghosts.facts(BEFORE, i)]
        if not facts:
            return False
        reply, _ = ask_z3([*assertions, *facts], context, SLOW_MS)
        return reply.answer is Answer.UNSAT


def _of(action: Action, symbol: Symbol) -> list[object]:
    return [update for update in action.updates if update.target.symbol == symbol]


# --- lemmas ------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def with_lemmas(machine: Machine) -> Machine:
    """The machine with those lemmas that are inductive, all of them together: candidates that
    some action does not keep are left out until none is."""
    lemmas = [Property("", show(f), f, "a lemma", goal=False) for f in _candidates(machine)]
    while lemmas:
        whole = replace(machine, properties=(*machine.properties, *lemmas))
        lost = _not_kept(whole, lemmas)
        if not lost:
            return whole
        lemmas = [lemma for lemma in lemmas if lemma not in lost]
    return machine


def _candidates(machine: Machine) -> Iterator[Term]:
    """What holds in every state of every pinned instance, of three forms: a symbol takes only
    some of its values; it takes only those where a relation holds; one relation holds only
    where another does."""
    flexible = [symbol for symbol in machine.symbols if not symbol.rigid]
    for symbol in flexible:
        if symbol.range.values:
            yield from _ranges(machine, symbol, None)
    for relation in flexible:
        if relation.range != BOOL or not relation.domain:
            continue
        for symbol in flexible:
            if symbol == relation or symbol.domain != relation.domain:
                continue
            if symbol.range.values:
                yield from _ranges(machine, symbol, relation)
            elif symbol.range == BOOL:
                places = _places(symbol)
                lemma = _over(places, relation(*places) >> symbol(*places))
                if all(pinned(n).columns.mask(lemma, {}).all() for n in _names(machine)):
                    yield lemma


def _ranges(machine: Machine, symbol: Symbol, where: Symbol | None) -> Iterator[Term]:
    """The symbol takes only the values it was seen with (where a relation holds), if these are
    not all."""
    seen: set[int] = set()
    for name in _names(machine):
        known = pinned(name)
        for slot, (of, args) in enumerate(known.compiled.slots):
            if of != symbol:
                continue
            values = known.columns.row(slot)
            if where is not None:
                values = values[known.columns.row(known.world.index[where, args])]
            seen |= set(np.unique(values).tolist())
    if seen and len(seen) < len(symbol.range.values):
        places = _places(symbol)
        within = one_of(symbol(*places), *(Lit(v, symbol.range) for v in sorted(seen)))
        yield _over(places, within if where is None else where(*places) >> within)


def _names(machine: Machine) -> list[str]:
    return instances_of(machine.name)


def _places(symbol: Symbol) -> tuple[Var, ...]:
    return tuple(Var(f"at{i}", sort) for i, sort in enumerate(symbol.domain))


def _over(places: tuple[Var, ...], body: Term) -> Term:
    for place in reversed(places):
        body = every(place, body)
    return body


def _not_kept(machine: Machine, lemmas: list[Property]) -> list[Property]:
    """The lemmas that the initial state or some action is not shown to keep."""
    logic = Logic(machine)
    axioms = [logic.term(axiom, {}) for axiom in machine.axioms]
    before = [logic.term(inv.formula, {}) for inv in machine.invariants]
    cases = [(axioms, dict[Var, z3.ExprRef](), logic.initially())]
    for action in machine.actions:
        env, side = logic.after(action)
        guard = logic.term(action.enabled, env)
        cases.append(([*axioms, *before, *logic.typed(env), guard], dict(env), side))
    lost = []
    for lemma in lemmas:
        for given, env, side in cases:
            wanted = logic.term(lemma.formula, env, side)
            reply, _ = ask_z3([*given, z3.Not(wanted)], logic.context, QUICK_MS)
            if reply.answer is not Answer.UNSAT:
                lost.append(lemma)
                break
    return lost
