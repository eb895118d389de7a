"""Claims in vLLM, measured: the paper's runs, and a soak.

`ServedPool` is a scheduler that serves, driven by hand: its clock is set, its model pretended (or a
whole engine's).  Tests use it too.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvclaims.bridge.serving.desk import Answer
from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.serving.tracefiles import in_order
from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.engine import IN_PROCESS, WHOLE_ENGINE
from kvclaims.bridge.vllm.serving import Serving
from kvclaims.checker.audit import audit
from kvclaims.checker.engines import find
from kvclaims.checker.litmus import litmus
from kvclaims.checker.monitor import Monitor
from kvclaims.checker.programs import select
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.content import Segment, tokens_of
from kvclaims.spec.interface import (
    ClaimSpec,
    EngineMissing,
    PoolConfig,
    Predicate,
    PredicateKind,
    RequestSpec,
)
from kvclaims.spec.operations import drain
from kvclaims.spec.pool import REQUEST
from kvclaims.spec.vocabulary import TERMINAL, Protection, Verdict

OWNERS: Final = ("ann", "bob", "cy")
_TIER: Final = 40
"""Copies that the tier of a soak has room for."""
_TIER_EVENTS: Final = {
    "resident_claim_offloaded": "offloaded",
    "resident_claim_restored": "restored",
    "restoration_failed": "failed to be restored",
}
_MOST_STEPS: Final = 3000
"""Steps without an end in which a pool is taken for stuck."""


class LeftOver(RuntimeError):
    """Requests neither end nor could be told why (B11)."""


class ServedPool:
    """A scheduler with claims, settings and a desk, of `usable` blocks of `size` tokens."""

    def __init__(
        self,
        usable: int,
        size: int,
        settings: Settings | None = None,
        whole: bool = False,
        *,
        tier: int = 0,
        in_flight: int = 1,
        load_failure_policy: str = "recompute",
    ) -> None:
        self.size = size
        config = PoolConfig(usable, size, host_blocks=tier, in_flight=in_flight)
        self.driver = _driver(config, whole, load_failure_policy)
        self.scheduler: Any = self.driver.scheduler
        chosen = settings or Settings()
        self.serving = self.scheduler.serving = Serving(self.scheduler, chosen)
        self.enforcer = self.scheduler.enforce(self.serving.recorder, chosen.defer_limit)
        self.now = 0.0
        self.desk = self.enforcer.desk = self.serving.open(self.enforcer, lambda: self.now)
        self.outputs: dict[str, Any] = {}
        """What clients were told last, by request id."""
        update = self.scheduler.update_from_output

        def kept(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            for some in outputs.values():
                self.outputs.update({o.request_id: o for o in some.outputs})
            return outputs

        self.scheduler.update_from_output = kept

    def tokens(self, label: str, blocks: int, more: int = 0) -> list[int]:
        return list(tokens_of((Segment(label, blocks, more),), self.size))

    def do(self, op: str, owner: str = "a", **more: Any) -> Answer:
        """One operation at the desk, as JSON would bring it."""
        answer = self.desk.operate({"op": op, "owner": owner, **more})
        json.dumps(answer.body)
        return answer

    def declare(self, claim: str, label: str, blocks: int, owner: str = "a", **more: Any) -> Answer:
        body = {"claim_id": claim, "tokens": self.tokens(label, blocks), **more}
        return self.do("declare", owner, claim=body)

    def ask(self, request: str, tokens: list[int], answer: int = 1, **extra: Any) -> str:
        """A request for `answer` tokens, with `extra` in its `extra_args`; the id it has."""
        spec = RequestSpec(request, tuple(tokens), max_new_tokens=answer)
        made = self.driver.request(spec, extra)
        self.driver.add(made)
        return str(made.request_id)

    def step(self) -> None:
        self.driver.step()

    def run(self) -> None:
        """Step until nothing waits or runs."""
        for _ in range(_MOST_STEPS):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise LeftOver(f"after {_MOST_STEPS:,} steps requests are left over (B11)")

    def close(self) -> None:
        self.serving.close()
        self.driver.close()


def _driver(config: PoolConfig, whole: bool, load_failure_policy: str) -> Any:
    engine = WHOLE_ENGINE if whole else IN_PROCESS
    engine.info()
    setup.quieten(setup.WHOLE if whole else setup.ALONE)
    if whole:
        from kvclaims.bridge.vllm.whole_engine import WholeDriver

        return WholeDriver(config, load_failure_policy=load_failure_policy)
    from kvclaims.bridge.vllm.simulated import SimulatedDriver

    return SimulatedDriver(config, load_failure_policy)


# -- the paper's runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One number of arXiv 2605.24259 and ours."""

    run: str
    quantity: str
    paper: Any
    ours: Any


