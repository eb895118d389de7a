"""Long formulas in lines: how a term that is too wide for one line is broken.

The same layout serves every notation that has conjunctions, disjunctions, implications and
quantifiers: a `Notation` says how they are written and how a whole term is written in one line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvclaims.spec.language import BOOL, App, Bind, Lit, Op, Term, Var, membership, show


@dataclass(frozen=True)
class Notation:
    """How terms are written: `flat` in one line, `binder` the head of a quantifier."""

    flat: Callable[[Term], str]
    binder: Callable[[Bind], str]
    conjunction: str
    disjunction: str
    implies: str


def _head(bind: Bind) -> str:
    return f"{'∀' if bind.kind == 'every' else '∃'}{bind.var.name}."


MATHEMATICS: Final = Notation(show, _head, "∧", "∨", "→")
"""The notation of `spec.language.show`."""


def laid_out(term: Term, notation: Notation, width: int = 92) -> list[str]:
    """The term in lines of at most `width` characters, where its parts can be broken at all.

    Conjunctions and disjunctions become lists with the sign before each part; lines that go on
    stand further to the right than the sign that they belong to.
    """
    flat = notation.flat(term)
    if len(flat) <= width:
        return [flat]
    if isinstance(term, Op) and term.kind == "or" and membership(term):
        return textwrap.wrap(flat, max(width, 40), subsequent_indent="    ")
    match term:
        case Op("and" | "or" as kind, _):
            sign = notation.conjunction if kind == "and" else notation.disjunction
            lines: list[str] = []
            for part in conjuncts(kind, term):
                inner = _wrapped(part, notation, width - len(sign) - 1)
                lines += _after(f"{sign} ", inner)
            return lines
        case Op("implies", (a, b)):
            given = _wrapped(a, notation, width - 3)
            given[-1] += f" {notation.implies}"
            return [*given, *_after("  ", _wrapped(b, notation, width - 2))]
        case Op("add", _):
            first, *more = (_wrapped(part, notation, width - 2) for part in conjuncts("add", term))
            return [*first, *(line for part in more for line in _after("+ ", part))]
        case Op("eq", (a, b)) if a.sort != BOOL:
            right = _after("= ", _wrapped(b, notation, width - 2))
            return [*_wrapped(a, notation, width), *right]
        case Bind("every" | "some", _, body):
            heads = [notation.binder(term)]
            while isinstance(body, Bind) and body.kind == term.kind:
                heads.append(notation.binder(body))
                body = body.body
            return [" ".join(heads), *_after("  ", laid_out(body, notation, width - 2))]
    return [flat]


def conjuncts(kind: str, term: Term) -> list[Term]:
    """The parts that `kind` joins, from the left."""
    if isinstance(term, Op) and term.kind == kind:
        return [part for child in term.args for part in conjuncts(kind, child)]
    return [term]


def is_simple(term: Term) -> bool:
    """Whether the term needs no parentheses inside another."""
    return isinstance(term, Var | Lit | App) or (isinstance(term, Bind) and term.kind == "total")


def _wrapped(term: Term, notation: Notation, width: int) -> list[str]:
    lines = laid_out(term, notation, width - 2)
    if is_simple(term) or (isinstance(term, Op) and term.kind == "not" and len(lines) == 1):
        return lines
    opened = _after("(", lines)
    opened[-1] += ")"
    return opened


def _after(prefix: str, lines: list[str]) -> list[str]:
    """The lines moved to the right, the first one behind `prefix`."""
    return [prefix + lines[0], *(" " * len(prefix) + line for line in lines[1:])]
