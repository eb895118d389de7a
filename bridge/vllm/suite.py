"""A monitor over every vLLM pool of a process: what calls promise, and what steps have in flight.

`SuiteMonitor` is the watcher behind the pytest plugin.  Beside each pool's own check it judges
what single calls must do (a touch adds exactly one reference, an ended request leaves no table)
and what spans several of them (a hash whose content no step computes, a block handed out while
a load still writes it, a soft reader that is not told).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvclaims.bridge.vllm.poolcheck import Broken, HandBuilt, PoolCheck, own_keys, shown
from kvclaims.bridge.vllm.weaving import Handler, Weaver

RULES: Final = frozenset({"B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B9", "B10"})
"""Rules that a pool can be judged by without claims and without a driver of its own."""

PROBED: Final = {
    "unpin_blocks": "B5 for soft readers: blocks read after they were freed",
    "cache_partial_block": "B3 for partial keys",
    "move_block_hashes": "B3 for keys that move with a copy",
    "take_events": "B8",
}
"""Methods of a pool, and what cannot be judged in a version that lacks them."""

_GROUP_BYTES: Final = 4


def unobservable() -> tuple[str, ...]:
    """What the imported vLLM gives no occasion to judge, for want of a method."""
    from vllm.v1.core.block_pool import BlockPool

    return tuple(what for method, what in PROBED.items() if not hasattr(BlockPool, method))


@dataclass
class Tally:
    """What was watched between two looks (one test, or all of them)."""

    operations: int = 0
    calls: int = 0
    pools: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)
    hand_built: list[HandBuilt] = field(default_factory=list)


class _Steps:
    """What one scheduler has scheduled and admitted."""

    def __init__(self) -> None:
        self.known_running: set[str] = set()
        self.loads: dict[str, frozenset[int]] = {}
        """Requests whose blocks a transfer writes → those blocks."""
        self.registered: dict[bytes, tuple[str, int]] = {}
        """Keys registered by the step being scheduled for tokens that it was to compute."""
        self.scheduling = False


class SuiteMonitor:
    """Watches all pools of the process (`weaving.Watcher`)."""

    def __init__(self, rules: frozenset[str] = RULES) -> None:
        self._rules = rules
        self._checks: weakref.WeakKeyDictionary[Any, PoolCheck] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._dirty: dict[int, PoolCheck] = {}
        self._active: dict[int, PoolCheck] = {}
        """Pools made or written to since the last look; the others cost nothing."""
        self._inner: list[str] = []
        self._scheduler: Any = None
        self._tally = Tally()
        self.handlers: Mapping[str, Handler] = {
            "BlockPool.get_new_blocks": self._get_new_blocks,
            "BlockPool.touch": self._touch,
            "BlockPool.free_blocks": self._free_blocks,
            "BlockPool.unpin_blocks": self._free_blocks,
            "BlockPool.evict_blocks": self._evict_blocks,
            "BlockPool.cache_full_blocks": self._cache_full_blocks,
            "BlockPool.reset_prefix_cache": self._reset_prefix_cache,
            "KVCacheManager.free": self._free_request,
            "KVCacheManager.get_computed_blocks": self._get_computed_blocks,
            "KVCacheManager.allocate_slots": self._allocate_slots,
            "Scheduler.schedule": self._schedule,
            "Scheduler._update_from_kv_xfer_finished": self._transfers_finished,
        }
        self.weaver = Weaver(self)

    # -- what the weaver tells ----------------------------------------------------------------

    def pool_made(self, pool: Any) -> PoolCheck:
        check = PoolCheck(pool, self._rules)
        self._checks[pool] = check
        self._active[id(check)] = check
        self._tally.pools += 1
        return check

    def manager_made(self, manager: Any) -> None:
        check = self._check(getattr(manager, "block_pool", None))
        if check is not None:
            check.managers.add(manager)

    def entering(self, name: str, owner: Any) -> None:
        self._inner = []
        self._tally.operations += 1
        for check in self._active.values():
            check.entered()
        if name == "Scheduler.schedule":
            self._running_by_hand(owner)

    def leaving(self, name: str, args: tuple[Any, ...], failed: bool) -> None:
        shown_call = f"{name}({_brief(args)})" + (" raised" if failed else "")
        dirty, self._dirty = self._dirty, {}
        self._active.update(dirty)
        for check in dirty.values():
            check.operations.append(shown_call)
            check.operations.extend(f"    {line}" for line in self._inner)
        for check in self._active.values():
            check.judge(name, failed)

    def wrote(self, check: PoolCheck, block: Any, name: str, before: Any, inside: bool) -> None:
        check.wrote(block, name, before, inside)
        self._dirty[id(check)] = check

    def mapped(self, table: Any, key: bytes, inside: bool) -> None:
        for check in [*self._active.values()]:
            if check.pool is None or check.pool.cached_block_hash_to_block is not table:
                continue
            if inside:
                check.keys_touched.add(key)
                self._dirty[id(check)] = check
            else:
                check.key_by_hand(key)

    # -- what tests ask ------------------------------------------------------------------------

    def take(self, audit: bool) -> Tally:
        """What was watched since the last call; `audit` compares whole pools first."""
        tally, self._tally = self._tally, Tally()
        active = dict(self._active)
        if audit:
            self._active, self._dirty = {}, {}
        for check in active.values():
            if audit:
                check.audit()
            tally.broken += check.broken
            tally.hand_built += check.hand_built
            tally.judged += check.judged
            check.broken, check.hand_built, check.judged = [], [], Counter()
        return tally

    # -- calls of the pool ---------------------------------------------------------------------

    def _check(self, pool: Any) -> PoolCheck | None:
        try:
            return self._checks.get(pool)
        except TypeError:  # a mock that has no hash
            return None

    def _owner(self, block: Any) -> PoolCheck | None:
        check: PoolCheck | None = self.weaver.check_of(block)
        return check

    def _told(self, line: str) -> None:
        self._tally.calls += 1
        self._inner.append(line)

    def _get_new_blocks(
        self, call: Any, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        check = self._check(pool)
        watched = set(getattr(pool, "_reuse_watchers", ()))
        blocks = call(pool, *args, **kwargs)
        self._told(f"get_new_blocks -> {_ids(blocks)}")
        if check is None:
            return blocks
        where = "BlockPool.get_new_blocks"
        loads = self._loading(pool)
        for block in blocks:
            number = block.block_id
            if block.is_null and check.asks("B6"):
                check.report("B6", "the null block is handed out", where, number)
            if check.asks("B2") and block.ref_cnt != 1:
                message = f"block {number} is handed out with ref {block.ref_cnt}"
                check.report("B2", message, where, number)
            if check.asks("B3") and own_keys(pool, block):
                check.report("B3", f"block {number} is handed out with a hash", where, number)
            if check.asks("B5"):
                self._still_used(check, number, number in watched, loads)
        return blocks

    def _still_used(
        self, check: PoolCheck, number: int, watched: bool, loads: Mapping[int, str]
    ) -> None:
        where = "BlockPool.get_new_blocks"
        if watched and number in check.pool._reuse_watchers:
            message = f"block {number} is handed out, its soft reader was not told"
            check.report("B5", message, where, number)
        elif number in loads:
            message = f"block {number} is handed out while the load of {loads[number]!r} writes it"
            check.report("B5", message, where, number)
        elif not watched and (holders := check.holders_of(number)):
            message = f"block {number} is handed out while {holders[0]!r} holds it"
            check.report("B5", message, where, number)

    def _touch(self, call: Any, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._counted(call, pool, args, kwargs, "touch", 1)

    def _free_blocks(
        self, call: Any, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._counted(call, pool, args, kwargs, call.__name__, -1)

    def _counted(
        self,
        call: Any,
        pool: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        sign: int,
    ) -> Any:
        """Each block given must have one reference more or less afterwards."""
        given = args[0] if args else next(iter(kwargs.values()))
        blocks = list(given)  # a generator is read once, and vLLM reads it
        if args:
            args = (blocks, *args[1:])
        else:
            kwargs = {key: (blocks if value is given else value) for key, value in kwargs.items()}
        before = {id(b): (b, b.ref_cnt) for b in blocks}
        times = Counter(id(b) for b in blocks)
        result = call(pool, *args, **kwargs)
        self._told(f"{name} {_ids(blocks)}")
        for place, (block, ref) in before.items():
            check = self._owner(block)
            if check is None:
                self._fake(pool, block, name)
            elif not block.is_null and check.asks("B2"):
                expected = ref + sign * times[place]
                if block.ref_cnt != expected:
                    message = (
                        f"ref of block {block.block_id} went from {ref} to {block.ref_cnt}, "
                        f"{expected} was due"
                    )
                    check.report("B2", message, f"BlockPool.{name}", block.block_id)
        return result

    def _fake(self, pool: Any, block: Any, name: str) -> None:
        check = self._check(pool)
        if check is not None and not getattr(block, "is_null", False):
            check.by_hand(f"{name} of block {getattr(block, 'block_id', '?')} of no pool")

    def _evict_blocks(
        self, call: Any, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = call(pool, *args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()))
        self._told(f"evict_blocks {sorted(given)}")
        check = self._check(pool)
        if check is not None and check.asks("B3"):
            for number in given:
                if own_keys(pool, pool.blocks[number]):
                    message = f"block {number} was evicted and keeps a hash"
                    check.report("B3", message, "BlockPool.evict_blocks", number)
        return result

    def _cache_full_blocks(
        self, call: Any, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size")
        given = dict(zip((*names, "kv_cache_group_id"), args, strict=False)) | kwargs
        first, last = given["num_cached_blocks"], given["num_full_blocks"]
        blank = {
            i
            for i in range(first, min(last, len(given["blocks"])))
            if given["blocks"][i].block_hash is None
        }
        result = call(pool, *args, **kwargs)
        check = self._check(pool)
        if check is None:
            return result
        request, size = given["request"], given["block_size"]
        hashed = [i for i in sorted(blank) if given["blocks"][i].block_hash is not None]
        if hashed:
            ids = [given["blocks"][i].block_id for i in hashed]
            self._told(f"cache_full_blocks {request.request_id} {ids}")
        for i in hashed:
            self._registered(check, request, given["blocks"][i], i, size)
        return result

    def _registered(
        self, check: PoolCheck, request: Any, block: Any, position: int, size: int
    ) -> None:
        """Block `position` of the request has become visible (B4)."""
        number, end = block.block_id, (position + 1) * size
        where = "BlockPool.cache_full_blocks"
        if self._owner(block) is None:
            check.by_hand(f"block {number} of no pool hashed")
            return
        if not check.asks("B4"):
            return
        ratio = size // check.pool.hash_block_size if hasattr(check.pool, "hash_block_size") else 1
        place = (position + 1) * ratio - 1
        hashes = request.block_hashes
        if end > request.num_tokens or place >= len(hashes):
            message = f"block {number} is hashed for tokens up to {end} of {request.num_tokens}"
            check.report("B4", message, where, number)
        elif bytes(block.block_hash)[:-_GROUP_BYTES] != bytes(hashes[place]):
            message = f"block {number} of {request.request_id!r} carries another content's hash"
            check.report("B4", message, where, number)
        elif block.ref_cnt == 0:
            message = f"block {number} is hashed for {request.request_id!r}, and nobody holds it"
            check.report("B4", message, where, number)
        steps = self._steps_of(self._scheduler)
        if steps is not None and steps.scheduling and end > request.num_computed_tokens:
            steps.registered[block.block_hash] = (request.request_id, number)

    def _reset_prefix_cache(
        self, call: Any, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        done = call(pool, *args, **kwargs)
        self._told(f"reset_prefix_cache -> {done}")
        check = self._check(pool)
        if check is not None and done:
            check.cleared("BlockPool.reset_prefix_cache")
        return done

    # -- calls of the manager ------------------------------------------------------------------

    def _free_request(
        self, call: Any, manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        request = args[0] if args else kwargs["request"]
        managers = _group_managers(manager)
        held: Counter[int] = Counter()
        before: dict[int, tuple[Any, int]] = {}
        for group in managers:
            for block in group.req_to_blocks.get(request.request_id, ()):
                if not block.is_null:
                    held[id(block)] += 1
                    before[id(block)] = (block, block.ref_cnt)
        result = call(manager, *args, **kwargs)
        for group in managers:
            check = self._check(group.block_pool)
            left = group.req_to_blocks.get(request.request_id)
            if check is not None and check.asks("B7") and left:
                message = f"{request.request_id!r} ended, its table still names {_ids(left)}"
                check.report("B7", message, "KVCacheManager.free")
        if not _returns_at_once(managers):
            return result
        for place, (block, ref) in before.items():
            check = self._owner(block)
            if check is not None and check.asks("B7") and block.ref_cnt > ref - held[place]:
                message = f"{request.request_id!r} ended and keeps its reference to {_ids([block])}"
                check.report("B7", message, "KVCacheManager.free", block.block_id)
        return result

    def _get_computed_blocks(
        self, call: Any, manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What is served as a hit carries the request's own hash at that position (B4, P5)."""
        result = call(manager, *args, **kwargs)
        request = args[0] if args else kwargs["request"]
        found = getattr(result[0] if isinstance(result, tuple) else result, "blocks", ())
        for group, blocks in zip(_group_managers(manager), found, strict=False):
            check = self._check(group.block_pool)
            same = getattr(group.block_pool, "hash_block_size", None) == group.block_size
            if check is None or not same:
                continue
            suffix = group.kv_cache_group_id.to_bytes(_GROUP_BYTES, "big")
            for position, block in enumerate(blocks):
                if block.is_null or position >= len(request.block_hashes) or not check.asks("B4"):
                    continue
                key = bytes(request.block_hashes[position]) + suffix
                if key not in own_keys(group.block_pool, block):
                    message = (
                        f"{request.request_id!r} is served block {block.block_id} at position "
                        f"{position}, which does not carry {shown(key)}"
                    )
                    where = "KVCacheManager.get_computed_blocks"
                    check.report("B4", message, where, block.block_id)
        return result

    def _allocate_slots(
        self, call: Any, manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        blocks = call(manager, *args, **kwargs)
        steps = self._steps_of(self._scheduler)
        if blocks is not None and kwargs.get("delay_cache_blocks") and steps is not None:
            request = args[0] if args else kwargs["request"]
            groups = _group_managers(manager)
            steps.loads[request.request_id] = frozenset(
                block.block_id
                for group in groups
                for block in group.req_to_blocks.get(request.request_id, ())
                if block.ref_cnt == 1 and block.block_hash is None and not block.is_null
            )
        return blocks

    # -- calls of the scheduler ----------------------------------------------------------------

    def _schedule(
        self, call: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        steps = self._steps.setdefault(scheduler, _Steps())
        outer, self._scheduler = self._scheduler, scheduler
        steps.scheduling, steps.registered = True, {}
        try:
            output = call(scheduler, *args, **kwargs)
        finally:
            steps.scheduling = False
            self._scheduler = outer
        steps.known_running = {r.request_id for r in scheduler.running}
        self._computed(scheduler, steps, output)
        return output

    def _computed(self, scheduler: Any, steps: _Steps, output: Any) -> None:
        """Every hash that the step made visible is computed by the step (B4)."""
        pool = scheduler.kv_cache_manager.block_pool
        check = self._check(pool)
        if check is None:
            return
        for key, (request, number) in steps.registered.items():
            if not check.asks("B4") or request in output.num_scheduled_tokens:
                continue
            if key in own_keys(pool, pool.blocks[number]):
                message = (
                    f"{shown(key)} in block {number} is visible, and the step that was to "
                    f"compute it left {request!r} out"
                )
                check.report("B4", message, "Scheduler.schedule", number)

    def _transfers_finished(
        self, call: Any, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result_of = args[0] if args else next(iter(kwargs.values()))
        steps = self._steps_of(scheduler)
        if steps is not None:
            for request in getattr(result_of, "finished_recving", None) or ():
                steps.loads.pop(request, None)
        return call(scheduler, *args, **kwargs)

    def _running_by_hand(self, scheduler: Any) -> None:
        steps = self._steps.setdefault(scheduler, _Steps())
        manager = getattr(scheduler, "kv_cache_manager", None)
        check = self._check(getattr(manager, "block_pool", None))
        if check is None:
            return
        groups = _group_managers(manager)
        for request in scheduler.running:
            name = request.request_id
            if name in steps.known_running:
                continue
            steps.known_running.add(name)
            if not any(group.req_to_blocks.get(name) for group in groups):
                check.by_hand(f"request {name!r} put into `running` without blocks")

    def _steps_of(self, scheduler: Any) -> _Steps | None:
        return None if scheduler is None else self._steps.get(scheduler)

    def _loading(self, pool: Any) -> dict[int, str]:
        steps = self._steps_of(self._scheduler)
        if steps is None or self._scheduler.kv_cache_manager.block_pool is not pool:
            return {}
        return {block: name for name, blocks in steps.loads.items() for block in blocks}


def _group_managers(manager: Any) -> tuple[Any, ...]:
    """The managers of the KV groups behind a `KVCacheManager`."""
    coordinator = getattr(manager, "coordinator", None)
    return tuple(getattr(coordinator, "single_type_managers", ()))


def _returns_at_once(managers: Iterable[Any]) -> bool:
    """Whether an ended request's references come back with `free`: groups that gather them in a
    way of their own may keep some until workers have finished with them."""
    gathers = "pop_blocks_for_free"
    return all(
        getattr(type(m), gathers, None) is getattr(_base(m), gathers, None) for m in managers
    )


def _base(manager: Any) -> type | None:
    named = (c for c in type(manager).__mro__ if c.__name__ == "SingleTypeKVCacheManager")
    return next(named, None)


def _ids(blocks: Iterable[Any]) -> list[Any]:
    return [getattr(block, "block_id", "?") for block in blocks]


def _brief(args: tuple[Any, ...]) -> str:
    """The arguments of a call that name something, in a few words."""
    words = []
    for value in args:
        if hasattr(value, "request_id"):
            words.append(str(value.request_id))
        elif isinstance(value, int | str):
            words.append(repr(value))
        elif isinstance(value, list | tuple) and value and hasattr(value[0], "block_id"):
            words.append(str(_ids(value)))
        else:
            words.append("…")
    return ", ".join(words)
