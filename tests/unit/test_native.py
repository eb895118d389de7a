"""The native engine counts what the explorer counts, and finds what it finds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from kvclaims.checker import checkpoint, cli, instances, native, planning
from kvclaims.checker.explore import ExploreReport, explore_instance
from kvclaims.checker.finite import Instance
from kvclaims.checker.grounded import ground
from kvclaims.checker.machinecode import layout
from kvclaims.checker.native import (
    Interrupted,
    LeftDomain,
    Search,
    Way,
    explore_native,
)
from kvclaims.checker.planning import TooLarge, plan
from kvclaims.checker.symbolic import explore_symbolic
from kvclaims.checker.tensors import explore_tensors
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    FALSE,
    INT,
    TRUE,
    Action,
    Guard,
    Machine,
    Property,
    Symbol,
    Term,
    becomes,
    lit,
    without_guard,
)
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
    assert report.engine == f"{native.ENGINE}, bitmap"


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_a_hash_table_counts_the_same_as_the_bitmap(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "DENSE", 0)
    report = explore_native(instances.blockclaims((1, 2, 3, 1), 3, 3, 8), "M", None, Way(jobs=jobs))
    assert (report.states, report.transitions) == (211_888, 2_061_728)
    assert report.memory["visited"] == "hash"


@pytest.mark.parametrize("jobs", [2, 3])
def test_threads_count_the_same_every_time(jobs: int) -> None:
    instance = instances.blockclaims((1, 2, 3, 1), 3, 3, 8)
    alone = explore_native(instance, "M")
    for _ in range(3):
        shared = explore_native(instance, "M", None, Way(jobs=jobs))
        assert _counts(shared) == _counts(alone)


@pytest.mark.parametrize("dense", [True, False])
def test_a_state_found_by_two_threads_at_once_is_kept_by_one(
    dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both expand the same level at the same time, so they meet at every state.  Without the
    atomic operations some states are kept twice: one in 100,000 on a busy machine."""
    monkeypatch.setattr(planning, "DENSE", planning.DENSE if dense else 0)
    large = instances.blockclaims((1, 2, 3, 1, 2), 3, 4, 10)
    search = Search(large, "L", Way(jobs=2, check=False), None)
    search.run(None, None, 12)
    while not dense and search.used + len(search.level.front) * 4 > len(search.seen) // 2:
        search._grow_table()
    for hand in search.hands:
        while len(hand.next) < 4 * len(search.level.front):
            hand.grow()
    both = Barrier(2)

    def expand(hand: native._Hand) -> None:
        both.wait()
        done, end = 0, len(search.level.front)
        while done < end:
            done = search._expand(hand, done, end, 1 << 40)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(expand, search.hands))
    found = [code for hand in search.hands for code in hand.next[: hand.found].tolist()]
    assert len(found) == len(set(found)) > 100_000


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


def _watched(name: str, by: Term) -> Instance:
    """A flag that an invariant keeps up, and a step that writes it."""
    up, other = Symbol("up", ()), Symbol("other", ())
    kept = Property("F1", "it is up", up(), "The flag is up.")
    write = Action(name, (), (Guard(("F1",), up(), "it is up"),), (becomes(up(), by),), "write it")
    turn = Action("turn", (), (), (becomes(other(), ~other()),), "something else")
    start = (becomes(up(), True), becomes(other(), False))
    return Instance(Machine("flag", "a flag", (up, other), start, (write, turn), (kept,)), {})


@pytest.mark.parametrize("by", [TRUE, FALSE, ~Symbol("other", ())()], ids=["up", "down", "turned"])
@pytest.mark.parametrize("explore", [explore_native, explore_symbolic, explore_tensors])
def test_a_flag_that_has_to_be_up_is_read_as_up(
    explore: Callable[[Instance, str], ExploreReport], by: Term
) -> None:
    flag = _watched("write", by)
    expected, found = explore_instance(flag, "flag"), explore(flag, "flag")
    assert _counts(found) == _counts(expected)
    assert _broken(found) == _broken(expected)


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
        explore_native(instances.blockclaims(), "S", None, Way(check=False), bounds=bounds)


def test_steps_past_a_limit_are_not_taken() -> None:
    report = explore_native(_counter(limits={"level": 5}), "counter", bounds={"level": (0, 5)})
    assert (report.states, report.transitions, report.depth) == (6, 5, 5)


def test_the_plan_states_the_memory() -> None:
    small, large = plan(instances.blockclaims()), plan(instances.pool())
    assert (small.space, small.visited, small.visited_bytes) == (8_192, "bitmap", 1_028)
    assert (large.visited, large.state_bytes) == ("hash", 8)
    assert large.bits == (large.space - 1).bit_length() == 38
    assert "8,192 states in the product" in next(small.lines())


