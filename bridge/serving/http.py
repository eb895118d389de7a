"""Claims over HTTP, inside vLLM's API server: `--middleware kvclaims.bridge.serving.http.Claims`

- `/v1/kvclaims/…`: declare by prefix, inspect, list, renew, demote, release, the pool's numbers;
- a completion whose claim could not even be decided is answered 4xx before the engine sees it;
- a request that claims turned away leaves as 503 with Retry-After (or 413 where it can never
  fit), with the blocking claims, where vLLM by itself says 500, whatever route it came by; a
  stream that has begun by then ends with an event that says the same;
- a response in the background that was turned away has failed, and says so: vLLM leaves it
  queued, and its stream silent, for ever;
- a stream, in which vLLM has no place for it, tells in a header what became of its claim;
- `/metrics` has the families of `kvclaims.bridge.metrics` beside vLLM's own.

Middleware is the one hook that sees all five, is public, and is there in every version.  It stands
before vLLM's own authentication, so its routes check the same API keys themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from kvclaims.bridge.metrics import exposition
from kvclaims.bridge.serving.desk import ANONYMOUS, OWNER, VOUCHER, Answer
from kvclaims.bridge.serving.ranks import are_at_odds, together
from kvclaims.bridge.serving.settings import BadSettings, Settings, read_settings
from kvclaims.bridge.serving.wire import BadClaim, parse_order, read_json, read_name

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Ask = Callable[[str], Awaitable[dict[str, Any] | None]]
"""An operation at the desk for one request; None where there is nothing to say."""
Call = Callable[[str], Awaitable[str]]

PREFIX: Final = "/v1/kvclaims"
DOOR: Final = "kvclaims"
"""The engine core's method that leads to its desk."""
OWNER_HEADER: Final = "x-kvclaims-owner"
OPERATOR_HEADER: Final = "x-kvclaims-operator"

GENERATING: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
OPERATOR_TOKEN: Final = "KVCLAIMS_OPERATOR_TOKEN"
"""Environment: the operator's token, where the settings do not have its digest."""

_PATIENCE: Final = 5.0
"""Seconds that `/metrics` waits for the engine."""

_CLAIM: Final = "kvclaims"
_CHAT: Final = "/v1/chat/completions"
_RESPONSES: Final = "/v1/responses"
"""The route whose requests have the id that their body names, and none from a header."""

_LOOK: Final = 1.0
"""Seconds between two looks at whether a response in the background was turned away."""

DECISION_HEADER: Final = b"x-kvclaims-claim"
"""What became of a claim that came with a request for a stream, as JSON."""

_HELD_BACK: Final = {_CHAT: 2, "/v1/messages": 2, _RESPONSES: 3}
"""Chunks of a stream until the first that says something: a chat begins with the role, others with
events that the request was taken, whatever comes next."""

_FAILURE: Final = re.compile(rb'^(event: error\n|data: \{"error":)', re.MULTILINE)
"""How vLLM tells in a stream that a request has failed."""


@dataclass(frozen=True)
class Asker:
    """Who a request is from: `owner` as authenticated or as declared."""

    owner: str
    operator: bool
    proven: bool


