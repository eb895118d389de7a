"""Terms as Python text over a shadow: held against the evaluation of finite instances."""

from __future__ import annotations

import random

import pytest

from kvclaims.checker.finite import evaluator
from kvclaims.checker.instances import PINNED
from kvclaims.checker.monitorcheck import Stage
from kvclaims.checker.stepcode import Compiler, Table
from kvclaims.spec import pool
from kvclaims.spec.language import BOOL, Bind, Lit, Symbol, Term, every, some


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


def any_value(rng: random.Random, symbol: Symbol) -> int:
    """A value of the symbol, mostly the default: then there is something to tell apart."""
    most = 1 if symbol.range == BOOL else max(2, len(symbol.range.values) - 1)
    return rng.choice((0, 0, rng.randint(0, most)))


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


def test_what_no_shadow_can_tell_is_refused() -> None:
    from kvclaims.spec.language import Op, new

    compiler = Compiler(Stage(PINNED["pool/ways"]()).monitor().shadow)
    with pytest.raises(TypeError, match="cannot be monitored"):
        compiler.term(new(Lit(True, BOOL)))
    with pytest.raises(TypeError, match="unknown operator"):
        compiler.term(Op("xor", (Lit(True, BOOL), Lit(True, BOOL))))
