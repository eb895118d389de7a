"""A small reader of TLA+ for the tests: another grammar, another evaluation, no TLC.

The text is parsed by `tree-sitter-tlaplus` (the community's grammar) and evaluated as written:
an initial state is any that satisfies `Init`, a step any assignment of the primed variables that
satisfies `Next`.  It reads what `kvclaims.checker.tla` writes, and raises on anything else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import tree_sitter
import tree_sitter_tlaplus

Scope = dict[str, Any]
State = tuple[Any, ...]

INFIX: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "neq": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "leq": lambda a, b: a <= b,
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "in": lambda a, b: a in b,
    "iff": lambda a, b: a == b,
    "setminus": lambda a, b: a - b,
    "times": lambda a, b: frozenset(product(a, b)),
}


_SILENT = {"comment", "block_comment", "bullet_conj", "bullet_disj", "all_map_to", "maps_to"}
_SILENT |= {"langle_bracket", "rangle_bracket", "set_in", "case_box", "case_arrow", "def_eq"}


class Node:
    """A node of the tree, read once: what it is, its text, and its children by field."""

    def __init__(self, node: tree_sitter.Node) -> None:
        assert node.text is not None
        self.type = node.type
        self.text = node.text.decode()
        self.children: list[Node] = []
        self.fields: dict[str, list[Node]] = {}
        for i, child in enumerate(node.children):
            if child.is_named:
                made = Node(child)
                self.children.append(made)
                if field := node.field_name_for_child(i):
                    self.fields.setdefault(field, []).append(made)
        self.parts = [child for child in self.children if child.type not in _SILENT]
        """The children that mean something: no brackets, bullets or comments."""


def parse(text: str) -> Node:
    """The module's tree.  Raises SyntaxError with the first place that is no TLA+."""
    with warnings.catch_warnings():  # the grammar hands its pointer over as older ones do
        warnings.simplefilter("ignore", DeprecationWarning)
        language = tree_sitter.Language(tree_sitter_tlaplus.language())
    root = tree_sitter.Parser(language).parse(text.encode()).root_node
    stack = [root]
    while stack:
        node = stack.pop()
        if node.type == "ERROR" or node.is_missing:
            row, column = node.start_point
            raise SyntaxError(f"line {row + 1}, column {column + 1}: {node.text!r:.80}")
        stack += node.children
    return Node(root)