class Claims:
    """The ASGI middleware.  `call` reaches the engine; by default it is found in vLLM's app."""

    def __init__(
        self, app: App, settings: Settings | None = None, call: Call | None = None
    ) -> None:
        self.app = app
        self._settings = settings
        self._call = call
        self._keys: list[str] | None = None if call is None else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if path == PREFIX or path.startswith(f"{PREFIX}/"):
                await self._claims(scope, receive, send, path.removeprefix(PREFIX))
            elif path == "/metrics":
                await self._metrics(scope, receive, send)
            elif scope["method"] == "POST":
                await self._post(scope, receive, send, path)
            elif scope["method"] == "GET" and path.startswith(f"{_RESPONSES}/"):
                await self._retrieve(scope, receive, send, path.removeprefix(f"{_RESPONSES}/"))
            else:
                await self.app(scope, receive, send)
        except BadClaim as error:
            await _reply(send, error.status, _error(str(error), error.status))

    # -- what vLLM's app knows -------------------------------------------------------------------

    def settings(self, scope: Scope) -> Settings:
        if self._settings is None:
            config = scope["app"].state.vllm_config
            found = read_settings(getattr(config, "additional_config", None), default=True)
            assert found is not None
            self._settings = found
        return self._settings

    def keys(self, scope: Scope) -> list[str]:
        """The API keys that vLLM itself asks for."""
        if self._keys is None:
            given = getattr(scope["app"].state.args, "api_key", None)
            self._keys = [k for k in (given or [os.environ.get("VLLM_API_KEY")]) if k]
        return self._keys

    async def ask(self, scope: Scope, op: str, asker: Asker, **more: Any) -> Answer:
        """One operation at the desk, of each engine where there are several."""
        calls = [self._call] if self._call else _engine_calls(scope["app"].state.engine_client)
        message = {"op": op, "owner": asker.owner, "operator": asker.operator, **more}
        answers = await _told(calls, message)
        if op == "declare" and are_at_odds(answers):  # on all of them or on none
            done = [call for call, a in zip(calls, answers, strict=True) if a.status < 400]
            owner, name = (more["claim"].get(key) for key in ("owner", "claim_id"))
            undo = {"op": "release", "owner": owner or asker.owner, "claim_id": name}
            await _told(done, undo)
        return together(op, answers)

    def _dead(self, scope: Scope) -> bool:
        """Whether vLLM knows that its engine is gone."""
        return self._call is None and bool(scope["app"].state.engine_client.errored)

    # -- who asks --------------------------------------------------------------------------------

    def _asker(self, scope: Scope, headers: Mapping[str, str]) -> Asker | None:
        """None for a request without one of the server's API keys."""
        token = _bearer(headers)
        if (keys := self.keys(scope)) and not any(_same(token, key) for key in keys):
            return None
        declared = read_name("owner", headers.get(OWNER_HEADER, ANONYMOUS))
        operator = self._is_operator(scope, headers.get(OPERATOR_HEADER, ""))
        proven = self._owner_of(self.settings(scope), token)
        if operator or proven is None:
            return Asker(declared, operator, proven=False)
        if declared not in (ANONYMOUS, proven):
            raise BadClaim("this API key belongs to another owner", 403)
        return Asker(proven, operator=False, proven=True)

    def _owner_of(self, settings: Settings, token: str) -> str | None:
        """The owner whose key this is; where owners have keys, nobody else is one."""
        if not settings.owners:
            return None
        digest = hashlib.sha256(token.encode()).hexdigest()
        for owner, known in settings.owners.items():
            if secrets.compare_digest(digest, known):
                return owner
        return ANONYMOUS

    def _is_operator(self, scope: Scope, token: str) -> bool:
        if not token:
            return False
        known = self.settings(scope).operator_sha256
        if not known and (secret := os.environ.get(OPERATOR_TOKEN, "")):
            known = hashlib.sha256(secret.encode()).hexdigest()
        if known and secrets.compare_digest(hashlib.sha256(token.encode()).hexdigest(), known):
            return True
        raise BadClaim("this is not the operator's token", 403)

    # -- the claims' own routes --------------------------------------------------------------------

    async def _claims(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        asker = self._asker(scope, _headers(scope))
        if asker is None:
            await _reply(send, 401, _error("give one of the server's API keys", 401))
            return
        op, more = await self._route(scope, receive, path)
        asker = _speaking_of(asker, scope)
        answer = await self.ask(scope, op, asker, **more)
        body = answer.body
        if answer.status >= 400 and "error" in body:
            body = _error(str(body["error"]), answer.status)
        await _reply(send, answer.status, body)

    async def _route(self, scope: Scope, receive: Receive, path: str) -> tuple[str, dict[str, Any]]:
        parts = [part for part in path.split("/") if part]
        match (scope["method"], parts):
            case ("GET", ["pool"]):
                return "pool", {}
            case ("GET", ["claims"]):
                return "list", {}
            case ("POST", ["claims"]):
                raw = await self._body(scope, receive)
                parse_order(raw, prefix=True)  # before the engine is asked to look at it
                return "declare", {"claim": raw}
            case ("GET", ["claims", name]):
                return "inspect", {"claim_id": name}
            case ("DELETE", ["claims", name]):
                return "release", {"claim_id": name}
            case ("POST", ["claims", name, "demote"]):
                return "demote", {"claim_id": name}
            case ("POST", ["claims", name, "renew"]):
                return "renew", {"claim_id": name, "renewal": await self._body(scope, receive)}
            case (_, ["pool"] | ["claims"] | ["claims", _] | ["claims", _, "demote" | "renew"]):
                raise BadClaim("this is not done with that method", 405)
        raise BadClaim("no such route", 404)

    async def _body(self, scope: Scope, receive: Receive) -> Any:
        most = self.settings(scope).max_body
        return read_json(await _read_all(scope, receive, most))

    # -- requests ----------------------------------------------------------------------------------

    async def _post(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """A request that may need KV."""
        headers = _headers(scope)
        asker = self._asker(scope, headers)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        claimed, behind, held = False, False, _HELD_BACK.get(path, 1)
        if path in GENERATING and asker is not None:  # vLLM turns others away, where it asks a key
            body = await _read_all(scope, receive, None)
            body, claimed = await self._with_claim(scope, asker, body)
            if path == _RESPONSES:
                body, request_id, behind = _named(body, request_id)
            elif path == _CHAT:
                held = _before_a_chat(body)
            receive = _replay(body, receive)
            scope = {**scope, "headers": _with_length(scope["headers"], body)}
        scope = {**scope, "headers": _with_id(scope["headers"], request_id)}
        asker = asker or Asker(ANONYMOUS, operator=False, proven=False)
        if behind:  # of an earlier one of that name
            await self._asking(scope, asker, request_id)("verdict")
        relay = Relay(send, self._asking(scope, asker, request_id, keep=behind), held, claimed)
        await self._relayed(relay, scope, receive, behind)

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        """What became of a response in the background."""
        asker = self._asker(scope, _headers(scope))
        if asker is None:
            await self.app(scope, receive, send)
            return
        ask = self._asking(scope, asker, request_id, keep=True)
        await self._relayed(Retrieval(send, ask), scope, receive, behind=True)

    def _asking(self, scope: Scope, asker: Asker, request_id: str, *, keep: bool = False) -> Ask:
        async def ask(op: str) -> dict[str, Any] | None:
            if self._dead(scope):
                return None
            answer = await self.ask(scope, op, asker, request=request_id, keep=keep)
            return answer.body if answer.status == 200 else None

        return ask

    async def _relayed(self, relay: Relay, scope: Scope, receive: Receive, behind: bool) -> None:
        """The app's answer through the relay."""
        try:
            if behind:
                await self._watched(relay, scope, receive)
            else:
                await self.app(scope, receive, relay.send)
        except Exception:  # vLLM's way to end some streams of requests that have failed
            if not await relay.broke_off():
                raise
        else:
            await relay.ended()

    async def _watched(self, relay: Relay, scope: Scope, receive: Receive) -> None:
        """The app answers a request in the background: where that fails, its stream never ends."""
        answering = asyncio.ensure_future(self.app(scope, receive, relay.send))
        try:
            while not (await asyncio.wait({answering}, timeout=_LOOK))[0]:
                if relay.streams and await relay.turned_away():
                    return
            await answering
        finally:
            answering.cancel()

    async def _with_claim(self, scope: Scope, asker: Asker, body: bytes) -> tuple[bytes, bool]:
        """The body with its owner put in, and whether it has a claim; one that is no good raises
        `BadClaim`."""
        if b"kvclaims" not in body and not asker.proven:
            return body, False
        request = _object(body)
        extra = None if request is None else request.get("vllm_xargs")
        if request is None or not (extra is None or isinstance(extra, dict)):
            return body, False  # vLLM says what is wrong with it
        extra = dict(extra or {})
        claim = extra.get(_CLAIM)
        if claim is not None:
            await self._check(scope, asker, request, claim)
        owner = asker.owner if asker.proven else extra.get(OWNER, asker.owner)
        if asker.operator and claim is not None:
            owner = parse_order(read_json(claim), prefix=False).owner or owner
        extra[OWNER] = read_name("owner", owner)
        if (asker.proven or asker.operator) and (voucher := self.settings(scope).voucher(owner)):
            extra[VOUCHER] = voucher
        request["vllm_xargs"] = extra
        return json.dumps(request).encode(), claim is not None

    async def _check(self, scope: Scope, asker: Asker, request: Any, claim: Any) -> None:
        if not isinstance(claim, str) or len(claim) > self.settings(scope).max_body:
            raise BadClaim("a claim with a request is a short JSON text")
        prompt = request.get("prompt")
        several = isinstance(prompt, list) and any(not isinstance(p, int) for p in prompt)
        answers = request.get("n") not in (None, 1) or request.get("use_beam_search")
        if answers or (several and len(prompt) != 1):
            raise BadClaim("a claim speaks of one prompt, and of one answer to it")
        raw = read_json(claim)
        parse_order(raw, prefix=False)  # before the engine is asked to look at it
        answer = await self.ask(scope, "check", asker, claim=raw, tokens=_length(prompt))
        if answer.status != 200:
            raise BadClaim(str(answer.body.get("error")), answer.status)

    # -- metrics -----------------------------------------------------------------------------------

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's page, as plain text, with ours after it."""
        plain = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() not in (b"accept", b"accept-encoding")
        ]
        page = b"# kvclaims: the engine does not answer\n"
        with suppress(TimeoutError):  # vLLM's own page is the more needed then
            if not self._dead(scope):
                asking = self.ask(scope, "stats", Asker(ANONYMOUS, True, False))
                answer = await asyncio.wait_for(asking, _PATIENCE)
                page = exposition(answer.body) if answer.status == 200 else b""

        async def append(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [h for h in message["headers"] if h[0].lower() != b"content-length"]
                message = {**message, "headers": kept}
            elif not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + page}
            await send(message)

        await self.app({**scope, "headers": plain}, receive, append)


@dataclass
class Relay:
    """Holds back what may turn out to be a failure: all of a JSON error, or the first `held`
    chunks of a stream.  Where the engine says that claims turned the request away, that is told in
    place of the failure: as an answer, or as the last event of a stream that has begun.
    """

    pass_on: Send
    ask: Ask
    held: int = 1
    claimed: bool = False
    """Whether the request brought a claim."""
    kept: list[Message] = field(default_factory=list)
    status: int = 0
    streams: bool = False
    sent: bool = False
    told: bool = False
    """Whether the stream's failure was explained: what vLLM says of it after that is left out."""
    over: bool = False
    """Whether the client was told all that it will be."""

    async def send(self, message: Message) -> None:
        if self.over:
            return
        if self.sent:
            await self._go_on(message)
            return
        self.kept.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [v for k, v in message["headers"] if k.lower() == b"content-type"]
            self.streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif not self._undecided():
            await self._let_go()

    async def ended(self) -> None:
        """The app has answered."""
        if not (self.sent or self.over):
            await self._settle(self._failed())

    async def broke_off(self) -> bool:
        """The app has failed within its answer; whether the client was told that claims are why."""
        if not self.sent:
            return await self._settle(failed=True)
        return self.streams and not self.told and await self.turned_away()

    async def turned_away(self) -> bool:
        """Whether claims turned the request away; the client is told, and nothing after that."""
        verdict = await self.ask("verdict")
        if verdict is None:
            return False
        self.over = True
        if self.sent:
            last = _as_event(verdict, named=True)
            await self.pass_on({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await _refuse(self.pass_on, verdict)
        return True

    async def _settle(self, failed: bool) -> bool:
        if failed and await self.turned_away():
            return True
        await self._let_go()
        return False

    def _undecided(self) -> bool:
        if self.status >= 500:
            return True
        return (
            self.streams and self.status == 200 and (self._failed() or self._chunks() < self.held)
        )

    def _chunks(self) -> int:
        return sum(bool(m.get("body")) for m in self.kept)

    def _failed(self) -> bool:
        told = b"".join(m.get("body", b"") for m in self.kept)
        return self.status >= 500 or (self.streams and _FAILURE.search(told) is not None)

    async def _let_go(self) -> None:
        self.sent = True
        kept, self.kept = self.kept, []
        if self.claimed and self.streams and self.status == 200:
            await self._decide(kept[0])
        for message in kept:
            await self.pass_on(message)

    async def _decide(self, start: Message) -> None:
        decision = await self.ask("decision")
        if decision is not None:
            header = (DECISION_HEADER, json.dumps(decision).encode())
            start["headers"] = [*start["headers"], header]

    async def _go_on(self, message: Message) -> None:
        body = message.get("body", b"")
        if self.streams and not self.told and _FAILURE.search(body):
            verdict = await self.ask("verdict")
            if verdict is not None:
                self.told = True
                message = {**message, "body": _as_event(verdict, body.startswith(b"event:"))}
        await self.pass_on(message)


@dataclass
class Retrieval(Relay):
    """The same where a client asks what became of a response in the background.  One that still
    waits, as vLLM has it, has failed where it was turned away."""

    def _undecided(self) -> bool:
        return not self.streams

    def _failed(self) -> bool:
        return False

    async def _let_go(self) -> None:
        if not self.streams and (stored := self._waiting()) is not None:
            verdict = await self.ask("verdict")
            if verdict is not None:
                self.sent = self.over = True
                await _reply(self.pass_on, 200, _as_failed(stored, verdict), _until(verdict))
                return
        await super()._let_go()

    def _waiting(self) -> dict[str, Any] | None:
        if self.status != 200:
            return None
        stored = _object(b"".join(m.get("body", b"") for m in self.kept))
        return stored if stored and stored.get("status") in ("queued", "in_progress") else None


def _engine_calls(client: Any) -> list[Call]:
    """How to reach each engine core of vLLM's `EngineClient`."""
    core = client.engine_core
    engines = getattr(core, "core_engines", ())
    if len(engines) < 2:

        async def call(message: str) -> str:
            return str(await core.call_utility_async(DOOR, message))

        return [call]

    def to(engine: Any) -> Call:  # vLLM's own call asks all of them and tells what the first says
        async def call(message: str) -> str:
            return str(await core._call_utility_async(DOOR, message, engine=engine))

        return call

    return [to(engine) for engine in engines]


async def _told(calls: Sequence[Call], message: Mapping[str, Any]) -> list[Answer]:
    text = json.dumps(message)
    told = await asyncio.gather(*(call(text) for call in calls))
    return [Answer(*json.loads(answer)) for answer in told]


def _speaking_of(asker: Asker, scope: Scope) -> Asker:
    """The operator may speak of another owner's claims: `?owner=name`."""
    wanted = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("owner")
    if not wanted or wanted[0] == asker.owner:
        return asker
    if not asker.operator:
        raise BadClaim("only the operator speaks for other owners", 403)
    return Asker(read_name("owner", wanted[0]), operator=True, proven=False)


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _same(token: str, key: str) -> bool:
    """Whether two secrets are equal, in a time that tells nothing of them."""
    given, known = (hashlib.sha256(text.encode()).digest() for text in (token, key))
    return secrets.compare_digest(given, known)


async def _read_all(scope: Scope, receive: Receive, most: int | None) -> bytes:
    """The whole body; past `most` bytes nothing more is read."""
    declared = _headers(scope).get("content-length", "")
    if most is not None and declared.isdigit() and int(declared) > most:
        raise BadClaim(f"a body has at most {most} bytes", 413)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if most is not None and size > most:
            raise BadClaim(f"a body has at most {most} bytes", 413)
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_length(headers: Any, body: bytes) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(len(body)).encode())]


def _with_id(headers: Any, request_id: str) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() != b"x-request-id"]
    return [*kept, (b"x-request-id", request_id.encode("latin-1", "replace"))]


