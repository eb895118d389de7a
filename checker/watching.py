"""Puts a monitor beside a runtime: who is who, step by step, and the whole pool at the end."""

from __future__ import annotations

from kvclaims.checker.monitor import Monitor
from kvclaims.spec import pool
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.interface import Runtime
from kvclaims.spec.operations import Operation
from kvclaims.spec.vocabulary import Protection


def watch(runtime: Runtime) -> Monitor:
    """A monitor that hears every allocator step of a freshly opened runtime from now on.

    Raises `NotExposed` where the engine tells no steps or shows no pool.
    """
    seen = runtime.snapshot()
    monitor = Monitor(seen.facts, seen.null_block)
    runtime.listen(monitor)
    return monitor


def introduce(monitor: Monitor, operation: Operation) -> None:
    """Before the operation: tell the monitor of the claim or request that it brings."""
    fields = operation.fields
    if operation.op == "declare":
        protection = fields.get("protection", Protection.HARD)
        name = f"{fields['claim']}#{fields.get('generation', 1)}"
        monitor.introduce(CLAIM, name, protection is Protection.HARD)
    elif operation.op == "submit":
        monitor.introduce(pool.REQUEST, fields["request"], fields.get("admit_reuse", True))
