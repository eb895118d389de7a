"""Every run is a behaviour of the composed machine, as far as it can be heard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvclaims.checker import supervise
from kvclaims.checker.behaviour import EVENTS, HEARD, Behaviour
from kvclaims.checker.engines import find
from kvclaims.checker.faults import Edit, Fault, planted
from kvclaims.checker.monitor import Monitor
from kvclaims.spec import pool
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.interface import PoolConfig, PoolStep
from kvclaims.spec.operations import parse
from kvclaims.spec.telemetry import Event

REFERENCE = find("reference")


def event(seq: int, kind: str, subject: str, time_ns: int | None = None, **data: Any) -> Event:
    about = {"claim_id": subject, "generation": 1} if "claim" in kind else {"request_id": subject}
    stamp = seq if time_ns is None else time_ns
    return Event(seq, stamp, "run", kind, "policy", 4, data=data, **about)  # type: ignore[arg-type]


def step(action: str, **args: Any) -> PoolStep:
    return PoolStep(action, args)


SUBMITTED = event(1, "resident_claim_submitted", "a", duration=2)
ACCEPTED = event(
    2,
    "resident_claim_accepted",
    "a",
    decision="accepted",
    granted={"kind": "leading_prefix_at_least", "start": 0, "n": 1},
)


class Heard:
    """A pool of four blocks, a hard claim `a#1` and a request `r`, and what is heard of them."""

    def __init__(self) -> None:
        self.monitor = Monitor(range(5), null_block=0)
        for claim in ("a#1", "b#1"):
            self.monitor.introduce(CLAIM, claim, True)
        self.monitor.introduce(CLAIM, "soft#1", False)
        self.monitor.introduce(pool.REQUEST, "r", True)
        self.behaviour = Behaviour(self.monitor)

    def operation(self, ticks: int, events: tuple[Event, ...], *steps: PoolStep) -> None:
        self.behaviour.begin(ticks, events)
        for each in steps:
            self.behaviour(each)
            self.monitor(each)
        self.behaviour.end()

    @property
    def broken(self) -> list[tuple[str, str]]:
        return [(v.rule, v.message) for v in self.behaviour.violations]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """With a claim accepted for a duration of two."""
    found = Heard()
    steps = (step("submit", c="a#1"), step("accept", c="a#1", n=1))
    found.operation(0, (SUBMITTED, ACCEPTED), *steps)
    assert found.broken == []
    yield found
    assert found.monitor.violations == []


EXPIRED = event(3, "resident_claim_expired", "a", phase_before="accepted", covered=0)
FINISH = step("finish", c="a#1", how="expired")


def test_a_claim_expires_when_its_duration_has_passed(heard: Heard) -> None:
    heard.operation(2, (EXPIRED,), FINISH)
    assert heard.broken == []


def test_expiry_before_its_time_is_no_move(heard: Heard) -> None:
    heard.operation(1, (EXPIRED,), FINISH)
    assert heard.broken == [("L6", "not so: the duration has passed")]


def test_a_claim_without_duration_does_not_expire() -> None:
    heard = Heard()
    forever = event(1, "resident_claim_submitted", "a", duration=None)
    steps = (step("submit", c="a#1"), step("accept", c="a#1", n=1))
    heard.operation(0, (forever, ACCEPTED), *steps)
    heard.operation(9, (EXPIRED,), FINISH)
    assert heard.broken == [("L6", "not so: the duration has passed")]


REFUSED = event(2, "resident_claim_refused", "a")


@pytest.mark.parametrize(
    ("answer", "told"),
    [(step("accept", c="a#1", n=1), ACCEPTED), (step("refuse", c="a#1"), REFUSED)],
)
def test_time_does_not_pass_over_a_claim_that_waits_for_its_decision(
    answer: PoolStep, told: Event
) -> None:
    heard = Heard()
    heard.operation(0, (SUBMITTED,), step("submit", c="a#1"))
    assert heard.broken == []
    heard.operation(2, (told,), answer)
    assert heard.broken == [("V1", "not so: no claim waits for its decision")] * 2
    heard.operation(2, ())
    assert len(heard.broken) == 2, "it was answered: time may pass"


def test_a_renewal_gives_more_time(heard: Heard) -> None:
    heard.operation(1, ())
    heard.operation(0, (event(3, "resident_claim_renewed", "a", duration=2),))
    heard.operation(1, (event(4, "resident_claim_expired", "a"),), FINISH)
    assert heard.broken == [("L6", "not so: the duration has passed")]


def test_a_claim_that_has_ended_is_not_renewed(heard: Heard) -> None:
    released = event(3, "resident_claim_released", "a")
    heard.operation(0, (released,), step("finish", c="a#1", how="released"))
    heard.operation(0, (event(4, "resident_claim_renewed", "a", duration=2),))
    assert heard.broken == [("L6", "not so: the runtime is responsible for the claim")]


def test_a_step_in_silence_is_no_move(heard: Heard) -> None:
    heard.operation(2, (), FINISH)
    assert heard.broken == [("T1", "no event tells of finish(a#1, expired)")]


def test_an_event_without_its_step_is_no_move(heard: Heard) -> None:
    heard.operation(2, (EXPIRED,))
    assert heard.broken == [
        ("T1", "resident_claim_expired of a#1 is told, and the pool took no such step")
    ]


def test_what_was_under_way_may_end_a_request_that_gave_way() -> None:
    """The pool takes no step for that: it holds nothing since it was preempted."""
    heard = Heard()
    admitted = event(1, "active_request_admitted", "r")
    preempted = event(2, "active_request_preempted", "r", blocks=0)
    finished = event(3, "active_request_finished", "r", outcome="served", blocks=0)
    heard.operation(0, (admitted,), step("admit", r="r", n=1))
    heard.operation(0, (finished,))
    told = ("T1", "active_request_finished of r is told, and the pool took no such step")
    assert heard.broken == [told]
    heard.operation(0, (preempted,), step("retire", r="r"))
    heard.operation(0, (finished,))
    assert heard.broken == [told]
    heard.operation(0, (finished,))
    assert heard.broken == [told, told], "once"


def test_who_gave_way_and_was_aborted_is_not_served(heard: Heard) -> None:
    """Nothing that was under way may end it once more."""
    admitted = event(3, "active_request_admitted", "r")
    preempted = event(4, "active_request_preempted", "r", blocks=0)
    aborted = event(5, "active_request_aborted", "r")
    finished = event(6, "active_request_finished", "r", outcome="served", blocks=0)
    heard.operation(0, (admitted,), step("admit", r="r", n=1))
    heard.operation(0, (preempted,), step("retire", r="r"))
    heard.operation(0, (aborted,))
    heard.operation(0, (finished,))
    told = "active_request_finished of r is told, and the pool took no such step"
    assert heard.broken == [("T1", told)]


def test_who_gave_way_and_was_admitted_again_ends_by_a_step_of_the_pool(heard: Heard) -> None:
    """Also where one operation tells of both."""
    admitted = event(3, "active_request_admitted", "r")
    preempted = event(4, "active_request_preempted", "r", blocks=0)
    again = event(5, "active_request_admitted", "r")
    finished = event(6, "active_request_finished", "r", outcome="served", blocks=1)
    heard.operation(0, (admitted,), step("admit", r="r", n=1))
    heard.operation(0, (preempted,), step("retire", r="r"))
    heard.operation(0, (again, finished), step("admit", r="r", n=1), step("retire", r="r"))
    assert not heard.broken


def test_an_event_of_another_kind_is_no_move(heard: Heard) -> None:
    heard.operation(2, (event(3, "resident_claim_released", "a"),), FINISH)
    assert heard.broken == [("T1", "resident_claim_released is told of finish(a#1, expired)")]


def test_an_event_about_another_claim_is_no_move(heard: Heard) -> None:
    heard.operation(2, (event(3, "resident_claim_expired", "b"),), FINISH)
    assert heard.broken == [("T1", "not so: the event tells of the claim")]


def test_time_that_runs_back_is_no_move(heard: Heard) -> None:
    heard.operation(2, (event(3, "resident_claim_expired", "a", time_ns=1),), FINISH)
    assert heard.broken == [("T1", "not so: the clock has not run back")]


def test_an_event_told_twice_is_no_move(heard: Heard) -> None:
    again = event(2, "resident_claim_expired", "a")
    heard.operation(2, (again,), FINISH)
    assert heard.broken == [("T1", "not so: the event is a new one")]


def test_more_promised_than_granted_is_no_move() -> None:
    heard = Heard()
    steps = (step("submit", c="a#1"), step("accept", c="a#1", n=2))
    heard.operation(0, (SUBMITTED, ACCEPTED), *steps)
    assert heard.broken == [("Q2", "not so: what is promised is part of what is granted")]


SOFT_LIFE = (
    step("admit", r="r", n=1),
    step("take", r="r", b=1),
    step("register", r="r", b=1, k="A"),
    step("drop", r="r", b=1),
    step("retire", r="r"),
    step("submit", c="soft#1"),
    step("accept", c="soft#1", n=0),
    step("cover", c="soft#1", b=1, pays=False),
    step("materialize", c="soft#1"),
)
SOFT_EVENTS = (
    event(1, "active_request_admitted", "r"),
    event(2, "active_request_finished", "r"),
    event(3, "resident_claim_submitted", "soft", duration=None),
    event(4, "resident_claim_accepted", "soft", decision="accepted", granted={"n": 1}),
    event(5, "resident_claim_materialized", "soft"),
)
HARM = event(6, "resident_claim_harmed", "soft")


def with_a_soft_claim() -> Heard:
    heard = Heard()
    heard.operation(0, SOFT_EVENTS, *SOFT_LIFE)
    assert heard.broken == []
    return heard


def test_a_soft_claim_is_harmed_and_told() -> None:
    heard = with_a_soft_claim()
    heard.operation(0, (HARM,), step("evict", b=1, k="A"))
    assert heard.broken == []
    assert heard.monitor.violations == []


def test_harm_in_silence_is_no_move() -> None:
    heard = with_a_soft_claim()
    heard.operation(0, (), step("evict", b=1, k="A"))
    assert heard.broken == [("T1", "not so: the event tells of every claim that is harmed")]


def test_harm_that_the_pool_did_not_do_is_no_move() -> None:
    heard = with_a_soft_claim()
    heard.operation(0, (HARM,))
    assert heard.broken == [
        ("L3", "resident_claim_harmed of soft#1 is told, and the pool took no such step")
    ]


def test_growth_needs_no_event() -> None:
    heard = Heard()
    heard.operation(0, SOFT_EVENTS[:1], step("admit", r="r", n=1), step("admit", r="r", n=1))
    assert heard.broken == []


def test_every_move_with_an_event_is_one_of_the_composed_machine() -> None:
    moves = {move.name for move in HEARD.moves}
    assert set(EVENTS) < moves
    told = {m.name for m in HEARD.moves if any(step.action == "step" for _, step in m.shares)}
    assert set(EVENTS) | {"renew", "evict", "lose"} <= told


# --- what only this finds ----------------------------------------------------------------

_BACKWARDS = """
told, tell = [], self._narrator.emit
self._narrator.emit = lambda event, **data: told.append((event, data))
{body}
self._narrator.emit = tell
for event, data in reversed(told):
    tell(event, **data)
