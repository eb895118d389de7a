"""KV groups: blocks of several sizes in one pool, and the faults that two groups bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvclaims.checker import instances
from kvclaims.checker.explore import Counterexample, explore_instance, search
from kvclaims.checker.finite import Instance, compile_instance
from kvclaims.spec.groups import GROUPS
from kvclaims.spec.language import without_guard


def without(action: str, why: str, instance: Instance) -> dict[str, Counterexample]:
    """The shortest runs, by rule, of the instance without the one guard that says `why`."""
    (index,) = (i for i, g in enumerate(GROUPS.action(action).guards) if why in g.why)
    twin = replace(instance, machine=without_guard(GROUPS, action, index))
    found: dict[str, Counterexample] = {}
    for example in explore_instance(twin, "groups").counterexamples:
        known = found.get(example.prop.rule)
        if known is None or len(example.steps) < len(known.steps):
            found[example.prop.rule] = example
    return found


def actions(example: Counterexample) -> list[str]:
    return [label.partition("(")[0] for label, _ in example.steps]


def hits(instance: Instance) -> set[int]:
    """The lengths, in tokens, of the hits that some run settles."""
    compiled = compile_instance(instance)
    (place,) = (i for i, (symbol, _) in enumerate(compiled.slots) if symbol.name == "hit")
    return {state[place] for state in search(compiled).order}


def test_a_hit_is_as_long_as_every_group_has_it_and_ends_on_all_their_boundaries() -> None:
    """Blocks of 2 tokens beside blocks of 1: nothing of 1 token, though one group has that."""
    assert hits(instances.groups()) == {0, 2}


def test_blocks_of_2_and_3_tokens_meet_at_6() -> None:
    """With every block of six tokens found, 6 is the only hit that can be settled but none."""
    compiled = compile_instance(instances.groups(blocks=5, sizes=(3, 2), windows=(0, 0), tokens=6))
    place = {(symbol.name, args): i for i, (symbol, args) in enumerate(compiled.slots)}
    state = list(compiled.initial[0])
    state[place["stage", (0,)]] = 1
    for k in range(5):
        for name, args in (("key", (k, k)), ("has", (k, k)), ("found", (0, k, k))):
            state[place[name, args]] = 1

    def settled() -> set[str]:
        labels = (compiled.actions[a].label for a in compiled.enabled(tuple(state)))
        return {label for label in labels if label.startswith("settle")}

    assert settled() == {"settle(request0, 6)"}
    last = 4  # the block of two tokens that ends at 6
    for name, args in (("key", (last, last)), ("has", (last, last)), ("found", (0, last, last))):
        state[place[name, args]] = 0
    assert settled() == {"settle(request0, 0)"}


def test_a_window_needs_its_last_blocks_only() -> None:
    """After a hit of both tokens the window's first block is in no table."""
    compiled = compile_instance(instances.groups())
    slots = {(symbol.name, args): i for i, (symbol, args) in enumerate(compiled.slots)}
    after = [s for s in search(compiled).order if s[slots["hit", (0,)]] == 2]
    assert after
    window_first, window_last = 1, 2  # contents of the second group: up to token 1 and 2
    blocks = range(3)
    assert not any(s[slots["slot", (0, window_first, b)]] for s in after for b in blocks)
    assert any(s[slots["slot", (0, window_last, b)]] for s in after for b in blocks)


def test_a_block_found_by_one_group_is_not_evicted_for_another() -> None:
    """The report of one block twice in a hybrid table: an eviction between lookup and touch."""
    broken = without("evict", "no lookup found it", instances.PINNED["groups/requests"]())
    assert set(broken) == {"B5"}
    run = actions(broken["B5"])
    assert run[-1] == "evict"
    assert run.index("find") < len(run) - 1
    assert "touch" not in run[run.index("find") :]


def test_a_block_that_left_the_window_is_freed_once() -> None:
    broken = without("skip", "in the request's table", instances.groups())
    assert {"B1", "B2"} <= set(broken)
    assert actions(broken["B2"])[-1] == "skip"


def test_a_block_that_the_window_still_reads_is_not_skipped() -> None:
    broken = without("skip", "window has passed it", instances.groups())
    assert set(broken) == {"P5"}
    assert actions(broken["P5"])[-1] == "skip"


def test_a_hit_inside_a_block_would_leave_it_half_written() -> None:
    broken = without("settle", "ends there in every group", instances.groups())
    assert set(broken) == {"B4"}
    run = actions(broken["B4"])
    assert run[-1] == "settle", "from there on what is registered is half written"


def test_a_grant_counts_the_blocks_of_every_group() -> None:
    broken = without("grant", "every group are counted", instances.groups())
    assert set(broken) == {"B11"}


def test_a_promise_counts_the_blocks_of_every_group() -> None:
    broken = without("accept", "blocks of every group", instances.PINNED["groups/claims"]())
    assert set(broken) == {"F2"}


def test_an_eviction_in_one_group_harms_the_claim_on_both() -> None:
    report = explore_instance(instances.PINNED["groups/soft"](), "groups")
    assert report.fired["evict"] > 0
    (evict,) = (u for u in GROUPS.action("evict").updates if u.target.symbol.name == "phase")
    silent = replace(
        GROUPS.action("evict"),
        updates=tuple(u for u in GROUPS.action("evict").updates if u is not evict),
    )
    twin = replace(instances.PINNED["groups/soft"](), machine=GROUPS.with_action(silent))
    found = {c.prop.rule for c in explore_instance(twin, "groups").counterexamples}
    assert found == {"L3", "L7"}


@pytest.mark.parametrize("blocks", [2, 3])
def test_one_block_more_shows_what_one_block_less_did_not(blocks: int) -> None:
    """Two blocks of one group and one of the other take three: with fewer nothing ever runs."""
    fired = explore_instance(instances.groups(blocks=blocks), "groups").fired
    assert bool(fired["run"]) == (blocks == 3)
