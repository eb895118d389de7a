"""Elements that may be renamed: states that differ in names only count as one.

Two elements of a sort are interchangeable if swapping them leaves the instance as it is: rigid
values, choices of parameters and domains.  The machine itself cannot tell them apart, since its
language has no names for elements and nothing but equality between them (both is checked).  The
renamings of all classes form a group; exploring one representative of each orbit is enough, and
the size of its orbit says how many states it stands for.

The representative is exact, not a heuristic: of all renamed states the least.  Sorts whose
elements never meet in one symbol (`inner`) are renamed by sorting: an element's column is all
that the state says of it.  The renamings of the other sorts (`outer`) are tried one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import factorial, prod
from typing import Final

from kvclaims.checker.finite import Instance, State
from kvclaims.spec.language import Lit, Machine, Op, Sort, Symbol, Term, subterms

MOST_OUTER: Final = 120
"""Renamings that are tried one by one at most; sorts beyond that are left as they are."""

Place = tuple[Symbol, tuple[int, ...]]
Classes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Symmetry:
    """The renamings of an instance as permutations of the slots of a state.

    `outer` holds, for each renaming of outer sorts, where the new state's slots take their
    values from; the first changes nothing.  `inner` holds for each class of interchangeable
    elements their columns: slots in the same order for each.  `order` is the number of all
    renamings, `sorts` says how many elements are interchangeable, by sort.
    """

    outer: tuple[tuple[int, ...], ...]
    inner: tuple[tuple[tuple[int, ...], ...], ...]
    order: int
    sorts: Mapping[str, Classes]

    def representative(self, state: State, key: Callable[[State], int] | None = None) -> State:
        """The least of the renamed states, or that with the least `key`; each with its columns
        sorted."""
        return min((self._sorted(renaming, state) for renaming in self.outer), key=key)

    def orbit(self, representative: State) -> int:
        """How many states the representative stands for."""
        same = sum(self._sorted(r, representative) == representative for r in self.outer)
        for columns in self.inner:
            held = Counter(tuple(representative[i] for i in column) for column in columns)
            same *= prod(map(factorial, held.values()))
        return self.order // same

    def _sorted(self, renaming: Sequence[int], state: State) -> State:
        renamed = [state[i] for i in renaming]
        for columns in self.inner:
            # The last slot of a column counts most, as in the number of a state.
            held = sorted(([renamed[i] for i in c] for c in columns), key=lambda v: v[::-1])
            for column, values in zip(columns, held, strict=True):
                for i, value in zip(column, values, strict=True):
                    renamed[i] = value
        return tuple(renamed)

    def lines(self) -> Iterator[str]:
        shown = (
            f"{name} {' '.join('{' + ','.join(map(str, c)) + '}' for c in classes)}"
            for name, classes in self.sorts.items()
        )
        yield f"{self.order:,} renamings: {'; '.join(shown) or 'no interchangeable elements'}"


def symmetry(
    instance: Instance, places: Sequence[Place], domains: Sequence[tuple[int, int]] | None = None
) -> Symmetry:
    """The renamings of an instance whose states have the slots `places`.

    `domains` are the slots' bounds, where states are numbered: renamed slots need equal ones.
    """
    classes = {
        sort: found
        for sort in instance.machine.sorts
        if _is_abstract(instance.machine, sort)
        and (found := _classes(instance, sort, places, domains))
    }
    outer, inner = _split(instance.machine, classes)
    index = {place: i for i, place in enumerate(places)}
    renamings = [
        tuple(index[symbol, _renamed(symbol, args, renaming)] for symbol, args in places)
        for renaming in _renamings({sort: classes[sort] for sort in outer})
    ]
    columns = [
        tuple(_column(places, sort, element) for element in group)
        for sort in inner
        for group in classes[sort]
    ]
    kept = {sort.name: classes[sort] for sort in (*outer, *inner)}
    order = prod(factorial(len(group)) for groups in kept.values() for group in groups)
    return Symmetry(tuple(renamings), tuple(columns), order, kept)


# --- what is interchangeable -------------------------------------------------------------


def _is_abstract(machine: Machine, sort: Sort) -> bool:
    """Elements are only compared for equality, named nowhere, and no state's value."""
    if any(symbol.range == sort for symbol in machine.symbols):
        return False
    return not any(
        (isinstance(term, Lit) and term.of == sort)
        or (isinstance(term, Op) and term.kind not in ("eq", "ite") and sort in _sorts(term))
        for whole in _terms(machine)
        for term in subterms(whole)
    )


