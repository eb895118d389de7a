"""Elastic capacity in a whole vLLM: real forward passes over KV that comes and goes (E1 to E5)."""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.vmm import DriverError, Failing, Mode, Refused, Shape, TwinDriver
from kvclaims.bridge.vmm.judge import ElasticMonitor
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import (
    BadOperation,
    ClaimSpec,
    PoolConfig,
    Predicate,
    PredicateKind,
    RequestSpec,
)
from kvclaims.spec.vocabulary import Decision, Outcome, Phase, Verdict

pytestmark = NEEDS_VLLM

SIZE = 32
BLOCK_BYTES = 16384
RESIDENT = 6
"""Blocks of the prefix that a hard claim keeps in every run."""


def stream(name: str, tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(3, 250), k=tokens))


def claim(name: str, content: tuple[int, ...], n: int) -> ClaimSpec:
    return ClaimSpec(name, content, Predicate(PredicateKind.LEADING, n))


class Live:
    """One run on the whole engine, with everything that is looked at."""

    def __init__(self, base: int, lent: int, policy: str = "elastic", **more: Any) -> None:
        torch = pytest.importorskip("torch")
        from kvclaims.bridge.vllm import setup

        setup.quieten(setup.WHOLE)
        from kvclaims.bridge.vllm.elastic import Policy
        from kvclaims.bridge.vllm.elastic_engine import open_elastic
        from kvclaims.bridge.vllm.whole_engine import booted

        booted()
        torch.set_num_threads(1)  # a model this small gains nothing from more
        self.judge = ElasticMonitor(Shape.fit(2, BLOCK_BYTES, base, lent, 4096))
        self.runtime, self.controller = open_elastic(
            PoolConfig(base, SIZE), lent, self.judge, policy=Policy(policy), **more
        )
        self.scheduler = self.controller.scheduler
        self.memory = self.controller.memory
        self.requests: dict[str, Any] = {}
        self.stale_tables = 0
        self.lent_seen = 0

    def submit(self, name: str, tokens: tuple[int, ...], new: int = 1) -> None:
        before = set(self.scheduler.requests)
        self.runtime.submit(RequestSpec(name, tokens, new))
        (added,) = set(self.scheduler.requests) - before
        self.requests[name] = self.scheduler.requests[added]

    def step(self) -> None:
        self.runtime.step()
        if self.memory.mode is Mode.LENT:
            self.lent_seen += 1
        elif self.controller.placement.names(self.controller.lent):
            self.stale_tables += 1

    def drain(self) -> None:
        while self.scheduler.has_requests():
            self.step()

    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(r.output_token_ids) for name, r in self.requests.items()}

    def prints(self) -> tuple[int, ...]:
        found = self.runtime.locate(stream("resident", RESIDENT * SIZE))
        blocks = tuple(b for b in found if b is not None)
        assert len(blocks) == RESIDENT
        return self.runtime.fingerprint(blocks)

    def resident(self) -> tuple[int, ...]:
        """Compute the resident prefix and put it under a hard claim."""
        content = stream("resident", RESIDENT * SIZE)
        self.submit("resident", content)
        self.drain()
        answer = self.runtime.declare(claim("keep", content, RESIDENT))
        assert answer.decision is Decision.ACCEPTED
        return self.prints()

    def load(self, rounds: int, seed: int, longest: int, new: int, running: int = 3) -> None:
        """Prompts that share prefixes arrive while others decode."""
        chance = random.Random(seed)
        prefix = stream("resident", RESIDENT * SIZE)
        submitted = 0
        while submitted < rounds or self.scheduler.has_requests():
            if submitted < rounds and len(self.scheduler.requests) < running:
                shared = prefix[: SIZE * chance.choice([0, 2, RESIDENT])]
                own = stream(f"p{chance.randrange(6)}", chance.randrange(20, longest))
                self.submit(f"r{submitted}", shared + own, chance.randrange(3, new))
                submitted += 1
                for _ in range(chance.randrange(1, 4)):
                    self.step()
            self.step()

    def close(self) -> None:
        self.runtime.close()


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    """Opens runs; the engine gets its own tensors back in the end."""
    opened: list[Live] = []

    def open_(*args: Any, **more: Any) -> Live:
        while opened:
            opened.pop().close()
        opened.append(Live(*args, **more))
        return opened[-1]

    yield open_
    for run in opened:
        run.close()


