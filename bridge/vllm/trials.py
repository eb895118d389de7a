"""Drawn runs of vLLM's scheduler in ways that the runtime interface has no words for.

Sessions that get their input piece by piece, resets that make what runs give way, outputs of
steps that were dispatched before their request gave way, models that sample nothing in a step,
blocks that a worker has to clear, transfers whose failure is told early, requests that ask to be
told of hits: a `Setting` says which of these a run has, and a seed draws the rest.

Every run is judged by what no scheduler may do, whatever it is made of: a request reads KV of its
own tokens (B4), gets each token once and behind those that it was sampled for, no operation
raises (B9), the pool agrees with itself (B1, B2, B3, B6), events tell what is resident (B8), a
reset leaves nothing visible (B10), what waits goes on when it can (B11), and in the end every
block is free (B7).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, Final

from kvclaims.bridge.vllm import setup
from kvclaims.bridge.vllm.trial_settings import (
    BLOCK_SIZE,
    CANVAS,
    DIFFUSION,
    GENERATE,
    KINDS,
    LONGEST,
    MOST,
    POOLING,
    SMALL,
    Setting,
    draw_setting,
)
from kvclaims.bridge.vllm.wholepool import Told, at_rest, audit
from kvclaims.bridge.vllm.worker import BLANK, SPOILED, STOP, Found, Slot, SlotMemory, Work, Worker
from kvclaims.checker.engines import first_line
from kvclaims.checker.trials import Trial
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import NotExposed

LENGTH: Final = (25, 70)
"""Operations of one run, at least and at most; draining it comes on top."""

DRAIN: Final = 400
"""Rounds in which everything has to end: far more than any run here takes."""

IDLE: Final = 8
"""Steps in a row that change nothing after which requests that could go on do not (B11)."""

STREAMS: Final = 2
"""Contents that prompts are beginnings of: so they share prefixes, and part."""

IMAGES: Final = ("image", "picture", "drawing")
"""What the tokens of a request may stand for."""

SESSIONS: Final = 2
"""Sessions at a time."""

OPERATIONS: Final = (
    *("submit", "abort", "dispatch", "complete", "reset", "continue", "end session"),
    *("load", "fail", "sent"),
)


@dataclass
class Asked:
    """A request as its user knows it: what it was given, and what was delivered to it."""

    tokens: list[int]
    most: int
    """Tokens that it may have in the end."""
    is_session: bool = False
    idle: bool = False
    """A session that has answered, and waits for more input."""
    closing: bool = False
    """No more input comes."""
    pieces: deque[list[int]] = field(default_factory=deque)
    """Input of a session that it has not come to yet."""
    spoiled: bool = False
    """Its load has failed, and will end."""


@dataclass(frozen=True)
class Step:
    """A step in flight."""

    output: Any
    works: tuple[Work, ...]
    cleared: tuple[int, ...]


class Drawn:
    """One run.  `operations` says in words what was done."""

    def __init__(self, setting: Setting, chance: Random) -> None:
        self.setting = setting
        self.operations: list[str] = []
        self.done: Counter[str] = Counter()
        self._chance = chance
        self._number = 0
        self._asked: dict[str, Asked] = {}
        self._flying: deque[Step] = deque()
        self._is_ending = False
        self._open()

    def _open(self) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        setting = self.setting
        self._scheduler: Any = setup.make_scheduler(
            AsyncScheduler if setting.in_flight > 1 else Scheduler,
            setting.usable,
            BLOCK_SIZE,
            asynchronous=setting.in_flight > 1,
            windows=setting.windows,
            connector=setting.connector,
            clears=setting.clears,
            stages=setting.stages,
            longest=LONGEST * BLOCK_SIZE,
            drafts=CANVAS if setting.model == DIFFUSION else 0,
        )
        scheduler = self._scheduler
        scheduler.use_v2_model_runner = setting.stages > 1
        if setting.token_budget:
            scheduler.max_num_scheduled_tokens = setting.token_budget
        if setting.watermark:
            scheduler.kv_cache_manager.watermark_blocks += setting.watermark
        if setting.model != GENERATE:
            scheduler.num_sampled_tokens_per_step = 0
        self._hasher = setup.block_hasher(BLOCK_SIZE)
        self._memory = SlotMemory(setting.usable + 1, BLOCK_SIZE)
        self._worker = Worker(self._memory, setting.windows, setting.clears)
        self._told = Told(scheduler.kv_cache_manager)
        if setting.windows != (0,) and setting.connector and setting.fails:
            from vllm.v1.outputs import KVConnectorOutput

            KVConnectorOutput(failed_recving=set())  # TypeError where a version has no such thing
        setup.give_encoder_room(scheduler, setting.encoder_room or setup.ENCODER_ROOM)
        self._connector: Any = scheduler.connector
        if self._connector is not None:
            self._connector.block_size = 1  # it transfers tokens
            self._connector.sends = setting.connector > 1

    # -- the run

    def run(self) -> Violation | None:
        """Do operations until one breaks a rule; what it broke."""
        for _ in range(self._chance.randint(*LENGTH)):
            found = self._do(self._chance.choice(list(self._possible())))
            if found is not None:
                return found
        return self._drain()

    def _do(self, operation: tuple[str, Callable[[], str]]) -> Violation | None:
        name, doing = operation
        self.done[name] += 1
        try:
            told = doing()
            self.operations.append(f"{name} {told}".rstrip())
            self._judge()
        except Found as found:
            return self._at(name, found.violation)
        except Exception as error:  # noqa: BLE001 - whatever an operation raises is a finding
            raised = Violation("B9", f"{name} raised {type(error).__name__}: {first_line(error)}")
            return self._at(name, raised)
        return None

    def _at(self, name: str, found: Violation) -> Violation:
        if not self.operations or not self.operations[-1].startswith(name):
            self.operations.append(name)
        return replace(found, operation=len(self.operations))

    def _possible(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Operations that may be done now, each as often as it is likely."""
        live = [r for r in self._asked if r in self._scheduler.requests]
        if len(live) < MOST:
            yield from [("submit", self._submit)] * 3
        if len(self._flying) < self.setting.in_flight:
            yield from [("dispatch", self._dispatch)] * (4 + 2 * self.setting.in_flight)
        if self._flying:
            yield from [("complete", self._complete)] * 4
        if self._abortable():
            yield "abort", self._abort
        if self._sessions():
            yield from [("continue", self._continue)] * 4
            yield "end session", self._end_session
        if self._loading():
            yield from [("load", self._load)] * 2
            if self._unspoiled():
                yield "fail", self._fail
        if self._sending():
            yield "sent", self._sent
        if self.setting.resets and not self._waiting_holders():
            yield "reset", self._reset

    def _drain(self) -> Violation | None:
        """Nothing more comes: every request has to end, and every block to come back."""
        idle, before = 0, self._progress()
        self._is_ending = True
        for round_ in count():
            if not self._scheduler.requests and not self._flying:
                break
            for name, doing, is_due in self._endings():
                if is_due() and (found := self._do((name, doing))) is not None:
                    return found
            now = self._progress()
            idle, before = (0 if now != before else idle + 1), now
            if idle > IDLE or round_ > DRAIN:
                return self._at("drain", Violation("B11", self._stuck(idle > IDLE)))
        try:
            self._told.check()
            at_rest(self._scheduler.kv_cache_manager, self.setting.usable)
        except Found as found:
            return self._at("drain", found.violation)
        return None

    def _stuck(self, is_idle: bool) -> str:
        holders = self._waiting_holders()
        steps = (
            f"{IDLE} steps in a row changed nothing" if is_idle else f"{DRAIN} steps end nothing"
        )
        held = f"; {', '.join(holders)} hold blocks, and wait" if holders else ""
        if holders and self._connector is not None and (large := self._too_large(holders)):
            held += f" behind {', '.join(large)}, too large for what they leave free"
        return f"{', '.join(self._scheduler.requests)} could go on, and {steps}{held}"

    def _too_large(self, holders: list[str]) -> list[str]:
        """Who has no block, and needs more than are free."""
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        others = (r for n, r in self._scheduler.requests.items() if n not in holders)
        return [r.request_id for r in others if -(-r.num_tokens // BLOCK_SIZE) > free]

    def _endings(self) -> Iterator[tuple[str, Callable[[], str], Callable[[], Any]]]:
        yield "end session", self._end_session, self._sessions
        yield "load", self._load, self._loading
        yield "sent", self._sent, self._sending
        yield "dispatch", self._dispatch, lambda: self._scheduler.requests and not self._flying
        yield "complete", self._complete, lambda: self._flying

    def _progress(self) -> list[tuple[Any, ...]]:
        return [
            (r.request_id, r.status, r.num_computed_tokens, r.num_tokens, len(self._flying))
            for r in self._scheduler.requests.values()
        ]

    # -- requests

    def _submit(self) -> str:
        chance, name = self._chance, f"r{self._number}"
        self._number += 1
        length, new, is_session = self._drawn_size()
        stream = chance.randrange(STREAMS)
        salt, image = chance.choice(("", "", "salt")), chance.choice(("", "", *IMAGES))
        if self.setting.encoder_room:
            image = chance.choice(IMAGES)
        tokens = [100 + 1000 * stream + place for place in range(length)]
        asked = Asked(tokens, length + new, is_session)
        external = self._drawn_external(length)
        if external:
            self._connector.offers[name] = external
        self._asked[name] = asked
        inputs = [] if self.setting.sessions or not image else self._inputs(image, length)
        pieces = image if length >= BLOCK_SIZE else f"{image} of {length}"
        self._worker.domains[name] = f"{salt} {pieces if inputs else ''}"
        is_short = chance.random() < (0.6 if self.setting.crowds else 0.3)
        stops = chance.randint(1, new) if is_short else 0
        self._worker.stops[name] = stops
        self._scheduler.add_request(self._request(name, tokens, new, is_session, salt, inputs))
        words = (
            (f"{name}: {length} tokens of {'AB'[stream]}", True),
            (f"{new} new", True),
            ("a session", is_session),
            (f"{external} external", external),
            (salt, salt),
            (image, inputs),
            (f"stops after {stops}", stops),
        )
        return ", ".join(word for word, holds in words if holds)

    def _drawn_size(self) -> tuple[int, int, bool]:
        """Tokens of a new request, tokens that it generates, and whether it is a session: what
        fits with a block to spare, if it has the pool for itself.  Sessions hold what they have
        while they wait, so two of them have to fit side by side."""
        chance, room = self._chance, (self.setting.usable - 1) * BLOCK_SIZE
        sessions = sum(self._asked[name].is_session for name in self._abortable())
        if self.setting.sessions and sessions < SESSIONS and chance.random() < 0.6:
            return chance.randint(1, max(1, room // 4)), chance.randint(1, 2), True
        if self.setting.sessions:
            room = min(room, (SMALL - 1) * BLOCK_SIZE) if self.setting.in_flight > 1 else room
            return chance.choice((1, 6, room - 2)), chance.randint(1, 2), False
        if not self.setting.fails:
            return chance.randint(1, LONGEST * BLOCK_SIZE // 2), chance.randint(1, 6), False
        if self.setting.crowds:
            return chance.randint(1, 5), chance.randint(room // 2, room - 5), False
        length = chance.randint(1, min(room - 2, chance.choice((6, 12, room))))
        return length, chance.randint(1, min(9, room - length)), False

    def _drawn_external(self, length: int) -> int:
        """Tokens that the connector has of a new request.  Of one that goes into a window it leaves
        out the last token, whose computation would read a token before the window that is kept."""
        if self._connector is None:
            return 0
        if self.setting.windows != (0,):
            length -= 1
        if not self.setting.fails and length > (self.setting.usable - 1) * BLOCK_SIZE - 7:
            return length
        return self._chance.choice((0, min(1, length), self._chance.randint(0, length), length))

    def _inputs(self, name: str, tokens: int) -> list[Any]:
        return setup.modality_inputs(name, tokens, BLOCK_SIZE)

    def _request(
        self,
        name: str,
        tokens: list[int],
        new: int,
        session: bool,
        salt: str,
        inputs: list[Any] | None = None,
    ) -> Any:
        made = setup.make_request(
            name,
            tuple(tokens),
            new,
            self._hasher,
            salt=salt,
            stop=STOP,
            resumable=session,
            pools=self.setting.model == POOLING,
            inputs=inputs,
        )
        if self.setting.windows == (0,):
            made.kv_cache_report_mode = self._chance.choice(("incremental", "full"))
        return made

    def _abortable(self) -> list[str]:
        return [n for n, r in self._scheduler.requests.items() if not r.is_finished()]

    def _abort(self) -> str:
        from vllm.v1.request import RequestStatus

        name = self._chance.choice(self._abortable())
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return name

    # -- sessions

    def _sessions(self) -> list[str]:
        """Sessions that may get more input, or be ended."""
        return [
            name
            for name, asked in self._asked.items()
            if asked.is_session and not asked.closing and name in self._abortable()
        ]

    def _continue(self) -> str:
        """More input for a session, whether it has answered the last one or not."""
        name = self._chance.choice(self._sessions())
        asked = self._asked[name]
        room = (self.setting.usable - 1) * BLOCK_SIZE
        length, new = self._chance.randint(1, 3), self._chance.randint(1, 2)
        if asked.most + length + new > 2 * room // 5:
            return self._end(name)
        piece = [5000 + 10 * self._number + place for place in range(length)]
        self._number += 1
        asked.most += length + new
        asked.pieces.append(piece)
        self._scheduler.add_request(self._request(name, piece, new, True, ""))
        if asked.idle:
            self._goes_on(name, asked)
        return f"{name} with {length} tokens, {new} new"

    def _goes_on(self, name: str, asked: Asked) -> None:
        """A session goes on from all that it was given and gave, but perhaps its last token, of
        which no KV was computed."""
        now, piece = list(self._scheduler.requests[name].all_token_ids), asked.pieces.popleft()
        asked.idle = False
        if now not in ([*asked.tokens, *piece], [*asked.tokens[:-1], *piece]):
            message = f"session {name} has {asked.tokens} and is given {piece}"
            raise Found("B4", f"{message}: it goes on with {now}")
        asked.tokens = now

    def _end_session(self) -> str:
        return self._end(self._chance.choice(self._sessions()))

    def _end(self, name: str) -> str:
        asked = self._asked[name]
        asked.closing = True
        self._scheduler.add_request(self._request(name, [7], 1, False, ""))
        return f"{name} ends"

    # -- steps

    def _dispatch(self) -> str:
        if self.setting.throttles:
            throttled = self._chance.random() < 0.5 and not self._is_ending
            output = self._scheduler.schedule(throttle_prefills=throttled)
        else:
            output = self._scheduler.schedule()
        works = tuple(self._plan(r, n, output) for r, n in output.num_scheduled_tokens.items())
        cleared = tuple(getattr(output, "new_block_ids_to_zero", None) or ())
        self._flying.append(Step(output, works, cleared))
        return " ".join(f"{w.request}[{w.start}:{w.end}]" for w in works)

    def _plan(self, name: str, count: int, output: Any) -> Work:
        request = self._scheduler.requests[name]
        end = request.num_computed_tokens  # schedule() has advanced it
        sent = name in _sent_anew(output)
        guesses = tuple(output.scheduled_spec_decode_tokens.get(name, ()))
        return Work(
            name,
            end - count,
            end,
            tuple(map(tuple, self._scheduler.kv_cache_manager.get_block_ids(name))),
            tuple(request.all_token_ids) if sent else None,
            guesses,
            self.setting.model == GENERATE and not request.is_prefill_chunk,
        )

    def _complete(self) -> str:
        from vllm.v1.outputs import ModelRunnerOutput

        step = self._flying.popleft()
        self._memory.fill(step.cleared)
        sampled = [self._worker.execute(work) for work in step.works]
        ids = [work.request for work in step.works]
        pooled = self.setting.model == POOLING
        ends = [self._has_read_all(work) for work in step.works]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[] if pooled else sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[() if end else None for end in ends] if pooled else [],
        )
        outputs = self._scheduler.update_from_output(step.output, result)
        self._deliver(outputs)
        if self.setting.model == DIFFUSION:
            self._refine(step)
        flying = {work.request for step in self._flying for work in step.works}
        self._worker.forget({*self._scheduler.requests, *flying})
        return ""

    def _has_read_all(self, work: Work) -> bool:
        return work.end >= len(self._asked[work.request].tokens)

    def _deliver(self, outputs: dict[int, Any]) -> None:
        """What requests are given continues what they have, and nothing is given twice."""
        for output in (one for some in outputs.values() for one in some.outputs):
            name, asked = output.request_id, self._asked[output.request_id]
            chain = self._worker.chain_of(name)
            for token in output.new_token_ids:
                behind = chain.names(asked.tokens)[len(asked.tokens)]
                if not self._worker.is_continuation(name, token, behind):
                    whose = f"session {name}" if asked.is_session else name
                    message = f"{whose} is given a token that was not sampled behind its own"
                    raise Found("B4", f"{message}, at {len(asked.tokens)}")
                asked.tokens.append(token)
            if output.finish_reason is not None:
                asked.idle = True
                if asked.pieces:
                    self._goes_on(name, asked)

    def _refine(self, step: Step) -> None:
        """A diffusion model says what its canvas looks like now."""
        from vllm.v1.outputs import DraftTokenIds

        ids = [
            work.request
            for work in step.works
            if work.request in self._scheduler.requests and self._has_read_all(work)
        ]
        canvases = [self._worker.draft(name, CANVAS, self._chance.randint(0, 2)) for name in ids]
        self._scheduler.update_draft_token_ids(DraftTokenIds(ids, canvases))

    # -- transfers

    def _loading(self) -> list[str]:
        return [] if self._connector is None else list(self._connector.loading)

    def _unspoiled(self) -> list[str]:
        names = self._loading() if self.setting.fails else []
        return [n for n in names if not self._asked[n].spoiled and n in self._abortable()]

    def _load(self) -> str:
        """A transfer ends: so many tokens in a row have come; the others are spoiled, or were never
        written.  It writes whole blocks, with nothing behind its last token."""
        name = self._chance.choice(self._loading())
        transfer, asked = self._connector.loading.pop(name), self._asked[name]
        most = transfer.blocks
        good = most
        if self.setting.fails:
            good = self._chance.choice(
                (most, most, 0, *(self._chance.randint(0, most) for _ in range(2)))
            )
        good = 0 if asked.spoiled else good
        writes = good == most or self._chance.random() < 0.5
        told = {}
        if not asked.spoiled and good < most:
            told = self._failed(name, transfer, good)
        names = self._worker.chain_of(name).names(asked.tokens)
        end = transfer.first + most
        for position in range(transfer.first, end):
            if position < transfer.first + good:
                self._memory.put(transfer.table, position, Slot(names[position + 1], name))
            elif writes:
                self._memory.put(transfer.table, position, Slot(SPOILED, ""))
        for position in range(end, -(-end // BLOCK_SIZE) * BLOCK_SIZE if writes else end):
            self._memory.put(transfer.table, position, Slot(BLANK, name))
        asked.spoiled = False
        if good < most:
            self._connector.offers.pop(name, None)
        self._receive(finished_recving={name}, **told)
        return f"{name}: {good} of {most} tokens"

    def _fail(self) -> str:
        """A transfer has failed, and is not over: what it still writes is spoiled."""
        name = self._chance.choice(self._unspoiled())
        transfer = self._connector.loading[name]
        self._asked[name].spoiled = True
        self._receive(**self._failed(name, transfer, 0))
        return name

    def _failed(self, name: str, transfer: Any, good: int) -> dict[str, set[Any]]:
        """What is told of a transfer that failed: the blocks that are spoiled, or the request.
        Into a window nothing that came counts, for what stands before it was never to come."""
        if self.setting.windows != (0,):
            return {"failed_recving": {name}}
        first, last = transfer.first + good, transfer.first + transfer.blocks - 1
        places = range(first // BLOCK_SIZE, last // BLOCK_SIZE + 1)
        return {"invalid_block_ids": {transfer.table[place] for place in places}}

    def _sending(self) -> list[str]:
        return [] if self._connector is None else list(self._connector.sending)

    def _sent(self) -> str:
        name = self._connector.sending.pop(0)
        self._receive(finished_sending={name})
        return str(name)

    def _receive(self, **told: set[Any]) -> None:
        """What transfers brought between two steps, as vLLM tells it of a step without work."""
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        nothing = ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**told)
        )
        self._deliver(self._scheduler.update_from_output(SchedulerOutput.make_empty(), nothing))

    # -- resets

    def _waiting_holders(self) -> list[str]:
        """Who has blocks and does not run, so that no preemption frees them: a transfer, or a
        session that waits."""
        running = {request.request_id for request in self._scheduler.running}
        tables = self._scheduler.kv_cache_manager.get_block_ids
        return [n for n in self._scheduler.requests if n not in running and any(tables(n))]

    def _reset(self) -> str:
        """All content is dropped; what runs gives way first, and starts over."""
        done = self._scheduler.reset_prefix_cache(reset_running_requests=True)
        pool = self._scheduler.kv_cache_manager.block_pool
        left = [block.block_id for block in pool.blocks if block.block_hash]
        if not done or left:
            raise Found("B10", f"a reset that was to succeed says {done}; visible is {left}")
        return ""

    # -- what holds after every operation

    def _judge(self) -> None:
        manager = self._scheduler.kv_cache_manager
        deferred = getattr(self._scheduler, "deferred_frees", ())
        audit(manager, [block for _, blocks in deferred for block in blocks])
        self._told.check()
        for name, request in self._scheduler.requests.items():
            asked = self._asked[name]
            if not asked.idle and list(request.all_token_ids) != asked.tokens:
                message = f"{name} was given {asked.tokens}, and goes on from"
                raise Found("B4", f"{message} {list(request.all_token_ids)}")


def _sent_anew(output: Any) -> set[str]:
    """Requests whose tokens come with the step: they begin, go on with more input, or are resumed
    after they gave way."""
    cached = output.scheduled_cached_reqs
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is None:
        flags = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
        resumed = {name for name, is_resumed in flags if is_resumed}
    return {one.req_id for one in output.scheduled_new_reqs} | set(resumed)


class VllmTrials:
    """The trials of vLLM's scheduler (`kvclaims.checker.trials`)."""

    kinds: Final = tuple(name for name, _ in KINDS)
    operations: Final = OPERATIONS

    def run(self, seed: int, number: int) -> Trial:
        """Run `number` of a seed.  Raises `NotExposed` where this version has no such feature."""
        setup.quieten(setup.ALONE)
        kind = number % len(KINDS)
        chance = Random(f"{seed} {number}")
        setting = draw_setting(chance, kind)
        try:
            one = Drawn(setting, chance)
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            raise NotExposed(f"{KINDS[kind][0]}, in this version: {first_line(error)}") from error
        finding = one.run()
        return Trial(KINDS[kind][0], str(setting), tuple(one.operations), one.done, finding)
