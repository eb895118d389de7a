"""A small typed language for transition systems: machines are declared once, as data.

A `Machine` has sorts, symbols (relations, functions, counters), an initial state, actions
(parameters, guards, simultaneous updates) and properties named by rule number.  Terms are
frozen dataclasses; no solver object occurs here.  `checker/` reads the same declaration as
logic (`checker.logic`), as code over finite instances (`checker.finite`) and as a monitor
(`checker.monitor`).

Reading guide: `held(r, b)` applies a symbol; `&`, `|`, `~`, `>>` are and, or, not, implies;
`eq`, `ne`, `<=`, `<`, `>=`, `>` compare; `+`, `-` are integer arithmetic; `every`, `some`,
`count` and `total` bind one variable; `new(term)` is the term in the state after the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Final, NoReturn

INITIALLY: Final = "initially"
"""What the start is called where an action is named: no action is called so."""


class MachineError(ValueError):
    """A declaration that does not make sense; the message names the machine and the place."""


# --- sorts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sort:
    """A domain.  `values` is empty for an uninterpreted sort: finite, of any size."""

    name: str
    values: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # names all but decide: symbols are looked up at every step

    def __repr__(self) -> str:
        return self.name


BOOL: Final = Sort("Bool")
INT: Final = Sort("Int")
NAT: Final = Sort("Nat")
"""Integers that an invariant of the machine keeps at or above zero (checked, not assumed)."""

NUMERIC: Final = frozenset({INT, NAT})


# --- terms -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A typed expression: one of the kinds below, and no other."""

    @property
    def sort(self) -> Sort:
        """Of what kind the value is."""
        raise NotImplementedError

    @cached_property
    def free(self) -> tuple[Var, ...]:
        """Free variables in order of first occurrence."""
        found: dict[Var, None] = {}
        for child in children(self):
            found.update(dict.fromkeys(child.free))
        return tuple(found)

    @cached_property
    def speaks_of_new(self) -> bool:
        """Whether some part of it is read in the state after a step."""
        return any(child.speaks_of_new for child in children(self))

    def __and__(self, other: Term) -> Term:
        return Op("and", (self, other))

    def __or__(self, other: Term) -> Term:
        return Op("or", (self, other))

    def __invert__(self) -> Term:
        return Op("not", (self,))

    def __rshift__(self, other: Term) -> Term:
        return Op("implies", (self, other))

    def __add__(self, other: Term | int) -> Term:
        return Op("add", (self, lit(other)))

    def __sub__(self, other: Term | int) -> Term:
        return Op("sub", (self, lit(other)))

    def __le__(self, other: Term | int) -> Term:
        return Op("le", (self, lit(other)))

    def __lt__(self, other: Term | int) -> Term:
        return Op("lt", (self, lit(other)))

    def __ge__(self, other: Term | int) -> Term:
        return Op("le", (lit(other), self))

    def __gt__(self, other: Term | int) -> Term:
        return Op("lt", (lit(other), self))


@dataclass(frozen=True)
class Var(Term):
    """A parameter of an action or a bound variable."""

    name: str
    of: Sort

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def sort(self) -> Sort:
        return self.of

    @cached_property
    def free(self) -> tuple[Var, ...]:
        return (self,)


@dataclass(frozen=True)
class Lit(Term):
    """A Boolean, an integer, or a value of an enumerated sort (by its position in `values`)."""

    value: bool | int
    of: Sort

    @property
    def sort(self) -> Sort:
        return self.of


@dataclass(frozen=True)
class App(Term):
    """A symbol applied to arguments."""

    symbol: Symbol
    args: tuple[Term, ...]

    @property
    def sort(self) -> Sort:
        return self.symbol.range


OPERATORS: Final[dict[str, tuple[str, Sort]]] = {
    "not": ("¬", BOOL),
    "and": ("∧", BOOL),
    "or": ("∨", BOOL),
    "implies": ("→", BOOL),
    "eq": ("=", BOOL),
    "le": ("≤", BOOL),
    "lt": ("<", BOOL),
    "add": ("+", INT),
    "sub": ("−", INT),
    "ite": ("if", INT),
}


