"""What vLLM has beyond the plain pool, in process: transfers, drafts, modality inputs, windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.checker.baseline import read_baseline
from kvclaims.checker.fuzz import Ways, first_failure
from kvclaims.checker.scenes import Scene, scenes
from kvclaims.checker.supervise import Program, Supervisor, features_of, oracle_for, supervise
from kvclaims.spec.interface import (
    PRIORITY,
    BadOperation,
    NotExposed,
    Observation,
    PoolConfig,
    RequestView,
)
from kvclaims.spec.operations import parse
from kvclaims.spec.vocabulary import Outcome

pytestmark = NEEDS_VLLM

SIZE = 4


class Run:
    """A pool of vLLM under supervision; an operation that breaks a rule fails the test."""

    def __init__(self, usable: int, **more: Any) -> None:
        config = PoolConfig(usable, SIZE, 0, **more)
        self.runtime: Any = IN_PROCESS.open(config, "features")
        self.supervisor = Supervisor(self.runtime, features=features_of(IN_PROCESS))

    def __call__(self, op: str, **fields: Any) -> Observation:
        found = self.supervisor.do(parse({"op": op, **fields}))
        assert [str(one) for one in found] == []
        return self.supervisor.seen

    def ask(self, name: str, *content: list[Any], **fields: Any) -> RequestView:
        self("submit", request=name, content=list(content), **fields)
        return self("step").requests[name]

    def broken(self, op: str, **fields: Any) -> list[str]:
        return [found.rule for found in self.supervisor.do(parse({"op": op, **fields}))]

    @property
    def kinds(self) -> list[str]:
        return [event.event for event in self.runtime.events()]

    @property
    def scheduler(self) -> Any:
        return self.runtime._scheduler


def parked(usable: int = 10) -> Run:
    """The first request is put aside until the connector knows what it has; what is loaded for the
    second is there, seven blocks are kept for it, and the first one's load takes three."""
    run = Run(usable, connector=1)
    run("submit", request="r1", content=[["B", 3]], external=3)
    run("submit", request="r2", content=[["B", 5], ["C", 3]], external=1)
    run("dispatch")
    run("load", request="r2", blocks=1)
    return run


@pytest.fixture
def loading() -> Iterator[Run]:
    run = Run(12, connector=1)
    view = run.ask("r", ["A", 3], max_new_tokens=2, external=2)
    assert (view.state, len(view.blocks), view.computed) == ("loading", 2, 0)
    yield run
    assert [str(one) for one in run.supervisor.close()] == []


# -- situations that are rare


@pytest.mark.parametrize("scene", scenes(IN_PROCESS.situations), ids=lambda scene: scene.shows)
def test_a_rare_situation_breaks_no_rule(scene: Scene) -> None:
    program = Program(scene.config, scene.operations)
    assert [str(one) for one in supervise(IN_PROCESS, oracle_for(IN_PROCESS), program)] == []


def test_fuzzing_begins_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is taken for ended as soon as another one of the request has ended (B4)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler._update_waiting_for_remote_kv

    def never_forgotten(self: Any, request: Any) -> None:
        update(self, request)
        self.finished_recving_kv_req_ids.add(request.request_id)

    monkeypatch.setattr(Scheduler, "_update_waiting_for_remote_kv", never_forgotten)
    found = first_failure(IN_PROCESS, Ways(steps=1, seed=0))
    assert found is not None
    assert found[1].rule == "B4"


# -- who is looked at first


def test_who_holds_what_was_loaded_behind_a_request_that_needs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As before vLLM 0.31: who holds blocks waits in the queue of those that hold none (B11)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_holds_kv_blocks", staticmethod(lambda _: False))
    run = parked()
    found = run.supervisor.do(parse({"op": "drain"}))
    assert [one.rule for one in found] == ["B11"]
    words = "what was loaded for r2 is there, and waits behind r1, too large beside it"
    assert found[0].message.endswith(f"after 500 steps; {words}")
    (finding,) = (
        f for f in read_baseline(IN_PROCESS.findings).findings if f.name == "parked-ahead"
    )
    assert finding.covers("vllm", "0.30.0", "B11", f"{run.supervisor._doing}: {found[0].message}")
    assert not finding.covers(
        "vllm", "0.31.0", "B11", f"{run.supervisor._doing}: {found[0].message}"
    )