def _sorts(term: Op) -> set[Sort]:
    return {arg.sort for arg in term.args}


def _terms(machine: Machine) -> Iterator[Term]:
    yield from machine.axioms
    yield from (prop.formula for prop in machine.properties)
    yield from (update.value for update in machine.init)
    for action in machine.actions:
        yield action.enabled
        yield from (update.value for update in action.updates)


def _classes(
    instance: Instance,
    sort: Sort,
    places: Sequence[Place],
    domains: Sequence[tuple[int, int]] | None,
) -> Classes:
    """Interchangeable elements; those with no other like them are left out."""
    groups: list[list[int]] = []
    for element in instance.domain(sort):
        for group in groups:
            if _alike(instance, sort, group[0], element, places, domains):
                group.append(element)
                break
        else:
            groups.append([element])
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _alike(
    instance: Instance,
    sort: Sort,
    one: int,
    other: int,
    places: Sequence[Place],
    domains: Sequence[tuple[int, int]] | None,
) -> bool:
    swap = {sort: {one: other, other: one}}
    for symbol in instance.machine.symbols:
        fixed = instance.rigid.get(symbol.name, {})
        if {_renamed(symbol, args, swap): v for args, v in fixed.items()} != dict(fixed):
            return False
    for action in instance.machine.actions:
        for param in action.params:
            choice = instance.choice(param)
            if param.sort == sort and (one in choice) != (other in choice):
                return False
    if domains is None:
        return True
    index = {place: i for i, place in enumerate(places)}
    return all(
        domains[i] == domains[index[symbol, _renamed(symbol, args, swap)]]
        for i, (symbol, args) in enumerate(places)
    )


def _renamed(
    symbol: Symbol, args: tuple[int, ...], renaming: Mapping[Sort, Mapping[int, int]]
) -> tuple[int, ...]:
    return tuple(
        renaming[sort].get(arg, arg) if sort in renaming else arg
        for sort, arg in zip(symbol.domain, args, strict=True)
    )


# --- how they are renamed ----------------------------------------------------------------


def _split(
    machine: Machine, classes: Mapping[Sort, Classes]
) -> tuple[tuple[Sort, ...], tuple[Sort, ...]]:
    """Outer and inner sorts: the most renamings of all, and as few outer ones as can be."""
    best: tuple[int, int, tuple[Sort, ...], tuple[Sort, ...]] = (-1, 0, (), ())
    for size in range(len(classes) + 1):
        for inner in combinations(classes, size):
            if any(sum(s in inner for s in symbol.domain) > 1 for symbol in machine.symbols):
                continue
            outer: tuple[Sort, ...] = ()
            others = [sort for sort in classes if sort not in inner]
            for sort in sorted(others, key=lambda s: _order(classes[s])):
                if _orders(classes, (*outer, sort)) <= MOST_OUTER:
                    outer = (*outer, sort)
            tried = _orders(classes, outer)
            found = (tried * _orders(classes, inner), -tried, outer, inner)
            if found[:2] > best[:2]:
                best = found
    return best[2], best[3]


def _orders(classes: Mapping[Sort, Classes], sorts: Sequence[Sort]) -> int:
    return prod(_order(classes[sort]) for sort in sorts)


def _order(classes: Classes) -> int:
    return prod(factorial(len(group)) for group in classes)


def _renamings(classes: Mapping[Sort, Classes]) -> Iterator[dict[Sort, dict[int, int]]]:
    """Every renaming, that which changes nothing first."""
    groups = [(sort, group) for sort, groups in classes.items() for group in groups]
    for choice in product(*(permutations(group) for _, group in groups)):
        renaming: dict[Sort, dict[int, int]] = {sort: {} for sort in classes}
        for (sort, group), images in zip(groups, choice, strict=True):
            renaming[sort].update(zip(group, images, strict=True))
        yield renaming


def _column(places: Sequence[Place], sort: Sort, element: int) -> tuple[int, ...]:
    """The slots that speak of the element, in the same order for every element."""
    return tuple(
        i
        for i, (symbol, args) in enumerate(places)
        if any(s == sort and a == element for s, a in zip(symbol.domain, args, strict=True))
    )
