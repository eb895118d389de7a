"""Proofs: every invariant holds initially and is kept by every action, for any sizes.

One obligation for each action and property (`checker.induction`).  What cannot be shown is told
apart: NOT INDUCTIVE comes with two states and the action between them, UNKNOWN says that the
solver gave up.  Obligations of one action go to one process; what was proved before, and has
not changed since, is taken from a folder of proofs (`checker.proofcache`).
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvclaims.checker import smtlib
from kvclaims.checker.blame import minimal_blame
from kvclaims.checker.consequences import consequences
from kvclaims.checker.contents import Content, contents
from kvclaims.checker.emptiness import emptiness
from kvclaims.checker.induction import (
    QUICK_MS,
    TIMEOUT_MS,
    Obligation,
    Prover,
    Shown,
    obligations,
)
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.proofcache import Keys, ProofCache
from kvclaims.checker.ranking import ranking_obligations
from kvclaims.checker.smtlib import Written
from kvclaims.checker.solvers import Z3, Answer, chosen, solver_version
from kvclaims.checker.verdicts import Progress, worst
from kvclaims.checker.workers import processes
from kvclaims.spec.abstractions import derived
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import INITIALLY, Machine, Property
from kvclaims.spec.vocabulary import RULES, Verdict

__all__ = [
    "INITIALLY",
    "Obligation",
    "ProofReport",
    "Prover",
    "Ways",
    "obligations",
    "prove",
    "prove_machine",
]


@dataclass(frozen=True)
class ProofReport:
    """`files` were written to `folder`; it is None where none were asked for."""

    obligations: tuple[Obligation, ...]
    seconds: float
    folder: Path | None = None
    files: int = 0
    contents: tuple[Content, ...] = ()
    """What shows that each property says something."""
    bounded: tuple[Obligation, ...] = ()
    """Checks up to a bound, of what is beyond an obligation: each says HOLDS at best."""

    @property
    def verdict(self) -> Verdict:
        """PROVED only if every obligation was and says something, and no bounded check found
        otherwise; an empty selection is VACUOUS."""
        beside = [*(c.verdict for c in self.contents), *(check.verdict for check in self.bounded)]
        wrong = (verdict for verdict in beside if verdict is not Verdict.HOLDS)
        return worst([*(obligation.verdict for obligation in self.obligations), *wrong])

    @property
    def cached(self) -> int:
        """How many obligations were proved before and have not changed."""
        return sum(obligation.cached for obligation in self.obligations)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "cached": self.cached,
            "obligations": [obligation.to_json() for obligation in self.obligations],
        }
        if self.bounded:
            found["bounded"] = [check.to_json() for check in self.bounded]
        violations = [
            {"rule": o.rule, "message": f"{o.name!r} of {o.machine} under {o.action}: {o.reason}"}
            for o in (*self.obligations, *self.bounded)
            if o.verdict is Verdict.VIOLATED
        ]
        if self.contents:
            found["contents"] = [content.to_json() for content in self.contents]
        if violations:
            found["violations"] = violations
        if self.folder:
            found["emitted"] = {"folder": str(self.folder), "files": self.files}
        return found

    def lines(self) -> Iterator[str]:
        """A line for each rule and machine, then what was not proved, in full."""
        groups: dict[tuple[str, str], list[Obligation]] = {}
        for obligation in self.obligations:
            groups.setdefault((obligation.rule, obligation.machine), []).append(obligation)
        for (rule, machine), group in sorted(groups.items()):
            proved = sum(o.verdict is Verdict.PROVED for o in group)
            seconds = sum(o.seconds for o in group)
            yield (
                f"{rule:4} {machine:12} {proved:4}/{len(group):<4} {seconds:6.2f} s  "
                f"{RULES[rule].meaning}"
            )
        for obligation in (*self.obligations, *self.bounded):
            if obligation.verdict is not Verdict.PROVED:
                yield (
                    f"{obligation.verdict}: {obligation.rule} {obligation.name!r} of "
                    f"{obligation.machine} under {obligation.action}: "
                    + RULES[obligation.rule].meaning
                    + (f" ({obligation.reason})" if obligation.reason else "")
                )
                if obligation.gap:
                    yield from obligation.gap.lines()
        yield from (str(c) for c in self.contents if c.verdict is not Verdict.HOLDS)
        if self.contents:
            shown = sum(c.verdict is Verdict.HOLDS for c in self.contents)
            yield f"{shown} of {len(self.contents)} properties and sets of actions say something"
        if self.folder:
            yield f"{self.files} SMT-LIB files in {self.folder}, listed in {smtlib.MANIFEST}"
        solvers = sorted({obligation.solver for obligation in self.obligations})
        before = f", {self.cached} of them proved before (cached)" if self.cached else ""
        yield (
            f"{self.verdict}: {len(self.obligations)} obligations by {', '.join(solvers)} "
            f"in {self.seconds:.2f} s{before}"
        )


@dataclass(frozen=True)
class Ways:
    """How to prove: by which solver, for how long, and where things are kept."""

    timeout_ms: int = TIMEOUT_MS
    solver: str = Z3
    emit: Path | None = None
    cache: Path | None = None
    jobs: int = 1
    workers: int = 0
    """Processes on Ray instead of `jobs`, where there are any."""


AS_USUAL: Final = Ways()


@dataclass(frozen=True)
class _Item:
    """An obligation, its place in the report, and which solvers proved it before."""

    place: int
    prop: Property
    known: Mapping[str, Shown]


@dataclass(frozen=True)
class _Group:
    """Obligations of one action: they share their premises, so one process takes them all."""

    machine: Machine
    action: str
    items: tuple[_Item, ...]


@dataclass(frozen=True)
class _Packed:
    """A group on its way to another process.  The groups of one machine share its bytes: to make
    and to read them for each anew would take as long as the proofs of a large one."""

    machine: bytes
    action: str
    items: tuple[_Item, ...]


def _pack(groups: Iterable[_Group]) -> dict[int, _Packed]:
    """Each group by its identity."""
    machines: dict[int, bytes] = {}
    packed = {}
    for group in groups:
        own = id(group.machine)
        if own not in machines:
            machines[own] = pickle.dumps(group.machine)
        packed[id(group)] = _Packed(machines[own], group.action, group.items)
    return packed


@dataclass(frozen=True)
class _Done:
    place: int
    found: Obligation
    files: tuple[Written, ...] = ()


def prove(
    rule: str | None = None,
    machine: str | None = None,
    progress: Progress | None = None,
    ways: Ways = AS_USUAL,
) -> ProofReport:
    """Discharge every obligation of a rule and machine, or of all.

    An obligation that takes a solver longer than the time it is given is UNKNOWN.  Raises
    BadOperation for an unknown rule, machine or solver, EngineMissing for a solver that is
    not installed.
    """
    if rule is not None and rule not in RULES:
        raise BadOperation(f"unknown rule {rule!r} (known: {', '.join(RULES)})")
    known = {**MACHINES, **derived()}
    if machine is not None and machine not in known:
        raise BadOperation(f"unknown machine {machine!r} (known: {', '.join(known)})")
    start = time.perf_counter()
    declared = [m for name, m in known.items() if machine in (None, name)]
    asked = [(m, prop, action) for m in declared for prop, action in obligations(m, rule)]
    follows = [each for m in declared if (each := consequences(m))]
    asked += [(m, prop, action) for m in follows for prop, action in obligations(m, rule)]
    done = _discharge([*asked, *ranking_obligations(declared, rule)], progress, ways)
    if rule is not None and not done:
        raise BadOperation(_stated_elsewhere(rule, machine, known))
    files = 0
    if ways.emit:
        files = smtlib.write_manifest(ways.emit, [file for each in done for file in each.files])
    found = tuple(each.found for each in done)
    bounded = (minimal_blame(),) if machine is None and rule in (None, "F4") else ()
    cache = ProofCache(ways.cache) if ways.cache else None
    stated = [m for m in declared if m.name in MACHINES]
    shown = contents(stated, rule, progress, cache, ways.jobs)
    shown += emptiness(declared, known, rule, progress, cache, ways.jobs)
    return ProofReport(found, time.perf_counter() - start, ways.emit, files, shown, bounded)


def _stated_elsewhere(rule: str, machine: str | None, known: Mapping[str, Machine]) -> str:
    """Why there is nothing to prove: the rule is another machine's."""
    others = [
        name
        for name, each in known.items()
        if any(prop.rule == rule for prop in each.properties)
        or any(True for _ in ranking_obligations([each], rule))
    ]
    do = "does" if len(others) == 1 else "do"
    return f"machine {machine} does not state rule {rule} ({', '.join(others)} {do})"


