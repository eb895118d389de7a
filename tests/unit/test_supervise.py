"""A supervised run of the reference: what is legal passes, what is broken is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvclaims.checker import supervise
from kvclaims.checker.engines import find
from kvclaims.checker.observing import (
    DIFFERENCES,
    changed_fields,
    differences,
    let_go,
    moves,
    standing,
)
from kvclaims.checker.supervise import Program, Supervisor, open_supervised
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import (
    ClaimView,
    NotExposed,
    Observation,
    PoolConfig,
    Predicate,
    RequestView,
    Runtime,
)
from kvclaims.spec.operations import Operation, parse
from kvclaims.spec.vocabulary import RULES, Outcome, Phase, Protection

REFERENCE = find("reference")
POOL = PoolConfig(usable=6, block_size=4)

PROGRAM = [
    {"op": "submit", "request": "r1", "content": [["A", 3]], "max_new_tokens": 6},
    {"op": "drain"},
    {"op": "declare", "claim": "c", "content": [["A", 3]], "n": 3, "duration": 3},
    {"op": "submit", "request": "r2", "content": [["B", 5]]},
    {"op": "drain"},
    {"op": "submit", "request": "r3", "content": [["A", 3], ["B", 1]], "admit_reuse": False},
    {"op": "step", "times": 2},
    {"op": "advance", "ticks": 3},
    {"op": "release", "claim": "c"},
    {"op": "submit", "request": "r4", "content": [["B", 6]]},
    {"op": "drain"},
    {"op": "lose", "content": [["B", 1]], "position": 0},
    {"op": "reset"},
]


def operations(raw: list[dict[str, Any]]) -> list[Operation]:
    return [parse(item) for item in raw]


def run(supervisor: Supervisor, raw: list[dict[str, Any]]) -> list[tuple[str, str]]:
    for operation in operations(raw):
        supervisor.do(operation)
    supervisor.close()
    return [(finding.rule, finding.message) for finding in supervisor.findings]


def test_a_clean_run_breaks_nothing() -> None:
    supervisor = open_supervised(REFERENCE, None, POOL)
    assert run(supervisor, PROGRAM) == []
    assert supervisor.operations == len(PROGRAM)
    assert supervisor.steps > 5
    assert supervisor.monitor.steps > 20
    assert supervisor.events == len(supervisor.runtime.events()) - 1  # the closing event


def test_two_references_agree() -> None:
    assert run(open_supervised(REFERENCE, REFERENCE, POOL), PROGRAM) == []


def test_an_oracle_with_another_pool_disagrees() -> None:
    ours, theirs = (REFERENCE.open(PoolConfig(n, 4), "run") for n in (6, 4))
    found = run(Supervisor(ours, theirs), PROGRAM[:2])
    assert ("F2", "headroom: the reference says 4, the engine 6") in found


class Spoiled:
    """A runtime in which one method does something else."""

    def __init__(self, method: str, instead: Callable[..., Any]) -> None:
        self._runtime = REFERENCE.open(POOL, "spoiled")
        self._method, self._instead = method, instead

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return lambda *args: self._instead(self._runtime, *args)
        return getattr(self._runtime, name)


def spoiled(method: str, instead: Callable[..., Any]) -> Runtime:
    return Spoiled(method, instead)  # type: ignore[return-value]


def boom(*_args: object) -> None:
    raise RuntimeError("popped from an empty list")


@pytest.mark.parametrize("method", ["step", "observe"])
def test_a_crash_is_a_violation_with_its_text(method: str) -> None:
    supervisor = Supervisor(spoiled("step", boom))
    found = supervisor.do(parse({"op": "step"}))
    assert [(f.rule, f.message) for f in found] == [
        ("B9", "step raised RuntimeError: popped from an empty list")
    ]
    assert not supervisor.is_alive
    assert supervisor.do(parse({"op": "reset"})) == []
    assert supervisor.close() == ()


def test_a_failed_operation_must_change_nothing() -> None:
    def release(runtime: Runtime, claim: str) -> None:
        runtime.advance(1)
        runtime.demote("c")
        runtime.release(claim)

    supervisor = Supervisor(spoiled("release", release))
    supervisor.do(parse(PROGRAM[2]))
    found = supervisor.do(parse({"op": "release", "claim": "c"}))
    messages = [f.message for f in found if f.rule == "B9"]
    assert messages == [
        "release claim=c was turned down: claim 'c' is demoted",
        "release claim=c was turned down, and changed the state",
    ]


def test_what_is_not_exposed_is_told_and_skipped() -> None:
    def lose(*_args: object) -> bool:
        raise NotExposed("no device faults here")

    supervisor = Supervisor(spoiled("lose", lose), REFERENCE.open(POOL, "oracle"))
    assert run(supervisor, PROGRAM) == []
    assert list(supervisor.not_exposed) == ["lose: no device faults here"]


def test_a_drain_without_progress() -> None:
    supervisor = Supervisor(spoiled("step", lambda runtime: None))
    supervisor.do(parse(PROGRAM[0]))
    assert [f.rule for f in supervisor.do(parse({"op": "drain"}))][-1] == "B11"


def test_a_claim_that_expires_too_late() -> None:
    supervisor = Supervisor(spoiled("advance", lambda runtime, ticks: None))
    supervisor.do(parse(PROGRAM[2]))
    found = supervisor.do(parse({"op": "advance", "ticks": 5}))
    assert [(f.rule, f.message) for f in found] == [("L6", "claim c was to end at 3, it is 5 now")]


def test_a_bad_operation_is_a_legal_answer() -> None:
    supervisor = open_supervised(REFERENCE, REFERENCE, POOL)
    raw = [
        {"op": "release", "claim": "c"},
        {"op": "abort", "request": "r1"},
        {"op": "declare", "claim": "c", "content": [["A", 1]], "n": 2},
        {"op": "lose", "content": [["A", 1]], "position": 1},
    ]
    assert run(supervisor, raw) == []


LOSSY: dict[str, Any] = {"op": "declare", "claim": "c", "content": [["A", 8]], "n": 8}


@pytest.mark.parametrize(
    ("always", "asks", "message"),
    [
        (True, "exact", "claim c was granted exact where lossy survives"),
        (False, "lossy", "claim c costs 0 blocks, headroom is 6, yet ref"),
    ],
)
def test_a_claim_gets_the_class_that_survives_and_no_more(
    monkeypatch: pytest.MonkeyPatch, always: bool, asks: str, message: str
) -> None:
    pool = replace(POOL, fidelity=Fidelity.LOSSY)
    raw = {**LOSSY, "n": 2, "fidelity": asks}
    assert run(open_supervised(REFERENCE, None, pool), [raw]) == []
    monkeypatch.setattr("kvclaims.reference.residency.Residency._survives", lambda *_: always)
    found = run(open_supervised(REFERENCE, None, pool), [raw])
    assert [said for _, said in found if said.startswith(message)] != []


def test_a_clipped_claim_that_is_granted_another_class_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = {**LOSSY, "fidelity": "lossy", "min_blocks": 1}
    assert run(open_supervised(REFERENCE, None, POOL), [raw]) == []
    monkeypatch.setattr(Predicate, "clipped", lambda self, n: Predicate(self.kind, n))
    found = run(open_supervised(REFERENCE, None, POOL), [raw])
    assert found[0][0] == "L2"
    assert found[0][1].startswith("claim c asked for Predicate(")


def test_supervise_stops_at_the_first_broken_rule() -> None:
    config = PoolConfig(6, 4)
    assert supervise.supervise(REFERENCE, None, Program(config, tuple(operations(PROGRAM)))) == ()


# --- observations ------------------------------------------------------------------------


def claim(phase: Phase, protection: Protection = Protection.HARD, **more: int) -> ClaimView:
    numbers = {"footprint": 2, "leading": 2, "survivors": 2, "covered": 2, "reserve": 0, **more}
    generation = numbers.pop("generation", 1)
    return ClaimView(phase, generation, protection, **numbers)


def seen(**more: Any) -> Observation:
    return Observation(**{
        "usable": 6, "free": 4, "headroom": 4, "claims": {}, "requests": {}, "resident": {}, **more
    })  # fmt: skip


@pytest.mark.parametrize(
    ("observation", "rule"),
    [
        (seen(headroom=-1), "F2"),
        (seen(free=7), "F1"),
        (seen(claims={"c": claim(Phase.MATERIALIZED, survivors=1)}), "L5"),
        (seen(claims={"c": claim(Phase.MATERIALIZED, Protection.SOFT, survivors=1)}), "P3"),
        (seen(claims={"c": claim(Phase.MATERIALIZED, covered=1)}), "L7"),
        (seen(claims={"c": claim(Phase.RELEASED, reserve=1)}), "F2"),
        (seen(requests={"r": RequestView("finished", Outcome.SERVED, (1,))}), "B7"),
        (seen(requests={"r": RequestView("running", Outcome.REFUSED)}), "F4"),
    ],
)
def test_facts_that_must_stand(observation: Observation, rule: str) -> None:
    assert [found for found, _ in standing(observation)] == [rule]


STEP = parse({"op": "step"})


@pytest.mark.parametrize(
    ("operation", "before", "after", "rule"),
    [
        (STEP, claim(Phase.RELEASED), claim(Phase.MATERIALIZED), "L1"),
        (STEP, claim(Phase.RELEASED), claim(Phase.HARMED), "L4"),
        (STEP, claim(Phase.MATERIALIZED), claim(Phase.HARMED, survivors=1), "L5"),
        (STEP, claim(Phase.ACCEPTED), claim(Phase.MATERIALIZED, survivors=1), "L7"),
        (STEP, claim(Phase.ACCEPTED), claim(Phase.DEMOTED), "F6"),
        (STEP, claim(Phase.ACCEPTED), claim(Phase.EXPIRED), "L6"),
        (STEP, claim(Phase.ACCEPTED), claim(Phase.RELEASED), "L1"),
        (STEP, claim(Phase.RELEASED), claim(Phase.ACCEPTED, generation=2), "L1"),
        (STEP, None, claim(Phase.ACCEPTED), "L1"),
        (
            parse({"op": "abort", "request": "r"}),
            claim(Phase.MATERIALIZED, Protection.SOFT),
            claim(Phase.HARMED, Protection.SOFT),
            "L3",
        ),
    ],
)
def test_moves_that_no_step_makes(
    operation: Operation, before: ClaimView | None, after: ClaimView, rule: str
) -> None:
    was = seen(claims={"c": before} if before else {})
    assert [found for found, _ in moves(operation, was, seen(claims={"c": after}))] == [rule]


def test_moves_that_are_allowed() -> None:
    soft = Protection.SOFT
    before = seen(claims={"c": claim(Phase.MATERIALIZED, soft)})
    after = seen(claims={"c": claim(Phase.HARMED, soft, survivors=1)})
    assert list(moves(STEP, before, after)) == []
    submitted = parse({"op": "declare", "claim": "c", "content": [["A", 2]], "n": 2})
    assert list(moves(submitted, seen(), seen(claims={"c": claim(Phase.MATERIALIZED)}))) == []


def test_every_difference_has_a_rule() -> None:
    names = {*ClaimView.__annotations__, *RequestView.__annotations__, "free", "headroom"}
    assert names <= DIFFERENCES.keys()
    assert set(DIFFERENCES.values()) <= RULES.keys()


def test_a_difference_of_phase_is_told_by_what_it_means() -> None:
    ours = seen(claims={"c": claim(Phase.HARMED)})
    theirs = seen(claims={"c": claim(Phase.MATERIALIZED)})
    assert [rule for rule, _ in differences(ours, theirs)] == ["L3"]
    assert list(differences(ours, ours)) == []


def test_only_changed_fields_are_shown() -> None:
    before, after = seen(resident={"k": 1}), seen(free=3)
    assert changed_fields(before, after) == ({"free": 4, "content k: block": 1}, {"free": 3})


@pytest.mark.parametrize(
    ("was", "now", "rules"),
    [
        (RequestView("running", Outcome.PENDING, (1,)), ("running", (1,)), ["B7"]),
        (RequestView("running", Outcome.PENDING, (1,)), ("ending", (1,)), ["B7"]),
        (RequestView("running", Outcome.PENDING, (1,)), ("finished", ()), []),
        (RequestView("loading", Outcome.PENDING, (1,)), ("ending", (1,)), []),
        (RequestView("loading", Outcome.PENDING, (1,)), ("finished", ()), ["B5"]),
    ],
)
def test_an_aborted_request_ends_at_once_unless_a_transfer_writes_for_it(
    was: RequestView, now: tuple[str, tuple[int, ...]], rules: list[str]
) -> None:
    state, blocks = now
    ended = Outcome.ABORTED if state == "finished" else Outcome.PENDING
    before, after = (
        Observation(6, 5, 5, {}, {"r": view}, {})
        for view in (was, RequestView(state, ended, blocks))
    )
    abort = parse({"op": "abort", "request": "r"})
    assert [rule for rule, _ in let_go(abort, before, after)] == rules


def test_a_block_that_a_later_step_still_writes_may_be_named_when_its_token_is_known() -> None:
    """With two steps under way the end of the first names what the second writes (B4)."""
    pool = PoolConfig(12, 16, 0, 64, in_flight=2)
    raw: list[dict[str, Any]] = [
        {"op": "submit", "request": "r1", "content": [["A", 5]], "max_new_tokens": 32},
        {"op": "step", "times": 3},
        {"op": "dispatch"},
        {"op": "step", "times": 12},
        {"op": "dispatch"},
        {"op": "dispatch"},
        {"op": "step"},
    ]
    assert run(open_supervised(REFERENCE, None, pool), raw) == []
