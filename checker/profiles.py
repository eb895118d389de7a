"""Engine profiles: what a runtime is said to offer for each protection mode, and on what evidence.

A profile is TOML:

    id = "name"            title = "…"            version = "the runtime's version"
    engine = "vllm"                     # the engine that is run here, where one is: its probes;
                                        # the id is then its name, or begins with it: vllm-mine

    [[mode]]
    protection = "soft_priority"        depth = "policy"           # deepest adapter used
    claims = "adapter (policy)"         # the verdict that the profile claims
    lowers_to = "best_effort"           # only where a weaker mode stands in for this one

    [mode.evidence.eviction_order]      # one table an obligation (`spec.lowering.Obligation`)
    way = "steered"                     # own, joined, steered, patched or nearly
    says = "what it does"
    probe = {engine = "vllm", program = "L3"}              # one anchor: a run that must hold,
    trace = "file.jsonl"                                   # a trace beside the profile,
    document = {title = "…", version = "…", place = "…"}   # or a document with its version

    [[mode.refuted]]                    # a run that shows that the mode is not kept
    probe = {engine = "vllm", program = "L1"}
    says = "why"
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, TypeVar

from kvclaims.spec.interface import BadOperation
from kvclaims.spec.lowering import Anchor, Depth, Lowering, Obligation, Way
from kvclaims.spec.vocabulary import Protection

_Word = TypeVar("_Word", bound=StrEnum)


@dataclass(frozen=True)
class Probe:
    """A litmus program on an engine, run anew."""

    engine: str
    program: str


@dataclass(frozen=True)
class Document:
    title: str
    version: str
    place: str


@dataclass(frozen=True)
class Evidence:
    """Why an obligation is said to be met; without an anchor it is only said."""

    way: Way
    says: str
    probe: Probe | None = None
    trace: Traversable | None = None
    document: Document | None = None

    @property
    def anchor(self) -> Anchor | None:
        if self.probe is not None:
            return Anchor.PROBE
        if self.trace is not None:
            return Anchor.TRACE
        return Anchor.DOCUMENT if self.document is not None else None


@dataclass(frozen=True)
class Refutation:
    probe: Probe
    says: str


@dataclass(frozen=True)
class Mode:
    protection: Protection
    depth: Depth
    claims: Lowering
    evidence: Mapping[Obligation, Evidence]
    lowers_to: Protection | None = None
    refuted: tuple[Refutation, ...] = ()


@dataclass(frozen=True)
class Profile:
    id: str
    title: str
    version: str
    modes: tuple[Mode, ...]
    engine: str | None = None
    """The engine whose runs speak of this runtime; None where it is not run here."""


_FOLDER: Final = files("kvclaims.checker") / "profiles"


def names() -> tuple[str, ...]:
    """The profiles that come with the project."""
    return tuple(sorted(f.name[:-5] for f in _FOLDER.iterdir() if f.name.endswith(".toml")))


def load(name_or_path: str) -> Profile:
    """A profile by name or from a file; raises BadOperation with the place of what is wrong."""
    path = Path(name_or_path)
    if name_or_path in names():
        return _read(_FOLDER / f"{name_or_path}.toml", _FOLDER)
    if path.suffix != ".toml":
        raise BadOperation(
            f"no profile {name_or_path!r} (known: {', '.join(names())}; or a .toml file)"
        )
    return _read(path, path.parent)


def _read(source: Traversable, folder: Traversable) -> Profile:
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOperation(f"{source.name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOperation(f"{source.name}: not TOML: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise BadOperation(f"{source.name}: not TOML: {error}") from None
    reader = _Reader(source.name, folder)
    top = reader.table(raw, "profile", {"id", "title", "version", "mode"}, frozenset({"engine"}))
    name, title, version = (reader.text(top, key, "profile") for key in ("id", "title", "version"))
    modes = top["mode"]
    if not isinstance(modes, list) or not modes:
        raise reader.wrong("needs at least one [[mode]]")
    engine = reader.text(top, "engine", "profile") if "engine" in top else None
    if engine is not None and name != engine and not name.startswith(f"{engine}-"):
        raise reader.wrong(
            f"runs of {engine} say nothing of {name!r}: its id is {engine}, or {engine}-something"
        )
    read = tuple(reader.mode(mode) for mode in modes)
    for (protection, depth), count in Counter((m.protection, m.depth) for m in read).items():
        if count > 1:
            raise reader.wrong(f"{protection} at depth {depth.name.lower()} is given {count} times")
    return Profile(name, title, version, read, engine)


class _Reader:
    """Reads strictly: an unknown key is an error, never ignored."""

    def __init__(self, name: str, folder: Traversable) -> None:
        self._name = name
        self._folder = folder

    def wrong(self, what: str) -> BadOperation:
        return BadOperation(f"{self._name}: {what}")

    def table(
        self, raw: object, place: str, needed: set[str], optional: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        if not isinstance(raw, dict):
            raise self.wrong(f"{place} must be a table")
        for key in raw:
            if not key.isprintable():
                raise self.wrong(f"{place} has unknown {key!r}")
        if lacking := needed - raw.keys():
            raise self.wrong(f"{place} lacks {', '.join(sorted(lacking))}")
        if odd := raw.keys() - needed - optional:
            raise self.wrong(f"{place} has unknown {', '.join(sorted(odd))}")
        return raw

    def tables(self, raw: Mapping[str, Any], key: str) -> list[object]:
        entries = raw.get(key, [])
        if not isinstance(entries, list):
            raise self.wrong(f"{key} must be a list of tables")
        return entries

    def text(self, raw: Mapping[str, Any], key: str, place: str) -> str:
        if not isinstance(raw[key], str) or not raw[key].strip():
            raise self.wrong(f"{key} of {place} must be a text")
        if not raw[key].isprintable():
            raise self.wrong(f"{key} of {place} has characters that do not print: {raw[key]!r}")
        return str(raw[key])

    def word(self, kind: type[_Word], raw: object, place: str) -> _Word:
        try:
            return kind(str(raw))
        except ValueError:
            known = ", ".join(kind)
            raise self.wrong(f"{place}: {raw!r} is none of {known}") from None

    def mode(self, raw: object) -> Mode:
        optional = frozenset({"evidence", "lowers_to", "refuted"})
        table = self.table(raw, "a mode", {"protection", "depth", "claims"}, optional)
        protection = self.word(Protection, table["protection"], "protection")
        depths = {depth.name.lower(): depth for depth in Depth}
        if not isinstance(table["depth"], str) or table["depth"] not in depths:
            raise self.wrong(f"depth {table['depth']!r} is none of {', '.join(depths)}")
        weaker = table.get("lowers_to")
        return Mode(
            protection,
            depths[table["depth"]],
            self.word(Lowering, table["claims"], f"claims of {protection}"),
            {
                self.word(Obligation, name, f"evidence of {protection}"): self.evidence(
                    entry, f"{protection}.{name}"
                )
                for name, entry in self.table(
                    table.get("evidence", {}), "evidence", set(), frozenset(Obligation)
                ).items()
            },
            self.word(Protection, weaker, "lowers_to") if weaker is not None else None,
            tuple(self.refutation(entry, protection) for entry in self.tables(table, "refuted")),
        )

    def evidence(self, raw: object, place: str) -> Evidence:
        anchors = frozenset({"probe", "trace", "document"})
        table = self.table(raw, place, {"way", "says"}, anchors)
        if len(anchors & table.keys()) > 1:
            raise self.wrong(f"{place} has more than one anchor")
        trace = self._folder / self.text(table, "trace", place) if "trace" in table else None
        return Evidence(
            self.word(Way, table["way"], place),
            self.text(table, "says", place),
            self.probe(table["probe"], place) if "probe" in table else None,
            trace,
            self.document(table["document"], place) if "document" in table else None,
        )

    def refutation(self, raw: object, place: str) -> Refutation:
        table = self.table(raw, f"refuted of {place}", {"probe", "says"})
        return Refutation(self.probe(table["probe"], place), self.text(table, "says", place))

    def probe(self, raw: object, place: str) -> Probe:
        table = self.table(raw, f"probe of {place}", {"engine", "program"})
        return Probe(self.text(table, "engine", place), self.text(table, "program", place))

    def document(self, raw: object, place: str) -> Document:
        table = self.table(raw, f"document of {place}", {"title", "version", "place"})
        return Document(*(self.text(table, key, place) for key in ("title", "version", "place")))
