"""A machine over a finite instance, compiled to Python: successors, invariants, step properties.

A state is a tuple of small integers, one slot for each symbol at each argument tuple.  Every
action is grounded over the instance, its terms unrolled and folded, and the whole successor
function generated as one piece of source, so that exploration runs no interpreter of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    BOOL,
    NUMERIC,
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

State = tuple[int, ...]
Ground = Mapping[Var, int]
Code = str | int
"""Source of an integer expression, or its value where that is known."""


@dataclass(frozen=True)
class Instance:
    """A machine and how large its world is.

    `sizes` gives the elements of each uninterpreted sort; `numbers` the values that integer
    parameters of actions range over; `rigid` fixes rigid symbols at argument tuples, what is
    not fixed there is free, and every combination is an initial state; `limits` are upper
    bounds on counters: steps that pass one lead outside the instance and are not taken;
    `choices` restricts parameters, by name, to some of their values.
    """

    machine: Machine
    sizes: Mapping[str, int]
    numbers: range = range(1, 3)
    rigid: Mapping[str, Mapping[tuple[int, ...], int]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    choices: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 0:
                raise BadOperation(f"size of {name} is negative: {size}")
        known = {sort.name for sort in self.machine.sorts}
        if missing := known - set(self.sizes):
            raise BadOperation(f"{self.machine.name} needs sizes of {', '.join(sorted(missing))}")

    def domain(self, sort: Sort) -> range:
        if sort == BOOL:
            return range(2)
        if sort in NUMERIC:
            return self.numbers
        return range(len(sort.values) or self.sizes[sort.name])

    def choice(self, param: Var) -> Sequence[int]:
        """The values that a parameter of an action ranges over."""
        return self.choices.get(param.name, self.domain(param.sort))

    def element(self, sort: Sort, index: int) -> str:
        """How an element is called in counterexamples and graphs."""
        if sort == BOOL:
            return str(bool(index)).lower()
        if sort in NUMERIC:
            return str(index)
        return sort.values[index] if sort.values else f"{sort.name.lower()}{index}"


@dataclass(frozen=True)
class GroundAction:
    """An action with its parameters filled in."""

    name: str
    args: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class Compiled:
    """The compiled instance.

    `successors(s)` lists `(index of the ground action, next state)` for every step that changes
    the state, `enabled(s)` the ground actions whose guards hold; `broken(s)` lists the
    invariants that fail in s, by index; `misstep(i, s, t)` the step properties that the step
    s → t by ground action i breaks.  `idle(s)` lists `(ground action, property)` for every step
    property that a step from s breaks which changes nothing: such a step is no transition.
    """

    instance: Instance
    slots: tuple[tuple[Symbol, tuple[int, ...]], ...]
    initial: tuple[State, ...]
    actions: tuple[GroundAction, ...]
    successors: Callable[[State], list[tuple[int, State]]]
    enabled: Callable[[State], list[int]]
    broken: Callable[[State], list[int]]
    misstep: Callable[[int, State, State], list[int]]
    idle: Callable[[State], list[tuple[int, int]]]

    def show(self, state: State) -> dict[str, str]:
        """The state as text: what is true, and counters that are not zero."""
        shown = {}
        for (symbol, args), number in zip(self.slots, state, strict=True):
            places = zip(symbol.domain, args, strict=True)
            names = ", ".join(self.instance.element(sort, arg) for sort, arg in places)
            shown[f"{symbol.name}({names})" if args else symbol.name] = self.instance.element(
                symbol.range, number
            )
        return shown | _viewed(self.instance, state)


def slots(instance: Instance) -> tuple[tuple[Symbol, tuple[int, ...]], ...]:
    """The slots of a state, as `compile_instance` has them: nothing is compiled here."""
    return tuple(_Compiler(instance).slots)


def initial_states(instance: Instance) -> tuple[State, ...]:
    """The initial states, as `compile_instance` has them: nothing else is compiled here."""
    return tuple(_Compiler(instance)._initial())


def compile_instance(instance: Instance) -> Compiled:
    return _Compiler(instance).compile()


def _viewed(instance: Instance, state: State) -> dict[str, str]:
    """What the views of the machine make of a state."""
    shown, compiler = {}, _Compiler(instance)
    for view in instance.machine.views:
        for values in product(*(instance.domain(v.sort) for v in view.places)):
            at = dict(zip(view.places, values, strict=True))
            value = compiler.value(view.term, at, state)
            names = ", ".join(instance.element(v.sort, value) for v, value in at.items())
            label = f"{view.name}({names})" if names else view.name
            shown[label] = instance.element(view.term.sort, value)
    return shown


def evaluator(
    instance: Instance, terms: Sequence[tuple[Term, Ground]]
) -> Callable[[State], Sequence[int]]:
    """The values of terms in a state; each comes with the values of its free variables."""
    compiler = _Compiler(instance)
    values = [f"int({compiler.code(term, ground)}), " for term, ground in terms]
    function: Callable[[State], Sequence[int]] = compiler._define(
        "values", "s", [compiler._unpack("v", "s"), f"return ({''.join(values)})"]
    )
    return function


class _Compiler:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.machine = instance.machine
        self.slots: list[tuple[Symbol, tuple[int, ...]]] = []
        self.index: dict[tuple[Symbol, tuple[int, ...]], int] = {}
        self.known: dict[tuple[Symbol, tuple[int, ...]], int] = {}
        for symbol in self.machine.symbols:
            fixed = instance.rigid.get(symbol.name, {})
            for args in product(*(instance.domain(sort) for sort in symbol.domain)):
                if args in fixed:
                    self.known[symbol, args] = fixed[args]
                else:
                    self.index[symbol, args] = len(self.slots)
                    self.slots.append((symbol, args))

    def compile(self) -> Compiled:
        machine = self.machine
        grounds = [
            (action, dict(zip(action.params, values, strict=True)))
            for action in machine.actions
            for values in product(*(self.instance.choice(p) for p in action.params))
        ]
        actions = []
        for action, ground in grounds:
            names = [self.instance.element(p.sort, v) for p, v in ground.items()]
            label = f"{action.name}({', '.join(names)})" if names else action.name
            actions.append(GroundAction(action.name, tuple(ground.values()), label))
        return Compiled(
            self.instance,
            tuple(self.slots),
            tuple(self._initial()),
            tuple(actions),
            self._define("successors", "s", self._successor_body(grounds)),
            self._define("enabled", "s", self._enabled_body(grounds)),
            self._define("broken", "s", self._broken_body()),
            self._misstep(grounds),
            self._define("idle", "s", self._idle_body(grounds)),
        )

    # -- terms

    def code(self, term: Term, ground: Ground, pre: str = "v", post: str = "w") -> Code:
        """Integer expression for `term`; state slot i is the local name `pre` + i."""

        def go(t: Term, g: Ground) -> Code:
            return self.code(t, g, pre, post)

        match term:
            case Var():
                return ground[term]
            case Lit(literal, _):
                return int(literal)
            case New(body):
                return self.code(body, ground, post, post)
            case App(symbol, args):
                place = tuple(go(arg, ground) for arg in args)
                return self._read(symbol, place, pre)
            case Op(kind, args):
                if kind in ("and", "or"):
                    return self._junction(kind, (go(a, ground) for a in args))
                return _operate(kind, [go(a, ground) for a in args])
            case Bind(kind, var, body):
                parts = (go(body, {**ground, var: v}) for v in self.instance.domain(var.sort))
                if kind == "total":
                    return _sum(parts)
                return self._junction("and" if kind == "every" else "or", parts)
        raise TypeError(f"not a term: {term!r}")

    def _read(self, symbol: Symbol, place: tuple[Code, ...], pre: str) -> Code:
        if all(isinstance(p, int) for p in place):
            return self._slot(symbol, place, pre)  # type: ignore[arg-type]
        raise TypeError(f"{symbol.name} is applied to a value that depends on the state")

    def _slot(self, symbol: Symbol, args: tuple[int, ...], pre: str) -> Code:
        if (symbol, args) in self.known:
            return self.known[symbol, args]
        return f"{pre}{self.index[symbol, args]}"

    @staticmethod
    def _junction(kind: str, parts: Iterator[Code]) -> Code:
        """Conjunction or disjunction, folded; stops at the first part that decides it."""
        decides = 0 if kind == "and" else 1
        kept = []
        for part in parts:
            if isinstance(part, int):
                if bool(part) == bool(decides):
                    return decides
            elif f"(not {part})" in kept or (part.startswith("(not ") and part[5:-1] in kept):
                return decides
            elif part not in kept:
                kept.append(part)
        if not kept:
            return 1 - decides
        return kept[0] if len(kept) == 1 else f"({f' {kind} '.join(kept)})"

    # -- functions

    def value(self, term: Term, ground: Ground, state: State) -> int:
        """What a term is in one state."""
        body = [self._unpack("v", "s"), f"return {self.code(term, ground)}"]
        return int(self._define("value", "s", body)(state))

    def _define(self, name: str, params: str, body: Sequence[str]) -> Any:
        source = "\n".join([f"def {name}({params}):", *("    " + line for line in body)])
        scope: dict[str, Any] = {}
        exec(compile(source, f"<{self.machine.name}.{name}>", "exec"), scope)
        return scope[name]

    def _unpack(self, prefix: str, source: str) -> str:
        names = "".join(f"{prefix}{i}, " for i in range(len(self.slots)))
        return f"[{names}] = {source}"

    def _successor_body(self, grounds: Sequence[tuple[Action, Ground]]) -> list[str]:
        lines = [self._unpack("v", "s"), "out = []"]
        for number, (action, ground) in enumerate(grounds):
            guard = self.code(action.enabled, ground)
            if guard == 0:
                continue
            changes = self._changes(action.updates, ground)
            if not changes:
                continue
            parts = [str(changes.get(i, f"v{i}")) for i in range(len(self.slots))]
            lines.append(f"if {guard}:")
            lines.append(f"    t = {_tuple(parts)}")
            limits = self._within(changes)
            lines.append(f"    if t != s{limits}: out.append(({number}, t))")
        lines.append("return out")
        return lines

    def _enabled_body(self, grounds: Sequence[tuple[Action, Ground]]) -> list[str]:
        lines = [self._unpack("v", "s"), "out = []"]
        for number, (action, ground) in enumerate(grounds):
            lines.append(f"if {self.code(action.enabled, ground)}: out.append({number})")
        return [*lines, "return out"]

    def _within(self, changes: Mapping[int, Code]) -> str:
        limited = (
            (i, self.instance.limits[self.slots[i][0].name])
            for i in changes
            if self.slots[i][0].name in self.instance.limits
        )
        return "".join(f" and t[{i}] <= {limit}" for i, limit in limited)

    def _changes(self, updates: Sequence[Update], ground: Ground) -> dict[int, Code]:
        """Slot → source of its value after the step, read in the state before it."""
        changes: dict[int, Code] = {}
        for update in updates:
            for values in product(*(self.instance.domain(v.sort) for v in update.over)):
                here = {**ground, **dict(zip(update.over, values, strict=True))}
                args = tuple(here[arg] for arg in update.target.args)  # type: ignore[index]
                slot = self.index[update.target.symbol, args]
                code = self.code(update.value, here)
                if code == f"v{slot}":
                    changes.pop(slot, None)
                else:
                    changes[slot] = (
                        f"int({code})"
                        if update.target.sort == BOOL and isinstance(code, str)
                        else code
                    )
        return changes

    def _broken_body(self) -> list[str]:
        lines = [self._unpack("v", "s"), "out = []"]
        for number, prop in enumerate(self.machine.properties):
            if not prop.of_steps:
                lines.append(f"if not {self.code(prop.formula, {})}: out.append({number})")
        return [*lines, "return out"]

    def _misstep(
        self, grounds: Sequence[tuple[Action, Ground]]
    ) -> Callable[[int, State, State], list[int]]:
        general = [
            (number, prop)
            for number, prop in enumerate(self.machine.properties)
            if prop.of_steps and prop.of_all
        ]
        anywhere = self._checker("anywhere", general, {})
        special = {}
        for number, (action, ground) in enumerate(grounds):
            own = [
                (i, p)
                for i, p in enumerate(self.machine.properties)
                if not p.of_all and p.speaks_of(action.name)
            ]
            if own:
                special[number] = self._checker(f"after_{number}", own, ground)

        def misstep(action: int, before: State, after: State) -> list[int]:
            found = list(anywhere(before, after))
            if action in special:
                found += special[action](before, after)
            return found

        return misstep

    def _idle_body(self, grounds: Sequence[tuple[Action, Ground]]) -> list[str]:
        """Properties that hold of every step that changes nothing fold away, guards unread."""
        lines = [self._unpack("v", "s"), "out = []"]
        for number, (action, ground) in enumerate(grounds):
            wrong = [
                (i, code)
                for i, prop in enumerate(self.machine.properties)
                if prop.of_steps and prop.speaks_of(action.name)
                and (code := self.code(prop.formula, ground if prop.on else {}, "v", "v")) != 1
            ]  # fmt: skip
            still = self._still(action, ground)
            if not wrong or still == 0:
                continue
            lines.append(f"if {still}:")
            lines += [f"    if not {code}: out.append(({number}, {i}))" for i, code in wrong]
        return [*lines, "return out"]

    def _still(self, action: Action, ground: Ground) -> Code:
        """Whether the action is enabled and changes nothing."""
        guard = self.code(action.enabled, ground)
        if guard == 0:
            return 0
        same = (
            _operate("eq", [new, f"v{i}"])
            for i, new in self._changes(action.updates, ground).items()
        )
        return self._junction("and", iter((guard, *same)))

    def _checker(
        self, name: str, props: Sequence[tuple[int, Property]], ground: Ground
    ) -> Callable[[State, State], list[int]]:
        lines = [self._unpack("v", "s"), self._unpack("w", "t"), "out = []"]
        for number, prop in props:
            code = self.code(prop.formula, ground)
            if code != 1:
                lines.append(f"if not {code}: out.append({number})")
        function: Callable[[State, State], list[int]] = self._define(
            name, "s, t", [*lines, "return out"]
        )
        return function

    def _initial(self) -> Iterator[State]:
        """Every valuation of the free rigid symbols that meets the axioms, and init on top."""
        rigid = [i for i, (symbol, _) in enumerate(self.slots) if symbol.rigid]
        domains = [self.instance.domain(self.slots[i][0].range) for i in rigid]
        axioms = self._define(
            "axioms",
            "s",
            [
                self._unpack("v", "s"),
                f"return {self._junction('and', (self.code(a, {}) for a in self.machine.axioms))}",
            ],
        )
        changes = self._changes(self.machine.init, {})
        parts = [str(changes.get(i, f"v{i}")) for i in range(len(self.slots))]
        start = self._define("start", "s", [self._unpack("v", "s"), f"return {_tuple(parts)}"])
        for values in product(*domains):
            blank = [0] * len(self.slots)
            for i, number in zip(rigid, values, strict=True):
                blank[i] = number
            state: State = start(tuple(blank))
            if axioms(state):
                yield state


def _tuple(parts: Sequence[str]) -> str:
    return f"({''.join(part + ', ' for part in parts)})"


def _sum(parts: Iterator[Code]) -> Code:
    known, kept = 0, []
    for part in parts:
        if isinstance(part, int):
            known += part
        else:
            kept.append(part)
    if not kept:
        return known
    return f"({' + '.join([*kept, *([str(known)] if known else [])])})"


def _operate(kind: str, args: list[Code]) -> Code:
    if kind == "ite":
        condition, then, otherwise = args
        if isinstance(condition, int):
            return then if condition else otherwise
        if then == otherwise:
            return then
        if (then, otherwise) == (1, 0):
            return f"(1 if {condition} else 0)"
        return f"({then} if {condition} else {otherwise})"
    if kind == "implies":
        return _Compiler._junction("or", iter((_operate("not", [args[0]]), args[1])))
    if all(isinstance(a, int) for a in args):
        return _FOLD[kind](*args)
    if kind == "not":
        return f"(not {args[0]})"
    if kind == "eq" and args[0] == args[1]:
        return 1
    return f"({args[0]} {_SIGN[kind]} {args[1]})"


_FOLD: dict[str, Callable[..., int]] = {
    "not": lambda a: int(not a),
    "eq": lambda a, b: int(a == b),
    "le": lambda a, b: int(a <= b),
    "lt": lambda a, b: int(a < b),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
}
_SIGN = {"eq": "==", "le": "<=", "lt": "<", "add": "+", "sub": "-"}