def test_who_waits_beside_one_that_has_room_is_another_fault() -> None:
    run = parked(usable=14)
    run.scheduler.max_num_active_reqs = 0  # nobody is admitted any more
    found = run.supervisor.do(parse({"op": "drain"}))
    assert [(one.rule, one.message) for one in found] == [
        ("B11", "requests still wait or run after 500 steps")
    ]


@pytest.mark.parametrize(("usable", "broken"), [(7, True), (8, False)])
def test_who_is_kept_from_the_room_that_is_kept_for_it_is_named(usable: int, broken: bool) -> None:
    run = Run(usable, connector=1)
    run("submit", request="r", content=[["A", 4]], external=1)
    run("submit", request="other", content=[["B", 3]], external=1)
    run("step")
    run("load", request="r", blocks=0)
    run("load", request="other", blocks=1)
    found = run.supervisor.do(parse({"op": "drain"}))
    words = "requests still wait or run after 500 steps; r, whose load failed could go on"
    assert [one.message.partition(", if")[0] for one in found] == [words] * broken


@pytest.mark.parametrize(("more", "state"), [(0, "loading"), (3, "waiting")])
def test_who_was_put_aside_for_a_transfer_may_come_first(
    more: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before vLLM 0.31: the connector is asked again about r3 before r2, which gave way, is
    looked at.  Then r2 waits, for it does not fit any more, or not even r3 does: the order of the
    two is no rule's."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    def put_aside_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        for request in [r for r in self.waiting if r in self.deferred_waiting]:
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)
        return schedule(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "schedule", put_aside_first)
    run = Run(5, connector=1)
    run("submit", request="r1", content=[["A", 1]], max_new_tokens=8)
    run("submit", request="r2", content=[["C", 1]], max_new_tokens=8)
    run("submit", request="r3", content=[["B", 2, more]], external=4)
    run("step", times=7)
    view = run.supervisor.seen.requests
    assert (view["r2"].state, view["r3"].state) == ("waiting", state)
    run("drain")


def test_who_gave_way_is_served_by_what_was_under_way() -> None:
    """The last token of `late` is under way when `early` needs its blocks."""
    run = Run(3, in_flight=2)
    run("submit", request="early", content=[["A", 0, 1]], max_new_tokens=12)
    run("submit", request="late", content=[["B", 0, 2]], max_new_tokens=4)
    states = []
    while run.supervisor.seen.requests["late"].state != "finished":
        run("complete" if len(run.supervisor.known.under_way) == 2 else "dispatch")
        states.append(run.supervisor.seen.requests["late"].state)
    assert states[-2:] == ["waiting", "finished"]
    assert run.supervisor.seen.requests["late"].outcome is Outcome.SERVED
    run("drain")
    assert run.supervisor.close() == []


# -- transfers


def test_what_a_transfer_brings_is_read(loading: Run) -> None:
    view = loading("load", request="r", blocks=2).requests["r"]
    assert (view.state, view.computed) == ("running", 2 * SIZE)
    assert loading("step").requests["r"].computed == 3 * SIZE
    assert loading("step").requests["r"].outcome is Outcome.SERVED
    assert "external_load_finished" in loading.kinds


@pytest.mark.parametrize("came", [0, 1])
def test_what_did_not_come_is_computed(loading: Run, came: int) -> None:
    view = loading("load", request="r", blocks=came).requests["r"]
    assert view.computed == came * SIZE
    loading("step")
    loading("load" if not came else "step", **({"request": "r", "blocks": 2} if not came else {}))
    loading("drain")
    assert loading.supervisor.seen.requests["r"].outcome is Outcome.SERVED
    assert ("active_request_preempted" in loading.kinds) is (came == 0)


