"""The machines beside claims and pool: explored, proved, and each guard shown to be needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from kvclaims.checker import instances
from kvclaims.checker.explore import (
    Counterexample,
    counterexamples,
    explore_instance,
    search,
)
from kvclaims.checker.finite import Instance, compile_instance
from kvclaims.checker.instances import PINNED
from kvclaims.checker.prove import Prover
from kvclaims.spec import elastic, ends, events, owners, tiers, trace, written
from kvclaims.spec.language import (
    TRUE,
    Machine,
    Term,
    Update,
    becomes,
    count,
    every,
    some,
    value,
    without_guard,
)
from kvclaims.spec.pool import null
from kvclaims.spec.vocabulary import RULES, Verdict

MACHINES = {
    name: instances.MACHINES[name]
    for name in ("written", "owners", "tiers", "elastic", "trace", "events", "ends")
}
"""The machines beside claims and pool."""

LARGER: dict[str, tuple[Instance, int, int]] = {
    "all sorts of jobs and contents": (instances.written(keys=2), 5_500, 58_937),
    "two blocks and a soft reader": (
        instances.written(blocks=2, soft=(1,)),
        11_412,
        130_020,
    ),
    "three tiers": (instances.tiers(tiers=3), 2_074, 17_525),
    "four layers": (instances.elastic(layers=4), 5_056, 29_182),
    "two facts, three events": (
        instances.trace(facts=2, meetings=1),
        15_173,
        46_650,
    ),
    "three steps in flight": (instances.ends(jobs=3, ways=(0,)), 525, 2_179),
    "three hashes in one block": (instances.events(tiers=(0,), keys=3), 7_020, 35_363),
}
"""One more of something than the pinned instances have: still nothing is broken."""

STATED = {
    "written": {"B4", "B5", "L7"},
    "owners": {"Q1", "Q2", "Q3"},
    "tiers": {"O1", "O2", "O3"},
    "elastic": {"E1", "E2", "E3", "E4", "E5"},
    "trace": {"T1", "T2", "T3"},
    "events": {"B8", "B9", "B10"},
    "ends": {"B5", "B7"},
}


# --- what holds --------------------------------------------------------------------------


def instances_of(machine: str) -> list[str]:
    return [name for name in PINNED if name.split("/")[0] == machine]


@pytest.mark.parametrize("name", LARGER)
def test_one_more_breaks_nothing(name: str) -> None:
    instance, states, transitions = LARGER[name]
    report = explore_instance(instance, name)
    assert report.verdict is Verdict.HOLDS
    assert (report.states, report.transitions) == (states, transitions)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_states_its_rules(machine: str) -> None:
    stated = {prop.rule for prop in MACHINES[machine].properties if prop.goal}
    assert stated == STATED[machine]
    assert stated <= set(RULES)


def test_property_names_are_unique() -> None:
    for machine in MACHINES.values():
        names = [prop.name for prop in machine.properties]
        assert len(set(names)) == len(names)


# --- guards ------------------------------------------------------------------------------


def guards_of(machine: str) -> list[tuple[str, int]]:
    return [(a.name, i) for a in MACHINES[machine].actions for i in range(len(a.guards))]


def goals_of(machine: Machine) -> Machine:
    """The machine without its strengthenings, which break first and hide what they are for."""
    return replace(machine, properties=tuple(p for p in machine.properties if p.goal))


@lru_cache
def goals_without(machine: str, action: str, index: int) -> frozenset[str]:
    """The goals that some run breaks when one guard is left out, strengthenings not watched."""
    twin = goals_of(without_guard(MACHINES[machine], action, index))
    broken = set()
    for name in instances_of(machine):
        found = search(compile_instance(replace(PINNED[name](), machine=twin)))
        broken |= {twin.properties[number].name for number in found.broken}
    return frozenset(broken)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_guard_left_out_breaks_a_goal(machine: str) -> None:
    """No guard is there for the proof alone."""
    assert [at for at in guards_of(machine) if not goals_without(machine, *at)] == []


# --- twins by hand -----------------------------------------------------------------------


def altered(machine: Machine, action: str, *updates: Update, drop: tuple[str, ...] = ()) -> Machine:
    """The machine with updates of the symbols in `drop` left out of an action, others added."""
    whole = machine.action(action)
    kept = tuple(u for u in whole.updates if u.target.symbol.name not in drop)
    return machine.with_action(replace(whole, updates=(*kept, *updates)))


def weaker(machine: Machine, action: str, why: str, condition: Term) -> Machine:
    """The machine with the condition of one guard replaced."""
    whole = machine.action(action)
    guards = tuple(replace(g, condition=condition) if why in g.why else g for g in whole.guards)
    assert guards != whole.guards
    return machine.with_action(replace(whole, guards=guards))


W, T, X, V = written, tiers, trace, events
_AWAY_AND_BACK = (
    "accept",
    "compute",
    "materialize",
    "store",
    "offload",
    "require",
    "reserve",
    "promise",
    "load",
)

BY_HAND: dict[str, tuple[str, Callable[[], Machine], str, tuple[str, ...]]] = {
    "a fault that takes a copy lets an earlier failure be forgotten": (
        "tiers",
        lambda: altered(
            T.TIERS, "lose", becomes(T.failed(T.c), T.loading(T.c, T.t)), drop=("failed",)
        ),
        "a failure is not forgotten",
        (*_AWAY_AND_BACK, "break_off", "lose"),
    ),
    "a hash is visible from its allocation on (vllm#43569)": (
        "written",
        lambda: altered(W.WRITTEN, "register", becomes(W.visible(W.b, W.k), True)),
        "a visible hash is written",
        ("register",),
    ),
    "followers of a preempted request go on waiting (vllm#38715)": (
        "written",
        lambda: altered(W.WRITTEN, "withdraw", drop=("waits",)),
        "a provisional hash names its write",
        ("register", "follow", "withdraw"),
    ),
    "a stale provisional hash on a reused block": (
        "written",
        lambda: altered(W.WRITTEN, "reuse", drop=("registered",)),
        "a reused block has no provisional hash",
        ("register", "reuse"),
    ),
    "a soft reader that counts as told for ever": (
        "written",
        lambda: altered(W.WRITTEN, "hit", drop=("told",)),
        "a new reader was not told yet",
        ("dispatch", "land", "publish", "tell", "hit"),
    ),
    "a refusal that spares the operator": (
        "owners",
        lambda: altered(owners.OWNERS, "hint", drop=("knows",)),
        "blame reaches the operator",
        ("hint",),
    ),
    "a renewal that nobody signed": (
        "owners",
        lambda: altered(owners.OWNERS, "renew", drop=("signed",)),
        "versions are signed by the entitled",
        ("renew",),
    ),
    "a renewal under an old signature": (
        "owners",
        lambda: altered(owners.OWNERS, "renew", drop=("version",)),
        "a change makes a new version",
        ("renew",),
    ),
    "a restored claim that names no tier": (
        "tiers",
        lambda: altered(T.TIERS, "restore", drop=("named",)),
        "a restored claim names its tier",
        (*_AWAY_AND_BACK, "arrive", "restore"),
    ),
    "a load that fails in silence (dynamo#15079)": (
        "tiers",
        lambda: altered(T.TIERS, "break_off", drop=("failed",)),
        "a load succeeds or fails",
        (*_AWAY_AND_BACK, "break_off"),
    ),
    "a failed restore ends every claim (vllm#50388)": (
        "tiers/claims",
        lambda: altered(
            T.TIERS,
            "settle",
            becomes(T.stage(T.c), value(T.STAGE, "harmed"), over=(T.c,)),
            drop=("stage",),
        ),
        "a failure ends that claim only",
        (*_AWAY_AND_BACK, "break_off", "settle"),
    ),
    "a lend that fails half way is left so (vllm PR 34602)": (
        "elastic",
        lambda: altered(
            elastic.ELASTIC,
            "turn_back",
            becomes(elastic.mode(), value(elastic.MODE, "home")),
            drop=("mode",),
        ),
        "at rest all layers agree",
        ("lend", "unmap_act", "turn_back"),
    ),
    "lent as soon as one layer is mapped": (
        "elastic",
        lambda: weaker(
            elastic.ELASTIC,
            "arrive_lent",
            "every layer",
            some(elastic.x, elastic.kv_side(elastic.x)),
        ),
        "at rest all layers agree",
        ("lend", "unmap_act", "map_kv", "open_kv", "arrive_lent"),
    ),
    "a return without a fence": (
        "elastic/claims",
        lambda: altered(elastic.ELASTIC, "give_back", drop=("free",)),
        "fenced means not handed out",
        ("lend", "unmap_act", "map_kv", "open_kv", "arrive_lent", "list", "give_back"),
    ),
    "hard claims are accepted against lent memory too": (
        "elastic/claims",
        lambda: weaker(
            elastic.ELASTIC,
            "accept",
            "the base alone",
            (elastic.all_promised + elastic.n) <= count(elastic.b, ~null(elastic.b)),
        ),
        "hard claims are for the base",
        ("accept", "accept"),
    ),
    "a step that emits nothing": (
        "trace",
        lambda: altered(X.TRACE, "step", drop=("emitted", "kept", "events", "about", "says")),
        "a step emits an event",
        ("step",),
    ),
    "a step that emits two events": (
        "trace",
        lambda: altered(X.TRACE, "step", becomes(X.emitted(X.e), True, over=(X.e,))),
        "no more than one",
        ("step",),
    ),
    "an event of nothing": (
        "trace",
        lambda: altered(X.TRACE, "step", drop=("fact",)),
        "an event tells of a change",
        ("step",),
    ),
    "an event without its time": (
        "trace/clock",
        lambda: altered(X.TRACE, "step", drop=("time",)),
        "an event has the time of its step",
        ("set_clock", "step"),
    ),
    "events that are all number 0": (
        "trace",
        lambda: altered(X.TRACE, "step", drop=("seq",)),
        "numbers are unique",
        ("step", "step"),
    ),
    "events that are not counted": (
        "trace",
        lambda: altered(X.TRACE, "step", drop=("events",)),
        "numbers are below their count",
        ("step",),
    ),
    "a folder that skips what it did not wait for": (
        "trace",
        lambda: altered(X.TRACE, "spoil", drop=("spoiled",)),
        "what is accepted is complete",
        ("step", "close", "fold", "spoil", "accept"),
    ),
    "one copy goes, and the hash is told as removed": (
        "events",
        lambda: altered(
            V.EVENTS,
            "evict",
            becomes(V.told(V.t, V.k), V.told(V.t, V.k) & ~V.lies(V.t, V.b), over=(V.t,)),
            drop=("told",),
        ),
        "removed means the last copy",
        ("send", "send", "land", "land", "begin", "evict"),
    ),
    "a hash is told as stored in every tier": (
        "events/tiers",
        lambda: altered(
            V.EVENTS, "land", becomes(V.told(V.t, V.k), True, over=(V.t,)), drop=("told",)
        ),
        "the replay has what is resident",
        ("send", "land"),
    ),
    "what is put back is not told": (
        "events",
        lambda: altered(V.EVENTS, "put_back", drop=("told",)),
        "the replay has what is resident",
        ("send", "land", "begin", "evict", "give_up", "put_back"),
    ),
    "a reset looks at one tier": (
        "events/tiers",
        lambda: weaker(V.EVENTS, "report", "no tier", some(V.t, every(V.k, ~V.resident(V.t, V.k)))),
        "success leaves nothing visible",
        ("send", "land", "reset", "report"),
    ),
    "what was sent before a reset is still waited for": (
        "events",
        lambda: altered(V.EVENTS, "report", drop=("coming",)),
        "nothing from before a reset lands after it",
        ("send", "reset", "report", "land"),
    ),
    "an operation that failed half way is left so": (
        "events",
        lambda: weaker(V.EVENTS, "fail", "evicted is back", TRUE),
        "a failure leaves the state as it was",
        ("send", "land", "begin", "evict", "fail"),
    ),
    "an abort that nobody counts": (
        "ends",
        lambda: altered(ends.ENDS, "round", drop=("age",)),
        "a round counts",
        ("run", "take", "dispatch", "end", "round"),
    ),
    "rounds go on while blocks could be given back": (
        "ends/at-once",
        lambda: weaker(ends.ENDS, "round", "who has ended", TRUE),
        "all is given back in time",
        ("run", "take", "end", "round"),
    ),
}
"""A fault, the instance that shows it, the machine with the fault, the property that breaks and
the actions of a shortest run that breaks it."""


def runs_of(name: str, machine: Machine) -> dict[str, Counterexample]:
    """Shortest runs to what breaks, by property, with nothing but goals watched."""
    compiled = compile_instance(replace(PINNED[name](), machine=goals_of(machine)))
    return {found.prop.name: found for found in counterexamples(compiled, search(compiled))}


@pytest.mark.parametrize("fault", BY_HAND)
def test_twins_by_hand_break_their_property(fault: str) -> None:
    name, build, prop, actions = BY_HAND[fault]
    found = runs_of(name, build())
    assert prop in found, list(found)
    assert [label.split("(")[0] for label, _ in found[prop].steps] == list(actions)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_goal_has_a_twin_that_breaks_it(machine: str) -> None:
    by_guard = frozenset().union(*(goals_without(machine, *at) for at in guards_of(machine)))
    by_hand = {prop for name, _, prop, _ in BY_HAND.values() if name.split("/")[0] == machine}
    goals = {prop.name for prop in MACHINES[machine].properties if prop.goal}
    assert goals - by_guard - by_hand == set()


def test_one_layer_does_not_show_what_two_show() -> None:
    """Sensitivity: that layers disagree is seen from two layers on."""
    _, build, prop, _ = BY_HAND["lent as soon as one layer is mapped"]
    shown = {}
    for layers in (1, 2):
        instance = replace(instances.elastic(layers=layers), machine=build())
        compiled = compile_instance(instance)
        shown[layers] = {c.prop.name for c in counterexamples(compiled, search(compiled))}
    assert shown[1] == set()
    assert prop in shown[2]


@pytest.mark.parametrize("fault", BY_HAND)
def test_twins_by_hand_are_not_proved(fault: str) -> None:
    name, build, _, _ = BY_HAND[fault]
    twin, whole = build(), MACHINES[name.split("/")[0]]
    (changed,) = [a for a in twin.actions if a != whole.action(a.name)]
    prover = Prover(twin, timeout_ms=2_000)
    verdicts = {
        prover.step(p, changed).verdict for p in twin.properties if p.speaks_of(changed.name)
    }
    assert verdicts == {Verdict.PROVED, Verdict.NOT_INDUCTIVE}


# --- single points -----------------------------------------------------------------------


def test_a_copy_that_is_only_found_may_be_gone() -> None:
    """A lookup promises nothing: an unreserved copy beside another is given up at will (O3)."""
    fired = explore_instance(PINNED["tiers"](), "tiers").fired
    assert fired["discard"] > 0
    loose = without_guard(T.TIERS, "promise", 0)
    assert "a promise is reserved" in runs_of("tiers", loose)


def test_content_computed_again_is_not_restored() -> None:
    """O3: the shortest run that calls a recomputed claim restored, were it allowed."""
    twin = without_guard(T.TIERS, "restore", 0)
    steps = [
        label.split("(")[0]
        for label, _ in runs_of("tiers", twin)["recomputing is not restoring"].steps
    ]
    assert steps[-1] == "restore"
    assert "arrive" not in steps


def test_a_return_in_which_a_driver_call_fails_can_still_end_at_home() -> None:
    """E5: turning back forgets nothing; the first state is met again after a lend undone."""
    compiled = compile_instance(instances.elastic(layers=1, lent=(1,)))
    found = search(compiled)
    names = [action.name for action in compiled.actions]
    unlending = elastic.MODE.values.index("unlending")
    (slot,) = [i for i, (symbol, _) in enumerate(compiled.slots) if symbol is elastic.mode]
    ends = [
        after
        for state in found.order
        if state[slot] == unlending
        for number, after in compiled.successors(state)
        if names[number] == "arrive_home"
    ]
    assert compiled.initial[0] in ends


def test_a_folder_that_does_not_wait_for_the_end_vouches_for_too_little() -> None:
    early = without_guard(X.TRACE, "accept", 0)
    found = runs_of("trace/facts", early)["what is accepted is the state"]
    assert [label.split("(")[0] for label, _ in found.steps] == ["accept", "step"]
