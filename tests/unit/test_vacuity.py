"""No vacuity: premises that hold somewhere, must-fail twins, actions that are taken."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from kvclaims.checker import cli, contents, instances, mustfail, planted
from kvclaims.checker.altered import instances_of, pinned, pinned_for
from kvclaims.checker.consequences import consequences
from kvclaims.checker.contents import ACTIONS, Content, examine, examine_actions
from kvclaims.checker.finite import Instance
from kvclaims.checker.instances import MACHINES, PINNED
from kvclaims.checker.mustfail import (
    Entry,
    broken_alone,
    broken_by,
    entries,
    missing,
    watched,
)
from kvclaims.checker.proofcache import ProofCache
from kvclaims.checker.prove import Ways, prove_machine
from kvclaims.checker.vacuity import never_fired, premises, witnesses
from kvclaims.checker.verdicts import worst
from kvclaims.spec import claims, owners
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    FALSE,
    TRUE,
    Guard,
    Machine,
    Property,
    Term,
    both,
    either,
    eq,
    every,
    iff,
    new,
    show,
    some,
)
from kvclaims.spec.vocabulary import Verdict

SMALL = (
    "owners",
    "written",
    "tiers",
    "elastic",
    "trace",
    "events",
    "ends",
    "blockclaims",
    "arbitration",
)
"""Machines whose whole table is run here; `kvclaims prove` runs that of all of them."""

c = claims.c
holds, lost, timed = claims.holds(c), claims.lost(c), claims.timed(c)


# --- premises ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (every(c, holds >> lost), ["∃c. holds(c)"]),
        (every(c, holds >> (timed >> lost)), ["∃c. holds(c) ∧ timed(c)"]),
        (every(c, ~holds | lost), ["∃c. holds(c)"]),
        (every(c, either(~holds, ~timed, lost)), ["∃c. holds(c) ∧ timed(c)"]),
        (every(c, ~(holds & lost)), ["∃c. holds(c)"]),
        (~some(c, holds & lost), ["∃c. holds(c)"]),
        (every(c, iff(holds, lost)), ["∃c. holds(c)", "∃c. ¬holds(c)"]),
        (both(every(c, holds >> lost), every(c, timed >> lost)), ["∃c. holds(c)", "∃c. timed(c)"]),
        (every(c, holds | lost), ["∃c. true"]),
        (every(c, holds >> new(lost)), ["∃c. holds(c)"]),
        (TRUE, ["false"]),
        (~FALSE, ["false"]),
    ],
)
def test_what_must_hold_somewhere(formula: Term, expected: list[str]) -> None:
    assert [show(premise) for premise in premises(formula)] == expected


@pytest.mark.parametrize("machine", SMALL)
def test_every_premise_holds_somewhere(machine: str) -> None:
    for prop in MACHINES[machine].properties:
        for witness in witnesses(MACHINES[machine], prop):
            assert witness.instance in instances_of(machine), (prop.name, witness.premise)
            assert witness.seen > 0


# --- the table ---------------------------------------------------------------------------


def test_every_property_of_every_machine_has_a_must_fail_twin() -> None:
    assert list(missing()) == []


def test_few_properties_break_with_no_single_change() -> None:
    """Each of them follows from others, or from definitions; the table says from which."""
    reasons = [(e.machine, e.property) for e in entries().values() if e.reason]
    assert reasons == [("arbitration", "without claims it fits")]


@pytest.mark.parametrize("machine", SMALL)
def test_twins_break_exactly_what_the_table_says(machine: str) -> None:
    declared = MACHINES[machine]
    for prop in declared.properties:
        entry = entries()[machine, prop.name]
        if entry.twin:
            assert broken_by(entry, declared, prop) == tuple(sorted(entry.breaks)), prop.name


def test_each_property_is_broken_alone_or_follows_from_others() -> None:
    told = entries().values()
    by_twin = [entry for entry in told if len(entry.breaks) == 1]
    by_step = [entry for entry in told if entry.alone]
    consequences = [entry for entry in told if entry.follows is not None]
    assert (len(by_twin), len(by_step), len(consequences)) == (189, 35, 20)
    assert len(told) == 189 + 35 + 20


@pytest.mark.parametrize("machine", SMALL)
def test_a_planted_step_breaks_the_property_alone(machine: str) -> None:
    declared = MACHINES[machine]
    for prop in declared.properties:
        if wrong := entries()[machine, prop.name].alone:
            assert broken_alone(wrong, declared, prop) == (prop.name,)


SIGNED = next(p for p in owners.OWNERS.properties if p.name == "no other name is signed")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"instance": "elsewhere"}, "there is no instance 'elsewhere' any more"),
        ({"state": 10**9}, "there is no state 1000000000 any more"),
        ({"step": "gone"}, "there is no step 'gone' any more"),
        ({"leaves": {"gone": "1"}}, "there is no gone = 1 any more"),
        ({"leaves": {"signed(owner1, claim0)": "many"}}, "there is no signed"),
        ({"leaves": {"signed(owner1, claim0)": "0"}}, "is what the step leaves as declared"),
        ({"leaves": {"knows(owner1, claim0)": "true"}}, "to break it alone, and breaks only the"),
        ({"leaves": {}}, "to break it alone, and breaks nothing"),
    ],
)
def test_a_planted_step_that_does_not_break_it_alone_is_vacuous(
    change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ("owners", SIGNED.name)
    planted = entries()[key].alone
    assert planted is not None
    entry = replace(entries()[key], alone=replace(planted, **change))  # type: ignore[arg-type]
    monkeypatch.setattr(mustfail, "entries", lambda: {**entries(), key: entry})
    found = examine(owners.OWNERS, SIGNED)
    assert found.verdict is Verdict.VACUOUS
    assert says in found.problem


def test_a_step_that_breaks_a_property_alone_is_found() -> None:
    machine = owners.OWNERS
    number = machine.properties.index(SIGNED)
    on = [action.name for action in machine.actions]
    known, seen = pinned("owners"), watched(machine, SIGNED)
    found = planted.find(known, number, on, seen)
    assert found is not None
    assert planted.broken_by(found, known, seen) == {number}
    assert planted.find(known, number, on, [*range(number)]) is None


# --- what follows from others ------------------------------------------------------------


def follows(machine: str, monkeypatch: pytest.MonkeyPatch, **told: tuple[str, ...]) -> Verdict:
    """The verdict on what the table says, by both solvers, with other words of one property."""
    more = {
        (machine, name): replace(entries()[machine, name], follows=others)
        for name, others in told.items()
    }
    monkeypatch.setattr("kvclaims.checker.consequences.entries", lambda: {**entries(), **more})
    found = consequences(MACHINES[machine])
    assert found is not None
    return worst([o.verdict for o in prove_machine(found, ways=Ways(solver="both"))])


@pytest.mark.parametrize("machine", ["claims", "owners", "tiers", "elastic", "feasible", "events"])
def test_what_follows_from_others_is_proved(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert follows(machine, monkeypatch) is Verdict.PROVED


@pytest.mark.parametrize(
    ("machine", "name", "too_little"),
    [
        ("tiers", "recomputing is not restoring", ("a restored claim names its tier",)),  # a state
        ("feasible", "granted only with headroom", ()),  # a step of one action
        ("claims", "no harm outside responsibility", ()),  # any step
        ("claims", "what is kept elsewhere holds there", ("moves along the table",)),
    ],
)
def test_what_does_not_follow_is_refuted(
    machine: str, name: str, too_little: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follows(machine, monkeypatch, **{name: too_little}) is Verdict.NOT_INDUCTIVE


@pytest.mark.parametrize(
    ("machine", "name", "others"),
    [
        ("feasible", "granted only with headroom", ("no such property",)),
        ("feasible", "granted only with headroom", ("granted only with headroom",)),  # itself
        ("claims", "no harm outside responsibility", ("time is counted",)),
    ],
)
def test_a_property_follows_from_what_it_is_told_from(
    machine: str, name: str, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A goal from other goals: of what merely makes the induction go through there may be less."""
    with pytest.raises(BadOperation, match="which it is not told from"):
        follows(machine, monkeypatch, **{name: others})


