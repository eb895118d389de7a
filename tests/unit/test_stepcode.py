"""Terms as Python text over a shadow: held against the evaluation of finite instances."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvclaims.checker import stepcheck, stepcode
from kvclaims.checker.finite import evaluator
from kvclaims.checker.instances import PINNED
from kvclaims.checker.monitorcheck import Stage
from kvclaims.checker.stepcheck import (
    MACHINES,
    UNTOLD,
    Drawn,
    any_value,
    check_refused,
    check_steps,
    check_terms,
    drawn,
    terms_of,
)
from kvclaims.checker.stepcode import Compiler, Place, Shadow, Table, _operation
from kvclaims.checker.stepcost import check_cost, costs, tick_costs
from kvclaims.checker.stepterms import FORMS
from kvclaims.spec import claims, pool
from kvclaims.spec.language import (
    BOOL,
    Bind,
    Lit,
    Machine,
    Op,
    Symbol,
    Term,
    Update,
    Var,
    every,
    some,
    symbols_of,
)


def terms() -> list[Term]:
    """Every property of states of the pool, what they count, and each of them denied."""
    formulas = [p.formula for p in pool.PROPERTIES if not p.of_steps]
    counts: list[Term] = [pool.usable, pool.reclaimable, pool.headroom, pool.promised]
    counts += [pool.count_committed, pool.count_protected]
    counts += [pool.count_unprotected, pool.count_let_go]
    wide = [
        some(pool.b, pool.protected(pool.b) | pool.in_use(pool.b)),
        every(pool.b, ~pool.protected(pool.b) | pool.queued(pool.b)),
        some(pool.b, pool.queued(pool.b) & ~pool.null(pool.b)),
        Bind("total", pool.c, pool.reserve(pool.c) + pool.reserve(pool.c)),
        every(pool.c, (Lit(0, pool.NAT) < pool.reserve(pool.c)) >> pool.responsible(pool.c)),
    ]
    return [*formulas, *counts, *wide, *(~formula for formula in (*formulas, *wide[:3]))]


@pytest.mark.parametrize("name", ["pool/ways", "pool/soft", "pool/keys", "pool/requests"])
def test_a_term_means_the_same_over_a_shadow_and_over_an_instance(name: str) -> None:
    world, asked = Stage(PINNED[name]()), terms()
    holding = evaluator(world.instance, [(term, {}) for term in asked])
    watching = world.monitor()
    for symbol, place in world.slots:
        for sort, element in zip(symbol.domain, place, strict=True):
            watching.shadow.meet(sort, element)
    read = [Compiler(watching.shadow).term(term) for term in asked]
    rng, seen = random.Random(1), set()
    for _ in range(300):
        state = tuple(any_value(rng, symbol) for symbol, _ in world.slots)  # mostly unreachable
        world.put(watching, state)
        found = [int(one({})) for one in read]
        assert found == [int(value) for value in holding(state)]
        seen.add(tuple(found))
    both = [sum(found[i] != 0 for found in seen) for i in range(len(asked))]
    constant = sum(n in (0, len(seen)) for n in both)
    assert constant <= len(asked) // 3, "too many terms are the same in every state"


# --- against a plain reading -------------------------------------------------------------


def test_steps_and_terms_mean_what_is_declared() -> None:
    assert check_steps(10) is None
    assert check_terms(2) is None


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: len(machine.symbols))
def test_most_terms_are_not_the_same_in_every_state_that_is_drawn(machine: Machine) -> None:
    rng = random.Random(2)
    states = [drawn(machine, rng) for _ in range(40)]
    closed = [term for term in terms_of(machine) if not term.free and symbols_of(term)]
    constant = [term for term in closed if len({state.read(term, {}) for state in states}) == 1]
    assert len(constant) <= len(closed) // 3


def test_a_relation_of_three_is_asked_for_all_of_its_places() -> None:
    """Somebody stands between two others; nobody between one and himself."""
    between = next(symbol for symbol in FORMS.symbols if symbol.name == "between")
    one, other = (Var(sort.name, sort) for sort in (between.domain[0], between.domain[2]))
    shadow = Shadow(FORMS)
    shadow.set(between, ("a", "b", "c"), True)
    value = Compiler(shadow).term(some(one, between(one, one, other)))
    assert not value({other: "c"})
    shadow.set(between, ("a", "a", "c"), True)
    assert value({other: "c"})


def test_a_plain_reading_reads_element_by_element() -> None:
    claim, block = Var("c", pool.CLAIM), Var("b", pool.BLOCK)
    state = Drawn(
        {pool.CLAIM: ["c0", "c1"], pool.BLOCK: ["b0", "b1"]},
        {pool.covers: {("c0", "b0"): True, ("c0", "b1"): True}, pool.reserve: {("c1",): 3}},
    )
    assert state.read(every(block, pool.covers(claim, block)), {claim: "c0"})
    assert not state.read(some(block, pool.covers(claim, block)), {claim: "c1"})
    assert state.read(pool.promised, {}) == 3
    assert state.read(Lit(2, pool.NAT) + pool.reserve(claim), {claim: "c1"}) == 5


def never_less(kind: str, args: Any) -> str:
    return _operation("le" if kind == "lt" else kind, args)


def only_some(update: Update) -> Term:
    """As if a bulk update wrote nothing but where a block is null, or a claim is hard."""
    (var,) = update.over
    symbol = {pool.CLAIM: pool.hard, pool.BLOCK: pool.null}.get(var.sort)
    return symbol(var) if symbol else Lit(True, BOOL)


FAULTS = {
    "a comparison": ("_operation", never_less, "meaning"),
    "a negation": ("negation", lambda term: term, "meaning"),
    "where a bulk update looks": ("_where", only_some, "meaning"),
    "an index": ("_Writer._asserted", lambda *_: (), "cost"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_text_with_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, broken, what = FAULTS[fault]
    monkeypatch.setattr(f"kvclaims.checker.stepcode.{where}", broken)
    monkeypatch.setattr(stepcode, "_TEXTS", {})
    found = check_steps(10) or check_terms(1)
    if what == "meaning":
        assert found
    else:
        assert found is None
        assert "instructions" in (check_cost() or "")


def test_indexes_of_values_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def added_only(having: Any, place: Place, _old: Any, value: Any) -> None:
        having[value].add(place)

    monkeypatch.setattr(stepcode, "_moved", added_only)
    assert "index of the values" in (check_steps(3) or "")


def test_sums_and_indexes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Table.set

    def without_indexes(table: Table, place: Place, value: Any) -> None:
        indexes, table._indexes = table._indexes, {}
        right(table, place, value)
        table._indexes = indexes

    monkeypatch.setattr(Table, "set", without_indexes)
    assert "index" in (check_steps(3) or "")


def test_a_step_costs_the_same_in_a_larger_pool() -> None:
    assert check_cost() is None
    small, more = costs(1, 1, 1), costs(20, 1, 1)
    assert small == more
    turned_away = next(step for step in small if step[1] == "turn_away")
    assert costs(1, 5, 1)[turned_away] > small[turned_away] > 0


def test_time_passes_at_the_cost_of_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tick_costs(1) == tick_costs(20) > 0
    monkeypatch.setattr(stepcode, "_where", lambda _: Lit(True, BOOL))
    monkeypatch.setattr(stepcode, "_TEXTS", {})
    assert tick_costs(1) < tick_costs(20)
    assert (check_cost() or "").startswith("tick")


def test_an_index_has_no_empty_entries_and_holds_what_was_there_before_it() -> None:
    table = Table(Symbol("speaks", (pool.CLAIM, pool.BLOCK)))
    table.set(("c", 1), True)
    assert table.by(0) == {"c": {("c", 1)}}
    table.set(("c", 2), True)
    table.set(("d", 2), True)
    assert table.by(1) == {1: {("c", 1)}, 2: {("c", 2), ("d", 2)}}
    table.set(("c", 1), False)
    table.set(("c", 2), False)
    assert table.by(0) == {"d": {("d", 2)}}
    assert (table.total, table.values) == (1, {("d", 2): True})


def test_an_index_of_values_has_no_empty_entries_and_holds_what_was_there_before_it() -> None:
    table = Table(claims.phase)
    table.set(("c",), 1)
    assert table.having == {1: {("c",)}}
    table.set(("d",), 1)
    table.set(("c",), 2)
    assert table.having == {1: {("d",)}, 2: {("c",)}}
    table.set(("d",), 0)
    assert table.having == {2: {("c",)}}


def test_that_a_claim_is_undecided_is_seen_without_looking_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = stepcode._Writer._asserted

    def without_values(writer: Any, var: Var, part: Term, hidden: Any) -> Any:
        return (
            () if isinstance(part, Op) and part.kind == "eq" else right(writer, var, part, hidden)
        )

    assert tick_costs(1) == tick_costs(20)
    monkeypatch.setattr(stepcode._Writer, "_asserted", without_values)
    monkeypatch.setattr(stepcode, "_TEXTS", {})
    assert tick_costs(1) < tick_costs(20)


@pytest.mark.parametrize("term", UNTOLD, ids=repr)
def test_what_no_shadow_can_tell_is_refused(term: Term, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(Stage(PINNED["pool/ways"]()).monitor().shadow)
    with pytest.raises(TypeError, match=r"cannot be monitored|unknown operator"):
        compiler.term(term)
    assert check_refused() is None
    monkeypatch.setattr(stepcheck, "UNTOLD", (Lit(True, BOOL),))
    assert "is told" in (check_refused() or "")
