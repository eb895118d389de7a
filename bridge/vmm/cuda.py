"""The driver on an NVIDIA GPU, in plain Python through `cuda-bindings` (no compiled extension).

Every call goes through `CudaDriver._call` to one table of functions, by default the module
`cuda.bindings.driver`; tests put another table in its place.  It works in the device's primary
context, which is the one that torch uses.
"""

from __future__ import annotations

from typing import Any

from kvclaims.bridge.vmm.driver import DriverError, OutOfMemory


def bindings() -> Any:
    """The table of driver functions; `DriverError` with the way out where there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DriverError(
            "cuda.bindings", "cannot be imported (pip install cuda-bindings)"
        ) from None
    return driver


class CudaDriver:
    """Physical memory of device number `device`, through the functions of `api`."""

    def __init__(self, device: int = 0, api: Any = None) -> None:
        self._api = bindings() if api is None else api
        self._call("cuInit", 0)
        self._ordinal = self._call("cuDeviceGet", device)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._ordinal))
        self.device = f"cuda:{device}"
        self._location = self._api.CUmemLocation()
        self._location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device
        self._kind = self._api.CUmemAllocationProp()
        self._kind.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = self._location
        self._access = self._api.CUmemAccessDesc()
        self._access.location = self._location
        self._access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        options = self._api.CUmemAllocationGranularity_flags
        self.granularity = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._kind,
                options.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, self.granularity, 0, 0))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        return int(self._call("cuMemCreate", size, self._kind, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def open(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Let go of the primary context; torch keeps its own hold on it."""
        self._call("cuDevicePrimaryCtxRelease", self._ordinal)

    def _call(self, name: str, *args: Any) -> Any:
        """One driver call: its result, or the error that its status stands for."""
        status, *results = getattr(self._api, name)(*args)
        codes = self._api.CUresult
        if status != codes.CUDA_SUCCESS:
            kind = OutOfMemory if status == codes.CUDA_ERROR_OUT_OF_MEMORY else DriverError
            raise kind(name, getattr(status, "name", str(status)))
        return results[0] if results else None
