"""How large an exploration is, said before it begins: numbers of states, sets, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvclaims.checker.finite import Instance
from kvclaims.checker.grounded import Slot, ground
from kvclaims.checker.machinecode import Layout, layout
from kvclaims.spec.interface import BadOperation

BUDGET: Final = 8 << 30
"""Bytes that a search may take unless told otherwise, or what the machine has left."""

DENSE: Final = 1 << 27
"""Up to this many bytes the bitmap of the whole product is preferred to a hash table."""

FIRST_TABLE: Final = 1 << 15
"""Places of a hash table at the start."""


class TooLarge(BadOperation):
    """The search would need more memory than it was given."""


@dataclass(frozen=True)
class Plan:
    """What an exploration will need.

    `visited` is `bitmap` (one bit for each state of the product space, `visited_bytes` in all)
    or `hash` (64 bits for each state found, at most 5/8 full; `visited_bytes` at the start).
    `state_bytes` is what one state in a level takes.
    """

    machine: str
    slots: tuple[Slot, ...]
    space: int
    bits: int
    visited: str
    visited_bytes: int
    state_bytes: int
    budget: int

    @property
    def capacity(self) -> int:
        """States that fit into the budget at least, two levels and the visited set together."""
        each = 2 * self.state_bytes
        if self.visited == "bitmap":
            return min(self.space, (self.budget - self.visited_bytes) // each)
        return min(self.space, self.budget // (each + 8 * 4))

    @property
    def most_bytes(self) -> int:
        """What the search takes if every state of the product is reached."""
        each = 2 * self.state_bytes + (0 if self.visited == "bitmap" else 8 * 4)
        return self.space * each + (self.visited_bytes if self.visited == "bitmap" else 0)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.machine}: {len(self.slots)} slots, {self.space:,} states in the product of "
            f"their domains ({self.bits} bits)"
        )
        yield f"  {self.memory}"
        for slot in self.slots:
            yield f"  {slot.name}: {slot.lo} … {slot.hi}"

    @property
    def memory(self) -> str:
        return (
            f"visited: {self.visited}, {self.visited_bytes:,} bytes at the start; "
            f"{self.state_bytes} bytes for each state of a level; at most {self.most_bytes:,} "
            f"bytes, were all states reached; {self.capacity:,} states fit into "
            f"{self.budget:,} bytes"
        )


def default_budget() -> int:
    """Three quarters of the memory that is free, at most `BUDGET`."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        # What the system keeps of files can be had too; Linux alone says how much that is.
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    except OSError:
        return min(BUDGET, free * 3 // 4)
    return min(BUDGET, free * 3 // 4)


def plan(
    instance: Instance,
    *,
    budget: int | None = None,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> Plan:
    """How the instance would be explored.

    Raises BadOperation where a counter has no bounds and TooLarge where states do not fit into
    63 bits, or what the search starts with does not fit into the budget.
    """
    return planned(instance, layout(ground(instance, bounds).slots), budget or default_budget())


def planned(instance: Instance, where: Layout, budget: int) -> Plan:
    """The plan of an instance whose states are numbered already; raises TooLarge."""
    bits = (where.space - 1).bit_length()
    if bits > 63:
        raise TooLarge(
            f"{instance.machine.name}: a state takes {bits} bits, 63 are the most: make the "
            "instance smaller, or explore it by symbolic"
        )
    bitmap = words(where) * (8 if where.wide else 4)
    dense = bitmap <= min(DENSE, budget // 2)
    found = Plan(
        instance.machine.name,
        where.slots,
        where.space,
        bits,
        "bitmap" if dense else "hash",
        bitmap if dense else 8 * FIRST_TABLE,
        8 if where.wide else 4,
        budget,
    )
    if found.visited_bytes > budget:
        raise TooLarge(
            f"{instance.machine.name}: {found.visited_bytes:,} bytes needed to start with, "
            f"{budget:,} allowed: give more with --memory, or explore it by symbolic"
        )
    return found


def words(where: Layout) -> int:
    """Words of the bitmap: as wide as a state's number."""
    return where.space // (64 if where.wide else 32) + 1
