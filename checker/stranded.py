"""Why nobody goes on, where nobody whose end could change that is left (B11).

A scheduler that stops at the first waiting request for which there is no room does not come to
those behind it.  Where one of these holds blocks that a transfer brought, and the first has no room
but for them, neither goes on.  And where a transfer brought nothing, its request may be kept from
the room that is kept for it.
"""

from __future__ import annotations

from kvclaims.checker.knowledge import Knowledge, KnownRequest
from kvclaims.spec.interface import Observation, RequestView


def stranded(known: Knowledge, seen: Observation) -> str | None:
    """What stands still in words, in a state that a step does not change; None where it is
    something else: all loads have ended, and what those that hold blocks still need is free."""
    if known.has_windows:
        return None  # what a request needs is known only at most
    views = {name: view for name, view in seen.requests.items() if view.state != "finished"}
    holders = {name for name, view in views.items() if _holds_what_came(known.requests[name], view)}
    others = [known.requests[name] for name in views if name not in holders]
    if not others or any(views[request.name].state != "waiting" for request in others):
        return None
    left = seen.free - sum(
        max(0, known.blocks(known.requests[name].length) - len(views[name].blocks))
        for name in holders
    )
    if left < 0:
        return None
    needs = {request.name: _needs(known, request, seen) for request in others}
    large = [name for name, need in needs.items() if need > left]
    if holders and large:
        who, behind = ", ".join(sorted(holders)), ", ".join(large)
        return f"what was loaded for {who} is there, and waits behind {behind}, too large beside it"
    failed = [r.name for r in others if _brought_nothing(r) and 2 * needs[r.name] > left]
    if failed and not large:
        return f"{failed[0]}, whose load failed could go on, if no room were kept for it"
    return None


def _holds_what_came(request: KnownRequest, view: RequestView) -> bool:
    is_loaded = request.spec.external > 0 and request.loads == 0
    return is_loaded and view.state == "running" and bool(view.blocks)


def _brought_nothing(request: KnownRequest) -> bool:
    """Whether no block came by the last transfer for it."""
    return request.loads == 0 and len(request.failed) > 0 and request.failed.start == request.hits


def _needs(known: Knowledge, request: KnownRequest, seen: Observation) -> int:
    """Free blocks that a waiting request takes: what it finds and somebody holds is not free."""
    held = {block for view in seen.requests.values() for block in view.blocks}
    full = (request.length - 1) // known.config.block_size
    found = 0
    for key in request.keys[:full]:
        if seen.resident.get(key) not in held:
            break
        found += 1
    return known.blocks(request.length) - found