@pytest.mark.slow
def test_two_hundred_toggles_and_the_same_tokens(live: Callable[..., Live]) -> None:
    """A hard claim in force, prefix caching on, every request's tokens as without lending."""
    plain = live(24, 12, "static")
    plain.resident()
    plain.load(115, seed=1, longest=100, new=64)
    expected = plain.outputs()
    assert plain.memory.costs.lends == 0

    run = live(24, 12)
    before = run.resident()
    run.load(115, seed=1, longest=100, new=64)
    assert run.outputs() == expected
    assert sum(map(len, expected.values())) > 3_000
    assert run.memory.costs.lends + run.memory.costs.returns >= 200
    assert run.memory.costs.lends == run.memory.costs.returns
    assert run.prints() == before
    assert run.runtime.observe().claims["keep"].phase is Phase.MATERIALIZED
    assert run.stale_tables == 0
    assert run.controller.counts["moved"] > 50
    assert sum(v.hit_blocks for v in run.runtime.observe().requests.values()) > 300
    assert run.judge.violations == []
    assert run.judge.broken() == ()
    assert run.judge.fired["touch"] > 500


def test_cached_blocks_of_the_lent_part_are_dropped_and_computed_again(
    live: Callable[..., Live],
) -> None:
    def again(run: Live) -> dict[str, tuple[int, ...]]:
        run.submit("stays", stream("a", 40), 120)
        run.submit("ends", stream("b", 40), 70)
        for _ in range(75):
            run.step()
        ended = tuple(run.requests["ends"].all_token_ids)
        run.submit("again", ended[:100] + stream("c", 10), 5)
        run.drain()
        return run.outputs()

    plain = live(24, 12, "static")
    expected = again(plain)
    hits = plain.runtime.observe().requests["again"].hit_blocks
    run = live(24, 12)
    assert again(run) == expected
    assert run.controller.counts["dropped"] >= 1
    assert run.runtime.observe().requests["again"].hit_blocks < hits == 3
    assert run.judge.violations == []


def test_where_the_base_is_full_a_return_preempts_and_the_tokens_stay(
    live: Callable[..., Live],
) -> None:
    def crowd(run: Live) -> dict[str, tuple[int, ...]]:
        for name in "abc":
            run.submit(name, stream(name, 120), 60)  # four blocks each: the base is full
        for _ in range(30):
            run.step()
        run.submit("next", stream("d", 40), 3)
        run.drain()
        return run.outputs()

    expected = crowd(live(40, 4, "static"))
    run = live(12, 8)
    assert crowd(run) == expected
    assert run.controller.counts["preempted"] >= 1
    assert run.judge.violations == []
    assert run.stale_tables == 0
    views = run.runtime.observe().requests.values()
    assert {v.outcome for v in views} == {Outcome.SERVED}


def test_a_prompt_that_waits_for_blocks_or_is_gone_keeps_nobody_from_lending(
    live: Callable[..., Live],
) -> None:
    """It needed the reserve when it came; the others only decode while it waits, and after it."""
    run = live(12, 8)
    run.submit("decodes", stream("a", 200), 150)
    run.step()
    run.step()
    assert run.memory.mode is Mode.LENT
    run.submit("waits", stream("b", 300), 2)  # ten blocks, where five of twelve are free
    run.step()
    assert run.memory.mode is Mode.HOME
    run.step()
    assert run.memory.mode is Mode.LENT
    run.drain()
    assert list(map(len, run.outputs().values())) == [150, 2]

    driver = Failing(TwinDriver(), lambda _call: False)
    run = live(12, 8, driver=driver)
    run.submit("decodes", stream("a", 40), 60)
    run.step()
    run.step()
    run.submit("leaves", stream("b", 40), 2)
    driver.fails = lambda _call: True
    run.step()  # the reserve cannot come home, so it is not admitted
    run.runtime.abort("leaves")
    driver.fails = lambda _call: False
    run.step()
    run.step()
    assert run.memory.mode is Mode.LENT
    assert not run.memory.needed
    assert (
        run.controller.base_free() < run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    )
    run.drain()
    assert run.judge.violations == []


