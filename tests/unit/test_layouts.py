"""What is known of KV groups of many kinds without an engine: hits, prints, programs, reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvclaims.bridge.vllm.grouped_drawing import drawn, longest
from kvclaims.bridge.vllm.grouped_memory import Load, Runner, Step, Text, Work
from kvclaims.bridge.vllm.grouped_rules import Certain
from kvclaims.bridge.vllm.layouts import LAYOUTS, Layout, named
from kvclaims.checker import engines
from kvclaims.checker.counterexample import pool_json, read_pool
from kvclaims.checker.fuzz import shown
from kvclaims.checker.layouts import LayoutPool, judge, layouts_of
from kvclaims.checker.supervise import Program
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import BadOperation, NotExposed, PoolConfig
from kvclaims.spec.operations import Operation

HASHES = [bytes([n]) for n in range(1, 13)]
"""Hash i stands for i + 1 units of tokens."""


def keys(layout: Layout, *found: tuple[int, int]) -> list[tuple[bytes, int]]:
    """Keys of the first so many tokens, in a group."""
    return [(HASHES[tokens // layout.unit - 1], group) for group, tokens in found]


@pytest.mark.parametrize(
    ("name", "found", "tokens", "hit"),
    [
        ("one group", [(0, 4), (0, 8)], 12, 8),
        ("one group", [(0, 4), (0, 8)], 8, 4),  # the last token is computed in any case
        ("one group", [(0, 8)], 12, 0),
        # full blocks of 8, windows of 8 tokens in blocks of 4: the last two blocks, 1-based ends
        ("small blocks in windows", [(0, 8), (0, 16), (1, 12), (1, 16)], 20, 16),
        ("small blocks in windows", [(0, 8), (0, 16), (1, 16)], 20, 0),
        ("small blocks in windows", [(0, 8), (0, 16), (1, 8), (1, 4), (1, 16)], 20, 8),
        ("recurrent", [(0, 4), (0, 8), (0, 12), (1, 8)], 20, 8),
        # a hit inside of a block of 8 tokens, at 10: what is found of the block goes on to 12
        ("hits inside", [(0, 8), (0, 12), (1, 10)], 20, 10),
        ("hits inside", [(0, 8), (1, 10)], 20, 0),
        # a drafter gives up the last block
        ("drafter", [(0, 4), (0, 8)], 12, 4),
        ("windows of a drafter", [(0, 4), (0, 8), (1, 4), (1, 8), (1, 12)], 20, 8),
        # what is not longer than what is computed again is no hit
        ("replayed windows", [(0, 4)], 12, 0),
        ("replayed windows", [(0, 4), (0, 8)], 12, 8),
    ],
)
def test_a_hit_that_is_certain(
    name: str, found: list[tuple[int, int]], tokens: int, hit: int
) -> None:
    layout = named(name)
    assert Certain(layout, keys(layout, *found)).hit(HASHES, tokens) == hit


def test_a_drafter_finds_what_it_gives_up() -> None:
    plain, inside = named("drafter"), named("hits inside, drafter")
    assert Certain(plain, keys(plain, (0, 8))).gives_up(0, HASHES, 4)
    assert not Certain(plain, keys(plain, (0, 8))).gives_up(0, HASHES, 8)
    assert Certain(inside, keys(inside, (0, 6))).gives_up(0, HASHES, 4)
    assert not Certain(inside, keys(inside, (0, 4))).gives_up(0, HASHES, 4)


def told(request: str, tables: list[list[int]], found: int = 0, **more: Any) -> Any:
    """What a step tells of a request that it lets in."""
    new = SimpleNamespace(req_id=request, block_ids=tables, num_computed_tokens=found)
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
    return SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=[new], scheduled_cached_reqs=cached, **more
    )


def run(runner: Runner, output: Any, work: Work, *loads: Load) -> list[tuple[str, str]]:
    runner.learn(output)
    return list(runner.run(Step(output, (work,), loads)))


def test_a_hit_on_what_was_written_is_read() -> None:
    runner, text = Runner(named("one group")), Text("", range(1, 13))
    assert run(runner, told("a", [[1, 2]]), Work("a", text, 0, 8)) == []
    assert runner.holds(0, 1, text, 4)
    assert not runner.holds(0, 1, text, 8)
    assert run(runner, told("b", [[1, 2, 3]], 8), Work("b", text, 8, 12)) == []


def test_a_hit_on_another_text_is_seen() -> None:
    runner = Runner(named("one group"))
    run(runner, told("a", [[1, 2]]), Work("a", Text("", [9] * 8), 0, 8))
    ((rule, message),) = run(
        runner, told("b", [[1, 2, 3]], 8), Work("b", Text("", range(12)), 8, 12)
    )
    assert rule == "B4"
    assert "was served 8 tokens" in message
    assert "token 0, in block 1" in message


def test_a_block_that_another_wrote_over_is_seen() -> None:
    runner, text = Runner(named("one group")), Text("", range(1, 13))
    run(runner, told("a", [[1, 2]]), Work("a", text, 0, 5))
    run(runner, told("b", [[1]]), Work("b", Text("", [7] * 4), 0, 4))
    cached = SimpleNamespace(req_ids=["a"], resumed_req_ids=set(), new_block_ids=[None])
    output = SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=[], scheduled_cached_reqs=cached
    )
    ((rule, message),) = run(runner, output, Work("a", text, 5, 6))
    assert rule == "B5"
    assert "block 1" in message


def test_a_state_is_read_where_the_last_step_left_it() -> None:
    runner, text = Runner(named("recurrent")), Text("", range(1, 13))
    run(runner, told("a", [[1, 2], [0, 5]]), Work("a", text, 0, 8))
    assert runner.holds(1, 5, text, 8)
    assert run(runner, told("b", [[1, 2, 3], [0, 5, 6]], 8), Work("b", text, 8, 12)) == []
    ((rule, message),) = run(runner, told("c", [[1, 4], [5, 7]], 4), Work("c", text, 4, 5))[:1]
    assert rule == "B4"
    assert "behind token 4" in message


def test_a_copy_is_made_before_the_step_writes() -> None:
    runner, text = Runner(named("hits inside")), Text("", range(1, 25))
    copies = [SimpleNamespace(src_block_id=1, dst_block_id=3)]
    output = told("a", [[1], [2]])
    cached = SimpleNamespace(req_id="b", block_ids=[[3], [2]], num_computed_tokens=4)
    output.scheduled_new_reqs.append(cached)
    output.kv_cache_block_copies = copies
    runner.learn(output)
    work = (Work("a", text, 0, 8), Work("b", text, 4, 8))
    found = [message for _, message in runner.run(Step(output, work))]
    assert any("a copy of block 1, which the same step is to compute" in m for m in found)


def test_loads_fill_blocks_and_the_state_behind_them() -> None:
    runner, text = Runner(named("recurrent")), Text("", range(1, 13))
    load = Load(text, 0, 8, ((1, 2), (0, 5)))
    assert run(runner, told("a", [[1, 2, 3], [0, 5, 6]], 8), Work("a", text, 8, 9), load) == []


def test_the_prints_of_a_text() -> None:
    text, other = Text("", [1, 2, 3]), Text("salt", [1, 2, 3])
    assert text.after(3) != other.after(3)
    assert text.follows(1, [2, 3])[-1] == text.after(3)
    assert text.after(5) == Text("", [1, 2, 3, 0, 0]).after(5)  # generated ones are known


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_two_requests_of_a_drawn_program_fit(layout: Layout) -> None:
    usable, operations = drawn(layout, "seed")
    most = longest(layout, usable)
    assert 2 * sum(-(-most // layout.block_of(g)) for g in range(len(layout.groups))) <= usable
    assert operations[-1].op == "drain"


def test_a_pool_of_an_arrangement_is_kept_and_read() -> None:
    pool = LayoutPool(12, 2, 0, layout="hits inside")
    assert read_pool(pool_json(pool)) == pool
    assert read_pool(pool_json(PoolConfig(12, 2, 0))) == PoolConfig(12, 2, 0)
    with pytest.raises(BadOperation, match="layout is of another kind"):
        read_pool({**pool_json(pool), "layout": 3})
    with pytest.raises(BadOperation, match="no arrangement"):
        named("none such")


def test_what_an_arrangement_breaks_is_shown_with_its_name() -> None:
    program = Program(LayoutPool(8, 4, layout="drafter"), (Operation("drain", {}),))
    lines = list(shown(Violation("B2", "two hold it", operation=1), program))
    assert "pool of 8 blocks of 4 tokens, defer limit 1, layout drafter; broken in" in lines[1]


def test_an_engine_without_arrangements_does_not_expose_them() -> None:
    reference = engines.find("reference")
    assert layouts_of(reference) is None
    with pytest.raises(NotExposed):
        judge(reference, Program(LayoutPool(4, 4, layout="one group"), ()), lambda *_: None)