@dataclass(frozen=True)
class Op(Term):
    """A Boolean or arithmetic operation; `kind` is a key of `OPERATORS`."""

    kind: str
    args: tuple[Term, ...]

    @property
    def sort(self) -> Sort:
        return self.args[1].sort if self.kind == "ite" else OPERATORS[self.kind][1]


@dataclass(frozen=True)
class Bind(Term):
    """A binder: `every`, `some` (Boolean body), `total` (sum of an integer body)."""

    kind: str
    var: Var
    body: Term

    @property
    def sort(self) -> Sort:
        return INT if self.kind == "total" else BOOL

    @cached_property
    def free(self) -> tuple[Var, ...]:
        return tuple(var for var in self.body.free if var != self.var)


@dataclass(frozen=True)
class New(Term):
    """A term in the state after the step; only step properties may use it."""

    body: Term

    @property
    def sort(self) -> Sort:
        return self.body.sort

    @cached_property
    def speaks_of_new(self) -> bool:
        return True


TRUE: Final = Lit(True, BOOL)
FALSE: Final = Lit(False, BOOL)


def lit(value: Term | int | bool) -> Term:
    """A term as it is; a number or truth value as a literal."""
    if isinstance(value, Term):
        return value
    return Lit(value, BOOL) if isinstance(value, bool) else Lit(value, INT)


def value(sort: Sort, name: str) -> Lit:
    """The value `name` of an enumerated sort."""
    if name not in sort.values:
        raise MachineError(f"{sort.name} has no value {name!r}")
    return Lit(sort.values.index(name), sort)


def eq(a: Term, b: Term | int) -> Term:
    """a = b, of one sort."""
    return Op("eq", (a, lit(b)))


def ne(a: Term, b: Term | int) -> Term:
    """a ≠ b, of one sort."""
    return ~eq(a, b)


def iff(a: Term, b: Term) -> Term:
    """a ↔ b: both hold, or neither."""
    return Op("eq", (a, b))


def ite(condition: Term, then: Term | int, otherwise: Term | int) -> Term:
    """`then` where the condition holds, else `otherwise`."""
    return Op("ite", (condition, lit(then), lit(otherwise)))


def both(*terms: Term) -> Term:
    """Conjunction of any number of terms; true when there is none."""
    return reduce(lambda a, b: a & b, terms) if terms else TRUE


def either(*terms: Term) -> Term:
    """Disjunction of any number of terms; false when there is none."""
    return reduce(lambda a, b: a | b, terms) if terms else FALSE


def one_of(term: Term, *values: Term) -> Term:
    """The term is one of these values; false when there is none."""
    return either(*(eq(term, v) for v in values))


def every(var: Var, body: Term) -> Term:
    """∀var. body"""
    return Bind("every", var, body)


def some(var: Var, body: Term) -> Term:
    """∃var. body"""
    return Bind("some", var, body)


def total(var: Var, body: Term) -> Bind:
    """The sum of `body` over all `var`: exact on finite instances, a ghost integer in logic."""
    return Bind("total", var, body)


def count(var: Var, body: Term) -> Bind:
    """How many `var` satisfy `body`."""
    return Bind("total", var, ite(body, 1, 0))


def new(term: Term) -> Term:
    """The term after the step (primed); only in properties of steps."""
    return New(term)


def children(term: Term) -> tuple[Term, ...]:
    """The terms that this one is made of; none for variables and literals."""
    match term:
        case App(_, args) | Op(_, args):
            return args
        case Bind(_, _, body) | New(body):
            return (body,)
    return ()


def rebuild(term: Term, parts: tuple[Term, ...]) -> Term:
    """The same term with other children."""
    if all(part is child for part, child in zip(parts, children(term), strict=True)):
        return term
    match term:
        case App() | Op():
            return replace(term, args=parts)
        case Bind() | New():
            return replace(term, body=parts[0])
    return term