def resident_kb() -> int:
    """Shared memory that this process has touched and that is mapped, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return int(line.split()[1])
    raise AssertionError("no RssShmem")


def test_the_memory_of_the_process_falls_and_rises(live: Callable[..., Live]) -> None:
    run = live(16, 128)
    run.controller._scribble = False  # else the activations have the memory instead
    run.submit("long", stream("a", 40), 60)
    run.step()
    run.step()
    assert run.memory.mode is Mode.LENT
    for tensor in run.controller.placement.runner.kv_caches:
        tensor[17:145] = 1.0  # as if every lent block had been written
    full = resident_kb()
    run.submit("next", stream("b", 40))
    run.step()
    assert run.memory.mode is Mode.HOME
    lent_kb = 128 * 2 * BLOCK_BYTES // 1024
    written_kb = 4 * 2 * BLOCK_BYTES // 1024  # meanwhile: two blocks prefilled, two moved
    assert lent_kb - written_kb <= full - resident_kb() <= lent_kb == 4096
    run.step()
    for tensor in run.controller.placement.runner.kv_caches:
        assert float(tensor[17:145].abs().max()) == 0  # what came back is blank
        tensor[17:145] = 1.0
    assert resident_kb() >= full
    run.drain()


def test_usage_reset_and_lengths_know_the_true_capacity(live: Callable[..., Live]) -> None:
    run = live(16, 8)
    pool = run.scheduler.kv_cache_manager.block_pool
    assert pool.num_gpu_blocks == 17
    assert run.scheduler.max_model_len == 16 * SIZE + 1
    run.submit("a", stream("a", 8 * SIZE), 40)
    run.step()
    assert pool.get_usage() == pytest.approx(8 / 16)
    run.step()
    assert run.memory.mode is Mode.LENT
    assert pool.num_gpu_blocks == 25
    assert pool.get_usage() == pytest.approx(9 / 24)
    assert not run.runtime.reset()  # a request still runs, and it says so (B10)
    assert run.memory.mode is Mode.LENT  # what was refused has changed nothing
    run.drain()
    assert pool.get_usage() == 0
    assert run.runtime.reset()
    assert run.runtime.observe().resident == {}
    run.submit("longer", stream("b", 15 * SIZE), 200)
    run.drain()
    assert len(run.outputs()["longer"]) == SIZE + 1  # it ends where the base ends


def test_hard_claims_count_on_the_base_alone(live: Callable[..., Live]) -> None:
    run = live(16, 8)
    run.submit("decodes", stream("a", 40), 200)
    run.step()
    run.step()
    assert run.memory.mode is Mode.LENT
    free = run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == 16 - 2 + 8
    too_many = run.runtime.declare(claim("big", stream("z", 15 * SIZE), 15))
    assert (too_many.decision, too_many.headroom) == (Decision.REFUSED, 14)
    run.runtime.declare(claim("fits", stream("y", 14 * SIZE), 14))
    run.step()
    assert run.memory.mode is Mode.HOME  # nothing is lent while a claim is owed blocks
    run.runtime.release("fits")
    run.step()
    assert run.memory.mode is Mode.LENT
    run.drain()


def test_what_a_claim_wants_and_a_lent_block_has_moves_to_the_base(
    live: Callable[..., Live],
) -> None:
    run = live(16, 8)
    run.submit("writes", stream("a", 40), 120)
    for _ in range(100):
        run.step()
    request = run.requests["writes"]
    content = tuple(request.all_token_ids)[: 3 * SIZE]
    table = run.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert any(b in run.controller.lent for b in table[:3])
    assert run.memory.mode is Mode.LENT
    answer = run.runtime.declare(claim("keep", content, 3))
    assert answer.decision is Decision.ACCEPTED
    view = run.runtime.observe().claims["keep"]
    assert (view.phase, view.covered) == (Phase.MATERIALIZED, 3)
    covered = run.scheduler.enforcer.book.pins()["keep#1"]
    assert not any(b in run.controller.lent for b in covered)
    table = run.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert tuple(table[:3]) == covered
    before = run.runtime.fingerprint(covered)
    run.drain()
    assert run.runtime.fingerprint(covered) == before
    assert run.judge.violations == []
    plain = live(16, 8, "static")
    plain.submit("writes", stream("a", 40), 120)
    plain.drain()
    assert tuple(request.output_token_ids) == plain.outputs()["writes"]


def test_a_driver_that_fails_costs_lends_and_no_tokens(live: Callable[..., Live]) -> None:
    plain = live(24, 12, "static")
    plain.load(20, seed=3, longest=80, new=30)
    chance = random.Random(9)
    driver = Failing(TwinDriver(), lambda call: call > 20 and chance.random() < 0.08)
    run = live(24, 12, driver=driver)
    run.load(20, seed=3, longest=80, new=30)
    driver.fails = lambda _call: False
    assert run.outputs() == plain.outputs()
    assert run.controller.counts["lends refused by the driver"] > 0
    assert run.controller.counts["returns refused by the driver"] > 0
    assert run.memory.costs.lends > 5
    assert run.judge.violations == []
    assert run.stale_tables == 0


def test_over_commitment_fails_safely_and_visibly(live: Callable[..., Live]) -> None:
    """The reserve is KV for good: a long prompt is refused, and the others get their tokens."""
    plain = live(24, 12, "static")
    plain.submit("short", stream("a", 40), 30)
    plain.drain()
    run = live(24, 12, "committed", most_chunk=64)
    run.submit("short", stream("a", 40), 30)
    run.step()
    run.submit("long", stream("b", 300), 2)
    run.drain()
    assert run.controller.counts["refused for lack of activations"] == 1
    assert len(run.outputs()["long"]) == 0
    assert run.outputs()["short"] == plain.outputs()["short"]
    assert run.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 37


def test_an_over_committed_batch_has_its_activations_or_is_not_made(
    live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts that arrive together are no more tokens at once than one may be."""
    run = live(24, 12, "committed", most_chunk=64)
    batches: list[int] = []
    schedule = run.scheduler.schedule

    def counted(*args: Any, **more: Any) -> Any:
        output = schedule(*args, **more)
        batches.append(sum(output.num_scheduled_tokens.values()))
        return output

    monkeypatch.setattr(run.scheduler, "schedule", counted)
    for name in "abcd":
        run.submit(name, stream(name, 40), 5)
    run.drain()
    assert 40 <= max(batches) <= 64
    assert sum(map(len, run.outputs().values())) == 20


