"""What a mechanism really gives: its fidelity class by measurement, never by declaration.

A mechanism stores the KV of a prompt that a small model computed, and serves it again: in the same
place, elsewhere, with parts lost, spoilt or asked to be given away.  Each question yields one piece
of evidence; the declared class stands only on the pieces it needs (`NEEDED`), so that a verdict
falls when its evidence is taken away.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch

from kvclaims.checker import provenance, truth
from kvclaims.checker.truth import NEAR
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.fidelity import (
    Declaration,
    Fidelity,
    Holding,
    Loaded,
    Mechanism,
    Part,
    Stored,
    Tier,
    satisfies,
)
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.lowering import Lowering
from kvclaims.spec.vocabulary import Verdict

GROUP: Final = "kvclaims.mechanisms"
TOKENS: Final = tuple((11 * i * i + 5 * i + 2) % 64 for i in range(96))
"""The prompt: six blocks of sixteen, no two alike."""
OTHER: Final = TOKENS[::-1]
"""Another prompt, as long, whose KV is nowhere the same."""
ELSEWHERE: Final = tuple((5 * i + 1) % 64 for i in range(32))
"""What stands before the prompt when it is served at another place."""
QUERIES: Final = 8


@runtime_checkable
class Turning(Protocol):
    """A mechanism of which it is said that what its parts stand for can be turned before or after
    it is put together."""

    def turned(self, stored: Stored, by: int) -> Stored:
        """The object as if each token stood `by` places further: only parts that carry several
        blocks (a codebook) may be others, of the same shape."""


@dataclass(frozen=True)
class Evidence:
    """One measured fact: `shows` says whether it speaks for the mechanism."""

    name: str
    shows: bool
    says: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shows": self.shows, "says": self.says, **self.figures}


ALWAYS: Final = ("model", "identity", "loss", "cut", "source", "spoilt", "lengths", "again")
"""The evidence that every class stands on."""

EXACTLY: Final = ("bits", "same output")
"""The evidence that what is served is no approximation."""

NEEDED: Final[Mapping[Fidelity, tuple[str, ...]]] = {
    Fidelity.EXACT: (*ALWAYS, "bits", "prefix", "held", "device"),
    Fidelity.RESTORABLE: (*ALWAYS, "bits", "prefix", "held", "tier"),
    Fidelity.POSITION_INDEPENDENT: (*ALWAYS, "rotation", "context"),
    Fidelity.BOUNDED_LOSS: (*ALWAYS, "bound", "prefix", "attention"),
    Fidelity.LOSSY: (*ALWAYS, "attention", "place"),
    Fidelity.STATE: (*ALWAYS, "whole", "prefix", "attention"),
}
"""The evidence that each class stands on."""

STRONGEST_FIRST: Final = (
    Fidelity.STATE,
    Fidelity.RESTORABLE,
    Fidelity.EXACT,
    Fidelity.POSITION_INDEPENDENT,
    Fidelity.BOUNDED_LOSS,
    Fidelity.LOSSY,
)
"""In which order classes are tried: exact state that is kept in another tier is restorable."""


@dataclass(frozen=True)
class Served:
    """What a reader gets of the prompt, whatever it asked for: of its tokens, how many are exact
    and how many of those lead (None where no KV of any token is served, only outputs), and the
    largest error of an attention output, relative to the output."""

    declined: str = ""
    exact_tokens: int | None = None
    leading_tokens: int | None = None
    output_error: float | None = None

    def __str__(self) -> str:
        if self.declined:
            return f"nothing ({self.declined})"
        if self.leading_tokens is None:
            return f"outputs off by {self.output_error:.2g}, and no KV of any token"
        text = f"{self.leading_tokens} leading exact tokens of {len(TOKENS)}"
        if self.leading_tokens < len(TOKENS):
            text += f", the first wrong one at {self.leading_tokens}"
        return f"{text}, outputs off by {self.output_error:.2g}"


@dataclass(frozen=True)
class Ask:
    """A claim that asks for a class, and what its reader would have been served regardless."""

    asked: Fidelity
    granted: bool
    served: Served

    def to_json(self) -> dict[str, Any]:
        return {"asked": self.asked, "granted": self.granted, "would_be_served": str(self.served)}


@dataclass(frozen=True)
class MechanismReport:
    """What one mechanism declares, what was measured, and what follows."""

    declaration: Declaration
    evidence: tuple[Evidence, ...]
    served: Served
    turns: bool = False
    """It is `Turning`."""

    @property
    def undeclared(self) -> bool:
        """It depends on what its declaration does not name: a query that another reader does not
        have, or parts that carry blocks beyond their own."""
        against = {item.name for item in self.evidence if not item.shows}
        own = self.declaration
        query = "query" in against and "query" not in own.identity
        return query or ("leans" in against and not own.leans)

    @property
    def measured(self) -> Fidelity | None:
        """The strongest class whose evidence is all there and speaks for it; None if none, or
        where it depends on what it does not declare."""
        if self.undeclared:
            return None
        shown = {item.name for item in self.evidence if item.shows}
        for fidelity in STRONGEST_FIRST:
            if shown.issuperset(NEEDED[fidelity]):
                return fidelity
        return None

    @property
    def largest_bound(self) -> float | None:
        """The largest error that was promised for an element, where that holds."""
        found = (item for item in self.evidence if item.name == "bound" and item.shows)
        return next((item.figures["largest_bound"] for item in found), None)

    @property
    def rests_on(self) -> tuple[str, ...]:
        """The evidence without which nothing is said of the declaration."""
        return (*self._needed, "query", *(("leans",) if self.declaration.leans else ()))

    @property
    def _needed(self) -> tuple[str, ...]:
        """The evidence that must speak for it."""
        return (*NEEDED[self.declaration.fidelity], *(("commutes",) if self.turns else ()))

    @property
    def lowering(self) -> Lowering:
        """The verdict on the declared class: rejected where evidence speaks against it, unknown
        where some is missing, approximate where what is served differs from what was computed."""
        found = {item.name: item.shows for item in self.evidence}
        if self.undeclared or any(found.get(name) is False for name in self._needed):
            return Lowering.REJECTED
        if any(name not in found for name in self.rests_on):
            return Lowering.UNKNOWN
        kv_is_exact = found.get("bits") or self.served.leading_tokens is None
        exact = kv_is_exact and found.get("same output")
        return Lowering.NATIVE if exact else Lowering.APPROXIMATE

    @property
    def asks(self) -> tuple[Ask, ...]:
        measured = self.measured if self.verdict is Verdict.HOLDS else None
        return tuple(
            Ask(asked, measured is not None and satisfies(measured, asked), self.served)
            for asked in Fidelity
        )

    @property
    def verdict(self) -> Verdict:
        match self.lowering:
            case Lowering.REJECTED:
                return Verdict.VIOLATED
            case Lowering.UNKNOWN:
                return Verdict.UNKNOWN
        return Verdict.HOLDS

    def to_json(self) -> dict[str, Any]:
        return {
            "mechanism": self.declaration.name,
            "title": self.declaration.title,
            "source": self.declaration.source,
            "declared": self.declaration.fidelity,
            "measured": self.measured,
            "lowering": self.lowering,
            "identity": list(self.declaration.identity),
            "obligation": self.declaration.obligation,
            "evidence": [item.to_json() for item in self.evidence],
            "asks": [ask.to_json() for ask in self.asks],
        }

    def lines(self) -> Iterator[str]:
        own = self.declaration
        yield f"{own.name}: {own.title} ({own.source})"
        yield (
            f"  {self.verdict}: declared {own.fidelity}, measured "
            f"{self.measured or 'nothing'}: {self.lowering}"
        )
        for item in self.evidence:
            mark = "needed" if item.name in self.rests_on else ""
            if not item.shows and item.name in ("query", "leans") and not self.undeclared:
                mark = "declared"
            elif not mark and item.name in EXACTLY and self.lowering is Lowering.NATIVE:
                mark = "native"
            yield f"  {'yes' if item.shows else 'no ':4}{item.name:12}{mark:9}{item.says}"
        granted = [ask.asked for ask in self.asks if ask.granted]
        refused = [ask.asked for ask in self.asks if not ask.granted]
        yield f"  a claim may ask for: {', '.join(granted) or 'nothing'}"
        if refused:
            yield f"  refused: {', '.join(refused)}; what would have been served: {self.served}"
        yield f"  owes: {own.obligation}"


def names() -> tuple[str, ...]:
    """Every registered mechanism."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def find(name: str) -> Mechanism:
    """Raises BadOperation for an unknown name, EngineMissing where torch is not there."""
    for point in entry_points(group=GROUP):
        if point.name == name:
            try:
                return cast(Mechanism, point.load())
            except ImportError as error:
                raise EngineMissing(f"mechanism {name} cannot be loaded: {error}") from None
    raise BadOperation(f"unknown mechanism {name!r} (known: {', '.join(names())})")


