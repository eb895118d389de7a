"""F4's blame against Z3: no set of fewer claims would have sufficed, and none can be spared.

Random situations with reserves, footprints that overlap and contents that the request would
compute itself.  For each, Z3's optimizer finds how few claims have to end at least, from the
definition and not from the search of `kvclaims.spec.fewest`; a second query asks whether part of
the blamed claims would do.  The situations are random, so what is shown is HOLDS.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import z3

from kvclaims.checker.induction import Obligation
from kvclaims.spec.feasibility import Judgement, Promise, Situation, judge
from kvclaims.spec.vocabulary import Outcome, Verdict

MACHINE: Final = "feasibility"
NAME: Final = "minimal blame"
INSTANCES: Final = 150
CLAIMS: Final = 9
BLOCKS: Final = 14
SEED: Final = 0

Judge = Callable[[Situation], Judgement]


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a judgement, and on what situation."""

    reason: str
    situation: Situation


def minimal_blame(
    judging: Judge = judge, instances: int = INSTANCES, seed: int = SEED
) -> Obligation:
    """F4 on so many random situations: HOLDS, VIOLATED with the first that is judged wrongly,
    or VACUOUS where nothing was refused."""
    start = time.perf_counter()
    rng = random.Random(seed)
    refused = 0
    verdict, reason = Verdict.HOLDS, ""
    for _ in range(instances):
        situation = random_situation(rng)
        refused += judge(situation).outcome is Outcome.REFUSED
        if wrong := next(judged_wrongly(situation, judging), None):
            verdict, reason = Verdict.VIOLATED, f"{wrong.reason} in {situation}"
            break
    if verdict is Verdict.HOLDS and not refused:
        verdict, reason = Verdict.VACUOUS, "no situation was refused"
    where = (
        f"{instances} random situations of at most {CLAIMS} claims and {BLOCKS} blocks, seed {seed}"
    )
    seconds = time.perf_counter() - start
    return Obligation(MACHINE, "F4", NAME, where, verdict, seconds, reason=reason)


def random_situation(rng: random.Random, claims: int = CLAIMS, blocks: int = BLOCKS) -> Situation:
    """Claims that overlap, some with reserves of which the request would draw a part."""
    names = [f"c{i}" for i in range(rng.randint(1, claims))]
    contents = [f"x{i}" for i in range(4)]
    promises, materializes = {}, {}
    for name in names:
        covered = rng.sample(range(blocks), rng.randint(0, min(6, blocks)))
        promises[name] = Promise(frozenset(covered), rng.choice((0, 0, 1, 2, 3)))
        drawn = rng.sample(contents, rng.randint(0, promises[name].reserve))
        materializes[name] = frozenset(drawn)
    active = {
        f"r{i}": frozenset(rng.sample(range(blocks), rng.randint(0, 4)))
        for i in range(rng.randint(0, 2))
    }
    holds = frozenset(rng.sample(range(blocks), rng.randint(0, 3)))
    usable = rng.randint(blocks, blocks + 8)
    need = rng.randint(0, usable)
    return Situation(usable, promises, active, need, holds, materializes=materializes)


def judged_wrongly(situation: Situation, judging: Judge = judge) -> Iterator[Wrong]:
    """What the judgement breaks of F4, asked of Z3."""
    found = judging(situation)
    blamed = found.blocking_claims
    if judging(_reordered(situation)) != found:
        yield Wrong("the same situation, told in another order, is judged differently", situation)
    least = fewest_claims(situation)
    if least is None or least == 0:
        if blamed:
            yield Wrong(f"{list(blamed)} are blamed, and ending claims is not needed", situation)
        return
    if found.outcome is not Outcome.REFUSED:
        yield Wrong(f"claims have to end, and the request is told {found.outcome}", situation)
        return
    if not set(blamed) <= set(situation.promises) or not suffices(situation, blamed):
        yield Wrong(f"ending {list(blamed)} does not make the request fit", situation)
    if part := part_that_suffices(situation, blamed):
        yield Wrong(f"{list(blamed)} are blamed, and ending {list(part)} suffices", situation)
    if len(blamed) > least:
        yield Wrong(f"{len(blamed)} claims are blamed, and {least} suffice", situation)


def fewest_claims(situation: Situation) -> int | None:
    """How many claims have to end at least; None where that does not help."""
    optimizer = z3.Optimize()
    ended = _ended(situation)
    optimizer.add(_fits(situation, ended))
    for end in ended.values():
        optimizer.add_soft(z3.Not(end))
    if optimizer.check() != z3.sat:
        return None
    model = optimizer.model()
    values = [model.eval(end, model_completion=True) for end in ended.values()]
    return sum(1 for value in values if z3.is_true(value))


def suffices(situation: Situation, claims: Iterable[str]) -> bool:
    """Whether the request fits once exactly these claims have ended, and all other requests."""
    return part_that_suffices(situation, claims, whole=True) is not None


def part_that_suffices(
    situation: Situation, claims: Iterable[str], whole: bool = False
) -> Sequence[str] | None:
    """A proper subset of the claims (or, with `whole`, all of them) whose end suffices."""
    solver = z3.Solver()
    ended = _ended(situation)
    among = set(claims)
    solver.add(_fits(situation, ended))
    solver.add([z3.Not(e) for claim, e in ended.items() if claim not in among])
    inside = z3.And([e for claim, e in ended.items() if claim in among])
    solver.add(inside if whole else z3.Not(inside))
    if solver.check() != z3.sat:
        return None
    model = solver.model()
    return [c for c, e in ended.items() if z3.is_true(model.eval(e, model_completion=True))]


def _ended(situation: Situation) -> dict[str, Any]:
    return {claim: z3.Bool(f"ended {claim}") for claim in situation.promises}


def _fits(situation: Situation, ended: dict[str, Any]) -> Any:
    """The definition: each block that the request holds or a claim in force covers, once; what
    the request needs; each reserve in force, less each content drawn from one, once.

    A content counts 1 where it is not drawn, instead of −1 where it is, with that much more room.
    """
    blocks = {b for promise in situation.promises.values() for b in promise.covered}
    contents = {x for drawn in situation.materializes.values() for x in drawn}
    room = situation.usable - len(situation.holds) - situation.need
    taken: list[tuple[Any, int]] = []
    for block in blocks - situation.holds:
        covering = [c for c, p in situation.promises.items() if block in p.covered]
        taken.append((z3.Not(z3.And([ended[c] for c in covering])), 1))
    for claim, promise in situation.promises.items():
        taken.append((z3.Not(ended[claim]), promise.reserve))
    for content in contents:
        drawing = [c for c, drawn in situation.materializes.items() if content in drawn]
        taken.append((z3.And([ended[c] for c in drawing]), 1))
        room += 1
    weighed = [(what, weight) for what, weight in taken if weight]
    return z3.PbLe(weighed, room) if weighed else z3.BoolVal(room >= 0)


def _reordered(situation: Situation) -> Situation:
    promises = dict(reversed(list(situation.promises.items())))
    return replace(situation, promises=promises)
