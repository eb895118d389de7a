"""Whether what is derived says anything: refinements, rankings, and the composed machine.

A map that sends every state to one and every step to none is a refinement of anything, a ranking
whose premise never holds ranks nothing, and a property that is true of any two states is kept by
every step.  So beside their proofs it is asked, of small states that satisfy all invariants
(`checker.ground.Places`):

- of a refinement, that some step changes the image of each symbol that the abstract machine can
  change, that each step of the abstract machine that is declared is taken somewhere, and each
  abstract action by some concrete one;
- of a ranking, that it is there, that its premise holds somewhere before its goal does, and that
  each of its fair steps can be taken where it is said to help;
- of the composed machine, that each premise of a property holds somewhere, that the property is
  false of some states that satisfy nothing, and that each action can be taken;
- of every derived machine, that what it is given is shown of another one.

Where not, the verdict is VACUOUS.  States found so need not be reachable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Final

from kvclaims.checker import contents, ground, ranking, vacuity
from kvclaims.checker.contents import ACTIONS, Content
from kvclaims.checker.ground import Places
from kvclaims.checker.proofcache import ProofCache, canonical, content_key
from kvclaims.checker.ranking import RESPONSES, possible
from kvclaims.checker.vacuity import premises
from kvclaims.checker.verdicts import Progress
from kvclaims.checker.workers import processes
from kvclaims.spec import language
from kvclaims.spec.abstractions import refinements
from kvclaims.spec.composed import RUNTIME
from kvclaims.spec.composition import AT_REST
from kvclaims.spec.language import (
    TRUE,
    Machine,
    Property,
    ne,
    new,
    show,
    some,
    symbols_of,
)
from kvclaims.spec.progress import Response
from kvclaims.spec.refinement import Image, Refinement
from kvclaims.spec.vocabulary import Verdict

IMAGES: Final = "every image changes"
STEPS: Final = "every step of the map is taken"
REACHED: Final = "every abstract action is taken"
GIVEN: Final = "what is given is shown elsewhere"
"""What is asked of a refinement, and of every derived machine."""

_JUDGES: Final[tuple[ModuleType, ...]] = (language, contents, ground, ranking, vacuity)
"""Modules whose text decides what is shown, this one excepted."""


class _Asked:
    """Questions and what was missed: `problem` tells the first, `verdict` the worst."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self.undecided: list[str] = []

    def expect(self, what: str, answer: bool | None) -> None:
        if answer is None:
            self.undecided.append(what)
        elif not answer:
            self.missed.append(what)

    def content(self, machine: str, rule: str, name: str) -> Content:
        verdict, problem = Verdict.HOLDS, ""
        if self.missed:
            verdict, problem = Verdict.VACUOUS, "; ".join(self.missed)
        elif self.undecided:
            verdict = Verdict.UNKNOWN
            problem = f"not decided in time: {'; '.join(self.undecided)}"
        return Content(machine, rule, name, verdict, problem=problem)


def _first(answers: Iterator[bool | None]) -> bool | None:
    """Whether one of them says yes; None where none does and one was not decided."""
    undecided = False
    for answer in answers:
        if answer:
            return True
        undecided |= answer is None
    return None if undecided else False


# --- refinements -------------------------------------------------------------------------


def examine_refinement(refinement: Refinement) -> Iterator[Content]:
    """Whether the map of states, and that of steps, says anything."""
    machine = refinement.machine
    places = Places(replace(machine, given=(*machine.given, *_of_the_whole(refinement))))
    yield _images(refinement, places)
    yield _steps(refinement, places)
    yield _reached(refinement)


def _of_the_whole(refinement: Refinement) -> tuple[Property, ...]:
    """What holds in the states of the whole: its refinements are shown without invariants."""
    whole = RUNTIME.machine
    return whole.invariants if refinement.concrete.name == whole.name else ()


def _images(refinement: Refinement, places: Places) -> Content:
    asked = _Asked()
    for symbol in refinement.abstract.symbols:
        image = refinement.images[symbol.name]
        read = symbols_of(image.term)
        if symbol.rigid:  # no step changes it: it has to be read from the concrete machine
            asked.expect(f"the image of {symbol.name} is always the same", bool(read))
            continue
        answer = _changes(places, refinement.concrete, image)
        if answer is False:
            own = Image(image.places, symbol(*image.places))
            stands = _changes(Places(refinement.abstract), refinement.abstract, own)
            answer = None if stands is None else not stands  # a flag that may never be set
        asked.expect(f"no step changes the image of {symbol.name}", answer)
    return asked.content(refinement.name, "", IMAGES)


