"""What only a GPU can show of elastic memory and resident KV; one line a check, at most 8 minutes.

    python tools/gpu_check.py               on a machine with CUDA (without: one line, exit 0)
    python tools/gpu_check.py --vllm DIR    DIR holds an unpacked vLLM wheel (pure Python will do)
    python tools/gpu_check.py --twin        the same on the CPU twin, to test this script

Needs torch, numpy, cuda-bindings, and for the allocator's steps what vLLM's scheduler imports.
No network, nothing to install: the package is taken from the folder above.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PUBLISHED_MS: Final = {"lend": 23.8, "return": 3.8}
"""28 layers and 3.09 GiB on an A100, memory created anew at each lend."""
MOST_SECONDS: Final = 440
GIB: Final = 1 << 30
_BLOCK_BYTES: Final = 1 << 16
"""KV of one block and layer in the allocator's check."""


class Skipped(Exception):
    """A check that cannot run here, and why."""


def use_source_tree() -> None:
    """Import `kvclaims` from this checkout, installed or not."""
    package = types.ModuleType("kvclaims")
    package.__path__ = [str(ROOT)]
    sys.modules["kvclaims"] = package


@dataclass
class Bench:
    """Where the checks run: a driver for elastic memory, and a torch device."""

    device: str
    open: Callable[[], Any]
    layers: int
    base_bytes: int
    lent_bytes: int
    figures: dict[str, Any] = field(default_factory=dict)

    def memory(self, layers: int | None = None, driver: Any = None, small: bool = False) -> Any:
        from kvclaims.bridge.vmm import ElasticMemory, Shape

        driver = driver or self.open()
        grain = driver.granularity
        layers = layers or self.layers
        if small:
            shape = Shape.fit(layers, grain, 3, 2, grain)
        else:
            base, lent = self.base_bytes // layers // grain, self.lent_bytes // layers // grain
            shape = Shape.fit(layers, grain, base, lent, grain)
        return ElasticMemory(driver, shape)

    def synchronize(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()


# --- the checks: each returns what it saw, or raises ----------------------------------------


def failures(bench: Bench) -> str:
    """Every driver call of a lend and of a return refused in turn: all undone, nothing sticks."""
    from kvclaims.bridge.vmm import DriverError, Failing

    tried = 0
    for move in ("lend", "return_"):
        k = 0
        while True:
            k += 1
            driver = Failing(bench.open(), lambda _call: False)
            memory = bench.memory(3, driver, small=True)
            if move == "return_":
                memory.lend()
            before = memory.mode
            at = driver.calls + k
            driver.fails = partial(operator.eq, at)
            try:
                getattr(memory, move)()
            except DriverError:
                assert memory.mode is before, f"{move}, call {k}: not undone"
                assert getattr(memory, move)(), f"{move}, call {k}: the error sticks"
                tried += 1
                memory.close()
                continue
            driver.fails = lambda _call: False
            memory.close()
            break
    assert tried == 20, f"{tried} failures were injected, not 20"
    return f"{tried} calls refused in turn, all undone"


def rules(bench: Bench) -> str:
    """Pointers fixed, base intact, what comes back writable, reads and writes in every layer."""
    from kvclaims.bridge.vmm.tensors import bytes_at

    memory = bench.memory(4, small=True)
    base = memory.shape.base_bytes
    layers = [bytes_at(memory.address(x), memory.kv_bytes, bench.device) for x in range(4)]
    pointers = [t.data_ptr() for t in layers]
    for number, tensor in enumerate(layers):
        tensor[:base].fill_(number + 1)
    for turn in range(5):
        memory.lend()
        for tensor in layers:
            tensor[base:].fill_(100 + turn)
        bench.synchronize()
        assert all(int(t[base:].min()) == 100 + turn for t in layers), "the lent part lost a write"
        memory.return_()
        act, size = memory.activations
        bytes_at(act, size, bench.device).fill_(200)
        bench.synchronize()
        for number, tensor in enumerate(layers):
            assert int(tensor[:base].min()) == int(tensor[:base].max()) == number + 1
    assert [t.data_ptr() for t in layers] == pointers
    memory.close()
    return "4 layers, 5 toggles: base bytes and pointers unchanged"


def toggling(bench: Bench) -> str:
    """Lend and return, medians of 20, beside the published times."""
    memory = bench.memory()
    took: dict[str, list[float]] = {"lend": [], "return": []}
    for _ in range(20):
        for name, move in (("lend", memory.lend), ("return", memory.return_)):
            started = time.perf_counter()
            move()
            took[name].append(1e3 * (time.perf_counter() - started))
    gib = memory.shape.lent_bytes * memory.shape.layers / GIB
    calls = memory.costs.calls
    each = {c: 1e6 * memory.costs.seconds[c] / calls[c] for c in ("map", "open", "unmap", "create")}
    memory.close()
    medians = {name: statistics.median(times) for name, times in took.items()}
    bench.figures["toggle_ms"] = medians
    bench.figures["call_us"] = each
    shown = ", ".join(f"{n} {ms:.2f} ms (published {PUBLISHED_MS[n]})" for n, ms in medians.items())
    return f"{memory.shape.layers} layers, {gib:.2f} GiB: {shown}; a call in µs: " + ", ".join(
        f"{name} {us:.1f}" for name, us in each.items()
    )


def graphs(bench: Bench) -> str:
    """A captured graph over the base replays after toggles, with the same pointers."""
    import torch

    from kvclaims.bridge.vmm.tensors import bytes_at

    if bench.device == "cpu":
        raise Skipped("graphs are captured on a GPU only")
    memory = bench.memory(2, small=True)
    whole = bytes_at(memory.address(0), memory.kv_bytes, bench.device)
    base = whole[: memory.shape.base_bytes].view(torch.int32)
    base.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        base.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        base.add_(1)
    for turn in range(4):
        (memory.lend if turn % 2 == 0 else memory.return_)()
        graph.replay()
        bench.synchronize()
        assert int(base.min()) == int(base.max()) == turn + 2, "a replay went elsewhere"
    memory.close()
    return "a captured graph replayed across 4 toggles"


def allocator(bench: Bench) -> str:
    """vLLM's allocator and scheduler hand out blocks; real tensors on the device are written
    through its tables; a hard claim keeps its bytes, no claim loses 50 of 60 blocks."""
    lost = _conflict(bench, claimed=False)
    assert lost == 50, f"without a claim {lost} blocks changed, not 50"
    lost = _conflict(bench, claimed=True)
    assert lost == 0, f"under a hard claim {lost} blocks changed"
    return "60 resident blocks, a request of 70 in a pool of 80: 50 changed, 0 under a hard claim"


def _conflict(bench: Bench, claimed: bool) -> int:
    from kvclaims.bridge.vllm.runtime import VllmRuntime
    from kvclaims.spec.content import Segment, tokens_of
    from kvclaims.spec.interface import (
        ClaimSpec,
        PoolConfig,
        Predicate,
        PredicateKind,
        RequestSpec,
    )
    from kvclaims.spec.operations import drain

    config = PoolConfig(80, 16)
    driver = _device_driver(bench, config)
    runtime = VllmRuntime("vllm", config, "gpu", driver)
    kept, other = (tokens_of((Segment(s, n),), 16) for s, n in (("A", 60), ("B", 70)))
    runtime.submit(RequestSpec("cache", kept))
    drain(runtime)
    blocks = tuple(b for b in runtime.locate(kept) if b is not None)
    assert len(blocks) == 60
    before = runtime.fingerprint(blocks)
    assert len(set(before)) == 60, "two blocks with other content have the same digest"
    if claimed:
        runtime.declare(ClaimSpec("keep", kept, Predicate(PredicateKind.LEADING, 60)))
    driver.toggle()
    runtime.submit(RequestSpec("run", other))
    drain(runtime)
    after = runtime.fingerprint(blocks)
    runtime.close()
    driver.memory.close()
    return sum(a != b for a, b in zip(before, after, strict=True))


def _device_driver(bench: Bench, config: Any) -> Any:
    """The simulated model runner, writing KV into device tensors that lie in elastic memory."""
    try:
        from kvclaims.bridge.vllm import setup

        setup.quieten()
        from kvclaims.bridge.vllm.simulated import SimulatedDriver, SimulatedMemory
    except ImportError as error:
        raise Skipped(f"vLLM's allocator cannot be imported: {error}") from None
    import torch

    from kvclaims.bridge.fingerprint import fingerprints
    from kvclaims.bridge.vmm import ElasticMemory, Shape
    from kvclaims.bridge.vmm.tensors import bytes_at

    device, count = bench.open(), config.usable + 1
    shape = Shape.fit(2, _BLOCK_BYTES, config.usable, 32, device.granularity)
    memory = ElasticMemory(device, shape)
    ranges = [bytes_at(memory.address(x), memory.kv_bytes, bench.device) for x in range(2)]
    tensors = [
        whole[: count * _BLOCK_BYTES].view(torch.int64).view(count, -1).zero_() for whole in ranges
    ]

    class DeviceMemory(SimulatedMemory):
        def write(self, block: int, *args: Any) -> None:
            super().write(block, *args)
            name = super().digest(block)
            for layer, tensor in enumerate(tensors):
                row = torch.arange(tensor.shape[1], device=tensor.device)
                tensor[block].copy_(row * (2 * layer + 1) + name)

    class DeviceDriver(SimulatedDriver):
        def __init__(self) -> None:
            super().__init__(config)
            self.memory = memory
            self._memory = DeviceMemory(count, config.block_size)

        def toggle(self) -> None:
            for _ in range(3):
                memory.lend()
                memory.return_()

        def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
            return fingerprints(tensors, blocks)

    return DeviceDriver()


def live_engine(_bench: Bench) -> str:
    """The founding litmus programs on a whole engine, where one with its kernels is installed."""
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise Skipped("no vLLM here")
    if importlib.util.find_spec("vllm._C") is None:
        raise Skipped("this vLLM has no compiled kernels: the whole engine cannot run")
    from kvclaims.bridge.vllm.engine import WHOLE_ENGINE
    from kvclaims.checker.litmus import litmus
    from kvclaims.checker.programs import select

    report = litmus(WHOLE_ENGINE, WHOLE_ENGINE.info(), select(("L1", "L3")), lambda _text: None)
    assert str(report.verdict) == "HOLDS", "\n".join(report.lines())
    return "L1 and L3 hold"


CHECKS: Final = (failures, rules, toggling, graphs, allocator, live_engine)


def run(bench: Bench, names: set[str]) -> int:
    """Run the checks in order; the exit code.  No check starts when the time is nearly up."""
    started, code = time.monotonic(), 0
    for check in CHECKS:
        if names and check.__name__ not in names:
            continue
        begun = time.monotonic()
        if begun - started > MOST_SECONDS:
            print(f"not run   {check.__name__}: {MOST_SECONDS} s are over", flush=True)
            code = code or 3
            continue
        try:
            word, text = "holds", check(bench)
        except Skipped as reason:
            word, text = "skipped", str(reason)
        except Exception as error:  # noqa: BLE001  the other checks still run
            word, text, code = "FAILS", f"{type(error).__name__}: {error}", 1
        seconds = time.monotonic() - begun
        print(f"{word:<9} {check.__name__}: {text} ({seconds:.1f} s)", flush=True)
    if bench.figures:
        print(json.dumps(bench.figures), flush=True)
    return code


def gpu_bench() -> Bench:
    """The first GPU; `Skipped` where there is none."""
    try:
        import torch
    except ImportError:
        raise Skipped("torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device here")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    from kvclaims.bridge.vmm.cuda import CudaDriver, bindings
    from kvclaims.bridge.vmm.driver import DriverError

    try:
        bindings()
    except DriverError as error:
        raise Skipped(str(error)) from None
    return Bench("cuda:0", CudaDriver, 28, 2 * GIB, 3 * GIB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--twin", action="store_true", help="run on the CPU twin")
    parser.add_argument("--vllm", type=Path, help="folder that holds the package vllm")
    parser.add_argument("check", nargs="*", choices=[[], *(c.__name__ for c in CHECKS)])
    given = parser.parse_args()
    use_source_tree()
    if given.vllm is not None:
        sys.path.insert(0, str(given.vllm))
        os.environ.setdefault("VLLM_TARGET_DEVICE", "empty")
    try:
        if given.twin:
            from kvclaims.bridge.vmm import TwinDriver

            bench = Bench("cpu", TwinDriver, 28, 1 << 26, 1 << 26)
        else:
            bench = gpu_bench()
    except Skipped as reason:
        print(f"skipped: {reason}; nothing was checked")
        return 0
    return run(bench, set(given.check))


if __name__ == "__main__":
    sys.exit(main())