def measure(
    mechanism: Mechanism, without: tuple[str, ...] = (), progress: Progress | None = None
) -> MechanismReport:
    """Store, serve and spoil.  `without` leaves evidence out, to see the verdict fall; raises
    BadOperation for evidence that does not exist, and where nothing can be stored or served."""
    unknown = set(without) - set(MEASURES)
    if unknown:
        raise BadOperation(
            f"no evidence is called {', '.join(sorted(unknown))} (known: {', '.join(MEASURES)})"
        )
    found = []
    with one_thread(), tempfile.TemporaryDirectory(prefix="kvclaims-") as folder:
        with _told(mechanism):
            bench = Bench(mechanism, Path(folder))
        for name, question in MEASURES.items():
            if name in without:
                continue
            if progress:
                progress(f"{mechanism.declaration.name}: {name}")
            try:
                answer = question(bench)
            except Exception as error:  # noqa: BLE001 - whatever the mechanism does
                answer = Evidence("", False, f"it raised {type(error).__name__}: {error}")
            if answer is not None:
                found.append(replace(answer, name=name))
        with _told(mechanism):
            served = bench.would_be_served()
    turns = isinstance(mechanism, Turning)
    return MechanismReport(mechanism.declaration, tuple(found), served, turns)


@contextmanager
def _told(mechanism: Mechanism) -> Iterator[None]:
    """Whatever a mechanism raises is one clear line."""
    try:
        yield
    except Exception as error:  # whatever the mechanism does
        name, said = mechanism.declaration.name, f"{type(error).__name__}: {error}"
        raise BadOperation(f"mechanism {name} cannot be measured: it raised {said}") from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for more threads; one also adds up in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the questions -----------------------------------------------------------------------


