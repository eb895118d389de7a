"""A connector that keeps offloadable claims in files, for vLLM's `--kv-transfer-config`:

    {"kv_connector": "ClaimTier", "kv_connector_module_path": "kvclaims.bridge.vllm.offload",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"folder": "/var/cache/kvclaims", "blocks": 4096}}

`blocks` is how many copies there is room for; `bytes` in its place, how many bytes the files of all
workers of the engine may have.

Its scheduler side passes every question on to the claims of a `ClaimScheduler`; without one it
keeps nothing.  Its worker side copies blocks out of the engine's KV tensors when the step that
wrote them has ended, and back into blocks that vLLM holds for the load; files are written and read
meanwhile.  A copy that is not right in every byte is reported to vLLM as a block that failed to
load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvclaims.bridge.serving.tierfiles import (
    OVERHEAD,
    BadCopy,
    TierFiles,
    clear_left,
    part_name,
)
from kvclaims.bridge.serving.tierqueue import TierQueue
from kvclaims.bridge.vllm.offloading import Offloading
from kvclaims.bridge.vllm.tier import Orders, Results
from kvclaims.bridge.vllm.tierworker import TierWorker

_SETTINGS: Final = (["blocks", "folder"], ["bytes", "folder"])


@dataclass
class TierOrders(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler sends along with a step."""

    orders: Orders


@dataclass
class TierResults(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker sends back with it."""

    results: Results

    def aggregate(self, other: TierResults) -> TierResults:
        return TierResults(self.results.merged(other.results))


class Tensors:
    """The KV of one worker: `tensors` by layer, the block id first, of so many `blocks`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], blocks: int) -> None:
        for layer, tensor in tensors.items():
            if tensor.shape[0] != blocks:
                raise ValueError(
                    f"the KV of layer {layer} has the shape {tuple(tensor.shape)}: a tier of "
                    f"claims needs the {blocks} blocks in the first place"
                )
        self._tensors = list(tensors.values())
        layers = [(name, list(t.shape[1:]), str(t.dtype)) for name, t in tensors.items()]
        self.form = hashlib.sha256(json.dumps(layers).encode()).hexdigest()
        """Tells blocks apart that have other layers, shapes or element types."""

    def take(self, blocks: Sequence[int]) -> Iterator[list[memoryview]]:
        """What each of these blocks holds now, layer by layer, in memory of its own."""
        if not blocks:
            return iter(())
        chosen = [
            tensor.index_select(0, torch.tensor(blocks, device=tensor.device)).cpu()
            for tensor in self._tensors
        ]
        return iter([[_bytes(tensor[i]) for tensor in chosen] for i in range(len(blocks))])

    def put(self, block: int, content: memoryview) -> None:
        whole = torch.frombuffer(content, dtype=torch.uint8)
        sizes = [tensor[block].numel() * tensor.element_size() for tensor in self._tensors]
        if len(whole) != sum(sizes):
            raise BadCopy(f"it holds {len(whole)} bytes, and a block has {sum(sizes)}")
        for tensor, part in zip(self._tensors, whole.split(sizes), strict=True):
            place = tensor[block]
            place.copy_(part.view(place.dtype).reshape(place.shape))


def _bytes(block: torch.Tensor) -> memoryview:
    return memoryview(block.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


class ClaimTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides of the connector; which one it is vLLM says when it makes it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._room = _settings(self._kv_transfer_config.kv_connector_extra_config)
        self._workers = int(vllm_config.parallel_config.world_size)
        self._copy_bytes = _block_bytes(kv_cache_config) + OVERHEAD
        self.blocks = self._room.blocks or self._room.bytes // (self._workers * self._copy_bytes)
        if not self.blocks:
            raise ValueError(
                f"ClaimTier has room for no block: {self._workers} workers need "
                f"{self._copy_bytes} bytes each for one, and have {self._room.bytes}"
            )
        self._offloading: Offloading | None = None
        self._worker: TierWorker | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what it saves: a request that gives way needs no other care."""
        return False

    # -- the scheduler's side --------------------------------------------------------------------

    def attach_claims(self, enforcer: Any) -> Offloading:
        """The claims that this connector works for (called by `ClaimEnforcer`)."""
        self._offloading = Offloading(enforcer, self.blocks, self._workers, self._copy_bytes)
        return self._offloading

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._offloading is None:
            return 0, False
        found = self._offloading.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._offloading is not None:
            ids = [block.block_id for block in blocks.blocks[0]]
            self._offloading.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TierOrders:
        if self._offloading is None:
            return TierOrders(Orders())
        idle = not scheduler_output.total_num_scheduled_tokens
        return TierOrders(self._offloading.orders(idle))

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if self._offloading is not None and isinstance(told, TierResults):
            self._offloading.done(told.results)

    def has_pending_push_work(self) -> bool:
        return self._offloading is not None and self._offloading.is_busy

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ARG002
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing keeps the blocks of a request that has ended: what is saved was copied."""
        return False, None

    # -- the worker's side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        parallel = self._vllm_config.parallel_config
        folder, engine = self._room.folder, parallel.data_parallel_index
        if parallel.rank == 0:
            clear_left(folder, engine, self._workers)
        tensors = Tensors(kv_caches, self._kv_cache_config.num_blocks)
        limit = self._room.bytes // self._workers or None
        files = TierFiles(folder / part_name(engine, parallel.rank), tensors.form, limit)
        self._worker = TierWorker(tensors, TierQueue(files))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._worker is not None:
            self._worker.begin(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are for requests that wait for them; no running step needs one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved when all of their layers are written: in `wait_for_save`."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._orders().saves)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.collect(self._orders().idle)
        return None, self._worker.received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.failed()

    def build_connector_worker_meta(self) -> TierResults | None:
        results = None if self._worker is None else self._worker.results()
        return None if results is None else TierResults(results)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _orders(self) -> Orders:
        told = self._get_connector_metadata()
        return told.orders if isinstance(told, TierOrders) else Orders()


@dataclass(frozen=True)
class _Room:
    """Where copies are, and how many there may be or how large; 0 for what is not said."""

    folder: Path
    blocks: int = 0
    bytes: int = 0


def _settings(given: Mapping[str, Any]) -> _Room:
    if sorted(given) not in _SETTINGS:
        raise ValueError("kv_connector_extra_config of ClaimTier has a folder, and blocks or bytes")
    folder = given["folder"]
    sizes = {name: size for name, size in given.items() if name != "folder"}
    if not isinstance(folder, str) or not folder:
        raise ValueError("ClaimTier has a folder")
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        raise ValueError("ClaimTier has room for at least one block")
    return _Room(Path(folder), **sizes)


def _block_bytes(kv_cache_config: Any) -> int:
    """Bytes of a block in one worker, over all layers."""
    groups = kv_cache_config.kv_cache_groups
    return sum(len(g.layer_names) * int(g.kv_cache_spec.page_size_bytes) for g in groups)
