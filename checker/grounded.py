"""A finite instance as folded expressions over bounded slots: what the fast engines start from.

`ground(instance)` fills every action's parameters in, unrolls quantifiers and sums, and folds
what is known, as `checker.finite` does for Python, but to shared expression nodes that can be
written out as machine code (`checker.native`), decision diagrams (`checker.symbolic`) or
Promela (`checker.promela`).

Every slot has a finite domain.  Truth values and enumerated sorts have their own; a counter's
bounds are what the machine's invariants and the instance's `limits` imply, found by narrowing
intervals until nothing changes, and where that is not enough what steps can write at all.  A
state outside such a box breaks an invariant, shown here or given, so a search that checks
invariants loses nothing; whoever reads a `Step` must still heed `inside`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from kvclaims.checker.finite import Instance, State, initial_states
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    BOOL,
    NAT,
    NUMERIC,
    Action,
    App,
    Bind,
    Lit,
    New,
    Op,
    Symbol,
    Term,
    Update,
    Var,
)

Place = tuple[Symbol, tuple[int, ...]]
Ground = Mapping[Var, int]


@dataclass(frozen=True, eq=False)
class Node:
    """An expression that depends on the state; equal expressions are one object.

    kind   args                         value
    slot   (slot,)                      the slot's value
    in     (slot, set)                  whether the slot's value is in the set (a bit set of
                                        distances from the domain's lower bound)
    not    (node,)
    and, or  nodes
    sum    (factor, node), …            the sum of the products
    le, eq   (node, constant)           node ≤ constant, node = constant
    if     (condition, then, otherwise) numbers
    """

    kind: str
    args: tuple[object, ...]
    lo: int
    hi: int
    number: int

    @property
    def truth(self) -> bool:
        return self.kind in _TRUTHS


Value = Node | int
"""An expression, or its value where that is known; truth is 0 or 1."""

_TRUTHS: Final = frozenset({"in", "not", "and", "or", "le", "eq"})


@dataclass(frozen=True)
class Slot:
    """One place of the state with its domain `lo … hi`."""

    symbol: Symbol
    args: tuple[int, ...]
    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi - self.lo + 1

    @property
    def name(self) -> str:
        return f"{self.symbol.name}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Step:
    """A ground action: where `guard` holds it changes the state and stays within the limits.

    `changes` are the new values, read before the step, and `shifts` new less old.  `inside`
    says that they stay in their domains and `kept` that no property of steps is broken.
    `number` is the ground action's position in `checker.finite`.
    """

    number: int
    action: str
    guard: Value
    changes: tuple[tuple[int, Value], ...]
    shifts: tuple[tuple[int, Value], ...]
    inside: Value
    kept: Value


@dataclass(frozen=True)
class Grounded:
    instance: Instance
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    invariant: Value
    """All invariants together, in a state inside its domains."""
    idle: Value
    """That no step which changes nothing breaks a property of steps; it is no transition."""


Box = tuple[int, ...]
"""For each slot the set of values that it may have, as a bit set."""


class Nodes:
    """Makes folded expressions over slots with the domains `bounds`."""

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = tuple(bounds)
        self.box: Box = tuple((1 << (hi - lo + 1)) - 1 for lo, hi in bounds)
        self._made: dict[tuple[object, ...], Node] = {}

    def _node(self, kind: str, args: tuple[object, ...], lo: int, hi: int) -> Node:
        key = (kind, lo, hi, *args)
        node = self._made.get(key)
        if node is None:
            node = self._made[key] = Node(kind, args, lo, hi, len(self._made))
        return node

    def slot(self, slot: int, box: Box) -> Value:
        """The slot's value, where the state is known to be in `box`."""
        low = self.bounds[slot][0]
        lo, hi = low + _lowest(box[slot]), low + box[slot].bit_length() - 1
        return lo if lo == hi else self._node("slot", (slot,), lo, hi)

    def flag(self, slot: int, box: Box) -> Value:
        """Whether a Boolean slot is true, also where its domain leaves it no choice."""
        return self.member(slot, 2 >> self.bounds[slot][0], box)

    def member(self, slot: int, values: int, box: Box) -> Value:
        """Whether the slot has one of these values, a bit set that begins with its lowest."""
        values &= box[slot]
        if values == box[slot]:
            return 1
        return self._node("in", (slot, values), 0, 1) if values else 0

    def negation(self, a: Value) -> Value:
        if isinstance(a, int):
            return int(not a)
        if a.kind == "not":
            return a.args[0]  # type: ignore[return-value]
        if a.kind == "in":
            slot, values = _membership(a)
            return self.member(slot, self.box[slot] & ~values, self.box)
        return self._node("not", (a,), 0, 1)

    def junction(self, kind: str, parts: Iterable[Value], box: Box | None = None) -> Value:
        """All of the parts, or one of them, where the state is known to be in `box`."""
        box = box or self.box
        decides = int(kind == "or")
        kept: dict[Node, None] = {}
        sets: dict[int, int] = {}
        for part in parts:
            if isinstance(part, int):
                if bool(part) == bool(decides):
                    return decides
                continue
            for piece in part.args if part.kind == kind else (part,):
                assert isinstance(piece, Node)
                if piece.kind == "in":
                    slot, values = _membership(piece)
                    known = sets.get(slot, 0 if decides else box[slot])
                    sets[slot] = known | values if decides else known & values
                else:
                    kept[piece] = None
        members = []
        for slot, values in sets.items():
            member = self.member(slot, values, box)
            if isinstance(member, Node):
                members.append(member)
            elif member == decides:
                return decides
        whole = (*members, *kept)
        if any(part.kind == "not" and part.args[0] in whole for part in kept):
            return decides
        if not whole:
            return 1 - decides
        return whole[0] if len(whole) == 1 else self._node(kind, whole, 0, 1)

    def sum(self, parts: Iterable[tuple[int, Value]]) -> tuple[Value, int]:
        """The sum as one node without its constant part, and that constant."""
        constant = 0
        factors: dict[Node, int] = {}
        stack = list(parts)
        while stack:
            factor, part = stack.pop()
            if isinstance(part, int):
                constant += factor * part
            elif part.kind == "sum":
                stack += [(factor * f, p) for f, p in _terms(part)]
            elif part.kind == "plus":
                base, more = part.args
                stack += [(factor, base), (factor, more)]  # type: ignore[list-item]
            else:
                factors[part] = factors.get(part, 0) + factor
        terms = sorted(((f, p) for p, f in factors.items() if f), key=lambda t: t[1].number)
        if not terms:
            return 0, constant
        if len(terms) == 1 and terms[0][0] == 1:
            return terms[0][1], constant
        lo = sum(f * (p.lo if f > 0 else p.hi) for f, p in terms)
        hi = sum(f * (p.hi if f > 0 else p.lo) for f, p in terms)
        return self._node("sum", tuple(terms), lo, hi), constant

    def total(self, parts: Iterable[tuple[int, Value]]) -> Value:
        node, constant = self.sum(parts)
        if isinstance(node, int):
            return constant
        if not constant:
            return node
        return self._node("plus", (node, constant), node.lo + constant, node.hi + constant)

    def compare(self, kind: str, a: Value, b: Value, box: Box) -> Value:
        """`a` kind `b` for kind le or eq."""
        node, constant = self.sum([(1, a), (-1, b)])
        if isinstance(node, int):
            return int(constant <= 0 if kind == "le" else constant == 0)
        bound = -constant
        if kind == "le":
            if node.hi <= bound:
                return 1
            if node.lo > bound:
                return 0
        elif not node.lo <= bound <= node.hi:
            return 0
        if node.kind == "slot":
            return self._on_slot(kind, node, bound, box)
        if node.truth:
            return node if kind == "eq" and bound == 1 else self.negation(node)
        return self._node(kind, (node, bound), 0, 1)

    def _on_slot(self, kind: str, node: Node, bound: int, box: Box) -> Value:
        slot = node.args[0]
        assert isinstance(slot, int)
        place = bound - self.bounds[slot][0]
        values = 1 << place if kind == "eq" else (1 << (place + 1)) - 1
        return self.member(slot, values, box)

    def choose(self, condition: Value, then: Value, otherwise: Value) -> Value:
        if isinstance(condition, int):
            return then if condition else otherwise
        if then is otherwise or then == otherwise:
            return then
        if isinstance(then, int) and isinstance(otherwise, int):
            return self.total([(then - otherwise, condition), (1, otherwise)])
        lo = min(_low(then), _low(otherwise))
        hi = max(_high(then), _high(otherwise))
        return self._node("if", (condition, then, otherwise), lo, hi)

    # -- what a condition says about the slots

    def narrow(self, node: Value, holds: bool, box: Box) -> Box | None:
        """A box around the states of `box` where `node` is `holds`; None if there are none."""
        if isinstance(node, int):
            return box if bool(node) == holds else None
        match node.kind:
            case "not":
                return self.narrow(node.args[0], not holds, box)  # type: ignore[arg-type]
            case "in":
                slot, values = _membership(node)
                return _restrict(box, slot, values if holds else ~values)
            case "and" | "or" if (node.kind == "and") == holds:
                return self._narrow_all(node, holds, box)
            case "and" | "or":
                parts = (self.narrow(p, holds, box) for p in node.args)  # type: ignore[arg-type]
                return _join([part for part in parts if part is not None])
            case "le":
                of, bound = node.args
                assert isinstance(of, Node)
                assert isinstance(bound, int)
                return self._within(of, None if holds else bound + 1, bound if holds else None, box)
            case "eq" if holds:
                of, bound = node.args
                assert isinstance(of, Node)
                assert isinstance(bound, int)
                return self._within(of, bound, bound, box)
        return box

    def _narrow_all(self, node: Node, holds: bool, box: Box) -> Box | None:
        for part in node.args:
            found = self.narrow(part, holds, box)  # type: ignore[arg-type]
            if found is None:
                return None
            box = found
        return box

    def _within(self, node: Value, lo: int | None, hi: int | None, box: Box) -> Box | None:
        """A box around the states of `box` where `node` lies between `lo` and `hi`."""
        low, high = self.range(node, box)
        if (hi is not None and low > hi) or (lo is not None and high < lo):
            return None
        if isinstance(node, int):
            return box
        if node.kind == "slot":
            return self._slot_within(node, lo, hi, box)
        if node.truth and (hi == 0 or lo == 1):
            return self.narrow(node, lo == 1, box)
        if node.kind == "sum":
            return self._sum_within(_terms(node), lo, hi, box)
        return box

    def _slot_within(self, node: Node, lo: int | None, hi: int | None, box: Box) -> Box | None:
        slot = node.args[0]
        assert isinstance(slot, int)
        base = self.bounds[slot][0]
        values = box[slot]
        if hi is not None:
            values &= (1 << max(hi - base + 1, 0)) - 1
        if lo is not None:
            values &= ~((1 << max(lo - base, 0)) - 1)
        return _restrict(box, slot, values)

    def _sum_within(
        self, terms: Sequence[tuple[int, Node]], lo: int | None, hi: int | None, box: Box
    ) -> Box | None:
        ranges = [_scale(f, self.range(p, box)) for f, p in terms]
        least, most = sum(r[0] for r in ranges), sum(r[1] for r in ranges)
        for (factor, part), (low, high) in zip(terms, ranges, strict=True):
            up = None if hi is None else hi - (least - low)
            down = None if lo is None else lo - (most - high)
            if factor < 0:
                up, down = down, up
            found = self._within(
                part,
                None if down is None else -(-down // factor),
                None if up is None else up // factor,
                box,
            )
            if found is None:
                return None
            box = found
        return box

    def range(self, node: Value, box: Box) -> tuple[int, int]:
        """Between what the value lies in the states of `box`."""
        if isinstance(node, int):
            return node, node
        match node.kind:
            case "slot":
                slot = node.args[0]
                assert isinstance(slot, int)
                base = self.bounds[slot][0]
                return base + _lowest(box[slot]), base + box[slot].bit_length() - 1
            case "in":
                slot, values = _membership(node)
                return int(not box[slot] & ~values), int(bool(box[slot] & values))
            case "sum":
                ranges = [_scale(f, self.range(p, box)) for f, p in _terms(node)]
                return sum(r[0] for r in ranges), sum(r[1] for r in ranges)
            case "plus":
                of, constant = node.args
                assert isinstance(of, Node)
                assert isinstance(constant, int)
                low, high = self.range(of, box)
                return low + constant, high + constant
            case "if":
                _, then, otherwise = node.args
                one = self.range(then, box)  # type: ignore[arg-type]
                two = self.range(otherwise, box)  # type: ignore[arg-type]
                return min(one[0], two[0]), max(one[1], two[1])
        return node.lo, node.hi


def _terms(node: Node) -> tuple[tuple[int, Node], ...]:
    return node.args  # type: ignore[return-value]


def _membership(node: Node) -> tuple[int, int]:
    return node.args  # type: ignore[return-value]


def _lowest(values: int) -> int:
    return (values & -values).bit_length() - 1


def _between(first: int, last: int) -> int:
    """The bit set of the places first … last, as far as they are not negative."""
    return max((1 << max(last + 1, 0)) - (1 << max(first, 0)), 0)


def _low(value: Value) -> int:
    return value if isinstance(value, int) else value.lo


def _high(value: Value) -> int:
    return value if isinstance(value, int) else value.hi


def _scale(factor: int, bounds: tuple[int, int]) -> tuple[int, int]:
    low, high = factor * bounds[0], factor * bounds[1]
    return (low, high) if factor > 0 else (high, low)


def _restrict(box: Box, slot: int, values: int) -> Box | None:
    kept = box[slot] & values
    if kept == box[slot]:
        return box
    return (*box[:slot], kept, *box[slot + 1 :]) if kept else None


def _join(boxes: Sequence[Box]) -> Box | None:
    if not boxes:
        return None
    if len(boxes) == 1:
        return boxes[0]
    joined = list(boxes[0])
    for box in boxes[1:]:
        joined = [a | b for a, b in zip(joined, box, strict=True)]
    return tuple(joined)


# --- reading terms -----------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """A state to read terms in: changed slots by their new value, the others in `box`."""

    box: Box
    changed: Mapping[int, Value]


class _Reader:
    """Unrolls the terms of an instance to nodes.

    Symbols and slots stand in the same order as in `checker.finite`, so that states mean the
    same in both.
    """

    def __init__(self, instance: Instance, given: Mapping[str, tuple[int, int]]) -> None:
        self.instance = instance
        self.machine = instance.machine
        self.given = given
        self.places: list[Place] = []
        self.index: dict[Place, int] = {}
        self.known: dict[Place, int] = {}
        for symbol in self.machine.symbols:
            fixed = instance.rigid.get(symbol.name, {})
            for args in product(*(instance.domain(sort) for sort in symbol.domain)):
                if args in fixed:
                    self.known[symbol, args] = fixed[args]
                else:
                    self.index[symbol, args] = len(self.places)
                    self.places.append((symbol, args))
        self.nodes = Nodes([])

    def value(self, term: Term, ground: Ground, at: _View, after: _View | None = None) -> Value:
        nodes = self.nodes
        match term:
            case Var():
                return ground[term]
            case Lit(literal, _):
                return int(literal)
            case New(body):
                assert after is not None
                return self.value(body, ground, after)
            case App(symbol, args):
                place = tuple(self.value(arg, ground, at, after) for arg in args)
                return self._read(symbol, place, at)
            case Op("implies", (a, b)):
                left = self.value(a, ground, at, after)
                if left == 0:
                    return 1
                return nodes.junction(
                    "or", (nodes.negation(left), self.value(b, ground, at, after)), at.box
                )
            case Op("and" | "or" as kind, args):
                return nodes.junction(
                    kind, (self.value(a, ground, at, after) for a in args), at.box
                )
            case Op(kind, args):
                return self._operate(kind, [self.value(a, ground, at, after) for a in args], at)
            case Bind(kind, var, body):
                parts = (
                    self.value(body, {**ground, var: v}, at, after)
                    for v in self.instance.domain(var.sort)
                )
                if kind == "total":
                    return nodes.total((1, part) for part in parts)
                return nodes.junction("and" if kind == "every" else "or", parts, at.box)
        raise TypeError(f"not a term: {term!r}")

    def _operate(self, kind: str, args: list[Value], at: _View) -> Value:
        match kind:
            case "not":
                return self.nodes.negation(args[0])
            case "add":
                return self.nodes.total([(1, args[0]), (1, args[1])])
            case "sub":
                return self.nodes.total([(1, args[0]), (-1, args[1])])
            case "ite":
                return self.nodes.choose(args[0], args[1], args[2])
            case "lt":
                return self.nodes.negation(self.nodes.compare("le", args[1], args[0], at.box))
        return self.nodes.compare(kind, args[0], args[1], at.box)

    def _read(self, symbol: Symbol, place: tuple[Value, ...], at: _View) -> Value:
        args: tuple[int, ...] = tuple(p for p in place if isinstance(p, int))
        if len(args) < len(place):
            raise TypeError(f"{symbol.name} is applied to a value that depends on the state")
        if (symbol, args) in self.known:
            return self.known[symbol, args]
        slot = self.index[symbol, args]
        if slot in at.changed:
            return at.changed[slot]
        if symbol.range == BOOL:
            return self.nodes.flag(slot, at.box)
        return self.nodes.slot(slot, at.box)

    # -- domains

    def bounds(self) -> list[tuple[int, int]]:
        """The slots' domains; BadOperation names a counter without bounds.

        Bounds that depend on how far one looks are none.
        """
        for reach, follow in ((64, False), (1024, False), (64, True)):
            found, other = self._narrowed(reach, follow), self._narrowed(2 * reach, follow)
            loose = [i for i, pair in enumerate(found) if pair != other[i]]
            if not loose:
                return found
        symbol, args = self.places[loose[0]]
        raise BadOperation(
            f"{self.machine.name}: neither an invariant nor a limit bounds {symbol.name}"
            f"{args or ''}; give it one in the instance's limits, or pass bounds"
        )

    def _narrowed(self, reach: int, follow: bool) -> list[tuple[int, int]]:
        """The domains as far as invariants tell, and, to `follow`, what steps can write."""
        wide = [self._widest(symbol, reach) for symbol, _ in self.places]
        self.nodes = Nodes(wide)
        box = self.nodes.box
        formulas = [self.value(p.formula, {}, _View(box, {})) for p in self.machine.invariants]
        before = None
        while box != before:
            before = box
            for formula in formulas:
                # No state meets the invariants: leave the box as it is, the search will say so.
                box = self.nodes.narrow(formula, True, box) or box
        if follow:
            box = self._written(box)
        return [
            (lo + _lowest(values), lo + values.bit_length() - 1)
            for (lo, _), values in zip(wide, box, strict=True)
        ]

    def _written(self, box: Box) -> Box:
        """What the slots can hold from the initial states on, value by value, within `box`."""
        lows = [lo for lo, _ in self.nodes.bounds]
        steps = list(self._steps())
        starts = initial_states(self.instance)
        for slot, most in self._counted(steps):
            top = max((state[slot] for state in starts), default=0) + most
            box = _restrict(box, slot, _between(0, top - lows[slot])) or box
        held = [0] * len(box)
        for state in starts:
            for i, value in enumerate(state):
                held[i] |= (1 << max(value - lows[i], 0)) & box[i]
        before = None
        while held != before:
            before = list(held)
            for step in steps:
                at = self.nodes.narrow(step.guard, True, tuple(held))
                for i, new in step.changes if at else ():
                    lo, hi = self.nodes.range(new, at or box)
                    held[i] |= _between(lo - lows[i], hi - lows[i]) & box[i]
        return tuple(values or whole for values, whole in zip(held, box, strict=True))

    def _counted(self, steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
        """Slots that grow only in steps which set a flag that is never taken back, and by how
        much they can grow in all: every flag lets one such step happen."""
        reset = {i for step in steps for i, new in step.changes if new != 1}
        growth: dict[int, dict[int, int]] = {}
        beyond: set[int] = set()
        for step in steps:
            at = self.nodes.narrow(step.guard, True, self.nodes.box) or self.nodes.box
            flags = [
                i
                for i, new in step.changes
                if i not in reset and self.places[i][0].range == BOOL and at[i] == 1
            ]
            for i, shift in step.shifts:
                if isinstance(shift, int) and shift <= 0:
                    continue
                if not flags or not isinstance(shift, int):
                    beyond.add(i)
                else:
                    of = growth.setdefault(i, {})
                    of[flags[0]] = max(of.get(flags[0], 0), shift)
        for slot, of in growth.items():
            if slot not in beyond:
                yield slot, sum(of.values())

    def _widest(self, symbol: Symbol, reach: int) -> tuple[int, int]:
        sort = symbol.range
        if symbol.name in self.given:
            return self.given[symbol.name]
        if sort not in NUMERIC or symbol.rigid:
            values = self.instance.domain(sort)
            return (min(values, default=0), max(values, default=0))
        # That a natural number is never negative is checked like every other domain.
        lowest = 0 if sort == NAT else -reach
        return (lowest, min(reach, self.instance.limits.get(symbol.name, reach)))

    # -- steps

    def grounded(self, bounds: Sequence[tuple[int, int]]) -> Grounded:
        self.nodes = Nodes(bounds)
        here = _View(self.nodes.box, {})
        slots = tuple(
            Slot(symbol, args, lo, hi)
            for (symbol, args), (lo, hi) in zip(self.places, bounds, strict=True)
        )
        invariant = self.nodes.junction(
            "and",
            (self.value(p.formula, {}, here) for p in self.machine.properties if not p.of_steps),
        )
        idle = self.nodes.junction("and", self._idle())
        return Grounded(self.instance, slots, tuple(self._steps()), invariant, idle)

    def _grounds(self) -> Iterator[tuple[Action, Ground]]:
        for action in self.machine.actions:
            for values in product(*(self.instance.choice(p) for p in action.params)):
                yield action, dict(zip(action.params, values, strict=True))

    def _steps(self) -> Iterator[Step]:
        for number, (action, ground) in enumerate(self._grounds()):
            step = self._step(number, action, ground)
            if step is not None:
                yield step

    def _idle(self) -> Iterator[Value]:
        """For each ground action: it is disabled, moves something, or keeps what steps keep."""
        nodes = self.nodes
        for action, ground in self._grounds():
            guard = self.value(action.enabled, ground, _View(nodes.box, {}))
            box = nodes.narrow(guard, True, nodes.box)
            if box is None:
                continue
            at = _View(box, {})
            kept = self._kept(action, ground, at, at)
            if kept == 1:
                continue
            still = self._still(self._changes(action.updates, ground, at), box)
            yield nodes.junction("or", (nodes.negation(guard), nodes.negation(still), kept))

    def _kept(self, action: Action, ground: Ground, at: _View, after: _View) -> Value:
        parts = (
            self.value(p.formula, ground if p.on else {}, at, after)
            for p in self.machine.properties
            if p.of_steps and p.speaks_of(action.name)
        )
        return self.nodes.junction("and", parts, at.box)

    def _still(self, changes: Mapping[int, Value], box: Box) -> Value:
        """Whether every slot keeps its value."""
        same = (self.nodes.compare("eq", new, self._old(i, box), box) for i, new in changes.items())
        return self.nodes.junction("and", same, box)

    def _step(self, number: int, action: Action, ground: Ground) -> Step | None:
        nodes = self.nodes
        guard = self.value(action.enabled, ground, _View(nodes.box, {}))
        box = nodes.narrow(guard, True, nodes.box)
        if box is None:
            return None
        at = _View(box, {})
        changes = self._changes(action.updates, ground, at)
        if not changes:
            return None
        moved = nodes.negation(self._still(changes, box))
        limits = self.instance.limits
        within = nodes.junction(
            "and",
            (
                nodes.compare("le", new, limits[self.places[i][0].name], box)
                for i, new in changes.items()
                if self.places[i][0].name in limits
            ),
            box,
        )
        whole = nodes.junction("and", (guard, moved, within))
        if whole == 0:
            return None
        inside = nodes.junction("and", self._inside(changes, box), box)
        kept = self._kept(action, ground, at, _View(box, changes))
        shifts = tuple(
            (i, nodes.total([(1, new), (-1, self._old(i, box))])) for i, new in changes.items()
        )
        return Step(number, action.name, whole, tuple(changes.items()), shifts, inside, kept)

    def _old(self, slot: int, box: Box) -> Value:
        if self.places[slot][0].range == BOOL:
            return self.nodes.flag(slot, box)
        return self.nodes.slot(slot, box)

    def _inside(self, changes: Mapping[int, Value], box: Box) -> Iterator[Value]:
        for i, new in changes.items():
            lo, hi = self.nodes.bounds[i]
            yield self.nodes.compare("le", lo, new, box)
            yield self.nodes.compare("le", new, hi, box)

    def _changes(self, updates: Sequence[Update], ground: Ground, at: _View) -> dict[int, Value]:
        changes: dict[int, Value] = {}
        for update in updates:
            for values in product(*(self.instance.domain(v.sort) for v in update.over)):
                here = {**ground, **dict(zip(update.over, values, strict=True))}
                args = tuple(here[arg] for arg in update.target.args)  # type: ignore[index]
                slot = self.index[update.target.symbol, args]
                new = self.value(update.value, here, at)
                if new is self._old(slot, at.box) or new == self._old(slot, at.box):
                    changes.pop(slot, None)
                else:
                    changes[slot] = new
        return changes


def ground(instance: Instance, bounds: Mapping[str, tuple[int, int]] | None = None) -> Grounded:
    """The instance over bounded slots.  `bounds` replaces a symbol's domain by name.

    Raises BadOperation where a counter has no bounds.
    """
    given = bounds or {}
    reader = _Reader(instance, given)
    # Narrowing a given domain further would be sound, but not what was asked for.
    found = [
        given.get(symbol.name, pair)
        for (symbol, _), pair in zip(reader.places, reader.bounds(), strict=True)
    ]
    return reader.grounded(found)


def inside(slots: Sequence[Slot], state: State) -> bool:
    return all(slot.lo <= value <= slot.hi for slot, value in zip(slots, state, strict=True))
