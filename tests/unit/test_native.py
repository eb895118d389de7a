"""The native engine counts what the explorer counts, and finds what it finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvclaims.checker import instances, native
from kvclaims.checker.explore import ExploreReport, explore_instance
from kvclaims.checker.finite import Instance
from kvclaims.checker.grounded import ground
from kvclaims.checker.machinecode import layout
from kvclaims.checker.native import LeftDomain, TooLarge, explore_native, plan, resume
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import INT, Action, Machine, Symbol, becomes, lit, without_guard
from kvclaims.spec.pool import POOL
from kvclaims.spec.vocabulary import Verdict

PUBLISHED = {
    "S": ((1, 2, 3), 2, 3, 6, 6_656, 45_248),
    "M": ((1, 2, 3, 1), 3, 3, 8, 211_888, 2_061_728),
    "L": ((1, 2, 3, 1, 2), 3, 4, 10, 3_137_216, 35_766_240),
}


def _counts(report: ExploreReport) -> tuple[object, ...]:
    return (report.verdict, report.states, report.transitions, report.depth, dict(report.fired))


@pytest.mark.parametrize("name", instances.PINNED)
def test_counts_of_pinned_instances_are_the_explorers(name: str) -> None:
    instance = instances.PINNED[name]()
    assert _counts(explore_native(instance, name)) == _counts(explore_instance(instance, name))


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_common_benchmark_has_the_published_counts(size: str) -> None:
    *settings, states, transitions = PUBLISHED[size]
    report = explore_native(instances.blockclaims(*settings), size)  # type: ignore[arg-type]
    assert (report.states, report.transitions) == (states, transitions)
    assert report.verdict is Verdict.HOLDS
    assert report.engine == native.ENGINE


def test_a_hash_table_counts_the_same_as_the_bitmap() -> None:
    instance = instances.blockclaims((1, 2, 3, 1), 3, 3, 8)
    search = native._Search(instance, "M", True, native.BUDGET, None)
    search.dense = False
    search.kernel = native.Kernel(search.grounded, search.where, False, True)
    search._restart()
    report = search.report(None, None, 0.0)
    assert (report.states, report.transitions) == (211_888, 2_061_728)


# --- broken rules ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "action", "guard"),
    [
        ("blockclaims", "alloc", 0),
        ("blockclaims", "accept", 1),
        ("blockclaims", "reject", 1),
        ("claims", "materialize", 1),
        ("pool/soft-keys", "evict", 0),
        ("pool/keys", "take", 0),
        ("pool/keys", "drop", 0),
    ],
)
def test_a_broken_twin_breaks_the_same_rules_in_as_many_steps(
    name: str, action: str, guard: int
) -> None:
    instance = instances.PINNED[name]()
    twin = replace(instance, machine=without_guard(instance.machine, action, guard))
    fast, slow = explore_native(twin, name), explore_instance(twin, name)
    assert fast.verdict is Verdict.VIOLATED
    assert _broken(fast) == _broken(slow)
    assert _counts(fast) == _counts(slow)


def _broken(report: ExploreReport) -> list[tuple[str, str, int]]:
    return [(c.prop.rule, c.prop.name, len(c.steps)) for c in report.counterexamples]


def test_a_counterexample_is_a_run_of_the_machine() -> None:
    (index,) = [i for i, g in enumerate(POOL.action("evict").guards) if "hard claim" in g.why]
    broken = replace(instances.PINNED["pool/keys"](), machine=without_guard(POOL, "evict", index))
    shortest = next(
        c for c in explore_native(broken, "pool").counterexamples if c.prop.rule == "P1"
    )
    assert [label.split("(")[0] for label, _ in shortest.steps][-1] == "evict"
    assert any("key(block" in line for line in shortest.lines())


def test_initial_states_are_checked_too() -> None:
    from kvclaims.spec.pool import b, queued

    start = tuple(
        becomes(queued(b), True, over=(b,)) if u.target.symbol is queued else u for u in POOL.init
    )
    broken = replace(instances.PINNED["pool/keys"](), machine=replace(POOL, init=start))
    assert _broken(explore_native(broken, "pool")) == _broken(explore_instance(broken, "pool"))


# --- domains and memory ------------------------------------------------------------------

level = Symbol("level", (), INT)


def _counter(**more: object) -> Instance:
    machine = Machine(
        "counter",
        "a number that grows",
        (level,),
        (becomes(level(), 0),),
        (Action("grow", (), (), (becomes(level(), level() + 1),), "one more"),),
        (),
    )
    return Instance(machine, {}, **more)  # type: ignore[arg-type]


def test_domains_follow_from_the_invariants() -> None:
    slots = plan(instances.blockclaims((1, 2), 1, 4, 3)).slots
    assert {(s.symbol.name, s.lo, s.hi) for s in slots} == {("status", 0, 7), ("blocks", 0, 3)}


def test_domains_follow_from_what_steps_write_where_no_invariant_tells() -> None:
    jump = replace(_counter().machine.actions[0], updates=(becomes(level(), lit(3)),))
    machine = replace(_counter().machine, actions=(jump,))
    assert [(s.lo, s.hi) for s in plan(Instance(machine, {})).slots] == [(0, 3)]


def test_a_counter_without_bounds_is_named() -> None:
    with pytest.raises(BadOperation, match="neither an invariant nor a limit bounds level"):
        plan(_counter())


def test_a_value_that_leaves_its_domain_stops_the_search() -> None:
    with pytest.raises(LeftDomain, match=r"level\(\) becomes 4 by grow, outside its domain 0 … 3"):
        explore_native(_counter(), "counter", bounds={"level": (0, 3)})
    bounds = {"blocks": (0, 2)}
    with pytest.raises(LeftDomain, match=r"blocks\(0\) becomes 3 by alloc"):
        explore_native(instances.blockclaims(), "S", bounds=bounds, check=False)


def test_steps_past_a_limit_are_not_taken() -> None:
    report = explore_native(_counter(limits={"level": 5}), "counter", bounds={"level": (0, 5)})
    assert (report.states, report.transitions, report.depth) == (6, 5, 5)


def test_the_plan_states_the_memory() -> None:
    small, large = plan(instances.blockclaims()), plan(instances.pool())
    assert (small.space, small.visited, small.visited_bytes) == (8_192, "bitmap", 1_028)
    assert (large.visited, large.state_bytes) == ("hash", 8)
    assert large.bits == (large.space - 1).bit_length() == 38
    assert "8,192 states in the product" in next(small.lines())


def test_a_search_that_outgrows_its_memory_says_so() -> None:
    with pytest.raises(TooLarge, match=r"more than 100,000 bytes needed after [\d,]{4,} states"):
        explore_native(instances.blockclaims((1, 2, 3, 1), 3, 3, 8), "M", budget=100_000)


def test_numbers_of_states_are_read_back() -> None:
    where = layout(ground(instances.claims()).slots)
    for code in range(0, where.space, 97):
        assert where.encode(where.decode(code)) == code


# --- interrupts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blockclaims", "pool/keys"])
def test_an_interrupted_search_goes_on_from_its_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instances.PINNED[name]()
    whole = explore_native(instance, name)
    monkeypatch.setattr(native, "_CHUNK", 16)
    monkeypatch.setattr(native._Search, "_expand", _interrupted(native._Search._expand, 20))
    path = tmp_path / "at.npz"
    with pytest.raises(KeyboardInterrupt):
        explore_native(instance, name, checkpoint=path)
    monkeypatch.undo()
    assert _counts(resume(path, instance, name)) == _counts(whole)
    with pytest.raises(BadOperation, match="of another instance"):
        resume(path, instances.blockclaims((1, 1), 1, 1, 2), name)


def _interrupted(expand: object, after: int) -> object:
    calls = iter(range(after))

    def stop(search: native._Search) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        expand(search)  # type: ignore[operator]

    return stop


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(BadOperation, match="is no checkpoint"):
        resume(tmp_path / "x.npz", instances.blockclaims(), "S")