def test_a_search_that_outgrows_its_memory_says_so_and_names_the_way_out() -> None:
    large = instances.blockclaims((1, 2, 3, 1), 3, 3, 8)
    said = r"more than 100,000 bytes needed after [\d,]{4,} states.*--memory.*--symmetry"
    with pytest.raises(TooLarge, match=said):
        explore_native(large, "M", None, Way(budget=100_000))


def test_a_search_that_cannot_begin_is_refused_beforehand() -> None:
    with pytest.raises(TooLarge, match=r"262,144 bytes needed to start with, 1,000 allowed"):
        plan(instances.blockclaims((1, 2, 3, 1), 3, 3, 8), budget=1_000)


def test_the_plan_says_what_is_needed_at_most() -> None:
    small = plan(instances.blockclaims(), budget=1 << 20)
    # two levels of four bytes a state, and a bit for each
    assert small.most_bytes == 8_192 * 8 + 1_028
    report = explore_native(instances.blockclaims(), "S", None, Way(budget=1 << 20))
    assert 0 < int(report.memory["taken"]) <= small.most_bytes <= 1 << 20


def test_memory_that_ran_out_is_given_later(tmp_path: Path) -> None:
    large = instances.blockclaims((1, 2, 3, 1), 3, 3, 8)
    path = tmp_path / "full.npz"
    with pytest.raises(TooLarge, match=r"--resume .*full\.npz goes on from there"):
        explore_native(large, "M", None, Way(budget=300_000, checkpoint=path))
    report = explore_native(large, "M", None, Way(resume=path, jobs=2))
    assert (report.states, report.transitions) == (211_888, 2_061_728)


def test_numbers_of_states_are_read_back() -> None:
    where = layout(ground(instances.claims()).slots)
    for code in range(0, where.space, 97):
        assert where.encode(where.decode(code)) == code


