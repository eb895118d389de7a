"""vLLM's scheduler and allocator, driven by a model runner that only pretends.

For every token that a step computes the runner writes the name of the content up to there into
the block that vLLM's table named when the step began.  It reads before it writes, as a real one
does: a block whose earlier tokens are not what the request says leaves garbage.  So the memory
shows what was written where, whatever tables say afterwards.
"""

from __future__ import annotations

import ast
import errno
import inspect
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import takewhile
from textwrap import dedent
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

from kvclaims.bridge.serving.tierfiles import BadCopy, Buffer
from kvclaims.bridge.serving.tierqueue import Store, TierQueue
from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.names import ContentChain
from kvclaims.bridge.vllm.observer import PoolObserver
from kvclaims.bridge.vllm.scheduler import AsyncClaimScheduler, ClaimScheduler
from kvclaims.bridge.vllm.tier import Orders
from kvclaims.bridge.vllm.tierworker import TierWorker
from kvclaims.checker.engines import first_line
from kvclaims.spec.content import (
    GENERATED_TOKEN,
    fingerprint,
    in_any_group,
    in_group,
    partial_content,
)
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import (
    PRIORITY,
    BadOperation,
    KvEvent,
    NotExposed,
    PoolConfig,
    PoolStep,
    RequestSpec,
)

_GARBAGE: Final = "garbage"
_GROUP_BYTES: Final = 4

_Slot = tuple[str, str, tuple[int, ...]]
"""A block's name, the parent that it continues, and the tokens in it."""

_BLANK: Final[_Slot] = ("", "", ())

_QUICK: Final = 2
"""Blocks of external tokens up to which the connector knows at once that it has them."""

_WRONG_GUESS: Final = GENERATED_TOKEN + 1
"""A draft that turns out wrong: never what is generated."""


@contextmanager
def _probed(config: PoolConfig) -> Iterator[None]:
    """A version that knows none of what the pool asks for has no such feature."""
    try:
        yield
    except (ImportError, TypeError, ValueError, AttributeError) as error:
        asked = [name for name in ("drafts", "connector") if getattr(config, name)]
        asked += ["windows"] if config.windows != (0,) else []
        if not asked:
            raise
        told = f"{' and '.join(asked)}, in this version: {first_line(error)}"
        raise NotExposed(told) from error


@cache
def _goes_on_past_who_gives_way() -> bool:
    """Whether a request that preempts itself leaves the step to those behind it (vLLM 0.33)."""
    schedule = ast.parse(dedent(inspect.getsource(Scheduler.schedule)))
    return any(
        isinstance(branch, ast.If)
        and ast.unparse(branch.test) == "new_blocks is None"
        and any(isinstance(node, ast.Continue) for node in ast.walk(branch))
        for branch in ast.walk(schedule)
    )


def _check_tier() -> None:
    """Whether this version has what a tier needs, and asks it for what it still has to do."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        import_module("kvclaims.bridge.vllm.offload")
    except ImportError as error:
        raise NotExposed(f"a tier, in this version: {first_line(error)}") from error
    if not hasattr(KVConnectorBase_V1, "has_pending_push_work"):
        raise NotExposed("a tier, in this version: connectors have no has_pending_push_work")


class SimulatedMemory:
    """What was last written into each block: the content it names, and its tokens."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._blocks: list[_Slot] = [_BLANK] * blocks

    def digest(self, block: int) -> int:
        return fingerprint(self._blocks[block][0])

    def write(
        self, block: int, at: int, parent: str, tokens: Sequence[int], full: str | None
    ) -> None:
        """Write `tokens[at:]` of a block that holds `tokens` afterwards; `full` names it if it is
        full then."""
        _, before, held = self._blocks[block]
        if at and (before != parent or held[:at] != tuple(tokens[:at])):
            self._blocks[block] = (_GARBAGE, "", ())
            return
        name = partial_content(parent, tokens) if full is None else full
        self._blocks[block] = (name, parent, tuple(tokens))

    def load(self, block: int, parent: str, tokens: Sequence[int], full: str) -> None:
        """A transfer fills a block, whatever was in it."""
        self._blocks[block] = (full, parent, tuple(tokens))

    def spoil(self, block: int) -> None:
        """A transfer left something in a block that is no content."""
        self._blocks[block] = (_GARBAGE, "", ())

    def discard(self) -> None:
        """All of it is given up and comes back blank."""
        self._blocks = [_BLANK] * len(self._blocks)

    def take(self, blocks: Sequence[int]) -> list[list[bytes]]:
        """What these blocks hold, as bytes, for a tier."""
        return [[json.dumps(self._blocks[block]).encode()] for block in blocks]

    def put(self, block: int, content: memoryview) -> None:
        """Fill a block with what a tier has kept of one."""
        try:
            name, parent, tokens = json.loads(bytes(content))
        except ValueError:
            raise BadCopy("it is no block") from None
        self._blocks[block] = (name, parent, tuple(tokens))