def prove_machine(
    machine: Machine,
    rule: str | None = None,
    progress: Progress | None = None,
    ways: Ways = AS_USUAL,
) -> list[Obligation]:
    """The same for one machine, which need not be one of those known by name."""
    asked = ((machine, prop, action) for prop, action in obligations(machine, rule))
    return [each.found for each in _discharge(asked, progress, ways)]


def _discharge(
    asked: Iterable[tuple[Machine, Property, str]], progress: Progress | None, ways: Ways
) -> list[_Done]:
    """In the order asked, whoever is ready first.  Machines are told apart by their names."""
    versions = {name: solver_version(name) for name in chosen(ways.solver)}
    cache = ProofCache(ways.cache) if ways.cache else None
    keys: dict[int, dict[str, str]] = {}
    groups: dict[tuple[str, str], list[_Item]] = {}
    by_name: dict[str, Machine] = {}
    own: dict[str, Keys] = {}
    for place, (machine, prop, action) in enumerate(asked):
        if machine.name not in by_name:
            by_name[machine.name] = machine
            own.update({machine.name: Keys(machine)} if cache else {})
        keys[place] = own[machine.name].of(prop, action, versions) if cache else {}
        known = _before(cache, keys[place]) if cache else {}
        groups.setdefault((machine.name, action), []).append(_Item(place, prop, known))
    work = [_Group(by_name[name], action, tuple(i)) for (name, action), i in groups.items()]
    done: dict[int, _Done] = {}
    for finished in _run(work, ways):
        for each in finished:
            done[each.place] = each
            if cache:
                _keep(cache, each.found, keys[each.place], versions)
            if progress:
                found = each.found
                progress(
                    f"{len(done)}/{len(keys)} {found.rule} {found.name} under {found.action}: "
                    f"{found.verdict}"
                )
    return [done[place] for place in sorted(done)]


