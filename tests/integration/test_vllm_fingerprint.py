"""Digests of KV bytes: equal bytes, equal digests; anything else differs, on any device."""

from __future__ import annotations

import pytest
from vllm_world import NEEDS_VLLM

torch = pytest.importorskip("torch", reason="torch is not installed (make setup)")

pytestmark = NEEDS_VLLM[:1]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def cache(dtype: str, device: str = "cpu") -> list:
    generator = torch.Generator().manual_seed(7)
    shape = (6, 2, 8, 4)
    numbers = torch.randint(-100, 100, (2, *shape), generator=generator)
    return [layer.to(getattr(torch, dtype)).to(device) for layer in numbers]


def digests(tensors: list, blocks: list[int]) -> tuple[int, ...]:
    from kvclaims.bridge.fingerprint import fingerprints

    return fingerprints(tensors, blocks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_every_byte_counts(dtype: str, device: str) -> None:
    layers = cache(dtype, device)
    before = digests(layers, [0, 3, 5])
    assert len(set(before)) == 3
    assert digests(layers, [5, 0, 3]) == (before[2], before[0], before[1])
    raw = layers[1].view(torch.uint8)
    raw[3, 1, 7, -1] ^= 1
    after = digests(layers, [0, 3, 5])
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]
    raw[3, 1, 7, -1] ^= 1
    assert digests(layers, [0, 3, 5]) == before


def test_order_and_layer_count() -> None:
    layers = cache("int8")
    before = digests(layers, [2])
    layers[0][2] = layers[0][2].flip(0)
    assert digests(layers, [2]) != before
    layers = cache("int8")
    assert digests(layers[::-1], [2]) != before


def test_devices_agree() -> None:
    assert len({digests(cache("float16", device), [1, 4]) for device in DEVICES}) == 1


def test_no_blocks_no_digests() -> None:
    assert digests(cache("float32"), []) == ()
