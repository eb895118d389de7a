"""Mutants by operator of an engine's own source: which there are, and how one is planted.

A file of places names modules and functions of the engine.  Every mutant of these places is made
(`codemutants`), and a sample is drawn by a seed, so that none is picked by its result.  A mutant
is planted by giving the live function the code of the changed text; that is meant for a forked
child, in which nothing is put back.
"""

from __future__ import annotations

import ast
import importlib
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

from kvclaims.checker.codemutants import CodeMutant, code_mutants
from kvclaims.checker.faults import FaultError, codes_of, live_function
from kvclaims.spec.interface import BadOperation, Engine

PLACES: Final = "mutants.toml"
"""The name of the file of places, beside the engine's planted faults."""


@dataclass(frozen=True)
class Place:
    """A module, and the functions and classes in it that are changed; all of them where none is
    named."""

    path: str
    only: tuple[str, ...] = ()

    def covers(self, function: str) -> bool:
        """Whether a function (`Class.method`, or one inside of it) belongs to the place."""
        return not self.only or any(
            function == name or function.startswith(f"{name}.") for name in self.only
        )


@dataclass(frozen=True)
class Places:
    modules: tuple[Place, ...]
    count: int
    seed: int


def places_of(engine: Engine) -> Places:
    """The places of an engine.  Raises `BadOperation` where it comes with none."""
    if engine.faults is None:
        raise BadOperation(f"engine {engine.name} comes with no places for mutants")
    return read_places(engine.faults.with_name(PLACES))


def read_places(path: Path) -> Places:
    """Read a file of places; `BadOperation` with one line that says what is wrong with it."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        modules = tuple(Place(m["path"], tuple(m.get("only", ()))) for m in raw["module"])
        places = Places(modules, int(raw["count"]), int(raw["seed"]))
    except OSError as error:
        raise BadOperation(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadOperation(f"{path}: lacks or mistakes {error}") from None
    if not modules or places.count < 1:
        raise BadOperation(f"{path}: a file of places needs a module and a count")
    return places


def all_mutants(places: Places, root: Path) -> Iterator[CodeMutant]:
    """Every mutant of the places, in the order of their text; `root` holds the package.

    Statements of classes and modules are left out: they are not code of a function.  Raises
    `BadOperation` for a function that is named and has no mutant, so that a list that no longer
    fits is noticed.
    """
    for place in places.modules:
        file = root / place.path
        if not file.is_file():
            raise BadOperation(f"no module {file}")
        found: set[str] = set()
        no_function = {"module", *_classes(ast.parse(file.read_text(encoding="utf-8")))}
        for mutant in code_mutants(file, place.path):
            if mutant.function not in no_function and place.covers(mutant.function):
                found.add(mutant.function)
                yield mutant
        for name in place.only:
            if not any(f == name or f.startswith(f"{name}.") for f in found):
                raise BadOperation(f"{place.path} has no {name} that could be changed")


def _classes(node: ast.AST, inside: str = "") -> Iterator[str]:
    """The classes of a module by their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{inside}{child.name}"
            yield name
            yield from _classes(child, f"{name}.")


def sample(places: Places, root: Path) -> tuple[tuple[CodeMutant, ...], int]:
    """So many mutants, drawn by the seed, in the order of the draw; and how many there are."""
    found = list(all_mutants(places, root))
    chosen = random.Random(places.seed).sample(found, min(places.count, len(found)))
    return tuple(chosen), len(found)


def plant(mutant: CodeMutant) -> None:
    """Give the live function the code of the mutant, in this process and for good.

    Raises `FaultError` where the function is not there or its new code does not fit.
    """
    module = importlib.import_module(mutant.path.removesuffix(".py").replace("/", "."))
    name, function = _outermost(module, mutant)
    compiled = compile(mutant.source, str(module.__file__), "exec")
    codes = {code.co_qualname: code for code in codes_of(compiled)}
    try:
        function.__code__ = codes[name]
    except (KeyError, ValueError) as error:
        raise FaultError(f"{mutant.name}: {error}") from None


def _outermost(module: ModuleType, mutant: CodeMutant) -> tuple[str, FunctionType]:
    """The function of the module or class that the changed text stands in."""
    parts = mutant.function.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        live = live_function(module, name)
        if live is not None:
            return name, live
    raise FaultError(f"{mutant.name}: no function {mutant.function}")
