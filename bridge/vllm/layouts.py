"""Arrangements of KV groups that vLLM's allocator can be given, by name, and a scheduler for each.

A group is what the layers of one kind share: how many tokens a block of it has, and what a token
reads of those before it.  That is all that a judge needs to know; how vLLM looks content up, keeps
it sparsely or copies it is its own affair.
"""

from __future__ import annotations

import inspect
import math
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.vllm import setup
from kvclaims.checker.engines import first_line
from kvclaims.checker.layouts import LayoutPool, LayoutRun
from kvclaims.checker.supervise import Program
from kvclaims.spec.interface import BadOperation, NotExposed

FULL: Final = "full"
WINDOW: Final = "window"
CHUNKS: Final = "chunks"
RECURRENT: Final = "recurrent"
RING: Final = "ring"
REPLAY: Final = "replay"

READS_ALL: Final = 0

SOFT_READS: Final = "blocks read after they are freed"
"""No KV groups: a pool alone, some of whose blocks are read until their reader is told."""


@dataclass(frozen=True)
class Group:
    """One KV group.

    `block`: tokens of a block on one rank.  `reads`: the tokens of its sliding window or of its
    chunk; of a group that is replayed, those that are computed again for it behind a hit.
    `drafts`: its layers belong to a drafter, whose KV of a token depends on the next token too, so
    that what is kept of the last token before a continuation is worth nothing after another one.
    `saves`: of a recurrent group, whose runner keeps beside the state at the end of a chunk the one
    at the last place inside of it where a hit may end.
    """

    kind: str
    block: int
    reads: int = READS_ALL
    drafts: bool = False
    saves: bool = False


@dataclass(frozen=True)
class Layout:
    """KV groups that share one pool.

    `unit`: tokens that one hash stands for.  `ranks`: ranks that share the context of a request,
    each with its part of every block.  `keeps`: every so many tokens a state of windows and
    recurrent groups is kept, 0 for the end of a prompt alone, None for all.  `inside`: a hit may
    end inside of a block.  `connector`: external tokens are loaded at once ("sync") or while the
    request waits ("async"); "any" leaves what the groups find apart to the connector.
    """

    name: str
    groups: tuple[Group, ...]
    unit: int
    ranks: int = 1
    keeps: int | None = None
    inside: bool = False
    connector: str = ""
    budget: int = 0
    """Tokens that one step may compute; 0 for no limit."""
    drawn: bool = True
    """Whether runs of it are drawn: not where they would meet one known finding again and again."""

    def block_of(self, group: int) -> int:
        """Tokens of a block of the group over all ranks that share it."""
        found = self.groups[group]
        return found.block * (self.ranks if found.kind == FULL else 1)

    @property
    def step(self) -> int:
        """Tokens after which every group begins a new block."""
        return math.lcm(*(self.block_of(g) for g in range(len(self.groups))))

    @property
    def ends(self) -> int:
        """A hit ends on multiples of so many tokens."""
        return self.unit if self.inside else self.step

    @property
    def replays(self) -> int:
        """Tokens that are computed again behind a hit, for groups that keep nothing for others."""
        return max((group.reads for group in self.groups if group.kind == REPLAY), default=0)

    @property
    def has_drafter(self) -> bool:
        return any(group.drafts for group in self.groups)


def _full(block: int, *, drafts: bool = False) -> Group:
    return Group(FULL, block, drafts=drafts)


def _window(block: int, reads: int, *, drafts: bool = False) -> Group:
    return Group(WINDOW, block, reads, drafts)


