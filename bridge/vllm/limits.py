"""How many blocks claims of a kind may be granted: by owner, and all of them together (Q2)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Limits:
    """`quotas` by owner and `default` for the others, `cap` for all; None for no limit."""

    quotas: Mapping[str, int] = field(default_factory=dict)
    default: int | None = None
    cap: int | None = None


class Share:
    """Blocks granted to such claims now.  Footprints are added up: two claims on one block count
    twice, for each would keep it without the other."""

    kind: ClassVar[str]
    """What they are called."""
    where: ClassVar[str] = ""
    """Of what the blocks are, where not of the device."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.used: Counter[str] = Counter()
        self.total = 0

    def take(self, owner: str, blocks: int) -> None:
        self.used[owner] += blocks
        self.total += blocks

    def give(self, owner: str, blocks: int) -> None:
        self.take(owner, -blocks)
        if not self.used[owner]:
            del self.used[owner]

    def quota(self, owner: str) -> int | None:
        return self.limits.quotas.get(owner, self.limits.default)

    def room(self, owner: str) -> tuple[int, str]:
        """Blocks that may still be granted to `owner`, and what limits them."""
        quota, cap = self.quota(owner), self.limits.cap
        own = sys.maxsize if quota is None else quota - self.used.get(owner, 0)
        all_ = sys.maxsize if cap is None else cap - self.total
        if own <= all_:
            return max(0, own), f"exceeds the owner's quota of {quota} blocks{self.where}"
        return max(0, all_), f"exceeds the {cap} blocks{self.where} that {self.kind} may have"


class HardShare(Share):
    """What hard claims are granted of the pool."""

    kind = "hard claims"


class TierShare(Share):
    """What offloadable claims are granted of their tier."""

    kind = "offloadable claims"
    where = " in the tier"