def test_an_abort_waits_for_the_transfer(loading: Run) -> None:
    view = loading("abort", request="r").requests["r"]
    assert (view.state, len(view.blocks)) == ("ending", 2)
    with pytest.raises(BadOperation):
        loading.runtime.abort("r")
    assert loading("load", request="r", blocks=1).requests["r"].outcome is Outcome.ABORTED


def test_more_than_was_asked_for_cannot_come(loading: Run) -> None:
    with pytest.raises(BadOperation, match="loads 2 blocks"):
        loading.runtime.load("r", 3)
    loading("load", request="r", blocks=2)
    with pytest.raises(BadOperation, match="loads 0 blocks"):
        loading.runtime.load("r", 1)


def test_a_pool_without_a_connector_has_no_transfers() -> None:
    run = Run(12)
    run("submit", request="r", content=[["A", 2]], external=1)
    assert any(told.startswith("submit: external") for told in run.supervisor.not_exposed)


def test_a_claim_waits_for_the_block_that_it_lent() -> None:
    """Another request computes what a transfer brings on the claim's reserve: the claim covers
    what it lent, and once that does not come, what there is."""
    run = Run(8, connector=1)
    run("declare", claim="c", content=[["A", 1]], n=1)
    run.ask("r1", ["A", 1], external=1)
    run.ask("r2", ["A", 1])
    claim = run.supervisor.seen.claims["c"]
    assert (claim.covered, claim.reserve) == (0, 1)
    run("abort", request="r1")
    run("load", request="r1", blocks=0)
    assert run("step").claims["c"].covered == 1


def test_what_is_sent_stays_until_it_was_sent() -> None:
    run = Run(8, connector=2)
    assert run.ask("r", ["A", 2]).state == "ending"
    assert run("step").requests["r"].outcome is Outcome.SERVED


def test_what_never_comes_back_after_it_was_sent_is_found() -> None:
    run = Run(8, connector=2)
    run.runtime._driver._sent = lambda: None  # the end of the transfer is never told
    assert run.ask("r", ["A", 2]).state == "ending"
    assert "B7" in run.broken("step")