class MemoryFiles:
    """Copies of blocks by name, in memory: what `TierFiles` are, where files do not matter."""

    def __init__(self) -> None:
        self.life = ""
        self.copies: dict[str, bytes] = {}
        self.broken: set[str] = set()
        """Copies that are found to be wrong when they are read."""
        self.is_full = False
        """Whether nothing can be written."""

    def begin(self, life: str) -> None:
        if life != self.life:
            self.close()
            self.life = life

    def publish(self, name: str, content: Sequence[Buffer]) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space")
        self.copies[name] = b"".join(content)

    def read(self, name: str) -> memoryview:
        if name in self.broken or name not in self.copies:
            raise BadCopy("it is not what it was")
        return memoryview(self.copies[name])

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.copies.pop(name, None)
            self.broken.discard(name)

    def close(self) -> None:
        self.copies.clear()
        self.broken.clear()


class SimulatedTier:
    """The worker's side of a tier.  `patience` tells how many things are done in a step of what was
    ordered in it and before; without it, all of them."""

    def __init__(self, memory: SimulatedMemory, store: Store | None = None) -> None:
        self.files = store or MemoryFiles()
        self.patience: Callable[[], int] | None = None
        self._queue = TierQueue(self.files, threaded=False)
        self._worker = TierWorker(memory, self._queue)

    def work(self, orders: Orders) -> Any:
        """Do what a step was sent along with, and answer as a worker does."""
        from vllm.v1.outputs import KVConnectorOutput

        from kvclaims.bridge.vllm.offload import TierResults

        self._worker.begin(orders)
        self._worker.save(orders.saves)
        most = self.patience() if self.patience else sys.maxsize
        done = 0
        while done < most and self._queue.work():
            done += 1
            if not self.patience:
                self._worker.collect()
        self._worker.collect()
        results = self._worker.results()
        return KVConnectorOutput(
            finished_recving=self._worker.received(),
            invalid_block_ids=self._worker.failed(),
            kv_connector_worker_meta=None if results is None else TierResults(results),
        )

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True)
class Work:
    """What one step does for one request: tokens `start` to `end` go into the blocks of `tables`,
    one table for each KV group.  `right` of the drafts among them turn out right."""

    request_id: str
    start: int
    end: int
    tokens: tuple[int, ...]
    names: tuple[str, ...]
    domain: str
    tables: tuple[tuple[int, ...], ...]
    samples: bool
    right: int = 0


@dataclass(frozen=True)
class Step:
    """A step in flight: what vLLM scheduled, and what the runner does for it."""

    output: Any
    work: tuple[Work, ...]


