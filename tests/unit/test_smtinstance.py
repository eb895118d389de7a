"""Instances as SMT-LIB: every step asked with exact sums, by two solvers; a twin is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import z3

from kvclaims.checker import instances
from kvclaims.checker.finite import Instance
from kvclaims.checker.smtinstance import queries, smt_of_instance
from kvclaims.spec.language import becomes, without_guard
from kvclaims.spec.pool import POOL, b, queued

QUICK = ("arbitration", "blockclaims", "claims", "elastic/null", "groups/two-claims", "written")


def answers(instance: Instance) -> list[str]:
    context = z3.Context()
    return str(z3.Z3_eval_smtlib2_string(context.ref(), smt_of_instance(instance))).split()


@pytest.mark.parametrize("name", QUICK)
def test_no_step_of_an_instance_breaks_a_property(name: str) -> None:
    instance = instances.PINNED[name]()
    assert answers(instance) == ["unsat"] * queries(instance)


def test_cvc5_answers_alike() -> None:
    cvc5 = pytest.importorskip("cvc5", reason="needs cvc5 (pip install 'kvclaims[cvc5]')")
    solver = cvc5.Solver()
    solver.setOption("incremental", "true")
    parser = cvc5.InputParser(solver)
    parser.setStringInput(
        cvc5.InputLanguage.SMT_LIB_2_6, smt_of_instance(instances.blockclaims()), "instance"
    )
    symbols = parser.getSymbolManager()
    said = []
    while not (command := parser.nextCommand()).isNull():
        said += str(command.invoke(solver, symbols)).split()
    assert said == ["unsat"] * queries(instances.blockclaims())


def test_a_twin_has_a_step_that_breaks_a_property() -> None:
    whole = instances.blockclaims((1, 2), 1, 2, 3)
    twin = replace(whole, machine=without_guard(whole.machine, "accept", 1))
    assert "sat" not in answers(whole)
    assert "sat" in answers(twin)


def test_an_initial_state_that_breaks_an_invariant_is_the_first_answer() -> None:
    start = tuple(
        becomes(queued(b), True, over=(b,)) if u.target.symbol is queued else u for u in POOL.init
    )
    instance = replace(instances.pool(blocks=1, hard=()), machine=replace(POOL, init=start))
    assert answers(instance)[0] == "sat"
