"""Puts a monitor beside a runtime: who is who, step by step, and the whole pool at the end."""

from __future__ import annotations

from collections.abc import Callable

from kvclaims.checker.lending import LendingMonitor
from kvclaims.checker.monitor import Monitor
from kvclaims.spec import pool
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.interface import Lender, MemoryStep, PoolStep, Runtime
from kvclaims.spec.operations import Operation
from kvclaims.spec.vocabulary import Protection


def watch(runtime: Runtime) -> Monitor:
    """A monitor that hears every allocator step of a freshly opened runtime from now on.

    Raises `NotExposed` where the engine tells no steps or shows no pool.
    """
    heard = Heard()
    monitor = heard.monitor_of(runtime)
    heard.passed_on = lambda step: judged(monitor, step)
    return monitor


class Heard:
    """Steps of the allocator and, of a `Lender`, of its memory: in one order.

    They are kept until somebody takes them, or passed on at once."""

    def __init__(self) -> None:
        self.steps: list[PoolStep | MemoryStep] = []
        self.passed_on: Callable[[PoolStep | MemoryStep], None] = self.steps.append

    def __call__(self, step: PoolStep | MemoryStep) -> None:
        self.passed_on(step)

    def monitor_of(self, runtime: Runtime) -> Monitor:
        """The monitor for a freshly opened runtime, whose steps are heard from now on."""
        seen = runtime.snapshot()
        runtime.listen(self)
        if isinstance(runtime, Lender):
            return LendingMonitor(seen, runtime.lending(self))
        return Monitor(seen.facts, seen.null_block)


def judged(monitor: Monitor, step: PoolStep | MemoryStep) -> None:
    """Tell the monitor one step, of whichever kind."""
    if isinstance(step, PoolStep):
        monitor(step)
    elif isinstance(monitor, LendingMonitor):
        monitor.memory(step)


def introduce(monitor: Monitor, operation: Operation) -> None:
    """Before the operation: tell the monitor of the claim or request that it brings."""
    fields = operation.fields
    if operation.op == "declare":
        protection = fields.get("protection", Protection.HARD)
        name = f"{fields['claim']}#{fields.get('generation', 1)}"
        monitor.introduce(CLAIM, name, protection is Protection.HARD)
    elif operation.op == "submit":
        monitor.introduce(pool.REQUEST, fields["request"], fields.get("admit_reuse", True))