def test_a_machine_of_which_nothing_follows_asks_nothing() -> None:
    assert consequences(MACHINES["blockclaims"]) is None


@pytest.mark.parametrize(
    "told", ['twin = "t"\nbreaks = ["p", "q"]', 'twin = "t"\nbreaks = ["p"]\nfollows = []']
)
def test_an_entry_tells_one_thing_that_tells_it_from_others(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mustfail.toml"
    table.write_text(f'[[property]]\nmachine = "m"\nproperty = "p"\n{told}\n')
    monkeypatch.setattr(mustfail, "TABLE", table)
    with pytest.raises(BadOperation, match="needs one thing that tells it from what breaks with"):
        entries.__wrapped__()


def test_a_property_without_an_entry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *rest) = entries()
    monkeypatch.setattr(mustfail, "entries", lambda: {key: entries()[key] for key in rest})
    assert list(missing()) == [f"{first[0]}: {first[1]!r} has no must-fail twin in mustfail.toml"]


def test_an_entry_of_no_property_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Entry("owners", "no such property", reason="it is gone")
    more = {**entries(), ("owners", "no such property"): gone}
    monkeypatch.setattr(mustfail, "entries", lambda: more)
    (line,) = missing()
    assert "no property any more" in line


# --- emptied on purpose ------------------------------------------------------------------

