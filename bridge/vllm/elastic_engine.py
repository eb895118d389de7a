"""A whole vLLM with elastic capacity: its KV tensors in the twin's memory, claims in force.

`open_elastic` opens a run; what moves the memory is `kvclaims.bridge.vllm.elastic`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.elastic import ElasticController, Policy
from kvclaims.bridge.vllm.engine import ELASTIC
from kvclaims.bridge.vllm.placement import Placement, block_bytes
from kvclaims.bridge.vllm.runtime import VllmRuntime
from kvclaims.bridge.vllm.whole_engine import MOST_USABLE, WholeDriver
from kvclaims.bridge.vmm.driver import Driver
from kvclaims.bridge.vmm.memory import ElasticMemory, Mode, Shape, Tell
from kvclaims.bridge.vmm.twin import TwinDriver
from kvclaims.spec.interface import (
    BadOperation,
    MemoryStep,
    Observation,
    PoolConfig,
    RequestSpec,
    Reserve,
)


class ElasticDriver(WholeDriver):
    """A whole engine with `config.usable` blocks of base and `lent` more, free to generate."""

    def __init__(
        self,
        config: PoolConfig,
        lent: int,
        tell: Tell | None = None,
        *,
        forced: bool = False,
        driver: Driver | None = None,
    ) -> None:
        super().__init__(PoolConfig(config.usable + lent, config.block_size, config.defer_limit))
        self._forced = forced
        self.runner = self._core.model_executor.driver_worker.worker.model_runner
        driver = driver or TwinDriver()
        form = Shape.fit(
            len(self.runner.kv_caches),
            block_bytes(self.runner),
            config.usable,
            lent,
            driver.granularity,
        )
        if (form.base_blocks, form.lent_blocks) != (config.usable, lent):
            raise BadOperation("the seam of these sizes is not between two blocks")
        self.memory = ElasticMemory(driver, form, tell)
        self.placement = Placement(self.runner, self.memory)
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in form.lent:
            pool.free_block_queue.remove(pool.blocks[block])
        pool.num_gpu_blocks = 1 + form.base_blocks
        # No request may come to need more than the base has: it would not fit after a return.
        # The last token that it generates is not computed on, and needs no place.
        longest = form.base_blocks * config.block_size + 1
        self.scheduler.max_model_len = min(self.scheduler.max_model_len, longest)

    def request(self, spec: RequestSpec, extra_args: dict[str, Any]) -> Any:
        if self._forced:
            return super().request(spec, extra_args)
        return setup.make_request(
            f"{self._run}:{spec.request_id}",
            spec.tokens,
            spec.max_new_tokens,
            self._core.request_block_hasher,
            salt=spec.salt,
            extra_args=extra_args,
        )


class ElasticRuntime(VllmRuntime):
    """The runtime interface over an elastic engine: a `Lender` with `config.usable` as its base."""

    controller: ElasticController

    def lending(self, listener: Callable[[MemoryStep], None]) -> Reserve:
        memory = self.controller.memory

        def tell(action: str, args: Mapping[str, Any]) -> None:
            if action not in _OF_THE_ALLOCATOR:
                listener(MemoryStep(action, dict(args)))

        memory.listen(tell)
        longest = self.controller.scheduler.max_model_len
        return Reserve(memory.shape.layers, tuple(self.controller.lent), longest)

    def observe(self) -> Observation:
        lent = tuple(self.controller.lent) if self.controller.memory.mode is Mode.LENT else ()
        return replace(
            super().observe(),
            usable=self.controller.memory.usable_blocks,
            free=self._claims.observer.queue_length(),
            lent=lent,
        )

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """To read what is not mapped would end the process: that is refused instead."""
        shape, mode = self.controller.memory.shape, self.controller.memory.mode
        if not all(0 < b < shape.lent.stop for b in blocks):
            raise BadOperation("no such block")
        gone = [b for b in blocks if b in shape.lent and mode is not Mode.LENT]
        if gone:
            raise RuntimeError(f"blocks {gone} are not mapped")
        return self._driver.fingerprint(blocks)

    def close(self) -> None:
        super().close()
        self.controller.close()


_OF_THE_ALLOCATOR: Final = ("take", "keep", "leave")
"""Steps of the memory's log that the allocator's own steps imply."""


def open_elastic(
    config: PoolConfig,
    lent: int,
    tell: Tell | None = None,
    *,
    policy: Policy = Policy.ELASTIC,
    run_id: str = "elastic",
    forced: bool = False,
    most_chunk: int | None = None,
    driver: Driver | None = None,
) -> tuple[ElasticRuntime, ElasticController]:
    """A run on the whole engine with claims in force and elastic capacity.

    `config.usable` is the base, which hard claims count on.  Closing the run brings all home.
    """
    world = ElasticDriver(config, lent, tell, forced=forced, driver=driver)
    runtime = ElasticRuntime("vllm-engine", config, run_id, world)
    runtime.controller = controller = ElasticController(
        world.scheduler,
        world.placement,
        world.scheduler.enforcer,
        policy=policy,
        most_chunk=most_chunk,
    )
    return runtime, controller


def open_lending(config: PoolConfig, run_id: str, lent: str) -> ElasticRuntime:
    """The engine `vllm-engine` with elastic capacity on: programs see the base alone.

    `lent` blocks as text, fewer where the engine has no more; `BadOperation` if it is no number.
    """
    if not re.fullmatch("0*[1-9][0-9]{0,8}", lent):
        raise BadOperation(f"{ELASTIC} is a number of blocks above 0, not {lent[:20]!r}")
    number = min(int(lent), max(1, MOST_USABLE - config.usable))
    return open_elastic(config, number, run_id=run_id, forced=True)[0]
