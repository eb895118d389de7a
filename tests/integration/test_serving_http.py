"""The OpenAI-compatible server with claims: made with requests and by prefix, enforced, told."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.bridge.serving.client import ClaimError, ClaimsClient, claim_args

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

GUIDE = (Path(__file__).parents[2] / "docs" / "serving-with-claims.md").read_text(encoding="utf-8")


def block(first: str) -> str:
    """The indented block of the guide that begins so."""
    lines = GUIDE[GUIDE.index(f"    {first}") :].split("\n\n## ")[0].split("\n")
    own = list(itertools.takewhile(lambda line: not line or line.startswith("    "), lines))
    return textwrap.dedent("\n".join(own)).strip()


def shell(command: str, folder: Path, **names: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **names, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from serving_world import server

    with server(tmp_path_factory.mktemp("served")) as running:
        yield running
    # What the guide says of the trace, once the server has ended: it is whole, and folds (T1, T3).
    (audited,) = re.findall(r"`(cat trace.*?)`", GUIDE)
    ended = shell(audited, running.trace.parent)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr


@pytest.fixture
def world() -> Any:
    import serving_world

    return serving_world


@pytest.fixture
def as_a(served: Any) -> Iterator[ClaimsClient]:
    """Team A's client; what it claimed is released at the end."""
    with ClaimsClient(served.url, api_key="key-a") as client:
        yield client
        for claim in client.list():
            if claim["phase"] in ("accepted", "materialized"):
                client.release(claim["claim_id"])


def test_a_claim_made_with_a_request_is_answered_and_kept(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    answer = served.complete(world.prompt(1, 12), claim={"claim_id": "a1", "duration": 600})
    assert answer.status_code == 200, answer.text
    told = answer.json()["kv_transfer_params"]["kvclaims"]["claim"]
    assert (told["decision"], told["granted_blocks"], told["cost_blocks"]) == ("accepted", 12, 12)
    view = as_a.inspect("a1")
    assert (view["phase"], view["covered_blocks"], view["leading"]) == ("materialized", 12, 12)
    assert 590 < view["ends_in"] <= 600


def test_the_server_is_the_guides(world: Any) -> None:
    """Each option of the guide's command, and what it names, but for the settings' values."""
    told = shlex.split(block("python -m vllm"), comments=True)
    started = world.command("MODEL", 0, {})
    assert told[1:3] == started[1:3]
    for option in ("--model", "--scheduler-cls", "--middleware"):
        assert told[told.index(option) + 1] == started[started.index(option) + 1]
    assert {word for word in told if word.startswith("--")} <= set(started)
    from kvclaims.bridge.serving.settings import Settings

    settings = json.loads(told[told.index("--additional-config") + 1])["kvclaims"]
    assert Settings(**settings).quotas == {"team-b": 500}


def test_what_the_guide_shows_is_answered(served: Any, world: Any, tmp_path: Path) -> None:
    asks = block("curl $SERVER").replace("[1, 2, 3, …]", json.dumps(world.prompt(20, 12)))
    asks = asks.replace("key-of-team-a", "key-a")
    ended = shell(asks, tmp_path, SERVER=served.url)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)["kv_transfer_params"]["kvclaims"]["claim"]
    assert (told["decision"], told["asked_blocks"], told["granted_blocks"]) == ("accepted", 12, 12)
    shown = re.search(r'\{"kvclaims": \{"claim": (\{.*?)…', GUIDE, re.DOTALL)
    assert shown is not None
    assert set(re.findall(r'"(\w+)":', shown[1])) <= set(told)
    with ClaimsClient(served.url, api_key="key-a") as client:
        client.release("handbook")


def test_the_guides_client_does_what_it_says(served: Any, world: Any) -> None:
    program = block("from kvclaims.bridge.serving.client").replace("key-of-team-a", "key-a")
    names: dict[str, Any] = {"tokens": world.prompt(21, 10)}
    exec(program.replace("http://localhost:8000", served.url), names)
    assert names["claims"].inspect("system-prompt")["phase"] == "released"


