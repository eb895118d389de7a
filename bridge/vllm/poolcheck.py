"""One vLLM pool, judged at the end of each operation by the rules that need no claims.

The check keeps what every touched block looked like when the last operation ended, and judges
the blocks that an operation wrote to (B1 to B3, B6, B9, B10); the whole pool is compared with
itself only when asked (`audit`).  States that a test builds by hand are remembered as such, and
the blocks and requests they concern are not judged from then on.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

KEPT_OPERATIONS: Final = 400
"""Operations that a violation can show; earlier ones are counted only."""

_GROUP_BYTES: Final = 4


@dataclass(frozen=True)
class Broken:
    """A rule that an operation broke, with the operations on this pool that lead there."""

    rule: str
    message: str
    operation: str
    operations: tuple[str, ...]


@dataclass(frozen=True)
class HandBuilt:
    """A state that was built outside every operation of the engine."""

    what: str
    after: str


class PoolCheck:
    """The check of one pool.  `rules` are those to judge; `broken` and `hand_built` collect."""

    def __init__(self, pool: Any, rules: frozenset[str]) -> None:
        self._pool = weakref.ref(pool)
        self.rules = rules
        self.judged: Counter[str] = Counter()
        """How often each rule was looked at."""
        self.broken: list[Broken] = []
        self.hand_built: list[HandBuilt] = []
        self.managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.touched: set[int] = set()
        self.keys_touched: set[bytes] = set()
        self.operations: deque[str] = deque(maxlen=KEPT_OPERATIONS)
        self.exempt: set[int] = set()
        """Blocks built by hand, or found broken once: a fault is told where it begins."""
        self.exempt_requests: set[tuple[int, str]] = set()
        self._exempt_keys: set[bytes] = set()
        self._counter_exempt = False
        self._queued = sum(block.next_free_block is not None for block in pool.blocks)
        self._before = [_state(block) for block in pool.blocks]
        self._tables: dict[tuple[int, str], int] = {}
        self._entries = len(table(pool))
        self._replay = Replay(pool)

    @property
    def pool(self) -> Any:
        """The pool, None once it is gone."""
        return self._pool()

    # -- what was written --------------------------------------------------------------------

    def wrote(self, block: Any, field: str, before: Any, inside: bool) -> None:
        """A field of a block changed."""
        if field == "next_free_block":
            self._queued += (block.next_free_block is not None) - (before is not None)
        if inside:
            self.touched.add(block.block_id)
        elif before != getattr(block, field) or field == "next_free_block":
            self.by_hand(f"{field.lstrip('_')} of block {block.block_id} written", block.block_id)

    def by_hand(self, what: str, block: int | None = None) -> None:
        """Remember a state that the test built; its block is not judged any more."""
        if block is not None:
            if block in self.exempt:
                return
            self.exempt.add(block)
        self.hand_built.append(HandBuilt(what, self.operations[-1] if self.operations else ""))

    def key_by_hand(self, key: bytes) -> None:
        if key not in self._exempt_keys:
            self._exempt_keys.add(key)
            self.by_hand(f"hash map entry {key[:4].hex()}… written")

    def entered(self) -> None:
        """An operation begins: tables and maps that changed since the last one are the test's."""
        if self.pool is not None and len(table(self.pool)) != self._entries:
            self._map_by_hand()
        for (manager, request), size in self._table_sizes():
            place = (id(manager), request)
            if self._tables.get(place, 0) != size and place not in self.exempt_requests:
                self.exempt_requests.add(place)
                self.by_hand(f"block table of request {request!r} filled")

    def _map_by_hand(self) -> None:
        """Entries of the hash map came or went without a call: none that disagrees is judged."""
        pool = self.pool
        for block in pool.blocks:
            for key in own_keys(pool, block):
                if not _finds(pool, key, block.block_id):
                    self.key_by_hand(key)
        for key in table(pool):
            if any(key not in own_keys(pool, block) for block in found_under(pool, key)):
                self.key_by_hand(key)

    # -- judging -----------------------------------------------------------------------------

    def judge(self, operation: str, failed: bool) -> None:
        """The outermost operation has ended: every block it wrote to must be in order."""
        pool = self.pool
        touched, self.touched = self.touched, set()
        keys, self.keys_touched = self.keys_touched, set()
        if pool is None:
            return
        if touched or keys:
            if failed and operation.startswith("BlockPool.") and not self.hand_built:
                self._unchanged(operation, touched)
            holders = self._holders(touched)
            for number in touched:
                if number not in self.exempt and number < len(pool.blocks):
                    self._block(operation, pool.blocks[number], holders)
            self._key_entries(operation, keys)
            self._counter(operation)
            for number in touched:
                if number < len(self._before):
                    self._before[number] = _state(pool.blocks[number])
        self._replay.follow(self, operation, keys)
        self._tables = {(id(m), r): size for (m, r), size in self._table_sizes()}
        self._entries = len(table(pool))

    def report(self, rule: str, message: str, operation: str, block: int | None = None) -> None:
        """A rule is broken; the block it shows at is not judged any more."""
        if rule not in self.rules:
            return
        if block is not None:
            if block in self.exempt:
                return
            self.exempt.add(block)
        self.broken.append(Broken(rule, message, operation, tuple(self.operations)))

    def asks(self, rule: str) -> bool:
        """Whether a rule is to be judged; counts that it was."""
        if rule in self.rules:
            self.judged[rule] += 1
            return True
        return False

    def _block(self, operation: str, block: Any, holders: Counter[int]) -> None:
        number, ref, queued = block.block_id, block.ref_cnt, block.next_free_block is not None
        if block.is_null:
            if self.asks("B6") and (queued or block.block_hash is not None):
                seen = "queued" if queued else "hashed"
                self.report("B6", f"the null block is {seen}", operation, number)
            return
        if self.asks("B2"):
            if ref < 0:
                self.report("B2", f"ref of block {number} is {ref}", operation, number)
            elif ref < holders[number] and not (ref == 0 and number in _soft_read(self.pool)):
                message = f"ref of block {number} is {ref}, {holders[number]} tables hold it"
                self.report("B2", message, operation, number)
        if self.asks("B1"):
            if queued != (ref == 0):
                state = "queued" if queued else "not queued"
                self.report("B1", f"block {number} is {state} with ref {ref}", operation, number)
            elif queued and not _linked(block):
                message = f"the free queue's links at block {number} do not agree"
                self.report("B1", message, operation, number)
        if self.asks("B3"):
            for key in own_keys(self.pool, block):
                if key not in self._exempt_keys and not _finds(self.pool, key, number):
                    message = f"block {number} carries {shown(key)}, and a lookup misses it"
                    self.report("B3", message, operation, number)

    def _key_entries(self, operation: str, keys: Iterable[bytes]) -> None:
        """What the map finds under a key must carry it."""
        for key in keys:
            if key in self._exempt_keys or not self.asks("B3"):
                continue
            for block in found_under(self.pool, key):
                if not self._is_own(block) or block.block_id in self.exempt:
                    continue
                if key not in own_keys(self.pool, block):
                    message = f"a lookup of {shown(key)} finds block {block.block_id} without it"
                    self.report("B3", message, operation, block.block_id)

    def _counter(self, operation: str) -> None:
        counter = self.pool.free_block_queue.num_free_blocks
        if self._counter_exempt or counter == self._queued or not self.asks("B1"):
            return
        self._counter_exempt = True
        if self.hand_built:
            self.by_hand("the free queue's counter does not agree with its blocks")
            return
        message = f"the free queue says {counter} blocks, {self._queued} are linked in it"
        self.report("B1", message, operation)

    def _unchanged(self, operation: str, touched: Iterable[int]) -> None:
        if not self.asks("B9"):
            return
        changed = [n for n in touched if _state(self.pool.blocks[n]) != self._before[n]]
        if changed:
            message = f"it raised, and blocks {sorted(changed)} are not as before"
            self.report("B9", message, operation)

    def audit(self) -> None:
        """The whole pool against itself: queue, links, hashes and map.  A pool in which a state
        was built by hand is left alone."""
        pool = self.pool
        if pool is None or self.hand_built or self.broken:
            return
        operation = "audit at the end of the test"
        queue = [b.block_id for b in walk(pool.free_block_queue)]
        if self.asks("B1") and (len(set(queue)) != len(queue) or len(queue) != self._queued):
            self.report("B1", f"the free queue holds {len(queue)} entries: {queue[:20]}", operation)
        holders = self._holders(range(len(pool.blocks)))
        for block in pool.blocks:
            self._block(operation, block, holders)
        self._key_entries(operation, list(table(pool)))

    def cleared(self, operation: str) -> None:
        """A reset reported success: nothing may be visible any more (B10)."""
        if not self.asks("B10"):
            return
        pool = self.pool
        left = [b.block_id for b in pool.blocks if b.block_hash is not None]
        if table(pool) or left or getattr(pool, "cached_block_hashes_by_block", None):
            message = f"{len(table(pool))} hashes can be looked up, blocks {left[:10]} carry one"
            self.report("B10", message, operation)

    # -- reading -----------------------------------------------------------------------------

    def holders_of(self, block: int) -> list[str]:
        """The requests whose tables name the block."""
        return [
            request
            for manager in list(self.managers)
            for request, blocks in manager.req_to_blocks.items()
            if (id(manager), request) not in self.exempt_requests
            and any(b.block_id == block and self._is_own(b) for b in blocks)
        ]

    def _holders(self, wanted: Iterable[int]) -> Counter[int]:
        """How many table entries of requests name each of the blocks."""
        found: Counter[int] = Counter()
        if not self.managers:
            return found
        wanted = set(wanted)
        for manager in list(self.managers):
            for request, blocks in manager.req_to_blocks.items():
                if (id(manager), request) in self.exempt_requests:
                    continue
                for block in blocks:
                    if block.block_id in wanted and self._is_own(block):
                        found[block.block_id] += 1
        return found

    def _is_own(self, block: Any) -> bool:
        number = block.block_id
        blocks = self.pool.blocks
        return 0 <= number < len(blocks) and blocks[number] is block

    def _table_sizes(self) -> Iterator[tuple[tuple[Any, str], int]]:
        for manager in list(self.managers):
            for request, blocks in manager.req_to_blocks.items():
                yield (manager, request), len(blocks)


