"""A pytest plugin: vLLM's own tests with claims in force on every scheduler that they make.

    PYTHONPATH=SDIST VLLM_TARGET_DEVICE=cpu pytest --noconftest -p kvclaims.bridge.vllm.stand_in \
        SDIST/tests/v1/core/test_scheduler.py

Schedulers of several KV groups stay vLLM's own, as they do in a server; the last line says how many
there were of each.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any, Final

from kvclaims.spec.telemetry import Recorder

made: Final[Counter[str]] = Counter()


def pytest_configure() -> None:
    """Put the stand-ins where the tests import vLLM's classes from."""
    from vllm.v1.core.sched import async_scheduler, scheduler

    from kvclaims.bridge.vllm.scheduler import AsyncClaimScheduler, ClaimScheduler

    def in_force(base: type) -> type:
        class InForce(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if self.enforcer is not None:  # a class that inherits from both stand-ins
                    return
                groups = len(self.kv_cache_config.kv_cache_groups)
                made["with claims" if groups == 1 else "with several KV groups"] += 1
                if groups == 1:
                    ticks = count()
                    usable = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
                    self.enforce(Recorder("own", "own", usable, lambda: next(ticks), keep=100))

        InForce.__name__ = InForce.__qualname__ = base.__name__
        return InForce

    scheduler.Scheduler = in_force(ClaimScheduler)
    async_scheduler.AsyncScheduler = in_force(AsyncClaimScheduler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counted = ", ".join(f"{n} {what}" for what, n in sorted(made.items())) or "none"
    terminalreporter.write_line(f"schedulers: {counted}")
