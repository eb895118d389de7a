"""The driver's CPU twin: memory files mapped at fixed addresses, as strict as the device.

A handle is a `memfd`, a reserved range an anonymous mapping that nobody may touch, and mapping
lays the file over it.  The twin insists on what CUDA insists on: whole mappings, multiples of
the granularity, no overlap, access set anew after each mapping.  Touching a hole is a
segmentation fault.  Linux only.

Unmapping also discards the content (`keep_content=False`), so that the memory of the process
and of the machine really falls, and whoever reads a block that came back sees that it is blank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.vmm.driver import DriverError, Misuse, OutOfMemory

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0
_PROT_RW: Final = mmap.PROT_READ | mmap.PROT_WRITE
_PUNCH_HOLE: Final = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE."""

_FAILED: Final = ctypes.c_void_p(-1).value


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    pointer, offset = ctypes.c_void_p, ctypes.c_int64
    libc.mmap.argtypes = (pointer, size, number, number, number, offset)
    libc.mmap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    libc.mprotect.argtypes = (pointer, size, number)
    libc.fallocate.argtypes = (number, number, offset, offset)
    return libc


@dataclass
class _Mapping:
    address: int
    size: int
    handle: int
    open: bool = False


@dataclass(frozen=True)
class _Handle:
    file: int
    size: int


class TwinDriver:
    """`granularity` in bytes, a multiple of the page size; `limit` of physical memory, if any.

    `misused` counts the calls that were rejected as wrong, for tests that hold it at zero.
    """

    device = "cpu"

    def __init__(
        self,
        granularity: int = mmap.PAGESIZE,
        limit: int | None = None,
        *,
        keep_content: bool = False,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise DriverError("memfd_create", "the twin needs Linux")
        if granularity <= 0 or granularity % mmap.PAGESIZE:
            raise Misuse("granularity", f"{granularity} is not a multiple of {mmap.PAGESIZE}")
        self.granularity = granularity
        self.limit = limit
        self.misused = 0
        self._keep_content = keep_content
        self._c = _libc()
        self._ranges: dict[int, int] = {}
        self._handles: dict[int, _Handle] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._next = 1

    # -- the calls -----------------------------------------------------------------------------

    def reserve(self, size: int) -> int:
        self._check_size("reserve", size)
        # One granule more, so that a range can begin at a multiple of it.
        spare = self.granularity - mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = self._mmap("reserve", None, size + spare, _PROT_NONE, flags, -1)
        address = -(-start // self.granularity) * self.granularity
        for begin, length in ((start, address - start), (address + size, start + spare - address)):
            if length:
                self._c.munmap(begin, length)
        self._ranges[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        if self._ranges.get(address) != size:
            self._misuse("free", "not a whole reserved range")
        if any(address <= m.address < address + size for m in self._mappings.values()):
            self._misuse("free", "something is still mapped there")
        self._check("free", self._c.munmap(address, size))
        del self._ranges[address]

    def create(self, size: int) -> int:
        self._check_size("create", size)
        if self.limit is not None and self.in_use() + size > self.limit:
            raise OutOfMemory("create", f"{size} bytes do not fit the {self.limit} there are")
        try:
            file = os.memfd_create("kvclaims-elastic", os.MFD_CLOEXEC)
        except OSError as error:
            raise DriverError("create", str(error)) from None
        try:
            os.ftruncate(file, size)
        except OSError as error:
            os.close(file)
            raise DriverError("create", str(error)) from None
        handle, self._next = self._next, self._next + 1
        self._handles[handle] = _Handle(file, size)
        return handle

    def release(self, handle: int) -> None:
        found = self._handle("release", handle)
        del self._handles[handle]
        os.close(found.file)

    def map(self, address: int, size: int, handle: int) -> None:
        found = self._handle("map", handle)
        self._check_size("map", size)
        if address % self.granularity:
            self._misuse("map", "the address is no multiple of the granularity")
        if size != found.size:
            self._misuse("map", "a handle is mapped whole")
        if not any(r <= address and address + size <= r + n for r, n in self._ranges.items()):
            self._misuse("map", "not inside one reserved range")
        if self._overlaps(address, size):
            self._misuse("map", "something is mapped there already")
        self._mmap("map", address, size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, found.file)
        self._mappings[address] = _Mapping(address, size, handle)

    def open(self, address: int, size: int) -> None:
        mapping = self._mapping("open", address, size)
        self._check("open", self._c.mprotect(address, size, _PROT_RW))
        mapping.open = True

    def unmap(self, address: int, size: int) -> None:
        mapping = self._mapping("unmap", address, size)
        handle = self._handles.get(mapping.handle)
        if handle is not None and not self._keep_content:
            self._check("unmap", self._c.fallocate(handle.file, _PUNCH_HOLE, 0, handle.size))
        # Never munmap: another mapping of the process could take the hole.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._mmap("unmap", address, size, _PROT_NONE, flags, -1)
        del self._mappings[address]

    def synchronize(self) -> None:
        """The CPU has done its work when the call that does it returns."""

    # -- what tests and counters look at -------------------------------------------------------

    def mapped(self, address: int) -> bool:
        return address in self._mappings

    def opened(self, address: int) -> bool:
        mapping = self._mappings.get(address)
        return mapping is not None and mapping.open

    def in_use(self) -> int:
        """Bytes of physical memory that handles stand for."""
        return sum(handle.size for handle in self._handles.values())

    def physical(self) -> int:
        """Bytes that the kernel really keeps for the handles now."""
        return sum(os.fstat(h.file).st_blocks * 512 for h in self._handles.values())

    def left_over(self) -> tuple[int, int, int]:
        """Ranges, handles and mappings that nobody has given back."""
        return len(self._ranges), len(self._handles), len(self._mappings)

    # -- helpers -------------------------------------------------------------------------------

    def _mmap(
        self, call: str, address: int | None, size: int, protection: int, flags: int, file: int
    ) -> int:
        found = self._c.mmap(address, size, protection, flags, file, 0)
        if found == _FAILED:
            raise DriverError(call, os.strerror(ctypes.get_errno()))
        return int(found)

    def _check(self, call: str, result: int) -> None:
        if result != 0:
            raise DriverError(call, os.strerror(ctypes.get_errno()))

    def _check_size(self, call: str, size: int) -> None:
        if size <= 0 or size % self.granularity:
            self._misuse(call, f"{size} bytes are no multiple of {self.granularity}")

    def _handle(self, call: str, handle: int) -> _Handle:
        if handle not in self._handles:
            self._misuse(call, "no such handle")
        return self._handles[handle]

    def _mapping(self, call: str, address: int, size: int) -> _Mapping:
        mapping = self._mappings.get(address)
        if mapping is None or mapping.size != size:
            self._misuse(call, "not one whole mapping")
            raise AssertionError("unreachable")
        return mapping

    def _overlaps(self, address: int, size: int) -> bool:
        return any(
            m.address < address + size and address < m.address + m.size
            for m in self._mappings.values()
        )

    def _misuse(self, call: str, reason: str) -> None:
        self.misused += 1
        raise Misuse(call, reason)
