"""Operations on a runtime as plain data: what litmus programs, fuzz runs and replays are made of.

An operation is a table `{op = "submit", request = "r1", content = [["A", 70]]}`; `parse` reads
one and rejects anything unknown, `perform` does it on a runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.spec.content import Content, content_from_json, content_to_json, tokens_of
from kvclaims.spec.interface import (
    BadOperation,
    ClaimSpec,
    Predicate,
    PredicateKind,
    RequestSpec,
    Runtime,
)
from kvclaims.spec.vocabulary import Protection

DRAIN_LIMIT: Final = 10_000
"""Steps after which a drain gives up: some request makes no progress (B11)."""


class NoProgress(Exception):
    """A drain ran into `DRAIN_LIMIT`: a request neither ended nor could be told why (B11)."""


@dataclass(frozen=True)
class Operation:
    """One operation: its name and its fields, as read from JSON or TOML."""

    op: str
    fields: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        plain = dict(self.fields)
        if "content" in plain:
            plain["content"] = content_to_json(plain["content"])
        return {"op": self.op, **plain}

    def __str__(self) -> str:
        shown = " ".join(f"{k}={_show(v)}" for k, v in self.fields.items())
        return f"{self.op} {shown}".rstrip()


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(
            f"{s.label}×{s.blocks}" + (f"+{s.tokens}t" if s.tokens else "") for s in value
        )
    return str(value)


def _protection(value: object) -> Protection:
    return Protection(str(value))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def _salt(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("must be a whole number of at least 0")
    return value


def _positive(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("must be a whole number of at least 1")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _kind(value: object) -> PredicateKind:
    return PredicateKind(str(value))


Reader = Callable[[object], Any]

_CONTENT: Final[dict[str, Reader]] = {"content": content_from_json}

SCHEMA: Final[dict[str, tuple[dict[str, Reader], dict[str, Reader]]]] = {
    "declare": (
        {"claim": _text, **_CONTENT, "n": _positive},
        {
            "kind": _kind,
            "start": _count,
            "protection": _protection,
            "generation": _positive,
            "owner": _text,
            "duration": _positive,
            "min_blocks": _positive,
            "salt": _salt,
        },
    ),
    "release": ({"claim": _text}, {}),
    "demote": ({"claim": _text}, {}),
    "renew": ({"claim": _text, "duration": _positive}, {}),
    "submit": (
        {"request": _text, **_CONTENT},
        {"max_new_tokens": _positive, "admit_reuse": _flag, "salt": _salt},
    ),
    "abort": ({"request": _text}, {}),
    "step": ({}, {"times": _positive}),
    "drain": ({}, {}),
    "advance": ({"ticks": _positive}, {}),
    "reset": ({}, {}),
    "lose": ({**_CONTENT, "position": _count}, {"salt": _salt}),
    "mark": (_CONTENT, {"salt": _salt}),
}
"""Operation → required and optional fields, each with the reader that checks it.

`mark` remembers blocks for a later comparison of KV bytes; the litmus runner performs it."""


def parse(raw: object) -> Operation:
    """Read one operation; raises `BadOperation` that says what is wrong."""
    if not isinstance(raw, dict) or not isinstance(raw.get("op"), str):
        raise BadOperation(f"an operation is a table with an 'op': {raw!r}")
    name = raw["op"]
    if name not in SCHEMA:
        raise BadOperation(f"unknown operation {name!r} (known: {', '.join(SCHEMA)})")
    required, optional = SCHEMA[name]
    readers = {**required, **optional}
    given = {key: value for key, value in raw.items() if key != "op"}
    for key in given:
        if key not in readers:
            raise BadOperation(f"{name}: unknown field {key!r}")
    for key in required:
        if key not in given:
            raise BadOperation(f"{name}: lacks {key!r}")
    fields = {}
    for key, value in given.items():
        try:
            fields[key] = readers[key](value)
        except ValueError as error:
            raise BadOperation(f"{name}: {key} {error}") from None
    return Operation(name, fields)


def perform(runtime: Runtime, operation: Operation) -> Any:
    """Do one operation on a runtime and return its answer; raises what the runtime raises."""
    fields = dict(operation.fields)
    block_size = runtime.config.block_size
    match operation.op:
        case "declare":
            return runtime.declare(claim_spec(fields, block_size))
        case "release":
            return runtime.release(fields["claim"])
        case "demote":
            return runtime.demote(fields["claim"])
        case "renew":
            return runtime.renew(fields["claim"], fields["duration"])
        case "submit":
            content: Content = fields.pop("content")
            name = fields.pop("request")
            return runtime.submit(RequestSpec(name, tokens_of(content, block_size), **fields))
        case "abort":
            return runtime.abort(fields["request"])
        case "step":
            for _ in range(fields.get("times", 1)):
                runtime.step()
            return None
        case "drain":
            return drain(runtime)
        case "advance":
            return runtime.advance(fields["ticks"])
        case "reset":
            return runtime.reset()
        case "lose":
            tokens = tokens_of(fields["content"], block_size)
            return runtime.lose(tokens, fields["position"], fields.get("salt", ""))
    raise BadOperation(f"{operation.op} is not for a runtime alone")


def claim_spec(fields: Mapping[str, Any], block_size: int) -> ClaimSpec:
    """The claim that a `declare` operation speaks of."""
    kind = fields.get("kind", PredicateKind.LEADING)
    rest = {
        key: fields[key]
        for key in ("protection", "generation", "owner", "duration", "min_blocks", "salt")
        if key in fields
    }
    predicate = Predicate(kind, fields["n"], fields.get("start", 0))
    return ClaimSpec(fields["claim"], tokens_of(fields["content"], block_size), predicate, **rest)


def drain(runtime: Runtime) -> int:
    """Step until no request waits or runs; the number of steps.  Raises `NoProgress`."""
    for steps in range(DRAIN_LIMIT):
        if all(r.state == "finished" for r in runtime.observe().requests.values()):
            return steps
        runtime.step()
    raise NoProgress(f"requests still wait or run after {DRAIN_LIMIT} steps")
