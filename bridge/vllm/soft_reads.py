"""vLLM's pool where blocks are read after they are given back, until their reader is told.

Copies of blocks on the host are filled this way: a block counts as free, is taken last, and whoever
reads it hears of it before it is handed out (B5).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from kvclaims.bridge.vllm.layouts import SOFT_READS
from kvclaims.bridge.vllm.wholepool import Broken, blocks_stand
from kvclaims.checker.engines import first_line
from kvclaims.spec.interface import BadOperation, NotExposed
from kvclaims.spec.operations import Operation, parse

UNIT: Final = 4

_HOLDERS: Final = 4
_OPERATIONS: Final = 40
_USABLE: Final = (6, 10, 16)
_MOST: Final = 4


def drawn(seed: str) -> tuple[int, tuple[Operation, ...]]:
    """The blocks of a pool and a program for it."""
    rng = random.Random(seed)
    return rng.choice(_USABLE), tuple(map(parse, _drawn(rng)))


def _drawn(rng: random.Random) -> Iterator[dict[str, Any]]:
    for _ in range(_OPERATIONS):
        holder = f"r{rng.randrange(_HOLDERS)}"
        number = rng.randint(1, _MOST)
        yield rng.choice(
            (
                {"op": "submit", "request": holder, "content": [["A", number]]},
                {"op": "submit", "request": holder, "content": [["A", number]]},
                {"op": "load", "request": holder, "blocks": number},
                {"op": "demote", "claim": holder},
                {"op": "demote", "claim": holder},
                {"op": "abort", "request": holder},
            )
        )
    yield {"op": "drain"}
    yield {"op": "reset"}


class SoftReads:
    """`submit` takes blocks, `load` joins those of others, `abort` gives them back, and `demote`
    gives them back and goes on reading."""

    steps = 0

    def __init__(self, usable: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        if not hasattr(BlockPool, "unpin_blocks"):
            raise NotExposed(f"{SOFT_READS}, in this version")
        self._pool = BlockPool(num_gpu_blocks=usable + 1, enable_caching=True, hash_block_size=UNIT)
        self._usable = usable
        self._held: dict[str, list[Any]] = {}
        self._read: Counter[int] = Counter()
        """Block → how many read it though it is free."""
        self._told: Counter[int] = Counter()
        self.reads = 0

    def do(self, operation: Operation) -> list[Broken]:
        try:
            return list(self._do(operation)) or list(self._stands())
        except BadOperation:
            raise
        except Exception as error:  # noqa: BLE001  (whatever the pool raises, it fails by it)
            return [("B9", f"{type(error).__name__}: {first_line(error)}")]

    def _do(self, operation: Operation) -> Iterator[Broken]:
        fields = operation.fields
        match operation.op:
            case "submit":
                yield from self._take(fields["request"], sum(s.blocks for s in fields["content"]))
            case "load":
                self._join(fields["request"], fields["blocks"])
            case "abort":
                self._pool.free_blocks(reversed(self._gone(fields["request"])))
            case "demote":
                blocks = self._gone(fields["claim"])
                self._read.update(block.block_id for block in blocks)
                self._pool.unpin_blocks(blocks, self._reused)
            case "drain":
                for blocks in self._held.values():
                    self._pool.free_blocks(reversed(blocks))
                self._held.clear()
            case "reset":
                yield from self._reset()
            case _:
                raise BadOperation(f"{operation.op} is not for a pool alone")

    def _take(self, holder: str, number: int) -> Iterator[Broken]:
        if number > self._pool.get_num_free_blocks():
            raise BadOperation("so many blocks are not free")
        blocks = self._pool.get_new_blocks(number)
        self._held.setdefault(holder, []).extend(blocks)
        for block in blocks:
            yield from self._heard(block.block_id, f"is handed out to {holder}")

    def _heard(self, block: int, what: str) -> Iterator[Broken]:
        self.reads += 1
        if self._read.pop(block, 0) and not self._told.pop(block, 0):
            yield "B5", f"block {block} {what}, and who reads it still was not told"

    def _join(self, holder: str, number: int) -> None:
        others = [b for name in sorted(self._held) if name != holder for b in self._held[name]]
        if not others:
            raise BadOperation("nobody holds a block")
        mine = self._held.setdefault(holder, [])
        joined = [block for block in others[:number] if block not in mine]
        self._pool.touch(joined)
        mine += joined

    def _gone(self, holder: str) -> list[Any]:
        if holder not in self._held:
            raise BadOperation(f"{holder} holds no block")
        return self._held.pop(holder)

    def _reused(self, block: Any) -> None:
        self._told[block.block_id] += 1

    def _reset(self) -> Iterator[Broken]:
        if not self._pool.reset_prefix_cache():
            if not self._held:
                yield "B10", "a reset failed, and no block is in use"
            return
        for block in list(self._read):
            yield from self._heard(block, "is given up by a reset")

    def _stands(self) -> Iterator[Broken]:
        holders = Counter(block.block_id for blocks in self._held.values() for block in blocks)
        yield from blocks_stand(self._pool, holders)
        free = self._pool.get_num_free_blocks()
        if not self._held and free != self._usable:
            yield "B7", f"nobody holds a block, and {free} of {self._usable} are free"

    def close(self) -> None:
        """There is nothing to end."""