def _object(body: bytes) -> dict[str, Any] | None:
    """The JSON object that a body is."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _named(body: bytes, request_id: str) -> tuple[bytes, str, bool]:
    """The body with an id for its request, unless it brings one; the id; and whether it is to be
    answered in the background."""
    request = _object(body)
    if request is None:
        return body, request_id, False
    own = request.setdefault("request_id", f"resp_{request_id}")
    return json.dumps(request).encode(), str(own), bool(request.get("background"))


def _before_a_chat(body: bytes) -> int:
    """Chunks of a chat's stream until the first that says something: each answer begins with the
    role, and with an echo where it was asked for."""
    usual = _HELD_BACK[_CHAT]
    if b'"n"' not in body and b'"echo"' not in body:
        return usual
    request = _object(body) or {}
    answers = request.get("n")
    many = answers if type(answers) is int else 1
    return max(usual, many * (1 + bool(request.get("echo"))) + 1)


def _length(prompt: Any) -> int | None:
    """How many tokens a prompt has, where it is given as such."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        (prompt,) = prompt
    return len(prompt) if isinstance(prompt, list) else None


async def _refuse(send: Send, verdict: Mapping[str, Any]) -> None:
    """503 with what blocks and for how long; 413 for what this pool can never hold."""
    error = _explained(verdict)
    await _reply(send, error["error"]["code"], error, _until(verdict))