class Replay:
    """The engine's KV events, folded to the set of hashes that a router believes in (B8)."""

    def __init__(self, pool: Any) -> None:
        plain = type(pool).__name__ == "BlockPool"  # others may tell in another pool's name
        self.enabled = plain and bool(getattr(pool, "enable_kv_cache_events", False))
        self._medium = getattr(pool, "medium", None)
        self._resident: set[tuple[Any, int]] = set()
        self._queue: Any = None
        self._read = 0
        self._told = False

    def follow(self, check: PoolCheck, operation: str, keys: Iterable[bytes]) -> None:
        """Fold what was told since, and compare it with the map at the keys that changed."""
        if not self.enabled or self._told or check.pool is None:
            return
        queue = check.pool.kv_event_queue
        if queue is not self._queue:  # taken: a new queue has begun
            self._queue, self._read = queue, 0
        news, self._read = queue[self._read :], len(queue)
        for event in news:
            self._fold(event)
        if check.hand_built or not keys or not check.asks("B8"):
            return
        convert = _converter()
        for key in keys:
            raw, group = parts_of(key)
            name = (convert(raw), group)
            resident = bool(list(found_under(check.pool, key)))
            if resident != (name in self._resident):
                self._told = True
                told = "stored" if name in self._resident else "removed or never told"
                state = "is resident" if resident else "is gone"
                check.report("B8", f"{shown(key)} {state}, its events say {told}", operation)
                return

    def _fold(self, event: Any) -> None:
        kind = type(event).__name__
        if self._medium is not None and getattr(event, "medium", self._medium) != self._medium:
            return  # of another tier
        group = getattr(event, "group_idx", None) or 0
        if kind == "BlockStored":
            self._resident.update((h, group) for h in event.block_hashes)
        elif kind == "BlockRemoved":
            self._resident.difference_update((h, group) for h in event.block_hashes)
        elif kind == "AllBlocksCleared":
            self._resident.clear()


