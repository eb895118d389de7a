"""The middleware before an app of a few lines: who is let in, what is passed on, what is mapped."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvclaims.bridge.metrics import exposition
from kvclaims.bridge.serving.client import ClaimsClient, LocalClaims
from kvclaims.bridge.serving.http import Claims
from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.serving.spans import Spans
from kvclaims.bridge.serving.tally import MOST_LABELS, OTHERS, Tally
from kvclaims.spec.telemetry import Recorder

httpx = pytest.importorskip(
    "httpx", reason="httpx is not installed (pip install kvclaims[serving])"
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


SETTINGS = Settings(
    owners={"a": digest("key-a"), "b": digest("key-b")},
    operator_sha256=digest("op"),
    max_body=2048,
)
VERDICT = {
    "outcome": "refused",
    "shortfall": 19,
    "missing_now": 19,
    "needed_blocks": 46,
    "usable_blocks": 67,
    "blocking_claims": [{"claim": "1f2e", "blocks": 40}],
    "retry_after": 9,
}


class Server:
    """The middleware over `app`, with a desk that notes what it is asked and says `says`."""

    def __init__(self, app: Any, says: Mapping[str, Any] | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.says = dict(says or {})

        async def call(message: str) -> str:
            self.asked.append(json.loads(message))
            return json.dumps(self.says.get(self.asked[-1]["op"], [200, {}]))

        self.claims = Claims(app, SETTINGS, call)
        self.claims._keys = ["key-a", "key-b", "key-x"]

    def request(self, method: str, path: str, key: str = "key-a", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.claims)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                return await client.request(method, path, headers=headers, **more)

        return asyncio.run(ask())


def app_that(
    status: int,
    kind: str,
    *chunks: bytes,
    seen: list[Any] | None = None,
    breaks: bool = False,
    hangs: bool = False,
) -> Any:
    """An app that answers so, and `breaks` off at the end, or `hangs` there for ever."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if seen is not None:
            seen.append((dict(scope["headers"]), json.loads(body)))
        headers = [(b"content-type", kind.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if breaks:
            raise ValueError("no such event")
        if hangs:
            await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


JSON, STREAM = "application/json", "text/event-stream"
FAILED = b'data: {"error": {"message": "Internal server error"}}\n\n'
NAMED = b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n'
REFUSED = {"verdict": [200, VERDICT]}
PROMPT = {"prompt": [1, 2]}


@pytest.mark.parametrize(
    ("path", "app"),
    [
        ("/v1/completions", app_that(500, JSON, b"{}")),
        ("/v1/completions", app_that(200, STREAM, FAILED)),
        ("/v1/chat/completions", app_that(200, STREAM, b"data: role\n\n", FAILED)),
        ("/v1/messages", app_that(500, JSON, b"{}")),
        ("/v1/messages", app_that(200, STREAM, b"event: message_start\n\n", NAMED)),
        ("/inference/v1/generate", app_that(200, STREAM, FAILED)),
        ("/v1/responses", app_that(500, JSON, b"{}")),
        ("/v1/responses", app_that(200, STREAM, b"event: a\n\n", b"event: b\n\n", breaks=True)),
    ],
)
def test_a_request_that_claims_blocked_leaves_as_503(path: str, app: Any) -> None:
    answer = Server(app, REFUSED).request("POST", path, json=PROMPT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
    error = answer.json()["error"]
    assert error["blocking_claims"] == VERDICT["blocking_claims"]
    assert error["message"] == "resident claims leave 19 blocks too few: 1f2e (40 blocks)"


@pytest.mark.parametrize(
    ("more", "before"),
    [({"n": 2}, 2), ({"n": 3, "echo": False}, 3), ({"echo": True}, 2), ({"n": 2, "echo": True}, 4)],
)
def test_so_does_one_for_several_answers_or_with_an_echo(more: Any, before: int) -> None:
    """A chat begins with the role of each answer, and with each echo, whatever comes next."""
    app = app_that(200, STREAM, *[b"data: role\n\n"] * before, FAILED)
    answer = Server(app, REFUSED).request("POST", "/v1/chat/completions", json={**PROMPT, **more})
    assert answer.status_code == 503


TAKEN = [b"event: response.created\ndata: {}\n\n", b"event: response.in_progress\ndata: {}\n\n"]
SAID = [b"event: response.output_text.delta\ndata: {}\n\n"] * 2
BACKGROUND = {"input": "x", "background": True, "stream": True, "request_id": "resp_7"}


def test_a_background_stream_that_never_begins_is_refused_as_others_are() -> None:
    """vLLM never ends the stream of a response that failed in the background: it falls silent."""
    server = Server(app_that(200, STREAM, *TAKEN, hangs=True), REFUSED)
    answer = server.request("POST", "/v1/responses", json=BACKGROUND)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
    assert answer.json()["error"]["blocking_claims"] == VERDICT["blocking_claims"]


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_one_that_has_begun_ends_with_the_reason(method: str) -> None:
    server = Server(app_that(200, STREAM, *TAKEN, *SAID, hangs=True), REFUSED)
    path = "/v1/responses" if method == "POST" else "/v1/responses/resp_7?stream=true"
    answer = server.request(method, path, json=BACKGROUND)
    assert answer.status_code == 200
    last = answer.content.removeprefix(b"".join([*TAKEN, *SAID]))
    assert json.loads(last.removeprefix(b"event: error\ndata: "))["error"]["shortfall"] == 19


def test_what_an_earlier_request_of_that_name_was_told_is_not_told_of_this_one() -> None:
    """What became of a background response is told again and again, until its id returns."""
    done = app_that(200, JSON, b'{"status": "queued"}')
    server = Server(done, REFUSED)
    assert server.request("POST", "/v1/responses", json=BACKGROUND).json() == {"status": "queued"}
    assert [(a["op"], a["request"], a.get("keep")) for a in server.asked] == [
        ("verdict", "resp_7", False)
    ]


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_a_background_response_that_was_refused_has_failed(status: str) -> None:
    """vLLM says for ever that it is queued."""
    stored = {"id": "resp_7", "background": True, "status": status, "output": []}
    server = Server(app_that(200, JSON, json.dumps(stored).encode()), REFUSED)
    answer = server.request("GET", "/v1/responses/resp_7", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (200, "9")
    told = answer.json()
    error = told.pop("error")
    assert told == {**stored, "status": "failed"}
    assert (error["code"], error["outcome"], error["shortfall"]) == ("server_error", "refused", 19)
    assert [(a["op"], a["request"], a["keep"]) for a in server.asked] == [
        ("verdict", "resp_7", True)
    ]


@pytest.mark.parametrize(
    ("status", "says", "asked"),
    [("completed", REFUSED, 0), ("cancelled", REFUSED, 0), ("queued", {"verdict": [404, {}]}, 1)],
)
def test_any_other_is_what_vllm_says_it_is(status: str, says: Any, asked: int) -> None:
    stored = {"id": "resp_7", "background": True, "status": status}
    server = Server(app_that(200, JSON, json.dumps(stored).encode()), says)
    answer = server.request("GET", "/v1/responses/resp_7", json={})
    assert (answer.status_code, answer.json()) == (200, stored)
    assert len(server.asked) == asked


DONE = b"data: [DONE]\n\n"
BEGUN = [b"data: role\n\n", b"data: a\n\n", b"data: b\n\n", b"data: c\n\n"]


@pytest.mark.parametrize(
    ("app", "last"),
    [
        (app_that(200, STREAM, *BEGUN, FAILED, DONE), b"data: "),
        (app_that(200, STREAM, *BEGUN, NAMED), b"event: error\ndata: "),
        (app_that(200, STREAM, *BEGUN, breaks=True), b"event: error\ndata: "),
    ],
)
def test_a_stream_that_claims_end_says_why(app: Any, last: bytes) -> None:
    """A request that outgrew what claims leave: its status was sent long ago."""
    answer = Server(app, REFUSED).request("POST", "/v1/chat/completions", json=PROMPT)
    assert answer.status_code == 200
    told = answer.content.removeprefix(b"".join(BEGUN)).removesuffix(DONE)
    assert told.startswith(last)
    error = json.loads(told.removeprefix(last))["error"]
    assert (error["code"], error["retry_after"]) == (503, 9)
    assert error["blocking_claims"] == VERDICT["blocking_claims"]


def test_a_stream_that_breaks_off_for_another_reason_does() -> None:
    server = Server(app_that(200, STREAM, *BEGUN, breaks=True), {"verdict": [404, {}]})
    with pytest.raises(ValueError, match="no such event"):
        server.request("POST", "/v1/chat/completions", json=PROMPT)


def test_a_stream_tells_in_its_header_what_became_of_a_claim() -> None:
    decided = {"decision": "accepted", "granted_blocks": 3}
    app = app_that(200, STREAM, *BEGUN, DONE)
    server = Server(app, {"decision": [200, decided]})
    body = {**PROMPT, "vllm_xargs": {"kvclaims": '{"claim_id": "c"}'}, "stream": True}
    answer = server.request("POST", "/v1/chat/completions", json=body)
    assert json.loads(answer.headers["x-kvclaims-claim"]) == decided
    assert answer.content == b"".join([*BEGUN, DONE])
    plain = server.request("POST", "/v1/chat/completions", json=PROMPT)
    assert "x-kvclaims-claim" not in plain.headers
    assert [asked["op"] for asked in server.asked] == ["check", "decision"]


def test_a_request_by_another_route_is_passed_on_as_it_comes() -> None:
    """Its body is not ours to read: it may be a recording of an hour."""
    seen: list[Any] = []
    server = Server(app_that(200, JSON, b"{}", seen=seen))
    body = {"vllm_xargs": {"kvclaims": "{"}, "kvclaims": 1}
    assert server.request("POST", "/v1/embeddings", json=body).status_code == 200
    headers, passed = seen[0]
    assert passed == body
    assert headers[b"x-request-id"]
    assert server.asked == []


@pytest.mark.parametrize(("own", "asked"), [(None, "resp_from-a-header"), ("resp_7", "resp_7")])
def test_a_response_has_the_id_of_its_body(own: str | None, asked: str) -> None:
    seen: list[Any] = []
    server = Server(app_that(500, JSON, b"{}", seen=seen), REFUSED)
    body = {"input": "x"} if own is None else {"input": "x", "request_id": own}
    given = {"X-Request-Id": "from-a-header"}
    answer = server.request("POST", "/v1/responses", json=body, headers=given)
    assert answer.status_code == 503
    assert (seen[0][1]["request_id"], server.asked[0]["request"]) == (asked, asked)


def test_what_never_fits_leaves_as_413() -> None:
    verdict = {**VERDICT, "outcome": "capacity_required", "fits_tokens": 1072}
    del verdict["retry_after"]
    server = Server(app_that(500, JSON, b"{}"), {"verdict": [200, verdict]})
    answer = server.request("POST", "/v1/completions", json=PROMPT)
    assert answer.status_code == 413
    assert "at most 1072 tokens fit" in answer.json()["error"]["message"]


def test_a_failure_of_another_kind_stays_what_it_is() -> None:
    unknown = {"verdict": [404, {"error": "no such request was refused"}]}
    server = Server(app_that(500, JSON, b'{"detail": "broken"}'), unknown)
    answer = server.request("POST", "/v1/completions", json=PROMPT)
    assert (answer.status_code, answer.json()) == (500, {"detail": "broken"})


def test_a_stream_that_goes_well_is_passed_on_whole() -> None:
    chunks = [b"data: role\n\n", b"data: hello\n\n", b"data: [DONE]\n\n"]
    server = Server(app_that(200, STREAM, *chunks))
    answer = server.request("POST", "/v1/chat/completions", json=PROMPT)
    assert answer.content == b"".join(chunks)
    assert server.asked == []


def test_the_owner_of_the_key_is_put_into_the_request() -> None:
    seen: list[Any] = []
    server = Server(app_that(200, JSON, b"{}", seen=seen))
    lie = {**PROMPT, "vllm_xargs": {"kvclaims_owner": "a", "kvclaims": '{"claim_id": "c"}'}}
    assert server.request("POST", "/v1/completions", key="key-b", json=lie).status_code == 200
    headers, body = seen[0]
    assert body["vllm_xargs"]["kvclaims_owner"] == "b"
    assert int(headers[b"content-length"]) == len(json.dumps(body))
    assert body["vllm_xargs"]["kvclaims_voucher"] == SETTINGS.voucher("b")
    assert server.asked[0]["owner"] == "b"


def test_the_id_that_the_engine_sees_is_the_one_it_is_asked_for() -> None:
    seen: list[Any] = []
    server = Server(app_that(500, JSON, b"{}", seen=seen), REFUSED)
    server.request("POST", "/v1/completions", json=PROMPT)
    assert seen[0][0][b"x-request-id"].decode() == server.asked[0]["request"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 2}, "one prompt"),
        ({"use_beam_search": True}, "one prompt"),
        ({"prompt": [[1], [2]]}, "one prompt"),
        ({"vllm_xargs": {"kvclaims": 5}}, "short JSON"),
        ({"vllm_xargs": {"kvclaims": "{"}}, "not JSON"),
    ],
)
def test_a_bad_claim_never_reaches_the_engine(more: Any, message: str) -> None:
    seen: list[Any] = []
    server = Server(app_that(200, JSON, b"{}", seen=seen))
    body = {**PROMPT, "vllm_xargs": {"kvclaims": '{"claim_id": "c"}'}, **more}
    answer = server.request("POST", "/v1/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert seen == []


def test_strangers_and_impostors_are_turned_away() -> None:
    server = Server(app_that(200, JSON))
    assert server.request("GET", "/v1/kvclaims/claims", key="none").status_code == 401
    posed = {"X-Kvclaims-Owner": "b"}
    assert server.request("GET", "/v1/kvclaims/claims", headers=posed).status_code == 403
    token = {"X-Kvclaims-Operator": "guess"}
    assert server.request("GET", "/v1/kvclaims/claims", headers=token).status_code == 403
    assert server.request("GET", "/v1/kvclaims/claims?owner=b").status_code == 403
    assert server.asked == []


def test_the_operator_speaks_for_an_owner() -> None:
    server = Server(app_that(200, JSON))
    token = {"X-Kvclaims-Operator": "op"}
    server.request("DELETE", "/v1/kvclaims/claims/c?owner=b", key="key-x", headers=token)
    assert server.asked == [{"op": "release", "owner": "b", "operator": True, "claim_id": "c"}]


def test_a_key_of_no_owner_acts_for_nobody() -> None:
    server = Server(app_that(200, JSON))
    posed = {"X-Kvclaims-Owner": "b"}
    answer = server.request("GET", "/v1/kvclaims/claims", key="key-x", headers=posed)
    assert answer.status_code == 403


def test_a_body_past_the_limit_is_not_read() -> None:
    server = Server(app_that(200, JSON))

    async def endless() -> Any:
        for _ in range(100):
            yield b"1" * 1000

    answer = server.request("POST", "/v1/kvclaims/claims", content=endless())
    assert answer.status_code == 413
    assert server.asked == []


# -- what is counted -------------------------------------------------------------------------------


def tallied() -> tuple[Tally, Recorder, list[int]]:
    tally, now = Tally(), [0]
    return tally, Recorder("r", "p", 8, lambda: now[0], sink=tally.heard), now


def refuse(recorder: Recorder, claims: list[str], outcome: str = "refused") -> None:
    kind = "active_request_deferred" if outcome == "deferred" else "active_request_refused"
    recorder.emit(
        kind,
        request_id="q",
        outcome=outcome,
        feasibility="x",
        blocking_claim_ids=claims,
        waits_on=[],
        protected_resident_blocks=0,
        resident_plus_active_blocks=0,
        capacity_shortfall_blocks=3,
        missing_now=3,
        free_blocks_before_allocate=0,
        active_live_blocks_required=0,
        active_live_blocks_current=0,
        arbiter_action="none",
    )


def test_each_claim_named_is_counted_once_and_labels_are_bounded() -> None:
    tally, recorder, _ = tallied()
    refuse(recorder, ["a/x", "a/y"], "deferred")
    refuse(recorder, ["a/x", "a/y"])
    assert tally.refusals[("a/x", "refused")] == tally.refusals[("a/y", "deferred")] == 1
    assert (tally.shortfall, dict(tally.outcomes)) == (3, {"refused": 1})
    for i in range(MOST_LABELS + 5):
        refuse(recorder, [f"b/{i}"])
    assert len(tally.refusals) == MOST_LABELS + 1
    assert tally.refusals[(OTHERS, "refused")] == 9


def accept(recorder: Recorder, protection: str) -> None:
    granted = {"kind": "leading_prefix_at_least", "start": 0, "n": 1}
    recorder.emit(
        "resident_claim_submitted",
        claim_id="a/x",
        owner="a",
        protection=protection,
        predicate=granted,
        footprint=1,
        duration=None,
    )
    recorder.emit(
        "resident_claim_accepted",
        claim_id="a/x",
        decision="accepted",
        reason="r",
        granted=granted,
        cost_blocks=1,
        headroom_before=2,
    )


LOST: dict[str, dict[str, Any]] = {
    "block_lost_after_release": {"position": 0, "block_id": 1, "phase": "demoted"},
    "resident_block_lost": {"position": 0, "block_id": 1, "cause": "own_choice"},
    "resident_claim_harmed": {"cause": "own_choice", "before": {}, "after": {}},
}


@pytest.mark.parametrize("loss", LOST)
@pytest.mark.parametrize("protection", ["soft_priority", "hard_protected"])
def test_age_at_loss_is_that_of_the_first_loss(loss: str, protection: str) -> None:
    """Of a claim that was harmed by it, that had not been materialized, or that had ended."""
    tally, recorder, now = tallied()
    accept(recorder, protection)
    now[0] = 90 * 10**9
    for event in (loss, *LOST):
        recorder.emit(event, claim_id="a/x", **LOST[event])
        now[0] += 10**9
    assert (sum(tally.ages), tally.ages[3], tally.age_sum) == (1, 1, 90.0)


def test_a_block_that_a_tier_keeps_is_no_loss() -> None:
    tally, recorder, now = tallied()
    accept(recorder, "offloadable")
    recorder.emit("resident_block_lost", claim_id="a/x", **LOST["resident_block_lost"])
    assert sum(tally.ages) == 0
    now[0] = 5 * 10**9
    recorder.emit("resident_claim_harmed", claim_id="a/x", **LOST["resident_claim_harmed"])
    assert (sum(tally.ages), tally.age_sum) == (1, 5.0)


def test_the_page_has_every_family_and_its_labels() -> None:
    numbers = ("usable", "active", "protected", "reserved", "free", "headroom")
    claim = {"claim": "c", "owner": "o"}
    shown = {"protection": "hard_protected", "phase": "accepted"}
    page = exposition(
        {
            **{f"{name}_blocks": i for i, name in enumerate(numbers)},
            "run_id": "r",
            "phases": {"accepted": 2},
            "requests": {"waiting": 1, "loading": 0, "running": 3},
            "claims": [{**claim, **shown, "footprint": 4, "covered": 1, "reserve": 3}],
            "refusals": [{**claim, "outcome": "refused", "count": 5}],
            "harms": [{**claim, "cause": "fault", "count": 1}],
            "unsaved": [{**claim, "count": 4}],
            "outcomes": {"served": 9},
            "shortfall": 50,
            "ages": [0, 0, 1, 0, 0, 0, 0, 0, 2],
            "age_sum": 12.5,
        }
    ).decode()
    for line in (
        "kvclaims_headroom_blocks 5.0",
        'kvclaims_claims{phase="accepted"} 2.0',
        'kvclaims_claims{phase="harmed"} 0.0',
        'kvclaims_requests{state="running"} 3.0',
        'kvclaims_refusals_total{claim="c",outcome="refused",owner="o"} 5.0',
        'kvclaims_harms_total{cause="fault",claim="c",owner="o"} 1.0',
        'kvclaims_unsaved_total{claim="c",owner="o"} 4.0',
        'kvclaims_outcomes_total{outcome="served"} 9.0',
        "kvclaims_shortfall_blocks_total 50.0",
        'kvclaims_age_at_loss_seconds_bucket{le="60"} 1.0',
        'kvclaims_age_at_loss_seconds_bucket{le="+Inf"} 3.0',
        "kvclaims_age_at_loss_seconds_sum 12.5",
    ):
        assert line in page, f"{line}\n{page}"


def test_a_request_with_a_trace_context_gets_events_on_a_span_of_its_trace() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider.get_tracer("test"))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    spans.arrived("q", {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    spans.arrived("plain", None)
    clock = iter(range(1, 100))
    recorder = Recorder("r", "p", 8, lambda: next(clock), sink=spans.heard)
    refuse(recorder, ["secret"], "deferred")
    refuse(recorder, ["secret"])
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == trace_id
    assert [event.name for event in span.events] == [
        "active_request_deferred",
        "active_request_refused",
    ]
    assert span.events[1].attributes["capacity_shortfall_blocks"] == 3
    assert "secret" not in str([dict(event.attributes) for event in span.events])
    assert spans._open == {}


ODD = ["keep?", "keep?x=1", "keep#x", "../pool", "a/b", "100%41", "a b"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_no_claim_has_is_that_of_no_other_claim(name: str) -> None:
    """Whoever releases `keep?` has not released `keep`."""
    paths: list[str] = []

    def heard(request: Any) -> Any:
        paths.append(request.url.path)
        return httpx.Response(200, json={})

    client = ClaimsClient("http://t", owner="a")
    client._http = httpx.Client(
        base_url=client._http.base_url, transport=httpx.MockTransport(heard)
    )
    client.release(name)
    client.renew(name, 5)
    assert paths == [f"/v1/kvclaims/claims/{name}", f"/v1/kvclaims/claims/{name}/renew"]


@pytest.mark.parametrize("name", [*ODD, "a:b@c.d_e-f"])
def test_in_one_process_it_is_the_name_that_was_given(name: str) -> None:
    told: list[Any] = []

    class Core:
        def kvclaims(self, message: str) -> str:
            told.append(json.loads(message))
            return "[200, {}]"

    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=Core()))
    )
    claims = LocalClaims(llm, owner="a")
    claims.release(name)
    claims.demote(name)
    assert [(t["op"], t["claim_id"]) for t in told] == [("release", name), ("demote", name)]