GOAL = next(prop for prop in owners.OWNERS.properties if prop.goal and not prop.of_steps)


def emptied(formula: Term) -> tuple[Machine, Property]:
    """The owners' machine with one property that says nothing any more."""
    hollow = replace(GOAL, formula=formula)
    rest = tuple(hollow if prop is GOAL else prop for prop in owners.OWNERS.properties)
    return replace(owners.OWNERS, properties=rest), hollow


def test_a_premise_that_never_holds_is_vacuous() -> None:
    found = examine(*emptied(every(c, (owners.granted(c) > 5) >> eq(owners.granted(c), 0))))
    assert found.verdict is Verdict.VACUOUS
    assert "no pinned instance has a state or step with ∃c. 5 < granted(c)" in found.problem


@pytest.mark.parametrize("formula", [TRUE, every(c, eq(owners.granted(c), owners.granted(c)))])
def test_a_formula_that_is_always_true_is_vacuous(formula: Term) -> None:
    assert examine(*emptied(formula)).verdict is Verdict.VACUOUS


def test_a_tautology_has_no_twin_that_breaks_it() -> None:
    found = examine(*emptied(every(c, eq(owners.granted(c), owners.granted(c)))))
    assert "does not break it" in found.problem


def test_the_property_itself_says_something() -> None:
    found = examine(owners.OWNERS, GOAL)
    assert (found.verdict, found.problem) == (Verdict.HOLDS, "")
    assert found.seen
    assert GOAL.name in found.breaks


def test_an_action_that_is_never_taken_is_vacuous() -> None:
    idle = replace(owners.OWNERS.action("grant"), guards=(Guard(("Q2",), FALSE, "never"),))
    machine = owners.OWNERS.with_action(idle)
    assert never_fired(machine) == ("grant",)
    found = examine_actions(machine)
    assert found.verdict is Verdict.VACUOUS
    assert "grant" in found.problem
    assert examine_actions(owners.OWNERS).verdict is Verdict.HOLDS


def test_a_twin_with_another_effect_than_pinned_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = entries()["owners", GOAL.name]
    other = {**entries(), ("owners", GOAL.name): replace(entry, breaks=(*entry.breaks, "more"))}
    monkeypatch.setattr(mustfail, "entries", lambda: other)
    found = examine(owners.OWNERS, GOAL)
    assert found.verdict is Verdict.VACUOUS
    assert "breaks" in found.problem