LAYOUTS: Final = (
    Layout("one group", (_full(4),), 4),
    Layout("small blocks in windows", (_full(8), _window(4, 8)), 4),
    Layout("large blocks in windows", (_full(4), _window(8, 10)), 4, budget=24),
    Layout("three sizes", (_full(4), _window(4, 6), _window(8, 16)), 4),
    Layout("windows of a drafter", (_full(4), _window(4, 8, drafts=True)), 4),
    Layout("windows of a drafter in small blocks", (_full(8), _window(4, 6, drafts=True)), 4),
    Layout("drafter", (_full(4, drafts=True),), 4),
    Layout("drafter in every group", (_full(4, drafts=True), _window(4, 8, drafts=True)), 4),
    Layout("chunks", (_full(4), Group(CHUNKS, 4, 8)), 4),
    Layout("recurrent", (_full(4), Group(RECURRENT, 4)), 4),
    Layout("hits inside", (_full(8), Group(RECURRENT, 8)), 2, inside=True),
    Layout("hits inside of large blocks", (_full(16), Group(RECURRENT, 16)), 4, inside=True),
    Layout("hits inside, chunked", (_full(8), Group(RECURRENT, 8)), 2, inside=True, budget=12),
    Layout("hits inside, drafter", (_full(8, drafts=True), Group(RECURRENT, 8)), 2, inside=True),
    Layout("sparse windows", (_full(4), _window(4, 8)), 4, keeps=16),
    Layout("windows at the end", (_full(4), _window(4, 8)), 4, keeps=0),
    Layout("sparse states", (_full(4), Group(RECURRENT, 4)), 4, keeps=8),
    Layout("states at the end", (_full(4), Group(RECURRENT, 4)), 4, keeps=0),
    Layout("ring", (_full(8), Group(RING, 8)), 8),
    Layout("ring beside windows", (_full(8), _window(4, 8), Group(RING, 4)), 4),
    Layout("replayed windows", (_full(4), Group(REPLAY, 4, 6)), 4),
    Layout("replayed windows, chunked", (_full(4), Group(REPLAY, 4, 8)), 4, budget=9),
    Layout("ranks", (_full(4),), 8, ranks=2),
    Layout("ranks, hits inside", (_full(4), Group(RECURRENT, 8)), 4, ranks=2, inside=True),
    Layout("loads", (_full(4),), 4, connector="async"),
    Layout("loads at once", (_full(4),), 4, connector="sync"),
    Layout("loads beside windows", (_full(4), _window(4, 8)), 4, connector="async"),
    Layout("loads at once beside windows", (_full(4), _window(4, 8)), 4, connector="sync"),
    Layout(
        "loads and hits inside",
        (_full(8), Group(RECURRENT, 8)),
        2,
        inside=True,
        connector="async",
    ),
    Layout("loads and replayed windows", (_full(4), Group(REPLAY, 4, 6)), 4, connector="async"),
    Layout("loads of states", (_full(4), Group(RECURRENT, 4)), 4, connector="any"),
    Layout(
        "loads of states and hits inside",
        (_full(8), Group(RECURRENT, 8)),
        2,
        inside=True,
        connector="any",
    ),
    Layout(
        "states inside", (_full(8), Group(RECURRENT, 8, saves=True)), 2, inside=True, drawn=False
    ),
)


def named(name: str) -> Layout:
    """The arrangement of that name; `BadOperation` where there is none."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise BadOperation(f"no arrangement of KV groups {name!r}")


def make_scheduler(layout: Layout, usable: int) -> Any:
    """vLLM's own scheduler on a pool of `usable` blocks that these groups share.

    Raises `NotExposed` where a version has no words for them, and what vLLM raises where it has and
    does not take them.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    try:
        config, groups = _described(layout, usable)
        _check_known(layout, Scheduler)
    except (ImportError, TypeError, AttributeError) as error:
        told = f"KV groups {layout.name!r}, in this version: {first_line(error)}"
        raise NotExposed(told) from error
    try:
        scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(config),
            block_size=layout.step,
            hash_block_size=layout.unit,
            log_stats=False,
        )
    except (AssertionError, ValueError, NotImplementedError) as error:
        if "not support" not in str(error):
            raise
        told = f"KV groups {layout.name!r}, in this version: {first_line(error)}"
        raise NotExposed(told) from error
    scheduler.use_v2_model_runner = False
    scheduler.num_lookahead_tokens = int(layout.has_drafter)  # it writes one token ahead
    if layout.budget:
        scheduler.max_num_scheduled_tokens = layout.budget
    return scheduler


