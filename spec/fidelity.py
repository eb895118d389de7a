"""What "survives" means: fidelity classes, and what a mechanism that changes KV declares of itself.

A claim asks for a class; a mechanism gives one.  `satisfies` says which gives meet which asks
(contract, *Terms*: predicate).  What a mechanism really gives is measured
(`kvclaims.checker.measure`), never read from its declaration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable


class Fidelity(StrEnum):
    """What a reader of surviving KV may rely on."""

    EXACT = "exact"
    """The bits that the model computed, where it computed them."""
    RESTORABLE = "restorable"
    """Exact, from another tier, with a commitment to restore."""
    POSITION_INDEPENDENT = "position_independent"
    """Reusable at another position after rotation; computed in the context that it declares."""
    BOUNDED_LOSS = "bounded_loss"
    """Every element within a bound that was fixed when it was stored."""
    LOSSY = "lossy"
    """Something of it survives; no bound is given."""
    STATE = "state"
    """The whole object or nothing: no part of it can be served alone."""


GIVES: Final[Mapping[Fidelity, frozenset[Fidelity]]] = {
    Fidelity.EXACT: frozenset(
        {Fidelity.EXACT, Fidelity.RESTORABLE, Fidelity.BOUNDED_LOSS, Fidelity.LOSSY}
    ),
    Fidelity.RESTORABLE: frozenset({Fidelity.RESTORABLE, Fidelity.BOUNDED_LOSS, Fidelity.LOSSY}),
    Fidelity.POSITION_INDEPENDENT: frozenset({Fidelity.POSITION_INDEPENDENT, Fidelity.LOSSY}),
    Fidelity.BOUNDED_LOSS: frozenset({Fidelity.BOUNDED_LOSS, Fidelity.LOSSY}),
    Fidelity.LOSSY: frozenset({Fidelity.LOSSY}),
    Fidelity.STATE: frozenset({Fidelity.STATE}),
}
"""The asks that each class meets.  `state` meets only itself: a prefix of it is nothing."""


def satisfies(given: Fidelity, asked: Fidelity) -> bool:
    """Whether a claim that asks for `asked` may be accepted where `given` is what survives."""
    return asked in GIVES[given]


def may_be_cut(asked: Fidelity) -> bool:
    """Whether a claim on this class may speak of a part of its content: a `state` is the whole
    object or nothing."""
    return asked is not Fidelity.STATE


@dataclass(frozen=True)
class Declaration:
    """What a mechanism says of itself.

    `identity` names what belongs to the cache identity beside tokens and model; `obligation` is
    what the runtime owes with it; `source` is the paper it was written from.
    """

    name: str
    title: str
    source: str
    fidelity: Fidelity
    identity: tuple[str, ...]
    obligation: str
    leans: bool = False
    """Some parts carry several blocks: each of those breaks when such a part goes."""


class Tier(StrEnum):
    """Where KV lies."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


@dataclass(frozen=True)
class Part:
    """A piece of stored state that can be lost by itself: a tensor, or a file that holds one."""

    tier: Tier
    tensor: Any = None
    path: Path | None = None


@dataclass(frozen=True)
class Stored:
    """One object as a mechanism keeps it.

    `tokens` is the content; `identity` what else a reader must match, by name; `bound` the
    largest error that was promised for each element of (keys, values), None where none was;
    `context` the tokens that the object was computed behind.
    """

    tokens: tuple[int, ...]
    parts: Mapping[str, Part]
    identity: Mapping[str, Any] = field(default_factory=dict)
    bound: tuple[Any, Any] | None = None
    context: tuple[int, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """What a reader is served.

    `keys` and `values` are [layers, heads, tokens, width] at the positions where the reader is;
    `present` is a Boolean for each token (False: dropped for good); `provenance` says for each
    block where it came from; `output` maps queries [layers, heads, width] to attention outputs
    of the same shape where the mechanism has no KV for every token but a state that stands for
    it; `declined` is the reason where nothing is served.
    """

    keys: Any = None
    values: Any = None
    present: Any = None
    provenance: tuple[str, ...] = ()
    output: Any = None
    declined: str = ""


class Model(Protocol):
    """The small model that makes the KV: the truth that a mechanism is measured against."""

    block: int
    """Tokens in a block."""

    def moved(self, keys: Any, start: int, to: int) -> Any:
        """Keys [layers, heads, tokens, width] of tokens that stood at `start`, as if they stood at
        `to`: what a turn of rotary positions makes of them."""

    def kv(self, tokens: Sequence[int], before: Sequence[int] = ()) -> tuple[Any, Any]:
        """Keys and values of `tokens` when the model reads them after `before`."""

    def queries(self, count: int, seed: int) -> Any:
        """Query vectors [count, layers, heads, width]."""

    def attend(self, query: Any, keys: Any, values: Any) -> Any:
        """Attention outputs [layers, heads, width] of one query over [layers, heads, tokens, …]."""

    def output(self, query: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> Any:
        """What the model itself answers a query on `tokens`, all of its state included."""


class Mechanism(Protocol):
    """The object behind an entry point of the group `kvclaims.mechanisms`."""

    @property
    def declaration(self) -> Declaration:
        """What it says of itself."""

    @property
    def model(self) -> Model:
        """The model whose KV it stores."""

    def store(self, tokens: Sequence[int], query: Any, folder: Path) -> Stored:
        """Keep the KV of `tokens`; `query` is what the request at hand asks with."""

    def load(self, stored: Stored, before: Sequence[int] = (), blocks: int | None = None) -> Loaded:
        """Serve the object to a reader that stands after `before`; only its first `blocks`
        blocks where that is asked for."""


@runtime_checkable
class Holding(Protocol):
    """A mechanism whose memory something else would like to have."""

    def reuse(self, stored: Stored, part: str) -> bool:
        """Try to give the memory of `part` away while the object is in force: False, changing
        nothing, where the mechanism holds it."""
