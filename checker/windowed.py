"""The request at the door of a pool with sliding windows or several KV groups (P5, F3).

A hit is the longest run of blocks from position 0 after which every group finds what the next
token reads: all of it with full attention, the blocks inside of the window otherwise.  What a
request needs is known only at most, so only what certainly fits can be foretold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvclaims.checker.knowledge import Knowledge, KnownRequest
from kvclaims.checker.observing import Broken
from kvclaims.spec.content import in_group
from kvclaims.spec.interface import Observation, PoolConfig, PoolStep
from kvclaims.spec.telemetry import Event


def in_window(blocks: int, window: int, size: int) -> range:
    """The positions among the first `blocks` that a token behind them reads (window 0 for all)."""
    first = max(0, blocks * size - window + 1) // size if window else 0
    return range(first, blocks)


def longest_hit(keys: Sequence[str], resident: Collection[str], config: PoolConfig) -> int:
    """How many leading blocks of these contents are a hit."""

    def is_hit(blocks: int) -> bool:
        return all(
            in_group(keys[position], group) in resident
            for group, window in enumerate(config.windows)
            for position in in_window(blocks, window, config.block_size)
        )

    return next(n for n in range(len(keys), -1, -1) if is_hit(n))


def left_behind(
    known: Knowledge,
    before: Observation,
    after: Observation,
    events: Sequence[Event],
    steps: Sequence[PoolStep],
) -> Iterator[Broken]:
    """What a request is said to leave for reuse when it ends can be found, in every group as far as
    a hit on all of it reads (T2): it held it until now, so nothing but a fault took it."""
    made = {step.args["k"] for step in steps if step.action == "register"}
    found = made | before.resident.keys() | after.resident.keys()
    for event in events:
        if event.event != "future_reuse_admitted":
            continue
        request = known.requests[event.request_id or ""]
        full = (len(request.tokens) - 1) // known.config.block_size
        for group, window in enumerate(known.config.windows):
            for position in in_window(full, window, known.config.block_size):
                key = request.keys[position]
                if in_group(key, group) not in found and key not in known.taken:
                    yield (
                        "T2",
                        f"request {request.name} is said to leave its content for reuse, and block "
                        f"{position} of KV group {group} cannot be found",
                    )
                    return


def judged(
    known: Knowledge,
    head: KnownRequest,
    before: Observation,
    after: Observation,
    steps: Sequence[PoolStep],
    events: Sequence[Event],
    *,
    dispatched: bool,
) -> Iterator[Broken]:
    """Compare what the first waiting request met with what it had to, where no running request
    grew in the step.  `dispatched`: the step is not complete."""
    config, view = known.config, after.requests[head.name]
    kinds = {event.event for event in events if event.request_id == head.name}
    if "active_request_admitted" not in kinds:
        if not config.token_budget and known.blocks(head.length) <= before.free:
            yield (
                "F3",
                f"request {head.name} takes {known.blocks(head.length)} blocks at most, "
                f"{before.free} are free, and it was not admitted",
            )
        return
    full = (head.length - 1) // config.block_size
    hit = longest_hit(head.keys[:full], before.resident, config)
    shares = sum(len(in_window(hit, window, config.block_size)) for window in config.windows)
    shared = sum(s.action == "share" and s.args["r"] == head.name for s in steps)
    found = f"request {head.name} finds {hit} leading blocks"
    if shared != shares:
        yield "P5", f"{found}, {shares} to read, and was served {shared}"
    elif dispatched and view.computed != hit * config.block_size:
        yield "P5", f"{found}, and was served {view.computed} tokens"
