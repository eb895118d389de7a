"""Operations on a runtime as plain data: what litmus programs, fuzz runs and replays are made of.

An operation is a table `{op = "submit", request = "r1", content = [["A", 70]]}`; `parse` reads
one and rejects anything unknown, `perform` does it on a runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.spec.content import cache_domain, content_from_json, content_to_json, tokens_of
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import (
    BadOperation,
    ClaimSpec,
    Feature,
    NotExposed,
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
        """As `parse` reads it."""
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


def _number(value: object) -> int:
    if type(value) is not int:
        raise ValueError("must be a whole number")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _kind(value: object) -> PredicateKind:
    return PredicateKind(str(value))


def _fidelity(value: object) -> Fidelity:
    return Fidelity(str(value))


def _bound(value: object) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError("must be a positive number")
    return float(value)  # type: ignore[arg-type]


Reader = Callable[[object], Any]

_CONTENT: Final[dict[str, Reader]] = {"content": content_from_json}
_DOMAIN: Final[dict[str, Reader]] = {"salt": _salt, "adapter": _salt, "modality": _salt}
"""The parts of a cache key beside the tokens."""

SCHEMA: Final[dict[str, tuple[dict[str, Reader], dict[str, Reader]]]] = {
    "declare": (
        {"claim": _text, **_CONTENT, "n": _positive},
        {
            "kind": _kind,
            "start": _count,
            "fidelity": _fidelity,
            "bound": _bound,
            "protection": _protection,
            "generation": _positive,
            "owner": _text,
            "duration": _positive,
            "min_blocks": _positive,
            **_DOMAIN,
        },
    ),
    "release": ({"claim": _text}, {}),
    "demote": ({"claim": _text}, {}),
    "renew": ({"claim": _text, "duration": _positive}, {}),
    "submit": (
        {"request": _text, **_CONTENT},
        {
            "max_new_tokens": _positive,
            "admit_reuse": _flag,
            "priority": _number,
            "external": _count,
            "accepts": _count,
            **_DOMAIN,
        },
    ),
    "abort": ({"request": _text}, {}),
    "step": ({}, {"times": _positive}),
    "drain": ({}, {}),
    "advance": ({"ticks": _positive}, {}),
    "reset": ({}, {}),
    "lose": ({**_CONTENT, "position": _count}, _DOMAIN),
    "mark": (_CONTENT, _DOMAIN),
    "dispatch": ({}, {}),
    "complete": ({}, {}),
    "load": ({"request": _text, "blocks": _count}, {}),
    "offload": ({"claim": _text}, {}),
    "restore": ({"claim": _text}, {"succeeds": _flag}),
    "sleep": ({}, {}),
    "wake": ({}, {}),
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
            return runtime.submit(request_spec(fields, block_size))
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
            return runtime.lose(tokens, fields["position"], domain_of(fields))
        case _:
            return _perform_feature(runtime, operation)


def _perform_feature(runtime: Runtime, operation: Operation) -> Any:
    """Operations that an engine may lack (`spec.interface.Feature`)."""
    fields = operation.fields
    if operation.op not in _FEATURES:
        raise BadOperation(f"{operation.op} is not for a runtime alone")
    method = getattr(runtime, operation.op, None)
    if method is None:
        raise NotExposed(f"the engine has no {operation.op}")
    match operation.op:
        case "load":
            return method(fields["request"], fields["blocks"])
        case "offload":
            return method(fields["claim"])
        case "restore":
            return method(fields["claim"], fields.get("succeeds", True))
    return method()


_FEATURES: Final = {
    "dispatch": Feature.DISPATCH,
    "complete": Feature.DISPATCH,
    "load": Feature.EXTERNAL,
    "offload": Feature.OFFLOAD,
    "restore": Feature.OFFLOAD,
    "sleep": Feature.SLEEP,
    "wake": Feature.SLEEP,
}
"""Operations that need a feature of the engine."""

_FIELD_FEATURES: Final = {
    "external": Feature.EXTERNAL,
    "adapter": Feature.ADAPTER,
    "modality": Feature.MODALITY,
    "priority": Feature.PRIORITY,
    "accepts": Feature.DRAFTS,
}
"""Fields that mean something only where the engine has a feature."""


def needs(operation: Operation) -> frozenset[Feature]:
    """The features without which an engine cannot do the operation as it stands."""
    found = {_FIELD_FEATURES[name] for name in operation.fields if name in _FIELD_FEATURES}
    if operation.op in _FEATURES:
        found.add(_FEATURES[operation.op])
    return frozenset(found)


def domain_of(fields: Mapping[str, Any]) -> str:
    """The cache domain that an operation speaks of."""
    return cache_domain(
        fields.get("salt", ""), fields.get("adapter", ""), fields.get("modality", "")
    )


def request_spec(fields: Mapping[str, Any], block_size: int) -> RequestSpec:
    """The request that a `submit` operation brings."""
    rest = {key: fields[key] for key in fields if key not in ("request", "content")}
    return RequestSpec(fields["request"], tokens_of(fields["content"], block_size), **rest)


def claim_spec(fields: Mapping[str, Any], block_size: int) -> ClaimSpec:
    """The claim that a `declare` operation speaks of."""
    kind = fields.get("kind", PredicateKind.LEADING)
    rest = {
        key: fields[key]
        for key in (
            *("protection", "generation", "owner", "duration", "min_blocks"),
            *("salt", "adapter", "modality"),
        )
        if key in fields
    }
    fidelity = fields.get("fidelity", Fidelity.EXACT)
    predicate = Predicate(kind, fields["n"], fields.get("start", 0), fidelity, fields.get("bound"))
    return ClaimSpec(fields["claim"], tokens_of(fields["content"], block_size), predicate, **rest)


def drain(runtime: Runtime) -> int:
    """Step until no request waits or runs; the number of steps.  Raises `NoProgress`."""
    for steps in range(DRAIN_LIMIT):
        if all(r.state == "finished" for r in runtime.observe().requests.values()):
            return steps
        runtime.step()
    raise NoProgress(f"requests still wait or run after {DRAIN_LIMIT} steps")
