"""The desk: who may do what to which claim, and what each one is told (Q1 to Q3).

It lives where the scheduler lives and is called between its steps only, so it needs no lock.
Inside, a claim is called `owner/claim_id`; an owner's namespace is its own, and what belongs to
others is known to it by an opaque id and a size.  Time is the wall's, in milliseconds (`TICKS`).
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any, Final, TypeVar

from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.serving.tally import OTHERS, Tally
from kvclaims.bridge.serving.tracequeue import TraceQueue
from kvclaims.bridge.serving.wire import (
    TICKS,
    BadClaim,
    Order,
    parse_order,
    read_duration,
    read_json,
    read_name,
    ticks,
)
from kvclaims.bridge.vllm.limits import HardShare, Limits, TierShare
from kvclaims.spec.feasibility import Judgement, Situation
from kvclaims.spec.interface import BadOperation, ClaimAnswer, Predicate
from kvclaims.spec.vocabulary import Decision, Outcome, Phase

ANONYMOUS: Final = "anonymous"
"""The owner of a claim that names none."""

OWNER: Final = "kvclaims_owner"
"""Key in a request's `extra_args` (`vllm_xargs`): who asks, so that a refusal names the asker's own
claims (Q3)."""

VOUCHER: Final = "kvclaims_voucher"
"""Key there: that the owner's API key was seen (`Settings.voucher`)."""

_KEPT_REFUSALS: Final = 4096
_KEPT_DECISIONS: Final = 1024
_MOST_LISTED: Final = 1000


