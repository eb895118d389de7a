"""Operations out of bytes: how what hypothesis draws becomes something that matters.

One byte string is one operation, each byte of it one choice, 0 the plainest.  What is chosen fits
the state at hand (a claim in force, a request that loads), now and then on purpose not.  Pools
are small and contents few, so that prefixes are shared and diverge and room is short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from kvclaims.spec.interface import (
    FCFS,
    PRIORITY,
    Feature,
    Observation,
    PoolConfig,
    PredicateKind,
)
from kvclaims.spec.vocabulary import RESPONSIBLE, Protection

CODE: Final = 14
"""Bytes of one operation: one for each choice that the longest kind of operation takes."""

POOL_CODE: Final = 18
"""Bytes of one pool."""

CLAIMS: Final = ("a", "b", "c", "d")
STREAMS: Final = ("A", "B", "C")
PROTECTIONS: Final = (Protection.HARD, Protection.HARD, Protection.HARD, *Protection)

WEIGHTS: Final[dict[str, int]] = {
    "submit": 6,
    "step": 5,
    "declare": 4,
    "drain": 1,
    "release": 1,
    "demote": 1,
    "renew": 1,
    "advance": 2,
    "abort": 2,
    "lose": 2,
    "reset": 1,
}
"""Operations of the plain pool, each as often as it should be drawn."""

MORE: Final[dict[Feature, dict[str, int]]] = {
    Feature.DISPATCH: {"dispatch": 4, "complete": 5},
    Feature.EXTERNAL: {"load": 5},
    Feature.SLEEP: {"sleep": 1, "wake": 1},
    Feature.OFFLOAD: {"offload": 2, "restore": 2},
}
"""Operations that come with a feature."""


class Digits:
    """Choices out of one byte string, in order; plain ones when it is used up."""

    def __init__(self, code: bytes) -> None:
        self._code = iter(code)

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return next(self._code, 0) % n

    def one_in(self, n: int) -> bool:
        """True once in n times; False for the plain choice."""
        return self.below(n) == n - 1

    def among(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]


def draw_config(code: bytes, block_size: int, features: frozenset[Feature]) -> PoolConfig:
    """A pool: mostly tiny, now and then large enough for many requests at once."""
    digits = Digits(code)
    usable = 4 + digits.below(9)
    if digits.one_in(3):
        usable = 16 + digits.below(25)
    more: dict[str, Any] = {}
    if Feature.CHUNKING in features and digits.below(2):
        more["token_budget"] = digits.among((block_size, block_size + 1, 2 * block_size + 1, 64))
    if Feature.PRIORITY in features and digits.one_in(3):
        more["policy"] = digits.among((PRIORITY, PRIORITY, FCFS))
    if Feature.IN_FLIGHT in features and digits.one_in(3):
        more["in_flight"] = 2
    elif Feature.DRAFTS in features and digits.one_in(3):
        more["drafts"] = 1 + digits.below(3)
    if Feature.OFFLOAD in features and digits.below(2):
        more["host_blocks"] = 1 + digits.below(usable)
    if Feature.WINDOWS in features and digits.one_in(6):
        window = block_size * (1 + digits.below(3)) + digits.among((0, 0, 1, -1))
        more["windows"] = digits.among(
            ((window,), (0, window), (0, window, window), (window, 0), (0, window, 3 * block_size))
        )
    limit = digits.below(3)
    if Feature.EXTERNAL in features and "windows" not in more and digits.one_in(2):
        more["connector"] = 1 + digits.below(2)
    return PoolConfig(usable, block_size, limit, **more)


def _weights(features: frozenset[Feature], config: PoolConfig) -> dict[str, int]:
    """Operations that can do something in this pool: nothing loads without a connector."""
    weights = dict(WEIGHTS)
    for feature, kinds in MORE.items():
        if feature in features and not (feature is Feature.EXTERNAL and not config.connector):
            weights |= kinds
    return weights


class Drawer:
    """Turns byte strings into operations of one run, as often each as `weights` says."""

    def __init__(
        self,
        config: PoolConfig,
        features: frozenset[Feature],
        weights: Mapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._features = features
        self._requests = 0
        self._generations: dict[str, int] = {}
        self._spoken: list[list[list[Any]]] = []
        """Contents used so far: prefixes are shared, and claims are materialized."""
        self._claimed: dict[str, list[list[Any]]] = {}
        chosen = weights or _weights(features, config)
        self._kinds = [kind for kind, weight in chosen.items() for _ in range(weight)]

    def draw(self, code: bytes, seen: Observation) -> dict[str, Any]:
        """One operation as `spec.operations.parse` reads it."""
        digits = Digits(code)
        kind = digits.among(self._kinds)
        if kind == "load" and not self._loading(seen) and not digits.one_in(8):
            kind = "step"
        chosen = self._choices.get(kind)
        return {"op": kind, **(chosen(self, digits, seen) if chosen else {})}

    def _submit(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        size = self._config.block_size
        self._requests += 1
        chosen: dict[str, Any] = {
            "request": f"r{self._requests}",
            "content": self._content(digits, seen),
            "max_new_tokens": digits.among((1, 2, size + 1, 2 * size)),
        }
        if digits.one_in(5):
            chosen["admit_reuse"] = False
        if self._config.policy == PRIORITY:
            chosen["priority"] = digits.below(3)
        if self._config.connector and digits.below(3):
            chosen["external"] = 1 + digits.below(4)
        if self._config.drafts:
            chosen["accepts"] = digits.below(self._config.drafts + 1)
        return chosen | self._domain(digits)

    def _declare(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        claim = digits.among(CLAIMS)
        content = self._content(digits, seen)
        full = max(1, sum(segment[1] for segment in content))
        chosen: dict[str, Any] = {
            "claim": claim,
            "content": content,
            "protection": digits.among(PROTECTIONS).value,
            "n": 1 + digits.below(full) if digits.below(2) else full,
        }
        if digits.one_in(4):
            chosen |= {"kind": PredicateKind.RANGE.value, "start": digits.below(3)}
            chosen["n"] = max(1, min(chosen["n"], full - chosen["start"]))
        elif digits.below(2):
            chosen["min_blocks"] = 1 + digits.below(3)
        if digits.below(2):
            chosen["duration"] = 1 + digits.below(6)
        chosen["owner"] = digits.among(("owner", "other"))
        generation = self._generations.get(claim, 0) + (not digits.one_in(8))
        self._generations[claim] = chosen["generation"] = max(1, generation)
        self._claimed[claim] = content
        return chosen | self._domain(digits)

    def _content(self, digits: Digits, seen: Observation) -> list[list[Any]]:
        """The content of a claim, one used before, or a new one: whole, with a tail of another
        stream, or with tokens that fill no block; now and then too long for the pool."""
        source, first = digits.below(4), digits.below(256)
        claimed = [self._claimed[c] for c, v in seen.claims.items() if v.phase in RESPONSIBLE]
        if source == 3 and claimed:
            return claimed[first % len(claimed)]
        if source and self._spoken:
            return self._spoken[first % len(self._spoken)]
        usable, shape = self._config.usable, digits.below(3)
        blocks = 1 + (first // 2) % max(1, min(usable, 10) * 2 // 3)
        if first % 6 == 5:
            blocks = usable + 1 - digits.below(3)
        content: list[list[Any]] = [[STREAMS[first % 2], blocks]]
        if shape == 1:
            content = [[STREAMS[first % 2], min(blocks, max(1, usable // 2))]]
            content.append([STREAMS[1 + first % 2], 1 + (first // 8) % max(1, usable // 3)])
        elif shape == 2:
            content[0].append((1, self._config.block_size - 1)[first % 2])
        self._spoken.append(content)
        return content

    def _domain(self, digits: Digits) -> dict[str, Any]:
        """Parts of the cache key, rarely other than none."""
        part = digits.below(16)
        if part == 15:
            return {"salt": "other"}
        if part == 14 and Feature.ADAPTER in self._features:
            return {"adapter": "lora"}
        if part == 13 and Feature.MODALITY in self._features:
            return {"modality": ("image 1", "image 2")[digits.below(2)]}
        return {}

    def _claim(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        """A claim in force, now and then any."""
        in_force = [name for name, claim in seen.claims.items() if claim.phase in RESPONSIBLE]
        any_one = digits.one_in(8) or not in_force
        return {"claim": digits.among(CLAIMS if any_one else in_force)}

    def _renewal(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        return {**self._claim(digits, seen), "duration": 1 + digits.below(6)}

    def _restoration(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        return {**self._claim(digits, seen), "succeeds": not digits.one_in(3)}

    def _request(self, digits: Digits, seen: Observation, *states: str) -> dict[str, Any]:
        """A request in one of these states (or not at its end), now and then any."""
        any_one = digits.one_in(8)
        fit = [
            name
            for name, request in seen.requests.items()
            if (request.state in states if states else request.state != "finished")
        ]
        if fit and not any_one:
            return {"request": digits.among(fit)}
        return {"request": f"r{1 + digits.below(1 + self._requests)}"}

    def _loading(self, seen: Observation) -> bool:
        return any(view.state in ("loading", "ending") for view in seen.requests.values())

    def _load(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        """The end of a transfer: whole, or some blocks short; now and then more than there are."""
        chosen = self._request(digits, seen, "loading", "ending")
        view = seen.requests.get(chosen["request"])
        most = max(1, len(view.blocks) - view.hit_blocks) if view else 1
        return {**chosen, "blocks": digits.among((most, 1, most - 1, 0, most, 2))}

    def _loss(self, digits: Digits, seen: Observation) -> dict[str, Any]:
        content = self._content(digits, seen)
        blocks = max(1, sum(segment[1] for segment in content))
        return {"content": content, "position": digits.below(blocks), **self._domain(digits)}

    def _times(self, digits: Digits, _seen: Observation) -> dict[str, Any]:
        return {"times": digits.among((1, 1, 1, 2, 3, 6))}

    def _ticks(self, digits: Digits, _seen: Observation) -> dict[str, Any]:
        return {"ticks": 1 + digits.below(4)}

    _choices: ClassVar[dict[str, Callable[[Any, Digits, Observation], dict[str, Any]]]] = {
        "submit": _submit,
        "declare": _declare,
        "release": _claim,
        "demote": _claim,
        "offload": _claim,
        "restore": _restoration,
        "renew": _renewal,
        "abort": _request,
        "load": _load,
        "lose": _loss,
        "step": _times,
        "advance": _ticks,
    }
