"""The reference's arbiter alone: rules F1, F4 and F6 on sets of blocks."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from kvclaims.reference.arbiter import Answer, Owed, Question, decide
from kvclaims.spec.vocabulary import Outcome


def ask(
    usable: int,
    need: int,
    claims: dict[str, Owed] | None = None,
    active: dict[str, set[int]] | None = None,
    hits: set[int] | None = None,
) -> Answer:
    others = {name: frozenset(blocks) for name, blocks in (active or {}).items()}
    return decide(Question(usable, claims or {}, others, frozenset(hits or ()), need))


def owed(*covered: int, reserve: int = 0, lends: set[str] | None = None) -> Owed:
    return Owed(frozenset(covered), reserve, frozenset(lends or ()))


def test_F1_a_block_both_protected_and_held_counts_once() -> None:
    answer = ask(10, 4, {"c": owed(1, 2, 3, 4, 5, 6)}, {"r": {4, 5, 6}}, {1})
    assert answer.outcome is Outcome.SERVED
    assert answer.together == 10


def test_F4_the_shortfall_leaves_other_requests_out_and_missing_now_does_not() -> None:
    answer = ask(10, 7, {"c": owed(1, 2, 3, 4)}, {"r": {5, 6, 7}})
    assert (answer.outcome, answer.shortfall, answer.missing_now) == (Outcome.REFUSED, 1, 4)


def test_F4_congestion_names_whose_end_brings_blocks_back() -> None:
    active = {"reader": {1, 2}, "writer": {5, 6}, "sharer": {5, 6}}
    answer = ask(8, 6, {"c": owed(1, 2)}, active)
    assert (answer.outcome, answer.waits_on) == (Outcome.DEFERRED, ("sharer", "writer"))


def test_F4_capacity_blames_nobody() -> None:
    answer = ask(8, 7, {"c": owed(1)}, hits={2, 3})
    assert (answer.outcome, answer.shortfall) == (Outcome.CAPACITY_REQUIRED, 1)
    assert answer.blocking == answer.waits_on == ()


def test_F4_claims_that_share_blocks_must_end_together() -> None:
    claims = {"a": owed(1, 2, 3), "b": owed(1, 2, 3), "c": owed(4)}
    assert ask(4, 3, claims).blocking == ("a", "b")


def test_F6_a_claim_whose_end_does_not_help_is_not_named() -> None:
    claims = {"a": owed(1, 2), "z": owed(3, 4, 5, 6)}
    assert ask(6, 4, claims, hits={1, 2}).blocking == ("z",)


def test_F3_what_two_claims_are_owed_is_lent_once() -> None:
    claims = {"a": owed(reserve=1, lends={"k"}), "b": owed(reserve=1, lends={"k"})}
    assert ask(2, 1, claims).outcome is Outcome.SERVED
    assert ask(2, 2, claims).outcome is Outcome.REFUSED


def test_F3_the_claim_that_stays_lends_where_the_blamed_one_did() -> None:
    claims = {
        "a": owed(1, reserve=1, lends={"k"}),
        "b": owed(reserve=1, lends={"k"}),
    }
    assert ask(2, 1, claims).blocking == ("a",)


blocks = st.frozensets(st.integers(1, 8), max_size=5)
claims_of = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Owed, blocks, st.integers(0, 3)), max_size=4
)


@given(
    claims_of,
    st.dictionaries(st.sampled_from("rst"), blocks, max_size=3),
    blocks,
    st.integers(0, 9),
)
def test_F4_blame_suffices_and_no_proper_subset_does(
    claims: dict[str, Owed], active: dict[str, frozenset[int]], hits: frozenset[int], need: int
) -> None:
    answer = decide(Question(8, claims, active, hits, need))
    assert answer == decide(Question(8, claims, active, hits, need)), "same state, same answer"
    if answer.outcome is not Outcome.REFUSED:
        assert answer.blocking == ()
        return
    subsets = chain.from_iterable(
        combinations(answer.blocking, size) for size in range(len(answer.blocking) + 1)
    )
    for ended in subsets:
        rest = {name: claim for name, claim in claims.items() if name not in ended}
        fits = decide(Question(8, rest, {}, hits, need)).outcome is Outcome.SERVED
        assert fits == (ended == answer.blocking)