def _converter() -> Callable[[bytes], Any]:
    """How the engine shows a hash in its events (bytes, or a number by its settings)."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    convert: Callable[[bytes], Any] = maybe_convert_block_hash
    return convert


def table(pool: Any) -> dict[bytes, Any]:
    """vLLM's map from keys to a block, or to several by id."""
    found = pool.cached_block_hash_to_block
    entries: dict[bytes, Any] = getattr(found, "_cache", found)
    return entries


def own_keys(pool: Any, block: Any) -> list[bytes]:
    """The keys that a block itself carries, partial ones too."""
    keys = [] if block.block_hash is None else [block.block_hash]
    keys.extend(getattr(pool, "cached_block_hashes_by_block", {}).get(block.block_id, ()))
    return keys


def shown(key: bytes) -> str:
    """A key for people: the head of its hash, and its KV group."""
    raw, group = parts_of(key)
    return f"hash {raw[:4].hex()}… of group {group}"


def parts_of(key: bytes) -> tuple[bytes, int]:
    """The hash of a key, and the KV group that content of that name is in."""
    raw = bytes(key)
    return raw[:-_GROUP_BYTES], int.from_bytes(raw[-_GROUP_BYTES:], "big")


def found_under(pool: Any, key: bytes) -> Iterable[Any]:
    """The blocks that a lookup of the key finds."""
    value = table(pool).get(key)
    if value is None:
        return ()
    return tuple(value.values()) if isinstance(value, dict) else (value,)


def _finds(pool: Any, key: bytes, number: int) -> bool:
    return any(block.block_id == number for block in found_under(pool, key))


def _soft_read(pool: Any) -> Any:
    """Blocks that were given back and are read until their reader is told of the reuse."""
    return getattr(pool, "_reuse_watchers", ())


def _state(block: Any) -> tuple[int, bool, Any]:
    return block.ref_cnt, block.next_free_block is not None, block.block_hash


def _linked(block: Any) -> bool:
    after, before = block.next_free_block, block.prev_free_block
    return (
        before is not None
        and before.next_free_block is block
        and after is not None
        and after.prev_free_block is block
    )


def walk(queue: Any) -> Iterator[Any]:
    """The queue from its head; stops after more entries than there can be."""
    block, most = queue.fake_free_list_head.next_free_block, queue.num_free_blocks + 1
    while block is not None and block.next_free_block is not None and most >= 0:
        yield block
        block, most = block.next_free_block, most - 1