def _changes(places: Places, machine: Machine, image: Image) -> bool | None:
    """Whether some step of the machine changes the value, at some place."""
    changed = ne(new(image.term), image.term)
    for place in reversed(image.places):
        changed = some(place, changed)
    read = symbols_of(image.term)
    moving = (a for a in machine.actions if read & {u.target.symbol for u in a.updates})
    return _first(places.of_step(action, changed) for action in moving)


def _steps(refinement: Refinement, places: Places) -> Content:
    asked = _Asked()
    for action in refinement.concrete.actions:
        for step in refinement.steps[action.name]:
            when = some(step.each, step.when) if step.each is not None else step.when
            answer = places.of_step(action, when)
            asked.expect(f"{action.name} is never {step.action}", answer)
    return asked.content(refinement.name, "", STEPS)


def _reached(refinement: Refinement) -> Content:
    asked = _Asked()
    used = {step.action for steps in refinement.steps.values() for step in steps}
    known = {action.name for action in refinement.abstract.actions}
    for name in sorted(known - used - set(refinement.apart)):
        asked.expect(f"no step is {name}, and no reason is given", answer=False)
    for name in sorted(set(refinement.apart) - (known - used)):
        asked.expect(f"{name} is said to be taken nowhere, and is no such action", answer=False)
    return asked.content(refinement.name, "", REACHED)


# --- rankings ----------------------------------------------------------------------------


def examine_response(machine: Machine, response: Response) -> Content:
    """Whether what must happen in the end has a ranking, and the ranking says anything."""
    asked = _Asked()
    if response.ranking is None:
        asked.expect("it has no ranking: nothing is shown of any size", answer=False)
    else:
        places = Places(machine)
        for each in possible(machine, response, response.ranking):
            if each.of_state is not None:
                answer = places.of_state(each.of_state)
            else:
                answer = _first(places.of_step(action, here) for action, here in each.of_steps)
            asked.expect(f"in no state or step {each.what}", answer)
    return asked.content(f"{machine.name}/progress", response.rule, response.name)


# --- the composed machine ----------------------------------------------------------------


def examine_whole(machine: Machine, rule: str | None = None) -> Iterator[Content]:
    """Whether each property (of one rule, or of all) and action of the machine says anything."""
    kept, free = Places(machine), Places(replace(machine, given=(), properties=()), kept=False)
    for prop in machine.properties:
        if rule in (None, prop.rule):
            yield _property(machine, prop, kept, free)
    if rule is None:
        asked = _Asked()
        for action in machine.actions:
            asked.expect(f"no state allows {action.name}", kept.of_step(action, TRUE))
        yield asked.content(machine.name, "", ACTIONS)


def _property(machine: Machine, prop: Property, kept: Places, free: Places) -> Content:
    asked = _Asked()
    for premise in premises(prop.formula):
        if prop.of_steps:
            spoken = (action for action in machine.actions if prop.speaks_of(action.name))
            answer = _first(kept.of_step(action, premise) for action in spoken)
        else:
            answer = kept.of_state(premise)
        asked.expect(f"no state or step that keeps the rest has {show(premise)}", answer)
    params = machine.action(prop.on).params if prop.on else ()
    asked.expect("it is true of any states at all", free.of_pair(~prop.formula, params))
    return asked.content(machine.name, prop.rule, prop.name)


# --- what is given -----------------------------------------------------------------------


def examine_given(machine: Machine, known: Mapping[str, Machine]) -> Content:
    """Whether each invariant that the machine is given is one that another of the known machines
    has to show, and in the end none rests on itself."""
    asked = _Asked()
    shown = _shown(known)
    for prop in machine.given:
        if _named(prop) not in shown:
            asked.expect(f"{prop.rule} {prop.name!r} is assumed, and shown nowhere", answer=False)
    return asked.content(machine.name, "", GIVEN)


def _shown(known: Mapping[str, Machine]) -> set[tuple[str, str, str]]:
    """The invariants that are shown, as the machine has them that shows them and as the whole
    does of which that one is a part.  A machine counts once all that it is given is shown."""
    found: set[tuple[str, str, str]] = set()
    left = dict(known)
    while ready := [m for m in left.values() if all(_named(p) in found for p in m.given)]:
        for machine in ready:
            del left[machine.name]
            own = [_of_states(prop) for prop in machine.properties]
            for prop in (prop for prop in own if not prop.of_steps):
                found.add(_named(prop))
                for part in RUNTIME.parts:
                    if machine.name in (part.machine.name, f"{part.machine.name}-still"):
                        found.add(_named(part.property(prop)))
    return found


