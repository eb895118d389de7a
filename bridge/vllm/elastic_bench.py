"""`kvclaims elastic bench`: does lending the activation reserve pay on a live engine?

One amount of memory, three uses of it, several prefill chunks: the reserve kept (static), lent
while batches only decode (elastic), or taken for KV for good (committed).  A decode load runs, long
prompts are injected, and each one's time to its first token is taken.  The baseline is the one
that won in arXiv 2608.23658: a lower chunk.

The engine, its passes and its toggles are real; how much memory a prefill chunk needs is a model
(`_ACTIVATIONS`), for a CPU process has no hard limit that such a chunk would meet.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.engine import vllm_info
from kvclaims.bridge.vmm.judge import ElasticMonitor
from kvclaims.bridge.vmm.memory import Shape
from kvclaims.checker.verdicts import Progress, Violation
from kvclaims.spec.interface import BadOperation, PoolConfig, RequestSpec
from kvclaims.spec.vocabulary import Verdict

_SIZE: Final = 32
_KV_BYTES: Final = 1024
"""KV of one token in the tiny model, both layers."""

_ACTIVATIONS: Final[int] = 4 * (
    3 * setup.MODEL["intermediate_size"] + 2 * setup.MODEL["hidden_size"]
)
"""Bytes a token of a prefill chunk: `checker.plan`'s formula with 32-bit numbers."""


@dataclass(frozen=True)
class Load:
    """The work: `decodes` short prompts that generate `new` tokens each, and `longs` prompts of
    `long` tokens, the next one injected when the last has its first token.  Memory in blocks."""

    decodes: int = 12
    short: int = 64
    new: int = 160
    longs: int = 5
    long: int = 1500
    blocks: int = 192

    def __post_init__(self) -> None:
        if min(self.decodes, self.short, self.new, self.longs, self.long, self.blocks) <= 0:
            raise BadOperation("every number of a load is above 0")


@dataclass(frozen=True)
class Measured:
    """One way of using the memory.  Times in milliseconds of this process's CPU.

    The KV has `base_blocks` at the least and `most_blocks` at the most, once it has begun.
    `first_token` is the median over the long prompts, `decode` the median step without a prefill.
    """

    policy: str
    chunk: int
    base_blocks: int
    most_blocks: int
    first_token_ms: float | None
    decode_ms: float
    total_s: float
    toggles: int
    toggle_ms: float
    moved: int
    preempted: int
    refused: int
    served: int
    same_tokens: bool = True
    violations: tuple[Violation, ...] = ()

    def __str__(self) -> str:
        first = "refused" if self.first_token_ms is None else f"{self.first_token_ms:,.0f} ms"
        return (
            f"{self.policy:<9} chunk {self.chunk:>5}  KV {self.base_blocks * _SIZE:>6,} to "
            f"{self.most_blocks * _SIZE:>6,} tokens  first token {first:>9}  decode step "
            f"{self.decode_ms:.1f} ms  {self.toggles} toggles of {self.toggle_ms:.2f} ms  "
            f"{self.preempted} preempted  {self.refused} refused"
        )


@dataclass(frozen=True)
class BenchReport:
    """HOLDS when it was safe: equal tokens whatever the policy, no step against the machine."""

    load: Load
    rows: tuple[Measured, ...]
    engine: str

    @property
    def verdict(self) -> Verdict:
        if not any(row.toggles for row in self.rows):
            return Verdict.VACUOUS
        return Verdict.VIOLATED if any(self._wrong()) else Verdict.HOLDS

    def _wrong(self) -> Iterator[str]:
        """What was not safe, a line each."""
        asked = self.load.decodes + self.load.longs
        for row in self.rows:
            name = f"{row.policy}, chunk {row.chunk}"
            if lost := asked - row.served - row.refused:
                yield f"{name}: {lost} of {asked} requests neither served nor refused"
            if not row.same_tokens:
                yield f"{name}: other tokens than before"
            for violation in row.violations[:1]:
                yield f"{name}: {violation.rule}: {violation.message}"

    @property
    def best(self) -> Measured:
        """The shortest time to first token among those that refused nothing."""
        whole = [row for row in self.rows if row.first_token_ms is not None and not row.refused]
        return min(whole, key=lambda row: row.first_token_ms or 0.0)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {**asdict(replace(row, violations=())), "violations": len(row.violations)}
            for row in self.rows
        ]
        return {
            "engine": self.engine,
            "load": asdict(self.load),
            "rows": rows,
            "best": {"policy": self.best.policy, "chunk": self.best.chunk},
        }

    def lines(self) -> Iterator[str]:
        yield from map(str, self.rows)
        yield from self._wrong()
        best = self.best
        yield (
            f"{self.verdict}: tokens the same in every row; shortest time to first token with "
            f"nothing refused: {best.policy}, chunk {best.chunk}"
            if self.verdict is Verdict.HOLDS
            else f"{self.verdict}"
        )