def test_who_is_refused_for_lack_of_activations_is_not_told_as_served(
    live: Callable[..., Live],
) -> None:
    run = live(24, 12, "committed", most_chunk=64)
    run.submit("long", stream("b", 300), 2)
    run.drain()
    assert run.runtime.observe().requests["long"].outcome is Outcome.ABORTED
    assert [e.event for e in run.runtime.events()][-1] == "active_request_aborted"


def test_over_committed_memory_promises_nothing(live: Callable[..., Live]) -> None:
    """What is lent for good is no base to count on, and requests take it block by block."""
    run = live(24, 12, "committed", most_chunk=64)
    content = stream("z", 8 * SIZE)
    with pytest.raises(BadOperation, match="over-committed"):
        run.runtime.declare(claim("keep", content, 8))
    assert run.runtime.observe().claims == {}


# --- the experiment ---------------------------------------------------------------------------


def measured(**more: Any) -> Any:
    """A row of `elastic bench` as it should be for a load of 2 short prompts and 1 long one."""
    from kvclaims.bridge.vllm.elastic_bench import Measured

    row = Measured("elastic", 512, 160, 184, 50.0, 3.0, 1.0, 4, 2.0, 0, 0, refused=0, served=3)
    return dataclasses.replace(row, **more)


def test_the_experiment_holds_only_where_everyone_was_served_or_refused() -> None:
    from kvclaims.bridge.vllm.elastic_bench import BenchReport, Load

    load = Load(decodes=2, longs=1)

    def report(**more: Any) -> BenchReport:
        return BenchReport(load, (measured(**more),), "vLLM")

    assert report().verdict is Verdict.HOLDS
    assert report(served=2, refused=1).verdict is Verdict.HOLDS
    assert report(toggles=0).verdict is Verdict.VACUOUS
    found = (Violation("E1", "not so: no prefill step runs", "lend()"),)
    for broken, words in (
        ({"served": 2}, "elastic, chunk 512: 1 of 3 requests neither served nor refused"),
        ({"same_tokens": False}, "elastic, chunk 512: other tokens than before"),
        ({"violations": found}, "elastic, chunk 512: E1: not so: no prefill step runs"),
    ):
        assert report(**broken).verdict is Verdict.VIOLATED
        assert any(words in line for line in report(**broken).lines()), words