_ROUTES: Final = "([a-z]+|generate-tokens|generative-scoring)"
_PARTS: Final = r"[-_]\d+|-[0-9a-f]+-beam-\d+|-prompt-\d+-chunk-\d+"
"""What vLLM calls one prompt of several, one beam of a search, one chunk of a prompt to embed."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Who:
    """Who asks: an owner, or the operator (who names the owner it speaks of, where it matters)."""

    owner: str
    operator: bool = False


@dataclass(frozen=True)
class Refusal:
    """A request that was turned away.  `blockers` maps claims to their size in blocks."""

    judgement: Judgement
    needed: int
    blockers: Mapping[str, int]


@dataclass(frozen=True)
class Answer:
    """What HTTP says: a status and a JSON object."""

    status: int
    body: dict[str, Any]


class Desk:
    """`enforcer` is the claim layer of one live scheduler."""

    def __init__(
        self,
        enforcer: Any,
        settings: Settings,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
        trace: TraceQueue | None = None,
    ) -> None:
        self.enforcer = enforcer
        self.settings = settings
        self.tally = tally
        self._trace = trace
        self._clock = clock
        self._start = clock()
        self._secret = secrets.token_bytes(16)
        self._answers: dict[str, dict[str, Any]] = {}
        """What to tell running requests that made a claim, by request id."""
        self._decisions: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """The same, until it was asked for: a stream is told before it ends."""
        self._refusals: OrderedDict[str, Refusal] = OrderedDict()
        limits = Limits(settings.quotas, settings.default_quota, settings.cap(enforcer.usable))
        enforcer.book.share = HardShare(limits)
        tier_limits = Limits(settings.tier_quotas, settings.default_tier_quota)
        enforcer.book.tier_share = TierShare(tier_limits)

    # -- time ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Bring the claims' clock up to now; claims whose time is up end here (L6)."""
        now, book = int((self._clock() - self._start) * TICKS), self.enforcer.book
        if now > book.now:
            self.enforcer.advance(now - book.now)
        book.tidy(self.settings.remember)

    # -- claims that come with requests ----------------------------------------------------------

    def owner_of(self, extra: Mapping[str, Any]) -> str:
        """Who made a request with these extra arguments.  Where owners have keys, a request that
        came past the check of keys has nobody's name."""
        owner = str(extra.get(OWNER, ANONYMOUS))
        if not self.settings.owners:
            return owner
        voucher = self.settings.voucher(owner)
        given = str(extra.get(VOUCHER, ""))
        known = voucher and secrets.compare_digest(given.encode(), voucher.encode())
        return owner if known else ANONYMOUS

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def arrived(
        self,
        request_id: str,
        raw: Any,
        tokens: tuple[int, ...] | None,
        salt: str,
        adapter: str,
        owner: str = ANONYMOUS,
    ) -> None:
        """A request brought a claim on its own prompt.  A claim that is no good is answered as
        such; the request itself is served as if it had brought none."""
        self.tick()
        try:
            order = parse_order(read_json(raw) if isinstance(raw, str) else raw, prefix=False)
            if not tokens:
                raise BadClaim("the prompt has no token ids that a claim could speak of")
            order = replace(order, tokens=tokens, salt=salt, adapter=adapter)
            if self.settings.owners and order.owner not in (None, owner):
                raise BadClaim("the claim's owner did not make the request", 403)
            told = self._declare(order, order.owner or read_name("owner", owner))
        except (BadClaim, BadOperation) as error:
            told = {"decision": "rejected", "error": str(error)}
        self._answers[request_id] = self._decisions[request_id] = told
        if len(self._decisions) > _KEPT_DECISIONS:
            self._decisions.popitem(last=False)

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """What the request is told of its claim when it ends, once."""
        told = self._answers.pop(request_id, None)
        return None if told is None else {"claim": told}

    def refused(self, request_id: str, judgement: Judgement, situation: Situation) -> None:
        """A request was turned away (F4)."""
        promises = situation.promises
        blockers = {
            c: len(promises[c].covered) + promises[c].reserve for c in judgement.blocking_claims
        }
        needed = len(situation.holds) + situation.need
        self._refusals[request_id] = Refusal(judgement, needed, blockers)
        if len(self._refusals) > _KEPT_REFUSALS:
            self._refusals.popitem(last=False)

    def told_refusal(self, request_id: str, owner: str) -> dict[str, Any]:
        """The answer of a refused request, for its owner's eyes."""
        return self._describe(self._refusals[request_id], Who(owner))

    def told_claims(self, claims: Iterable[str], owner: str) -> list[dict[str, Any]]:
        """Claims by their ids, for the eyes of this owner."""
        book = self.enforcer.book
        return [self._blamed(c, book.claims[c].footprint, Who(owner)) for c in claims]

    # -- operations ------------------------------------------------------------------------------

    def operate(self, message: Mapping[str, Any]) -> Answer:
        """One operation: `op`, `owner`, `operator`, and what the operation needs."""
        try:
            who = Who(
                read_name("owner", message.get("owner") or ANONYMOUS),
                message.get("operator") is True,
            )
            handle = _OPERATIONS.get(str(message.get("op")))
            if handle is None:
                raise BadClaim("no such operation", 404)
            self.tick()
            answer: Answer = handle(self, who, message)
        except BadClaim as error:
            return Answer(error.status, {"error": str(error)})
        except BadOperation as error:
            return Answer(409, {"error": str(error)})
        return answer

    def _op_declare(self, who: Who, message: Mapping[str, Any]) -> Answer:
        order = parse_order(message.get("claim"), prefix=True)
        self._allow(who, order)
        told = self._declare(order, order.owner or who.owner)
        return Answer(409 if told["decision"] == Decision.REFUSED else 201, told)

    def _op_check(self, who: Who, message: Mapping[str, Any]) -> Answer:
        """Whether a claim that comes with a request would be decided at all; nothing changes."""
        order = parse_order(message.get("claim"), prefix=False)
        self._allow(who, order)
        owner = order.owner or who.owner
        self._check_id(order, owner)
        self._check_speech(order, message.get("tokens"))
        self._check_count(owner)
        return Answer(200, {})

    def _op_inspect(self, who: Who, message: Mapping[str, Any]) -> Answer:
        claim = self._own(who, message)
        view = self.enforcer.book.view(claim)
        survival = {"leading": view.leading, "survivors": view.survivors}
        why = {**self._harm(claim), **self._unsaved(claim)}
        return Answer(200, {**self._summary(claim), **survival, **why})

    def _op_list(self, who: Who, _: Mapping[str, Any]) -> Answer:
        mine = [c for c in self._claims() if who.operator or c.spec.owner == who.owner]
        listed = [self._summary(claim) for claim in mine[-_MOST_LISTED:]]
        return Answer(200, {"claims": listed, "left_out": len(mine) - len(listed)})

    def _op_renew(self, who: Who, message: Mapping[str, Any]) -> Answer:
        duration = read_duration(message.get("renewal"))
        claim = self._own(who, message, in_force=True)
        self.enforcer.book.renew(claim.spec.claim_id, ticks(duration))
        return Answer(200, self._summary(claim))

    def _op_demote(self, who: Who, message: Mapping[str, Any]) -> Answer:
        return self._end(who, message, Phase.DEMOTED)

    def _op_release(self, who: Who, message: Mapping[str, Any]) -> Answer:
        return self._end(who, message, Phase.RELEASED)

    def _op_pool(self, who: Who, _: Mapping[str, Any]) -> Answer:
        share = self.enforcer.book.share
        body = {**self._numbers(), "block_size": self.enforcer.block_size}
        body["hard_blocks"] = share.used.get(who.owner, 0)
        body["quota"] = share.quota(who.owner)
        body["hard_cap"] = share.limits.cap
        return Answer(200, {**body, **self._tier(), **self._tier_of(who.owner)})

    def _op_verdict(self, who: Who, message: Mapping[str, Any]) -> Answer:
        """Why the request of this (external) id was turned away, if it was.  It is told once: the
        id may come again.  Of one in the background it is to `keep`: it is asked for repeatedly."""
        refused = _of_request(self._refusals, message)
        if not refused:
            raise BadClaim("no such request was refused", 404)
        return Answer(200, self._describe(refused[-1], who))

    def _op_decision(self, _: Who, message: Mapping[str, Any]) -> Answer:
        """What became of the claim that the request of this (external) id brought, once."""
        decided = _of_request(self._decisions, message)
        if not decided:
            raise BadClaim("no such request brought a claim", 404)
        return Answer(200, decided[-1])

    def _op_stats(self, *_: Any) -> Answer:
        return Answer(200, self.stats())

    # -- deciding --------------------------------------------------------------------------------

    def _declare(self, order: Order, owner: str) -> dict[str, Any]:
        self._check_id(order, owner)
        spec = order.spec(f"{owner}/{order.claim_id}", owner, self.enforcer.block_size)
        self._check_size(spec.predicate)
        self._check_count(owner)
        answer: ClaimAnswer = self.enforcer.declare(spec)
        claim = self.enforcer.book.claims[spec.claim_id]
        numbers = {
            "decision": answer.decision.value,
            "reason": answer.reason,
            "asked_blocks": spec.predicate.n,
            "cost_blocks": answer.cost,
            "headroom_blocks": answer.headroom,
        }
        return {**numbers, **self._summary(claim)}

    def _check_id(self, order: Order, owner: str) -> None:
        """Ids do not return but with a higher generation (L1)."""
        book = self.enforcer.book
        last = book.generation(f"{owner}/{order.claim_id}")
        if order.generation <= last:
            raise BadClaim(
                f"claim {order.claim_id} was declared before: it returns after its end, with a "
                f"generation of {last + 1} or more",
                409,
            )

    def _check_speech(self, order: Order, tokens: Any) -> None:
        """Whether a claim that comes with a request speaks of what there can be: of a prompt of so
        many tokens, where that is known."""
        if order.predicate is not None:
            self._check_size(order.predicate)
        if type(tokens) is int:
            order.speaks_of(tokens // self.enforcer.block_size, self.enforcer.block_size)

    def _check_size(self, predicate: Predicate) -> None:
        """What no request could compute is not claimed, however it would be protected."""
        usable, last = self.enforcer.usable, predicate.start + predicate.n
        if last > usable:
            raise BadClaim(f"the claim speaks of {last} blocks, and the pool has {usable}", 413)

    def _check_count(self, owner: str) -> None:
        most = self.settings.claims_per_owner
        if self.enforcer.book.in_force(owner) >= most:
            raise BadClaim(f"{most} claims of this owner are in force: end one first", 429)

    def _allow(self, who: Who, order: Order) -> None:
        if order.owner is not None and order.owner != who.owner and not who.operator:
            raise BadClaim("a claim belongs to its owner: declare it in your own name", 403)

    def _own(self, who: Who, message: Mapping[str, Any], in_force: bool = False) -> Any:
        """The claim of this name among those that the asker may see (Q1)."""
        name = read_name("claim_id", message.get("claim_id"))
        claim = self.enforcer.book.claims.get(f"{who.owner}/{name}")
        if claim is None:
            raise BadClaim("no such claim", 404)
        if in_force and not claim.responsible:
            raise BadClaim(f"the claim is {claim.phase} already", 409)
        return claim

    def _end(self, who: Who, message: Mapping[str, Any], how: Phase) -> Answer:
        claim = self._own(who, message, in_force=True)
        self.enforcer.end_claim(claim.spec.claim_id, how)
        return Answer(200, self._summary(claim))

    # -- telling ---------------------------------------------------------------------------------

    def _claims(self) -> list[Any]:
        return list(self.enforcer.book.claims.values())

    def _summary(self, claim: Any) -> dict[str, Any]:
        spec, granted = claim.spec, claim.granted
        refused = claim.phase is Phase.REFUSED
        return {
            "claim_id": spec.claim_id.partition("/")[2],
            "owner": spec.owner,
            "generation": spec.generation,
            "protection": spec.protection.value,
            "phase": claim.phase.value,
            "granted": None if refused else granted.to_json(),
            "granted_blocks": 0 if refused else granted.n,
            "start": granted.start,
            "covered_blocks": len(claim.cover) if claim.responsible else 0,
            "reserved_blocks": claim.reserve,
            "ends_in": self._ends_in(claim),
        }

    def _ends_in(self, claim: Any) -> float | None:
        if claim.end is None or not claim.responsible:
            return None
        left: float = (claim.end - self.enforcer.book.now) / TICKS
        return max(0.0, left)

    def _describe(self, refusal: Refusal, who: Who) -> dict[str, Any]:
        judgement, usable = refusal.judgement, self.enforcer.usable
        body: dict[str, Any] = {
            "outcome": judgement.outcome.value,
            "shortfall": judgement.shortfall,
            "missing_now": judgement.missing_now,
            "needed_blocks": refusal.needed,
            "usable_blocks": usable,
            "blocking_claims": [self._blamed(c, n, who) for c, n in refusal.blockers.items()],
        }
        if judgement.outcome is Outcome.CAPACITY_REQUIRED:
            body["fits_tokens"] = usable * self.enforcer.block_size
        else:
            body["retry_after"] = self._retry_after(refusal.blockers)
        return body

    def _blamed(self, claim: str, blocks: int, who: Who) -> dict[str, Any]:
        """A blocking claim as the asker may know it (Q3)."""
        owner, _, name = claim.rpartition("/")
        if who.operator or owner == who.owner:
            return {"claim": name, "owner": owner, "blocks": blocks}
        return {"claim": self.opaque(claim), "blocks": blocks}

    def opaque(self, name: str) -> str:
        """The same name for the same thing while this engine runs, and nothing that leads back."""
        return hashlib.blake2b(name.encode(), key=self._secret, digest_size=6).hexdigest()

    def _retry_after(self, blockers: Iterable[str]) -> int:
        """Seconds until the last of the blocking claims ends; the setting where one has no end."""
        book = self.enforcer.book
        claims = [book.claims[c] for c in blockers if c in book.claims]
        ends = [self._ends_in(claim) for claim in claims if claim.responsible]
        if not ends:
            return 1
        if None in ends:
            return self.settings.retry_after
        return max(1, math.ceil(max(end for end in ends if end is not None)))

    def _numbers(self) -> dict[str, int]:
        """The pool in blocks."""
        enforcer, book = self.enforcer, self.enforcer.book
        hard = [c for c in self._claims() if c.hard and c.responsible]
        return {
            "usable_blocks": enforcer.usable,
            "active_blocks": len({b for held in enforcer.observer.held.values() for b in held}),
            "protected_blocks": len({b for c in hard for b in c.cover.values()}),
            "reserved_blocks": book.owed,
            "free_blocks": enforcer.queue_length(),
            "headroom_blocks": book.headroom(),
        }

    def _tier(self) -> dict[str, int]:
        """Copies of blocks that the tier has room for, promised and holds; nothing without one."""
        tier = self.enforcer.book.tier
        if tier is None:
            return {}
        return {
            "tier_blocks": tier.blocks,
            "tier_promised_blocks": tier.promised,
            "tier_kept_blocks": tier.kept,
            "tier_unsaved_blocks": len(tier.unsaved),
            "tier_copy_bytes": self.enforcer.offloading.copy_bytes,
        }

    def _written(self) -> dict[str, int]:
        """Events that are not in the trace yet, or never will be; nothing without one."""
        trace = self._trace
        return {} if trace is None else {"trace_waiting": trace.waiting, "trace_lost": trace.lost}

    def _tier_of(self, owner: str) -> dict[str, int | None]:
        """What the owner's offloadable claims were promised of it."""
        book = self.enforcer.book
        if book.tier is None:
            return {}
        share = book.tier_share
        return {"tier_own_blocks": share.used.get(owner, 0), "tier_quota": share.quota(owner)}

    def _unsaved(self, claim: Any) -> dict[str, Any]:
        """How many of its blocks could not be copied into the tier, and why the first of them."""
        if claim.phase is Phase.HARMED:
            return {"unsaved_reason": claim.unsaved} if claim.unsaved else {}
        reasons = self.enforcer.book.unsaved_of(claim) if claim.offloadable else []
        return {"unsaved_blocks": len(reasons), "unsaved_reason": reasons[0]} if reasons else {}

    def _harm(self, claim: Any) -> dict[str, Any]:
        """Why it was harmed, if it was."""
        return {"harmed_by": claim.cause.value} if claim.phase is Phase.HARMED else {}

    def stats(self) -> dict[str, Any]:
        """Everything that `/metrics` shows."""
        label = self._label
        tally = self.tally
        claims = self._claims()
        in_force = (claim for claim in claims if claim.responsible)
        largest = nlargest(_MOST_LISTED, in_force, key=lambda claim: claim.footprint)
        states = Counter(r.state for r in self.enforcer.requests.records.values())
        return {
            **self._numbers(),
            **self._tier(),
            **self._written(),
            "run_id": self.settings.run_id,
            "phases": Counter(claim.phase.value for claim in claims),
            "requests": {s: states.get(s, 0) for s in ("waiting", "loading", "running")},
            "claims": [
                {
                    **label(claim.spec.claim_id),
                    "protection": claim.spec.protection.value,
                    "phase": claim.phase.value,
                    "footprint": claim.footprint,
                    "covered": len(claim.cover),
                    "reserve": claim.reserve,
                }
                for claim in largest
            ],
            "refusals": [
                {**label(c), "outcome": o, "count": n} for (c, o), n in tally.refusals.items()
            ],
            "harms": [{**label(c), "cause": o, "count": n} for (c, o), n in tally.harms.items()],
            "unsaved": [{**label(c), "count": n} for (c, _), n in tally.unsaved.items()],
            "outcomes": tally.outcomes,
            "shortfall": tally.shortfall,
            "ages": tally.ages,
            "age_sum": tally.age_sum,
        }

    def _label(self, claim: str) -> dict[str, str]:
        owner, _, name = claim.rpartition("/")
        if claim == OTHERS:
            return {"claim": OTHERS, "owner": OTHERS}
        if self.settings.metrics_names:
            return {"claim": name, "owner": owner}
        return {"claim": self.opaque(claim), "owner": self.opaque(owner)}


def _of_request(known: OrderedDict[str, _T], message: Mapping[str, Any]) -> list[_T]:
    """What is known of the request that its client, or who asked for it, calls so: vLLM puts the
    route before the name, and numbers behind.  It is forgotten unless it is to be kept."""
    given = str(message.get("request"))
    name = re.escape(given)
    wanted = re.compile(rf"(\d+_)?({_ROUTES}-{name}({_PARTS})?|{name}_\d+)(-[0-9a-f]{{8}})?")
    found = [r for r in known if given in r and wanted.fullmatch(r)]
    told = [known[r] for r in found]
    if message.get("keep") is not True:
        for request in found:
            del known[request]
    return told


_OPERATIONS: Final[dict[str, Any]] = {
    name.removeprefix("_op_"): method
    for name, method in vars(Desk).items()
    if name.startswith("_op_")
}