def subterms(term: Term) -> Iterator[Term]:
    """The term and all that it is made of, from the outside in."""
    left = [term]
    while left:
        part = left.pop()
        yield part
        left.extend(reversed(children(part)))


def symbols_of(term: Term) -> set[Symbol]:
    """The symbols that occur in it."""
    return {part.symbol for part in subterms(term) if isinstance(part, App)}


def substitute(term: Term, values: Mapping[Var, Term]) -> Term:
    """Replace free variables.  Values must not capture: bound names are unique in a machine."""
    if isinstance(term, Var):
        return values.get(term, term)
    if not any(var in values for var in term.free):
        return term
    if isinstance(term, Bind) and term.var in values:
        values = {k: v for k, v in values.items() if k != term.var}
    return rebuild(term, tuple(substitute(child, values) for child in children(term)))


def told_before(term: Term, updates: tuple[Update, ...]) -> Term:
    """The value that `term` has after the updates, told in the state before them.

    This is Hoare's rule of assignment, for all updates at once.
    """
    if isinstance(term, Bind):
        term = _apart(term, updates)
    parts = tuple(told_before(child, updates) for child in children(term))
    term = rebuild(term, parts)
    if not isinstance(term, App):
        return term
    value: Term = term
    for update in updates:
        if update.target.symbol != term.symbol:
            continue
        over, here = {}, []
        for target, arg in zip(update.target.args, term.args, strict=True):
            if isinstance(target, Var) and target in update.over:
                over[target] = arg
            elif target != arg:
                here.append(eq(arg, target))
        _forbid_capture(update, over)
        written = substitute(update.value, over)
        value = ite(both(*here), written, value) if here else written
    return value


def _forbid_capture(update: Update, values: Mapping[Var, Term]) -> None:
    """Raises MachineError where a variable of `values` would be bound in the update's value."""
    loose = {variable for term in values.values() for variable in term.free}
    for part in subterms(update.value) if loose else ():
        if isinstance(part, Bind) and part.var in loose:
            raise MachineError(f"{part.var.name} would be bound in {show(update.value)}")


def _apart(term: Bind, updates: tuple[Update, ...]) -> Bind:
    """The same term with a bound variable that no update speaks of."""
    taken = {
        part.var if isinstance(part, Bind) else part
        for update in updates
        for part in subterms(update.value)
        if isinstance(part, Bind | Var)
    }
    fresh = term.var
    while fresh in taken:
        fresh = replace(fresh, name=fresh.name + "_")
    return replace(term, var=fresh, body=substitute(term.body, {term.var: fresh}))


# --- machines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Symbol:
    """A relation (`range` BOOL), function or counter.  Rigid symbols never change."""

    name: str
    domain: tuple[Sort, ...]
    range: Sort = BOOL
    rigid: bool = False
    meaning: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(self, *args: Term) -> App:
        if tuple(_base(a.sort) for a in args) != tuple(_base(s) for s in self.domain):
            raise MachineError(f"{self.name} takes {self.domain}, not {[a.sort for a in args]}")
        return App(self, args)

    def __repr__(self) -> str:
        return self.name


def _base(sort: Sort) -> Sort:
    return INT if sort in NUMERIC else sort


@dataclass(frozen=True)
class Guard:
    """One condition of an action.

    `protects` names exactly the rules that can be broken without it, the rule it is there for
    first; `checker.twins` removes each guard and holds what breaks against this.  `why` is the
    condition in words, for refusals and counterexamples.  `part` is the machine that the guard
    was declared in, where it came here by composition: its twin is that machine's.
    """

    protects: tuple[str, ...]
    condition: Term
    why: str
    part: str = ""


@dataclass(frozen=True)
class Update:
    """`target` gets `value`, which is read in the state before the step.

    Arguments of the target are parameters of the action, or variables in `over`: then the
    update holds for every value of those.
    """

    target: App
    value: Term
    over: tuple[Var, ...] = ()


def becomes(target: App, value: Term | int | bool, over: tuple[Var, ...] = ()) -> Update:
    """The target's value after the step, told in terms of the state before it; with `over`,
    everywhere that these variables reach."""
    return Update(target, lit(value), over)


