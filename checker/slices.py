"""Finite instances of the composed machine: the whole with some parts or moves left out.

The whole has more states than anyone can visit, because its parts go on by themselves between the
steps that they take together.  A slice keeps the parts that a coupling concerns, and the moves that
lead there; what couples them is as in the whole.  Together the slices fire every move of the whole,
and every guard that couples parts is needed in one of them.  Counts stand in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

from kvclaims.checker.finite import Instance
from kvclaims.spec.composed import RUNTIME, e
from kvclaims.spec.language import Machine, Var, renamed

PARTS: Final = tuple(part.name for part in RUNTIME.parts)

_ANSWERS: Final = ("grow", "defer", "turn_away", "overflow")
_REQUESTS: Final = (
    *_ANSWERS,
    *("admit", "take", "draw", "hit", "follow", "drop", "give_back", "retire", "register"),
)
_BLOCKS: Final = ("cover", "uncover", "forsake", "evict", "lose")
_FILE: Final = tuple(
    f"trace_{name}" for name in ("close", "lose", "cut", "fold", "spoil", "accept")
)
_AWAY: Final = (
    *("offload", "require", "restore", "settle_demoted", "settle_expired", "settle_harmed"),
    *("lose_copy", "lose_device"),
    *(move.name for move in RUNTIME.moves if move.name.startswith("tiers_")),
)
_LENDING: Final = (
    *("fence", "drain"),
    *(move.name for move in RUNTIME.moves if move.name.startswith("elastic_")),
)
_BLAME: Final = ("owners_blame", "owners_hint", "owners_read")
_ENDS: Final = ("release", "demote", "expire")
_LATER: Final = ("later_lose_by_choice", "later_lose_by_fault")


def _slice(
    *parts: str,
    without: Collection[str] = (),
    lent: tuple[int, ...] = (0,),
    hard: tuple[int, ...] = (1,),
    requests: int = 1,
    owners: int = 1,
    layers: int = 0,
    events: int = 3,
    told: bool = True,
    own_lines: bool = False,
    **more: Any,
) -> Instance:
    """Beside the null block, one for each entry of `lent`, which says where it lies; a claim for
    each entry of `hard`, all of them the first owner's; the last owner is the operator.  There is
    a fact about every claim and request, and with `told` no other.  With `own_lines` each move
    writes a line of its own, as happens when each is taken once."""
    blocks = (0, *lent)
    facts = range(1 if told else 2)
    machine = RUNTIME.only(*(parts or PARTS), without=without).machine
    lines: dict[str, tuple[int, ...]] = {}
    if own_lines:
        machine, lines = _with_own_lines(machine)
        events = len(lines)
    return Instance(
        machine,
        {
            "Claim": len(hard),
            "Request": requests,
            "Block": len(blocks),
            "Key": 1,
            "Job": 1,
            "Owner": owners,
            "Tier": 1,
            "Layer": layers,
            "Event": events,
            "Fact": len(facts),
        },
        numbers=more.get("numbers", range(2)),
        limits={
            "trace_times": more.get("meetings", 0),
            "owners_version": more.get("versions", 2),
            "claims_left": more.get("duration", 0),
            # No claim of a slice lives twice: the limit shows who would, and cuts nothing off.
            "claims_generation": 2,
        },
        rigid={
            "null": {(i,): int(i == 0) for i in range(len(blocks))},
            "lent": {(i,): flag for i, flag in enumerate(blocks)},
            "hard": {(i,): flag for i, flag in enumerate(hard)},
            "admit_reuse": {(i,): 1 for i in range(requests)},
            "soft": {(0,): more.get("soft", 0)},
            "operator": {(i,): int(i == owners - 1) for i in range(owners)},
            "owns": {(i, c): int(i == 0) for i in range(owners) for c in range(len(hard))},
            "cap": {(): 1},
            "foreign": {(i,): 0 for i in range(events)},
            "speaks": {(x, c): int(x == 0) for x in facts for c in range(len(hard))},
            "answers": {(x, r): int(x == 0) for x in facts for r in range(requests)},
        },
        choices={"how": (2,), **lines},
    )


def _with_own_lines(machine: Machine) -> tuple[Machine, dict[str, tuple[int, ...]]]:
    """The machine with the event of each move called after the move, and which event that is."""
    lines: dict[str, tuple[int, ...]] = {}
    actions = []
    for action in machine.actions:
        own = Var(f"line of {action.name}", e.of)
        if e in action.params:
            lines[own.name] = (len(lines),)
        actions.append(renamed(action, {e: own}))
    return replace(machine, actions=tuple(actions)), lines


_READING: Final = tuple(f"written_{name}" for name in ("start", "tell", "deliver", "stop"))
_HITS: Final = ("hit", "follow", *_READING)
_LOSING: Final = ("written_withdraw", "written_fail")
_GRANTING: Final = ("draw", "give_back", "forsake")

SLICES: Final[dict[str, Callable[[], Instance]]] = {
    "runtime": lambda: _slice(
        without=(
            *(*_ANSWERS, *_FILE, *_AWAY, *_LENDING, *_BLAME, *_LATER, *_HITS, *_GRANTING),
            *("tick", "renew", "clip", "owners_set_quota"),
        ),
    ),
    "runtime/owners": lambda: _slice(
        "pool", "claims", "owners", without=(*_AWAY, *_LATER, "evict", "lose")
    ),
    "runtime/tiers": lambda: _slice("pool", "claims", "tiers", without=_REQUESTS, hard=(0,)),
    "runtime/hard": lambda: _slice("pool", "claims", "tiers", without=(*_REQUESTS, *_BLOCKS)),
    "runtime/memory": lambda: _slice(
        *("pool", "owners", "elastic"),
        without=(*_BLAME, *_ENDS, "evict", "renew", "close_account", "materialize", "refuse"),
        lent=(0, 1),
        versions=1,
    ),
    "runtime/layers": lambda: _slice("pool", "elastic", lent=(1,), hard=(), layers=1),
    "runtime/jobs": lambda: _slice(
        "pool", "written", "elastic", without=(*_LENDING, *_ANSWERS), hard=(), soft=1
    ),
    "runtime/written": lambda: _slice(
        *("pool", "claims", "written"),
        without=(*_ANSWERS, *_AWAY, *_LATER, *_HITS, *_LOSING, *_GRANTING, "renew", "clip"),
        hard=(0,),
    ),
    "runtime/ends": lambda: _slice(
        *("pool", "claims", "trace"),
        without=(*_REQUESTS, *_BLOCKS, *_FILE, *_AWAY, "clip"),
        duration=1,
        told=False,
        own_lines=True,
    ),
    "runtime/away": lambda: _slice(
        *("pool", "claims", "tiers", "trace"),
        without=(
            *(*_REQUESTS, *_BLOCKS, *_FILE, *_LATER, *_ENDS, "clip", "refuse", "tick"),
            *("tiers_compute", "tiers_reuse", "tiers_let_go", "tiers_discard"),
        ),
        hard=(0,),
        told=False,
        own_lines=True,
    ),
    "runtime/answers": lambda: _slice(
        *("pool", "claims", "trace"),
        without=(*_FILE, *_BLOCKS, *_AWAY, *_LATER, *_GRANTING, "renew", "tick"),
        numbers=range(3),
        told=False,
        own_lines=True,
    ),
    "runtime/losses": lambda: _slice(
        *("pool", "claims", "trace"),
        without=(*_ANSWERS, *_FILE, *_AWAY, *_LATER, *_GRANTING, *_HITS, "renew", "tick", "clip"),
        hard=(0,),
        told=False,
        own_lines=True,
    ),
    "runtime/file": lambda: _slice("pool", "trace", events=2, hard=(), meetings=1),
}
"""The pinned slices."""


def coupling_guards(machine: Machine) -> list[tuple[str, int]]:
    """The guards, by action and position, that no part brought along."""
    return [
        (action.name, index)
        for action in machine.actions
        for index, guard in enumerate(action.guards)
        if not guard.part
    ]