def test_a_twin_that_is_not_made_any_more_is_vacuous(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(entries()["owners", GOAL.name], twin="owners.grant: gone")
    other = {**entries(), ("owners", GOAL.name): entry}
    monkeypatch.setattr(mustfail, "entries", lambda: other)
    found = examine(owners.OWNERS, GOAL)
    assert found.verdict is Verdict.VACUOUS
    assert "no mutant" in found.problem


def test_a_goal_is_told_from_goals_and_a_strengthening_from_everything() -> None:
    machine = MACHINES["elastic"]
    goals = [i for i, prop in enumerate(machine.properties) if prop.goal]
    helper = next(prop for prop in machine.properties if not prop.goal)
    assert watched(machine, machine.properties[goals[0]]) == goals
    assert watched(machine, helper) == list(range(len(machine.properties)))


# --- the command -------------------------------------------------------------------------


@pytest.fixture
def hollow(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The machine of owners as declared has a property that says nothing; its name."""
    many = owners.granted(c)
    machine, prop = emptied(every(c, ((many > 5) & (many < 3)) >> eq(many, 0)))
    monkeypatch.setitem(MACHINES, "owners", machine)
    for name in instances_of("owners"):
        whole: Instance = PINNED[name]()
        monkeypatch.setitem(PINNED, name, partial(replace, whole, machine=machine))
    pinned.cache_clear()
    yield prop.name
    pinned.cache_clear()


def test_prove_says_vacuous_and_ends_with_3(hollow: str) -> None:
    out = io.StringIO()
    arguments = ["prove", "--machine", "owners", "--no-cache", "--jobs", "1", "--json"]
    assert cli.run(arguments, out) == 3
    told = json.loads(out.getvalue())
    assert told["verdict"] == "VACUOUS"
    empty = [content for content in told["contents"] if content["verdict"] == "VACUOUS"]
    assert empty[0]["property"] == hollow
    # The others cannot be told from it any more: their twins broke it too.
    assert all(hollow in entries()["owners", c["property"]].breaks for c in empty[1:])


def test_prove_shows_that_each_property_says_something() -> None:
    out = io.StringIO()
    arguments = ["prove", "--machine", "arbitration", "--no-cache", "--jobs", "1", "--json"]
    assert cli.run(arguments, out) == 0
    told = json.loads(out.getvalue())
    assert {content["verdict"] for content in told["contents"]} == {"HOLDS"}
    names = {prop.name for prop in MACHINES["arbitration"].properties} | {ACTIONS}
    assert {content["property"] for content in told["contents"]} == names


def test_what_was_shown_is_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProofCache(tmp_path)
    first = contents.contents([owners.OWNERS], cache=cache)
    second = contents.contents([owners.OWNERS], cache=cache)
    assert not any(content.cached for content in first)
    assert all(content.cached for content in second)
    assert [replace(content, cached=False) for content in second] == list(first)

    entry = entries()["owners", GOAL.name]
    other = {**entries(), ("owners", GOAL.name): replace(entry, breaks=(*entry.breaks, "more"))}
    monkeypatch.setattr(mustfail, "entries", lambda: other)
    third = contents.contents([owners.OWNERS], cache=cache)
    assert [content.name for content in third if not content.cached] == [GOAL.name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("machine", [1]), ("name", 3), ("rule", None), ("verdict", "PROVED")),
        *(("seen", [["a", 1]]), ("seen", 7), ("breaks", "none"), ("problem", "none at all")),
        *(("machine", "pool"), ("cached", 2), ("twin", None), ("more", "")),
        *(("alone", None), ("follows", "all"), ("follows", [1])),
    ],
)
def test_a_record_of_another_form_is_none(field: str, value: object) -> None:
    kept = asdict(contents.examine(owners.OWNERS, GOAL))
    known = json.loads(json.dumps(kept))
    assert contents.recalled(known, "owners", GOAL.name) == Content(**{**kept, "cached": True})
    assert contents.recalled({**known, field: value}, "owners", GOAL.name) is None


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    cache = ProofCache(tmp_path)
    contents.contents([owners.OWNERS], cache=cache)
    for file in tmp_path.rglob("*.json"):
        entry = json.loads(file.read_text())
        entry["record"]["instance"] = "elsewhere"
        file.write_text(json.dumps(entry))
    assert not any(content.cached for content in contents.contents([owners.OWNERS], cache=cache))


def test_what_is_vacuous_is_not_kept(tmp_path: Path) -> None:
    machine, hollow = emptied(TRUE)
    cache = ProofCache(tmp_path)
    for _ in range(2):
        (found,) = [x for x in contents.contents([machine], cache=cache) if x.name == hollow.name]
        assert (found.verdict, found.cached) == (Verdict.VACUOUS, False)


def test_another_version_of_a_machine_is_explored_as_it_is() -> None:
    machine, _ = emptied(TRUE)
    name = instances_of("owners")[0]
    assert pinned_for(name, owners.OWNERS) is pinned(name)
    assert pinned_for(name, machine).instance.machine == machine
    assert instances.PINNED[name]().machine is owners.OWNERS
