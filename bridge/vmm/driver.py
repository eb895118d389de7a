"""What elastic memory asks of a device: eight calls, each of which succeeds or changes nothing.

The calls are those of CUDA's virtual memory management.  `bridge.vmm.cuda` makes them on a GPU,
`bridge.vmm.twin` on the CPU, and `Failing` refuses chosen ones, so that tests can show what
becomes of a failure at every single call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol


class DriverError(RuntimeError):
    """The driver refused a call, and nothing has changed."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.call = call


class OutOfMemory(DriverError):
    """There is not that much physical memory left."""


class Misuse(DriverError):
    """A call that no driver accepts, such as to unmap half a mapping: a fault of the caller."""


class Driver(Protocol):
    """Sizes are in bytes and addresses absolute; both are multiples of `granularity`."""

    granularity: int
    device: str
    """Where tensors over this memory live, as torch spells it."""

    def reserve(self, size: int) -> int:
        """Set an address range aside; nothing in it may be touched yet."""

    def free(self, address: int, size: int) -> None:
        """Give a whole reserved range back, with no mapping left in it."""

    def create(self, size: int) -> int:
        """Allocate physical memory; the handle.  Raises `OutOfMemory`."""

    def release(self, handle: int) -> None:
        """Let go of physical memory; it goes back once it is mapped nowhere."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Put a whole handle at an address of a reserved range; not to be touched yet."""

    def open(self, address: int, size: int) -> None:
        """Allow reading and writing on one whole mapping."""

    def unmap(self, address: int, size: int) -> None:
        """Take one whole mapping away.  The driver waits for nobody who may be reading it."""

    def synchronize(self) -> None:
        """Return when the device has done all work that it was given before."""


CALLS: Final = (
    "reserve",
    "free",
    "create",
    "release",
    "map",
    "open",
    "unmap",
    "synchronize",
)


class Failing:
    """A driver that refuses some calls before they reach the real one.

    `fails` is told the number of each call, from 1, and says whether it is refused.
    """

    def __init__(self, driver: Driver, fails: Callable[[int], bool]) -> None:
        self.granularity = driver.granularity
        self.device = driver.device
        self.fails = fails
        self.calls = 0
        self.refused: list[str] = []
        self._driver = driver

    def _call(self, name: str, *args: int) -> Any:
        self.calls += 1
        if self.fails(self.calls):
            self.refused.append(name)
            raise DriverError(name, f"refused on purpose, call {self.calls}")
        return getattr(self._driver, name)(*args)

    def reserve(self, size: int) -> int:
        return int(self._call("reserve", size))

    def free(self, address: int, size: int) -> None:
        self._call("free", address, size)

    def create(self, size: int) -> int:
        return int(self._call("create", size))

    def release(self, handle: int) -> None:
        self._call("release", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("map", address, size, handle)

    def open(self, address: int, size: int) -> None:
        self._call("open", address, size)

    def unmap(self, address: int, size: int) -> None:
        self._call("unmap", address, size)

    def synchronize(self) -> None:
        self._call("synchronize")
