"""A finite instance as one SMT-LIB file: sums exact, every step a query of its own.

Where the proofs of `checker.induction` take sums as ghost integers of which only some facts are
used, this file spells them out over the instance's elements.  Its first query asks for an initial
state that breaks an invariant, each other one for a state that keeps them all and a step that
breaks one, or a property of steps.  Every answer should be `unsat`; any solver can be asked.
A counter outside the bounds that the invariants imply breaks one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvclaims.checker.finite import Instance, State, initial_states
from kvclaims.checker.grounded import Grounded, Node, Step, Value, ground

SIGNS: Final = {"and": "and", "or": "or", "le": "<=", "eq": "="}


def smt_of_instance(instance: Instance) -> str:
    """The file's text.  Raises BadOperation where a counter of the machine has no bounds."""
    grounded = ground(instance)
    return "\n".join(_lines(grounded, initial_states(instance))) + "\n"


def queries(instance: Instance) -> int:
    """How many answers a solver gives to the file of the instance."""
    return 1 + len(ground(instance).steps)


def _lines(grounded: Grounded, initial: Sequence[State]) -> Iterator[str]:
    machine = grounded.instance.machine
    yield f"; {machine.name}: {machine.meaning}"
    yield "; one answer for the initial states and one for each step; each should be unsat"
    yield "(set-logic QF_LIA)"
    for i, slot in enumerate(grounded.slots):
        yield f"(declare-const s{i} Int) ; {slot.name}"
    names = [f"(s{i} Int)" for i in range(len(grounded.slots))]
    bounds = [f"(<= {slot.lo} s{i} {slot.hi})" for i, slot in enumerate(grounded.slots)]
    yield f"(define-fun sound ({' '.join(names)}) Bool {_let(grounded, grounded.invariant)})"
    here = " ".join(f"s{i}" for i in range(len(grounded.slots)))
    yield f"(define-fun bounded () Bool (and {' '.join(bounds)} true))"
    yield "; initially"
    yield "(push 1)"
    starts = " ".join(
        f"(and {' '.join(f'(= s{i} {_number(v)})' for i, v in enumerate(state))} true)"
        for state in initial
    )
    yield f"(assert (or {starts} false))"
    yield f"(assert (not (and bounded {_sound(here)})))"
    yield "(check-sat)"
    yield "(pop 1)"
    yield f"(assert (and bounded {_sound(here)}))"
    for step in grounded.steps:
        yield from _step(grounded, step)


def _sound(args: str) -> str:
    return f"(sound {args})" if args else "sound"


def _step(grounded: Grounded, step: Step) -> Iterator[str]:
    after = [f"s{i}" for i in range(len(grounded.slots))]
    yield f"; {step.action}"
    yield "(push 1)"
    yield f"(assert {_let(grounded, step.guard)})"
    for slot, value in step.changes:
        after[slot] = f"t{slot}"
        yield f"(define-fun t{slot} () Int {_let(grounded, value, number=True)})"
    inside, kept = _let(grounded, step.inside), _let(grounded, step.kept)
    yield f"(assert (not (and {inside} {kept} {_sound(' '.join(after))})))"
    yield "(check-sat)"
    yield "(pop 1)"


def _let(grounded: Grounded, value: Value, number: bool = False) -> str:
    """The expression with each shared node named once, innermost last."""
    if isinstance(value, int):
        return _number(value) if number else ("true" if value else "false")
    order = [node for node in _inside_out(value) if node.kind != "slot"]
    text = _name(value)
    for node in reversed(order):
        text = f"(let (({_name(node)} {_write(grounded, node)})) {text})"
    return _as_number(value, text) if number else text


def _inside_out(top: Node) -> list[Node]:
    """The nodes below `top` and itself, each after those that it is made of."""
    order: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(top, False)]
    while stack:
        node, ready = stack.pop()
        if node in order:
            continue
        if ready:
            order[node] = None
            continue
        stack.append((node, True))
        stack += [(child, False) for child in _parts(node)]
    return list(order)


def _parts(node: Node) -> Iterator[Node]:
    for arg in node.args:
        pair = arg if isinstance(arg, tuple) else (arg,)
        yield from (part for part in pair if isinstance(part, Node))


def _name(node: Node) -> str:
    return f"s{node.args[0]}" if node.kind == "slot" else f"e{node.number}"


def _number(value: int) -> str:
    return str(value) if value >= 0 else f"(- {-value})"


def _as_number(node: Node, text: str) -> str:
    return f"(ite {text} 1 0)" if node.truth else text


def _int(value: Value) -> str:
    return _number(value) if isinstance(value, int) else _as_number(value, _name(value))


def _bool(value: Value) -> str:
    return ("true" if value else "false") if isinstance(value, int) else _name(value)


def _write(grounded: Grounded, node: Node) -> str:
    args: Any = node.args
    match node.kind:
        case "in":
            slot, values = args
            domain = grounded.slots[slot]
            places = [domain.lo + p for p in range(domain.size) if values >> p & 1]
            return f"(or {' '.join(f'(= s{slot} {_number(v)})' for v in places)} false)"
        case "not":
            return f"(not {_bool(args[0])})"
        case "and" | "or":
            return f"({SIGNS[node.kind]} {' '.join(map(_bool, args))})"
        case "sum":
            terms = (f"(* {_number(factor)} {_int(part)})" for factor, part in args)
            return f"(+ {' '.join(terms)} 0)"
        case "plus":
            return f"(+ {_int(args[0])} {_number(args[1])})"
        case "le" | "eq":
            return f"({SIGNS[node.kind]} {_int(args[0])} {_number(args[1])})"
        case "if":
            return f"(ite {_bool(args[0])} {_int(args[1])} {_int(args[2])})"
    raise TypeError(f"not a node: {node!r}")