def _until(verdict: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """The header that says when to try again, where that helps."""
    wait = verdict.get("retry_after")
    return [] if wait is None else [(b"retry-after", str(wait).encode())]


def _as_failed(response: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """A response of vLLM that was turned away, with the error as such an object has one."""
    error = {**_explained(verdict)["error"], "code": "server_error"}
    return {**response, "status": "failed", "error": error}


def _explained(verdict: Mapping[str, Any]) -> dict[str, Any]:
    if verdict["outcome"] == "capacity_required":
        message = (
            f"the request needs {verdict['needed_blocks']} blocks of KV and the pool has "
            f"{verdict['usable_blocks']}: at most {verdict['fits_tokens']} tokens fit"
        )
        return _error(message, 413, verdict)
    message = f"resident claims leave {verdict['shortfall']} blocks too few: " + ", ".join(
        f"{b['claim']} ({b['blocks']} blocks)" for b in verdict["blocking_claims"]
    )
    return _error(message, 503, verdict)


def _as_event(verdict: Mapping[str, Any], named: bool) -> bytes:
    """The same as an event of a stream, in the form of those that are `named`, or plain."""
    error = _explained(verdict)
    if not named:
        return b"data: " + json.dumps(error).encode() + b"\n\n"
    told = {"type": "error", "message": error["error"]["message"], **error}
    return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"


def _error(message: str, status: int, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The shape of errors that clients of this API know."""
    return {"error": {"message": message, "type": "kvclaims", "code": status, **(more or {})}}


async def _reply(
    send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    content = json.dumps(body).encode()
    start = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send(
        {"type": "http.response.start", "status": status, "headers": [*start, *(headers or [])]}
    )
    await send({"type": "http.response.body", "body": content})


__all__ = ["BadSettings", "Claims"]
