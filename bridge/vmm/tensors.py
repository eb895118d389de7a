"""Addresses as torch tensors, by public protocols and without copying or touching the memory.

A tensor may span a hole: only reading or writing there faults.  It keeps nothing alive.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Exported:
    """Device memory as the CUDA array interface describes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_at(address: int, size: int, device: str) -> Any:
    """A tensor of `size` bytes (uint8, one dimension) over the memory at `address`."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Exported(address, size), device=device)
