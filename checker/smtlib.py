"""Obligations as SMT-LIB 2.6 files, for any solver to disagree with.

Every file stands alone: sorts, the symbols that occur (with their meaning), the premises, each
under its name, and the negation of what is to be shown.  It is unsatisfiable where the
obligation holds.  A total is a ghost integer whose move with a step rests on a lemma of its
own (`checker.logic`); lemmas are files like the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import z3

from kvclaims.checker.logic import Logic
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Property

MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"[A-Za-z_][\w.!]*")


@dataclass(frozen=True)
class Premise:
    """Something asserted, and what it is in words."""

    label: str
    term: z3.ExprRef

    @cached_property
    def text(self) -> str:
        return f"; {_line(self.label)}\n(assert {self.term.sexpr()})\n"

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(_NAME.findall(self.text.partition("\n")[2]))


@dataclass(frozen=True)
class Written:
    """A file of the manifest.  `status` is the answer that a solver has to give."""

    file: str
    status: str
    facts: Mapping[str, Any]
    """Machine, action, rule and so on: whatever tells what the file is about."""

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "status": self.status, **self.facts}


def script(
    logic: Logic,
    about: Sequence[str],
    premises: Sequence[Premise],
    constants: Iterable[z3.ExprRef] = (),
    status: str | None = None,
) -> str:
    """The whole file; `about` are the comments that open it."""
    occurring = frozenset[str]().union(*(premise.names for premise in premises))
    meanings = {symbol.name: symbol.meaning for symbol in logic.machine.symbols}
    declared = {**logic.declared, **{str(c.decl().name()): c.decl() for c in constants}}
    # What is not the machine's own was declared when it was first needed: in no order of its own.
    order = [*meanings, *sorted(declared.keys() - meanings.keys())]
    lines = [*(f"; {_line(text)}" for text in about)]
    lines += ["(set-info :smt-lib-version 2.6)", "(set-logic ALL)"]
    lines += [f"(set-info :source |kvclaims: {_line(about[0])}|)"]
    lines += [f"(set-info :status {status})"] if status else []
    lines += ["", *_sorts(logic)]
    for name in order:
        if name in occurring:
            meaning = meanings.get(name)
            lines += [declared[name].sexpr() + (f" ; {_line(meaning)}" if meaning else "")]
    return "\n".join([*lines, "", *(premise.text for premise in premises), "(check-sat)", ""])


def _sorts(logic: Logic) -> Iterable[str]:
    for sort in logic.sorts:
        values = " ".join(f"({sort.name}.{value})" for value in sort.values)
        if values:
            yield f"(declare-datatypes (({sort.name} 0)) (({values})))"
        else:
            yield f"(declare-sort {sort.name} 0)"


def _line(text: str) -> str:
    """As part of one line and of a quoted symbol."""
    return " ".join(text.split()).replace("|", "/").replace("\\", "/")


def obligation_file(machine: str, action: str, prop: Property) -> str:
    """Where the obligation stands in the folder: the same name in every run."""
    slug = re.sub(r"[^a-z0-9]+", "-", prop.name.lower()).strip("-")
    return f"{machine}/{action}/{prop.rule}-{slug}.smt2"


def lemma_file(machine: str, action: str, total: int) -> str:
    return f"{machine}/{action}/lemma-total{total}.smt2"


def write(folder: Path, file: str, text: str) -> None:
    """Raises BadOperation where the folder cannot be written."""
    path = folder / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None


def write_manifest(folder: Path, files: Iterable[Written]) -> int:
    """Lists every file once, in order; how many there are."""
    entries = {written.file: written.to_json() for written in files}
    text = json.dumps({"files": list(entries.values())}, indent=1, ensure_ascii=False)
    write(folder, MANIFEST, text + "\n")
    return len(entries)
