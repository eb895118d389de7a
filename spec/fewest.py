"""The fewest claims whose end frees enough: the search behind F4's blame.

What a set of claims frees is a sum over parts, each free once all the claims that hold it have
ended.  To free enough by the fewest claims is hard in general (it is a covering problem turned
round), so the search is by branch and bound, in an order that meets the first set of ids first,
and stops after a number of steps that depends on nothing but the problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LIMIT: Final = 4_000
"""Steps of the search before it settles for a set that is minimal by inclusion."""


@dataclass(frozen=True)
class Gains:
    """What ending claims frees, in blocks.

    `alone` is freed by ending that claim, whatever else ends; `together` once all the claims of
    a set have ended, and may be negative.
    """

    alone: Mapping[str, int]
    together: Mapping[frozenset[str], int]

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(sorted(self.alone))


def fewest(gains: Gains, wanted: int, limit: int = LIMIT) -> tuple[str, ...]:
    """The first of the smallest sets of claims, in order of ids, that frees `wanted` blocks.

    Past `limit` steps: a set that frees them and of which no claim can be spared.  The same
    gains have the same answer.  Raises ValueError where the end of every claim is not enough.
    """
    search = _Search(gains, wanted, limit)
    if search.freed(search.everyone) < wanted:
        raise ValueError("not even the end of every claim frees enough")
    spare = search.by_sparing()
    for size in range(1, spare.bit_count() + 1):
        found = search.of_size(size)
        if found is not None:
            return search.named(found)
        if search.exhausted:
            break
    return search.named(spare)


_UNIT: Final = 1 << 20
"""Shares are counted in this part of a block, rounded up, so that whole numbers bound them."""


class _Search:
    """Sets of claims are bit masks; bit i is the claim at position i in order of ids."""

    def __init__(self, gains: Gains, wanted: int, limit: int) -> None:
        self.claims = gains.claims
        self.wanted = wanted
        self.left = limit
        self.everyone = (1 << len(self.claims)) - 1
        bit = {claim: 1 << i for i, claim in enumerate(self.claims)}
        self.alone = [gains.alone[claim] for claim in self.claims]
        self.together: list[tuple[int, int]] = []
        for held, gain in gains.together.items():
            mask = sum(bit[claim] for claim in held)
            if len(held) == 1:
                self.alone[mask.bit_length() - 1] += gain
            else:
                self.together.append((mask, gain))

    @property
    def exhausted(self) -> bool:
        return self.left <= 0

    def named(self, ended: int) -> tuple[str, ...]:
        return tuple(claim for i, claim in enumerate(self.claims) if ended >> i & 1)

    def freed(self, ended: int) -> int:
        alone = sum(gain for i, gain in enumerate(self.alone) if ended >> i & 1)
        return alone + sum(gain for held, gain in self.together if not held & ~ended)

    def by_sparing(self) -> int:
        """Spare claims one by one, those that free least first, as long as the rest frees enough.

        What is left is minimal by inclusion where ending more claims never frees less.
        """
        share = self._shares(0, 0)
        order = sorted(range(len(self.claims)), key=lambda i: (share[i], -i))
        ended = self.everyone
        for i in order:
            if self.freed(ended & ~(1 << i)) >= self.wanted:
                ended &= ~(1 << i)
        return ended

    def of_size(self, size: int) -> int | None:
        """The first set of that size that frees enough; None where there is none, or where the
        search is exhausted."""
        return self._extend(0, 0, 0, size)

    def _extend(self, ended: int, kept: int, first: int, more: int) -> int | None:
        """The first such set with all of `ended`, `more` claims from `first` on, none `kept`."""
        if not more:
            return ended if self.freed(ended) >= self.wanted else None
        for i in range(first, len(self.claims) - more + 1):
            self.left -= 1
            if self.exhausted or not self._possible(ended, kept, more):
                return None
            found = self._extend(ended | 1 << i, kept, i + 1, more - 1)
            if found is not None:
                return found
            kept |= 1 << i
        return None

    def _possible(self, ended: int, kept: int, more: int) -> bool:
        """Whether `more` of the undecided claims could free what is still missing."""
        decided = ended | kept
        shares = (s for i, s in enumerate(self._shares(ended, kept)) if not decided >> i & 1)
        best = sum(sorted(shares, reverse=True)[:more])
        return self.freed(ended) * _UNIT + best >= self.wanted * _UNIT

    def _shares(self, ended: int, kept: int) -> list[int]:
        """What each undecided claim can add at most, if each part is shared out evenly among
        the claims that still have to end for it.

        The parts that a set of claims frees are shared out to its members alone, so the sum of
        their shares bounds what it adds.  Parts that cost something are left out.
        """
        share = [gain * _UNIT for gain in self.alone]
        for held, gain in self.together:
            left = held & ~ended
            if not left or held & kept or gain < 0:
                continue
            part = -(-gain * _UNIT // left.bit_count())
            while left:
                low = left & -left
                share[low.bit_length() - 1] += part
                left ^= low
        return share
