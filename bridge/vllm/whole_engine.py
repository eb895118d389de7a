"""A whole vLLM on the CPU: scheduler, worker, model runner and real KV tensors.

The engine boots once in a process; each run puts a fresh scheduler with claims, with a pool of
the size asked for, into the live engine core.  The KV tensors stay, larger than any pool.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvclaims.bridge.fingerprint import fingerprints
from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.runtime import VllmRuntime
from kvclaims.bridge.vllm.scheduler import ClaimScheduler
from kvclaims.spec.content import GENERATED_TOKEN
from kvclaims.spec.interface import BadOperation, NotExposed, PoolConfig, RequestSpec

BLOCK_SIZE: Final = 32
"""CPU attention wants a multiple of 32."""

MOST_USABLE: Final = 256
"""The largest pool that a run may ask for."""

_runs: Final = count(1)


@contextmanager
def _no_ffi() -> Iterator[None]:
    """vLLM 0.32 looks into every object of every module for kernels while it boots, and fails on
    the C library object of llvmlite, if something imported that before: keep it out of sight."""
    name = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[name] = hidden


_tier_folder: TemporaryDirectory[str] | None = None


def boot_with_tier() -> None:
    """Give the engine that this process will boot a tier for offloadable claims, whose room each
    run sets.  `BadOperation` once it has booted without."""
    global _tier_folder  # noqa: PLW0603  (one engine, one folder)
    if _tier_folder is None and booted.cache_info().currsize:
        raise BadOperation("the engine of this process has booted without a tier")
    _tier_folder = _tier_folder or TemporaryDirectory(prefix="kvclaims-tier-")


_model: Mapping[str, Any] = setup.MODEL


def boot_with_model(config: Mapping[str, Any]) -> None:
    """Let the engine that this process will boot run a model of this configuration.  `BadOperation`
    once it has booted with another."""
    global _model  # noqa: PLW0603  (one engine, one model)
    if _model != config and booted.cache_info().currsize:
        raise BadOperation("the engine of this process has booted with another model")
    _model = config


@lru_cache(maxsize=1)
def booted() -> Any:
    """The one engine of this process; it stays, for its end would take torch's groups along."""
    tier = {}
    if _tier_folder is not None:
        tier["kv_transfer_config"] = setup.tier_config(_tier_folder.name, 1, "recompute")
    most_tokens = (MOST_USABLE + 2) * BLOCK_SIZE
    with setup.boot_noise(), _no_ffi(), setup.model_folder(most_tokens, _model) as folder:
        from vllm import LLM

        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            seed=0,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=MOST_USABLE + 3,
            max_model_len=most_tokens,
            max_num_batched_tokens=most_tokens,
            max_num_seqs=setup.MOST_RUNNING,
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_log_stats=True,
            **tier,
        )


class WholeDriver:
    """One run inside the live engine core, under a scheduler of this kind."""

    def __init__(
        self,
        config: PoolConfig,
        kind: type = ClaimScheduler,
        load_failure_policy: str = "recompute",
    ) -> None:
        if config.block_size != BLOCK_SIZE:
            raise BadOperation(f"this engine has blocks of {BLOCK_SIZE} tokens")
        if config.usable > MOST_USABLE:
            raise BadOperation(f"this engine has at most {MOST_USABLE} usable blocks")
        if config.host_blocks:
            boot_with_tier()
        self._core = booted().llm_engine.engine_core.engine_core
        transfers = self._core.vllm_config.kv_transfer_config
        if transfers is not None:
            transfers.kv_connector_extra_config["blocks"] = config.host_blocks or 1
            transfers.kv_load_failure_policy = load_failure_policy
        self._run = next(_runs)
        self.scheduler = _fresh_scheduler(self._core, config.usable, kind)
        self._core.scheduler = self.scheduler

    def request(self, spec: RequestSpec, extra_args: dict[str, Any]) -> Any:
        if spec.adapter or spec.modality or spec.external or spec.accepts:
            raise NotExposed(
                "adapters, modality inputs, external tokens and drafts, on this engine"
            )
        return setup.make_request(
            f"{self._run}:{spec.request_id}",  # the model runner remembers ids over runs
            spec.tokens,
            spec.max_new_tokens,
            self._core.request_block_hasher,
            salt=spec.salt,
            only_token=GENERATED_TOKEN,
            extra_args=extra_args,
        )

    def add(self, request: Any) -> None:
        self._check_current()
        self._core.add_request(request)

    def step(self) -> None:
        self._check_current()
        self._core.step_fn()

    def take_over(self) -> None:
        """The engine goes on with this run, after another has had it."""
        self._core.scheduler = self.scheduler

    def dispatch(self) -> None:
        raise NotExposed("this engine runs a step to its end")

    complete = dispatch

    def computed(self, request_id: str) -> int | None:
        request = self.scheduler.requests.get(request_id)
        return 0 if request is None else int(request.num_computed_tokens)

    def loading(self, request_id: str) -> int | None:  # noqa: ARG002
        return None

    def load(self, request_id: str, blocks: int) -> None:
        raise NotExposed(f"the load of {blocks} blocks for {request_id!r}, on this engine")

    def discard(self) -> None:
        raise NotExposed("sleep of a whole engine on a CPU")

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        worker = self._core.model_executor.driver_worker.worker
        return fingerprints(worker.model_runner.kv_caches, blocks)

    def tier_files(self) -> list[Path]:
        """The copies that the tier holds now, the oldest first."""
        if _tier_folder is None:
            return []
        found = Path(_tier_folder.name).glob("*/*.kv")
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))

    def close(self) -> None:
        """Leave the engine idle: every request of this run ends and the worker hears of it."""
        from vllm.v1.request import RequestStatus

        if self._core.scheduler is self.scheduler:
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    def _check_current(self) -> None:
        if self._core.scheduler is not self.scheduler:
            raise BadOperation("another run has taken over the engine")


def _fresh_scheduler(core: Any, usable: int, kind: type) -> Any:
    """A scheduler with claims for this core; it tells the worker what the last one left behind."""
    last = core.scheduler
    cache_config = dataclasses.replace(last.kv_cache_config, num_blocks=usable + 1)
    core.vllm_config.cache_config.num_gpu_blocks = usable + 1
    scheduler: Any = kind(
        vllm_config=core.vllm_config,
        kv_cache_config=cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK_SIZE,
        log_stats=False,
    )
    scheduler.finished_req_ids = set(last.finished_req_ids) | set(last.requests)
    return scheduler


def open_whole(name: str, config: PoolConfig, run_id: str) -> VllmRuntime:
    """A run on the whole engine; it takes the engine over from the run before."""
    return VllmRuntime(name, config, run_id, WholeDriver(config))