"""


def _backwards(body: str) -> str:
    return _BACKWARDS.format(body=body)


_EXPIRE = (
    "for entry in self._claims.due(self._narrator.now, self._ledger.book):\n"
    "    self._end(entry, Phase.EXPIRED)"
)
_DECLARE = [
    {"op": "declare", "claim": name, "content": [[name, 1]], "n": 1, "duration": 2}
    for name in ("a", "b")
]
_SERVE = [{"op": "submit", "request": n, "content": [[n, 1]]} for n in ("r1", "r2")]

_COMPLETE = (
    "for one in step:\n"
    "    if one.counts:\n"
    "        self._learn(one)\n"
    "        if one.request.is_done:\n"
    "            self._finish(one.request)"
)
ONLY_HERE = {
    "claims that expire together are told in another order": (
        Edit("reference/residency.py", "Residency.expire", _EXPIRE, _backwards(_EXPIRE)),
        [*_DECLARE, {"op": "advance", "ticks": 2}],
        "not so: the event tells of the claim",
    ),
    "requests that finish together are told in another order": (
        Edit("reference/scheduler.py", "Scheduler.complete", _COMPLETE, _backwards(_COMPLETE)),
        [*_SERVE, {"op": "step"}],
        "not so: the event tells of the request",
    ),
}
"""Faults planted in the reference that no other check sees: what is broken, how it is provoked,
what is found."""


def _findings(edit: Edit, raw: list[dict[str, Any]]) -> list[tuple[str, str]]:
    program = supervise.Program(PoolConfig(6, 4), tuple(map(parse, raw)))
    with planted(Fault("backwards", "T1", "told backwards", (edit,)), REFERENCE):
        found = supervise.supervise(REFERENCE, None, program)
    return [(violation.rule, violation.message) for violation in found]


@pytest.mark.parametrize("fault", ONLY_HERE)
def test_a_fault_that_only_this_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, raw, message = ONLY_HERE[fault]
    assert set(_findings(edit, raw)) == {("T1", message)}
    monkeypatch.setattr(Behaviour, "end", _forget)
    assert _findings(edit, raw) == []


def _forget(behaviour: Behaviour) -> None:
    """The operation is over, and nobody looked."""
    behaviour.violations.clear()


def test_a_step_of_the_pool_alone_costs_nothing_here() -> None:
    """Taking, sharing and dropping blocks is the pool's business: no move is made of it."""
    heard = Heard()
    heard.operation(0, SOFT_EVENTS[:1], step("admit", r="r", n=3))
    made = heard.behaviour.moves
    heard.operation(0, (), *(step("take", r="r", b=b) for b in (1, 2, 3)))
    assert heard.behaviour.moves == made


def test_a_move_costs_what_it_touches() -> None:
    """A life among many other claims takes about as long as among few."""

    def seconds(others: int) -> float:
        heard = Heard()
        for number in range(others):
            heard.monitor.introduce(CLAIM, f"other{number}#1", False)
        best = float("inf")
        for number in range(30):
            name = f"c{number}"
            heard.monitor.introduce(CLAIM, f"{name}#1", False)
            submitted = event(3 * number, "resident_claim_submitted", name, duration=None)
            refused = event(3 * number + 1, "resident_claim_refused", name)
            steps = (step("submit", c=f"{name}#1"), step("refuse", c=f"{name}#1"))
            start = time.perf_counter()
            heard.operation(1, (submitted, refused), *steps)
            best = min(best, time.perf_counter() - start)
        assert heard.broken == []
        return best

    assert seconds(20_000) < 20 * seconds(20)