def test_a_chunk_that_leaves_no_room_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvclaims.bridge.vllm import elastic_bench
    from kvclaims.checker.cli import run

    def measure(*_: Any) -> Any:
        raise AssertionError("measured before the sizes were looked at")

    monkeypatch.setattr(elastic_bench, "_measure", measure)
    assert run(["elastic", "bench", "--chunk", "64", "--chunk", "4096"], io.StringIO()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "chunk 4096 leaves 0 blocks" in said


# --- each guard left out is seen --------------------------------------------------------------


def started(live: Callable[..., Live]) -> Live:
    """A run whose reserve is lent, with a lent block held."""
    run = live(16, 8)
    run.submit("decodes", stream("a", 40), 120)
    for _ in range(40):
        run.step()
    assert run.memory.mode is Mode.LENT
    return run


def test_without_the_bar_on_admission_a_prefill_is_refused_its_memory(
    live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(live)
    monkeypatch.setattr(run.controller, "_prefill_next", lambda: False)
    run.submit("next", stream("b", 40))
    run.step()
    assert run.memory.mode is Mode.LENT  # not foreseen, and not admitted
    from vllm.v1.core.sched.interface import PauseState

    monkeypatch.setattr(run.controller, "_gate", lambda: PauseState.UNPAUSED)
    with pytest.raises(Refused, match="E1"):
        run.step()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("_empty_held", "out of use"),
        ("_drop_or_move", "out of use"),
    ],
)
def test_without_a_part_of_the_drain_nothing_is_unmapped(
    live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    run = started(live)
    for _ in range(30):
        run.step()  # the lent block is full, and found by lookups
    run.submit("short", stream("c", 40), 2)
    monkeypatch.setattr(run.controller, name, lambda *_: None)
    if name == "_drop_or_move":
        monkeypatch.setattr(run.controller, "_empty_held", run.controller._preempt)
    with pytest.raises(Refused, match=found):
        run.step()
    assert run.memory.mode is Mode.DRAINING
    monkeypatch.undo()
    run.drain()


def test_without_scrubbing_a_table_still_names_what_is_gone(
    live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(live)
    run.submit("next", stream("b", 40))
    monkeypatch.setattr(run.controller.placement, "scrub", lambda _blocks: None)
    monkeypatch.setattr(run.controller.placement, "rename", lambda *_: None)
    with pytest.raises(Refused, match="out of use"):
        run.step()
    monkeypatch.undo()


def test_sizes_it_cannot_have_are_refused() -> None:
    from kvclaims.bridge.vllm import setup

    setup.quieten(setup.WHOLE)
    from kvclaims.bridge.vllm.elastic_engine import open_elastic

    with pytest.raises(BadOperation, match="usable"):
        open_elastic(PoolConfig(250, SIZE), 10)
    with pytest.raises(DriverError, match="refused"):
        open_elastic(PoolConfig(8, SIZE), 4, driver=Failing(TwinDriver(), lambda call: call == 9))