def _check_known(layout: Layout, scheduler: type) -> None:
    """Raises TypeError where a version lacks what the arrangement is about."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput

    if "hash_block_size" not in inspect.signature(scheduler).parameters:
        raise TypeError("blocks of one size alone are hashed")
    if layout.inside and not hasattr(SchedulerOutput, "kv_cache_block_copies"):
        raise TypeError("no hit ends inside of a block")
    states = any(group.kind == RECURRENT for group in layout.groups)
    loads_states = hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits")
    if states and layout.connector and not loads_states:
        raise TypeError("a load brings no state")


def _described(layout: Layout, usable: int) -> tuple[Any, Any]:
    """vLLM's configuration of an engine with these groups, and that of its pool."""
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    config = setup.scheduler_config((usable + 2) * layout.step, drafts=int(layout.has_drafter))
    config.cache_config.block_size = layout.step
    config.cache_config.num_gpu_blocks = usable + 1
    config.cache_config.mamba_cache_mode = "align"
    config.parallel_config.decode_context_parallel_size = layout.ranks
    if layout.has_drafter:
        config.speculative_config = _drafter(config)
    if layout.connector:
        config.kv_transfer_config = _transfers()
    register_all_kvcache_specs(config)
    groups = [
        KVCacheGroupSpec([f"layer{i}"], _spec(group), is_eagle_group=group.drafts)
        for i, group in enumerate(layout.groups)
    ]
    more = {} if layout.keeps is None else {"prefix_cache_retention_interval": layout.keeps}
    return config, KVCacheConfig(
        num_blocks=usable + 1, kv_cache_tensors=[], kv_cache_groups=groups, **more
    )


def _drafter(config: Any) -> Any:
    """A model beside the model, with KV of its own, that drafts nothing here."""
    drafter = copy(config.speculative_config)
    drafter.method, drafter.num_speculative_tokens = "eagle", 0
    return drafter


def _transfers() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="OfferingConnector",
        kv_connector_module_path="kvclaims.bridge.vllm.offering",
        kv_role="kv_consumer",
    )


def _spec(group: Group) -> Any:
    """vLLM's own description of the group."""
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    shape = {"block_size": group.block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group.kind == FULL:
        return kinds.FullAttentionSpec(**shape)
    if group.kind == WINDOW:
        return kinds.SlidingWindowSpec(**shape, sliding_window=group.reads)
    if group.kind == CHUNKS:
        return kinds.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.reads)
    if group.kind == RING:
        return kinds.CircularBufferSpec(**shape)
    if group.kind == REPLAY:
        return kinds.SlidingWindowMLASpec(**shape, sliding_window=group.reads, bounded_replay=True)
    saved = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    return kinds.MambaSpec(
        block_size=group.block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        **(saved if group.saves else {}),
    )


class VllmLayouts:
    """The arrangements, as `kvclaims.checker.layouts` takes them."""

    def names(self) -> tuple[str, ...]:
        return (*(layout.name for layout in LAYOUTS if layout.drawn), SOFT_READS)

    def draw(self, name: str, seed: str) -> Program:
        from kvclaims.bridge.vllm import soft_reads
        from kvclaims.bridge.vllm.grouped_drawing import drawn

        if name == SOFT_READS:
            usable, operations = soft_reads.drawn(seed)
            return Program(LayoutPool(usable, soft_reads.UNIT, layout=name), operations)
        layout = named(name)
        usable, operations = drawn(layout, seed)
        return Program(LayoutPool(usable, layout.unit, layout=name), operations)

    def open(self, pool: LayoutPool) -> LayoutRun:
        setup.quieten(setup.ALONE)
        from kvclaims.bridge.vllm.grouped import GroupedRun
        from kvclaims.bridge.vllm.soft_reads import SoftReads

        if pool.layout == SOFT_READS:
            return SoftReads(pool.usable)
        return GroupedRun(pool.layout, pool.usable, pool.block_size)