def bench(progress: Progress, chunks: tuple[int, ...], load: Load | None = None) -> BenchReport:
    """Measure every chunk × policy; the smallest chunk is the baseline and is static only.

    Raises `EngineMissing` without a vLLM, `BadOperation` where a reserve leaves no base.
    """
    info = vllm_info("vllm-engine")
    load = load or Load()
    sizes = sorted(set(chunks))
    if len(sizes) < 2 or sizes[0] < _SIZE:
        raise BadOperation(f"give at least two chunks of {_SIZE} tokens or more")
    for chunk in sizes:
        _base_blocks(chunk, load)
    setup.quieten(setup.WHOLE)
    import torch

    from kvclaims.bridge.vllm.whole_engine import booted

    booted()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Measured] = []
    tokens: dict[str, tuple[int, ...]] = {}
    try:
        for chunk in sizes:
            policies = ("static",) if chunk == sizes[0] else ("static", "elastic", "committed")
            for policy in policies:
                progress(f"{policy}, chunk {chunk}")
                rows.append(_measure(policy, chunk, sizes[0], load, tokens))
    finally:
        torch.set_num_threads(threads)
    return BenchReport(load, tuple(rows), f"{info.name} {info.version}")


def reserve_blocks(chunk: int) -> int:
    """Blocks of KV that the activations of a chunk take the place of."""
    return -(-chunk * _ACTIVATIONS // (_KV_BYTES * _SIZE))


def _base_blocks(chunk: int, load: Load) -> int:
    """Blocks beside the reserve of a chunk; `BadOperation` where no long prompt fits them."""
    base = load.blocks - reserve_blocks(chunk)
    if base * _SIZE < load.long + _SIZE:
        raise BadOperation(
            f"chunk {chunk} leaves {max(0, base)} blocks, too few for a prompt of the load"
        )
    return base


def _measure(
    policy: str, chunk: int, small: int, load: Load, tokens: dict[str, tuple[int, ...]]
) -> Measured:
    from kvclaims.bridge.vllm.elastic import Policy
    from kvclaims.bridge.vllm.elastic_engine import open_elastic

    lent = max(1, reserve_blocks(chunk) - reserve_blocks(small))
    base = _base_blocks(chunk, load)
    judge = ElasticMonitor(Shape.fit(2, _KV_BYTES // 2 * _SIZE, base, lent, 4096))
    runtime, controller = open_elastic(
        PoolConfig(base, _SIZE), lent, judge, policy=Policy(policy), most_chunk=small
    )
    run = _Run(runtime, controller, load)
    controller.scheduler.max_num_scheduled_tokens = chunk
    try:
        run.work()
        costs, counts = controller.memory.costs, controller.counts
        shared = {name: out for name, out in run.outputs().items() if out}
        same = all(tokens.setdefault(name, out) == out for name, out in shared.items())
        toggles = costs.lends + costs.returns
        return Measured(
            policy=policy,
            chunk=chunk,
            base_blocks=base + lent if policy == "committed" else base,
            most_blocks=base if policy == "static" else base + lent,
            first_token_ms=1e3 * statistics.median(run.first) if run.first else None,
            decode_ms=1e3 * statistics.median(run.decode),
            total_s=run.seconds,
            toggles=toggles,
            toggle_ms=1e3 * (costs.lend_seconds + costs.return_seconds) / max(1, toggles),
            moved=counts["moved"],
            preempted=sum(r.num_preemptions for r in run.requests.values()),
            refused=counts["refused for lack of activations"],
            served=len(shared),
            same_tokens=same,
            violations=tuple(judge.violations),
        )
    finally:
        runtime.close()


class _Run:
    """The load on one open run."""

    def __init__(self, runtime: Any, controller: Any, load: Load) -> None:
        self.runtime, self.load = runtime, load
        self.scheduler = controller.scheduler
        self.requests: dict[str, Any] = {}
        self.first: list[float] = []
        self.decode: list[float] = []
        self.seconds = 0.0

    def work(self) -> None:
        started = time.process_time()
        for number in range(self.load.decodes):
            self._submit(f"short{number}", self.load.short, self.load.new)
        for _ in range(5):
            self._step()
        for number in range(self.load.longs):
            self._inject(f"long{number}")
        while self.scheduler.has_requests():
            self._step()
        self.seconds = time.process_time() - started

    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(r.output_token_ids) for name, r in self.requests.items()}

    def _inject(self, name: str) -> None:
        started = time.process_time()
        self._submit(name, self.load.long, 4)
        request = self.requests[name]
        while not request.num_output_tokens and not request.is_finished():
            self._step()
        if request.num_output_tokens:
            self.first.append(time.process_time() - started)
        for _ in range(8):  # decode-only steps in between, for whoever lends in them
            if self.scheduler.has_requests():
                self._step()

    def _submit(self, name: str, tokens: int, new: int) -> None:
        before = set(self.scheduler.requests)
        prompt = tuple(random.Random(name).choices(range(3, 250), k=tokens))
        self.runtime.submit(RequestSpec(name, prompt, new))
        (added,) = set(self.scheduler.requests) - before
        self.requests[name] = self.scheduler.requests[added]

    def _step(self) -> None:
        prefill = bool(len(self.scheduler.waiting))
        started = time.process_time()
        self.runtime.step()
        if not prefill:
            self.decode.append(time.process_time() - started)