# --- interrupts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("blockclaims", Way()),
        ("blockclaims", Way(jobs=2)),
        ("blockclaims", Way(symmetric=True)),
        ("trace/facts", Way()),
    ],
)
def test_an_interrupted_search_goes_on_from_its_checkpoint(
    name: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instances.PINNED[name]()
    whole = explore_native(instance, name, None, way)
    monkeypatch.setattr(native, "CHUNK", 16)
    monkeypatch.setattr(Search, "_round", _interrupted(Search._round, 20))
    path = tmp_path / "at.npz"
    with pytest.raises(Interrupted, match=rf"interrupted .* --resume {path} goes on from there"):
        explore_native(instance, name, None, replace(way, checkpoint=path))
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == ["at.npz"]
    found = explore_native(instance, name, None, replace(way, resume=path))
    assert _counts(found) == _counts(whole)


def _interrupted(real: Callable[..., None], after: int) -> Callable[..., None]:
    """Ctrl-C comes in the middle of the round number `after`."""
    rounds = count(1)

    def stop(search: Search, pool: object) -> None:
        if next(rounds) == after:
            signal.raise_signal(signal.SIGINT)
        real(search, pool)

    return stop


def test_a_checkpoint_belongs_to_one_instance_and_one_way(tmp_path: Path) -> None:
    path = tmp_path / "at.npz"
    Search(instances.blockclaims(), "S", Way(), None).save(path)
    others: list[tuple[Instance, Way]] = [
        (instances.blockclaims((1, 1), 1, 1, 2), Way()),
        (instances.blockclaims(pool=5), Way()),
        (instances.PINNED["claims"](), Way()),
        (instances.blockclaims(), Way(symmetric=True)),
        (instances.blockclaims(), Way(check=False)),
    ]
    for instance, way in others:
        with pytest.raises(BadOperation, match="is a checkpoint of another instance"):
            explore_native(instance, "X", None, replace(way, resume=path))
    assert explore_native(instances.blockclaims(), "S", None, Way(resume=path)).states == 6_656


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    for name, said in (("x.npz", "x.npz is no checkpoint"), ("absent.npz", "no such checkpoint")):
        with pytest.raises(BadOperation, match=said):
            explore_native(instances.blockclaims(), "S", None, Way(resume=tmp_path / name))


def _halfway(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Instance:
    """A checkpoint in the middle of a level."""
    instance = instances.PINNED[name]()
    with monkeypatch.context() as patched:
        patched.setattr(native, "CHUNK", 16)
        patched.setattr(Search, "_round", _interrupted(Search._round, 20))
        with pytest.raises(Interrupted):
            explore_native(instance, name, None, Way(checkpoint=path))
    return instance


def _largest(codes: Any) -> Any:
    """As many numbers, of which none is that of a state."""
    return np.full_like(codes, np.iinfo(codes.dtype).max)


Change = Callable[[dict[str, Any]], dict[str, Any]]

DAMAGES: dict[str, Change] = {
    "seen is shorter": lambda d: {"seen": d["seen"][:-1]},
    "seen is empty": lambda d: {"seen": d["seen"][:0]},
    "seen is cleared": lambda d: {"seen": np.zeros_like(d["seen"])},
    "front is of fractions": lambda d: {"front": d["front"].astype(float)},
    "front is a table": lambda d: {"front": d["front"].reshape(1, -1)},
    "a state that is none": lambda d: {"front": _largest(d["front"])},
    "a state below zero": lambda d: {"front": d["front"] * 0 - 1},
    "next is none": lambda d: {"next": _largest(d["next"])},
    "numbers are few": lambda d: {"numbers": d["numbers"][:-1]},
    "a count below zero": lambda d: {"numbers": -d["numbers"]},
    "it stands further": lambda d: {"numbers": d["numbers"] + 1_000_000},
    "front is missing": lambda d: {"front": None},
    "fired is short": lambda d: {"fired": d["fired"][:-1]},
    "nothing is left to do": lambda d: {
        "front": d["front"][:0], "next": d["next"][:0], "waiting": d["waiting"][:0],
        "numbers": d["numbers"] * [0, 1, 0, 1, 1, 1, 1],
    },
    "something waits that is not there": lambda d: {"waiting": np.array([[0, 1 << 40]])},
    "a rule that is none": lambda d: {"broken": np.array([[999, 0, 0, -1]])},
    "one more": lambda d: {"more": d["fired"]},
}  # fmt: skip


@pytest.mark.parametrize("name", ["blockclaims", "trace/facts"])
@pytest.mark.parametrize("sealed", [False, True], ids=["as it is", "with a digest of its own"])
@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused(
    change: Change, sealed: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "at.npz"
    instance = _halfway(path, name, monkeypatch)
    with np.load(path) as saved:
        data = dict(saved)
    odd = {key: array for key, array in {**data, **change(data)}.items() if array is not None}
    if sealed:
        search = str(odd.pop("search"))
        del odd["digest"]
        checkpoint.save(path, search, odd)
    else:
        np.savez(path, allow_pickle=False, **odd)
    with pytest.raises(BadOperation, match=r"at\.npz is a damaged checkpoint: "):
        explore_native(instance, name, None, Way(resume=path))


def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    search = Search(instances.blockclaims(), "S", Way(), None)
    with pytest.raises(BadOperation, match="cannot write the checkpoint"):
        search.save(tmp_path / "nowhere" / "at.npz")


# --- the command line --------------------------------------------------------------------


def _command(*arguments: str) -> tuple[int, str]:
    out = StringIO()
    return cli.run(["explore", *arguments], out), out.getvalue()


def test_the_command_tells_both_counts_and_the_memory() -> None:
    code, said = _command("blockclaims", "--symmetry", "--memory", "1M", "--jobs", "2", "--json")
    found = json.loads(said)
    assert (code, found["verdict"]) == (0, "HOLDS")
    assert (found["states"], found["transitions"]) == (6_656, 45_248)
    assert found["representatives"] == 4_112
    assert found["memory"] == {
        "visited": "bitmap", "taken": found["memory"]["taken"], "most": 66_564, "allowed": 1 << 20
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--memory", "1K"), "262,144 bytes needed to start with, 1,024 allowed"),
        (("--memory", "much"), "memory is given in bytes, such as 500M or 8G, not 'much'"),
        (("--by", "symbolic", "--symmetry"), "--symmetry is no option of --by symbolic"),
        (("--by", "python", "--jobs", "2"), "--jobs is no option of --by python"),
        (("--resume", "absent.npz"), "absent.npz: no such checkpoint"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command("blockclaims", *arguments)[0] == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_command_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native, "CHUNK", 16)
    monkeypatch.setattr(Search, "_round", _interrupted(Search._round, 9))
    assert _command("blockclaims", "--by", "native", "--jobs", "1")[0] == 130
    assert "with --resume blockclaims.checkpoint.npz goes on" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, said = _command("blockclaims", "--resume", "blockclaims.checkpoint.npz", "--json")
    assert (code, json.loads(said)["transitions"]) == (0, 45_248)
