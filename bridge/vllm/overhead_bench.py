"""What claims in force cost a step that concerns none of them.

Two engines that do the same work, one under vLLM's own scheduler and one under ours, take turns in
one process: a few steps of the one, as many of the other, the first of the two changing from pair
to pair.  Whatever else the machine does meanwhile it does to both, so the figures are those of
pairs: medians of the differences and of the ratios.  Time is the processor's time of the thread
that runs the engine core, in which everything runs that a step waits for (models have one thread
here).

A model's own time varies by more than claims cost.  So a step is timed as a whole, and in it what
claims can add to: the calls of the scheduler, between which the model runs and leaves the
processor's caches as a served model leaves them.

There are three engines, none of which is any like a GPU's: vLLM's scheduler without a model, and
whole engines on the CPU with a model made up on the spot, one tiny and one as large as GPT-2 small.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.engine import IN_PROCESS, WHOLE_ENGINE
from kvclaims.bridge.vllm.limits import HardShare
from kvclaims.bridge.vllm.monitor_bench import sampled
from kvclaims.bridge.vllm.serving import Serving
from kvclaims.spec.content import Segment, tokens_of
from kvclaims.spec.interface import PoolConfig, RequestSpec

SIZE: Final = 32
"""Tokens in a block: what attention on a CPU wants."""

USABLE: Final = 250
"""Blocks of a pool."""

CLAIMS: Final = (0, 1, 10_000)
"""How many claims are in force, each on one resident block that no request of the load uses."""

ALONE: Final = "none"
"""The engine without a model."""

MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": setup.MODEL,
    "gpt2-small": {
        **setup.MODEL,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "vocab_size": 50_257,
    },
}
"""Shapes; weights are random."""

_UNTIMED: Final = 3
"""Steps after a change of engines: the worker takes the other one's requests up again."""


@dataclass(frozen=True)
class Load:
    """So many requests run at any time, each with a prompt of `prompt` blocks that no other has and
    an answer of so many tokens; where they come and go, every new block evicts cached content."""

    name: str
    running: int
    prompt: int
    answer: int


DECODE: Final = Load("decode", running=8, prompt=1, answer=7_000)
TURNOVER: Final = Load("turnover", running=8, prompt=4, answer=32)
LOADS: Final = (DECODE, TURNOVER)


@dataclass(frozen=True)
class Cost:
    """What a step takes under vLLM's own scheduler, what of it are calls of the scheduler, and how
    much more those take beside so many claims: in microseconds of CPU, medians over the pairs.

    `spread` are the quartiles of what is more, `ratio` is that of whole steps, as it was timed.
    """

    model: str
    load: str
    claims: int
    step: float
    scheduler: float
    more: float
    spread: tuple[float, float]
    ratio: float
    pairs: int

    @property
    def part(self) -> float:
        """What is more, as a part of the step."""
        return self.more / self.step


@dataclass(frozen=True)
class Taken:
    """Microseconds of a step, and those in the scheduler's calls."""

    step: float
    scheduler: float


class SchedulerAlone:
    """vLLM's scheduler, and a model that answers at once."""

    def __init__(self, kind: type) -> None:
        self.scheduler = setup.make_scheduler(kind, USABLE, SIZE)
        self._hasher = setup.block_hasher(SIZE)

    def request(self, spec: RequestSpec, extra_args: dict[str, Any]) -> Any:
        made = (spec.request_id, spec.tokens, spec.max_new_tokens, self._hasher)
        return setup.make_request(*made, extra_args=extra_args)

    def add(self, request: Any) -> None:
        self.scheduler.add_request(request)

    def take_over(self) -> None:
        """It has nothing to share."""

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, sampled(self.scheduler, output))

    def close(self) -> None:
        self.scheduler.shutdown()


