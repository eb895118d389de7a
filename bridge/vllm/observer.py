"""Every allocator call of a live vLLM pool, told as steps of the machine in `spec.pool`.

`PoolObserver` wraps methods of one `KVCacheManager` and its `BlockPool` on the instances: no
file of vLLM changes, and methods that a version lacks are skipped.  What a call did is read
from vLLM's own structures after it, so a pool that does something else than asked is told as
it did.  The work per call is proportional to the blocks it touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from kvclaims.bridge.vllm.names import Names
from kvclaims.spec.interface import BlockFacts, PoolSnapshot, PoolStep

Listener = Callable[[PoolStep], None]
Wrapper = Callable[..., Any]

UNNAMED: Final = "(engine)"
"""The holder of references that no request's call explains (a connector's, for instance)."""


_MORE_KEYS: Final = "cached_block_hashes_by_block"
"""Where a pool has keys of blocks beside the one that a block itself carries."""

_CACHED: Final = ("request", "blocks", "num_cached_blocks", "num_full_blocks")
"""The first parameters of `cache_full_blocks`."""

_GROWS: Final = {"take": 1, "draw": 1, "share": 1, "drop": -1, "give_back": -1}
"""By how much a step makes a request's table longer."""


class Reactions:
    """What a claim layer is asked and hears while a call is under way; nothing by default."""

    def shares(self, request: Any) -> bool:  # noqa: ARG002
        """Whether blocks of the request become visible; otherwise they do not, as those that vLLM
        itself masks do not."""
        return True

    def before_taking(self, blocks: int) -> None:
        """So many blocks are about to be taken from the head of the free queue."""

    def before_loss(self, lost: Mapping[int, str], request: str | None) -> None:
        """Blocks are about to be told to have lost their content: for `request`, or, where it
        is None, by a fault."""

    def after_loss(self, lost: Mapping[int, str], request: str | None) -> None:
        """The blocks have lost their content."""

    def drawn(self, claim: str, block: int, request: Any, position: int) -> None:
        """A request took `block` on the reserve of `claim`, for this position of its content."""

    def freed(self, block: int) -> str | None:
        """The last holder let go of `block`; the claim that it was on loan from, if any."""

    def registered(self, block: int, key: str) -> None:
        """Content `key` became visible in `block`."""

    def ended(self, request: Any, blocks: int) -> None:
        """vLLM frees all `blocks` of a request that ends or is preempted; they are gone."""

    def ending(self, request: Any) -> None:
        """vLLM is done with a request, and frees its blocks when a step in flight has ended."""


def attach(scheduler: Any, listener: Listener) -> PoolObserver:
    """Watch a live scheduler from now on: every allocator step is told to `listener`."""
    manager = scheduler.kv_cache_manager
    block_size = manager.coordinator.single_type_managers[0].block_size
    same = getattr(manager.block_pool, "hash_block_size", block_size) == block_size
    observer = PoolObserver(manager, Names(block_size, chained=same))
    observer.listen(listener)
    return observer


