"""Arrangements of KV groups on a live vLLM: it keeps the rules, and who breaks one is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.bridge.vllm.layouts import LAYOUTS, SOFT_READS, VllmLayouts
from kvclaims.checker.baseline import allowing
from kvclaims.checker.counterexample import Counterexample
from kvclaims.checker.layouts import LayoutPool, Tally, judge
from kvclaims.checker.replay import replay
from kvclaims.checker.scenes import scenes
from kvclaims.checker.supervise import Program
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import Verdict

pytestmark = NEEDS_VLLM

NAMES = [layout.name for layout in LAYOUTS]


def program(layout: str, usable: int, *operations: dict[str, Any]) -> Program:
    (unit,) = (known.unit for known in LAYOUTS if known.name == layout)
    return Program(LayoutPool(usable, unit, layout=layout), tuple(map(parse, operations)))


def submit(request: str, blocks: int, tokens: int = 0, **more: Any) -> dict[str, Any]:
    content = [["A", blocks, tokens] if tokens else ["A", blocks]]
    return {"op": "submit", "request": request, "content": content, **more}


DRAIN = {"op": "drain"}


def found(asked: Program) -> tuple[Violation, ...]:
    return judge(IN_PROCESS, asked, allowing(IN_PROCESS))


@pytest.mark.parametrize("name", NAMES)
def test_no_arrangement_breaks_a_rule(name: str) -> None:
    tally, drawing = Tally(), VllmLayouts()
    for seed in range(3):
        asked = drawing.draw(name, f"test/{name}/{seed}")
        assert judge(IN_PROCESS, asked, allowing(IN_PROCESS), tally) == ()
    assert tally.runs == 3
    assert tally.reads > 100
    assert not tally.not_exposed


def test_situations_with_groups_of_many_kinds_break_no_rule() -> None:
    shown = [s for s in scenes(IN_PROCESS.situations) if isinstance(s.config, LayoutPool)]
    assert shown
    for scene in shown:
        assert found(Program(scene.config, scene.operations)) == (), scene.shows


def test_a_program_is_drawn_by_its_seed() -> None:
    drawing = VllmLayouts()
    first, again, other = (drawing.draw("hits inside", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


INSIDE = program("hits inside", 24, submit("a", 6), DRAIN, submit("b", 9), DRAIN)
"""The second begins inside of the block that the first left half full."""

WHOLE = program("one group", 24, submit("a", 4, 1), DRAIN, submit("b", 4, 1, priority=1), DRAIN)


def _copies_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is told to copy the new block over the old one."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    take = KVCacheManager.take_kv_cache_block_copies

    def turned(self: Any) -> Any:
        copies, kept = take(self)
        return [type(c)(c.dst_block_id, c.src_block_id) for c in copies], kept

    monkeypatch.setattr(KVCacheManager, "take_kv_cache_block_copies", turned)


def _copies_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy holds is never given back."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    take = KVCacheManager.take_kv_cache_block_copies
    monkeypatch.setattr(
        KVCacheManager, "take_kv_cache_block_copies", lambda self: (take(self)[0], [])
    )


def _shorter_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is half of what is there."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(
        KVCacheManager,
        "get_computed_blocks",
        lambda self, request: (self.empty_kv_cache_blocks, 0, 0),
    )


def _events_one_token_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    build = BlockPool._build_block_stored_event

    def off(self: Any, *args: Any, **kwargs: Any) -> Any:
        return build(self, *args, **{**kwargs, "start_token_idx": kwargs["start_token_idx"] + 1})

    monkeypatch.setattr(BlockPool, "_build_block_stored_event", off)


def _no_event_of_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "_emit_block_removed_events", lambda *_: None)


def _window_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are let go of that the next token still reads."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    monkeypatch.setattr(
        SlidingWindowManager, "get_num_skipped_tokens", lambda _, tokens: max(0, tokens - 1)
    )


def _nothing_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that a drafter matched is served."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    find = FullAttentionManager.find_longest_cache_hit.__func__

    def kept(cls: Any, **given: Any) -> Any:
        return find(cls, **{**given, "drop_eagle_block": False})

    monkeypatch.setattr(FullAttentionManager, "find_longest_cache_hit", classmethod(kept))


def _freed_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit counts as no reference."""
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "touch", lambda *_: None)


