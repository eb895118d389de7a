"""A connector that keeps offloadable claims in files, for vLLM's `--kv-transfer-config`:

    {"kv_connector": "ClaimTier", "kv_connector_module_path": "kvclaims.bridge.vllm.offload",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"folder": "/var/cache/kvclaims", "blocks": 4096}}

Its scheduler side passes every question on to the claims of a `ClaimScheduler`; without one it
keeps nothing.  Its worker side copies blocks out of the engine's KV tensors when the step that
wrote them has ended, and back into blocks that vLLM holds for the load; a copy that is not right
in every byte is reported to vLLM as a block that failed to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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

from kvclaims.bridge.serving.tierfiles import BadCopy, TierFiles
from kvclaims.bridge.vllm.offloading import Offloading
from kvclaims.bridge.vllm.tier import Load, Move, Orders, Results

_SETTINGS: Final = ("blocks", "folder")


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


class TierWorker:
    """The copies of one worker's part of the KV: `tensors` by layer, the block id first."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], blocks: int) -> None:
        for layer, tensor in tensors.items():
            if tensor.shape[0] != blocks:
                raise ValueError(
                    f"the KV of layer {layer} has the shape {tuple(tensor.shape)}: a tier of "
                    f"claims needs the {blocks} blocks in the first place"
                )
        self._tensors = list(tensors.values())
        layers = [(name, list(t.shape[1:]), str(t.dtype)) for name, t in tensors.items()]
        form = hashlib.sha256(json.dumps(layers).encode()).hexdigest()
        self.files = TierFiles(folder, form)
        self._results = Results()

    def begin(self, orders: Orders) -> None:
        """Take note of which life it is, and forget what is given up."""
        if not orders.life:
            return
        if orders.life != self.files.life:
            self.files.begin(orders.life)
            self._results = Results(orders.life)
        self.files.drop(orders.drops)

    def load(self, load: Load) -> set[int]:
        """Fill blocks from copies, up to the first that is not right; the blocks that are not."""
        for done, move in enumerate(load.moves):
            try:
                self._fill(move)
            except BadCopy as error:
                self._results.broken[move.name] = str(error)
                self._results.loaded[load.request_id] = done
                return {move.block for move in load.moves[done:]}
        self._results.loaded[load.request_id] = len(load.moves)
        return set()

    def save(self, move: Move) -> None:
        content = [memoryview(_bytes(tensor[move.block]).cpu().numpy()) for tensor in self._tensors]
        try:
            self.files.publish(move.name, content)
            self._results.published.add(move.name)
        except OSError as error:
            self._results.unpublished[move.name] = error.strerror or str(error)

    def results(self) -> Results | None:
        """What was done since the last time, None for nothing."""
        done, self._results = self._results, Results(self.files.life)
        return done if done.published or done.unpublished or done.loaded else None

    def _fill(self, move: Move) -> None:
        content = torch.frombuffer(self.files.read(move.name), dtype=torch.uint8)
        sizes = [tensor[move.block].numel() * tensor.element_size() for tensor in self._tensors]
        if len(content) != sum(sizes):
            raise BadCopy(f"it holds {len(content)} bytes, and a block has {sum(sizes)}")
        for tensor, part in zip(self._tensors, content.split(sizes), strict=True):
            place = tensor[move.block]
            place.copy_(part.view(place.dtype).reshape(place.shape))


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.detach().contiguous().reshape(-1).view(torch.uint8)


class ClaimTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides of the connector; which one it is vLLM says when it makes it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder, self.blocks = _settings(self._kv_transfer_config.kv_connector_extra_config)
        self._offloading: Offloading | None = None
        self._worker: TierWorker | None = None
        self._received: set[str] = set()
        self._failed: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what it saves: a request that gives way needs no other care."""
        return False

    # -- the scheduler's side --------------------------------------------------------------------

    def attach_claims(self, enforcer: Any) -> Offloading:
        """The claims that this connector works for (called by `ClaimEnforcer`)."""
        self._offloading = Offloading(enforcer, self.blocks)
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

    def build_connector_meta(self, scheduler_output: Any) -> TierOrders:  # noqa: ARG002
        return TierOrders(Orders() if self._offloading is None else self._offloading.orders())

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
        """Nothing keeps the blocks of a request that has ended: what is saved has been saved."""
        return False, None

    # -- the worker's side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        parallel = self._vllm_config.parallel_config
        part = f"{parallel.data_parallel_index}-{parallel.rank}"
        self._worker = TierWorker(self._folder / part, kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        worker, orders = self._at_work()
        if worker is None:
            return
        worker.begin(orders)
        for load in orders.loads:
            self._failed |= worker.load(load)
            self._received.add(load.request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are for requests that wait for them; no running step needs one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved when all of their layers are written: in `wait_for_save`."""

    def wait_for_save(self) -> None:
        worker, orders = self._at_work()
        if worker is None:
            return
        for move in orders.saves:
            worker.save(move)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> TierResults | None:
        results = None if self._worker is None else self._worker.results()
        return None if results is None else TierResults(results)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.files.close()

    def _at_work(self) -> tuple[TierWorker | None, Orders]:
        told = self._get_connector_metadata()
        return self._worker, told.orders if isinstance(told, TierOrders) else Orders()


def _settings(given: Mapping[str, Any]) -> tuple[Path, int]:
    """The folder, and how many blocks it may hold copies of."""
    if sorted(given) != sorted(_SETTINGS):
        raise ValueError(f"kv_connector_extra_config of ClaimTier has {' and '.join(_SETTINGS)}")
    folder, blocks = given["folder"], given["blocks"]
    if type(blocks) is not int or blocks < 1 or not isinstance(folder, str) or not folder:
        raise ValueError("ClaimTier has a folder, and room for at least one block")
    return Path(folder), blocks