def test_a_request_that_claims_block_gets_503_and_what_to_do(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    kept = world.prompt(2, 60)
    assert served.complete(kept).status_code == 200
    as_a.declare("kept-by-a", kept, duration=100)
    answer = served.complete(world.prompt(3, 70))
    assert answer.status_code == 503, answer.text
    assert 90 <= int(answer.headers["retry-after"]) <= 100
    error = answer.json()["error"]
    assert (error["outcome"], error["shortfall"], error["needed_blocks"]) == ("refused", 50, 70)
    assert error["blocking_claims"] == [{"claim": "kept-by-a", "owner": "team-a", "blocks": 60}]
    foreign = served.complete(world.prompt(3, 70), owner="team-b").json()["error"]
    (opaque,) = foreign["blocking_claims"]
    assert set(opaque) == {"claim", "blocks"}
    assert opaque["blocks"] == 60
    assert "team-a" not in json.dumps(foreign)
    assert "kept-by-a" not in json.dumps(foreign)
    assert as_a.inspect("kept-by-a")["survivors"] == 60
    assert served.complete(world.prompt(3, 20)).status_code == 200  # what fits is served


def test_a_stream_is_refused_before_it_begins(served: Any, world: Any, as_a: ClaimsClient) -> None:
    as_a.declare("a3", world.prompt(2, 60))
    answer = served.complete(world.prompt(3, 70), stream=True)
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "7"  # the claim has no end
    as_a.release("a3")
    answer = served.complete(world.prompt(3, 70), stream=True)
    assert answer.status_code == 200
    assert "data: [DONE]" in answer.text


def test_a_stream_that_outgrows_what_claims_leave_ends_with_the_reason(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    as_a.declare("a4", world.prompt(2, 60))
    endless = {"stream": True, "max_tokens": 40, "ignore_eos": True}
    claim = {"claim_id": "a4s", "predicate": {"n": 2}, "min_blocks": 1}
    answer = served.complete(world.prompt(3, 20)[:-5], claim=claim, **endless)
    assert answer.status_code == 200
    told = json.loads(answer.headers["x-kvclaims-claim"])
    assert (told["decision"], told["granted_blocks"]) == ("accepted", 2)
    *begun, last, done = answer.text.strip().split("\n\n")
    assert (len(begun), done) == (6, "data: [DONE]")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["outcome"], error["needed_blocks"], error["shortfall"]) == ("refused", 21, 1)
    assert "a4" in {blocking["claim"] for blocking in error["blocking_claims"]}


def test_a_chat_is_refused_before_it_begins(served: Any, world: Any, as_a: ClaimsClient) -> None:
    """Alone, in a batch, and where its stream begins with a role for each answer, and an echo."""
    as_a.declare("a10", world.prompt(2, 60))
    words = world.text(world.prompt(3, 70))
    said = [{"role": "user", "content": words}]
    echoed = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": words}]
    for path, body in (
        ("", {"messages": said}),
        ("/batch", {"messages": [said, [{"role": "user", "content": "w3"}]]}),
        ("", {"messages": said, "stream": True, "n": 2}),
        (
            "",
            {
                "messages": echoed,
                "stream": True,
                "echo": True,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
    ):
        asked = {"model": "m", "max_tokens": 1, **body}
        answer = served.post(f"/v1/chat/completions{path}", asked)
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["blocking_claims"][0]["claim"] == "a10"


def test_a_response_in_the_background_that_was_refused_has_failed(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    as_a.declare("a11", world.prompt(2, 60))
    body = {"model": "m", "max_output_tokens": 1, "background": True}
    refused = {**body, "input": world.text(world.prompt(3, 70))}
    path = "/v1/responses/" + served.post("/v1/responses", refused).json()["id"]
    end = time.monotonic() + 30
    while (told := served.get(path)).json()["status"] == "queued":
        assert time.monotonic() < end
    assert (told.json()["status"], told.headers["retry-after"]) == ("failed", "7")
    assert told.json()["error"]["blocking_claims"][0]["claim"] == "a11"
    assert served.get(path).json() == told.json()
    streamed = served.post("/v1/responses", {**refused, "stream": True})
    assert (streamed.status_code, streamed.headers["retry-after"]) == (503, "7")
    fits = "/v1/responses/" + served.post("/v1/responses", {**body, "input": "w3 w4"}).json()["id"]
    while (told := served.get(fits).json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
    assert (told["status"], told["usage"]["output_tokens"]) == ("incomplete", 1)  # as it was asked


def test_the_operator_sees_all_and_owners_their_own(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    as_a.declare("a5", world.prompt(5, 3))
    with ClaimsClient(served.url, api_key="key-b") as b:
        assert b.list() == []
        for act in (b.inspect, b.release, b.demote):
            with pytest.raises(ClaimError, match="404"):
                act("a5")
        with pytest.raises(ClaimError, match="403"):
            b.declare("b5", world.prompt(5, 3), owner="team-a")
    operator = ClaimsClient(served.url, api_key="other-key", operator_token=world.OPERATOR)
    assert "a5" in {c["claim_id"] for c in operator.list()}
    acting = ClaimsClient(
        served.url, api_key="other-key", operator_token=world.OPERATOR, acting_for="team-a"
    )
    assert acting.demote("a5")["phase"] == "demoted"


def test_quotas_clip_and_refuse(served: Any, world: Any) -> None:
    with ClaimsClient(served.url, api_key="key-b") as b:
        with pytest.raises(ClaimError) as refused:
            b.declare("b1", world.prompt(6, 11))
        assert refused.value.status == 409
        assert refused.value.body["reason"] == "exceeds the owner's quota of 10 blocks"
        told = b.declare("b2", world.prompt(6, 11), min_blocks=1)
        assert (told["decision"], told["granted_blocks"]) == ("conditionally_accepted", 10)
        assert b.pool()["hard_blocks"] == 10
        b.release("b2")


def test_time_is_the_walls_and_no_renewal_comes_late(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    as_a.declare("a6", world.prompt(7, 2), duration=0.05)
    as_a.declare("a7", world.prompt(7, 2), duration=0.05)
    as_a.renew("a7", 60)
    end = time.monotonic() + 30
    while as_a.inspect("a6")["phase"] != "expired" and time.monotonic() < end:
        pass
    with pytest.raises(ClaimError, match="409: the claim is expired already"):
        as_a.renew("a6", 60)
    assert as_a.inspect("a7")["phase"] == "accepted"


BAD = [
    ({"claim_id": "x", "surprise": 1}, 400, "unknown fields: surprise"),
    ({"claim_id": "x", "predicate": {"n": 0}}, 400, "n is a whole number"),
    ({"claim_id": "x", "predicate": {"n": 81}}, 413, "speaks of 81 blocks, and the pool has 80"),
    ({"claim_id": "x", "predicate": {"n": 3}}, 400, "past the 2 of the content"),
    ({"claim_id": "x", "duration": "soon"}, 400, "seconds"),
    ({"claim_id": "x", "owner": "team-b"}, 403, "own name"),
    ({"claim_id": "../x"}, 400, "letters"),
    ('{"claim_id": "x", "duration": NaN}', 400, "not JSON"),
]


@pytest.mark.parametrize(("claim", "status", "message"), BAD)
def test_a_bad_claim_with_a_request_is_4xx_before_the_engine(
    served: Any, world: Any, claim: Any, status: int, message: str
) -> None:
    answer = served.complete(world.prompt(1, 2), claim=claim)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_bodies_without_end_and_strangers_are_turned_away(served: Any) -> None:
    huge = served.post("/v1/kvclaims/claims", {"claim_id": "x", "tokens": [1] * 3_500_000})
    assert huge.status_code == 413
    stranger = served.get("/v1/kvclaims/claims", headers={"Authorization": "Bearer nobody"})
    assert stranger.status_code == 401
    assert served.post("/v1/kvclaims/pool", {}).status_code == 405
    assert served.get("/v1/kvclaims/nothing").status_code == 404


def test_metrics_stand_in_the_engines_own_endpoint(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    as_a.declare("a8", world.prompt(8, 5))
    page = served.get("/metrics").text
    assert "vllm:num_requests_running" in page
    assert "kvclaims_usable_blocks 80.0" in page
    assert 'kvclaims_outcomes_total{outcome="served"}' in page
    assert "kvclaims_reserved_blocks 5.0" in page
    assert "team-a" not in page  # names are the operator's (Q3)


def test_claim_args_are_what_vllm_hands_through(
    served: Any, world: Any, as_a: ClaimsClient
) -> None:
    body = {"model": "m", "prompt": world.prompt(9, 3), "max_tokens": 1}
    answer = served.post("/v1/completions", {**body, "vllm_xargs": claim_args("a9", duration=9)})
    told = answer.json()["kv_transfer_params"]["kvclaims"]["claim"]
    assert told["granted_blocks"] == 3
    again = served.post("/v1/completions", {**body, "vllm_xargs": claim_args("a9", duration=9)})
    assert again.status_code == 409
    assert "was declared before" in again.json()["error"]["message"]


def test_the_trace_on_disk_is_whole(served: Any) -> None:
    """Rotated files in order, then the current one: dense sequence numbers from 0 (T1)."""
    from kvclaims.bridge.serving.tracefiles import in_order
    from kvclaims.spec.telemetry import parse_event

    end = time.monotonic() + 60
    while "kvclaims_trace_waiting_events 0.0" not in served.get("/metrics").text:
        assert time.monotonic() < end
    assert "kvclaims_trace_lost_events_total 0.0" in served.get("/metrics").text
    lines = [line for path in in_order(Path(served.trace)) for line in path.open()]
    events = [parse_event(line) for line in lines]
    assert [event.seq for event in events] == list(range(len(events)))
    assert len(in_order(Path(served.trace))) > 1


def test_a_signal_to_all_of_its_processes_leaves_a_whole_trace(tmp_path: Path) -> None:
    """The engine core is told to stop twice then: by the signal, and by its parent (T3)."""
    from serving_world import prompt, server

    from kvclaims.checker.audit import audit

    with server(tmp_path, as_group=True) as running:
        claim = {"claim_id": "c", "duration": 500}
        assert running.complete(prompt(1, 5), claim=claim).status_code == 200
    (run,) = audit([tmp_path / "trace.jsonl"]).runs
    assert [str(life.outcome) for life in run.fold.requests.values()] == ["served"]
