"""Who holds what a transfer brought, could go on, and is never looked at (B11).

A scheduler that stops at the first waiting request for which there is no room does not come to
those behind it.  Where one of these holds blocks, and the first has no room but for them, neither
goes on, and nobody is left whose end could change that.
"""

from __future__ import annotations

from kvclaims.checker.knowledge import Knowledge, KnownRequest
from kvclaims.spec.interface import Observation, RequestView


def stranded(known: Knowledge, seen: Observation) -> str | None:
    """What stands still in words, in a state that a step does not change; None where it is
    something else: the loads of those that hold blocks have all ended, what these need is free,
    and of those that wait without a block some need more than they leave."""
    if known.has_windows:
        return None  # what a request needs is known only at most
    views = {name: view for name, view in seen.requests.items() if view.state != "finished"}
    holders = {name for name, view in views.items() if _holds_what_came(known.requests[name], view)}
    others = [known.requests[name] for name in views if name not in holders]
    if not holders or not others or any(views[r.name].state != "waiting" for r in others):
        return None
    left = seen.free - sum(
        max(0, known.blocks(known.requests[name].length) - len(views[name].blocks))
        for name in holders
    )
    large = [request.name for request in others if _needs(known, request, seen) > left]
    if left < 0 or not large:
        return None
    who, behind = ", ".join(sorted(holders)), ", ".join(large)
    return f"what was loaded for {who} is there, and waits behind {behind}, too large beside it"


def _holds_what_came(request: KnownRequest, view: RequestView) -> bool:
    is_loaded = request.spec.external > 0 and request.loads == 0
    return is_loaded and view.state == "running" and bool(view.blocks)


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
