"""A serving pool with a tier in real files, driven by hand and held to the truth after every act.

The truth is what the pretended memory and the files hold, read past the engine: content that can be
found is what it is called (B4), a copy that counts is in its file (O1), a claim in force has its
content somewhere (O2), and nobody is blamed for a copy that was not harmed (O2).  The monitor hears
every step of the allocator, and an audit reads the trace of every run that was not killed.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.serving.tierfiles import BadCopy, Buffer, TierFiles
from kvclaims.bridge.vllm.offloading import EMPTIED
from kvclaims.bridge.vllm.serving_bench import LeftOver, ServedPool
from kvclaims.checker.audit import audit, read_trace
from kvclaims.checker.monitor import Monitor
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.content import fingerprint
from kvclaims.spec.pool import REQUEST
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import TERMINAL, Phase, Protection, Verdict

SIZE: Final = 4
_MOST_STEPS: Final = 1000
LABELS: Final = "ABC"
OWNERS: Final = ("ann", "bob")
_FORM: Final = "pretended blocks"
_COPY: Final = 480
"""Bytes of a copy of a pretended block, about."""

POLICIES: Final = ("recompute", "fail")
PROTECTIONS: Final = (*["offloadable"] * 6, "hard_protected", "soft_priority", "demotable")


@dataclass(frozen=True)
class World:
    """What a run begins with; `limit` is in bytes, `quotas` and the rest in blocks."""

    usable: int = 16
    tier: int = 16
    limit: int | None = None
    quota: int | None = None
    in_flight: int = 1
    policy: str = "recompute"

    @property
    def is_right(self) -> bool:
        """Whether it can be begun with."""
        sizes = (self.usable, self.tier, self.limit or 1, self.quota or 1)
        whole = all(type(size) is int and size > 0 for size in sizes)
        return whole and self.in_flight in (1, 2) and self.policy in POLICIES

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def draw_world(chance: random.Random) -> World:
    usable = chance.randint(8, 20)
    return World(
        usable,
        chance.choice([chance.randint(2, 6), chance.randint(3, usable), 2 * usable]),
        chance.choice([None, None, _COPY * chance.randint(2, 12)]),
        chance.choice([None, None, chance.randint(2, usable)]),
        chance.choice([1, 2]),
        chance.choice(POLICIES),
    )


class HarmedFiles:
    """`TierFiles` that can be full, and know which copies were harmed behind their back."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.real = TierFiles(folder, _FORM, limit)
        self.is_full = False
        self.harmed: set[str] = set()
        self.ever_harmed: set[str] = set()
        self.refused: set[str] = set()
        """Contents of which a copy could not be written."""
        self.reads: Counter[str] = Counter()
        """How often each copy was read, and found to be right."""

    @property
    def life(self) -> str:
        return self.real.life

    def begin(self, life: str) -> None:
        self.real.begin(life)
        self.harmed.clear()
        self.ever_harmed.clear()

    def publish(self, name: str, content: Sequence[Buffer]) -> None:
        try:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.real.publish(name, content)
        except OSError:
            self.refused.add(json.loads(b"".join(content))[0])
            raise
        self.harmed.discard(name)

    def read(self, name: str) -> memoryview:
        content = self.real.read(name)
        self.reads[name] += 1
        return content

    def drop(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self.real.drop(names)
        self.harmed.difference_update(names)

    def close(self) -> None:
        self.real.close()

    def abandon(self) -> None:
        """What becomes of it when its process is killed."""
        self.real.let_go()

    def harm(self, name: str, how: int, at: int, others: Sequence[bytes]) -> None:
        """A bit turns over, the end is cut off, the file is gone, or it is another's."""
        path = self.real.folder / f"{name}.kv"
        if not path.exists():  # harmed so before
            return
        whole = bytearray(path.read_bytes())
        if how == 0 and whole:
            whole[at % len(whole)] ^= 1 << at % 8
        elif how == 1:
            del whole[at % (len(whole) + 1) :]
        elif how == 2 or not others:
            path.unlink()
        else:
            whole = bytearray(others[at % len(others)])
        if path.exists():
            if bytes(whole) == path.read_bytes():
                return
            path.write_bytes(whole)
        self.harmed.add(name)
        self.ever_harmed.add(name)


class TierRun:
    """One engine after the other in one folder.  Each public method is an act; what it means where
    it cannot be done is nothing.  `findings` is what was found wrong, in its order."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.findings: list[Violation] = []
        self.counts: Counter[str] = Counter()
        """What has happened, by event; and what was done to the engine."""
        self.failed_restores: list[str] = []
        """Claims whose restore was told to have failed."""
        self.monitored = 0
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._lives = 0
        self._stale: list[bytes] = []
        """Copies as they were in lives that are over."""
        self._made = 0
        self._heard: list[Event] = []
        self._owed: tuple[str, dict[str, str]] = ("", {})
        """Contents that have a copy which a claim is owed, with its name; and the life then."""
        self._open()

    # -- acts ------------------------------------------------------------------------------------

    def claim(self, owner: int, label: int, blocks: int, kind: int, clip: bool, ends: int) -> None:
        """A claim of `blocks` blocks, by prefix."""
        self._made += 1
        who, name = OWNERS[owner % len(OWNERS)], f"c{self._made}"
        protection = PROTECTIONS[kind % len(PROTECTIONS)]
        hard = protection == Protection.HARD
        self._monitor.introduce(CLAIM, f"{who}/{name}#1", hard)
        more: dict[str, Any] = {"min_blocks": 1} if clip else {}
        if ends:
            more["duration"] = float(ends)
        label_ = LABELS[label % len(LABELS)]
        told = self.pool.declare(name, label_, blocks, who, protection=protection, **more)
        self.counts[f"claim {told.body.get('decision', told.status)}"] += 1
        self._claims.append((who, name))

    def piece(self, owner: int, label: int, start: int, blocks: int) -> None:
        """An offloadable claim of so many blocks from the `start`th on."""
        self._made += 1
        who, name = OWNERS[owner % len(OWNERS)], f"c{self._made}"
        self._monitor.introduce(CLAIM, f"{who}/{name}#1", False)
        predicate = {"kind": "contiguous_range", "start": start, "n": blocks}
        named = (name, LABELS[label % len(LABELS)], start + blocks, who)
        told = self.pool.declare(*named, protection=Protection.OFFLOADABLE, predicate=predicate)
        self.counts[f"piece {told.body.get('decision', told.status)}"] += 1
        self._claims.append((who, name))

    def again(self, which: int, label: int, blocks: int) -> None:
        """A claim that has ended returns with the next generation, perhaps for other content."""
        if not self._claims:
            return
        who, name = self._claims[which % len(self._claims)]
        generation = self.pool.enforcer.book.generation(f"{who}/{name}") + 1
        self._monitor.introduce(CLAIM, f"{who}/{name}#{generation}", False)
        named = (name, LABELS[label % len(LABELS)], blocks, who)
        told = self.pool.declare(*named, protection=Protection.OFFLOADABLE, generation=generation)
        self.counts[f"again {told.body.get('decision', told.status)}"] += 1
        if told.status == 201:
            self._kept.discard(f"{who}/{name}")
            self._whole.discard(f"{who}/{name}")
            self._missed.pop(f"{who}/{name}", None)

    def ask(self, label: int, blocks: int, more: int, answer: int, admits: bool) -> None:
        """A request for the first blocks of a content, and `more` tokens of the next."""
        self._made += 1
        tokens = self.pool.tokens(LABELS[label % len(LABELS)], blocks, more % SIZE)
        extra: dict[str, Any] = {"kvclaims_owner": OWNERS[self._made % len(OWNERS)]}
        if not admits:
            extra["kvclaims_admit_reuse"] = 0
        name = self.pool.ask(f"r{self._made}", tokens, answer, **extra)
        self._monitor.introduce(REQUEST, name, admits)

    def step(self, times: int) -> None:
        for _ in range(times):
            while len(self._driver.flying) >= self.world.in_flight:
                self._complete()
            self._dispatch()
        if self.world.in_flight == 1:
            self._complete()

    def dispatch(self) -> None:
        if len(self._driver.flying) < self.world.in_flight:
            self._dispatch()

    def complete(self) -> None:
        if self._driver.flying:
            self._complete()

    def change(self, which: int, how: int) -> None:
        """An owner releases, demotes or renews a claim."""
        if self._claims:
            owner, name = self._claims[which % len(self._claims)]
            op = ("release", "demote", "renew")[how % 3]
            self.pool.do(op, owner, claim_id=name, renewal={"duration": 5})

    def wait(self, seconds: int) -> None:
        self.pool.now += seconds
        self.pool.desk.tick()

    def abort(self, which: int) -> None:
        from vllm.v1.request import RequestStatus

        alive = [r for r, request in self._requests.items() if not request.is_finished()]
        if not alive:
            return
        records = self.pool.enforcer.requests.records
        load = [r for r in alive if r in records and records[r].state == "loading"]
        chosen = load if load and which % 2 else alive  # there is seldom one that loads
        name = chosen[which % len(chosen)]
        self.counts["abort of one that loads"] += name in load
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def harm(self, which: int, how: int, at: int) -> None:
        """Something happens to the file of a copy."""
        names = sorted(self._tier.copies.values())
        if names:
            name = names[which % len(names)]
            others = [path.read_bytes() for path in self.files() if path.stem != name]
            self.counts[f"harm {how % 4}"] += 1
            self._store.harm(name, how % 4, at, [*others, *self._stale])

    def fill(self, is_full: bool) -> None:
        self._store.is_full = is_full

    def pace(self, things: int) -> None:
        """So many things are done in a step of what copies and loads need; 0 for all."""
        self._driver.tier.patience = (lambda: things) if things else None

    def lose(self, label: int, position: int) -> None:
        """A fault takes a content on the device."""
        keys = self.pool.enforcer.names.of_tokens(self._content(label, position + 1), "")
        self.counts["loss on the device"] += self.pool.enforcer.lose(keys[position], position)

    def reset(self) -> None:
        self._keep_stale()
        self._judge_reset("reset", bool(self._scheduler.reset_prefix_cache()))

    def sleep(self) -> None:
        """The memory is given up, and comes back blank."""
        while self._driver.flying:
            self._complete()
        self._keep_stale()
        slept = self.pool.enforcer.reset("pool_slept")
        self._judge_reset("sleep", slept)
        if slept:
            self._driver.discard()
            self.pool.serving.recorder.emit("pool_woken")

    def kill(self, cut: int) -> None:
        """The process is gone, and leaves what it leaves; the next one begins in its folder."""
        self._keep_stale()
        left = self._folder / f"tier {self._lives + 1}"
        shutil.copytree(self._store.real.folder, left)
        (left / "abcd.part").write_bytes(b"".join(self._stale[:1])[:cut])
        (left / "ef01.kv").write_bytes(b"".join(self._stale[:1])[: cut + 1])
        self._judge_killed()
        self._store.abandon()
        self.counts["kill"] += 1
        self._open()
        found = {path.name for path in left.iterdir()}
        if found != {"in-use"}:
            self._found("O1", f"an engine that starts finds {sorted(found)} of another")

    def end(self) -> None:
        """The disk is well, everything that runs ends, and so does every claim."""
        self._store.is_full = False
        self.pace(0)
        try:
            while self._driver.flying:
                self._complete()
            self.pool.run()
        except LeftOver as error:
            self._found("B11", str(error))
            return
        self.judge()
        for owner, name in self._claims:
            self.pool.do("release", owner, claim_id=name)
        self._judge_end()
        self.pool.close()
        if {path.name for path in self._store.real.folder.iterdir()} != {"in-use"}:
            self._found("O1", "files are left when the engine has stopped")
        self._judge_trace()

    # -- for programs ----------------------------------------------------------------------------

    @property
    def claims_made(self) -> list[str]:
        """The claims of this life, as they are called inside."""
        return [f"{owner}/{name}" for owner, name in self._claims]

    def also_made(self, *claims: tuple[str, str]) -> None:
        """Claims that were made past `claim`; they are released in the end."""
        self._claims += claims

    def introduce(self, request: str) -> None:
        """Tell the monitor of a request that was made past `ask`."""
        self._monitor.introduce(REQUEST, request, True)

    def finish(self) -> None:
        """Step until nothing waits, runs or is written."""
        while self._driver.flying:
            self._complete()
        for _ in range(_MOST_STEPS):
            if not self._scheduler.has_requests():
                return
            self._dispatch()
            self._complete()
        self._found("B11", f"after {_MOST_STEPS} steps requests are left over")

    def files(self) -> list[Path]:
        return sorted(self._store.real.folder.glob("*.kv"))

    # -- what is true ----------------------------------------------------------------------------

    def judge(self) -> None:
        """Hold what the engine says against memory, files and its own promises."""
        self.findings += self._monitor.violations[:1]
        of_tier = (self._copies, self._spared, self._room)
        for check in (self._visible, *of_tier, self._claimed, self._early, self._blamed):
            for rule, message in check():
                self._found(rule, message)

    def _visible(self) -> Iterator[tuple[str, str]]:
        """What can be found on the device is what it is called, once it is said to be written."""
        enforcer = self.pool.enforcer
        for key, blocks in enforcer.observer.where.items():
            for block in blocks:
                if enforcer.is_written(block) and self._digest(block) != fingerprint(key):
                    yield "B4", f"block {block} does not hold {key}, which it is found under"

    def _copies(self) -> Iterator[tuple[str, str]]:
        """A copy that counts is in its file, unless it was harmed there."""
        for content, name in self._tier.copies.items():
            if name in self._store.harmed:
                continue
            try:
                held = json.loads(bytes(self._store.real.read(name)))[0]
            except BadCopy as error:
                yield "O1", f"the copy of {content} counts, and {error}"
            else:
                if held != content:
                    yield "B4", f"the copy of {content} holds {held}"

    def _spared(self) -> Iterator[tuple[str, str]]:
        """A copy that a claim in force is owed stays, unless it was harmed, or all are given up."""
        tier, (life, owed) = self._tier, self._owed
        for content, name in owed.items() if life == tier.life else ():
            given_up = not tier.keeps(content) and name not in self._store.ever_harmed
            if given_up and tier.owners(content):
                yield "O1", f"the copy of {content} is given up, and {tier.owners(content)} wait"
        self._owed = tier.life, {c: name for c, name in tier.copies.items() if tier.owners(c)}

    def _claimed(self) -> Iterator[tuple[str, str]]:
        """A claim that is kept has its content: in the tier, or, on its way back, on the device."""
        tier, enforcer = self._tier, self.pool.enforcer
        for claim in enforcer.book.claims.values():
            if not (claim.offloadable and claim.responsible) or claim.phase is Phase.ACCEPTED:
                continue
            for key in claim.keys:
                if not tier.keeps(key) and not enforcer.is_visible(key):
                    yield "O2", f"{claim.spec.claim_id} is {claim.phase}, and {key} is nowhere"

    def _early(self) -> Iterator[tuple[str, str]]:
        """A claim that no tier keeps yet, and that had all of its content, has it still: on the
        device, in the tier, or on its way there."""
        tier, enforcer = self._tier, self.pool.enforcer
        safe = {*tier.copies, *tier.under_way}
        self._was_there &= safe
        self._was_there |= {key for key in enforcer.observer.where if enforcer.survives(key)}
        self._was_there |= tier.copies.keys()
        for name, claim in enforcer.book.claims.items():
            if not claim.offloadable or claim.phase is not Phase.ACCEPTED:
                continue
            if self._was_there.issuperset(claim.keys):
                self._whole.add(name)
            gone = [k for k in claim.keys if k not in safe and not enforcer.is_visible(k)]
            if gone and name in self._whole:
                yield "L3", f"{name} had all of its content, {gone[0]} is nowhere, nothing is told"

    def _room(self) -> Iterator[tuple[str, str]]:
        tier, book = self._tier, self.pool.enforcer.book
        if tier.kept > tier.blocks or tier.promised > tier.blocks:
            yield "O1", f"{tier.kept} copies kept, {tier.promised} promised, of {tier.blocks}"
        used = sum(path.stat().st_size for path in self._store.real.folder.glob("*.kv"))
        if self.world.limit is not None and used > self.world.limit:
            yield "O1", f"{used} bytes in files, of {self.world.limit}"
        owed: Counter[str] = Counter()
        for claim in book.claims.values():
            if claim.offloadable and claim.responsible:
                owed[claim.spec.owner] += claim.footprint
        for owner, blocks in owed.items():
            if self.world.quota is not None and blocks > self.world.quota:
                yield "Q2", f"{owner} was promised {blocks} blocks of {self.world.quota}"

    def _blamed(self) -> Iterator[tuple[str, str]]:
        """Since the last time: restores said to have failed, and claims said to be harmed."""
        heard, self._heard = self._heard, []
        for event in heard:
            self.counts[event.event] += 1
            if event.event == "resident_claim_restored":
                missed = self._missed.pop(str(event.claim_id), {})
                anew = [key for key, reads in missed.items() if self._reads(key) == reads]
                if anew:
                    yield "O3", f"{event.claim_id} is restored, and {anew[0]} was never loaded"
            if event.event == "restoration_failed":
                self.failed_restores.append(str(event.claim_id))
            if event.event == "restoration_failed" and self._name(str(event.prefix_id)) is False:
                yield "O2", f"{event.claim_id} is blamed for a copy that is as it was"
            if event.event == "resident_claim_materialized":
                self._kept.add(str(event.claim_id))
            yield from self._harmed(event)
            yield from self._unsaved(event)
        self._miss()

    def _harmed(self, event: Event) -> Iterator[tuple[str, str]]:
        """What a tier keeps is not harmed by the engine's own choice, and no other claim is harmed
        before it was whole."""
        claim = self.pool.enforcer.book.claims.get(str(event.claim_id))
        if event.event != "resident_claim_harmed" or claim is None or not claim.offloadable:
            return
        cause = event.data["cause"]
        if event.claim_id in self._kept:
            if cause != "fault":
                yield "O2", f"{event.claim_id} is harmed by {cause}"
            return
        self.counts[f"harmed early by {cause}"] += 1

    def _unsaved(self, event: Event) -> Iterator[tuple[str, str]]:
        """A copy that is told to have failed did, or was harmed."""
        if event.event != "resident_claim_unsaved" or event.data["reason"] == EMPTIED:
            return
        content = str(event.prefix_id)
        if content not in self._store.refused and not self._name(content):
            yield "O2", f"{event.claim_id} is told that {content} has no copy, and none failed"

    def _miss(self) -> None:
        """Note what claims in the tier lack on the device now, and how often its copy was read
        before; what was loaded and leaves again is missed anew."""
        enforcer = self.pool.enforcer
        for name, claim in enforcer.book.claims.items():
            if claim.phase in (Phase.OFFLOADED, Phase.RESTORING):
                missed = self._missed.setdefault(name, {})
                for key in claim.keys:
                    if not enforcer.is_visible(key):
                        missed.setdefault(key, self._reads_at_loss.get(key, self._reads(key)))
                    elif missed.get(key) != self._reads(key):
                        missed.pop(key, None)
            else:
                self._missed.pop(name, None)

    def _reads(self, content: str) -> int:
        return self._store.reads[self._names.get(content, "")]

    def _name(self, content: str) -> bool | None:
        """Whether the copy of a content was ever harmed; None where it never had one."""
        name = self._names.get(content)
        return None if name is None else name in self._store.ever_harmed

    def _read(self, work: Any, written: set[int]) -> None:
        """What a step is about to build on is what the request says, but for what it has `written`
        first itself."""
        request = self._requests.get(work.request_id)
        if request is None:
            return
        ids = self.pool.enforcer.names.of_request(request)
        for position in range(min(work.start // SIZE, len(ids))):
            block = work.tables[0][position]
            if block not in written and self._digest(block) != fingerprint(ids[position]):
                self._found(
                    "O2", f"{work.request_id} is served block {block}, which is no {ids[position]}"
                )

    def _judge_end(self) -> None:
        pool, tier = self.pool, self._tier
        enforcer = pool.enforcer
        self._monitor.audit(enforcer.observer.snapshot(enforcer.book.pins()))
        self.judge()
        if not all(claim.phase in TERMINAL for claim in enforcer.book.claims.values()):
            self._found("V2", "a claim is in force at the end")
        if enforcer.queue_length() != self.world.usable:
            self._found("B7", f"{enforcer.queue_length()} of {self.world.usable} blocks are free")
        if tier.promised or tier.is_busy or enforcer.book.tier_share.total or enforcer.book.owed:
            self._found("Q2", "something is promised at the end, or on its way")
        if enforcer.requests.records:
            self._found("B7", "requests are remembered at the end")
        self.monitored += self._monitor.steps

    def _judge_trace(self) -> None:
        report = audit([self._trace])
        if report.verdict is Verdict.HOLDS:
            return
        broken = [violation for run in report.runs for violation in run.fold.violations]
        self.findings += broken[:1] or [Violation("T2", "; ".join(report.lines()))]

    def _judge_reset(self, name: str, succeeded: bool) -> None:
        self.counts[name] += succeeded
        if succeeded and self._tier.copies:
            self._found("B10", "copies can be found after a reset that succeeded")

    def _judge_killed(self) -> None:
        """The trace of an engine that was killed says that it is not whole (T3)."""
        self.pool.serving.flush(wait=60)
        try:
            read_trace(self._trace)
        except TraceError:
            return
        self._found("T3", "the trace of a run that was killed passes for whole")

    # -- small helpers ---------------------------------------------------------------------------

    def _open(self) -> None:
        self._lives += 1
        world = self.world
        self._trace = self._folder / f"trace {self._lives}.jsonl"
        settings = Settings(
            run_id=f"life {self._lives}",
            trace=str(self._trace),
            trace_tables=True,
            default_tier_quota=world.quota,
            hard_share=0.5,
        )
        self.pool = ServedPool(
            world.usable,
            SIZE,
            settings,
            tier=world.tier,
            in_flight=world.in_flight,
            load_failure_policy=world.policy,
        )
        self._driver = self.pool.driver
        self._scheduler = self.pool.scheduler
        self._store = HarmedFiles(self._folder / f"tier {self._lives}", world.limit)
        self._driver.use_store(self._store)
        self._tier = self.pool.enforcer.offloading.tier
        snapshot = self.pool.enforcer.observer.snapshot({})
        self._monitor = Monitor(snapshot.facts, snapshot.null_block)
        self.pool.enforcer.observer.listen(self._monitor)
        self.pool.serving.listen(self._heard_of)
        self._names: dict[str, str] = {}
        """Contents that had a copy in this life, with its name."""
        self._claims: list[tuple[str, str]] = []
        self._reads_at_loss: dict[str, int] = {}
        self._owed = ("", {})
        self._kept: set[str] = set()
        """Claims that were materialized."""
        self._whole: set[str] = set()
        """Claims that had all of their content before that."""
        self._was_there: set[str] = set()
        """Contents that are written, kept, or on their way to the tier and were written before."""
        self._missed: dict[str, dict[str, int]] = {}
        """Claim in the tier → content that has left the device since → reads of its copy then."""

    def _heard_of(self, event: Event) -> None:
        self._heard.append(event)
        if event.event in ("allocation_victim_selected", "resident_block_lost"):
            key = str(event.prefix_id)
            self._reads_at_loss[key] = self._reads(key)

    @property
    def _requests(self) -> dict[str, Any]:
        requests: dict[str, Any] = self._scheduler.requests
        return requests

    def _content(self, label: int, blocks: int) -> tuple[int, ...]:
        return tuple(self.pool.tokens(LABELS[label % len(LABELS)], blocks))

    def _dispatch(self) -> None:
        self._driver.dispatch()

    def _complete(self) -> None:
        works = self._driver.flying[0].work
        written = {block for work in works for block in work.tables[0][work.start // SIZE :]}
        for work in works:
            self._read(work, written)
        self._driver.complete()
        self._names.update(self._tier.copies)

    def _digest(self, block: int) -> int:
        (digest,) = self._driver.fingerprint((block,))
        return int(digest)

    def _keep_stale(self) -> None:
        self._stale = [path.read_bytes() for path in self.files()] or self._stale

    def _found(self, rule: str, message: str) -> None:
        self.findings.append(Violation(rule, message))