class PoolObserver:
    """One pool with its manager, watched.  `shadow` state is kept from what was told."""

    def __init__(
        self, manager: Any, names: Names, alias: Callable[[str], str] = lambda request: request
    ) -> None:
        self.manager = manager
        self.pool = manager.block_pool
        self.names = names
        self.allocate: Wrapper = manager.allocate_slots
        """The manager's own, from before it was watched."""
        self.reactions = Reactions()
        self.held: dict[str, list[int]] = {}
        self.tables = 0
        """Another number whenever a request came to hold blocks or let go of one; tables that only
        grow leave it as it is."""
        self.keys: dict[int, dict[bytes, str]] = {}
        self.where: dict[str, dict[int, None]] = {}
        self.draws: Mapping[int, str] = {}
        """Logical positions that the request now allocating draws from a claim's reserve."""
        self.request: Any = None
        """The request that allocates now: calls of the pool that name none are its own."""
        self._alias = alias
        self.listeners: list[Listener] = []
        self._depth = 0
        self._steps: list[tuple[str, dict[str, Any]]] = []
        """What is told of the outermost operation so far: actions and their arguments."""
        self._touched: dict[int, Iterable[bytes]] = {}
        self._pinning = False
        self._by_choice = False
        self._place_of: int | None = None
        self._granted = 0
        self._leaving: dict[int, list[str]] = {}
        """Block → the requests that it is to come back from by a call that names none."""
        self._ending: dict[str, tuple[Any, int]] = {}
        """Requests whose blocks are freed later, with how many there are."""
        self._adopt()
        self._attach()

    # -- what claim layers and runtimes use ------------------------------------------------

    def listen(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def tell(self, action: str, **args: Any) -> None:
        """Tell one step; its facts follow when the outermost operation ends."""
        if not self.listeners:
            return
        self._steps.append((action, args))
        if self._depth == 0:
            self._flush()

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Everything told inside belongs to one operation, with facts at its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._flush()

    def pin(self, blocks: Iterable[int]) -> None:
        """Take a reference for a claim; the claim layer tells the step."""
        with self._as_pin():
            self.pool.touch([self.pool.blocks[b] for b in blocks])

    def unpin(self, blocks: Iterable[int]) -> None:
        """Give back the references of a claim, in this order."""
        with self._as_pin():
            self.pool.free_blocks([self.pool.blocks[b] for b in blocks])

    def alias(self, request_id: str) -> str:
        """The name under which a request's steps are told."""
        return self._alias(request_id)

    def acting_for(self, request: Any) -> AbstractContextManager[None]:
        """Calls of the pool inside are this request's, where vLLM itself names none."""
        return self._for_request(request)

    @contextmanager
    def by_choice(self) -> Iterator[None]:
        """What `evict_blocks` drops inside is given up by the runtime itself, and is no fault."""
        self._by_choice = True
        try:
            yield
        finally:
            self._by_choice = False

    @contextmanager
    def in_place_of(self, block: int) -> Iterator[None]:
        """Blocks that a request gets inside stand where `block` stands in its table."""
        self._place_of = block
        try:
            yield
        finally:
            self._place_of = None

    def ref(self, block: int) -> int:
        return int(self.pool.blocks[block].ref_cnt)

    def lookup(self, key: str) -> int | None:
        """The block that `key` is found in: the copy that was registered first."""
        return next(iter(self.where.get(key, ())), None)

    def queue_length(self) -> int:
        """The free queue's own counter."""
        return int(self.pool.free_block_queue.num_free_blocks)

    # -- reading vLLM's structures -----------------------------------------------------------

    def facts(self, block: int, also: Iterable[bytes] = ()) -> BlockFacts:
        """What vLLM holds of a block: keys are those that its map finds the block under."""
        real = self.pool.blocks[block]
        queued = real.next_free_block is not None
        keys = self._own_keys(real)
        if not keys and not also:
            return BlockFacts(int(real.ref_cnt), queued, ())
        of_key = self.names.of_key
        found = [of_key(key) for key in (*keys, *also) if self._finds(key, block)]
        if len(found) > 1:
            found = sorted(set(found))
        return BlockFacts(int(real.ref_cnt), queued, tuple(found))

    def snapshot(self, pins: Mapping[str, tuple[int, ...]]) -> PoolSnapshot:
        """The whole pool; facts hold the keys that the blocks themselves carry."""
        pool = self.pool
        facts = {}
        for block in pool.blocks:
            if not block.is_null:
                keys = tuple(sorted(map(self.names.of_key, self._own_keys(block))))
                queued = block.next_free_block is not None
                facts[block.block_id] = BlockFacts(int(block.ref_cnt), queued, keys)
        return PoolSnapshot(
            null_block=pool.null_block.block_id,
            queue=tuple(b.block_id for b in pool.free_block_queue.get_all_free_blocks()),
            counter=self.queue_length(),
            facts=facts,
            holders=self._holders(),
            pins=dict(pins),
            lookup={self.names.of_key(key): blocks for key, blocks in _entries(pool)},
        )

    def _finds(self, key: bytes, block: int) -> bool:
        value = _table(self.pool).get(key)
        return (
            block in value if isinstance(value, dict) else getattr(value, "block_id", -1) == block
        )

    def _holders(self) -> dict[str, tuple[int, ...]]:
        holders: dict[str, tuple[int, ...]] = {}
        for group in self.manager.coordinator.single_type_managers:
            for request, blocks in group.req_to_blocks.items():
                ids = tuple(b.block_id for b in blocks if not b.is_null)
                name = self._alias(request)
                if ids:
                    holders[name] = holders.get(name, ()) + ids
        for block, names in self._leaving.items():  # in no table any more, and still referred to
            for name in names:
                holders[name] = (*holders.get(name, ()), block)
        return holders

    def _own_keys(self, block: Any) -> list[bytes]:
        keys = [] if block.block_hash is None else [block.block_hash]
        more = getattr(self.pool, _MORE_KEYS, None)
        if more:
            keys.extend(more.get(block.block_id, ()))
        return keys

    def _adopt(self) -> None:
        """Take over what is in the pool already, once."""
        for key, blocks in _entries(self.pool):
            for block in blocks:
                self._learn(block, key, self.names.of_key(key))
        self.held = {request: list(blocks) for request, blocks in self._holders().items()}

    # -- telling -----------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self._steps:
            self._touched.clear()
            return
        steps, touched = self._steps.copy(), self._touched.copy()
        self._steps.clear()  # the same list and map: who watches a call has them at hand
        self._touched.clear()
        action, args = steps.pop()
        facts = {b: self.facts(b, also) for b, also in touched.items()}
        told = [PoolStep(action, args) for action, args in steps]
        told.append(PoolStep(action, args, facts, self.queue_length()))
        for step in told:
            for listener in self.listeners:
                listener(step)

    def _learn(self, block: int, raw: bytes, key: str) -> None:
        self.keys.setdefault(block, {})[raw] = key
        self.where.setdefault(key, {})[block] = None

    def _unlearn(self, block: int, raw: bytes) -> str:
        known = self.keys[block]
        key = known.pop(raw)
        if not known or key not in known.values():
            found = self.where[key]
            found.pop(block, None)
            if not found:
                del self.where[key]
                if not self._in_another_group(key):
                    self.names.forget_key(raw)
        if self.listeners:
            self._touched[block] = (*self._touched.get(block, ()), raw)
        return key

    def _mark(self, block: int) -> None:
        """Whoever listens is told facts of the block when the operation ends."""
        if self.listeners:
            self._touched.setdefault(block, ())

    def _in_another_group(self, key: str) -> bool:
        """Whether another KV group has content of the same hash."""
        groups = len(self.manager.coordinator.single_type_managers)
        if groups == 1:
            return False
        name = key.partition("@")[0]
        return any((f"{name}@{g}" if g else name) in self.where for g in range(groups))

    def _sync(self, blocks: Iterable[Any], request: str | None, action: str) -> None:
        """Tell which keys blocks have lost (as `action`) and gained since last looked at."""
        blocks = list(blocks)
        gone = [(b.block_id, raw) for b in blocks for raw in self._lost_keys(b)]
        if gone:
            self._lose(gone, request, action)
        for block in blocks:
            self._mark(block.block_id)
            self._gain(block, request or UNNAMED)

    def _lose(self, gone: list[tuple[int, bytes]], request: str | None, action: str) -> None:
        by = request or UNNAMED if action == "evict" else None
        lost = {number: self.keys[number][raw] for number, raw in gone}
        self.reactions.before_loss(lost, by)
        for number, raw in gone:
            self.tell(action, b=number, k=self._unlearn(number, raw))
        self.reactions.after_loss(lost, by)

    def _lost_keys(self, block: Any) -> list[bytes]:
        known = self.keys.get(block.block_id)
        if not known:
            return []
        own = self._own_keys(block)
        return [raw for raw in known if raw not in own]

    def _gain(self, block: Any, request: str) -> None:
        number = block.block_id
        known = self.keys.get(number, ())
        for raw in self._own_keys(block):
            if raw not in known:
                key = self.names.of_key(raw)
                self._learn(number, raw, key)
                if self.listeners:
                    self.tell("register", r=request, b=number, k=key)
                self.reactions.registered(number, key)

    def _name(self) -> str:
        return UNNAMED if self.request is None else self._alias(self.request.request_id)

    # -- the wrapped calls -------------------------------------------------------------------

    def _attach(self) -> None:
        pool, manager = self.pool, self.manager
        wrappers: tuple[tuple[Any, str, Wrapper], ...] = (
            (manager, "free", self._free_request),
            (manager, "pop_blocks_for_free", self._pop_for_free),
            (pool, "touch", self._touch),
            (pool, "free_blocks", self._free_blocks),
            (pool, "unpin_blocks", self._free_blocks),
            (pool, "evict_blocks", self._evict_blocks),
            (pool, "cache_partial_block", self._cache_partial_block),
            (pool, "move_block_hashes", self._move_block_hashes),
            (pool, "reset_prefix_cache", self._reset_prefix_cache),
        )
        for owner, method, wrapper in wrappers:
            if hasattr(owner, method):
                self._wrap(owner, method, wrapper)
        pool.get_new_blocks = self._taking(pool.get_new_blocks)
        pool.cache_full_blocks = self._caching(pool.cache_full_blocks)
        manager.allocate_slots = self._allocating(manager.allocate_slots)

    def _wrap(self, owner: Any, method: str, wrapper: Wrapper) -> None:
        inner = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.listeners:
                return wrapper(inner, *args, **kwargs)
            self._depth += 1  # `operation`, without what a context manager costs at every call
            try:
                return wrapper(inner, *args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and (self._steps or self._touched):
                    self._flush()

        setattr(owner, method, watched)

    @contextmanager
    def _as_pin(self) -> Iterator[None]:
        with self.operation():
            self._pinning = True
            try:
                yield
            finally:
                self._pinning = False

    @contextmanager
    def _for_request(self, request: Any) -> Iterator[None]:
        outer, self.request = self.request, request
        try:
            yield
        finally:
            self.request = outer

    def _allocating(self, inner: Wrapper) -> Wrapper:
        """`allocate_slots`, which comes for every request in every step and mostly does nothing:
        so nothing is looked at twice here, and nothing unpacked of what vLLM passes for a request
        that runs: more time goes into that than into all the rest."""
        steps, touched = self._steps, self._touched

        def allocate_slots(
            request: Any,
            num_new_tokens: int,
            *more: Any,
            num_lookahead_tokens: int | None = None,
            **named: Any,
        ) -> Any:
            outer = self.request
            self.request = request
            start = len(steps)
            self._granted = 0
            self._depth += 1
            try:
                if num_lookahead_tokens is None:
                    return inner(request, num_new_tokens, *more, **named)
                if more or named:
                    named["num_lookahead_tokens"] = num_lookahead_tokens
                    return inner(request, num_new_tokens, *more, **named)
                return inner(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
            finally:
                self.request = outer
                if len(steps) > start:
                    self._grant(self._alias(request.request_id), start)
                self._depth -= 1
                if (steps or touched) and self._depth == 0:
                    self._flush()

        return allocate_slots

    def _taking(self, inner: Wrapper) -> Wrapper:
        """`get_new_blocks`, which comes whenever a request fills a block."""
        steps, touched = self._steps, self._touched

        def get_new_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                self.reactions.before_taking(num_blocks)
                blocks = inner(num_blocks, *args, **kwargs)
                self._took(blocks, self._name())
                return blocks
            finally:
                self._depth -= 1
                if (steps or touched) and self._depth == 0:
                    self._flush()

        return get_new_blocks

    def _took(self, blocks: Iterable[Any], name: str) -> None:
        """New blocks in a request's table: they have lost what they carried, if they did."""
        held, keys, touched = self._table_of(name), self.keys, self._touched
        is_plain, is_told = self._place_of is None and not self.draws, bool(self.listeners)
        more = getattr(self.pool, _MORE_KEYS, None)
        for block in blocks:
            number = block.block_id
            if block.block_hash is not None or more:
                self._sync((block,), name, "evict")
            elif known := keys.get(number):
                self._lose([(number, raw) for raw in known], name, "evict")
            if is_told:
                touched.setdefault(number, ())
            if is_plain:
                held.append(number)
                self._granted += 1
                if is_told:
                    self._steps.append(("take", {"r": name, "b": number}))
                continue
            claim = self.draws.get(len(held))
            instead = self._hold(held, number)
            if claim is None:
                self._granted += 1
                self.tell("take", r=name, b=number, **instead)
            else:
                self.tell("draw", r=name, c=claim, b=number)
                self.reactions.drawn(claim, number, self.request, len(held) - 1)

    def _grant(self, name: str, start: int) -> None:
        """The grant comes first in the machine; its size is known only now."""
        told = (action for action, args in self._steps[start:] if args.get("r") == name)
        if self._granted or sum(_GROWS.get(action, 0) for action in told) > 0:
            grant = {"r": name, "n": self._granted}
            self._steps.insert(self._after_drops(start), ("admit", grant))

    def _after_drops(self, start: int) -> int:
        """Where the grant stands: blocks that left a sliding window were let go of before it."""
        at = start
        while at < len(self._steps) and self._steps[at][0] in ("drop", "give_back"):
            at += 1
        return at

    def _free_request(self, inner: Wrapper, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = self._alias(request.request_id)
        count = len(self.held.get(name, ()))
        with self._for_request(request):
            result = inner(request, *args, **kwargs)
        self._retire(name, request, count)
        return result

    def _pop_for_free(self, inner: Wrapper, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = self._alias(request.request_id)
        blocks = inner(request, *args, **kwargs)
        if self.request is None:  # freed later, by a call that names no request
            for block in blocks:
                if not block.is_null:
                    self._leaving.setdefault(block.block_id, []).append(name)
            if self.held.get(name) and _is_over(request):
                self._ending[name] = (request, len(self.held[name]))
                self.reactions.ending(request)
            else:
                self.reactions.ended(request, len(blocks))
        return blocks

    def _retire(self, name: str, request: Any, count: int) -> None:
        if name in self.held:
            del self.held[name]
            self.tables += 1
            self.tell("retire", r=name)
        self.reactions.ended(request, count)

    def _touch(self, inner: Wrapper, blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        blocks = list(blocks)
        queued = [block.ref_cnt == 0 for block in blocks]
        result = inner(blocks, *args, **kwargs)
        name = self._name()
        ids = [] if self.request is None else self.names.of_request(self.request)
        for block, was_queued in zip(blocks, queued, strict=True):
            if block.is_null:
                continue
            self._mark(block.block_id)
            if self._pinning:
                continue
            held = self._table_of(name)
            at = len(held) if self._place_of is None else held.index(self._place_of)
            instead = self._hold(held, block.block_id)
            self._granted += was_queued
            if self.listeners:
                key = self._found_as(block.block_id, ids, at)
                self.tell("share", r=name, b=block.block_id, k=key, **instead)
        return result

    def _table_of(self, name: str) -> list[int]:
        """The blocks that a request holds, who is to hold more."""
        held = self.held.get(name)
        if not held:
            self.tables += 1
            held = self.held[name] = []
        return held

    def _hold(self, held: list[int], block: int) -> dict[str, int]:
        """The block enters a request's table: at its end, or in the place of another."""
        if self._place_of is None or self._place_of not in held:
            held.append(block)
            return {}
        held.insert(held.index(self._place_of), block)
        return {"of": self._place_of}

    def _found_as(self, block: int, ids: list[str], position: int) -> str:
        """The content that a hit is served for: the request's own at that position.  With a
        window or several KV groups its blocks are no run from 0, and the block's own key stands."""
        groups = self.manager.coordinator.single_type_managers
        window = getattr(groups[0].kv_cache_spec, "sliding_window", None)
        if position < len(ids) and len(groups) == 1 and window is None:
            return ids[position]
        return self._any_key(block)

    def _any_key(self, block: int) -> str:
        return next(iter(self.keys.get(block, {}).values()), "")

    def _free_blocks(self, inner: Wrapper, blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        blocks = list(blocks)  # a generator is read once, and vLLM reads it
        result = inner(blocks, *args, **kwargs)
        name, is_told = self._name(), bool(self.listeners)
        for block in blocks:
            if block.is_null:
                continue
            if is_told:
                self._mark(block.block_id)
            if not self._pinning:
                self._drop(name, block.block_id, is_free=block.ref_cnt == 0)
        return result

    def _drop(self, name: str, block: int, is_free: bool) -> None:
        deferred = name == UNNAMED and block in self._leaving
        if deferred:
            name = self._leaving[block].pop(0)  # in the order in which they are freed
            if not self._leaving[block]:
                del self._leaving[block]
        held = self.held.get(name, [])
        self.tables += 1
        if held and held[-1] == block:
            held.pop()
        elif block in held:
            held.remove(block)
        lender = self.reactions.freed(block) if is_free else None
        if lender is None:
            self.tell("drop", r=name, b=block)
        else:
            self.tell("give_back", r=name, c=lender, b=block)
        if deferred and not held:
            self.held.pop(name, None)
            self.tell("retire", r=name)
            if name in self._ending:
                self.reactions.ended(*self._ending.pop(name))

    def _evict_blocks(self, inner: Wrapper, block_ids: Iterable[int], *args: Any) -> Any:
        numbers = sorted(block_ids)
        result = inner(set(numbers), *args)
        lost = "evict" if self._by_choice else "lose"
        self._sync((self.pool.blocks[number] for number in numbers), None, lost)
        return result

    def _caching(self, inner: Wrapper) -> Wrapper:
        """`cache_full_blocks`, which comes whenever a request has filled a block."""
        steps, touched = self._steps, self._touched

        def cache_full_blocks(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(_CACHED, args, strict=False)), **kwargs} if args else kwargs
            request = given["request"]
            if not self.reactions.shares(request):
                return None
            self._depth += 1
            try:
                result = inner(*args, **kwargs)
                first, last = given["num_cached_blocks"], given["num_full_blocks"]
                self.names.learn(request, first, last)
                self._registered(given["blocks"][first:last], self._alias(request.request_id))
                return result
            finally:
                self._depth -= 1
                if (steps or touched) and self._depth == 0:
                    self._flush()

        return cache_full_blocks

    def _registered(self, blocks: Iterable[Any], name: str) -> None:
        """Mostly one block, that has nothing but its new key."""
        keys, touched, is_told = self.keys, self._touched, bool(self.listeners)
        more = getattr(self.pool, _MORE_KEYS, None)
        for block in blocks:
            raw, number = block.block_hash, block.block_id
            if block.is_null:
                continue
            if keys.get(number) or more:
                self._sync((block,), name, "evict")
                continue
            if is_told:
                touched.setdefault(number, ())
            if raw is not None:
                key = self.names.of_key(raw)
                keys[number] = {raw: key}
                self.where.setdefault(key, {})[number] = None
                if is_told:
                    self._steps.append(("register", {"r": name, "b": number, "k": key}))
                self.reactions.registered(number, key)

    def _cache_partial_block(
        self, inner: Wrapper, request: Any, block: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.reactions.shares(request):
            return None
        result = inner(request, block, *args, **kwargs)
        self._sync((block,), self._alias(request.request_id), "evict")
        return result

    def _move_block_hashes(self, inner: Wrapper, src_block: Any, dst_block: Any) -> Any:
        result = inner(src_block, dst_block)
        # The copy first: content that is still somewhere keeps its name, and its soft claims.
        self._sync((dst_block,), self._name(), "lose")
        self._sync((src_block,), None, "lose")
        return result

    def _reset_prefix_cache(self, inner: Wrapper, *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        carried = sorted(number for number, keys in self.keys.items() if keys)
        self._sync((self.pool.blocks[number] for number in carried), None, "lose")
        return result


def _is_over(request: Any) -> bool:
    """The request ends, rather than gives way."""
    return bool(request.is_finished())


def _table(pool: Any) -> Mapping[bytes, Any]:
    """vLLM's map from keys to a block, or to several by id (a plain dict before 0.12)."""
    found = pool.cached_block_hash_to_block
    table: Mapping[bytes, Any] = getattr(found, "_cache", found)
    return table


def _entries(pool: Any) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Every key of vLLM's map with the blocks found under it, first registered first."""
    for key, value in _table(pool).items():
        blocks = value.values() if isinstance(value, dict) else (value,)
        yield key, tuple(block.block_id for block in blocks)


def keys_found(observer: PoolObserver) -> dict[str, tuple[int, ...]]:
    """Every content that vLLM's own map finds, with its blocks, first registered first."""
    return {observer.names.of_key(key): blocks for key, blocks in _entries(observer.pool)}
