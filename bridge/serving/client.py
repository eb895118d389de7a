"""A client: claims over HTTP, or in a vLLM of this process, with the same words.

claims = ClaimsClient("http://localhost:8000", api_key="…", owner="team-a")
answer = claims.declare("system-prompt", tokens, duration=3600)
claims.renew("system-prompt", 3600)

claims = LocalClaims(llm, owner="team-a")        # `llm` is a vllm.LLM
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from kvclaims.bridge.serving.desk import ANONYMOUS

PREFIX: Final = "/v1/kvclaims"


class ClaimError(Exception):
    """An operation that was not done: `status` and `body` as HTTP has them."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        super().__init__(f"{status}: {message or body.get('reason')}")
        self.status, self.body = status, body


def claim_args(claim_id: str, owner: str | None = None, **more: Any) -> dict[str, Any]:
    """`SamplingParams.extra_args`, or `vllm_xargs`, of a request that claims its own prompt.

    >>> claim_args("chat-7", duration=60)
    {'kvclaims': '{"claim_id": "chat-7", "duration": 60}'}
    """
    claim = {"claim_id": claim_id, **more, **({} if owner is None else {"owner": owner})}
    return {"kvclaims": json.dumps(claim)}


def _path(claim_id: str, *more: str) -> str:
    """Where a claim is, whatever it is called."""
    return "/".join(("", "claims", quote(claim_id, safe=""), *more))


class Operations:
    """What can be done with claims, over some transport."""

    def _do(self, method: str, path: str, body: Any = None) -> Any:
        raise NotImplementedError

    def declare(self, claim_id: str, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        """Claim the blocks of this prefix; fields as in `kvclaims.bridge.serving.wire`.

        The answer says what was granted; a claim that is refused raises `ClaimError` with 409 and
        the numbers.
        """
        body = {"claim_id": claim_id, "tokens": list(tokens), **more}
        return dict(self._do("POST", "/claims", body))

    def inspect(self, claim_id: str) -> dict[str, Any]:
        """Phase, covered blocks, end and survivors; 404 for another owner's claim."""
        return dict(self._do("GET", _path(claim_id)))

    def list(self) -> list[dict[str, Any]]:
        """The owner's claims, the youngest last; the operator's list has everybody's."""
        return list(self._do("GET", "/claims")["claims"])

    def renew(self, claim_id: str, duration: float) -> dict[str, Any]:
        """The claim ends `duration` seconds from now; one that has ended cannot be renewed."""
        return dict(self._do("POST", _path(claim_id, "renew"), {"duration": duration}))

    def demote(self, claim_id: str) -> dict[str, Any]:
        """Protection ends; content stays until it is evicted.  409 once the claim has ended."""
        return dict(self._do("POST", _path(claim_id, "demote")))

    def release(self, claim_id: str) -> dict[str, Any]:
        """The owner lets go of the claim.  409 once it has ended."""
        return dict(self._do("DELETE", _path(claim_id)))

    def pool(self) -> dict[str, Any]:
        """The pool's numbers in blocks, and the owner's quota."""
        return dict(self._do("GET", "/pool"))


class ClaimsClient(Operations):
    """Claims on a server.  `acting_for` is for the operator: whose claims are meant."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        owner: str | None = None,
        operator_token: str | None = None,
        acting_for: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        import httpx

        headers = {
            "Authorization": None if api_key is None else f"Bearer {api_key}",
            "X-Kvclaims-Owner": owner,
            "X-Kvclaims-Operator": operator_token,
        }
        self._http = httpx.Client(
            base_url=url.rstrip("/") + PREFIX,
            headers={name: value for name, value in headers.items() if value is not None},
            params={} if acting_for is None else {"owner": acting_for},
            timeout=timeout,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; claims stay as they are."""
        self._http.close()

    def _do(self, method: str, path: str, body: Any = None) -> Any:
        response = self._http.request(method, path, json=body)
        try:
            answer = response.json()
        except ValueError:
            answer = {"error": response.text[:200]}
        if response.status_code >= 400:
            raise ClaimError(response.status_code, answer)
        return answer


class LocalClaims(Operations):
    """Claims in the engine of a `vllm.LLM`.  Whoever has the engine at hand is trusted with any
    owner's name; `operator` sees all."""

    def __init__(self, llm: Any, owner: str = ANONYMOUS, operator: bool = False) -> None:
        self._client = llm.llm_engine.engine_core
        self._owner, self._operator = owner, operator

    def _do(self, method: str, path: str, body: Any = None) -> Any:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        message = {"owner": self._owner, "operator": self._operator}
        match (method, parts):
            case ("GET", ["pool"]):
                message.update(op="pool")
            case ("GET", ["claims"]):
                message.update(op="list")
            case ("POST", ["claims"]):
                message.update(op="declare", claim=body)
            case ("GET", ["claims", name]):
                message.update(op="inspect", claim_id=name)
            case ("DELETE", ["claims", name]):
                message.update(op="release", claim_id=name)
            case (_, ["claims", name, op]):
                message.update(op=op, claim_id=name, renewal=body)
        status, answer = json.loads(self._call(json.dumps(message)))
        if status >= 400:
            raise ClaimError(status, answer)
        return answer

    def _call(self, message: str) -> str:
        core: Any = getattr(self._client, "engine_core", None)
        if hasattr(core, "kvclaims"):
            return str(core.kvclaims(message))  # the core lives in this process
        return str(self._client.call_utility("kvclaims", message))
