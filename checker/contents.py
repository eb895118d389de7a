"""Whether each property of a machine says anything, and each action does: VACUOUS where not.

A proof of an empty property is easy.  So beside its proof each property shows where its
premises hold (`checker.vacuity`) and a machine that breaks it (`checker.mustfail`), and each
action a pinned instance in which it is taken.  What was shown before, and has not changed
since, is taken from the folder of proofs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, fields
from itertools import chain
from types import ModuleType
from typing import Any, Final

from kvclaims.checker import altered, columns, explore, finite, mustfail, mutants, planted, vacuity
from kvclaims.checker.altered import declared, instances_of
from kvclaims.checker.instances import PINNED
from kvclaims.checker.planted import Planted
from kvclaims.checker.proofcache import ProofCache, content_key
from kvclaims.checker.verdicts import Progress
from kvclaims.checker.workers import processes
from kvclaims.spec import language
from kvclaims.spec.language import Machine, Property
from kvclaims.spec.vocabulary import Verdict

_JUDGES: Final[tuple[ModuleType, ...]] = (
    language, altered, columns, explore, finite, mustfail, mutants, planted, vacuity
)  # fmt: skip
"""Modules whose text decides what is shown."""


ACTIONS: Final = "every action is taken"

HOW: Final = "see `kvclaims mutate --propose`"


@dataclass(frozen=True)
class Content:
    """What shows that a property says something, or an action does; `problem` if nothing does.

    `seen` maps each premise to the instance in which it holds.  `twin` is the must-fail twin
    and `breaks` what it breaks; a property that no change breaks has a `reason` instead.  One
    that does not break alone there has a step `alone` that breaks it so, or `follows` from others.
    """

    machine: str
    rule: str
    name: str
    verdict: Verdict
    seen: tuple[tuple[str, str], ...] = ()
    twin: str = ""
    instance: str = ""
    breaks: tuple[str, ...] = ()
    reason: str = ""
    alone: str = ""
    follows: tuple[str, ...] = ()
    problem: str = ""
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "rule": self.rule,
            "property": self.name,
            "verdict": self.verdict,
            "premises": dict(self.seen),
            "twin": self.twin or None,
            "instance": self.instance or None,
            "breaks": list(self.breaks),
            "reason": self.reason or None,
            "alone": self.alone or None,
            "follows": list(self.follows),
            "problem": self.problem or None,
            "cached": self.cached,
        }

    def __str__(self) -> str:
        rule = f"{self.rule} " if self.rule else ""
        return f"{self.verdict}: {rule}{self.name!r} of {self.machine}: {self.problem}"


def examine(machine: Machine, prop: Property) -> Content:
    """Look for where the premises of the property hold, and run its must-fail twin."""
    witnesses = vacuity.witnesses(machine, prop)
    seen = tuple((w.premise, w.instance) for w in witnesses if w.instance)
    entry = mustfail.entries().get((machine.name, prop.name))
    verdict, problem = Verdict.HOLDS, ""
    broken: tuple[str, ...] = ()
    if empty := [w.premise for w in witnesses if not w.instance]:
        verdict = Verdict.VACUOUS
        problem = f"no pinned instance has a state or step with {empty[0]}"
    elif entry is None:
        verdict, problem = Verdict.VACUOUS, f"no must-fail twin is known; {HOW}"
    elif entry.twin:
        verdict, problem, broken = _twin(entry, machine, prop)
    if verdict is Verdict.HOLDS and entry and entry.alone:
        verdict, problem = _alone(entry.alone, machine, prop)
    return Content(
        machine.name,
        prop.rule,
        prop.name,
        verdict,
        seen,
        entry.twin if entry else "",
        entry.instance if entry else "",
        broken,
        entry.reason if entry else "",
        str(entry.alone) if entry and entry.alone else "",
        (entry.follows or ()) if entry else (),
        problem,
    )


def _twin(
    entry: mustfail.Entry, machine: Machine, prop: Property
) -> tuple[Verdict, str, tuple[str, ...]]:
    broken = mustfail.broken_by(entry, machine, prop)
    if isinstance(broken, str):
        return Verdict.VACUOUS, f"{broken}; {HOW}", ()
    if prop.name not in broken:
        return Verdict.VACUOUS, f"its must-fail twin does not break it: {entry.twin}", broken
    if set(broken) != set(entry.breaks):
        told, found = ", ".join(entry.breaks), ", ".join(broken)
        return Verdict.VACUOUS, f"its must-fail twin breaks {found}, not {told}", broken
    return Verdict.HOLDS, "", broken


def _alone(wrong: Planted, machine: Machine, prop: Property) -> tuple[Verdict, str]:
    broken = mustfail.broken_alone(wrong, machine, prop)
    if isinstance(broken, str):
        return Verdict.VACUOUS, f"{broken}; {HOW}"
    if broken != (prop.name,):
        found = ", ".join(broken) or "nothing"
        return Verdict.VACUOUS, f"{wrong} is to break it alone, and breaks {found}; {HOW}"
    return Verdict.HOLDS, ""


def examine_actions(machine: Machine) -> Content:
    """Look for a pinned instance that takes each action."""
    idle = vacuity.never_fired(machine)
    verdict = Verdict.VACUOUS if idle else Verdict.HOLDS
    problem = f"no pinned instance takes {', '.join(idle)}" if idle else ""
    return Content(machine.name, "", ACTIONS, verdict, problem=problem)


# --- all of them -------------------------------------------------------------------------


def contents(
    machines: Sequence[Machine],
    rule: str | None = None,
    progress: Progress | None = None,
    cache: ProofCache | None = None,
    jobs: int = 1,
) -> tuple[Content, ...]:
    """What shows that the properties of the machines (of one rule, or all) say something, and
    where no rule is named, that their actions are taken."""
    found: dict[tuple[str, str], Content | None] = {}
    keys: dict[tuple[str, str], str] = {}
    tasks: list[tuple[Machine, tuple[str, ...]]] = []
    for machine in machines:
        names = [p.name for p in machine.properties if rule in (None, p.rule)]
        names += [ACTIONS] if rule is None else []
        if cache:
            keys |= _keys(machine, names)
        for name in names:
            known = cache.recall(keys[machine.name, name]) if cache else None
            found[machine.name, name] = recalled(known, machine.name, name) if known else None
        left = tuple(name for name in names if found[machine.name, name] is None)
        tasks += [(machine, left)] if left else []
    tasks.sort(key=lambda task: len(task[1]), reverse=True)
    for content in _run(tasks, jobs):
        place = content.machine, content.name
        found[place] = content
        if cache and content.verdict is Verdict.HOLDS:
            cache.remember(keys[place], asdict(content))
        if progress:
            progress(f"{content.machine}: {content.name}: says something: {content.verdict}")
    return tuple(content for content in found.values() if content)


def _run(tasks: Sequence[tuple[Machine, tuple[str, ...]]], jobs: int) -> Iterator[Content]:
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for task in tasks:
            yield from _each(*task)
        return
    with processes(jobs) as pool:
        for future in as_completed([pool.submit(_each, *task) for task in tasks]):
            yield from future.result()


def _each(machine: Machine, names: tuple[str, ...]) -> list[Content]:
    """In a process of its own: the instances of a machine are explored once for all of them."""
    machine = declared(machine)
    by_name = {prop.name: prop for prop in machine.properties}
    return [
        examine_actions(machine) if name == ACTIONS else examine(machine, by_name[name])
        for name in names
    ]


def _keys(machine: Machine, names: Sequence[str]) -> dict[tuple[str, str], str]:
    where = []
    for name in instances_of(machine.name):
        made = PINNED[name]()
        where.append(
            f"{name} {made.sizes} {made.numbers} {made.rigid} {made.limits} {made.choices}"
        )
    whole = content_key(machine, _JUDGES, *where)
    entries = mustfail.entries()
    return {
        (machine.name, name): hashlib.sha256(
            f"{whole}\n{name}\n{entries.get((machine.name, name))}".encode()
        ).hexdigest()
        for name in names
    }


def recalled(record: Mapping[str, Any], machine: str, name: str) -> Content | None:
    """What was kept of this property, or of the actions, of a machine; None where the record is
    of another form, or of something else."""
    if record.keys() != {each.name for each in fields(Content)}:
        return None
    seen, breaks, follows = record["seen"], record["breaks"], record["follows"]
    keys = ("machine", "rule", "name", "twin", "instance", "reason", "alone")
    words = [record[key] for key in keys]
    if not isinstance(seen, list) or not all(isinstance(one, list) for one in seen):
        return None
    if not isinstance(breaks, list) or not isinstance(follows, list):
        return None
    if any(len(one) != 2 for one in seen):
        return None
    if not all(isinstance(word, str) for word in (*words, *breaks, *follows, *chain(*seen))):
        return None
    # Only what says something is kept, and there is no problem with that.
    told = record["machine"], record["name"], record["verdict"], record["problem"]
    if told != (machine, name, Verdict.HOLDS, "") or record["cached"] is not False:
        return None
    pairs = tuple((premise, where) for premise, where in seen)
    own = {**record, "verdict": Verdict.HOLDS, "seen": pairs, "cached": True}
    return Content(**{**own, "breaks": tuple(breaks), "follows": tuple(follows)})
