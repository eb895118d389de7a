"""The machines by name, and the finite instances that are explored and replayed.

An instance is small enough to be covered completely and large enough that every action fires
in one of its machine's instances.  Their counts of states and transitions stand, written by
hand, in `tests/unit/test_explore.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_type_hints

from kvclaims.checker.finite import Instance
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.claims import CLAIMS
from kvclaims.spec.elastic import ELASTIC
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Machine
from kvclaims.spec.owners import OWNERS
from kvclaims.spec.pool import POOL
from kvclaims.spec.tiers import TIERS
from kvclaims.spec.trace import TRACE
from kvclaims.spec.written import WRITTEN

MACHINES: Final[dict[str, Machine]] = {
    machine.name: machine
    for machine in (CLAIMS, POOL, WRITTEN, OWNERS, TIERS, ELASTIC, TRACE, BLOCKCLAIMS)
}

RELEASED_ONLY: Final = (2,)
"""Of the three ways a claim may end in the pool one stands for all: they differ in name only."""


def claims(claims: int = 1, generations: int = 2, duration: int = 2) -> Instance:
    """Claims do not interact in this machine, so one of each kind covers it."""
    return Instance(
        CLAIMS,
        {"Claim": claims},
        numbers=range(duration + 1),
        limits={"generation": generations, "left": duration},
    )


def pool(
    blocks: int = 2,
    hard: tuple[int, ...] = (1, 1),
    admit_reuse: tuple[int, ...] = (1,),
    keys: int = 1,
) -> Instance:
    """`blocks` usable blocks beside the null block; a claim for each entry of `hard`, a request
    for each entry of `admit_reuse`.  Needs range up to one block more than the pool has."""
    return Instance(
        POOL,
        {"Claim": len(hard), "Request": len(admit_reuse), "Block": blocks + 1, "Key": keys},
        numbers=range(blocks + 2),
        rigid={
            "null": {(i,): int(i == 0) for i in range(blocks + 1)},
            "hard": {(i,): flag for i, flag in enumerate(hard)},
            "admit_reuse": {(i,): flag for i, flag in enumerate(admit_reuse)},
        },
        choices={"how": RELEASED_ONLY},
    )


def blockclaims(
    sizes: tuple[int, ...] = (1, 2, 3), requests: int = 2, growth: int = 3, pool: int = 6
) -> Instance:
    """Size S of the common benchmark unless said otherwise."""
    return Instance(
        BLOCKCLAIMS,
        {"Claim": len(sizes), "Request": requests},
        rigid={
            "size": {(i,): size for i, size in enumerate(sizes)},
            "growth": {(): growth},
            "pool": {(): pool},
        },
    )


def written(
    blocks: int = 1, keys: int = 1, soft: tuple[int, ...] = (1, 0), claims: int = 1
) -> Instance:
    """A job for each entry of `soft`, which says whether it stops reading when it is told."""
    return Instance(
        WRITTEN,
        {"Block": blocks, "Key": keys, "Job": len(soft), "Claim": claims},
        rigid={"soft": {(i,): flag for i, flag in enumerate(soft)}},
    )


def owners(
    owners: int = 3,
    owned_by: tuple[int, ...] = (0,),
    hard: tuple[int, ...] = (1,),
    cap: int = 1,
    blocks: int = 1,
    versions: int = 2,
) -> Instance:
    """The last owner is the operator; claim i is hard if `hard[i]` and belongs to `owned_by[i]`.
    Quotas, grants and terms range up to `blocks`, versions of a claim up to `versions`."""
    return Instance(
        OWNERS,
        {"Owner": owners, "Claim": len(owned_by)},
        numbers=range(blocks + 1),
        limits={"version": versions},
        rigid={
            "operator": {(i,): int(i == owners - 1) for i in range(owners)},
            "owns": {
                (i, claim): int(i == owner)
                for i in range(owners)
                for claim, owner in enumerate(owned_by)
            },
            "hard": {(i,): flag for i, flag in enumerate(hard)},
            "cap": {(): cap},
        },
    )


def tiers(claims: int = 1, tiers: int = 2) -> Instance:
    return Instance(TIERS, {"Claim": claims, "Tier": tiers})


def elastic(
    layers: int = 3, lent: tuple[int, ...] = (1,), jobs: int = 1, claims: int = 0
) -> Instance:
    """Beside the null block, one for each entry of `lent`, which says where it lies."""
    blocks = (0, *lent)
    return Instance(
        ELASTIC,
        {"Layer": layers, "Block": len(blocks), "Job": jobs, "Claim": claims},
        numbers=range(2),
        rigid={
            "lent": {(i,): flag for i, flag in enumerate(blocks)},
            "null": {(i,): int(i == 0) for i in range(len(blocks))},
        },
    )


def trace(
    facts: int = 1, events: int = 3, foreign: int = 0, meetings: int = 2, clock: int = 0
) -> Instance:
    """`events` lines of this run and `foreign` ones of another; the folder meets each line at
    most `meetings` times; the clock shows 0 to `clock`."""
    lines = events + foreign
    return Instance(
        TRACE,
        {"Fact": facts, "Event": lines},
        numbers=range(clock + 1),
        limits={"times": meetings},
        rigid={"foreign": {(i,): int(i >= events) for i in range(lines)}},
    )


PINNED: Final[dict[str, Callable[[], Instance]]] = {
    "claims": claims,
    "pool": pool,
    "pool/soft": lambda: pool(hard=(1, 0)),
    "pool/requests": lambda: pool(hard=(1,), admit_reuse=(1, 0)),
    "pool/keys": lambda: pool(hard=(1,), keys=2),
    "pool/soft-keys": lambda: pool(hard=(0,), keys=2),
    "pool/soft-copies": lambda: pool(hard=(0,), admit_reuse=(1, 1)),
    "blockclaims": blockclaims,
    "written": written,
    "written/keys": lambda: written(keys=2, claims=0),
    "written/blocks": lambda: written(blocks=2, soft=(0,)),
    "owners": owners,
    "owners/quota": lambda: owners(owners=1, owned_by=(0, 0), hard=(1, 1), cap=2, blocks=2),
    "owners/cap": lambda: owners(owners=2, owned_by=(0, 1), hard=(1, 1), versions=1),
    "owners/soft": lambda: owners(owners=2, hard=(0,), cap=0),
    "tiers": tiers,
    "tiers/claims": lambda: tiers(claims=2, tiers=1),
    "elastic": elastic,
    "elastic/blocks": lambda: elastic(layers=2, lent=(1, 1)),
    "elastic/claims": lambda: elastic(layers=1, lent=(0, 1), jobs=0, claims=1),
    "trace": trace,
    "trace/facts": lambda: trace(facts=2, events=2),
    "trace/clock": lambda: trace(events=2, meetings=1, clock=1),
    "trace/foreign": lambda: trace(events=2, foreign=1),
}
"""The instances that every run covers; together they fire every action of every machine."""

_BUILDERS: Final[dict[str, Callable[..., Instance]]] = {
    function.__name__: function
    for function in (claims, pool, blockclaims, written, owners, tiers, elastic, trace)
}


def instance(name: str, settings: Mapping[str, str]) -> Instance:
    """The instance `name`, with `--set` values read as whole numbers or lists of them.

    Raises BadOperation for an unknown instance or setting, and for negative sizes.
    """
    if name not in PINNED:
        raise BadOperation(f"unknown machine {name!r} (known: {', '.join(PINNED)})")
    if not settings:
        return PINNED[name]()
    if name not in _BUILDERS:
        whole = name.split("/", maxsplit=1)[0]
        raise BadOperation(f"{name} takes no settings; set them on {whole}")
    known = _settings_of(_BUILDERS[name])
    values: dict[str, int | tuple[int, ...]] = {}
    for setting, text in settings.items():
        if setting not in known:
            raise BadOperation(f"{name} has no setting {setting!r} (known: {', '.join(known)})")
        numbers = tuple(_number(setting, part) for part in text.split(","))
        if known[setting] is int and len(numbers) != 1:
            raise BadOperation(f"{setting} takes one number, not {text!r}")
        values[setting] = numbers[0] if known[setting] is int else numbers
    return _BUILDERS[name](**values)


def _settings_of(builder: Callable[..., Instance]) -> dict[str, Any]:
    """What a builder can be told, by name: the type is `int`, or a tuple of them."""
    hints = get_type_hints(builder)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _number(setting: str, text: str) -> int:
    if not text.strip().isdigit():
        raise BadOperation(f"{setting} must be a whole number of at least 0, not {text!r}")
    return int(text)
