"""`kvclaims explore --export`: an instance written out for other tools and for the eye.

Formats by the file's ending: TLA+ (`.tla`, with a `.cfg` beside it), Promela (`.pml`), SMT-LIB
(`.smt2`), and the graph of states and steps as GraphML, DOT, or a page to look around in
(`.html`).  A file is written aside and moved into place, so there is a whole one or none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvclaims.checker import instances
from kvclaims.checker.finite import Instance
from kvclaims.checker.verdicts import Report
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

ENDINGS: Final = {
    "tla": ".tla",
    "promela": ".pml",
    "smt2": ".smt2",
    "graphml": ".graphml",
    "dot": ".dot",
    "html": ".html",
}
"""The formats by name, and how their files end."""


@dataclass(frozen=True)
class Target:
    """Where an export goes, and as what."""

    form: str
    path: Path


@dataclass(frozen=True)
class Exported:
    """What was written: `files` with the main one first, its size in bytes, how to read it."""

    files: tuple[Path, ...]
    size: int
    reading: str

    def line(self) -> str:
        beside = "".join(f" with {path.name}" for path in self.files[1:])
        return f"wrote {self.files[0]}{beside} ({self.size:,} bytes); {self.reading}"

    def to_json(self) -> dict[str, Any]:
        files = [str(path) for path in self.files]
        return {"files": files, "bytes": self.size, "reading": self.reading}


@dataclass(frozen=True)
class ExportReport:
    """What an exploration found, and what was written of it."""

    explored: Report
    exported: Exported

    @property
    def verdict(self) -> Verdict:
        return self.explored.verdict

    def to_json(self) -> dict[str, Any]:
        return {**self.explored.to_json(), "exported": self.exported.to_json()}

    def lines(self) -> Iterable[str]:
        yield from self.explored.lines()
        yield self.exported.line()


def target(text: str, machine: str) -> Target:
    """What `--export TEXT` means: a format's name, or a file with a format's ending.

    A name alone writes to a file in this folder called as the instance.  Raises BadOperation for
    an unknown format and for a path that cannot be written, so that nothing is explored in vain.
    """
    path = Path(_plain(machine) + ENDINGS[text]) if text in ENDINGS else Path(text)
    forms = {ending: form for form, ending in ENDINGS.items()}
    if path.suffix not in forms:
        known = ", ".join(f"{form} or a file *{ending}" for form, ending in ENDINGS.items())
        raise BadOperation(f"cannot export to {text!r} (known: {known})")
    found = Target(forms[path.suffix], path)
    if found.form == "tla":
        _check_module_name(path)
    for each in _files(found):
        _check_writable(each)
    return found


def export(machine: str, settings: Mapping[str, str], where: Target) -> Exported:
    """Write the instance.  Raises BadOperation where that cannot be done; then no file changed."""
    return export_instance(instances.instance(machine, settings), where)


def export_instance(instance: Instance, where: Target) -> Exported:
    """The same for an instance that has no name."""
    texts, reading = _WRITERS[where.form](instance, where.path)
    files = _files(where)
    for path, text in zip(files, texts, strict=True):
        write_whole(path, text)
    return Exported(files, len(texts[0].encode()), reading)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that there is never a part of it.  Raises BadOperation."""
    aside = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            aside = Path(file.name)
            file.write(text)
        aside.chmod(0o666 & ~_umask())
        aside.replace(path)
    except OSError as error:
        if aside is not None:
            aside.unlink(missing_ok=True)
        raise BadOperation(f"cannot write {path}: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _plain(machine: str) -> str:
    """A file's name for an instance; letters, digits and underscores serve every format."""
    return "".join(letter if letter.isalnum() else "_" for letter in machine)


def _files(where: Target) -> tuple[Path, ...]:
    return (where.path, where.path.with_suffix(".cfg")) if where.form == "tla" else (where.path,)


def _check_module_name(path: Path) -> None:
    from kvclaims.checker.tla import is_module_name

    if not is_module_name(path.stem):
        raise BadOperation(
            f"{path.name}: a TLA+ module is called as its file, by letters, digits and "
            "underscores with a letter first"
        )


def _check_writable(path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise BadOperation(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise BadOperation(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise BadOperation(f"cannot write {path}: the folder {folder} takes no files")


# --- the formats -------------------------------------------------------------------------

Written = tuple[list[str], str]
"""The texts of the files, and how to read the main one."""


def _tla(instance: Instance, path: Path) -> Written:
    from kvclaims.checker.tla import tla

    module = tla(instance, path.stem)
    return (
        [module.text, module.config],
        f"check it with: java -cp tla2tools.jar tlc2.TLC -deadlock {path.name}",
    )


def _promela(instance: Instance, path: Path) -> Written:
    from kvclaims.checker.promela import promela

    command = "gcc -O2 -DSAFETY -DNOREDUCE -o pan pan.c && ./pan -n -m1000000"
    return [promela(instance)], f"check it with: spin -o2 -a {path.name} && {command}"


def _smt2(instance: Instance, path: Path) -> Written:
    from kvclaims.checker.smtinstance import queries, smt_of_instance

    reading = f"{queries(instance)} answers, each unsat: z3 {path.name}, cvc5 -i {path.name}"
    return [smt_of_instance(instance)], reading


def _graphml(instance: Instance, _path: Path) -> Written:
    from kvclaims.checker.stategraph import graphml, state_graph

    return [graphml(state_graph(instance))], "open it in yEd or Gephi, or with networkx"


def _dot(instance: Instance, path: Path) -> Written:
    from kvclaims.checker.stategraph import dot, state_graph

    picture = path.with_suffix(".svg").name
    return [dot(state_graph(instance))], f"draw it with: dot -Tsvg {path.name} -o {picture}"


def _html(instance: Instance, _path: Path) -> Written:
    from kvclaims.checker.stategraph import state_graph
    from kvclaims.checker.statepage import LIMIT, page

    return [page(state_graph(instance, LIMIT))], "open it in a browser"


_WRITERS: Final[dict[str, Callable[[Instance, Path], Written]]] = {
    "tla": _tla,
    "promela": _promela,
    "smt2": _smt2,
    "graphml": _graphml,
    "dot": _dot,
    "html": _html,
}