PAPER: Final[dict[str, dict[str, Any]]] = {
    "L1": {"outcome": "served", "victims": 50, "accepted": 0, "harmed": 0},
    "L2": {"outcome": "served_no_admit", "victims": 50, "harmed": 0},
    "L3": {"outcome": "refused", "victims": 0, "shortfall": 50, "free": 20},
    "L4": {"outcome": "served", "harmed": 0},
    "L5": {"outcome": "served", "harmed": 0},
}
"""Figures that the litmus programs show as they are; L6, L7 and C1 are whole programs, below."""

WHOLE_PROGRAMS: Final = ("L1", "L2", "L3", "L4", "L5", "L6", "L7", "C1", "S")
SWEEP: Final = (80, 90, 100, 110, 120, 130, 150)


def paper(engine_name: str) -> list[Figure]:
    """All figures, ours from this engine.  Raises `EngineMissing`."""
    engine = find(engine_name)
    info = engine.info()
    figures: list[Figure] = []
    for name in WHOLE_PROGRAMS:
        report = litmus(engine, info, select([name]), lambda _: None)
        figures.append(Figure(name, "program", "HOLDS", str(report.verdict)))
        if name in PAPER:
            (case,) = report.programs[0].cases
            figures += [
                Figure(name, quantity, told, case.observed.get(quantity))
                for quantity, told in PAPER[name].items()
            ]
    return [*figures, *_sweep(engine), *_live_run(engine)]


def _sweep(engine: Any) -> Iterator[Figure]:
    """A resident prefix of 60 against 70 active blocks, native: max(0, 130 − usable) victims."""
    for usable in SWEEP:
        runtime = engine.open(PoolConfig(usable, engine.block_size), "sweep")
        for name, label, blocks in (("cache", "A", 60), ("run", "B", 70)):
            tokens = tokens_of((Segment(label, blocks),), engine.block_size)
            runtime.submit(RequestSpec(name, tokens))
            drain(runtime)
        victims = sum(e.event == "allocation_victim_selected" for e in runtime.events())
        runtime.close()
        yield Figure(f"sweep {usable}", "victims", max(0, 130 - usable), victims)


def _live_run(engine: Any) -> Iterator[Figure]:
    """40 blocks protected, 46 needed, 67 usable (prompts of 636 and 726 tokens at 16 a block;
    here the claimed prompt is 40 full blocks, as only full blocks are found again)."""
    size = engine.block_size
    runtime = engine.open(PoolConfig(67, size), "live")
    resident = tokens_of((Segment("A", 40),), size)
    runtime.submit(RequestSpec("resident", resident))
    drain(runtime)
    runtime.declare(ClaimSpec("keep", resident, Predicate(PredicateKind.LEADING, 40)))
    runtime.submit(RequestSpec("active", tokens_of((Segment("B", 45, 6),), size)))
    drain(runtime)
    seen, view = runtime.events(), runtime.observe()
    refused = [e for e in seen if e.event == "active_request_refused"]
    deferred = [e for e in seen if e.event == "active_request_deferred"]
    kept = view.claims["keep"]
    runtime.close()
    told = refused[0].data if refused else {}
    yield Figure("live", "protected blocks", 40, kept.covered)
    yield Figure("live", "active blocks needed", 46, told.get("active_live_blocks_required"))
    yield Figure("live", "deferrals", 1, len(deferred))
    yield Figure("live", "refusals", 1, len(refused))
    yield Figure("live", "shortfall", 19, told.get("capacity_shortfall_blocks"))
    yield Figure("live", "free blocks", 27, told.get("free_blocks_before_allocate"))
    yield Figure("live", "residents lost", 0, 40 - kept.survivors)


# -- the soak --------------------------------------------------------------------------------------


@dataclass
class SoakReport:
    """What a soak did, and what is wrong with where it ended."""

    requests: int = 0
    steps: int = 0
    restarts: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    tier: Counter[str] = field(default_factory=Counter)
    events: int = 0
    problems: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.requests:,} requests, {self.steps:,} steps, {self.restarts} restarts, "
            f"{self.events:,} events, {self.seconds:.0f} s of CPU"
        )
        for name, counter in (
            ("requests", self.outcomes),
            ("claims", self.decisions),
            ("claims ended", self.phases),
            ("tier", self.tier),
        ):
            yield f"{name}: " + ", ".join(f"{n:,} {what}" for what, n in sorted(counter.items()))
        yield from (f"PROBLEM {problem}" for problem in self.problems)
        yield "every block free, every claim ended, no violation" if not self.problems else "FAILED"


