"""`ClaimScheduler` and its asynchronous sibling, driven as vLLM's engine core drives them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.spec.content import Segment, tokens_of
from kvclaims.spec.interface import ClaimSpec, Predicate, PredicateKind
from kvclaims.spec.telemetry import Recorder
from kvclaims.spec.vocabulary import Phase

pytestmark = NEEDS_VLLM

SIZE = 16


def tokens(label: str, blocks: int) -> tuple[int, ...]:
    return tokens_of((Segment(label, blocks),), SIZE)


def leading(claim: str, label: str, blocks: int) -> ClaimSpec:
    return ClaimSpec(claim, tokens(label, blocks), Predicate(PredicateKind.LEADING, blocks))


class Core:
    """A few lines of engine core: steps that are scheduled up to `depth` ahead of their output."""

    def __init__(self, scheduler_class: type, usable: int, depth: int) -> None:
        from kvclaims.bridge.vllm import setup

        self.scheduler = setup.make_scheduler(scheduler_class, usable, SIZE)
        self.scheduler.use_v2_model_runner = False
        clock = iter(range(10**9))
        self.claims = self.scheduler.enforce(Recorder("t", "p", usable, lambda: next(clock)))
        self.outputs: dict[str, Any] = {}
        self._hasher = setup.block_hasher(SIZE)
        self._depth = depth
        self._ahead: deque[Any] = deque()

    def add(self, name: str, label: str, blocks: int, max_new_tokens: int = 1) -> None:
        from kvclaims.bridge.vllm import setup

        self.scheduler.add_request(
            setup.make_request(name, tokens(label, blocks), max_new_tokens, self._hasher)
        )

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        else:
            raise AssertionError("requests are left over")
        while self._ahead:
            self._process(self._ahead.popleft())

    def step(self) -> None:
        self._ahead.append(self.scheduler.schedule())
        if len(self._ahead) >= self._depth:
            self._process(self._ahead.popleft())

    def _process(self, output: Any) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[[0] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for answers in self.scheduler.update_from_output(output, ran).values():
            self.outputs.update({o.request_id: o for o in answers.outputs})


def both() -> Any:
    return pytest.mark.parametrize(
        ("name", "depth"), [("ClaimScheduler", 1), ("AsyncClaimScheduler", 2)]
    )


def core(name: str, usable: int, depth: int) -> Core:
    from kvclaims.bridge.vllm import scheduler

    return Core(getattr(scheduler, name), usable, depth)


@both()
def test_a_refused_request_is_answered(name: str, depth: int) -> None:
    c = core(name, 20, depth)
    c.add("a", "A", 15)
    c.run()
    c.claims.declare(leading("keep", "A", 15))
    c.add("b", "B", 10)
    c.run()
    answer = c.outputs["b"]
    assert str(answer.finish_reason) == "error"
    assert answer.kv_transfer_params["kvclaims"] == {
        "outcome": "refused",
        "shortfall": 5,
        "missing_now": 5,
        "blocking_claims": ["keep"],
    }


@both()
def test_content_counts_once_it_was_written(name: str, depth: int) -> None:
    c = core(name, 20, depth)
    c.claims.declare(leading("keep", "A", 8))
    c.add("a", "A", 8, max_new_tokens=20)
    phases = []
    while c.scheduler.has_unfinished_requests():
        c.step()
        phases.append(c.claims.book.claims["keep"].phase)
    assert phases[: depth - 1] == [Phase.ACCEPTED] * (depth - 1)
    assert phases[depth - 1] is Phase.MATERIALIZED
    assert c.claims.book.owed == 0


@both()
def test_preemption_and_claims_under_load(name: str, depth: int) -> None:
    c = core(name, 30, depth)
    c.add("warm", "W", 6)
    c.run()
    c.claims.declare(leading("keep", "W", 6))
    c.claims.declare(leading("later", "L", 4))
    for label in "ABCDE":
        c.add(label, label, 5, max_new_tokens=40)
    c.add("owner", "L", 4)
    c.run()
    events = [event.event for event in c.claims.recorder.events]
    assert events.count("active_request_preempted") > 0
    assert events.count("resident_claim_harmed") == 0
    assert c.claims.book.claims["later"].phase is Phase.MATERIALIZED
    assert c.claims.queue_length() == 20
    assert c.claims.book.headroom() == 20


def test_additional_config_puts_claims_into_force() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvclaims.bridge.vllm import setup
    from kvclaims.bridge.vllm.scheduler import ClaimScheduler

    plain = setup.make_scheduler(ClaimScheduler, 10, SIZE)
    assert plain.enforcer is None
    plain.vllm_config.additional_config = {"kvclaims": {"defer_limit": 3, "run_id": "r"}}
    assert isinstance(plain.kv_cache_config, KVCacheConfig)
    scheduler = ClaimScheduler(
        vllm_config=plain.vllm_config,
        kv_cache_config=plain.kv_cache_config,
        structured_output_manager=plain.structured_output_manager,
        block_size=SIZE,
    )
    assert scheduler.enforcer is not None
    assert scheduler.enforcer.recorder.run_id == "r"
