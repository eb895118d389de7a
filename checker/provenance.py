"""Where each block that a mechanism serves really comes from, found by changing what is there.

Its own word is not believed.  The bytes of one stored part are overwritten in their place by those
of another prompt, and the blocks that turn out different have read that part; the weights of the
model are changed, and the blocks that turn out different were computed.  What follows must be what
the mechanism says: `computed`, or the name of the one tier that was read (O1, O3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvclaims.spec.fidelity import Loaded, Mechanism, Part, Stored, Tier

COMPUTED: Final = "computed"
"""The word for a block that came from no tier."""

_WORDS: Final = frozenset({COMPUTED, *Tier})


@dataclass(frozen=True)
class Case:
    """What is needed to ask: an object in store, that of another prompt as long, how many blocks
    each has, and queries [count, layers, heads, width] for what only answers."""

    mechanism: Mechanism
    stored: Stored
    other: Stored
    blocks: int
    queries: Any

    def seen(self, loaded: Loaded) -> Seen:
        """Copied now: what is served may be the very bytes in store."""

        def copied(tensor: Any) -> Any:
            return None if tensor is None else tensor.clone()

        answers = None
        if loaded.output is not None:
            answers = torch.stack([loaded.output(query) for query in self.queries])
        return Seen(*map(copied, (loaded.keys, loaded.values, loaded.present, answers)))

    def moved(self, one: Seen, other: Seen) -> frozenset[int]:
        """The blocks that differ in any bit; all of them where only an answer to a query tells."""
        every = frozenset(range(self.blocks))
        if not same(one.answers, other.answers):
            return every
        if any(not alike(a, b) for a, b in zip(one.tensors, other.tensors, strict=True)):
            return every
        if one.keys is None:
            return frozenset()
        differ = [(a != b).any(-1).any(0).any(0) for a, b in zip(one.kv, other.kv, strict=True)]
        tokens = differ[0] | differ[1] | (one.present != other.present)
        return frozenset((tokens.nonzero().flatten() // self.mechanism.model.block).tolist())


@dataclass(frozen=True)
class Seen:
    """What a reader was served, to be compared: keys and values [layers, heads, tokens, width],
    which tokens are there, and answers [count, layers, heads, width]; None what there is not."""

    keys: Any
    values: Any
    present: Any
    answers: Any

    @property
    def kv(self) -> tuple[Any, Any]:
        return self.keys, self.values

    @property
    def tensors(self) -> tuple[Any, ...]:
        return *self.kv, self.present


def untrue(case: Case, before: Sequence[int]) -> list[str]:
    """What is wrong with what is said to a reader behind `before` of where blocks come from, in
    words; nothing where nothing is served."""
    served = case.mechanism.load(case.stored, before)
    if served.declined:
        return []
    if len(served.provenance) != case.blocks:
        return [f"it tells of {len(served.provenance)} blocks and serves {case.blocks}"]
    if odd := sorted(set(served.provenance) - _WORDS):
        return [f"{', '.join(odd)}: no tier, and not computed"]
    found = _Found(case, before, served)
    wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
    for block, word in enumerate(served.provenance):
        if truth := found.instead(block, word):
            wrong[word, truth].append(block)
    return [
        f"block {', '.join(map(str, blocks))} said to be {word}: {truth}"
        for (word, truth), blocks in wrong.items()
    ]


def idle(case: Case) -> list[str]:
    """The parts that could as well hold what another prompt has there: nothing that is served would
    be other."""
    whole = case.seen(case.mechanism.load(case.stored))
    found = []
    for name, part in case.stored.parts.items():
        other = case.other.parts.get(name)
        if other is not None and hold_the_same(part, other):
            continue
        with overwritten(name, part, case.other.parts):
            loaded = case.mechanism.load(case.stored)
            if not loaded.declined and not case.moved(whole, case.seen(loaded)):
                found.append(name)
    return found


class _Found:
    """Which blocks turn out different when something is changed."""

    def __init__(self, case: Case, before: Sequence[int], served: Loaded) -> None:
        whole = case.seen(served)

        def changed() -> frozenset[int] | None:
            loaded = case.mechanism.load(case.stored, before)
            return None if loaded.declined else case.moved(whole, case.seen(loaded))

        self._read: dict[Tier, set[int]] = defaultdict(set)
        self._asked: set[Tier] = set()
        """Tiers without which nothing is served: read, though it is not known for which block."""
        with _other_weights(case.mechanism.model):
            self._computed = changed()
        for name, part in case.stored.parts.items():
            with overwritten(name, part, case.other.parts):
                blocks = changed()
            if blocks is None:
                self._asked.add(part.tier)
            else:
                self._read[part.tier] |= blocks

    def instead(self, block: int, word: str) -> str:
        """What is true of a block that is said to be `word`, empty where that is."""
        read = {tier for tier, blocks in self._read.items() if block in blocks}
        is_computed = self._computed is None or block in self._computed
        if word == COMPUTED:
            if read:
                return f"it is read from {', '.join(sorted(read))}"
            return "" if is_computed else "it needs no model"
        if is_computed:
            return "it is computed"
        if read - {word}:
            return f"it is read from {', '.join(sorted(read))}"
        return "" if word in read | self._asked else "it does not matter what lies there"


def same(one: Any, other: Any) -> bool:
    """Whether two tensors hold the same bits in the same shape."""
    return alike(one, other) and (one is None or bool((one == other).all()))


def alike(one: Any, other: Any) -> bool:
    """Whether both are tensors of one shape and kind, or neither is there."""
    if one is None or other is None:
        return one is other
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def hold_the_same(one: Part, other: Part) -> bool:
    """Whether two parts hold the same, in memory or in files."""
    if one.tensor is not None and other.tensor is not None:
        return same(one.tensor, other.tensor)
    if one.path is not None and other.path is not None:
        return one.path.read_bytes() == other.path.read_bytes()
    return False


@contextmanager
def overwritten(name: str, part: Part, others: Mapping[str, Part]) -> Iterator[None]:
    """The bytes of another object's part where those of this one lie.  ValueError where it has no
    such part."""
    other = others.get(name)
    if part.path is not None and other is not None and other.path is not None:
        kept = part.path.read_bytes()
        part.path.write_bytes(other.path.read_bytes())
        try:
            yield
        finally:
            part.path.write_bytes(kept)
    elif part.tensor is not None and other is not None and alike(part.tensor, other.tensor):
        with _changed(part.tensor, other.tensor):
            yield
    else:
        raise ValueError(f"another prompt has no {name} of this kind")


@contextmanager
def _other_weights(model: Any) -> Iterator[None]:
    """The model with every tensor that it holds changed in place.  ValueError if it holds none."""
    weights = [value for value in vars(model).values() if isinstance(value, torch.Tensor)]
    if not weights:
        raise ValueError("the model holds no weights that can be changed")
    kept = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.neg_().add_(0.5)
        yield
    finally:
        for weight, old in zip(weights, kept, strict=True):
            weight.copy_(old)


@contextmanager
def _changed(tensor: Any, to: Any) -> Iterator[None]:
    kept = tensor.clone()
    tensor.copy_(to)
    try:
        yield
    finally:
        tensor.copy_(kept)
