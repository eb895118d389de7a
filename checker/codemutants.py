"""Mutants of Python source: one small change to the syntax tree of a module.

Texts (messages, names of events), annotations, docstrings and imports are left alone.  A mutant
is named by its function, the operator, and the statement or expression before and after, so the
same name means the same mutant wherever the function stands.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

OPERATORS: Final[dict[str, str]] = {
    "flip a comparison": "< becomes <=, == becomes !=, in becomes not in, and so on",
    "swap an operation": "+ becomes -, * becomes //, | becomes &, and back",
    "swap a connective": "and becomes or, and back",
    "drop an operand": "a and b becomes a, or b",
    "negate a condition": "the condition of an if, a while or a choice is negated",
    "off by one": "a whole number becomes one more",
    "flip a constant": "True becomes False, and back",
    "delete a statement": "a call, an assignment to a field, a return or a raise is left out",
    "return another value": "a value is returned negated if it is a condition, else None",
    "swap arguments": "the first two arguments change places",
    "drop an argument": "an argument with a default is left out",
    "swap an extreme": "min becomes max, any becomes all, and back",
    "drop an order": "sorted and reversed become list",
    "drop a filter": "a condition of a comprehension is left out",
}

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATIONS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_NOT_CODE: Final = frozenset({"annotation", "returns", "decorator_list", "args"})
_EXTREMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_ORDERS: Final = frozenset({"sorted", "reversed"})


@dataclass(frozen=True)
class CodeMutant:
    """One changed module, at `path` below the package."""

    path: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    build: Callable[[], str] = field(compare=False)
    nth: int = 1
    """Which of those of the same text in the same function."""

    @property
    def source(self) -> str:
        """The whole new text of the module."""
        return self.build()

    @property
    def name(self) -> str:
        again = f" #{self.nth}" if self.nth > 1 else ""
        return f"{self.path}:{self.function}: {self.operator}: {self.before} ⇒ {self.after}{again}"


def code_mutants(file: Path, path: str) -> Iterator[CodeMutant]:
    """Every mutant of a module, in the order of its text."""
    text = file.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    names: dict[str, int] = {}
    for site in _sites(tree):
        for change in _changes(site):
            mutant = _made(lines, site, change, path)
            nth = names[mutant.name] = names.get(mutant.name, 0) + 1
            yield replace(mutant, nth=nth)


@dataclass(frozen=True)
class _Site:
    """A node, the function it stands in, and the list or field of its parent that holds it."""

    node: ast.AST
    function: str
    whole: ast.stmt
    """The smallest function around it, or the statement of the module or class."""
    parent: ast.AST
    field: str
    index: int | None


@dataclass(frozen=True)
class _Change:
    operator: str
    make: Callable[[Any], ast.AST | None]
    """The node in its place, made of a copy; None leaves the statement out."""


def _made(lines: list[str], site: _Site, change: _Change, path: str) -> CodeMutant:
    new = change.make(copy.deepcopy(site.node))
    before, after = _shown(site.node), "" if new is None else _shown(new)
    line = getattr(site.node, "lineno", site.whole.lineno)
    build = partial(_source, lines, site, ast.Pass() if new is None else new)
    return CodeMutant(path, site.function, line, change.operator, before, after, build)


def _source(lines: list[str], site: _Site, new: ast.AST) -> str:
    """The text with the function around the site written anew."""
    whole = site.whole
    first = min([whole.lineno, *(d.lineno for d in getattr(whole, "decorator_list", ()))])
    if site.node is whole:
        text = ast.unparse(ast.fix_missing_locations(new))
    else:
        _put(site, new)
        try:
            text = ast.unparse(ast.fix_missing_locations(whole))
        finally:
            _put(site, site.node)
    changed = textwrap.indent(text, " " * whole.col_offset).splitlines()
    return "\n".join([*lines[: first - 1], *changed, *lines[whole.end_lineno :], ""])


def _put(site: _Site, node: ast.AST) -> None:
    if site.index is None:
        setattr(site.parent, site.field, node)
    else:
        getattr(site.parent, site.field)[site.index] = node


def _shown(node: ast.AST) -> str:
    """The text of a node; of a compound statement or comprehension its first line."""
    return ast.unparse(node).split("\n", maxsplit=1)[0]


# --- where -------------------------------------------------------------------------------


def _sites(tree: ast.Module) -> Iterator[_Site]:
    for index, node in enumerate(tree.body):
        if not _left_alone(node):
            yield from _at(node, "module", node, tree, ("body", index))


def _at(
    node: ast.AST, function: str, whole: ast.stmt, parent: ast.AST, place: tuple[str, int | None]
) -> Iterator[_Site]:
    """The node, and all below it."""
    yield _Site(node, function, whole, parent, *place)
    inner = function
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inner = node.name if function == "module" else f"{function}.{node.name}"
    for name, value in ast.iter_fields(node):
        if name in _NOT_CODE and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not _left_alone(child):
                of_class = isinstance(node, ast.ClassDef) and isinstance(child, ast.stmt)
                owner = child if of_class else whole
                at = index if isinstance(value, list) else None
                yield from _at(child, inner, owner, node, (name, at))  # type: ignore[arg-type]


def _left_alone(node: ast.AST) -> bool:
    """Texts and imports; a text as a statement is a docstring."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# --- what --------------------------------------------------------------------------------