def test_blocks_freed_under_a_transfer_are_found(
    loading: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    free = Scheduler._free_request
    monkeypatch.setattr(
        Scheduler,
        "_free_request",
        lambda self, request, delay_free_blocks=False: free(self, request),
    )
    assert "B5" in loading.broken("abort", request="r")
    loading.supervisor.is_alive = False


def test_asynchronous_steps_keep_the_blocks_that_they_still_write() -> None:
    run = Run(8, connector=1, in_flight=2)
    run("submit", request="r", content=[["A", 2]], max_new_tokens=4)
    run("dispatch")
    view = run("abort", request="r").requests["r"]
    assert (view.state, len(view.blocks)) == ("ending", 2)
    assert run("complete").requests["r"].outcome is Outcome.ABORTED


def test_a_failed_load_may_end_its_request() -> None:
    """As vLLM's policy `fail` has it."""
    run = Run(12, connector=2)
    run.ask("r", ["A", 3], external=2)
    assert run("load", request="r", blocks=1).requests["r"].outcome is Outcome.ABORTED


def test_a_request_that_nobody_aborted_is_missed(loading: Run) -> None:
    from vllm.v1.request import RequestStatus

    loading("load", request="r", blocks=2)
    loading.scheduler.finish_requests("r", RequestStatus.FINISHED_ERROR)
    assert "F4" in loading.broken("advance", ticks=1)


# -- drafts


@pytest.mark.parametrize(("accepts", "steps"), [(0, 6), (1, 4), (2, 3)])
def test_right_guesses_save_steps(accepts: int, steps: int) -> None:
    """The first step samples one token, every later one 1 + accepted, of 6 in all."""
    run = Run(12, drafts=2)
    run("submit", request="r", content=[["A", 1, 1]], max_new_tokens=6, accepts=accepts)
    number = 0
    while run.supervisor.seen.requests["r"].state != "finished":
        run("step")
        number += 1
    assert number == steps


def test_drafts_in_asynchronous_steps_are_not_exposed() -> None:
    with pytest.raises(NotExposed):
        IN_PROCESS.open(PoolConfig(8, SIZE, drafts=1, in_flight=2), "drafts")


# -- modality inputs


@pytest.mark.parametrize("content", [["A", 3], ["A", 2, 2], ["A", 0, 3]])
def test_another_input_is_other_content(content: list[Any]) -> None:
    run = Run(30)
    for number, name in enumerate(("", "image 1", "image 2")):
        view = run.ask(f"r{number}", content, max_new_tokens=SIZE, modality=name)
        assert view.hit_blocks == 0
        run("drain")
    again = run.ask("again", content, max_new_tokens=SIZE, modality="image 1")
    assert again.hit_blocks == (content[1] * SIZE + sum(content[2:]) - 1) // SIZE


# -- windows and several groups


def test_a_hit_is_what_every_group_can_read() -> None:
    run = Run(40, windows=(0, 8))
    run.ask("first", ["A", 5, 1], max_new_tokens=1)
    run("submit", request="again", content=[["A", 5, 1]], max_new_tokens=4)
    view = run("dispatch").requests["again"]
    assert (view.computed, view.hit_blocks) == (5 * SIZE, 5 + 2)
    assert [table[:3] for table in view.tables][1] == (0, 0, 0)
    run("lose", content=[["A", 5]], position=4)
    assert run.ask("shorter", ["A", 5, 1]).hit_blocks == 4 + 2


def test_a_hit_too_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(40, windows=(0, 8))
    run.ask("first", ["A", 5, 1])
    manager = run.scheduler.kv_cache_manager
    monkeypatch.setattr(
        manager,
        "get_computed_blocks",
        lambda _: (manager.empty_kv_cache_blocks, 0, 0),
    )
    run("submit", request="again", content=[["A", 5, 1]])
    assert "P5" in run.broken("dispatch")


def test_what_is_not_left_behind_in_some_group_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(40, windows=(0, 8))
    window = run.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    monkeypatch.setattr(window, "cache_blocks", lambda *_, **__: None)
    run("submit", request="r", content=[["A", 2, 1]])
    assert "T2" in run.broken("step")


def test_a_wait_that_nothing_explains_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(40, windows=(0, 8))
    run("submit", request="r", content=[["A", 2]])
    monkeypatch.setattr(run.scheduler.kv_cache_manager, "allocate_slots", lambda *_, **__: None)
    assert "F3" in run.broken("step")


def test_a_block_that_left_the_window_too_early_is_found() -> None:
    run = Run(40, windows=(8,))
    run("submit", request="r", content=[["A", 4]], max_new_tokens=6)
    run("step")
    manager = run.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    manager.sliding_window = 4
    found = [*run.broken("step"), *run.broken("step")]
    assert "B5" in found


def test_claims_on_several_groups_are_not_exposed() -> None:
    run = Run(20, windows=(0, 8))
    run("declare", claim="c", content=[["A", 1]], n=1)
    assert any("windows" in told for told in run.supervisor.not_exposed)


def test_more_tokens_than_a_request_ever_has_are_found() -> None:
    run = Run(20)
    run("submit", request="r", content=[["A", 2]], max_new_tokens=4)
    run("step")
    run.runtime._driver.computed = lambda _: 99
    assert "B11" in run.broken("step")


def _goes_on(self: Any) -> None:
    """As vLLM 0.33 does where a request has preempted itself."""
    for new_blocks in self.running:
        if new_blocks is None:
            if self.policy:
                continue
            break


def test_a_version_that_orders_a_step_in_another_way_exposes_no_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvclaims.bridge.vllm import simulated

    config = PoolConfig(usable=4, block_size=4, policy=PRIORITY)
    simulated.SimulatedDriver(config)
    monkeypatch.setattr(simulated.Scheduler, "schedule", _goes_on)
    simulated._goes_on_past_who_gives_way.cache_clear()
    try:
        with pytest.raises(NotExposed, match="priority, in this version"):
            simulated.SimulatedDriver(config)
    finally:
        simulated._goes_on_past_who_gives_way.cache_clear()