@contextmanager
def quiet() -> Iterator[None]:
    """Copies are harmed on purpose: the log says nothing of it."""
    log = logging.getLogger("kvclaims.tier")
    kept = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(kept)


@quiet()
def soak(
    engine: str, requests: int, seed: int, say: Callable[[str], None], per_life: int = 10_000
) -> SoakReport:
    """Random requests and claims, aborts and restarts; every life of the engine is judged by the
    monitor as it runs, and by an audit of its trace files when it ends."""
    if engine not in ("vllm", "vllm-engine"):
        raise EngineMissing(f"a soak runs on vllm or vllm-engine, not on {engine!r}")
    report, start = SoakReport(), time.process_time()
    while report.requests < requests and not report.problems:
        count = min(per_life, requests - report.requests)
        with TemporaryDirectory(prefix="kvclaims-soak-") as folder:
            life = Life(engine == "vllm-engine", seed + report.restarts, Path(folder), report)
            life.live(count)
        report.restarts += 1
        report.seconds = time.process_time() - start
        say(f"{report.requests:,} requests, {report.seconds:.0f} s of CPU")
    report.restarts -= 1
    return report


class Life:
    """One engine from its start to its end."""

    def __init__(self, whole: bool, seed: int, folder: Path, report: SoakReport) -> None:
        self._chance = random.Random(seed)
        self._report = report
        self._trace = folder / "trace.jsonl"
        size, usable = (32, 48) if whole else (4, 48)
        chosen = Settings(
            quotas={"ann": 20},
            default_quota=16,
            hard_share=0.75,
            remember=50,
            trace=str(self._trace),
            trace_bytes=1 << 20,
            trace_files=0,
            trace_tables=True,
        )
        self._pool = ServedPool(usable, size, chosen, whole, tier=_TIER)
        self._usable = usable
        snapshot = self._pool.enforcer.observer.snapshot({})
        self._monitor = Monitor(snapshot.facts, snapshot.null_block)
        self._pool.enforcer.observer.listen(self._monitor)
        self._made = 0
        self._claims: list[tuple[str, str]] = []

    def live(self, requests: int) -> None:
        while self._made < requests:
            self._act()
            if self._monitor.violations:
                self._report.problems.append(str(self._monitor.violations[0]))
                break
        self._end()

    def _act(self) -> None:
        chance, pool = self._chance, self._pool
        roll = chance.random()
        if roll < 0.45:
            self._request()
        elif roll < 0.80 or len(pool.scheduler.waiting) > 6:
            pool.step()
            self._report.steps += 1
        elif roll < 0.86:
            self._declare()
        elif roll < 0.92 and self._claims:
            self._change(*chance.choice(self._claims))
        elif roll < 0.95:
            self._abort()
        elif roll < 0.99:
            pool.now += chance.expovariate(1.0)
        elif roll < 0.995:
            self._spoil()
        else:
            pool.scheduler.reset_prefix_cache()

    def _request(self) -> None:
        chance = self._chance
        extra: dict[str, Any] = {"kvclaims_owner": chance.choice(OWNERS)}
        if chance.random() < 0.15:
            claim = self._claim(extra["kvclaims_owner"])
            del claim["tokens"]
            extra["kvclaims"] = json.dumps({**claim, "owner": extra["kvclaims_owner"]})
            self._claims.append((extra["kvclaims_owner"], claim["claim_id"]))
        admits = chance.random() < 0.9
        if not admits:
            extra["kvclaims_admit_reuse"] = 0
        self._made += 1
        self._report.requests += 1
        answer = chance.choice([1, 1, 2, 6])
        name = self._pool.ask(f"r{self._made}", self._content(), answer, **extra)
        self._monitor.introduce(REQUEST, name, admits)

    def _content(self) -> list[int]:
        chance = self._chance
        label, blocks = chance.choice("ABCDEFGH"), min(50, int(chance.expovariate(0.15)))
        return self._pool.tokens(label, blocks, chance.randint(1, self._pool.size))

    def _claim(self, owner: str) -> dict[str, Any]:
        """A claim of this owner, of which the monitor is told."""
        chance = self._chance
        weights = {
            "hard_protected": 6,
            "offloadable": 3,
            "soft_priority": 1,
            "demotable": 1,
            "best_effort": 1,
        }
        (protection,) = chance.choices(list(weights), list(weights.values()))
        claim: dict[str, Any] = {
            "claim_id": f"c{self._made}-{len(self._claims)}-{chance.randint(0, 10**6)}",
            "tokens": self._content(),
            "protection": protection,
        }
        if chance.random() < 0.8:
            claim["duration"] = chance.expovariate(0.1) + 0.001
        if chance.random() < 0.4:
            claim["min_blocks"] = 1
        hard = protection == Protection.HARD
        self._monitor.introduce(CLAIM, f"{owner}/{claim['claim_id']}#1", hard)
        return claim

    def _declare(self) -> None:
        owner = self._chance.choice(OWNERS)
        claim = self._claim(owner)
        answer = self._pool.do("declare", owner, claim=claim)
        self._report.decisions[str(answer.body.get("decision", answer.status))] += 1
        self._claims.append((owner, claim["claim_id"]))

    def _change(self, owner: str, claim: str) -> None:
        op = self._chance.choice(["release", "demote", "renew", "inspect", "list"])
        self._pool.do(op, owner, claim_id=claim, renewal={"duration": 3})
        del self._claims[:-40]

    def _abort(self) -> None:
        from vllm.v1.request import RequestStatus

        alive = list(self._pool.scheduler.requests)
        if alive:
            chosen = self._chance.choice(alive)
            self._pool.scheduler.finish_requests(chosen, RequestStatus.FINISHED_ABORTED)

    def _spoil(self) -> None:
        """A copy in the tier goes bad."""
        copies = self._pool.enforcer.offloading.tier.copies
        if copies:
            spoil(self._pool.driver, self._chance.choice(sorted(copies.values())), self._chance)

    def _end(self) -> None:
        """Everything that runs ends, every claim ends, and the pool is looked at."""
        pool, problems = self._pool, self._report.problems
        try:
            pool.run()
        except LeftOver as error:
            problems.append(str(error))
            pool.close()
            return
        pool.now += 10_000_000
        pool.desk.tick()
        for claim in list(pool.enforcer.book.claims.values()):
            if claim.phase not in TERMINAL:
                owner, _, name = claim.spec.claim_id.partition("/")
                pool.do("release", owner, claim_id=name)
        book = pool.enforcer.book
        pool.desk.tick()
        self._report.phases.update(claim.phase.value for claim in book.claims.values())
        if not all(claim.phase in TERMINAL for claim in book.claims.values()):
            problems.append("a claim is in force at the end (V2)")
        if pool.enforcer.queue_length() != self._usable:
            free = pool.enforcer.queue_length()
            problems.append(f"{free} of {self._usable} blocks are free at the end (B7)")
        if book.owed or book.share.total or pool.enforcer.requests.records:
            problems.append("something is owed or remembered at the end")
        tier = pool.enforcer.offloading.tier
        if tier.promised or tier.is_busy or tier.kept > _TIER:
            problems.append("the tier owes something at the end, or holds too much (O1)")
        self._monitor.audit(pool.enforcer.observer.snapshot(book.pins()))
        problems += [str(violation) for violation in self._monitor.violations[:3]]
        self._report.outcomes.update(pool.serving.tally.outcomes)
        self._report.events += pool.serving.recorder.count
        pool.close()
        self._audit()

    def _audit(self) -> None:
        whole = self._trace.with_name("whole.jsonl")
        with whole.open("w") as out:
            for path in in_order(self._trace):
                out.write(path.read_text())
        report = audit([whole])
        for run in report.runs:
            self._report.tier.update(
                {_TIER_EVENTS[e]: n for e, n in run.fold.counts.items() if e in _TIER_EVENTS}
            )
        if report.verdict is not Verdict.HOLDS:
            found = [str(v) for run in report.runs for v in run.fold.violations]
            self._report.problems += found[:3] or [str(report.verdict)]


def spoil(driver: Any, copy: str, chance: random.Random) -> None:
    """The copy of this name goes bad in the tier: a bit of its file turns over, or, where copies
    are pretended, it is one that is found out."""
    files = getattr(driver, "tier_files", None)
    if files is None:
        driver.tier.files.broken.add(copy)
        return
    (path,) = (path for path in files() if path.stem == copy)
    whole = bytearray(path.read_bytes())
    whole[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
    path.write_bytes(whole)
