"""The engine `sglang`, as its entry point names it; nothing of SGLang is imported before `open`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvclaims.checker.engines import first_line
from kvclaims.spec.interface import EngineInfo, EngineMissing, Feature, PoolConfig, Runtime

INSTALL: Final = (
    "make setup (or pip install --no-deps -r requirements/sglang.txt --target DIR/site-packages, "
    "and set KVCLAIMS_SGLANG_PATH to that folder)"
)
"""The name `site-packages` matters: hypothesis reads the source of all modules loaded from
elsewhere before it draws anything, which here takes seconds."""

PATH_VARIABLE: Final = "KVCLAIMS_SGLANG_PATH"
"""Environment: folders, apart by the path separator, in which SGLang and what it needs lie."""

SET_UP: Final = Path(sys.prefix) / "sglang" / "site-packages"
"""Where `make setup` puts them: apart, so that nothing else in the environment sees them."""

SPOKEN: Final = "0.5.2"
"""The version whose interface this adapter speaks; others are refused where theirs differs."""

_KERNELS: Final = "triton"
"""What SGLang declares its kernels for a GPU with: too old for whoever else might find it."""

_TAKES: Final = ("req_to_token_pool", "token_to_kv_pool_allocator", "page_size")


@dataclass(frozen=True)
class RadixEngine:
    """SGLang's `RadixCache`, `TokenToKVPoolAllocator`, `ReqToTokenPool` and KV buffer.

    Its block is one token: with pages of one token the allocator is plain torch, with larger
    ones it runs kernels for a GPU.
    """

    name: str = "sglang"
    block_size: int = 1
    package: str = "sglang"
    faults: Path = Path(__file__).parent / "faults.toml"
    features: frozenset[Feature] = frozenset({Feature.FINGERPRINTS})
    follows_reference: bool = False
    """It drops whole leaves of its tree and makes decoded tokens visible at the end only, so the
    reference beside it would show something else, and both be right."""

    def info(self) -> EngineInfo:
        """Raises `EngineMissing` where SGLang or torch cannot be imported."""
        with _looking_in_path():
            spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise EngineMissing(f"SGLang cannot be imported here. Install it: {INSTALL}")
        if importlib.util.find_spec("torch") is None:
            raise EngineMissing("torch cannot be imported here; SGLang's pools need it: make setup")
        folder = Path(next(iter(spec.submodule_search_locations)))
        return EngineInfo(self.name, _version(folder), str(folder))

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        info = self.info()
        try:
            with _looking_in_path():
                _check_interface(info)
                from kvclaims.bridge.sglang.runtime import RadixRuntime
        except (ImportError, AttributeError, SyntaxError, OSError) as error:
            message = f"SGLang at {info.path} cannot be imported: {first_line(error)}. {INSTALL}"
            raise EngineMissing(message) from error
        return RadixRuntime(self.name, config, run_id, info.version)


@contextmanager
def _looking_in_path() -> Iterator[None]:
    """Meanwhile the folders of `PATH_VARIABLE`, or else that of the set-up, are looked in too,
    after all others."""
    before, known = list(sys.path), set(sys.modules)
    folders = os.environ.get(PATH_VARIABLE, "") or str(SET_UP)
    sys.path += filter(None, folders.split(os.pathsep))
    try:
        yield
    finally:
        sys.path[:] = before
        for name in sys.modules.keys() - known:
            if name.partition(".")[0] == _KERNELS:
                del sys.modules[name]  # SGLang has what it took of it; others do without, or
                # bring their own


def _check_interface(info: EngineInfo) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    takes = inspect.signature(RadixCache.__init__).parameters
    if lacking := [name for name in _TAKES if name not in takes]:
        raise EngineMissing(
            f"SGLang {info.version} at {info.path} has another radix cache than {SPOKEN} (it takes "
            f"no {', '.join(lacking)}). Install {SPOKEN}: {INSTALL}"
        )


def _version(folder: Path) -> str:
    """The version that the package itself states."""
    stated = folder / "version.py"
    if stated.is_file():
        for line in stated.read_text(encoding="utf-8").splitlines():
            if line.startswith("__version__ ="):
                return line.partition("=")[2].strip().strip("'\"")
    return "unknown"


ENGINE: Final = RadixEngine()
