"""A live worker's KV tensors in elastic memory: same shapes, a fixed pointer, a tail that may go.

The tensors that attention layers read are replaced by views over `ElasticMemory`; nothing else
of the worker changes.  In process only: a worker in another process would place its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from kvclaims.bridge.vmm.memory import ElasticMemory
from kvclaims.bridge.vmm.tensors import bytes_at
from kvclaims.spec.interface import BadOperation


def block_bytes(runner: Any) -> int:
    """Bytes of one block in one layer; `BadOperation` unless blocks are outermost and dense."""
    sizes = set()
    for tensor in runner.kv_caches:
        block = tensor[0]
        if tensor.stride(0) != block.numel() or not block.is_contiguous():
            raise BadOperation("this KV layout does not keep the bytes of a block together")
        sizes.add(block.numel() * tensor.element_size())
    if len(sizes) != 1:
        raise BadOperation("layers with blocks of different sizes cannot share an elastic tail")
    return int(sizes.pop())


class Placement:
    """The tensors of one model runner, moved into `memory` until `restore`."""

    def __init__(self, runner: Any, memory: ElasticMemory) -> None:
        self.runner = runner
        self.memory = memory
        self._before = list(runner.kv_caches)
        self._bind([self._view(layer, t) for layer, t in enumerate(self._before)])

    def restore(self) -> None:
        """Give the worker its own tensors back."""
        self._bind(self._before)

    def copy(self, old: int, new: int) -> None:
        """Copy the KV of a block in every layer."""
        for tensor in self.runner.kv_caches:
            tensor[new].copy_(tensor[old])

    def rename(self, request_id: str, old: int, new: int) -> None:
        """The worker's tables of a request name `new` where they named `old`."""
        state = self.runner.requests.get(request_id)
        if state is not None:
            for ids in state.block_ids:
                ids[:] = [new if b == old else b for b in ids]
        row = self.runner.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            for table in self.runner.input_batch.block_table.block_tables:
                cells = table.block_table.np[row]
                cells[cells == old] = new

    def scrub(self, blocks: Collection[int]) -> None:
        """No row of a table names these blocks any more, not even one that has ended."""
        gone = list(blocks)
        for table in self.runner.input_batch.block_table.block_tables:
            cells = table.block_table.np
            cells[np.isin(cells, gone)] = 0

    def names(self, blocks: Collection[int]) -> bool:
        """Whether some cell of a table names one of these blocks."""
        tables = self.runner.input_batch.block_table.block_tables
        return any(bool(np.isin(t.block_table.np, list(blocks)).any()) for t in tables)

    def scribble(self) -> None:
        """Use the activations as a prefill does: write all over them."""
        address, size = self.memory.activations
        bytes_at(address, size, self.memory.driver.device).fill_(0xA5)

    def _view(self, layer: int, tensor: Any) -> Any:
        """The layer's range as a tensor like `tensor`, with the blocks of the elastic shape."""
        memory = self.memory
        blocks = 1 + memory.shape.base_blocks + memory.shape.lent_blocks
        raw = bytes_at(memory.address(layer), memory.kv_bytes, memory.driver.device)
        flat = raw[: blocks * memory.shape.block_bytes].view(tensor.dtype)
        return flat.as_strided((blocks, *tensor.shape[1:]), tensor.stride())

    def _bind(self, tensors: Iterable[Any]) -> None:
        """Put one tensor a layer where attention and the runner find them."""
        wanted = dict(zip(map(id, self.runner.kv_caches), tensors, strict=True))
        layers = self.runner.compilation_config.static_forward_context.values()
        for layer in layers:
            found = getattr(layer, "kv_cache", None)
            if id(found) in wanted:
                layer.kv_cache = wanted[id(found)]
        self.runner.kv_caches[:] = [wanted[id(t)] for t in self.runner.kv_caches]
