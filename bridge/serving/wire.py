"""A claim as it arrives: JSON, judged field by field before anything sees it.

    {"claim_id": "system-prompt", "protection": "hard_protected", "duration": 3600,
     "predicate": {"kind": "leading_prefix_at_least", "n": 12}, "min_blocks": 4,
     "generation": 1, "owner": "team-a", "tokens": [1, 2, 3], "salt": "", "adapter": ""}

Only `claim_id` is needed (and `tokens`, where the claim does not come with a request).  Without a
predicate it speaks of all full blocks of its content.  A predicate may name the `fidelity` it asks
for: an engine that keeps exact KV refuses `state` and `position_independent`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.serving.settings import NAME
from kvclaims.spec.fidelity import Fidelity, may_be_cut
from kvclaims.spec.interface import ClaimSpec, Predicate, PredicateKind
from kvclaims.spec.vocabulary import Protection

TICKS: Final = 1000
"""Time units of claims in a second: a served claim's clock counts milliseconds."""

LONGEST: Final = 10 * 365 * 24 * 3600
"""The longest duration, in seconds: more is a claim without an end."""

_MOST: Final = 1 << 31
_MOST_TEXT: Final = 1024


class BadClaim(ValueError):
    """A claim or an operation that is refused unread; `status` is the HTTP answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Order:
    """What a client asks for.  `predicate` None means all full blocks; `duration` is in seconds;
    `owner` None means whoever asks."""

    claim_id: str
    protection: Protection = Protection.HARD
    predicate: Predicate | None = None
    duration: float | None = None
    min_blocks: int | None = None
    generation: int = 1
    owner: str | None = None
    tokens: tuple[int, ...] | None = None
    salt: str = ""
    adapter: str = ""

    def speaks_of(self, whole: int, block_size: int) -> Predicate:
        """Its predicate, on content of so many full blocks.  Raises `BadClaim` for one past it."""
        if whole == 0:
            raise BadClaim(f"the content has no full block of {block_size} tokens")
        predicate = self.predicate or Predicate(PredicateKind.LEADING, whole)
        if predicate.start + predicate.n > whole:
            raise BadClaim(f"the predicate speaks of blocks past the {whole} of the content")
        return predicate

    def spec(self, internal: str, owner: str, block_size: int) -> ClaimSpec:
        """The claim for the runtime, under the name it has there."""
        tokens = self.tokens or ()
        predicate = self.speaks_of(len(tokens) // block_size, block_size)
        end = predicate.start + predicate.n
        if may_be_cut(predicate.fidelity):
            tokens = tokens[: end * block_size]  # nothing depends on what comes behind
        return ClaimSpec(
            claim_id=internal,
            tokens=tokens,
            predicate=predicate,
            protection=self.protection,
            generation=self.generation,
            owner=owner,
            duration=ticks(self.duration),
            min_blocks=self.min_blocks,
            salt=self.salt,
            adapter=self.adapter,
        )


def ticks(seconds: float | None) -> int | None:
    """A duration in the clock's units, rounded up: protection never ends early."""
    return None if seconds is None else max(1, math.ceil(seconds * TICKS))


def read_json(text: str | bytes) -> Any:
    """JSON without the extensions that Python reads by default (NaN, Infinity)."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadClaim("the claim is not JSON") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_order(raw: Any, *, prefix: bool) -> Order:
    """A claim by prefix brings its tokens; one with a request must not.  Raises `BadClaim`."""
    if not isinstance(raw, Mapping):
        raise BadClaim("a claim is a JSON object")
    readers = dict(_FIELDS)
    if prefix:
        readers.update(tokens=_tokens, salt=_text, adapter=_text)
    unknown = sorted(str(name) for name in raw if name not in readers)
    if unknown:
        raise BadClaim(f"unknown fields: {', '.join(unknown)[:200]}")
    if "claim_id" not in raw or (prefix and "tokens" not in raw):
        raise BadClaim("a claim needs claim_id" + (" and tokens" if prefix else ""))
    given = {name: readers[name](name, value) for name, value in raw.items() if value is not None}
    if "claim_id" not in given:
        raise BadClaim("claim_id is a name")
    return Order(**given)


def read_duration(raw: Any) -> float:
    """The `duration` of a renewal.  Raises `BadClaim`."""
    if not isinstance(raw, Mapping) or set(raw) != {"duration"}:
        raise BadClaim('a renewal is {"duration": seconds}')
    return _duration("duration", raw["duration"])


def read_name(name: str, value: Any) -> str:
    """The name of a claim or an owner.  Raises `BadClaim`."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise BadClaim(f"{name} is 1 to 128 letters, digits and any of . _ : @ -")
    return value


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < _MOST:
        raise BadClaim(f"{name} is a whole number from 1")
    return value


def _duration(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= LONGEST:  # NaN fails every comparison
        raise BadClaim(f"{name} is a number of seconds, above 0 and at most {LONGEST}")
    return float(value)


def _protection(name: str, value: Any) -> Protection:
    try:
        return Protection(value)
    except ValueError:
        raise BadClaim(f"{name} is one of {', '.join(Protection)}") from None


def _predicate(name: str, value: Any) -> Predicate:
    known = {"kind", "n", "start", "fidelity", "bound"}
    if not isinstance(value, Mapping) or not {"n"} <= set(value) <= known:
        raise BadClaim(f'{name} is {{"kind", "n", "start", "fidelity", "bound"}}')
    start = value.get("start", 0)
    if type(start) is not int or not 0 <= start < _MOST:
        raise BadClaim("start is a whole number from 0")
    usual = PredicateKind.RANGE if start else PredicateKind.LEADING
    try:
        kind = PredicateKind(value.get("kind", usual))
    except ValueError:
        raise BadClaim(f"kind is one of {', '.join(PredicateKind)}") from None
    if kind is PredicateKind.LEADING and start:
        raise BadClaim("a leading prefix starts at 0")
    try:
        fidelity = Fidelity(value.get("fidelity", Fidelity.EXACT))
    except ValueError:
        raise BadClaim(f"fidelity is one of {', '.join(Fidelity)}") from None
    bound = value.get("bound")
    if bound is not None and (
        fidelity is not Fidelity.BOUNDED_LOSS
        or type(bound) not in (int, float)
        or not 0 < bound <= sys.float_info.max  # a whole number may be past it
    ):
        raise BadClaim("bound is a positive number, and goes with bounded_loss")
    return Predicate(
        kind, _whole("n", value["n"]), start, fidelity, None if bound is None else float(bound)
    )


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(t) is int and 0 <= t < _MOST for t in value):
        raise BadClaim(f"{name} is a list of token ids")
    return tuple(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT or not _can_be_written(value):
        raise BadClaim(f"{name} is a text of at most {_MOST_TEXT} characters")
    return value


def _can_be_written(text: str) -> bool:
    """JSON can name halves of characters, which no encoding has."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_FIELDS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "claim_id": read_name,
    "owner": read_name,
    "protection": _protection,
    "predicate": _predicate,
    "duration": _duration,
    "min_blocks": _whole,
    "generation": _whole,
}
