"""The reference and vLLM, told the same, do the same: every observation, queue and event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM, Chance, attempt

from kvclaims.bridge.vllm.engine import IN_PROCESS, WHOLE_ENGINE
from kvclaims.reference.engine import ENGINE as REFERENCE
from kvclaims.spec.interface import Engine, PoolConfig
from kvclaims.spec.telemetry import Event

pytestmark = NEEDS_VLLM

SHAPES = [(3, 2), (5, 4), (8, 1), (12, 4), (20, 16), (60, 4)]


OPTIONAL = ("active_request_blocks", "active_request_found")
"""Events that a fold can do without, which vLLM's adapter does not tell."""


def story(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """Events without what differs by nature: the run and the engine's name."""
    return [
        (e.event, e.request_id, e.claim_id, e.generation, e.prefix_id, dict(e.data))
        for e in events
        if e.event not in ("trace_opened", *OPTIONAL)
    ]


def compare(engine: Engine, seed: int, usable: int, block_size: int, operations: int) -> None:
    config = PoolConfig(usable, block_size, seed % 3)
    model, live = REFERENCE.open(config, "run"), engine.open(config, "run")
    for operation in Chance(seed, usable, block_size).operations(operations):
        context = f"seed {seed}, {operation}"
        assert attempt(live, operation) == attempt(model, operation), context
        assert live.observe() == model.observe(), context
        ours, theirs = live.snapshot(), model.snapshot()
        assert ours.queue == theirs.queue, context
        assert ours.facts == theirs.facts, context
        assert ours.holders == theirs.holders, context
        assert ours.lookup == theirs.lookup, context
    assert story(live.events()) == story(model.events())
    live.close()


@pytest.mark.parametrize(("usable", "block_size"), SHAPES)
@pytest.mark.parametrize("seed", range(8))
def test_in_process_equals_the_reference(seed: int, usable: int, block_size: int) -> None:
    compare(IN_PROCESS, seed, usable, block_size, 120)


@pytest.mark.parametrize("seed", range(2))
def test_the_whole_engine_equals_the_reference(seed: int) -> None:
    compare(WHOLE_ENGINE, seed, 12, WHOLE_ENGINE.block_size, 60)
