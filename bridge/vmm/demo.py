"""`kvclaims elastic demo`: scenes on the CPU twin, each with what the memory looks like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.vmm.blocks import BlockPool, StillRead
from kvclaims.bridge.vmm.driver import DriverError, Failing
from kvclaims.bridge.vmm.judge import ElasticMonitor
from kvclaims.bridge.vmm.memory import ElasticMemory, Refused, Shape
from kvclaims.bridge.vmm.twin import TwinDriver
from kvclaims.checker.verdicts import Progress, Violation
from kvclaims.spec.vocabulary import Verdict

_LAYERS: Final = 4
_BLOCK: Final = 1 << 18


@dataclass(frozen=True)
class Scene:
    """What was done, and what is seen: mode, KiB the kernel keeps, and the blocks one by one."""

    title: str
    mode: str
    physical_kib: int
    blocks: str

    def __str__(self) -> str:
        return f"{self.blocks}  {self.mode:<9} {self.physical_kib:>6,} KiB  {self.title}"


@dataclass(frozen=True)
class DemoReport:
    scenes: tuple[Scene, ...]
    lend_ms: float
    return_ms: float
    steps: int
    violations: tuple[Violation, ...]

    @property
    def verdict(self) -> Verdict:
        return Verdict.VIOLATED if self.violations else Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {
            "scenes": [vars(scene) for scene in self.scenes],
            "lend_ms": round(self.lend_ms, 3),
            "return_ms": round(self.return_ms, 3),
            "steps": self.steps,
            "violations": [violation.to_json() for violation in self.violations],
        }

    def lines(self) -> Iterator[str]:
        yield "blocks: . free  # held  + cached  (space) not mapped; the lent part after the bar"
        yield from map(str, self.scenes)
        yield (
            f"{self.verdict}: {self.steps} steps judged by the machine; a lend of {_LAYERS} layers "
            f"took {self.lend_ms:.2f} ms, a return {self.return_ms:.2f} ms"
        )


def demo(progress: Progress, pace: float = 1.0) -> DemoReport:
    """Run the scenes, `pace` seconds apart."""
    show = _Show(progress, pace)
    try:
        show.run()
    finally:
        show.memory.close()
    costs = show.memory.costs
    return DemoReport(
        tuple(show.scenes),
        1e3 * costs.lend_seconds / max(1, costs.lends),
        1e3 * costs.return_seconds / max(1, costs.returns),
        show.judge.steps,
        tuple(show.judge.violations),
    )


class _Show:
    def __init__(self, progress: Progress, pace: float) -> None:
        self._progress, self._pace = progress, pace
        self.twin = TwinDriver()
        self.driver = Failing(self.twin, lambda _call: False)
        shape = Shape.fit(_LAYERS, _BLOCK, 11, 4, self.twin.granularity)
        self.judge = ElasticMonitor(shape)
        self.memory = ElasticMemory(self.driver, shape, self.judge)
        self.pool = BlockPool(self.memory, self._copy, patience=0.05)
        self.scenes: list[Scene] = []

    def run(self) -> None:
        memory, pool = self.memory, self.pool
        prompt = [self._written(block) for block in pool.allocate(5)]
        self._scene("a prompt of 5 blocks; the reserve is with the activations")
        memory.lend()
        self._scene("decode-only: the reserve is lent, 4 more blocks in each of 4 layers")
        grown = [self._written(block) for block in pool.allocate(3)]
        pool.keep(grown[0])
        pool.leave(grown[0])
        self._scene("three blocks grew there; one has been left, and can be found again")
        self._refused("a hard claim on 12 blocks", lambda: pool.accept("keep", 12))
        pool.touch("kernel", grown[1])
        try:
            memory.return_()
        except StillRead:
            self._scene("a prefill comes while a kernel still reads: fenced, and nothing unmapped")
        pool.done("kernel", grown[1])
        memory.return_()
        self._scene("the kernel ended: blocks moved to the base or dropped, the reserve is home")
        with memory.prefill():
            self._scene("the prefill runs over its activations")
            self._refused("lending meanwhile", memory.lend)
        self.driver.fails = lambda call, at=self.driver.calls + 6: call == at  # type: ignore[misc]
        try:
            memory.lend()
        except DriverError as error:
            self._scene(f"a driver call fails half way ({error.call}): all layers undone")
        memory.lend()
        self._scene("errors do not stick: lent again, and blank")
        for block in (*prompt, *sorted(pool.held - set(prompt))):
            pool.leave(block)
        memory.return_()
        self._scene("everyone left; home")

    def _refused(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Refused as error:
            self._scene(f"{what} is refused ({error.rule})")

    def _written(self, block: int) -> int:
        for layer in range(_LAYERS):
            self._bytes(layer, block)[:] = bytes([block]) * _BLOCK
        return block

    def _copy(self, old: int, new: int) -> None:
        for layer in range(_LAYERS):
            self._bytes(layer, new)[:] = self._bytes(layer, old)

    def _bytes(self, layer: int, block: int) -> memoryview:
        import ctypes

        start = self.memory.address(layer) + block * _BLOCK
        return memoryview((ctypes.c_char * _BLOCK).from_address(start)).cast("B")

    def _scene(self, title: str) -> None:
        pool = self.pool
        mapped = self.memory.mode in ("lent", "draining")
        marks = [
            "#" if b in pool.held else "+" if b in pool.hashed else "."
            for b in (*pool.base, *pool.lent)
        ]
        cut = len(pool.base)
        tail = "".join(marks[cut:]) if mapped else " " * len(pool.lent)
        scene = Scene(
            title,
            str(self.memory.mode),
            self.twin.physical() // 1024,
            f"{''.join(marks[:cut])}|{tail}|",
        )
        self.scenes.append(scene)
        self._progress(str(scene))
        time.sleep(self._pace)
