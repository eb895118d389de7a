"""What is derived says something: maps that forget, rankings of nothing, truths of any state."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvclaims.checker import cli, emptiness, prove, ranking
from kvclaims.checker.contents import ACTIONS, Content
from kvclaims.checker.emptiness import GIVEN, IMAGES, REACHED, STEPS, examine_given
from kvclaims.checker.ground import Places
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.proofcache import ProofCache
from kvclaims.spec import claims, composed, elastic, pool
from kvclaims.spec.abstractions import POOL_CLAIMS, POOL_FEASIBLE, derived, refinements
from kvclaims.spec.claims import CLAIM
from kvclaims.spec.composed import RUNTIME
from kvclaims.spec.composition import Step
from kvclaims.spec.feasible import FEASIBLE
from kvclaims.spec.language import (
    FALSE,
    TRUE,
    Lit,
    Machine,
    Property,
    Term,
    Var,
    both,
    either,
    eq,
    every,
    new,
    value,
    without_guard,
)
from kvclaims.spec.progress import Response
from kvclaims.spec.refinement import Image, Refinement
from kvclaims.spec.vocabulary import Cause, Decision, Phase, Verdict

KNOWN: Mapping[str, Machine] = {**MACHINES, **derived()}
_c = Var("c", CLAIM)


def found(*contents: Content) -> dict[str, str]:
    """What was not shown, by name."""
    return {c.name: f"{c.verdict}: {c.problem}" for c in contents if c.verdict is not Verdict.HOLDS}


# --- all that is declared ----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KNOWN if name in derived()])
def test_all_that_is_derived_says_something(name: str) -> None:
    asked = emptiness.emptiness([KNOWN[name]], KNOWN)
    assert found(*asked) == {}
    names = {content.name for content in asked}
    if "-refines-" in name:
        assert {IMAGES, STEPS, REACHED} <= names
    if name == "runtime":
        assert names == {ACTIONS, GIVEN, *(prop.name for prop in RUNTIME.properties)}


@pytest.mark.parametrize("name", ranking.RESPONSES)
def test_every_ranking_says_something(name: str) -> None:
    asked = emptiness.emptiness([MACHINES[name]], KNOWN)
    assert found(*asked) == {}
    assert [content.name for content in asked] == [r.name for r in ranking.RESPONSES[name]]


def test_where_a_condition_holds_is_found_in_small_states() -> None:
    submit = pool.POOL.action("submit")
    places = Places(pool.POOL)
    absent = claims.is_in(claims.c, Phase.ABSENT)
    assert places.of_step(submit, absent)
    assert places.of_step(submit, ~absent) is False
    assert places.of_step(submit, new(absent)) is False
    assert places.of_state(every(_c, claims.is_in(_c, Phase.SUBMITTED)))
    assert places.of_state(FALSE) is False
    # Of any two states nothing is known, not even what every state of the machine keeps.
    kept = both(*(prop.formula for prop in pool.POOL.invariants))
    assert places.of_state(~kept) is False
    assert Places(pool.POOL, kept=False).of_pair(new(~kept))
    assert Places(pool.POOL, kept=False).of_pair(new(kept) & ~new(kept)) is False


# --- refinements -------------------------------------------------------------------------


def _hollow() -> Refinement:
    """A pool seen so that nothing ever is or happens: every claim is absent for ever."""
    nothing = {
        "phase": value(claims.PHASE, Phase.ABSENT),
        "decision": value(claims.DECISION, Decision.NONE),
        "cause": value(claims.CAUSE, Cause.NONE),
        "generation": Lit(0, claims.generation.range),
        "holds": FALSE,
        "lost": FALSE,
    }
    return replace(
        POOL_CLAIMS,
        images={
            **POOL_CLAIMS.images,
            **{name: Image((_c,), term) for name, term in nothing.items()},
        },
        steps=dict.fromkeys(POOL_CLAIMS.steps, ()),
        lemmas=(),
    )


def test_a_map_that_sends_every_state_to_one_is_vacuous() -> None:
    missed = found(*emptiness.examine_refinement(_hollow()))
    assert set(missed) == {IMAGES, REACHED}
    assert "VACUOUS: no step changes the image of phase" in missed[IMAGES]
    assert "no step is accept, and no reason is given" in missed[REACHED]
    assert "clip" not in missed[REACHED]


def test_one_constant_image_is_vacuous() -> None:
    images = {**POOL_FEASIBLE.images, "granted": Image((), Lit(0, pool.promised.sort))}
    missed = found(*emptiness.examine_refinement(replace(POOL_FEASIBLE, images=images)))
    assert missed == {IMAGES: "VACUOUS: no step changes the image of granted"}


def test_an_image_that_is_the_same_in_every_state_that_keeps_the_invariants_is_vacuous() -> None:
    """Not constant by its text: both of an impossible condition."""
    never = both(claims.is_in(_c, Phase.ABSENT), claims.lost(_c))
    images = {**POOL_CLAIMS.images, "lost": Image((_c,), never)}
    missed = found(*emptiness.examine_refinement(replace(POOL_CLAIMS, images=images)))
    assert missed == {IMAGES: "VACUOUS: no step changes the image of lost"}


def test_a_rigid_image_is_read_from_the_concrete_machine() -> None:
    images = {**POOL_CLAIMS.images, "hard": Image((_c,), TRUE)}
    missed = found(*emptiness.examine_refinement(replace(POOL_CLAIMS, images=images)))
    assert missed == {IMAGES: "VACUOUS: the image of hard is always the same"}


def test_a_step_of_the_map_that_is_never_taken_is_vacuous() -> None:
    never = claims.is_in(claims.c, Phase.ABSENT)
    steps = {**POOL_CLAIMS.steps, "accept": (Step("accept", when=never),)}
    missed = found(*emptiness.examine_refinement(replace(POOL_CLAIMS, steps=steps)))
    assert missed == {STEPS: "VACUOUS: accept is never accept"}


def test_a_reason_is_of_an_action_that_is_taken_nowhere() -> None:
    apart = {**POOL_CLAIMS.apart, "accept": "it is taken", "fly": "there is no such action"}
    missed = found(*emptiness.examine_refinement(replace(POOL_CLAIMS, apart=apart)))
    assert set(missed) == {REACHED}
    assert "accept is said to be taken nowhere" in missed[REACHED]
    assert "fly is said to be taken nowhere" in missed[REACHED]


def test_prove_says_that_a_hollow_refinement_is_vacuous(monkeypatch: pytest.MonkeyPatch) -> None:
    hollow = _hollow()
    machines = {**derived(), **{machine.name: machine for machine in hollow.obligations}}
    machines[hollow.name] = hollow.machine
    monkeypatch.setattr(prove, "derived", lambda: machines)
    known = {**refinements(), hollow.name: hollow}
    monkeypatch.setattr(emptiness, "refinements", lambda: known)
    code, told = _told("pool-refines-claims")
    assert (code, told["verdict"]) == (3, "VACUOUS")
    code, told = _told("pool-refines-claims-start")
    assert (code, told["verdict"]) == (3, "VACUOUS")
    assert {o["verdict"] for o in told["obligations"]} == {"PROVED"}


def _told(machine: str, *more: str) -> tuple[int, dict[str, object]]:
    out = io.StringIO()
    arguments = ["prove", "--machine", machine, *more, "--no-cache", "--jobs", "1", "--json"]
    code = cli.run(arguments, out)
    return code, json.loads(out.getvalue())


# --- rankings ----------------------------------------------------------------------------


def _v4(**changes: object) -> tuple[Response, ...]:
    """The responses of the elastic memory, the second of them changed."""
    first, second = elastic.RESPONSES
    return first, replace(second, **changes)  # type: ignore[arg-type]


def _ranks(**changes: object) -> tuple[Response, ...]:
    kept = elastic.RESPONSES[1].ranking
    assert kept is not None
    return _v4(ranking=replace(kept, **changes))  # type: ignore[arg-type]


UNDO = elastic.is_in("unreturning")
NEVER = UNDO & ~UNDO


@pytest.mark.parametrize(
    ("responses", "problem"),
    [
        (_v4(premise=NEVER), "in no state or step the premise holds before the goal does"),
        (_v4(goal=UNDO), "in no state or step the premise holds before the goal does"),
        (_v4(ranking=None), "it has no ranking"),
        (_ranks(pending=NEVER), "in no state or step case 1, "),
    ],
)
def test_a_ranking_of_nothing_is_vacuous(
    responses: tuple[Response, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "RESPONSES", {**ranking.RESPONSES, "elastic": responses})
    monkeypatch.setattr(emptiness, "RESPONSES", ranking.RESPONSES)
    asked = emptiness.emptiness([elastic.ELASTIC], KNOWN, "V4")
    missed = found(*asked)
    assert set(missed) == {responses[1].name}
    assert problem in missed[responses[1].name]
    assert missed[responses[1].name].startswith("VACUOUS")


def test_prove_says_that_a_premise_that_never_holds_is_vacuous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ranking.RESPONSES, "elastic", _v4(premise=NEVER))  # type: ignore[arg-type]
    code, told = _told("elastic", "--rule", "V4")
    assert (code, told["verdict"]) == (3, "VACUOUS")
    assert {o["verdict"] for o in told["obligations"]} == {"PROVED"}  # type: ignore[attr-defined]


# --- the composed machine ----------------------------------------------------------------


def _whole(name: str, formula: Term) -> Machine:
    """The composed machine with one property that says something else."""
    (old,) = (prop for prop in RUNTIME.machine.properties if prop.name == name)
    props = RUNTIME.machine.properties
    return replace(
        RUNTIME.machine,
        properties=tuple(replace(p, formula=formula) if p is old else p for p in props),
    )


_TAKES = composed.takes_up(composed.c)


@pytest.mark.parametrize(
    ("name", "formula", "problem"),
    [
        ("within the grant", every(composed.c, _TAKES <= _TAKES), "true of any states"),
        (
            "within the grant",
            every(composed.c, both(_TAKES > 0, _TAKES < 0) >> eq(_TAKES, 7)),
            "no state or step that keeps the rest has",
        ),
        (
            "the clock does not run back",
            either(new(_TAKES) <= 0, new(_TAKES) > 0),
            "true of any states",
        ),
    ],
)
def test_a_property_that_says_nothing_is_vacuous(name: str, formula: Term, problem: str) -> None:
    closed = every(composed.c, formula) if formula.free else formula
    whole = _whole(name, closed)
    (prop,) = (prop for prop in whole.properties if prop.name == name)
    missed = found(*emptiness.examine_whole(whole, prop.rule))
    assert set(missed) == {name}
    assert problem in missed[name]


def test_a_premise_of_the_excepted_step_alone_is_vacuous() -> None:
    """A property of every step but one says nothing where only that one does what it speaks of."""
    was, will = (composed.in_pool(composed.c, p) for p in (Phase.SUBMITTED, Phase.REFUSED))
    formula = every(composed.c, both(was, new(will)) >> (new(_TAKES) <= 0))
    for action, missed in ((None, False), ("refuse", True)):
        prop = Property("L1", "a refusal takes nothing", formula, "", but=action)
        whole = replace(RUNTIME.machine, properties=(prop,))
        assert bool(found(*emptiness.examine_whole(whole, "L1"))) == missed


def test_prove_says_that_a_tautology_of_the_whole_is_vacuous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = _whole("within the grant", every(composed.c, _TAKES <= _TAKES))
    monkeypatch.setattr(prove, "derived", lambda: {**derived(), "runtime": whole})
    code, told = _told("runtime", "--rule", "Q2")
    assert (code, told["verdict"]) == (3, "VACUOUS")
    assert {o["verdict"] for o in told["obligations"]} == {"PROVED"}  # type: ignore[attr-defined]


def test_a_move_that_nothing_allows_is_vacuous() -> None:
    accept = RUNTIME.machine.action("accept")
    never = replace(accept.guards[0], condition=FALSE)
    whole = RUNTIME.machine.with_action(replace(accept, guards=(never,)))
    missed = found(*emptiness.examine_whole(replace(whole, properties=())))
    assert missed == {ACTIONS: "VACUOUS: no state allows accept"}


# --- what is given -----------------------------------------------------------------------

ASSUMED = Property("L1", "assumed", every(_c, claims.is_in(_c, Phase.ABSENT)), "no claim ever")


def test_what_a_derived_machine_is_given_is_shown_of_another() -> None:
    machine = replace(POOL_CLAIMS.machine, given=(*POOL_CLAIMS.machine.given, ASSUMED))
    known = {**KNOWN, machine.name: machine}
    assert found(examine_given(machine, known)) == {
        GIVEN: "VACUOUS: L1 'assumed' is assumed, and shown nowhere"
    }
    assert found(examine_given(POOL_CLAIMS.machine, KNOWN)) == {}


def test_another_formula_under_a_known_name_is_not_shown() -> None:
    first, *rest = POOL_CLAIMS.machine.given
    machine = replace(POOL_CLAIMS.machine, given=(replace(first, formula=FALSE), *rest))
    assert set(found(examine_given(machine, {**KNOWN, machine.name: machine}))) == {GIVEN}


def test_machines_that_give_each_other_what_they_show_have_shown_nothing() -> None:
    one = replace(claims.CLAIMS, name="one", given=(ASSUMED,), properties=(ASSUMED,), derived=True)
    two = replace(one, name="two")
    known = {**KNOWN, "one": one, "two": two}
    assert set(found(examine_given(one, known))) == {GIVEN}
    assert set(found(examine_given(two, known))) == {GIVEN}


def test_no_machine_that_is_declared_whole_is_given_anything() -> None:
    assert [m.name for m in MACHINES.values() if m.given or m.derived] == []


# --- what was shown before ---------------------------------------------------------------


def test_what_was_shown_is_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProofCache(tmp_path)
    asked = [POOL_CLAIMS.machine]
    first = emptiness.emptiness(asked, KNOWN, cache=cache)
    second = emptiness.emptiness(asked, KNOWN, cache=cache)
    names = {content.name for content in second if content.cached}
    assert names == {IMAGES, STEPS, REACHED}
    assert [replace(content, cached=False) for content in second] == list(first)

    (kept,) = tmp_path.glob("*/*.json")
    record = json.loads(kept.read_text(encoding="utf-8"))["record"]["contents"]
    for damaged in ([], record[:2], [record[0]] * 3, ["", "", ""], [{**record[0], "name": "x"}]):
        cache.remember(kept.stem, {"contents": damaged})
        again = emptiness.emptiness(asked, KNOWN, cache=cache)
        assert [replace(content, cached=False) for content in again] == list(first)
        assert not any(content.cached for content in again)

    hollow = _hollow()
    known = {**refinements(), hollow.name: hollow}
    monkeypatch.setattr(emptiness, "refinements", lambda: known)
    for _ in range(2):  # what is vacuous is not kept
        third = emptiness.emptiness([hollow.machine], KNOWN, cache=cache)
        assert not any(content.cached for content in third)
        assert set(found(*third)) == {IMAGES, REACHED}


def test_all_that_a_refinement_is_asked_with_is_part_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(found: Refinement) -> str:
        return emptiness._Task(found).key

    of_the_pool = refinements()["runtime-refines-pool"]
    before = key(of_the_pool)
    weaker = without_guard(FEASIBLE, "admit", 0)
    assert key(replace(POOL_CLAIMS, lemmas=())) != key(POOL_CLAIMS)
    assert key(replace(POOL_FEASIBLE, abstract=weaker)) != key(POOL_FEASIBLE)
    monkeypatch.setattr(emptiness, "RUNTIME", replace(RUNTIME, properties=RUNTIME.properties[1:]))
    assert key(of_the_pool) != before


def test_processes_find_the_same() -> None:
    asked = [MACHINES["elastic"], MACHINES["claims"]]
    assert emptiness.emptiness(asked, KNOWN, jobs=2) == emptiness.emptiness(asked, KNOWN)
