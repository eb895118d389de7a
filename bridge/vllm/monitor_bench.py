"""What the monitor costs: scheduler steps with and without it, on one stream of requests.

The allocator benchmark drives vLLM's own scheduler without a model.  Its pool is filled with cached
content first, so that every new block evicts one; then requests come as others end, with prefixes
shared by some of them.  The bare scheduler and the watched one do the same steps in turns in one
process, and only their own work is timed: requests are made beforehand.  A watched pool is compared
with the monitor's shadow at the end, so what was fast was right, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.engine import IN_PROCESS, WHOLE_ENGINE
from kvclaims.checker.monitor import Monitor
from kvclaims.spec.content import GENERATED_TOKEN, Segment, tokens_of
from kvclaims.spec.interface import PoolConfig, RequestSpec
from kvclaims.spec.pool import REQUEST

BLOCK: Final = 16
"""Tokens in a block of the allocator benchmark: vLLM's default."""

POOLS: Final = (1_000, 10_000, 100_000)
"""Usable blocks."""

TURN: Final = 5
"""Steps of a whole engine that are timed at once."""


@dataclass(frozen=True)
class Load:
    """A stream of requests: so many run at once, each with a prompt of `shared` blocks that one in
    `groups` prompts has too and `own` blocks that none has, and an answer of some tokens.

    As it is, it is a chat: 160 tokens asked and 338 answered, the means of the ShareGPT
    conversations that vLLM's own paper (arXiv 2309.06180) serves.
    """

    running: int = 32
    groups: int = 4
    shared: int = 5
    own: int = 5
    answer: int = 338


CHAT: Final = Load()
PREFILL: Final = Load(shared=16, own=8, answer=48)
"""Long prompts, short answers: five times as many blocks come and go in a step."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one scheduler step, medians over the rounds, without and with the monitor.

    `monitored` counts the allocator operations that were judged in the timed steps.
    """

    name: str
    bare: float
    watched: float
    steps: int
    monitored: int

    @property
    def ratio(self) -> float:
        """Steps a second with the monitor, against those without."""
        return self.bare / self.watched


class Watched:
    """A monitor that hears a live scheduler from its start."""

    def __init__(self, scheduler: Any) -> None:
        from kvclaims.bridge.vllm.observer import attach

        self.monitor = Monitor(range(1, scheduler.kv_cache_manager.block_pool.num_gpu_blocks), 0)
        self._observer = attach(scheduler, self.monitor)

    def arrives(self, request_id: str) -> None:
        self.monitor.introduce(REQUEST, request_id, True)

    def check(self) -> None:
        """The pool is what the monitor makes of the steps; `AssertionError` where it is not."""
        self.monitor.audit(self._observer.snapshot({}))
        assert not self.monitor.violations, self.monitor.violations[:3]


class Stream:
    """vLLM's own scheduler under a load, one step at a time."""

    def __init__(self, usable: int, load: Load, watched: bool) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self._load = load
        self._made = 0
        self._hasher = setup.block_hasher(BLOCK)
        self.scheduler = setup.make_scheduler(Scheduler, usable, BLOCK)
        self.watched = Watched(self.scheduler) if watched else None
        self._coming: list[Any] = []
        self._fill(usable)

    def prepare(self, steps: int) -> None:
        """Make more requests than so many steps can take up."""
        most = self._load.running + self._load.running * steps // self._load.answer
        while len(self._coming) < 2 * most:
            self._coming.append(self._request())
        self._coming.reverse()

    def step(self) -> None:
        scheduler = self.scheduler
        while len(scheduler.requests) < self._load.running:
            self._add(self._coming.pop())
        output = scheduler.schedule()
        scheduler.update_from_output(output, sampled(scheduler, output))

    def close(self) -> None:
        self.scheduler.shutdown()

    def _fill(self, usable: int) -> None:
        """Leave every block cached: one request of almost all of the pool comes and goes."""
        tokens = tokens_of((Segment("fill", usable - 1, 1),), BLOCK)
        self._add(setup.make_request("fill", tokens, 1, self._hasher))
        while self.scheduler.requests:
            output = self.scheduler.schedule()
            self.scheduler.update_from_output(output, sampled(self.scheduler, output))

    def _request(self) -> Any:
        load, number = self._load, self._made
        self._made += 1
        prompt = (
            Segment(f"group {number % load.groups}", load.shared),
            Segment(f"own {number}", load.own),
        )
        tokens = tokens_of(prompt, BLOCK)
        return setup.make_request(f"r{number}", tokens, load.answer, self._hasher)

    def _add(self, request: Any) -> None:
        if self.watched is not None:
            self.watched.arrives(request.request_id)
        self.scheduler.add_request(request)


