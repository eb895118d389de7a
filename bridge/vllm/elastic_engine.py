"""A whole vLLM with elastic capacity: its KV tensors in the twin's memory, claims in force.

`open_elastic` opens a run; what moves the memory is `kvclaims.bridge.vllm.elastic`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.elastic import ElasticController, Policy
from kvclaims.bridge.vllm.engine import ELASTIC
from kvclaims.bridge.vllm.placement import Placement, block_bytes
from kvclaims.bridge.vllm.runtime import VllmRuntime
from kvclaims.bridge.vllm.whole_engine import MOST_USABLE, WholeDriver
from kvclaims.bridge.vmm.driver import Driver
from kvclaims.bridge.vmm.memory import ElasticMemory, Shape, Tell
from kvclaims.bridge.vmm.twin import TwinDriver
from kvclaims.spec.interface import (
    BadOperation,
    Observation,
    PoolConfig,
    PoolSnapshot,
    PoolStep,
    RequestSpec,
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
        longest = form.base_blocks * config.block_size
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


class BaseOnly:
    """Allocator steps as a pool of the base alone takes them, for a listener.

    The lent part is judged by the machine `elastic`, the base by the machine `pool`: steps on
    lent blocks are left out, and what an admission grants counts blocks of the base.
    """

    def __init__(self, listener: Callable[[PoolStep], None], controller: ElasticController) -> None:
        self._listener = listener
        self._controller = controller
        self._operation: list[PoolStep] = []

    def __call__(self, step: PoolStep) -> None:
        self._operation.append(step)
        if step.free is None:
            return
        steps, self._operation = self._operation, []
        lent = self._controller.lent
        taken = Counter(s.args["r"] for s in steps if s.action == "take" and s.args["b"] in lent)
        kept = [_granted(s, taken) for s in steps if s.args.get("b") not in lent]
        if kept:
            facts = {b: found for b, found in step.facts.items() if b not in lent}
            kept[-1] = replace(kept[-1], facts=facts, free=self._controller.base_free())
        for one in kept:
            self._listener(one)


def _granted(step: PoolStep, lent: Counter[str]) -> PoolStep:
    """An admission without the lent blocks that it was granted."""
    if step.action != "admit":
        return step
    count = lent.pop(step.args["r"], 0)
    return replace(step, args={**step.args, "n": step.args["n"] - count})


class ElasticRuntime(VllmRuntime):
    """The runtime interface over an elastic engine: `usable`, and all that is seen, is the base."""

    controller: ElasticController

    def listen(self, listener: Callable[[PoolStep], None]) -> None:
        super().listen(BaseOnly(listener, self.controller))

    def snapshot(self) -> PoolSnapshot:
        seen, lent = super().snapshot(), self.controller.lent
        pairs = {name: _without(held, lent) for name, held in seen.holders.items()}
        found = {key: _without(blocks, lent) for key, blocks in seen.lookup.items()}
        return replace(
            seen,
            queue=_without(seen.queue, lent),
            counter=self.controller.base_free(),
            facts={b: facts for b, facts in seen.facts.items() if b not in lent},
            holders={name: held for name, held in pairs.items() if held},
            lookup={key: blocks for key, blocks in found.items() if blocks},
        )

    def observe(self) -> Observation:
        seen, lent = super().observe(), self.controller.lent
        return replace(seen, resident={k: b for k, b in seen.resident.items() if b not in lent})

    def close(self) -> None:
        super().close()
        self.controller.close()


def _without(blocks: tuple[int, ...], lent: range) -> tuple[int, ...]:
    return tuple(b for b in blocks if b not in lent)


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
    if not lent.isdigit() or int(lent) == 0:
        raise BadOperation(f"{ELASTIC} is a number of blocks above 0, not {lent!r}")
    number = min(int(lent), max(1, MOST_USABLE - config.usable))
    return open_elastic(config, number, run_id=run_id, forced=True)[0]