def _of_states(prop: Property) -> Property:
    """What is shown of a machine at rest is so of its states."""
    return replace(prop, on=None) if prop.on == AT_REST else prop


def _named(prop: Property) -> tuple[str, str, str]:
    return prop.rule, prop.name, canonical(prop.formula)


# --- all of them -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """Something to examine, and the text by which what was shown of it is kept."""

    of: Refinement | Machine
    response: Response | None = None
    rule: str | None = None

    def examine(self) -> list[Content]:
        if isinstance(self.of, Refinement):
            return list(examine_refinement(self.of))
        if self.response is not None:
            return [examine_response(self.of, self.response)]
        return list(examine_whole(self.of, self.rule))

    @property
    def says(self) -> list[tuple[str, str]]:
        """Of which machine the contents are, and their names."""
        if isinstance(self.of, Refinement):
            return [(self.of.name, name) for name in (IMAGES, STEPS, REACHED)]
        if self.response is not None:
            return [(f"{self.of.name}/progress", self.response.name)]
        names = [prop.name for prop in self.of.properties if self.rule in (None, prop.rule)]
        return [(self.of.name, name) for name in (*names, *([] if self.rule else [ACTIONS]))]

    @cached_property
    def key(self) -> str:
        judges = (*_JUDGES, sys.modules[__name__])
        if isinstance(self.of, Refinement):
            abstract = content_key(self.of.abstract, ())
            said = repr((self.of.name, self.of.images, self.of.steps, self.of.apart, abstract))
            machine = self.of.concrete
            given = (*self.of.lemmas, *self.of.corollaries, *_of_the_whole(self.of))
        else:
            said = repr((self.of.name, self.response, self.rule))
            machine, given = self.of, ()
        given = (*machine.given, *given)
        return content_key(machine, judges, said, *(canonical(p.formula) for p in given))


def emptiness(
    machines: Sequence[Machine],
    known: Mapping[str, Machine],
    rule: str | None = None,
    progress: Progress | None = None,
    cache: ProofCache | None = None,
    jobs: int = 1,
) -> tuple[Content, ...]:
    """What shows that what is derived from, or ranked of, these machines says something: of one
    rule, or of all.  `known` are all machines by name, and those are some of them."""
    tasks = list(_tasks(machines, rule))
    found: dict[int, tuple[Content, ...]] = {}
    for number, task in enumerate(tasks):
        if cache and (kept := _recalled(cache, task)):
            found[number] = kept
    for number, made in _run([(n, task) for n, task in enumerate(tasks) if n not in found], jobs):
        found[number] = tuple(made)
        if cache and all(content.verdict is Verdict.HOLDS for content in made):
            cache.remember(tasks[number].key, {"contents": [asdict(content) for content in made]})
        if progress:
            for content in made:
                progress(f"{content.machine}: {content.name}: says something: {content.verdict}")
    given = [examine_given(machine, known) for machine in machines if machine.given]
    return (*(content for number in sorted(found) for content in found[number]), *given)


def _recalled(cache: ProofCache, task: _Task) -> tuple[Content, ...]:
    """What was kept of a task: all of it, or nothing."""
    records = (cache.recall(task.key) or {}).get("contents")
    if not isinstance(records, list) or len(records) != len(task.says):
        return ()
    made = [
        contents.recalled(record, *said) if isinstance(record, dict) else None
        for record, said in zip(records, task.says, strict=True)
    ]
    whole = tuple(content for content in made if content)
    return whole if len(whole) == len(records) else ()


def _tasks(machines: Sequence[Machine], rule: str | None) -> Iterator[_Task]:
    names = {machine.name for machine in machines}
    for refinement in refinements().values():
        parts = refinement.obligations
        if names & {part.name for part in (*parts, refinement.machine)} and (
            rule is None or any(p.rule == rule for part in parts for p in part.properties)
        ):
            yield _Task(refinement)
    for machine in machines:
        for response in RESPONSES.get(machine.name, ()):
            if rule in (None, response.rule):
                yield _Task(machine, response)
        if machine.name == RUNTIME.name:
            yield _Task(machine, rule=rule)


def _run(tasks: Sequence[tuple[int, _Task]], jobs: int) -> Iterator[tuple[int, list[Content]]]:
    if min(jobs, len(tasks)) <= 1:
        yield from ((number, task.examine()) for number, task in tasks)
        return
    with processes(min(jobs, len(tasks))) as pool:
        futures = {pool.submit(task.examine): number for number, task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