def _raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def raising(*_: Any) -> Any:
        raise KeyError("out of luck")

    monkeypatch.setattr(KVCacheManager, "free", raising)


def _kept_from_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(KVCacheManager, "reset_prefix_cache", lambda _: True)


def _never_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(KVCacheManager, "allocate_slots", lambda *_, **__: None)


WINDOWS = program("small blocks in windows", 24, submit("a", 6, 1, max_new_tokens=9), DRAIN)
LOST = program(
    "small blocks in windows", 12, *(op for n in "abcd" for op in (submit(n, 4, salt=n), DRAIN))
)
DRAFTED = program("drafter", 24, submit("a", 3), DRAIN, submit("b", 4), DRAIN)
RESET = program("ring", 24, submit("a", 2), DRAIN, {"op": "reset"})


@pytest.mark.parametrize(
    ("broken", "asked", "rule", "told"),
    [
        (_copies_turned, INSIDE, "B5", "does not hold its state there"),
        (_copies_kept, INSIDE, "B2", "1 can be named"),
        (_shorter_hits, WHOLE, "P5", "finds 16 leading tokens in every KV group, and was served 0"),
        (_events_one_token_off, WHOLE, "B8", "tells of the first"),
        (_no_event_of_removal, LOST, "B8", "its events say stored"),
        (_window_forgotten, WINDOWS, "B5", "holds something else for token"),
        (_nothing_dropped, DRAFTED, "B4", "before another continuation"),
        (_freed_in_use, WHOLE, "B2", "ref of block"),
        (_raises, WHOLE, "B9", "KeyError: 'out of luck'"),
        (_kept_from_reset, RESET, "B10", "content can be found"),
        (_never_admitted, WHOLE, "B11", "none makes progress"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:12],
)
def test_what_is_broken_is_seen(
    broken: Callable[[pytest.MonkeyPatch], None],
    asked: Program,
    rule: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(asked) == ()
    broken(monkeypatch)
    first, *_ = found(asked)
    assert first.rule == rule
    assert told in first.message


def test_a_counterexample_of_an_arrangement_is_kept_and_replayed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copies_turned(monkeypatch)
    (first, *_) = found(INSIDE)
    file = Counterexample("vllm", INSIDE, first.rule, first.message).write(tmp_path)
    report = replay(file)
    assert report.example.program == INSIDE
    assert report.verdict is Verdict.VIOLATED
    assert report.findings[0].rule == first.rule == "B5"
    monkeypatch.undo()
    assert replay(file).verdict is Verdict.HOLDS


SOFT = Program(
    LayoutPool(6, 4, layout=SOFT_READS),
    tuple(
        map(
            parse,
            (
                submit("a", 4),
                {"op": "load", "request": "b", "blocks": 2},
                {"op": "demote", "claim": "a"},
                submit("c", 4),
                DRAIN,
                {"op": "reset"},
            ),
        )
    ),
)
"""Four blocks are read on after they are given back; two of them another still holds, and two are
taken."""


def test_blocks_that_are_read_after_they_are_freed() -> None:
    tally = Tally()
    drawing = VllmLayouts()
    for asked in (SOFT, *(drawing.draw(SOFT_READS, str(seed)) for seed in range(10))):
        assert judge(IN_PROCESS, asked, allowing(IN_PROCESS), tally) == ()
    assert tally.reads > 100


def _queued_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is given back is queued, whoever else holds it."""
    from vllm.v1.core.block_pool import BlockPool

    def unpin(self: Any, blocks: Any, on_reuse: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self._reuse_watchers[block.block_id] = on_reuse
        self.free_block_queue.append_n(blocks)

    monkeypatch.setattr(BlockPool, "unpin_blocks", unpin)


def _nobody_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "_notify_reuse", lambda *_: None)


@pytest.mark.parametrize(
    ("broken", "rule", "told"),
    [
        (_queued_while_held, "B1", "queued with ref 1"),
        (_nobody_told, "B5", "who reads it still was not told"),
    ],
)
def test_a_reader_that_is_not_told_is_seen(
    broken: Callable[[pytest.MonkeyPatch], None],
    rule: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    first, *_ = found(SOFT)
    assert first.rule == rule
    assert told in first.message