def sampled(scheduler: Any, output: Any) -> Any:
    """What a model runner would answer: a token for every request that is past its prompt."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request: i for i, request in enumerate(ids)},
        sampled_token_ids=[
            [] if scheduler.requests[request].is_prefill_chunk else [GENERATED_TOKEN]
            for request in ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def allocator(usable: int, steps: int, rounds: int, load: Load = CHAT, warm: int = 50) -> Cost:
    """The allocator benchmark in a pool of `usable` blocks."""
    IN_PROCESS.info()
    setup.quieten(setup.ALONE)
    bare, watched = (Stream(usable, load, kind) for kind in (False, True))
    for stream in (bare, watched):
        stream.prepare(warm + steps * rounds)
        _timed(stream.step, warm)
    assert watched.watched is not None
    told = watched.watched.monitor.steps
    times = _rounds((bare.step, watched.step), steps, rounds)
    told = watched.watched.monitor.steps - told
    watched.watched.check()
    for stream in (bare, watched):
        stream.close()
    name = "chat" if load == CHAT else "prefill" if load == PREFILL else str(load)
    plain, judged = times
    return Cost(f"{name}, pool of {usable:,}", plain, judged, steps * rounds, told)


def whole_engine(steps: int, rounds: int, requests: int = 8) -> Cost:
    """A whole vLLM on this CPU: `requests` decode under a bare and under a watched scheduler.

    One engine runs both, fresh in each round, in turns of `TURN` steps: what a forward pass costs
    drifts by more in a round than the monitor takes of it.
    """
    WHOLE_ENGINE.info()
    setup.quieten(setup.WHOLE)
    turns = max(1, steps // TURN)
    times: tuple[list[float], list[float]] = ([], [])
    told = 0
    for _ in range(rounds):
        decoding = [_Decoding(watched) for watched in (False, True)]
        for run in decoding:
            run.begin(requests, turns * (TURN + 1))
        for turn in range(turns):
            for watched in ((False, True), (True, False))[turn % 2]:
                seconds, judged = decoding[watched].turn()
                times[watched].append(seconds)
                told += judged
        for run in decoding:
            run.close()
    bare, judged_too = map(statistics.median, times)
    return Cost("whole engine", bare, judged_too, turns * TURN * rounds, told)


class _Decoding:
    """Requests that decode on the whole engine, which another run may have taken over."""

    def __init__(self, watched: bool) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from kvclaims.bridge.vllm.whole_engine import BLOCK_SIZE, WholeDriver

        self._driver = WholeDriver(PoolConfig(200, BLOCK_SIZE), kind=Scheduler)
        self._watched = Watched(self._driver.scheduler) if watched else None

    def begin(self, requests: int, steps: int) -> None:
        """So many requests come, of so many steps and some more."""
        from kvclaims.bridge.vllm.whole_engine import BLOCK_SIZE

        self._driver.take_over()
        for i in range(requests):
            tokens = tokens_of((Segment(f"d{i}", 1),), BLOCK_SIZE)
            made = self._driver.request(RequestSpec(f"d{i}", tokens, max_new_tokens=steps + 10), {})
            if self._watched is not None:
                self._watched.arrives(made.request_id)
            self._driver.add(made)
        _timed(self._driver.step, 5)

    def turn(self) -> tuple[float, int]:
        """CPU seconds a step, and how many allocator operations were judged.

        The first step is not timed: the model runner takes the requests of the other run out of
        its batch, and these in.
        """
        self._driver.take_over()
        self._driver.step()
        monitor = None if self._watched is None else self._watched.monitor
        before = 0 if monitor is None else monitor.steps
        seconds = _timed(self._driver.step, TURN)
        return seconds, 0 if monitor is None else monitor.steps - before

    def close(self) -> None:
        self._driver.take_over()
        if self._watched is not None:
            self._watched.check()
        self._driver.close()
        self._driver.step()  # the model runner hears of it


def _rounds(kinds: Sequence[Callable[[], None]], steps: int, rounds: int) -> list[float]:
    """Median CPU seconds a step of each kind; they take turns, and turns at coming first."""
    times: list[list[float]] = [[] for _ in kinds]
    order = list(range(len(kinds)))
    for _ in range(rounds):
        for kind in order:
            times[kind].append(_timed(kinds[kind], steps))
        order.reverse()
    return [statistics.median(found) for found in times]


def _timed(step: Callable[[], None], steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start) / steps
