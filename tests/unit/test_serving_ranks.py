"""Several engines behind one server: one answer, and a claim on all of them or on none."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvclaims.bridge.metrics import exposition
from kvclaims.bridge.serving.desk import Answer
from kvclaims.bridge.serving.http import Asker, Claims
from kvclaims.bridge.serving.ranks import together
from kvclaims.bridge.serving.settings import Settings

NOT_HERE = Answer(404, {"error": "no such claim"})


@pytest.mark.parametrize("op", ["inspect", "release", "demote", "renew"])
def test_a_claim_is_where_its_request_went(op: str) -> None:
    here = Answer(200, {"claim_id": "c", "phase": "materialized"})
    for answers in ([NOT_HERE, here], [here, NOT_HERE]):
        told = together(op, answers)
        assert (told.status, told.body["phase"]) == (200, "materialized")
        assert [engine["status"] for engine in told.body["engines"]] == [a.status for a in answers]
    assert together(op, [NOT_HERE, NOT_HERE]) == NOT_HERE
    ended = Answer(409, {"error": "the claim is released already"})
    assert together(op, [NOT_HERE, ended]).body["error"] == "the claim is released already"


@pytest.mark.parametrize("op", ["verdict", "decision"])
def test_what_became_of_a_request_is_known_where_it_was(op: str) -> None:
    here = Answer(200, {"outcome": "refused"})
    assert together(op, [NOT_HERE, here]) == here


def test_one_that_could_not_take_a_claim_speaks_for_all() -> None:
    used = Answer(409, {"error": "declared before"})
    assert together("check", [Answer(200, {}), used]) == used


def test_the_pool_is_all_of_theirs() -> None:
    own = {"usable_blocks": 80, "free_blocks": 70, "block_size": 32, "quota": None, "hard_cap": 64}
    told = together("pool", [Answer(200, own), Answer(200, {**own, "free_blocks": 60})]).body
    engines = told.pop("engines")
    assert told == {**own, "usable_blocks": 160, "free_blocks": 130, "hard_cap": 128}
    assert [engine["free_blocks"] for engine in engines] == [70, 60]


def test_a_list_says_where_each_is() -> None:
    answers = [Answer(200, {"claims": [{"claim_id": n}], "left_out": 1}) for n in "ab"]
    assert together("list", answers).body == {
        "claims": [{"claim_id": "a", "engine": 0}, {"claim_id": "b", "engine": 1}],
        "left_out": 2,
    }


def stats(free: int, refused: int) -> dict[str, Any]:
    label = {"claim": "c", "owner": "o"}
    return {
        "usable_blocks": 80,
        "free_blocks": free,
        "tier_copy_bytes": 512,
        "run_id": "server",
        "shortfall": 5 * refused,
        "age_sum": 0.5,
        "phases": {"accepted": 1, **({"expired": 2} if refused else {})},
        "requests": {"waiting": 1, "running": 2},
        "claims": [
            {**label, "protection": "hard_protected", "phase": "accepted", "footprint": 4}
            | {"covered": 1, "reserve": 3}
        ],
        "refusals": [{**label, "outcome": "refused", "count": refused}] if refused else [],
        "harms": [],
        "unsaved": [{**label, "count": refused}] if refused else [],
        "outcomes": {"refused": refused} if refused else {},
        "ages": [1, 0, 2, 0, 0, 0, 0, 0, 0],
    }


def test_metrics_are_those_of_all_and_name_nothing_twice() -> None:
    answers = [Answer(200, stats(70, 0)), Answer(200, stats(60, 3)), Answer(200, stats(50, 4))]
    page = exposition(together("stats", answers).body).decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
    assert "kvclaims_free_blocks 180.0" in lines
    assert "kvclaims_tier_copy_bytes 512.0" in lines
    assert 'kvclaims_claims{phase="expired"} 4.0' in lines
    assert 'kvclaims_refusals_total{claim="c",outcome="refused",owner="o"} 7.0' in lines
    assert 'kvclaims_unsaved_total{claim="c",owner="o"} 7.0' in lines
    assert 'kvclaims_outcomes_total{outcome="refused"} 7.0' in lines
    assert 'kvclaims_age_at_loss_seconds_bucket{le="60"} 9.0' in lines
    footprint = [line for line in lines if 'kind="footprint"' in line]
    assert len(footprint) == 1
    assert footprint[0].endswith(" 12.0")


class Core:
    """Of vLLM's client: engines by name, each with what it says to a declaration."""

    def __init__(self, says: dict[str, int]) -> None:
        self.core_engines = list(says)
        self.says = says
        self.asked: list[tuple[str, str]] = []

    async def _call_utility_async(self, method: str, message: str, *, engine: str) -> str:
        assert method == "kvclaims"
        op = json.loads(message)["op"]
        self.asked.append((engine, op))
        return json.dumps([self.says[engine] if op == "declare" else 200, {"of": engine}])


def declared(core: Core) -> Answer:
    state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))
    claims = Claims(None, Settings())  # type: ignore[arg-type]
    asking = claims.ask(
        {"app": SimpleNamespace(state=state)},
        "declare",
        Asker("a", operator=False, proven=True),
        claim={"claim_id": "c", "tokens": [1]},
    )
    return asyncio.run(asking)


def test_a_claim_is_on_every_engine_or_on_none() -> None:
    core = Core({"e0": 201, "e1": 409, "e2": 201})
    told = declared(core)
    assert (told.status, told.body["of"]) == (409, "e1")
    assert [engine["status"] for engine in told.body["engines"]] == [201, 409, 201]
    assert core.asked[3:] == [("e0", "release"), ("e2", "release")]


def test_where_all_agree_nothing_is_undone() -> None:
    for says, status in ((201, 201), (409, 409)):
        core = Core({"e0": says, "e1": says})
        assert declared(core).status == status
        assert [op for _, op in core.asked] == ["declare", "declare"]


@pytest.mark.parametrize("op", ["list", "pool", "stats"])
def test_a_rank_that_is_ending_takes_nothing_from_what_the_others_say(op: str) -> None:
    body = {"claims": [{"claim_id": "c"}], "left_out": 0}
    ending = Answer(503, {"error": "claims are not in force on this engine"})
    other = Answer(200, body)
    for ranks in ([ending, other], [other, ending]):
        told = together(op, ranks)
        assert (told.status, "error" in told.body) == (200, False)
        assert [claim["claim_id"] for claim in told.body["claims"]] == ["c"]
    assert together(op, [ending, ending]).status == 503
