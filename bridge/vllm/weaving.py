"""vLLM's classes, woven so that every pool made in this process is seen, whoever makes it.

Methods of the allocator, the managers and the scheduler are wrapped on their classes, and writes
to the fields of blocks are noticed where they happen, so nothing has to be attached to a live
object and no file of vLLM changes.  An *operation* is the outermost call of such a method: what
it does inside is the engine's business until it returns.  A write outside every operation is
therefore not the engine's: a test built that state by hand.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Final, Protocol

CORE: Final = "vllm.v1.core."

BLOCKS: Final = f"{CORE}kv_cache_utils"
POOL: Final = f"{CORE}block_pool"
OPERATING: Final = (
    f"{CORE}single_type_kv_cache_manager",
    f"{CORE}kv_cache_coordinator",
    f"{CORE}kv_cache_manager",
    f"{CORE}sched.scheduler",
    f"{CORE}sched.async_scheduler",
    "vllm.v1.hisparse.coordinator",
)
"""Modules all of whose classes operate on pools."""

FIELDS: Final = frozenset({"ref_cnt", "_block_hash", "next_free_block"})
"""Fields of a block that rules speak of."""

Handler = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Makes the call (function, owner, args, kwargs) itself and judges what it did."""


class Watcher(Protocol):
    """Who is told what the woven classes do."""

    handlers: Mapping[str, Handler]
    """`Class.method` → what surrounds each call of it, at any depth."""

    def pool_made(self, pool: Any) -> Any:
        """A pool exists; the answer is given back with every write to one of its blocks."""

    def manager_made(self, manager: Any) -> None:
        """A manager of one KV group exists."""

    def entering(self, name: str, owner: Any) -> None:
        """An operation begins."""

    def leaving(self, name: str, args: tuple[Any, ...], failed: bool) -> None:
        """The operation has ended; `failed` if it raised."""

    def wrote(self, check: Any, block: Any, field: str, before: Any, inside: bool) -> None:
        """A field of a block changed, inside an operation or not."""

    def mapped(self, table: Any, key: bytes, inside: bool) -> None:
        """The entry of `key` in a hash map may have changed."""


class Weaver:
    """Weaves modules as they are imported, once for a process."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._depth = 0
        self._checks: dict[int, Any] = {}
        """id of a block → the check of its pool; an id is taken out before its pool dies."""
        self._woven: set[str] = set()

    def install(self) -> None:
        """Weave what is imported already, and everything else when it will be."""
        for name in (BLOCKS, POOL, *OPERATING):
            if name in sys.modules:
                self.weave(sys.modules[name])
        sys.meta_path.insert(0, _Finder(self))

    def weave(self, module: ModuleType) -> None:
        if module.__name__ in self._woven:
            return
        self._woven.add(module.__name__)
        for cls in [v for v in vars(module).values() if isinstance(v, type)]:
            if cls.__module__ == module.__name__ and not issubclass(cls, tuple):
                self._weave_class(module.__name__, cls)

    def _weave_class(self, module: str, cls: type) -> None:
        if module == BLOCKS:
            if cls.__name__ == "KVCacheBlock":
                self._weave_block(cls)
            return
        if cls.__name__ == "BlockHashToBlockMap":
            for method in ("insert", "pop"):
                if hasattr(cls, method):
                    setattr(cls, method, self._mapping(getattr(cls, method)))
            return
        for name, value in list(vars(cls).items()):
            if _is_operation(name, value):
                setattr(cls, name, self._operation(f"{cls.__name__}.{name}", value))
        if cls.__name__ == "BlockPool":
            setattr(cls, "__init__", self._made(vars(cls)["__init__"], self._pool_made))  # noqa: B010
        elif cls.__name__ == "SingleTypeKVCacheManager":
            made = self._watcher.manager_made
            setattr(cls, "__init__", self._made(vars(cls)["__init__"], made))  # noqa: B010

    def _operation(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        watcher = self._watcher
        handler = watcher.handlers.get(name)

        @functools.wraps(function)
        def call(*given: Any, **kwargs: Any) -> Any:
            if (self._depth and handler is None) or not given:  # `self` may come by keyword
                return function(*given, **kwargs)
            owner, args = given[0], given[1:]
            outermost = self._depth == 0
            if outermost:
                watcher.entering(name, owner)
            self._depth += 1
            failed = True
            try:
                if handler is None:
                    result = function(owner, *args, **kwargs)
                else:
                    result = handler(function, owner, args, kwargs)
                failed = False
                return result
            finally:
                self._depth -= 1
                if outermost:
                    watcher.leaving(name, args, failed)

        return call

    def _made(self, init: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
        @functools.wraps(init)
        def made(owner: Any, *args: Any, **kwargs: Any) -> None:
            self._depth += 1
            try:
                init(owner, *args, **kwargs)
            finally:
                self._depth -= 1
            tell(owner)

        return made

    def _pool_made(self, pool: Any) -> None:
        check = self._watcher.pool_made(pool)
        ids = [id(block) for block in pool.blocks]
        self._checks.update(dict.fromkeys(ids, check))
        weakref.finalize(pool, self._forget, ids).atexit = False

    def _forget(self, ids: Sequence[int]) -> None:
        for number in ids:
            self._checks.pop(number, None)

    def check_of(self, block: Any) -> Any:
        """The check of the pool that a block belongs to, None for a block of no pool."""
        return self._checks.get(id(block))

    def _weave_block(self, cls: type) -> None:
        checks, wrote, write = self._checks, self._watcher.wrote, object.__setattr__

        def noticed(block: Any, name: str, value: Any) -> None:
            if name in FIELDS and (check := checks.get(id(block))) is not None:
                before = getattr(block, name)
                write(block, name, value)
                wrote(check, block, name, before, self._depth > 0)
            else:
                write(block, name, value)

        setattr(cls, "__setattr__", noticed)  # noqa: B010

    def _mapping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(owner: Any, key: bytes, *args: Any, **kwargs: Any) -> Any:
            result = function(owner, key, *args, **kwargs)
            self._watcher.mapped(owner, key, self._depth > 0)
            return result

        return call


def _is_operation(name: str, value: object) -> bool:
    """Whether a call of it begins and ends in one go: what a generator does comes later."""
    return (
        isinstance(value, FunctionType)
        and not name.startswith("__")
        and not inspect.isgeneratorfunction(value)
        and not inspect.iscoroutinefunction(value)
    )


class _Finder(MetaPathFinder):
    """Lets the others find the module, and weaves it once it was executed."""

    def __init__(self, weaver: Weaver) -> None:
        self._weaver = weaver

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (BLOCKS, POOL, *OPERATING):
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._weaver)
                    return spec
        return None


class _Loader(Loader):
    def __init__(self, inner: Any, weaver: Weaver) -> None:
        self._inner = inner
        self._weaver = weaver

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._weaver.weave(module)

    def __getattr__(self, name: str) -> Any:
        """Whatever else loaders can do (source, resources), the real one does."""
        return getattr(self._inner, name)