@dataclass(frozen=True)
class Action:
    """A step: enabled where every guard holds, then all updates at once."""

    name: str
    params: tuple[Var, ...]
    guards: tuple[Guard, ...]
    updates: tuple[Update, ...]
    meaning: str

    @cached_property
    def enabled(self) -> Term:
        """All guards together."""
        return both(*(guard.condition for guard in self.guards))


@dataclass(frozen=True)
class Property:
    """A property of every state, or of every step if it speaks of `new` state.

    `rule` is the contract's number.  `goal` tells what is wanted from what merely makes the
    induction go through.  A step property with `on` set speaks of that action alone and may
    use its parameters; one with `but` set speaks of every action, also of those that are yet to
    be declared, but that one.
    """

    rule: str
    name: str
    formula: Term
    meaning: str
    goal: bool = True
    on: str | None = None
    but: str | None = None

    @property
    def of_steps(self) -> bool:
        """Whether it speaks of a step, and not of a state alone."""
        return not self.of_all or self.formula.speaks_of_new

    @property
    def of_all(self) -> bool:
        """Whether no action is told from the others."""
        return self.on is None and self.but is None

    def speaks_of(self, action: str) -> bool:
        """Whether it has to hold of the steps of the action of that name."""
        return self.on in (None, action) and self.but != action


@dataclass(frozen=True)
class Partition:
    """A fact about finite sums: where `whole` is pointwise the sum of `parts`, so are totals.

    It is no assumption about the machine: whether the bodies add up pointwise is left to the
    solver.  All terms are closed totals over the same sort.
    """

    whole: Bind
    parts: tuple[Bind, ...]


@dataclass(frozen=True)
class View:
    """A value told of every state that is shown: what an abstraction makes of it."""

    name: str
    places: tuple[Var, ...]
    term: Term