class Bench:
    """A mechanism at work on the prompt, beside the model's own truth."""

    def __init__(
        self, mechanism: Mechanism, folder: Path, tokens: tuple[int, ...] = TOKENS
    ) -> None:
        self.mechanism = mechanism
        self.model = mechanism.model
        self.tokens = tokens
        self._folder = folder
        self._stores = 0
        self.queries = self.model.queries(QUERIES, seed=1)
        self.truth = self.model.kv(tokens)
        self.stranger = deepcopy(mechanism)
        """The mechanism as it was before it stored anything."""
        self.stored = self.store()
        own = self.stored.bound
        self.bound = None if own is None else (own[0].clone(), own[1].clone())
        """What was promised when it was stored, whatever becomes of it later."""
        self.served = mechanism.load(self.stored)
        self.hidden = self._files()
        self.blocks = -(-len(tokens) // self.model.block)
        self.case = provenance.Case(
            mechanism,
            self.stored,
            self.store(tokens=OTHER[: len(tokens)]),
            self.blocks,
            self.queries,
        )
        """The prompt in store, beside another."""
        self.seen = self.case.seen(self.served)

    def shorter(self) -> Iterator[Bench]:
        """The same with beginnings of the prompt: less than a block; one token more than a block;
        and as many blocks, of which the last is not full."""
        block = self.model.block
        counts = {max(block // 3, 1), block + 1, len(self.tokens) - max(block // 2 - 1, 1)}
        for count in sorted(counts):
            folder = self._folder / f"{count} tokens"
            folder.mkdir()
            yield Bench(self.mechanism, folder, self.tokens[:count])

    def store(self, query: int = 0, tokens: tuple[int, ...] | None = None) -> Stored:
        """The prompt, or another, stored anew in a folder of its own."""
        self._stores += 1
        folder = self._folder / str(self._stores)
        folder.mkdir()
        return self.mechanism.store(tokens or self.tokens, self.queries[query], folder)

    @cached_property
    def for_other_queries(self) -> list[tuple[Stored, list[str]]]:
        """The prompt as each other query stores it, and which of its parts are others then."""
        own = self.store()
        others = [self.store(query=query) for query in range(1, QUERIES)]
        return [(other, _differing(own, other)) for other in others]

    def _files(self) -> list[str]:
        """The files in store that no part names."""
        named = {part.path for part in self.stored.parts.values()}
        return sorted(p.name for p in self._folder.rglob("*") if p.is_file() and p not in named)

    def errors(self, loaded: Loaded, truth: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """Absolute differences of keys and values, [layers, heads, tokens, width]."""
        keys, values = truth or self.truth
        return _difference(loaded.keys, keys), _difference(loaded.values, values)

    def exact_tokens(self, loaded: Loaded) -> Any:
        """For each token whether it is there with all its bits."""
        keys, values = self.errors(loaded)
        same = (keys == 0).all(-1).all(0).all(0) & (values == 0).all(-1).all(0).all(0)
        return same & self.present(loaded)

    def present(self, loaded: Loaded) -> Any:
        """For each token of the prompt whether it is there; what is not served is not."""
        there = torch.zeros(len(self.tokens), dtype=torch.bool)
        there[: len(loaded.present)] = loaded.present
        return there

    def output_error(self, loaded: Loaded, before: tuple[int, ...] = ()) -> float:
        """The largest difference that any query sees in its attention output behind `before`,
        relative to it."""
        return max(_off(*pair) for pair in self._answers(loaded, before))

    def _answers(self, loaded: Loaded, before: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:
        """What each query sees, and what it should: of an object that answers and serves KV as
        well both count."""
        whole = self.model.kv(self.tokens, before)
        for query in self.queries:
            seen = None
            if loaded.keys is not None:
                kv = (tensor[:, :, loaded.present] for tensor in (loaded.keys, loaded.values))
                seen = self.model.attend(query, *kv)
            if loaded.output is None:
                yield seen, self.model.output(query, self.tokens, before)
                continue
            yield loaded.output(query), self.model.output(query, self.tokens, before)
            if seen is not None:
                yield seen, self.model.attend(query, *whole)

    def would_be_served(self) -> Served:
        """What a reader gets who asks for more than there is."""
        if self.served.declined:
            return Served(self.served.declined)
        error = self.output_error(self.served)
        if self.served.keys is None:
            return Served(output_error=error)
        exact = self.exact_tokens(self.served)
        return Served("", int(exact.sum()), _leading(exact), error)


def _difference(served: Any, truth: Any) -> Any:
    """Absolute differences; without end where nothing is served, or what is no number."""
    error = torch.full_like(truth, torch.inf)
    end = min(served.shape[2], truth.shape[2])
    error[:, :, :end] = (served[:, :, :end] - truth[:, :, :end]).abs()
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _off(served: Any, truth: Any) -> float:
    """The size of a difference, relative to the truth.  One that is no number is without end: it
    compares with nothing, so it hides."""
    error = float((served - truth).norm() / truth.norm())
    return float("inf") if error != error else error


def _leading(flags: Any) -> int:
    return int(flags.to(torch.int64).cumprod(0).sum())


def _model(bench: Bench) -> Evidence:
    """Is the model, against whose KV all is measured, one that tells anything apart?"""
    wrong = truth.unfit(bench.model, TOKENS, OTHER, ELSEWHERE, bench.queries)
    says = "; ".join(wrong) or "it tells prompts, places, contexts and queries apart"
    return Evidence("", not wrong, says, {"unfit": wrong})


def _bits(bench: Bench) -> Evidence | None:
    """Served in its place, is every token bit for bit what was computed?"""
    if bench.served.keys is None:
        return None
    exact = bench.exact_tokens(bench.served)
    count = int(exact.sum())
    whole = len(bench.tokens)
    missing = whole - int(bench.present(bench.served).sum())
    return Evidence(
        "",
        count == whole,
        f"{count} of {whole} tokens bit for bit equal, {_leading(exact)} of them leading"
        + (f", {missing} dropped" if missing else ""),
        {"exact": count, "leading": _leading(exact), "dropped": missing},
    )


def _rotation(bench: Bench) -> Evidence:
    """Served elsewhere, is each token that of its own context, turned to the place, or computed
    anew there?"""
    loaded = bench.mechanism.load(bench.stored, ELSEWHERE)
    if loaded.declined or loaded.keys is None:
        return Evidence("", False, f"declined elsewhere: {loaded.declined or 'no KV of any token'}")
    context = bench.stored.context
    keys, values = bench.model.kv(bench.tokens, context)
    turned = bench.model.moved(keys, len(context), len(ELSEWHERE)), values
    kept = _by_token(bench.errors(loaded, turned))
    anew = _by_token(bench.errors(loaded, bench.model.kv(bench.tokens, ELSEWHERE)))
    error = float(torch.minimum(kept, anew).max())
    return Evidence(
        "",
        error < NEAR,
        f"after {len(ELSEWHERE)} other tokens it is off by {error:.1g} from its own context turned "
        f"there, and by {float(anew.max()):.2g} from what is computed there",
        {"error": error, "context_error": float(anew.max())},
    )


def _by_token(errors: tuple[Any, Any]) -> Any:
    """The largest error of each token, in keys and values of every layer."""
    keys, values = (error.amax((0, 1, 3)) for error in errors)
    return torch.maximum(keys, values)


def _commutes(bench: Bench) -> Evidence | None:
    """Does a turned codebook serve what was served, turned?"""
    if not isinstance(bench.mechanism, Turning):
        return None
    by = len(ELSEWHERE)
    turned = bench.mechanism.turned(bench.stored, by)
    whole = bench.mechanism.load(bench.stored)
    loaded = bench.mechanism.load(turned)
    if loaded.declined or whole.declined:
        return Evidence("", False, f"declined: {loaded.declined or whole.declined}")
    truth = bench.model.moved(bench.seen.keys, 0, by), bench.seen.values
    error = max(float(e.max()) for e in bench.errors(loaded, truth))
    others = _differing(bench.stored, turned)
    leaning = _carrying(bench)
    alone = sorted(name for name in others if name not in leaning)
    is_turned = not alone and replace(turned, parts=bench.stored.parts) == bench.stored
    is_kept = not bench.case.moved(bench.seen, bench.case.seen(whole))
    says = f"turned by {by} places, {', '.join(others) or 'nothing'} serves keys off by {error:.1g}"
    if alone:
        says += f"; and not a codebook: {', '.join(alone)}"
    elif not is_turned or not is_kept:
        says += "; and something else was changed"
    return Evidence(
        "",
        error < NEAR and is_turned and is_kept and bool(others),
        says,
        {"error": error, "turned": others},
    )


def _differing(own: Stored, other: Stored) -> list[str]:
    """The names of parts that are not alike in two objects."""
    names = own.parts.keys() | other.parts.keys()
    return sorted(
        name
        for name in names
        if name not in own.parts
        or name not in other.parts
        or not provenance.hold_the_same(own.parts[name], other.parts[name])
    )


def _context(bench: Bench) -> Evidence:
    """Served behind the context that it was computed in, is it what was computed?"""
    before = bench.stored.context
    loaded = bench.mechanism.load(bench.stored, before)
    if loaded.declined or loaded.keys is None:
        return Evidence("", False, loaded.declined or "no KV of any token")
    error = max(float(e.max()) for e in bench.errors(loaded, bench.model.kv(bench.tokens, before)))
    return Evidence(
        "",
        error < NEAR and bool(bench.present(loaded).all()),
        f"behind its own {len(before)} tokens of context it is off by {error:.1g}",
        {"window": len(before), "error": error},
    )


def _bound(bench: Bench) -> Evidence | None:
    """Is every element within the bound that was fixed when it was stored?"""
    if bench.bound is None:
        return None
    if says := _bounds_nothing(bench):
        return Evidence("", False, says)
    worst, largest = 0.0, 0.0
    for error, bound in zip(bench.errors(bench.served), bench.bound, strict=True):
        worst = max(worst, float((error / (bound + NEAR)).max()))
        largest = max(largest, float(bound.max()))
    return Evidence(
        "",
        worst <= 1 + NEAR,
        f"the largest error is {worst:.3f} of its bound (largest bound {largest:.2f})",
        {"of_bound": worst, "largest_bound": largest},
    )


def _bounds_nothing(bench: Bench) -> str:
    """Why what was promised is no bound, empty where it is one."""
    assert bench.bound is not None
    if not all(bool(bound.isfinite().all()) for bound in bench.bound):
        return "a bound without end bounds nothing"
    if any(bool((bound < 0).any()) for bound in bench.bound):
        return "a bound below zero bounds nothing"
    loose = set()
    for tensor, bound in zip(bench.truth, bench.bound, strict=True):
        says_something = (tensor.abs() > bound).any(-1).all(0).all(0)
        blocks = enumerate(says_something.split(bench.model.block))
        loose |= {number for number, tokens in blocks if not tokens.any()}
    if not loose:
        return ""
    return f"zeros would be within the bound of block {_listed(sorted(loose))}"


def _place(bench: Bench) -> Evidence:
    """Behind another prefix, is nothing served but what is served in its place, turned there, or
    what is computed there?"""
    loaded = bench.mechanism.load(bench.stored, ELSEWHERE)
    if loaded.declined:
        return Evidence("", True, f"declined behind another prefix: {loaded.declined}")
    by = len(ELSEWHERE)
    if loaded.keys is None or loaded.output is not None or bench.seen.keys is None:
        error = bench.output_error(loaded, ELSEWHERE)
        says = f"after {by} other tokens its answers are off by {error:.2g} from those given there"
        return Evidence("", error < NEAR, says, {"error": error})
    turned = bench.model.moved(bench.seen.keys, 0, by), bench.seen.values
    kept = _by_token(bench.errors(loaded, turned))
    anew = _by_token(bench.errors(loaded, bench.model.kv(bench.tokens, ELSEWHERE)))
    error = float(torch.minimum(kept, anew).max())
    is_there = provenance.same(loaded.present, bench.seen.present)
    says = f"after {by} other tokens it is off by {error:.1g} from what is served in its place, "
    says += "turned there" if is_there else "turned there; and other tokens are there"
    return Evidence("", error < NEAR and is_there, says, {"error": error})


def _prefix(bench: Bench) -> Evidence:
    """Behind another prefix, is nothing served but what is computed there (B4), within the bound
    where one was fixed?"""
    loaded = bench.mechanism.load(bench.stored, ELSEWHERE)
    if loaded.declined:
        return Evidence("", True, f"declined behind another prefix: {loaded.declined}")
    over, error = 0.0, 0.0
    if loaded.output is not None:
        over = error = bench.output_error(loaded, ELSEWHERE)
    if loaded.keys is not None:
        errors = bench.errors(loaded, bench.model.kv(bench.tokens, ELSEWHERE))
        bounds = bench.bound or tuple(torch.zeros_like(e) for e in errors)
        pairs = zip(errors, bounds, strict=True)
        over = max(over, *(float((e - bound).max()) for e, bound in pairs))
        error = max(error, *(float(e.max()) for e in errors))
    return Evidence(
        "",
        over < NEAR,
        f"after {len(ELSEWHERE)} other tokens it is off by {error:.2g} from what is computed there",
        {"error": error},
    )


def _cut(bench: Bench) -> Evidence:
    """Asked for its first blocks alone, here or behind another prefix, is it the beginning of what
    is served whole, or nothing (P5)?"""
    wrong, declined = _no_beginnings(bench, ())
    elsewhere, _ = _no_beginnings(bench, ELSEWHERE)
    served = bench.blocks - 1 - declined
    says = f"{served} of {bench.blocks - 1} beginnings are served, the others declined"
    for where, blocks in (("", wrong), (f"after {len(ELSEWHERE)} other tokens ", elsewhere)):
        if blocks:
            says += f"; {where}something else for the first {_listed(blocks)} blocks"
    figures = {"declined": declined, "wrong": wrong, "wrong_elsewhere": elsewhere}
    return Evidence("", not wrong and not elsewhere, says, figures)


def _no_beginnings(bench: Bench, before: tuple[int, ...]) -> tuple[list[int], int]:
    """For how many first blocks something else is served behind `before` than of the whole, and how
    often nothing is."""
    whole = bench.case.seen(bench.mechanism.load(bench.stored, before))
    wrong, declined = [], 0
    for blocks in range(1, bench.blocks):
        loaded = bench.mechanism.load(bench.stored, before, blocks)
        if loaded.declined:
            declined += 1
        elif not _is_beginning(bench, whole, loaded, blocks):
            wrong.append(blocks)
    every = bench.mechanism.load(bench.stored, before, bench.blocks)
    if not every.declined and bench.case.moved(whole, bench.case.seen(every)):
        wrong.append(bench.blocks)
    return wrong, declined


def _is_beginning(bench: Bench, whole: provenance.Seen, loaded: Loaded, blocks: int) -> bool:
    """Whether `loaded` is the first `blocks` blocks of the whole; what only answers has no
    beginning."""
    part = bench.case.seen(loaded)
    if whole.keys is None or whole.answers is not None or part.answers is not None:
        return False
    end = blocks * bench.model.block
    beginning = whole.keys[:, :, :end], whole.values[:, :, :end], whole.present[:end]
    return len(loaded.provenance) == blocks and all(
        provenance.same(one, other) for one, other in zip(part.tensors, beginning, strict=True)
    )


def _attention(bench: Bench) -> Evidence:
    """What queries see, less than if nothing were served.  It does not follow from an elementwise
    bound, so it stands beside it."""
    if bench.served.declined:
        return Evidence("", False, bench.served.declined)
    error = bench.output_error(bench.served)
    element = (
        None
        if bench.served.keys is None
        else max(float(e.max()) for e in bench.errors(bench.served))
    )
    beside = "no elements to compare" if element is None else f"elements by up to {element:.2g}"
    return Evidence(
        "",
        error < 1,
        f"attention outputs are off by up to {error:.2g} of their size; {beside}",
        {"output_error": error, "element_error": element},
    )


def _same_output(bench: Bench) -> Evidence:
    """Do queries get the very answer of the model?"""
    error = float("inf") if bench.served.declined else bench.output_error(bench.served)
    return Evidence("", error < NEAR, f"outputs off by {error:.1g}", {"output_error": error})


def _query(bench: Bench) -> Evidence:
    """Would any other query have stored the same?"""
    differing = sorted({name for _, names in bench.for_other_queries for name in names})
    says = (
        f"another query stores other {', '.join(differing)}"
        if differing
        else "any query stores the same"
    )
    return Evidence("", not differing, says, {"differing": differing})


def _identity(bench: Bench) -> Evidence:
    """Is it served only to a reader whose identity is that of the object, in each thing that is
    declared to belong to it, and is each object of another query of another identity?"""
    names = set(bench.stored.identity)
    odd = sorted(names ^ set(bench.mechanism.declaration.identity))
    own = bench.stored.identity
    alike = any(names and other.identity == own for other, names in bench.for_other_queries)
    ignored = []
    for name in sorted(names):
        for value in _others(bench.stored.identity[name]):
            other = replace(bench.stored, identity={**bench.stored.identity, name: value})
            if not bench.mechanism.load(other).declined:
                ignored.append(name)
                break
    says = f"declined to a reader of another {', another '.join(sorted(names))}"
    if ignored:
        says = f"served to a reader of another {', another '.join(ignored)}"
    if odd:
        says += f"; declared or kept, and not both: {', '.join(odd)}"
    if alike:
        says += "; one identity for what different queries store"
    shows = not ignored and not odd and not alike and bool(names)
    return Evidence("", shows, says, {"ignored": ignored})


def _others(value: Any) -> tuple[Any, ...]:
    """Values of an identity that are not this one: another word, and one that is close to it."""
    match value:
        case bool():
            return "another", not value
        case int() | float():
            return "another", value + 1
        case str():
            return "another", f"{value} ", value[:-1]
        case tuple():
            return "another", value[:-1], (*value, 0)
    return ("another",)


def _loss(bench: Bench) -> Evidence:
    """Is every part that is gone noticed: nothing served, or what was computed anew?"""
    wrong = []
    declined = 0
    for name in bench.stored.parts:
        rest = {key: part for key, part in bench.stored.parts.items() if key != name}
        loaded = bench.mechanism.load(replace(bench.stored, parts=rest))
        if loaded.declined:
            declined += 1
        elif not _as_before(bench, loaded):
            wrong.append(name)
    bare = bench.mechanism.load(replace(bench.stored, parts={}))
    if not bare.declined and not _as_before(bench, bare):
        wrong.append("all of them")
    total = len(bench.stored.parts)
    return Evidence(
        "",
        not wrong and total > 0,
        f"{declined} of {total} parts, each lost alone, make it decline"
        + (f"; served wrong without {', '.join(wrong)}" if wrong else ""),
        {"parts": total, "declined": declined, "served_wrong": wrong},
    )


def _as_before(bench: Bench, loaded: Loaded) -> bool:
    return not loaded.declined and not bench.case.moved(bench.seen, bench.case.seen(loaded))


def _leans(bench: Bench) -> Evidence | None:
    """Which parts carry more than one block: their loss breaks all that lean on them."""
    if bench.served.keys is None:
        return None
    shared = _carrying(bench)
    most = max(shared.values(), default=1)
    says = (
        f"{len(shared)} parts carry several blocks each, up to {most} of {bench.blocks}: they "
        "belong to the footprint of each of those"
        if shared
        else "each part carries one block"
    )
    return Evidence("", not shared, says, {"shared": shared})


def _carrying(bench: Bench) -> dict[str, int]:
    """The parts that carry several blocks, and how many each."""
    shared = {}
    for name, part in bench.stored.parts.items():
        with _disturbed(bench, name, part) as stored:
            loaded = bench.mechanism.load(stored)
            blocks = (
                [] if loaded.declined else bench.case.moved(bench.seen, bench.case.seen(loaded))
            )
        if len(blocks) > 1:
            shared[name] = len(blocks)
    return shared


@contextmanager
def _disturbed(bench: Bench, name: str, part: Part) -> Iterator[Stored]:
    """The object with other numbers in one part, or what another prompt has in a file there; as it
    is where a part holds no numbers that could be a little other."""
    if part.tensor is None:
        with provenance.overwritten(name, part, bench.case.other.parts):
            yield bench.stored
    elif part.tensor.is_floating_point() or part.tensor.is_complex():
        changed = replace(part, tensor=part.tensor + 0.5)
        yield replace(bench.stored, parts={**bench.stored.parts, name: changed})
    else:
        yield bench.stored


def _whole(bench: Bench) -> Evidence:
    """Is it served whole or not at all?"""
    parts = range(1, bench.blocks)
    alone = [n for n in parts if not bench.mechanism.load(bench.stored, blocks=n).declined]
    needed = all(
        bench.mechanism.load(
            replace(bench.stored, parts={k: p for k, p in bench.stored.parts.items() if k != name})
        ).declined
        for name in bench.stored.parts
    )
    idle = [] if bench.served.declined else provenance.idle(bench.case)
    says = "declined for any beginning alone"
    if alone:
        says = f"served alone: the first {', '.join(map(str, alone))} of {bench.blocks} blocks"
    says += f"; {'every part is' if needed else 'not every part is'} needed"
    if idle:
        says += f"; it does not matter what {', '.join(idle)} hold"
    return Evidence(
        "",
        not alone and needed and not idle and not bench.served.declined,
        says,
        {"prefix_served": bool(alone), "all_needed": needed, "idle": idle},
    )


def _device(bench: Bench) -> Evidence:
    """Is all of it where the engine reads it?"""
    away = sorted(n for n, p in bench.stored.parts.items() if p.tier is not Tier.DEVICE)
    says = f"{len(away)} of {len(bench.stored.parts)} parts are in another tier"
    return Evidence("", not away, says if away else "every part is on the device", {"away": away})


def _source(bench: Bench) -> Evidence:
    """Does every block come from where it is said to, here and elsewhere?  Where it really comes
    from is found by changing what lies there (`checker.provenance`)."""
    parts = bench.stored.parts.items()
    odd = sorted(n for n, part in parts if (part.tier is Tier.FILE) != (part.path is not None))
    wrong = [f"{name} is in another tier than it says" for name in odd]
    wrong += [f"{name} is a file that no part names" for name in bench.hidden]
    places = {"in its place": (), f"after {len(ELSEWHERE)} other tokens": ELSEWHERE}
    for where, before in places.items():
        wrong += [f"{where} {lie}" for lie in provenance.untrue(bench.case, before)]
    return Evidence(
        "",
        not wrong and not bench.served.declined,
        "; ".join(wrong) or f"found where they are said to come from: {_kinds(bench.served)}",
        {"untrue": wrong},
    )


def _tier(bench: Bench) -> Evidence:
    """Where does it come from?"""
    parts = bench.stored.parts
    tiers = sorted({part.tier for part in parts.values()})
    away = {str(tier) for tier in tiers if tier is not Tier.DEVICE}
    here = {name: part for name, part in parts.items() if part.tier is Tier.DEVICE}
    bare = bench.mechanism.load(replace(bench.stored, parts=here))
    invented = away.intersection(bare.provenance)
    kinds = Counter(bench.served.provenance)
    return Evidence(
        "",
        bool(away.intersection(kinds)) and not invented,
        f"kept in {', '.join(tiers)}; served {_kinds(bench.served)}"
        + (f"; said to be from {', '.join(sorted(invented))} when all is gone" if invented else ""),
        {"tiers": tiers, "provenance": dict(kinds)},
    )


def _kinds(loaded: Loaded) -> str:
    kinds = Counter(loaded.provenance)
    return ", ".join(f"{number} blocks {kind}" for kind, number in kinds.items()) or "nothing"


def _spoilt(bench: Bench) -> Evidence:
    """Is a file that was spoilt ever served, or said to have been?  What is computed in its place
    is not restored (O3)."""
    files = [name for name, part in bench.stored.parts.items() if part.path is not None]
    if not files:
        return Evidence("", True, "no part is a file", {"files": 0})
    served: dict[str, None] = {}
    invented: dict[str, None] = {}
    for name in files:
        stored = bench.store()
        part = stored.parts[name]
        rest = {key: other for key, other in stored.parts.items() if key != name}
        before = _restored(bench, stored, part.tier)
        is_read = _restored(bench, replace(stored, parts=rest), part.tier) < before
        for _ in _spoilt_ways(part):
            loaded = bench.mechanism.load(stored)
            if not loaded.declined and not _as_before(bench, loaded):
                served[name] = None
            if is_read and loaded.provenance.count(part.tier) >= before:
                invented[name] = None
    says = f"served wrong from {', '.join(served)}" if served else "none was served"
    if invented:
        says += f"; said to be from {', '.join(invented)}, which cannot be read"
    return Evidence(
        "",
        not served and not invented,
        f"{len(files)} files, each with a wrong byte, with a wrong end and cut short: {says}",
        {"files": len(files), "served_wrong": [*served], "invented": [*invented]},
    )


def _restored(bench: Bench, stored: Stored, tier: str) -> int:
    """How many blocks are said to come from this tier."""
    return bench.mechanism.load(stored).provenance.count(tier)


def _spoilt_ways(part: Part) -> Iterator[None]:
    """The file of a part spoilt in one way after another, and right again in the end."""
    assert part.path is not None
    own = part.path.read_bytes()
    for at in (len(own) // 2, len(own) - 1):
        part.path.write_bytes(own[:at] + bytes((own[at] ^ 1,)) + own[at + 1 :])
        yield
    part.path.write_bytes(own[: len(own) // 2])
    yield
    part.path.write_bytes(own)


def _held(bench: Bench) -> Evidence | None:
    """While the object is in force, is any of its memory given away?"""
    if not isinstance(bench.mechanism, Holding):
        return None
    stored = bench.store()
    given = [name for name in stored.parts if bench.mechanism.reuse(stored, name)]
    whole = given or _as_before(bench, bench.mechanism.load(stored))
    says = f"given away while in force: {', '.join(given)}" if given else "no part is given away"
    return Evidence(
        "",
        not given and bool(whole),
        says if whole else f"{says}, as it says, and yet something else is served",
        {"given_away": given},
    )


def _lengths(bench: Bench) -> Evidence:
    """Is what is served of a prompt of another length as near to the truth as that of the whole,
    or nothing?  Blocks of the whole are all full."""
    wrong, declined, asked = [], [], []
    for other in bench.shorter():
        count = len(other.tokens)
        asked.append(count)
        if other.served.declined:
            declined.append(count)
            continue
        for name, question in AGAINST_TRUTH.items():
            found = question(other)
            if not (found and found.shows) and (whole := question(bench)) and whole.shows:
                wrong.append(f"{name} at {count} tokens: {found.says if found else 'not served'}")
    says = f"at {_listed(asked)} tokens as at {len(bench.tokens)}"
    if wrong:
        says = "; ".join(wrong)
    elif declined:
        says += f"; declined at {_listed(declined)} tokens"
    return Evidence("", not wrong, says, {"lengths": asked, "declined": declined, "wrong": wrong})


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def _again(bench: Bench) -> Evidence:
    """After all that was asked, is the same served as at first, and to a reader who has nothing but
    the parts?"""
    wrong = [
        who
        for who, reader in (("it", bench.mechanism), ("one who has only the parts", bench.stranger))
        if not _as_before(bench, reader.load(bench.stored))
    ]
    says = (
        f"something else is served by {' and by '.join(wrong)}" if wrong else "the same is served"
    )
    return Evidence("", not wrong, says, {"wrong": wrong})


AGAINST_TRUTH: Final[Mapping[str, Callable[[Bench], Evidence | None]]] = {
    "bits": _bits,
    "rotation": _rotation,
    "context": _context,
    "bound": _bound,
    "prefix": _prefix,
    "place": _place,
    "attention": _attention,
    "same output": _same_output,
}
"""The questions that compare what is served with what the model computes."""

MEASURES: Final[Mapping[str, Callable[[Bench], Evidence | None]]] = {
    "model": _model,
    "bits": _bits,
    "rotation": _rotation,
    "commutes": _commutes,
    "context": _context,
    "bound": _bound,
    "prefix": _prefix,
    "place": _place,
    "attention": _attention,
    "same output": _same_output,
    "query": _query,
    "identity": _identity,
    "loss": _loss,
    "cut": _cut,
    "leans": _leans,
    "whole": _whole,
    "source": _source,
    "device": _device,
    "tier": _tier,
    "spoilt": _spoilt,
    "held": _held,
    "lengths": _lengths,
    "again": _again,
}
"""The questions, by the name of their evidence."""