def _before(cache: ProofCache, keys: Mapping[str, str]) -> dict[str, Shown]:
    """What each solver proved before."""
    kept = {solver: cache.find(key) for solver, key in keys.items()}
    return {
        solver: Shown(solver, Answer.UNSAT, taken, cached=True)
        for solver, taken in kept.items()
        if taken is not None
    }


def _keep(
    cache: ProofCache, found: Obligation, keys: Mapping[str, str], versions: Mapping[str, str]
) -> None:
    """Proofs only, each under its solver."""
    for shown in found.shown:
        if shown.answer is Answer.UNSAT and not shown.cached:
            about = {"solver": shown.solver, "version": versions[shown.solver]}
            what = {"machine": found.machine, "rule": found.rule, "property": found.name}
            cache.keep(keys[shown.solver], shown.taken, {**about, **what, "action": found.action})


def _run(groups: list[_Group], ways: Ways) -> Iterator[list[_Done]]:
    """Every group once; those that need a solver on `ways.jobs` processes, large ones first."""
    needed = len(chosen(ways.solver))
    hard = []
    for group in groups:
        if ways.emit or any(len(item.known) < needed for item in group.items):
            hard.append(group)
        else:
            yield [_known(group, item, ways) for item in group.items]
    if ways.workers and hard:
        from kvclaims.checker.distributed import map_tasks

        given = [(group, ways) for group in _pack(hard).values()]
        yield from (done for _, done in map_tasks(f"{__name__}:_work", given, ways.workers))
        return
    jobs = min(ways.jobs, len(hard))
    if jobs <= 1:
        for group in hard:
            yield from ([done] for done in _each(group, ways))
        return
    hard.sort(key=_largest_first(hard))
    packed = _pack(hard)
    with processes(jobs) as pool:
        futures = {pool.submit(_work, packed[id(group)], ways): group for group in hard}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                yield [_ended(futures[future], item, ways) for item in futures[future].items]