class Contender:
    """An engine under a load.  `claims` are in force; None is vLLM's own scheduler."""

    def __init__(self, model: str, load: Load, claims: int | None, trace: Path | None) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from kvclaims.bridge.vllm.scheduler import ClaimScheduler

        kind = Scheduler if claims is None else ClaimScheduler
        self.driver = _driver(model, kind)
        self._load = load
        self._numbers = count()
        self._coming: list[Any] = []
        self._serving: Serving | None = None
        if claims is not None:
            self._claim(claims, trace)
        self._inside = 0.0
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(self.driver.scheduler, name, self._clocked(name))
        if load is TURNOVER:
            self._run(RequestSpec("fill", tokens_of((Segment("fill", USABLE - 2, 1),), SIZE)))

    def prepare(self, steps: int) -> None:
        """Make the requests of so many steps: that is no engine's work."""
        load = self._load
        most = load.running * (2 + steps // load.answer)
        self._coming = [self._request(next(self._numbers)) for _ in range(most)][::-1]

    def step(self) -> None:
        scheduler = self.driver.scheduler
        while len(scheduler.requests) < self._load.running:
            self.driver.add(self._coming.pop())
        self.driver.step()

    def timed(self, steps: int) -> Taken:
        """What one of so many steps takes."""
        self.driver.take_over()
        for _ in range(_UNTIMED):
            self.step()
        self._inside, start = 0.0, time.thread_time()
        for _ in range(steps):
            self.step()
        whole = time.thread_time() - start
        return Taken(whole / steps * 1e6, self._inside / steps * 1e6)

    def _clocked(self, name: str) -> Callable[..., Any]:
        inner = getattr(self.driver.scheduler, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = inner(*args, **kwargs)
            self._inside += time.thread_time() - start
            return result

        return called

    def close(self) -> None:
        self.driver.take_over()
        self.driver.close()
        if self._serving is not None:
            self._serving.close()

    def _request(self, number: int) -> Any:
        tokens = tokens_of((Segment(f"own {number}", self._load.prompt),), SIZE)
        return self.driver.request(RequestSpec(f"r{number}", tokens, self._load.answer), {})

    def _run(self, spec: RequestSpec) -> None:
        self.driver.add(self.driver.request(spec, {}))
        while self.driver.scheduler.requests:
            self.driver.step()

    def _claim(self, claims: int, trace: Path | None) -> None:
        """Put claims in force, and declare them on one block: as many references as claims.  The
        cap on hard claims adds footprints up, so it is lifted."""
        settings = Settings(claims_per_owner=20_000, trace="" if trace is None else str(trace))
        scheduler = self.driver.scheduler
        self._serving = scheduler.serving = Serving(scheduler, settings)
        enforcer = scheduler.enforce(self._serving.recorder, settings.defer_limit)
        desk = enforcer.desk = self._serving.open(enforcer)
        enforcer.book.share = HardShare()
        tokens = tokens_of((Segment("K", 1),), SIZE)
        self._run(RequestSpec("cache", tokens))
        for i in range(claims):
            claim = {"claim_id": f"c{i}", "tokens": list(tokens), "duration": 36_000}
            answer = desk.operate({"op": "declare", "owner": "a", "claim": claim})
            assert (answer.status, answer.body["phase"]) == (201, "materialized"), answer


def _driver(model: str, kind: type) -> Any:
    if model == ALONE:
        return SchedulerAlone(kind)
    from kvclaims.bridge.vllm.whole_engine import WholeDriver

    return WholeDriver(PoolConfig(USABLE, SIZE), kind=kind)


def overhead(
    model: str,
    load: Load,
    pairs: int,
    steps: int = 32,
    claims: Sequence[int] = CLAIMS,
    traced: bool = False,
) -> list[Cost]:
    """What `claims` in force cost, over so many pairs of so many steps each: an answer of the
    turnover has as many tokens, so that each time as many requests come and go.  A process has one
    whole engine, so one model.  Raises `EngineMissing`, and `ValueError` where answers would grow
    until the pool is full."""
    grown = load.prompt + (pairs + 1) * (steps + _UNTIMED) // SIZE + 1
    if load is DECODE and load.running * grown > USABLE - 1:
        raise ValueError(f"{pairs} pairs of {steps} steps fill a pool of {USABLE} blocks")
    _boot(model)
    with TemporaryDirectory(prefix="kvclaims-overhead-") as folder:
        both = {n: _two(model, load, n, Path(folder) if traced else None) for n in claims}
        everyone = [contender for two in both.values() for contender in two]
        for contender in everyone:
            contender.prepare((pairs + 1) * (steps + _UNTIMED))
            contender.timed(steps)
        taken = _taken(both, pairs, steps)
        for contender in everyone:
            contender.close()
    return [_cost(model, load, n, found) for n, found in taken.items()]


def _two(model: str, load: Load, claims: int, folder: Path | None) -> tuple[Contender, Contender]:
    """vLLM's own and ours.  Each has one of its own to be held against, which has done as much: a
    step takes longer as answers grow."""
    trace = None if folder is None else folder / f"{claims}.jsonl"
    return Contender(model, load, None, None), Contender(model, load, claims, trace)


def _taken(
    both: Mapping[int, tuple[Contender, Contender]], pairs: int, steps: int
) -> dict[int, list[tuple[Taken, Taken]]]:
    """What a step of each took in each pair."""
    taken: dict[int, list[tuple[Taken, Taken]]] = {n: [] for n in both}
    for number in range(pairs):
        for n, (bare, ours) in both.items():
            if number % 2:
                later = ours.timed(steps)
                taken[n].append((bare.timed(steps), later))
            else:
                taken[n].append((bare.timed(steps), ours.timed(steps)))
    return taken


def _cost(model: str, load: Load, claims: int, found: Sequence[tuple[Taken, Taken]]) -> Cost:
    more = sorted(ours.scheduler - bare.scheduler for bare, ours in found)
    return Cost(
        model=model,
        load=load.name,
        claims=claims,
        step=statistics.median(bare.step for bare, _ in found),
        scheduler=statistics.median(bare.scheduler for bare, _ in found),
        more=statistics.median(more),
        spread=(more[len(more) // 4], more[-1 - len(more) // 4]),
        ratio=statistics.median(ours.step / bare.step for bare, ours in found),
        pairs=len(found),
    )


def _boot(model: str) -> None:
    if model == ALONE:
        IN_PROCESS.info()
        setup.quieten(setup.ALONE)
        return
    WHOLE_ENGINE.info()
    setup.quieten(setup.WHOLE)
    from kvclaims.bridge.vllm.whole_engine import boot_with_model

    boot_with_model(MODELS[model])
