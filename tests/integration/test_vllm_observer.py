"""What the observer tells is what vLLM did: replayed, judged, and compared with deep snapshots."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_world import NEEDS_VLLM, Chance, World, attempt

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.reference.engine import ENGINE as REFERENCE
from kvclaims.spec.interface import BlockFacts, PoolSnapshot, PoolStep

pytestmark = NEEDS_VLLM

USABLE = 12


class Replay:
    """Takes every step with the reference's own, independently written checks."""

    def __init__(self) -> None:
        self.refused: list[PoolStep] = []
        self.facts: dict[int, BlockFacts] = {}
        self.free = USABLE
        self._claims: dict[str, bool] = {}
        self._requests: dict[str, bool] = {}
        self._steps: list[PoolStep] = []

    def claim(self, name: str, hard: bool) -> None:
        self._claims[name] = hard

    def request(self, name: str, admit_reuse: bool) -> None:
        self._requests.setdefault(name, admit_reuse)

    def __call__(self, step: PoolStep) -> None:
        self._steps.append(step)
        self.facts.update(step.facts)
        self.free = self.free if step.free is None else step.free

    def state(self) -> dict[str, Any]:
        stepper = REFERENCE.stepper(range(1, USABLE + 1), self._claims, self._requests)
        self.refused = [s for s in self._steps if not stepper.apply(s.action, s.args)]
        return dict(stepper.state())


def run(seed: int, operations: int) -> tuple[Replay, PoolSnapshot]:
    w = World(IN_PROCESS, USABLE, block_size=4)
    replay = Replay()
    w.runtime.listen(replay)
    for operation in Chance(seed, USABLE, 4).operations(operations):
        fields = operation.fields
        if operation.op == "declare":
            name = f"{fields['claim']}#{fields['generation']}"
            replay.claim(name, fields["protection"] == "hard_protected")
        elif operation.op == "submit":
            replay.request(fields["request"], fields["admit_reuse"])
        attempt(w.runtime, operation)
    return replay, w.runtime.snapshot()


@pytest.mark.parametrize("seed", range(8))
def test_steps_replay_to_the_state_of_the_engine(seed: int) -> None:
    replay, snapshot = run(seed, 120)
    state = replay.state()
    assert replay.refused == []
    assert state["queued"] == set(snapshot.queue)
    assert state["free"] == snapshot.counter == replay.free
    assert state["ref"] == {block: facts.ref for block, facts in snapshot.facts.items()}
    assert state["entry"] == {(k, b) for k, blocks in snapshot.lookup.items() for b in blocks}
    assert state["held"] == {(r, b) for r, held in snapshot.holders.items() for b in held}


@pytest.mark.parametrize("seed", range(100, 104))
def test_facts_of_steps_equal_a_deep_snapshot(seed: int) -> None:
    replay, snapshot = run(seed, 120)
    assert replay.facts
    for block, facts in replay.facts.items():
        assert facts == snapshot.facts[block]


def test_a_plain_scheduler_can_be_watched() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvclaims.bridge.vllm import setup
    from kvclaims.bridge.vllm.observer import attach

    scheduler = setup.make_scheduler(Scheduler, 8, 4)
    steps: list[PoolStep] = []
    attach(scheduler, steps.append)
    hasher = setup.block_hasher(4)
    scheduler.add_request(setup.make_request("a", tuple(range(1, 14)), 1, hasher))
    scheduler.schedule()
    actions = [step.action for step in steps]
    assert actions == ["admit"] + ["take"] * 4 + ["register"] * 3
    assert steps[0].args == {"r": "a", "n": 4}
    assert set(steps[-1].facts) == {1, 2, 3, 4}
    assert steps[-1].free == 4


def test_what_a_faulty_pool_does_is_told_as_it_is() -> None:
    w = World(IN_PROCESS, 8, block_size=4)
    pool = w.runtime._driver.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
    w.cache("A4")
    pool._maybe_evict_cached_block = lambda _: False  # a reused block keeps its hash
    w.steps.clear()
    w.ask("b", "B8.0", admit_reuse=False)
    w.runtime.step()
    assert "evict" not in {step.action for step in w.steps}
    facts = {b: f for step in w.steps for b, f in step.facts.items()}
    assert sum(bool(f.keys) for f in facts.values()) == 4