def _largest_first(groups: Iterable[_Group]) -> Callable[[_Group], tuple[int, str, int]]:
    """By how much there is left to show: machine by machine, since a process keeps what the
    actions of one share, then action by action."""
    left: Counter[str] = Counter()
    for group in groups:
        left[group.machine.name] += _left(group)
    return lambda group: (-left[group.machine.name], group.machine.name, -_left(group))


def _left(group: _Group) -> int:
    return sum(not item.known for item in group.items)


_unpacked: list[tuple[bytes, Machine]] = []
"""The last machine that this process was given."""


def _work(packed: _Packed, ways: Ways) -> list[_Done]:
    if not _unpacked or _unpacked[0][0] != packed.machine:
        machine = pickle.loads(packed.machine)  # noqa: S301  (the parent packed it)
        _unpacked[:] = [(packed.machine, machine)]
    return list(_each(_Group(_unpacked[0][1], packed.action, packed.items), ways))


def _each(group: _Group, ways: Ways) -> Iterator[_Done]:
    prover = _prover(group.machine, ways)
    written: set[str] = set()
    for given in group.items:
        item = replace(given, known=prover.usable(group.action, given.known))
        if len(item.known) == len(prover.solvers):
            done = _known(group, item, ways)
        else:
            done = _Done(item.place, prover.examine(item.prop, group.action, item.known))
        if ways.emit:
            files = []
            for file, text in prover.emit(done.found, item.prop):
                files.append(file)
                if file.file not in written:
                    smtlib.write(ways.emit, file.file, text)
                    written.add(file.file)
            found = replace(done.found, file=files[-1].file)
            done = replace(done, found=found, files=tuple(files))
        yield done


_latest: list[Prover] = []
"""The last prover of this process: what its machine shares among actions is built once."""


def _prover(machine: Machine, ways: Ways) -> Prover:
    asked = (ways.timeout_ms, chosen(ways.solver))
    latest = _latest[0] if _latest else None
    if latest is None or latest.machine is not machine or _asked(latest) != asked:
        _latest[:] = [Prover(machine, ways.timeout_ms, QUICK_MS, ways.solver)]
    return _latest[0]


def _asked(prover: Prover) -> tuple[int, tuple[str, ...]]:
    return prover.timeout_ms, prover.solvers


def _obligation(group: _Group, item: _Item, ways: Ways, verdict: Verdict) -> Obligation:
    """One for which no solver was asked."""
    machine, prop = group.machine.name, item.prop
    solver = "+".join(chosen(ways.solver))
    return Obligation(machine, prop.rule, prop.name, group.action, verdict, 0.0, solver=solver)


def _known(group: _Group, item: _Item, ways: Ways) -> _Done:
    shown = tuple(item.known[solver] for solver in chosen(ways.solver))
    found = _obligation(group, item, ways, Verdict.PROVED)
    return _Done(item.place, replace(found, shown=shown))


def _ended(group: _Group, item: _Item, ways: Ways) -> _Done:
    found = _obligation(group, item, ways, Verdict.UNKNOWN)
    return _Done(item.place, replace(found, reason="the solver's process ended"))
