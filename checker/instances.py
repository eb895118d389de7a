"""The machines by name, and the finite instances that are explored and replayed.

An instance is small enough to be covered completely and large enough that every action fires
in one of its machine's instances.  Their counts of states and transitions stand, written by
hand, in `tests/unit/test_explore.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvclaims.checker.finite import Instance
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.claims import CLAIMS
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Machine
from kvclaims.spec.pool import POOL

MACHINES: Final[dict[str, Machine]] = {m.name: m for m in (CLAIMS, POOL, BLOCKCLAIMS)}

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


PINNED: Final[dict[str, Callable[[], Instance]]] = {
    "claims": claims,
    "pool": pool,
    "pool/soft": lambda: pool(hard=(1, 0)),
    "pool/requests": lambda: pool(hard=(1,), admit_reuse=(1, 0)),
    "pool/keys": lambda: pool(hard=(1,), keys=2),
    "pool/soft-keys": lambda: pool(hard=(0,), keys=2),
    "pool/soft-copies": lambda: pool(hard=(0,), admit_reuse=(1, 1)),
    "blockclaims": blockclaims,
}
"""The instances that every run covers; together they fire every action of every machine."""

_BUILDERS: Final[dict[str, Callable[..., Instance]]] = {
    "claims": claims,
    "pool": pool,
    "blockclaims": blockclaims,
}
_SETTINGS: Final[Mapping[str, Mapping[str, type]]] = {
    "claims": {"claims": int, "generations": int, "duration": int},
    "pool": {"blocks": int, "hard": tuple, "admit_reuse": tuple, "keys": int},
    "blockclaims": {"sizes": tuple, "requests": int, "growth": int, "pool": int},
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
    known = _SETTINGS[name]
    values: dict[str, int | tuple[int, ...]] = {}
    for setting, text in settings.items():
        if setting not in known:
            raise BadOperation(f"{name} has no setting {setting!r} (known: {', '.join(known)})")
        numbers = tuple(_number(setting, part) for part in text.split(","))
        if known[setting] is int and len(numbers) != 1:
            raise BadOperation(f"{setting} takes one number, not {text!r}")
        values[setting] = numbers if known[setting] is tuple else numbers[0]
    return _BUILDERS[name](**values)


def _number(setting: str, text: str) -> int:
    if not text.strip().isdigit():
        raise BadOperation(f"{setting} must be a whole number of at least 0, not {text!r}")
    return int(text)