def _all(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _all(child)


def _text(node: Node) -> str:
    return node.text


def _parts(node: Node) -> list[Node]:
    return node.parts


def _fields(node: Node, name: str) -> list[Node]:
    return node.fields.get(name, [])


def _field(node: Node, name: str) -> Node:
    (found,) = node.fields[name]
    return found


class Module:
    """A module with the constants of its configuration."""

    def __init__(self, text: str, config: str) -> None:
        root = parse(text)
        self.definitions: dict[str, tuple[list[str], Node]] = {}
        self.variables: list[str] = []
        self.constants: dict[str, Any] = {}
        (module,) = (part for part in root.parts if part.type == "module")
        for node in module.parts:
            if node.type == "operator_definition":
                names = [_text(p) for p in _fields(node, "parameter")]
                body = _field(node, "definition")
                self.definitions[_text(_field(node, "name"))] = (names, body)
            elif node.type == "variable_declaration":
                self.variables += [_text(c) for c in node.children if c.type == "identifier"]
        self.primed = {n: self._has_prime(body) for n, (_, body) in self.definitions.items()}
        self._configure(config)

    def _has_prime(self, node: Node) -> bool:
        return any(n.type in ("prime", "unchanged") for n in _all(node))

    def _configure(self, config: str) -> None:
        listed: dict[str, list[str]] = {}
        for line in config.splitlines():
            if not line.startswith(" "):
                words = line.split()
                listed.setdefault(words[0], []).extend(words[1:])
            elif match := re.fullmatch(r"\s+(\w+) = \{(.*)\}", line):
                items = [part.strip() for part in match[2].split(",") if part.strip()]
                values = (i.strip('"') if '"' in i else int(i) for i in items)
                self.constants[match[1]] = frozenset(values)
            elif match := re.fullmatch(r"\s+(\w+) <- (\w+)", line):
                self.constants[match[1]] = self.value(self.definitions[match[2]][1], {})
            else:
                listed[next(reversed(listed))].append(line.strip())
        self.invariants, self.properties = (
            listed.get("INVARIANTS", []),
            listed.get("PROPERTIES", []),
        )

    # -- values; `now` and `then` are the states that plain and primed variables are read in

    def value(
        self, node: Node, scope: Scope, now: Scope | None = None, then: Scope | None = None
    ) -> Any:
        method = getattr(self, f"_{node.type}", None)
        if method is None:
            raise NotImplementedError(f"{node.type}: {_text(node)[:80]}")
        return method(node, scope, now or {}, then)

    def _identifier_ref(self, node: Node, scope: Scope, now: Scope, then: Scope | None) -> Any:
        name = _text(node)
        for names in (scope, now, self.constants):
            if name in names:
                return names[name]
        return self.value(self.definitions[name][1], {}, now, then)

    def _nat_number(self, node: Node, *_: Any) -> int:
        return int(_text(node))

    def _string(self, node: Node, *_: Any) -> str:
        return _text(node).strip('"')

    def _boolean(self, node: Node, *_: Any) -> bool:
        return _text(node) == "TRUE"

    def _boolean_set(self, *_: Any) -> frozenset[bool]:
        return frozenset((False, True))

    def _parentheses(self, node: Node, *states: Any) -> Any:
        return self.value(_parts(node)[0], *states)

    _conj_item = _disj_item = _parentheses

    def _conj_list(self, node: Node, *states: Any) -> bool:
        return all(self.value(part, *states) for part in _parts(node))

    def _disj_list(self, node: Node, *states: Any) -> bool:
        return any(self.value(part, *states) for part in _parts(node))

    def _bound_infix_op(self, node: Node, *states: Any) -> Any:
        kind = _field(node, "symbol").type
        a, b = _field(node, "lhs"), _field(node, "rhs")
        if kind == "land":
            return self.value(a, *states) and self.value(b, *states)
        if kind == "lor":
            return self.value(a, *states) or self.value(b, *states)
        if kind == "implies":
            return not self.value(a, *states) or self.value(b, *states)
        return INFIX[kind](self.value(a, *states), self.value(b, *states))

    def _bound_prefix_op(self, node: Node, scope: Scope, now: Scope, then: Scope | None) -> Any:
        kind, right = _field(node, "symbol").type, _field(node, "rhs")
        if kind == "lnot":
            return not self.value(right, scope, now, then)
        if kind == "unchanged":
            assert then is not None
            return all(now[_text(name)] == then[_text(name)] for name in _parts(right))
        raise NotImplementedError(kind)

    def _bound_postfix_op(self, node: Node, scope: Scope, _now: Scope, then: Scope | None) -> Any:
        assert _field(node, "symbol").type == "prime"
        assert then is not None, "a primed variable that is not assigned yet"
        return self.value(_field(node, "lhs"), scope, then, None)

    def _bounds(self, bounds: list[Node], *states: Any) -> Iterator[Scope]:
        names, sets = [], []
        for bound in bounds:
            names.append(_text(_field(bound, "intro")))
            sets.append(sorted(self.value(_field(bound, "set"), *states), key=repr))
        for values in product(*sets):
            yield dict(zip(names, values, strict=True))

    def _bounded_quantification(self, node: Node, scope: Scope, *states: Any) -> bool:
        every = _field(node, "quantifier").type == "forall"
        body = _field(node, "expression")
        bounds = _fields(node, "bound")
        holds = (
            self.value(body, {**scope, **b}, *states) for b in self._bounds(bounds, scope, *states)
        )
        return all(holds) if every else any(holds)

    def _function_literal(self, node: Node, scope: Scope, *states: Any) -> dict[Any, Any]:
        *bounds, body = _parts(node)
        found = {}
        for bound in self._bounds(bounds, scope, *states):
            key = tuple(bound.values())
            found[key if len(key) > 1 else key[0]] = self.value(body, {**scope, **bound}, *states)
        return found

    def _function_evaluation(self, node: Node, *states: Any) -> Any:
        function, *args = _parts(node)
        key = tuple(self.value(arg, *states) for arg in args)
        return self.value(function, *states)[key if len(key) > 1 else key[0]]

    def _set_of_functions(self, node: Node, *states: Any) -> list[dict[Any, Any]]:
        domain, values = (self.value(part, *states) for part in _parts(node))
        keys = sorted(domain, key=repr)
        return [dict(zip(keys, v, strict=True)) for v in product(sorted(values), repeat=len(keys))]

    def _except(self, node: Node, *states: Any) -> dict[Any, Any]:
        found = dict(self.value(_field(node, "expr_to_update"), *states))
        for update in (part for part in node.children if part.type == "except_update"):
            places = [n for n in _all(update) if n.type == "except_update_fn_appl"]
            key = tuple(self.value(arg, *states) for arg in _parts(places[0]))
            assert (key if len(key) > 1 else key[0]) in found
            value = self.value(_field(update, "new_val"), *states)
            found[key if len(key) > 1 else key[0]] = value
        return found

    def _finite_set_literal(self, node: Node, *states: Any) -> frozenset[Any]:
        return frozenset(self.value(part, *states) for part in _parts(node))

    def _set_filter(self, node: Node, scope: Scope, *states: Any) -> frozenset[Any]:
        bounds = _fields(node, "generator")
        body = _field(node, "filter")
        kept = (
            b
            for b in self._bounds(bounds, scope, *states)
            if self.value(body, {**scope, **b}, *states)
        )
        return frozenset(next(iter(b.values())) for b in kept)

    def _tuple_literal(self, node: Node, *states: Any) -> tuple[Any, ...]:
        return tuple(self.value(part, *states) for part in _parts(node))

    def _if_then_else(self, node: Node, *states: Any) -> Any:
        chosen = "then" if self.value(_field(node, "if"), *states) else "else"
        return self.value(_field(node, chosen), *states)

    def _case(self, node: Node, *states: Any) -> Any:
        for arm in (part for part in node.children if part.type == "case_arm"):
            condition, value = _parts(arm)
            if self.value(condition, *states):
                return self.value(value, *states)
        raise ValueError(f"no case applies: {_text(node)[:80]}")

    def _let_in(self, node: Node, scope: Scope, *states: Any) -> Any:
        inner = dict(scope)
        for definition in _fields(node, "definitions"):
            if definition.type == "operator_definition":
                body = _field(definition, "definition")
                inner[_text(_field(definition, "name"))] = self.value(body, inner, *states)
        return self.value(_field(node, "expression"), inner, *states)

    def _choose(self, node: Node, scope: Scope, *states: Any) -> Any:
        name = _text(_field(node, "intro"))
        for value in sorted(self.value(_field(node, "set"), scope, *states), key=repr):
            if self.value(_field(node, "expression"), {**scope, name: value}, *states):
                return value
        raise ValueError(f"nothing to choose: {_text(node)[:80]}")

    def _bound_op(self, node: Node, *states: Any) -> Any:
        name = _text(_field(node, "name"))
        args = [self.value(arg, *states) for arg in _fields(node, "parameter")]
        if name == "Cardinality":
            return len(args[0])
        names, body = self.definitions[name]
        return self.value(body, dict(zip(names, args, strict=True)), *states[1:])

    # -- behaviours

    def initial(self) -> list[State]:
        """The states that `Init` describes."""
        states = self._assign(self.definitions["Init"][1], {}, {}, {}, "now")
        return [self._frozen(state) for state in states]

    def successors(self, state: State) -> set[State]:
        """The states that a step leads to; not the state itself."""
        now = self._thawed(state)
        after = self._assign(self.definitions["Next"][1], {}, now, {}, "then")
        return {self._frozen(then) for then in after} - {state}

    def _assign(
        self, node: Node, scope: Scope, now: Scope, made: Scope, which: str
    ) -> Iterator[Scope]:
        """Every way to assign variables so that the formula holds, parts from left to right."""
        kind = node.type
        if kind in ("parentheses", "conj_item", "disj_item"):
            yield from self._assign(_parts(node)[0], scope, now, made, which)
        elif kind == "conj_list":
            yield from self._in_turn(_parts(node), scope, now, made, which)
        elif kind == "disj_list":
            for part in _parts(node):
                yield from self._assign(part, scope, now, dict(made), which)
        elif which == "then" and not self._speaks_of_next(node):
            if self.value(node, scope, now):
                yield made
        elif kind == "bounded_quantification" and _field(node, "quantifier").type == "exists":
            for bound in self._bounds(_fields(node, "bound"), scope, now):
                inner = {**scope, **bound}
                yield from self._assign(_field(node, "expression"), inner, now, dict(made), which)
        elif kind in ("bound_op", "identifier_ref"):
            name = _text(_field(node, "name")) if kind == "bound_op" else _text(node)
            args = _fields(node, "parameter") if kind == "bound_op" else []
            names, body = self.definitions[name]
            values = [self.value(arg, scope, now) for arg in args]
            inner = dict(zip(names, values, strict=True))
            yield from self._assign(body, inner, now, made, which)
        else:
            yield from self._one(node, scope, now, made, which)

    def _in_turn(
        self, parts: list[Node], scope: Scope, now: Scope, made: Scope, which: str
    ) -> Iterator[Scope]:
        if not parts:
            yield made
            return
        for first in self._assign(parts[0], scope, now, made, which):
            yield from self._in_turn(parts[1:], scope, now, first, which)

    def _one(
        self, node: Node, scope: Scope, now: Scope, made: Scope, which: str
    ) -> Iterator[Scope]:
        """`x = e`, `x \\in S`, `UNCHANGED`, or a condition on what was assigned."""
        if node.type == "bound_prefix_op" and _field(node, "symbol").type == "unchanged":
            names = [_text(name) for name in _parts(_field(node, "rhs"))]
            yield {**made, **{name: now[name] for name in names}}
            return
        target = self._target(node, which)
        read = made if which == "now" else now
        if target is not None and target not in made:
            value = self.value(_field(node, "rhs"), scope, read, made)
            values = value if _field(node, "symbol").type == "in" else [value]
            for each in values:
                yield {**made, target: each}
        elif self.value(node, scope, read, made):
            yield made

    def _target(self, node: Node, which: str) -> str | None:
        if node.type != "bound_infix_op" or _field(node, "symbol").type not in ("eq", "in"):
            return None
        left = _field(node, "lhs")
        if which == "then":
            if left.type != "bound_postfix_op":
                return None
            left = _field(left, "lhs")
        name = _text(left)
        return name if left.type == "identifier_ref" and name in self.variables else None

    def _speaks_of_next(self, node: Node) -> bool:
        return any(
            n.type in ("prime", "unchanged")
            or (n.type == "identifier_ref" and self.primed.get(_text(n), False))
            for n in _all(node)
        )

    def _frozen(self, state: Mapping[str, Any]) -> State:
        assert set(state) == set(self.variables), set(self.variables) ^ set(state)
        return tuple(
            tuple(value.items()) if isinstance(value, dict) else value
            for value in (state[name] for name in self.variables)
        )

    def _thawed(self, state: State) -> Scope:
        return {
            name: dict(value) if isinstance(value, tuple) else value
            for name, value in zip(self.variables, state, strict=True)
        }

    # -- properties

    def broken(self, state: State) -> list[str]:
        """The invariants that do not hold in the state."""
        now = self._thawed(state)
        return [n for n in self.invariants if not self.value(self.definitions[n][1], {}, now)]

    def misstep(self, before: State, after: State) -> list[str]:
        """The action properties that the step breaks."""
        now, then = self._thawed(before), self._thawed(after)
        found = []
        for name in self.properties:
            box = _field(self.definitions[name][1], "rhs")
            assert box.type == "step_expr_or_stutter"
            if not self.value(_parts(box)[0], {}, now, then):
                found.append(name)
        return found


def reachable(module: Module, check: bool = False) -> tuple[set[State], set[str]]:
    """The reachable states, and with `check` the properties that some state or step breaks."""
    seen = set(module.initial())
    wrong: set[str] = set()
    stack = list(seen)
    while stack:
        state = stack.pop()
        if check:
            wrong.update(module.broken(state))
        for after in module.successors(state):
            if check:
                wrong.update(module.misstep(state, after))
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen, wrong
