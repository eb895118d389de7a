"""F4's blame: the fewest claims, against Z3's optimum, for the specification and the reference."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.checker.blame import (
    fewest_claims,
    judged_wrongly,
    minimal_blame,
    part_that_suffices,
    random_situation,
    suffices,
)
from kvclaims.checker.mutatecode import by_arbiter
from kvclaims.checker.prove import prove
from kvclaims.reference import arbiter
from kvclaims.spec.feasibility import Judgement, Promise, Situation, judge
from kvclaims.spec.fewest import Gains, fewest
from kvclaims.spec.vocabulary import Outcome, Verdict


def blocks(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


# --- against Z3 --------------------------------------------------------------------------


def test_the_blame_is_minimal_on_random_situations() -> None:
    found = minimal_blame(instances=60)
    assert (found.verdict, found.reason) == (Verdict.HOLDS, "")
    assert found.action == "60 random situations of at most 9 claims and 14 blocks, seed 0"


def test_proving_F4_asks_it_too_and_counts_it_apart() -> None:
    report = prove("F4")
    (check,) = report.bounded
    assert (check.name, check.verdict) == ("minimal blame", Verdict.HOLDS)
    assert check not in report.obligations
    assert report.verdict is Verdict.PROVED
    assert replace(report, bounded=(replace(check, verdict=Verdict.VIOLATED),)).verdict is (
        Verdict.VIOLATED
    )


def everyone(situation: Situation) -> Judgement:
    """Blames every claim."""
    found = judge(situation)
    blamed = tuple(sorted(situation.promises)) if found.blocking_claims else ()
    return replace(found, blocking_claims=blamed)


def too_few(situation: Situation) -> Judgement:
    found = judge(situation)
    return replace(found, blocking_claims=found.blocking_claims[1:])


def whoever_came_first(situation: Situation) -> Judgement:
    """Minimal by inclusion, but not always the fewest, and dependent on the order of telling."""
    found = judge(situation)
    if not found.blocking_claims:
        return found
    blamed = list(situation.promises)
    for claim in situation.promises:
        rest = [c for c in blamed if c != claim]
        if suffices(situation, rest):
            blamed = rest
    return replace(found, blocking_claims=tuple(blamed))


def always_waits(situation: Situation) -> Judgement:
    found = judge(situation)
    if found.outcome is Outcome.REFUSED:
        return replace(found, outcome=Outcome.DEFERRED, blocking_claims=())
    return found


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (everyone, "suffices"),
        (too_few, "does not make the request fit"),
        (whoever_came_first, "told in another order"),
        (always_waits, "claims have to end, and the request is told deferred"),
    ],
)
def test_a_judge_that_blames_otherwise_is_caught(planted: object, reason: str) -> None:
    found = minimal_blame(planted)  # type: ignore[arg-type]
    assert found.verdict is Verdict.VIOLATED
    assert reason in found.reason


def test_nothing_refused_is_nothing_shown() -> None:
    assert minimal_blame(instances=0).verdict is Verdict.VACUOUS


def test_Z3_counts_shared_blocks_once_and_loans_once() -> None:
    shared = blocks(1, 2, 3)
    situation = Situation(4, {"a": Promise(shared), "b": Promise(shared)}, {}, need=3)
    assert fewest_claims(situation) == 2
    assert suffices(situation, ["a", "b"])
    assert not suffices(situation, ["a"])
    lent = {"a": frozenset("x"), "b": frozenset("x")}
    loans = Situation(
        4, {"a": Promise(blocks(), 1), "b": Promise(blocks(), 1)}, {}, 4, materializes=lent
    )
    assert fewest_claims(loans) == 1
    assert part_that_suffices(loans, ["a", "b"]) in (["a"], ["b"])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_judged_as_Z3_has_it(seed: int) -> None:
    situation = random_situation(random.Random(seed), claims=6, blocks=10)
    assert [wrong.reason for wrong in judged_wrongly(situation)] == []


# --- the search --------------------------------------------------------------------------


def by_definition(gains: Gains, wanted: int) -> tuple[str, ...]:
    claims = gains.claims
    for size in range(1, len(claims) + 1):
        for ended in combinations(claims, size):
            alone = sum(gains.alone[c] for c in ended)
            shared = sum(g for held, g in gains.together.items() if held <= set(ended))
            if alone + shared >= wanted:
                return ended
    raise AssertionError


names = st.sampled_from("abcdef")
problems = st.builds(
    Gains,
    st.dictionaries(names, st.integers(0, 3), min_size=6, max_size=6),
    st.dictionaries(st.frozensets(names, min_size=1, max_size=3), st.integers(-1, 3), max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(problems, st.integers(1, 12))
def test_the_search_finds_the_first_of_the_smallest_sets(gains: Gains, wanted: int) -> None:
    try:
        expected = by_definition(gains, wanted)
    except AssertionError:
        return
    try:
        assert fewest(gains, wanted) == expected
    except ValueError:
        whole = sum(gains.alone.values()) + sum(gains.together.values())
        assert whole < wanted, "refused only where all claims together are not enough"


def test_an_exhausted_search_still_spares_whom_it_can() -> None:
    gains = Gains(dict.fromkeys("abcdef", 1), {frozenset("ab"): 4, frozenset("cdef"): 1})
    assert fewest(gains, 6) == ("a", "b")
    found = fewest(gains, 6, limit=1)
    assert found == fewest(gains, 6, limit=1)

    def freed(ended: frozenset[str]) -> int:
        return len(ended) + sum(g for held, g in gains.together.items() if held <= ended)

    assert freed(frozenset(found)) >= 6
    assert all(freed(frozenset(found) - {c}) < 6 for c in found)


def test_forty_claims_that_overlap_are_judged_in_no_time() -> None:
    rng = random.Random(1)
    promises = {
        f"c{i:02}": Promise(frozenset(rng.sample(range(60), rng.randint(1, 6))), rng.randint(0, 3))
        for i in range(40)
    }
    used = len(frozenset().union(*(p.covered for p in promises.values())))
    used += sum(p.reserve for p in promises.values())
    situation = Situation(used, promises, {}, need=used // 2)
    start = time.process_time()
    found = judge(situation)
    assert time.process_time() - start < 5.0, "pairs and triples of 40 alone would take longer"
    assert found.outcome is Outcome.REFUSED
    assert found == judge(situation)
    assert suffices(situation, found.blocking_claims)
    assert not any(
        suffices(situation, set(found.blocking_claims) - {c}) for c in found.blocking_claims
    )


# --- the reference -----------------------------------------------------------------------


by_the_reference = partial(by_arbiter, arbiter)
"""The reference's own arbiter, which shares no code with `judge`."""


def test_the_reference_blames_as_few_claims_as_Z3_needs() -> None:
    found = minimal_blame(by_the_reference, instances=60, seed=1)
    assert (found.verdict, found.reason) == (Verdict.HOLDS, "")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_reference_and_the_specification_answer_alike(seed: int) -> None:
    situation = random_situation(random.Random(seed))
    assert by_the_reference(situation) == judge(situation)