@dataclass(frozen=True)
class Machine:
    """A transition system.  `init` fixes every symbol that is not rigid."""

    name: str
    meaning: str
    symbols: tuple[Symbol, ...]
    init: tuple[Update, ...]
    actions: tuple[Action, ...]
    properties: tuple[Property, ...]
    partitions: tuple[Partition, ...] = ()
    axioms: tuple[Term, ...] = ()
    """What is assumed, of rigid symbols only: what may change has to be shown."""
    given: tuple[Property, ...] = ()
    """Invariants that are shown elsewhere (of the parts it is composed of, of the machine that it
    is derived from): premises here, and nothing to show.  Only a derived machine may have them."""
    views: tuple[View, ...] = ()
    derived: bool = False
    """Whether it is made of other machines, in which what is given is to be shown."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def invariants(self) -> tuple[Property, ...]:
        """What holds before every step, given or shown."""
        return (*self.given, *(p for p in self.properties if not p.of_steps))

    @property
    def step_properties(self) -> tuple[Property, ...]:
        """What every step keeps."""
        return tuple(p for p in self.properties if p.of_steps)

    @property
    def sorts(self) -> tuple[Sort, ...]:
        """The uninterpreted sorts, in order of first use."""
        found: dict[Sort, None] = {}
        for symbol in self.symbols:
            found.update(dict.fromkeys((*symbol.domain, symbol.range)))
        for action in self.actions:
            found.update(dict.fromkeys(p.sort for p in action.params))
        return tuple(s for s in found if not s.values and s not in {BOOL, INT, NAT})

    def action(self, name: str) -> Action:
        """The action of that name; `MachineError` where there is none."""
        for action in self.actions:
            if action.name == name:
                return action
        raise MachineError(f"{self.name} has no action {name!r}")

    def with_action(self, action: Action) -> Machine:
        """The same machine with one action replaced: how must-fail twins are made."""
        return replace(
            self,
            actions=tuple(action if a.name == action.name else a for a in self.actions),
        )


def without_guard(machine: Machine, action: str, index: int) -> Machine:
    """The must-fail twin of a guard: the machine with that one condition left out."""
    whole = machine.action(action)
    rest = whole.guards[:index] + whole.guards[index + 1 :]
    return machine.with_action(replace(whole, guards=rest))


def renamed(action: Action, names: Mapping[Var, Var]) -> Action:
    """The action with other parameters."""

    def update(old: Update) -> Update:
        target = substitute(old.target, names)
        assert isinstance(target, App)
        return replace(old, target=target, value=substitute(old.value, names))

    return replace(
        action,
        params=tuple(names.get(param, param) for param in action.params),
        guards=tuple(replace(g, condition=substitute(g.condition, names)) for g in action.guards),
        updates=tuple(map(update, action.updates)),
    )


def _check(machine: Machine) -> None:
    _check_names(machine)
    fixed = [update.target.symbol for update in machine.init]
    for symbol in machine.symbols:
        if fixed.count(symbol) != (0 if symbol.rigid else 1):
            _fail(machine, "init", f"{symbol.name} must be fixed once, or be rigid")
    for action in machine.actions:
        _check_action(machine, action)
    _check_assumed(machine)
    for prop in machine.properties:
        if wrong := _fault_of(machine, prop):
            _fail(machine, prop.name, wrong)
    symbols = set(machine.symbols)
    for term in _terms(machine):
        for part in subterms(term):
            if isinstance(part, App) and part.symbol not in symbols:
                _fail(machine, show(term), f"{part.symbol.name} is no symbol of the machine")
            if isinstance(part, Bind) and part.kind == "total":
                _check_total(machine, part)


def _check_names(machine: Machine) -> None:
    """No name means two things: what is read by name would be read of the first one only."""
    symbols = [symbol.name for symbol in machine.symbols]
    for what, names in (("symbol", symbols), ("action", [a.name for a in machine.actions])):
        if twice := sorted(_twice(names)):
            _fail(machine, twice[0], f"the name of more than one {what}")
    for action in machine.actions:
        if action.name == INITIALLY:
            _fail(machine, action.name, "what holds at the start is said of this name")
        params = [param.name for param in action.params]
        if unclear := sorted(_twice(params) | set(params) & set(symbols)):
            _fail(machine, action.name, f"{unclear[0]} is another parameter's name, or a symbol's")


def _twice(names: Sequence[str]) -> set[str]:
    return {name for name in names if names.count(name) > 1}


def _terms(machine: Machine) -> Iterator[Term]:
    """Every term that says what the machine does and what holds of it."""
    yield from (prop.formula for prop in (*machine.properties, *machine.given))
    yield from machine.axioms
    for partition in machine.partitions:
        yield from (partition.whole, *partition.parts)
    yield from (update.value for update in machine.init)
    for action in machine.actions:
        yield action.enabled
        yield from (update.value for update in action.updates)


def _check_total(machine: Machine, summed: Bind) -> None:
    """A sum is of one state, and of a sort that is finite: facts about sums say nothing else."""
    if summed.body.speaks_of_new:
        _fail(machine, show(summed), "a sum speaks of the new state (say it of the whole sum)")
    if summed.var.sort in NUMERIC:
        _fail(machine, show(summed), "a sum over all numbers")


def _fault_of(machine: Machine, prop: Property) -> str:
    """What is wrong with a property, empty if nothing is."""
    if prop.on and prop.but:
        return "it speaks of one action, or of all but one"
    if prop.but:
        machine.action(prop.but)
    bound = set(machine.action(prop.on).params) if prop.on else set()
    return "the formula has free variables" if set(prop.formula.free) - bound else ""


def _check_action(machine: Machine, action: Action) -> None:
    for update in action.updates:
        target = update.target
        if target.symbol.rigid or target.symbol not in machine.symbols:
            _fail(machine, action.name, f"{target.symbol.name} cannot be updated")
        if not set(target.args) <= {*action.params, *update.over}:
            _fail(machine, action.name, f"arguments of {target.symbol.name} must be variables")
        loose = set(update.value.free) - {*action.params, *update.over}
        if loose:
            _fail(machine, action.name, f"{loose} is not bound")
    loose = set(action.enabled.free) - set(action.params)
    if loose:
        _fail(machine, action.name, f"{loose} is not bound")
    if action.enabled.speaks_of_new:
        _fail(machine, action.name, "a guard speaks of the new state")


def _check_assumed(machine: Machine) -> None:
    """Nothing is assumed that could be false, but for what is to be shown elsewhere."""
    for number, axiom in enumerate(machine.axioms):
        read = {part.symbol for part in subterms(axiom) if isinstance(part, App)}
        moving = sorted(symbol.name for symbol in read if not symbol.rigid)
        if moving:
            what = f"{', '.join(moving)} may change, so it is to be shown, not assumed"
            _fail(machine, f"axiom {number}", what)
        if axiom.free or axiom.speaks_of_new:
            _fail(machine, f"axiom {number}", "it has free variables or speaks of the new state")
    for prop in machine.given:
        if not machine.derived:
            _fail(machine, prop.name, "it is given, and the machine is not derived")
        if prop.of_steps or prop.formula.free:
            _fail(machine, prop.name, "what is given must be of states, without free variables")


def _fail(machine: Machine, place: str, what: str) -> NoReturn:
    raise MachineError(f"{machine.name}, {place}: {what}")


# --- showing -----------------------------------------------------------------------------


def show(term: Term) -> str:
    """The term in mathematical notation."""
    match term:
        case Var(name, _):
            return name
        case Lit(v, of):
            return of.values[v] if of.values else str(v).lower()
        case App(symbol, args):
            return f"{symbol.name}({', '.join(map(show, args))})" if args else symbol.name
        case Op("not", (Op("eq", (a, b)),)):
            return f"{_inner(a)} ≠ {_inner(b)}"
        case Op("not", (a,)):
            return f"¬{_inner(a)}"
        case Op("ite", (a, b, c)):
            return f"(if {show(a)} then {show(b)} else {show(c)})"
        case Op("eq", (a, b)) if a.sort == BOOL:
            return f"{_inner(a)} ↔ {_inner(b)}"
        case Op("and" | "or" as kind, _):
            return _show_junction(kind, term)
        case Op(kind, (a, b)):
            return f"{_inner(a)} {OPERATORS[kind][0]} {_inner(b)}"
        case Bind("total", var, Op("ite", (a, Lit(1, _), Lit(0, _)))):
            return f"#{{{var.name} | {show(a)}}}"
        case Bind(kind, var, body):
            sign = {"every": "∀", "some": "∃", "total": "Σ"}[kind]
            return f"{sign}{var.name}. {show(body)}"
        case New(App(symbol, args)):
            return f"{symbol.name}′({', '.join(map(show, args))})" if args else f"{symbol.name}′"
        case New(body):
            return f"({show(body)})′"
    raise MachineError(f"not a term: {term!r}")


def _show_junction(kind: str, term: Term) -> str:
    if kind == "or" and (among := membership(term)):
        return f"{_inner(among[0])} ∈ {{{', '.join(map(show, among[1]))}}}"
    sign = f" {OPERATORS[kind][0]} "
    return sign.join(_inner(part) for part in _flat(kind, term))


def membership(term: Term) -> tuple[Term, tuple[Lit, ...]] | None:
    """What `one_of` made: a term and the values of an enumerated sort that it is one of."""
    parts = _flat("or", term)
    first = parts[0]
    if len(parts) < 2 or not (isinstance(first, Op) and first.kind == "eq"):
        return None
    values: list[Lit] = []
    for part in parts:
        match part:
            case Op("eq", (subject, Lit() as value)) if (
                subject == first.args[0] and value.of.values
            ):
                values.append(value)
            case _:
                return None
    return first.args[0], tuple(values)


def _flat(kind: str, term: Term) -> tuple[Term, ...]:
    if isinstance(term, Op) and term.kind == kind:
        return tuple(part for child in term.args for part in _flat(kind, child))
    return (term,)


def _inner(term: Term) -> str:
    text = show(term)
    simple = isinstance(term, Var | Lit | App | New) or (
        isinstance(term, Op) and term.kind == "not"
    )
    return text if simple else f"({text})"