class SimulatedDriver:
    """The engine around the scheduler.  Up to `config.in_flight` steps run at a time."""

    def __init__(self, config: PoolConfig, load_failure_policy: str = "recompute") -> None:
        if config.fidelity is not Fidelity.EXACT:
            raise NotExposed("KV of another class than exact")
        if config.drafts and config.in_flight > 1:
            raise NotExposed("drafts without a model of their own, in asynchronous steps")
        if (config.connector or config.host_blocks) and config.windows != (0,):
            raise NotExposed("a connector for several KV groups, in this adapter")
        if config.connector and config.host_blocks:
            raise NotExposed("a connector beside that of the tier")
        if config.policy == PRIORITY and _goes_on_past_who_gives_way():
            raise NotExposed(
                "priority, in this version: who gives way itself does not end the step for those "
                "behind it, as it does in the reference"
            )
        kind = AsyncClaimScheduler if config.in_flight > 1 else ClaimScheduler
        if config.host_blocks:
            _check_tier()
        with _probed(config):
            self.scheduler = setup.make_scheduler(
                kind,
                config.usable,
                config.block_size,
                policy=config.policy,
                asynchronous=config.in_flight > 1,
                windows=config.windows,
                tier_blocks=config.host_blocks,
                load_failure_policy=load_failure_policy,
                drafts=config.drafts,
                connector=config.connector,
            )
        self.scheduler.use_v2_model_runner = False
        connector: Any = self.scheduler.connector if config.connector else None
        self._connector = connector
        if self._connector is not None:
            self._connector.block_size = config.block_size
            self._connector.sends = config.connector > 1
            self._connector.on_load = self._load_started
            self._connector.on_send = self._send_started
        if config.token_budget:
            self.scheduler.max_num_scheduled_tokens = config.token_budget
        self._config = config
        self._hasher = setup.block_hasher(config.block_size)
        self._memory = SimulatedMemory(config.usable + 1, config.block_size)
        self.tier = SimulatedTier(self._memory)
        self._chains: dict[str, ContentChain] = {}
        self._domains: dict[str, str] = {}
        self._accepts: dict[str, int] = {}
        self.flying: deque[Step] = deque()
        """Steps that were dispatched and are not complete, the oldest first."""

    def use_store(self, store: Store) -> None:
        """Keep the tier's copies there from now on."""
        self.tier = SimulatedTier(self._memory, store)

    def request(self, spec: RequestSpec, extra_args: dict[str, Any]) -> Any:
        if spec.external and self._connector is None:
            raise NotExposed("external tokens in a pool without a connector")
        inputs = self._inputs(spec) if spec.modality else None
        if spec.external:
            self._connector.offers[spec.request_id] = spec.external
            if spec.external > _QUICK:
                self._connector.slow.add(spec.request_id)
        self._domains[spec.request_id] = spec.domain
        self._accepts[spec.request_id] = spec.accepts
        return setup.make_request(
            spec.request_id,
            spec.tokens,
            spec.max_new_tokens,
            self._hasher,
            salt=spec.salt,
            adapter=spec.adapter,
            priority=spec.priority,
            extra_args=extra_args,
            inputs=inputs,
        )

    def _inputs(self, spec: RequestSpec) -> list[Any]:
        try:
            setup.give_encoder_room(self.scheduler)
            return setup.modality_inputs(spec.modality, len(spec.tokens), self._config.block_size)
        except (ImportError, TypeError) as error:
            raise NotExposed(f"modality inputs, in this version: {error}") from error

    def add(self, request: Any) -> None:
        self.scheduler.add_request(request)

    def step(self) -> None:
        while self.flying:
            self.complete()
        self.dispatch()
        self.complete()

    def dispatch(self) -> None:
        if len(self.flying) >= self._config.in_flight:
            raise BadOperation(f"{self._config.in_flight} steps are in flight")
        output = self.scheduler.schedule()
        work = tuple(self._plan(r, n, output) for r, n in output.num_scheduled_tokens.items())
        self.flying.append(Step(output, work))

    def complete(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        if not self.flying:
            raise BadOperation("no step is in flight")
        step = self.flying.popleft()
        for work in step.work:
            self._write(work)
        ids = [work.request_id for work in step.work]
        self.scheduler.update_from_output(
            step.output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={r: i for i, r in enumerate(ids)},
                sampled_token_ids=[
                    [GENERATED_TOKEN] * (1 + w.right) if w.samples else [] for w in step.work
                ],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=self._transferred(step),
            ),
        )
        if self._config.drafts:
            self._draft(step.work)
        for request_id in [r for r in self._chains if r not in self.scheduler.requests]:
            del self._chains[request_id]

    def _transferred(self, step: Step) -> Any:
        """What the connector's worker says at the end of a step."""
        if self._connector is not None:
            return self._sent()
        told = getattr(step.output, "kv_connector_metadata", None)
        return None if told is None else self.tier.work(told.orders)

    def _sent(self) -> Any:
        """Who was sent since the last step."""
        if not self._connector.sending:
            return None
        from vllm.v1.outputs import KVConnectorOutput

        sent, self._connector.sending = set(self._connector.sending), []
        return KVConnectorOutput(finished_sending=sent)

    def _draft(self, work: Sequence[Work]) -> None:
        """Guesses for the next step of every request that sampled: as many right ones first as its
        program says."""
        from vllm.v1.outputs import DraftTokenIds

        ids = [w.request_id for w in work if w.samples and w.request_id in self.scheduler.requests]
        guesses = []
        for request_id in ids:
            right = min(self._accepts.get(request_id, 0), self._config.drafts)
            wrong = self._config.drafts - right
            guesses.append([GENERATED_TOKEN] * right + [_WRONG_GUESS] * wrong)
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, guesses))

    # -- transfers

    def _load_started(self, request: Any, blocks: int) -> None:
        self.scheduler.enforcer.load_started(request, blocks)

    def _send_started(self, request: Any) -> None:
        self.scheduler.enforcer.ending(request)

    def loading(self, request_id: str) -> int | None:
        """How many blocks a transfer is to bring for the request; None where there is none."""
        transfer = self._connector and self._connector.loading.get(request_id)
        return transfer.blocks if transfer else None

    def load(self, request_id: str, blocks: int) -> None:
        """The transfer of a request ends: its first `blocks` came, the rest is spoiled."""
        from vllm.v1.outputs import KVConnectorOutput

        transfer = self._connector.loading.pop(request_id)
        request = self.scheduler.requests[request_id]
        size = self._config.block_size
        chain = ContentChain(size, self._domains[request_id])
        names = [self._domains[request_id], *chain.extend(request.all_token_ids)]
        told: dict[str, set[Any]] = {"finished_recving": {request_id}}
        for position in range(transfer.first, transfer.first + transfer.blocks):
            block = transfer.table[position]
            if position < transfer.first + blocks:
                tokens = request.all_token_ids[position * size : (position + 1) * size]
                self._memory.load(block, names[position], tokens, names[position + 1])
            else:
                self._memory.spoil(block)
                told.setdefault("invalid_block_ids", set()).add(block)
        if not blocks and hasattr(KVConnectorOutput(), "failed_recving") and transfer.blocks % 2:
            told = {"finished_recving": {request_id}, "failed_recving": {request_id}}
        self.scheduler.received(KVConnectorOutput(**told))

    def computed(self, request_id: str) -> int | None:
        """Leading tokens of a running request that completed steps have written."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return 0
        if self.loading(request_id) is not None:
            return int(self._connector.loading[request_id].first) * self._config.block_size
        under_way = sum(
            w.end - w.start for s in self.flying for w in s.work if w.request_id == request_id
        )
        computed = int(request.num_computed_tokens) - under_way
        # A step that began before the end was known may have computed beyond it.
        return min(computed, int(request.num_tokens)) if request.is_finished() else computed

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._memory.digest(b) for b in blocks)

    def discard(self) -> None:
        """The memory is given up (sleep)."""
        self._memory.discard()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.tier.close()

    def _plan(self, request_id: str, count: int, output: Any) -> Work:
        """What the step writes for a request; its tokens not known yet are the generated one."""
        request = self.scheduler.requests[request_id]
        end = request.num_computed_tokens  # advanced by schedule() already
        size = self._config.block_size
        known = request.all_token_ids
        first = (end - count) // size
        domain = self._domains.get(request_id, "")
        chain = self._chains.setdefault(request_id, ContentChain(size, domain))
        guesses = output.scheduled_spec_decode_tokens.get(request_id, ())
        right = len(list(takewhile(lambda token: token == GENERATED_TOKEN, guesses)))
        true = end - len(guesses) + right
        padded = [*known, *[GENERATED_TOKEN] * (true - len(known))] if true > len(known) else known
        chain.extend(padded[:true])
        wrong = [_WRONG_GUESS] * (end - true)
        return Work(
            request_id,
            end - count,
            end,
            (*padded[first * size : true], *wrong),
            tuple(chain.ids[max(0, first - 1) :]),
            domain,
            tuple(map(tuple, self.scheduler.kv_cache_manager.get_block_ids(request_id))),
            not request.is_prefill_chunk,
            right,
        )

    def _write(self, work: Work) -> None:
        """Into the block of each group; what has none there any more goes nowhere."""
        size = self._config.block_size
        first = work.start // size
        name_of = dict(enumerate(work.names, start=max(0, first - 1)))
        for position in range(first, -(-work.end // size)):
            begin = (position - first) * size
            tokens = work.tokens[begin : begin + size]
            # Behind a wrong guess there are only wrong guesses, which name nothing.
            parent = name_of.get(position - 1, _GARBAGE) if position else work.domain
            at = max(0, work.start - position * size)
            full = name_of.get(position) if len(tokens) == size else None
            for group, table in enumerate(work.tables):
                if block := table[position]:
                    of_group = full and in_group(full, group)
                    self._memory.write(block, at, parent, tokens, of_group)


class EventTap:
    """vLLM's own KV events of one watched pool, in the contract's names (B8)."""

    def __init__(self, observer: PoolObserver) -> None:
        pool = observer.pool
        pool.enable_kv_cache_events = True
        self._observer = observer
        self._names: dict[Any, str] = {}
        """vLLM's hash in events → the content's plain id: the event names the KV group."""
        self._seen: list[Any] = []
        self._take = pool.take_events
        pool.take_events = self._keep
        observer.listen(self._learn)

    def _learn(self, step: PoolStep) -> None:
        """A hash became visible: remember what vLLM's events will call it."""
        if step.action != "register":
            return
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        for raw, name in self._observer.keys.get(step.args["b"], {}).items():
            plain = in_any_group(name)
            self._names[maybe_convert_block_hash(bytes(raw)[:-_GROUP_BYTES])] = plain

    def news(self) -> tuple[KvEvent, ...]:
        """What was told since the last call."""
        self._keep()
        seen, self._seen = self._seen, []
        return tuple(self._read(event) for event in seen)

    def _keep(self) -> Any:
        """The engine takes its events: keep them for us too."""
        events = self._take()
        self._seen += events
        return events

    def _read(self, event: Any) -> KvEvent:
        kinds = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
        group = getattr(event, "group_idx", None) or 0
        hashes = getattr(event, "block_hashes", ())
        keys = tuple(in_group(self._names.get(h, str(h)), group) for h in hashes)
        return KvEvent(kinds[type(event).__name__], keys)
