"""vLLM: its allocator and scheduler in process, and the whole engine.

`kvclaims.bridge.vllm.ClaimScheduler` is the name for `--scheduler-cls`; vLLM is imported when it
is asked for, and not before.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvclaims.bridge.vllm.scheduler import AsyncClaimScheduler, ClaimScheduler

__all__ = ["AsyncClaimScheduler", "ClaimScheduler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvclaims.bridge.vllm import scheduler

    return getattr(scheduler, name)
