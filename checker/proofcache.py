"""What was proved before, by content: what has not changed is not proved again.

The key of an obligation is a hash of everything that its proof depends on: the declarations it
reads, the sources that turn them into logic, the solver and its version.  Only proofs are kept.
An entry that is damaged, or of another key, counts as none and is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kvclaims.checker import induction, logic, smtlib, solvers
from kvclaims.checker.induction import Given, Taken
from kvclaims.checker.logic import totals
from kvclaims.spec import language
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    Action,
    App,
    Bind,
    Lit,
    Machine,
    New,
    Op,
    Property,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
)
from kvclaims.spec.vocabulary import Verdict

_ENCODERS: Final = (language, logic, induction, smtlib, solvers)
"""Modules whose text decides what an obligation says and how it is decided."""


_SEAL: Final = "sha256"
"""The field of an entry that holds the digest of all the others."""


def default_folder() -> Path:
    """The user's cache folder, as the XDG base directories have it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvclaims"


@dataclass(frozen=True)
class ProofCache:
    """A folder of small JSON files, one a proof."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadOperation(
                f"cannot keep proofs in {self.folder}: {error.strerror} (try --no-cache)"
            ) from None

    def find(self, key: str) -> Taken | None:
        """What the kept proof takes as premises; None where none is kept."""
        entry = self._read(key)
        facts, given = entry.get("facts"), entry.get("given")
        if entry.get("verdict") != Verdict.PROVED or not isinstance(facts, list):
            return None
        numbers = all(type(fact) is int and fact >= 0 for fact in facts)
        if not numbers or len(set(facts)) < len(facts) or given not in tuple(Given):
            return None
        return Taken(tuple(facts), Given(given))

    def keep(self, key: str, taken: Taken, about: Mapping[str, Any]) -> None:
        """Written aside and moved into place; a folder that takes no more costs time only."""
        proof = {"facts": list(taken.facts), "given": taken.given}
        self._write(key, {"key": key, "verdict": Verdict.PROVED, **proof, **about})

    def _write(self, key: str, entry: Mapping[str, Any]) -> None:
        path = self._path(key)
        entry = {**entry, _SEAL: _sealed(entry)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
            ) as aside:
                json.dump(entry, aside)
            Path(aside.name).replace(path)
        except OSError:
            return

    def recall(self, key: str) -> dict[str, Any] | None:
        """The record kept under a key; None where there is none, or a damaged one."""
        record = self._read(key).get("record")
        return record if isinstance(record, dict) else None

    def remember(self, key: str, record: Mapping[str, Any]) -> None:
        self._write(key, {"key": key, "record": dict(record)})

    def _read(self, key: str) -> dict[str, Any]:
        """What was written under a key; empty where nothing was, or where it is damaged."""
        try:
            entry = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(entry, dict) or entry.get("key") != key:
            return {}
        seal = entry.pop(_SEAL, None)
        return entry if seal == _sealed(entry) else {}

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class Keys:
    """The keys of one machine's obligations."""

    def __init__(self, machine: Machine) -> None:
        sums = dict.fromkeys(map(canonical, totals(machine)))  # their order numbers the facts
        self._shared = _digest(
            _encoders(),
            *map(_symbol, machine.symbols),
            *map(canonical, machine.axioms),
            *sums,
            *(_digest(*map(canonical, (p.whole, *p.parts))) for p in machine.partitions),
        )
        self._start = _digest(self._shared, "initially", *map(_update, machine.init))
        self._invariants = _digest(*(canonical(p.formula) for p in machine.invariants))
        self._actions = {
            a.name: _digest(self._shared, self._invariants, *_action(a)) for a in machine.actions
        }

    def of(self, prop: Property, action: str, versions: Mapping[str, str]) -> dict[str, str]:
        """A key for each solver and its version.  `action` is none of the machine's where the
        initial state is meant."""
        given = self._actions.get(action, self._start)
        what = _digest(given, str(prop.of_steps), canonical(prop.formula))
        return {solver: _digest(what, solver, version) for solver, version in versions.items()}


def content_key(machine: Machine, modules: Iterable[ModuleType], *more: str) -> str:
    """Of all that a machine declares, its properties by name included, of the text of the
    modules that judge it, and of what else is said."""
    sources = (Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)
    return _digest(
        *map(_symbol, machine.symbols),
        *map(canonical, machine.axioms),
        *map(_update, machine.init),
        *(part for action in machine.actions for part in _action(action)),
        *(f"{p.name} {p.on} {p.but} {p.goal} {canonical(p.formula)}" for p in machine.properties),
        *sources,
        *more,
    )


def canonical(term: Term) -> str:
    """A text that two terms share only if they are equal; names of symbols in full."""
    match term:
        case Var(name, of):
            return f"{name}:{_sort(of)}"
        case Lit(value, of):
            return f"{value!r}:{_sort(of)}"
        case App(symbol, args):
            return f"({_symbol(symbol)} {' '.join(map(canonical, args))})"
        case Op(kind, args):
            return f"({kind} {' '.join(map(canonical, args))})"
        case Bind(kind, var, body):
            return f"({kind} {canonical(var)} {canonical(body)})"
        case New(body):
            return f"(new {canonical(body)})"
    raise TypeError(f"not a term: {term!r}")


def _sort(sort: Sort) -> str:
    return sort.name + ("{" + ",".join(sort.values) + "}" if sort.values else "")


@lru_cache(maxsize=1024)
def _symbol(symbol: Symbol) -> str:
    domain = ",".join(map(_sort, symbol.domain))
    rigid = "rigid " if symbol.rigid else ""
    return f"[{rigid}{symbol.name}({domain}){_sort(symbol.range)}]"


def _update(update: Update) -> str:
    over = " ".join(map(canonical, update.over))
    return f"{canonical(update.target)}:={canonical(update.value)} over {over}"


def _action(action: Action) -> Iterable[str]:
    yield f"{action.name}({' '.join(map(canonical, action.params))})"
    yield canonical(action.enabled)
    yield from map(_update, action.updates)


@lru_cache(maxsize=1)
def _encoders() -> str:
    files = [*(Path(str(module.__file__)) for module in _ENCODERS), Path(__file__)]
    return _digest(*(file.read_text(encoding="utf-8") for file in files))


def _sealed(entry: Mapping[str, Any]) -> str:
    """A digest of an entry, in whatever order its fields stand."""
    return _digest(json.dumps(entry, sort_keys=True))


def _digest(*parts: str) -> str:
    """Of the parts and of where each ends."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode()
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()
