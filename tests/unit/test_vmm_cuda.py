"""The CUDA driver over a stand-in for the driver's functions: which calls, in which order.

The stand-in keeps the book that CUDA keeps (whole mappings, access set anew), so the allocator's
own use of the calls is checked too.  On a real GPU the same is done by `make gpu-check`.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from kvclaims.bridge.vmm import DriverError, ElasticMemory, OutOfMemory, Shape
from kvclaims.bridge.vmm.cuda import CudaDriver

MIB = 1 << 20


class Status(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeCuda:
    """The table of functions that `cuda.bindings.driver` is, with the device's own book."""

    CUresult = Status
    CUmemLocation = SimpleNamespace
    CUmemAllocationProp = SimpleNamespace
    CUmemAccessDesc = SimpleNamespace
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, limit: int = 1 << 40) -> None:
        self.log: list[str] = []
        self.limit = limit
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.access: set[int] = set()
        self.pending = False
        self.contexts = 0
        self._next = 1 << 32

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.log.append(name)
            return getattr(self, f"_{name}")(*args)  # type: ignore[no-any-return]

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def _number(self, step: int) -> int:
        self._next += step
        return self._next - step

    @staticmethod
    def _ok(holds: bool) -> tuple[Status]:
        return (Status.CUDA_SUCCESS if holds else Status.CUDA_ERROR_INVALID_VALUE,)

    def _cuInit(self, flags: int) -> Any:
        return self._ok(flags == 0)

    def _cuDeviceGet(self, number: int) -> Any:
        return Status.CUDA_SUCCESS, number

    def _cuDevicePrimaryCtxRetain(self, _device: int) -> Any:
        self.contexts += 1
        return Status.CUDA_SUCCESS, "primary"

    def _cuDevicePrimaryCtxRelease(self, _device: int) -> Any:
        self.contexts -= 1
        return self._ok(True)

    def _cuCtxSetCurrent(self, context: str) -> Any:
        return self._ok(context == "primary")

    def _cuCtxSynchronize(self) -> Any:
        self.pending = False
        return self._ok(True)

    def _cuMemGetAllocationGranularity(self, kind: Any, flag: int) -> Any:
        return Status.CUDA_SUCCESS, 2 * MIB

    def _cuMemAddressReserve(self, size: int, align: int, hint: int, flags: int) -> Any:
        if size % (2 * MIB) or align % (2 * MIB):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        address = self._number(size)
        self.ranges[address] = size
        return Status.CUDA_SUCCESS, address

    def _cuMemAddressFree(self, address: int, size: int) -> Any:
        held = any(address <= m < address + size for m in self.mapped)
        good = self.ranges.get(address) == size and not held
        if good:
            del self.ranges[address]
        return self._ok(good)

    def _cuMemCreate(self, size: int, kind: Any, flags: int) -> Any:
        if sum(self.handles.values()) + size > self.limit:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY,)
        handle = self._number(1)
        self.handles[handle] = size
        return Status.CUDA_SUCCESS, handle

    def _cuMemRelease(self, handle: int) -> Any:
        return self._ok(self.handles.pop(handle, None) is not None)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        good = offset == 0 and self.handles.get(handle) == size and address not in self.mapped
        if good:
            self.mapped[address] = (size, handle)
        return self._ok(good)

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> Any:
        good = self.mapped.get(address, (0,))[0] == size and access[0].flags == 3 and count == 1
        if good:
            self.access.add(address)
        return self._ok(good)

    def _cuMemUnmap(self, address: int, size: int) -> Any:
        good = self.mapped.get(address, (0,))[0] == size and not self.pending
        if good:
            del self.mapped[address]
            self.access.discard(address)
        return self._ok(good)


def made(fake: FakeCuda, layers: int = 2) -> ElasticMemory:
    driver = CudaDriver(0, fake)
    return ElasticMemory(driver, Shape.fit(layers, MIB, 7, 4, driver.granularity))


def test_it_works_in_the_primary_context_with_the_device_granularity() -> None:
    fake = FakeCuda()
    driver = CudaDriver(3, fake)
    assert fake.log[:4] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert (driver.granularity, driver.device) == (2 * MIB, "cuda:3")
    driver.close()
    assert fake.contexts == 0


def test_a_toggle_synchronizes_first_and_allocates_nothing() -> None:
    fake = FakeCuda()
    memory = made(fake)
    created = fake.log.count("cuMemCreate")
    fake.log.clear()
    fake.pending = True  # a kernel runs: an unmap before the synchronization would be refused
    memory.lend()
    each = ["cuMemUnmap", "cuMemMap", "cuMemSetAccess"]
    assert fake.log == ["cuCtxSynchronize", *each, *each]
    fake.log.clear()
    memory.return_()
    assert fake.log == ["cuCtxSynchronize", *each, *each]
    assert created == 4


def test_every_mapping_has_access_and_everything_goes_back() -> None:
    fake = FakeCuda()
    memory = made(fake)
    for _ in range(3):
        memory.lend()
        assert fake.access == set(fake.mapped)
        memory.return_()
        assert fake.access == set(fake.mapped)
    memory.close()
    assert (fake.ranges, fake.handles, fake.mapped) == ({}, {}, {})


def test_statuses_become_errors_that_name_the_call() -> None:
    with pytest.raises(OutOfMemory, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        made(FakeCuda(limit=20 * MIB), layers=3)
    driver = CudaDriver(0, FakeCuda())
    with pytest.raises(DriverError, match="cuMemUnmap: CUDA_ERROR_INVALID_VALUE"):
        driver.unmap(0, 2 * MIB)


def test_without_the_bindings_it_says_what_to_install() -> None:
    with pytest.raises(DriverError, match="pip install cuda-bindings"):
        CudaDriver()
