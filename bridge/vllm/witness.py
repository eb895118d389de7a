"""The witness of failed loads: does a trace say of a load that failed whose claim it concerned?

As in arXiv 2606.01387, whose patched connector recognised 30 of 30 failed loads of claimed content,
with no false positive in 41 runs, and 131 valid traces of 131.  Here loads go through the connector
of `kvclaims.bridge.vllm.offload`, a copy is spoilt where it lies, and all that is known of a run is
what an audit finds in its trace file.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.vllm.serving_bench import Figure, ServedPool, quiet, spoil
from kvclaims.checker.audit import audit
from kvclaims.spec.content import Segment, content_ids, tokens_of
from kvclaims.spec.interface import EngineMissing, RequestSpec
from kvclaims.spec.telemetry import TraceError
from kvclaims.spec.vocabulary import Verdict

USABLE: Final = 20
BLOCKS: Final = 8
"""Blocks of the content that a run is about."""
PRESSURE: Final = 19
"""Blocks, and a token more, that take every other out of the pool."""

RUNS: Final = {
    "claimed": 30,
    "unclaimed": 11,
    "wrong-claim": 10,
    "recompute": 10,
    "no-event": 10,
    "restored": 60,
}
"""Runs of each kind.  *claimed*: a copy of an offloaded claim is spoilt, and a request loads it.
*unclaimed*: the same after the claim was released.  *wrong-claim*: the same as claimed, beside
another offloaded claim, and it is that one which must not be named.  *recompute*: the content is
computed again, and no load is asked for.  *no-event*: nobody asks for it.  *restored*: no copy is
spoilt, and the claim comes back."""

NEGATIVE: Final = ("unclaimed", "wrong-claim", "recompute", "no-event")
"""Runs in which a failed restore of the claim that is looked at would be a false one."""

PAPER: Final = {
    "claimed failures recognised": "30/30",
    "false positives": "0/41",
    "valid traces": "131/131",
}


@dataclass
class Found:
    """What the audits found, and what was served."""

    recognised: Counter[str] = field(default_factory=Counter)
    """By kind: runs whose trace says that a restore of the claim looked at failed."""
    valid: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and phase: where the claim looked at ended."""
    problems: list[str] = field(default_factory=list)
    """What is wrong whatever the traces say: other bytes served, claims that were not offloaded."""

    def figures(self, runs: dict[str, int]) -> Iterator[Figure]:
        negative = sum(runs[kind] for kind in NEGATIVE)
        told = {
            "claimed failures recognised": f"{self.recognised['claimed']}/{runs['claimed']}",
            "false positives": f"{sum(self.recognised[k] for k in NEGATIVE)}/{negative}",
            "valid traces": f"{self.valid.total()}/{sum(runs.values())}",
        }
        for quantity, paper in PAPER.items():
            yield Figure("witness", quantity, paper, told[quantity])


@quiet()
def witness(engine: str, runs: dict[str, int], seed: int, say: Callable[[str], None]) -> Found:
    """All runs on this engine; raises `EngineMissing`."""
    if engine not in ("vllm", "vllm-engine"):
        raise EngineMissing(f"the witness runs on vllm or vllm-engine, not on {engine!r}")
    found, chance = Found(), random.Random(seed)
    for kind, count in runs.items():
        for number in range(count):
            with TemporaryDirectory(prefix="kvclaims-witness-") as folder:
                run = Run(engine == "vllm-engine", kind, number, chance, Path(folder))
                run.play()
                run.judge(found)
        say(f"{count} runs of {kind}")
    return found


class Run:
    """One run of one kind, from an empty engine to its trace."""

    def __init__(
        self, whole: bool, kind: str, number: int, chance: random.Random, folder: Path
    ) -> None:
        self.kind = kind
        self._chance = chance
        self._trace = folder / "trace.jsonl"
        self._size = 32 if whole else 4
        self._policy = ("recompute", "fail")[number % 2]
        settings = Settings(run_id=f"{kind}-{number}", trace=str(self._trace), trace_tables=True)
        self._pool = ServedPool(
            USABLE, self._size, settings, whole, tier=40, load_failure_policy=self._policy
        )
        self.looked_at = "a/other" if kind == "wrong-claim" else "a/c"
        self._before: tuple[int, ...] = ()
        self.wrong: list[str] = []

    def play(self) -> None:
        self._leave("c", "A")
        if self.kind == "wrong-claim":
            self._leave("other", "B")
        if self.kind == "unclaimed":
            self._pool.do("release", claim_id="c")
        if self.kind != "restored":
            self._spoil("A")
        if self.kind != "no-event":
            self._serve("again", "A", 1, reads=self.kind != "recompute")
            self._compare(served=self.kind in ("recompute", "restored"))
        self._pool.close()

    def judge(self, found: Found) -> None:
        """What an audit of the trace file alone finds."""
        found.problems += self.wrong
        try:
            report = audit([self._trace])
        except TraceError as error:
            found.problems.append(str(error))
            return
        (run,) = report.runs
        found.valid[self.kind] += report.verdict is Verdict.HOLDS
        found.recognised[self.kind] += self.looked_at in run.fold.failed_restores
        found.ends[self.kind, str(run.fold.claims[self.looked_at].phase)] += 1

    def _leave(self, claim: str, label: str) -> None:
        """A claim is materialized, and pressure takes it off the device."""
        self._pool.declare(claim, label, BLOCKS, protection="offloadable")
        self._serve(f"cache {claim}", label, 1)
        if label == "A":
            self._before = self._read()
        self._serve(f"press {claim}", f"P{claim}", 1, blocks=PRESSURE)
        phase = self._pool.do("inspect", claim_id=claim).body["phase"]
        if phase != "offloaded":
            self.wrong.append(f"{self.kind}: claim {claim} is {phase}, not offloaded")

    def _serve(
        self, request: str, label: str, more: int, *, blocks: int = BLOCKS, reads: bool = True
    ) -> None:
        tokens = tokens_of((Segment(label, blocks), Segment("z", 0, more)), self._size)
        made = self._pool.driver.request(RequestSpec(request, tokens), {"kvclaims_owner": "a"})
        made.skip_reading_prefix_cache = not reads
        self._pool.driver.add(made)
        self._pool.run()

    def _spoil(self, label: str) -> None:
        """One copy of this content goes bad: a bit of its file is turned over."""
        keys = self._keys(label)
        copies = self._pool.enforcer.offloading.tier.copies
        spoil(self._pool.driver, copies[self._chance.choice(keys)], self._chance)

    def _compare(self, *, served: bool) -> None:
        """What is found under the content reads as it did; of a load that failed, what was found
        before the copy that went bad, and with it all that was computed instead."""
        read = self._read()
        whole = served or self._policy == "recompute"
        if read != self._before[: len(read)] or (whole and len(read) != BLOCKS):
            self.wrong.append(f"{self.kind}: {len(read)} blocks are found and some are wrong")

    def _read(self) -> tuple[int, ...]:
        """Digests of the blocks that the content is found in, from the first on."""
        found = [self._pool.enforcer.observer.lookup(key) for key in self._keys("A")]
        leading = found[: found.index(None)] if None in found else found
        return tuple(self._pool.driver.fingerprint(tuple(b for b in leading if b is not None)))

    def _keys(self, label: str) -> tuple[str, ...]:
        return content_ids(tokens_of((Segment(label, BLOCKS),), self._size), self._size)