def _changes(site: _Site) -> Iterator[_Change]:
    node = site.node
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield _Change("drop a filter", _without_filter)


def _without_filter(node: ast.comprehension) -> ast.AST:
    node.ifs = []
    return node


def _of_statement(node: ast.stmt) -> Iterator[_Change]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield _Change("delete a statement", _nothing)
        case ast.Return(value=value) if value is not None:
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield _Change("return another value", _other_return)
        case ast.AugAssign():
            yield _Change("delete a statement", _nothing)
            if type(node.op) in _OPERATIONS:
                yield _Change("swap an operation", _other_operation)
        case ast.Assign(targets=targets):
            if any(isinstance(t, ast.Attribute | ast.Subscript) for t in targets):
                yield _Change("delete a statement", _nothing)
        case ast.If() | ast.While():
            yield _Change("negate a condition", _negated)
            if isinstance(node, ast.If) and not node.orelse:
                yield _Change("delete a statement", _nothing)


def _nothing(_: Any) -> None:
    return None


def _other_return(node: ast.Return) -> ast.AST:
    value = node.value
    if isinstance(value, ast.Compare | ast.BoolOp) or (
        isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    ):
        node.value = ast.UnaryOp(ast.Not(), value)
    else:
        node.value = ast.Constant(None)
    return node


def _other_operation(node: ast.AugAssign | ast.BinOp) -> ast.AST:
    node.op = _OPERATIONS[type(node.op)]()
    return node


def _negated(node: ast.If | ast.While | ast.IfExp) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _of_expression(node: ast.expr) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield _Change("flip a comparison", _comparison(i, _COMPARISONS[type(op)]))
        case ast.BinOp(op=op) if type(op) in _OPERATIONS:
            yield _Change("swap an operation", _other_operation)
        case ast.BoolOp(values=values):
            yield _Change("swap a connective", _other_connective)
            for i in range(len(values)):
                yield _Change("drop an operand", _without_operand(i))
        case ast.IfExp():
            yield _Change("negate a condition", _negated)
        case ast.Constant(value=bool()):
            yield _Change("flip a constant", lambda n: ast.Constant(not n.value))
        case ast.Constant(value=int()):
            yield _Change("off by one", lambda n: ast.Constant(n.value + 1))
        case ast.Call():
            yield from _of_call(node)


def _comparison(i: int, other: type[ast.cmpop]) -> Callable[[Any], ast.AST]:
    def change(node: ast.Compare) -> ast.AST:
        node.ops[i] = other()
        return node

    return change


def _other_connective(node: ast.BoolOp) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _without_operand(i: int) -> Callable[[Any], ast.AST]:
    def change(node: ast.BoolOp) -> ast.AST:
        rest = node.values[:i] + node.values[i + 1 :]
        return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)

    return change


def _of_call(node: ast.Call) -> Iterator[_Change]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _EXTREMES:
        yield _Change("swap an extreme", _renamed(_EXTREMES[name]))
    if name in _ORDERS:
        yield _Change("drop an order", _unordered)
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    if len(node.args) > 1 and not starred and name not in ("isinstance", "range", "max", "min"):
        yield _Change("swap arguments", _swapped)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield _Change("drop an argument", _without_keyword(i))


def _renamed(name: str) -> Callable[[Any], ast.AST]:
    def change(node: ast.Call) -> ast.AST:
        node.func = ast.Name(name, ast.Load())
        return node

    return change


def _unordered(node: ast.Call) -> ast.AST:
    return ast.Call(ast.Name("list", ast.Load()), node.args[:1], [])


def _swapped(node: ast.Call) -> ast.AST:
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return node


def _without_keyword(i: int) -> Callable[[Any], ast.AST]:
    def change(node: ast.Call) -> ast.AST:
        del node.keywords[i]
        return node

    return change
