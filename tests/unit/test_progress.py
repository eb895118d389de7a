"""Progress: V1 to V4 and B11 hold on instances, are proved, and fail where they must."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvclaims.checker import cli, instances, verdicts
from kvclaims.checker.finite import Instance
from kvclaims.checker.instances import MACHINES, PINNED
from kvclaims.checker.lasso import Graph, Lasso, seek
from kvclaims.checker.progress import (
    MOST_STATES,
    REST,
    check,
    deadlock,
    watched,
    with_progress,
)
from kvclaims.checker.prove import Prover, Ways, prove
from kvclaims.checker.ranking import RESPONSES, STAY, ranked, ranking_obligations
from kvclaims.checker.unfair import Fate, FateReport, Fault, faults, run_unfair
from kvclaims.spec import admission, claims
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    FALSE,
    INT,
    Action,
    Guard,
    Machine,
    MachineError,
    Symbol,
    becomes,
    eq,
    lit,
)
from kvclaims.spec.progress import Fair, Ranking, Recurring, Response, Steps, Urgency
from kvclaims.spec.vocabulary import RULES, Phase, Verdict

PENDING = {
    # In how many states of the instance the goal is yet to come, counted by the explorer.
    ("claims", "every submitted claim is decided"): 12,
    ("claims", "every claim with a duration ends"): 60,
    ("claims/two", "every submitted claim is decided"): 1_120,
    ("claims/two", "every claim with a duration ends"): 5_600,
    ("admission", "every deferred request ends"): 1_192,
    ("admission", "the pool is not idle while a request waits"): 1_144,
    ("admission/claims", "every deferred request ends"): 24,
    ("admission/claims", "the pool is not idle while a request waits"): 28,
    ("admission/congestion", "every deferred request ends"): 858,
    ("admission/congestion", "the pool is not idle while a request waits"): 886,
    ("admission/growth", "every deferred request ends"): 2_278,
    ("admission/growth", "the pool is not idle while a request waits"): 1_546,
    ("admission/sizes", "every deferred request ends"): 24,
    ("admission/sizes", "the pool is not idle while a request waits"): 28,
    ("elastic", "a return completes"): 272,
    ("elastic", "a return that was turned back is undone"): 252,
    ("elastic/blocks", "a return completes"): 256,
    ("elastic/blocks", "a return that was turned back is undone"): 56,
    ("elastic/claims", "a return completes"): 704,
    ("elastic/claims", "a return that was turned back is undone"): 384,
    ("elastic/pair", "a return completes"): 52,
    ("elastic/pair", "a return that was turned back is undone"): 12,
    ("elastic/jobs", "a return completes"): 2_048,
    ("elastic/jobs", "a return that was turned back is undone"): 768,
    ("elastic/promises", "a return completes"): 2_304,
    ("elastic/promises", "a return that was turned back is undone"): 1_920,
    ("elastic/null", "a return completes"): 24,
    ("elastic/null", "a return that was turned back is undone"): 20,
    ("events", "every reset is answered"): 360,
    ("events/tiers", "every reset is answered"): 392,
    ("events/keys", "every reset is answered"): 180,
    ("ends", "every end gives everything back"): 20,
    ("ends/jobs", "every end gives everything back"): 49,
    ("ends/blocks", "every end gives everything back"): 19,
    ("ends/requests", "every end gives everything back"): 66,
    ("ends/at-once", "every end gives everything back"): 3,
}

OBLIGATIONS = {"V1": 23, "V2": 75, "V3": 82, "V4": 326, "B7": 35, "B10": 81, "B11": 65}
"""What the rankings of a rule ask for: a handful of states, and every action in several ways."""


def graph(name: str) -> Graph:
    instance = PINNED[name]()
    return Graph(watched(instance, RESPONSES[instance.machine.name]))


def response(name: str) -> Response:
    (found,) = [r for rs in RESPONSES.values() for r in rs if r.name == name]
    return found


# --- what holds --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in PINNED if n.split("/")[0] in RESPONSES])
def test_what_must_happen_does_on_every_pinned_instance(name: str) -> None:
    machine = name.split("/", maxsplit=1)[0]
    found = list(check(graph(name), RESPONSES[machine], name))
    assert {(name, each.response.name): each.pending for each in found} == {
        key: pending for key, pending in PENDING.items() if key[0] == name
    }
    assert [each.response.name for each in found if each.verdict is not Verdict.HOLDS] == []


def test_the_rules_of_progress_are_all_declared() -> None:
    declared = [r for responses in RESPONSES.values() for r in responses]
    assert {r.rule for r in declared} == {"V1", "V2", "V3", "V4", "B7", "B10", "B11"} <= set(RULES)
    assert all(r.ranking for r in declared), "each has an argument for any sizes"
    assert len({r.name for r in declared}) == len(declared)


@pytest.mark.parametrize("name", RESPONSES)
def test_every_ranking_is_proved(name: str) -> None:
    asked = [*ranking_obligations([MACHINES[name]])]
    prover = Prover(asked[0][0])
    found = [prover.examine(prop, action) for _, prop, action in asked]
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []
    rules = {r.rule for r in RESPONSES[name]}
    assert Counter(o.rule for o in found) == {r: OBLIGATIONS[r] for r in rules}


def test_rankings_are_proved_by_cvc5_too() -> None:
    """Those of single states, where the sums over all requests are needed; a whole run asks all."""
    asked = [*ranking_obligations([admission.ADMISSION])]
    prover = Prover(asked[0][0], solver="both")
    found = [prover.examine(prop, action) for _, prop, action in asked if action == STAY.name]
    assert len(found) == 11
    assert {o.verdict for o in found} == {Verdict.PROVED}
    assert {o.solver for o in found} == {"z3+cvc5"}


def test_a_higher_limit_keeps_a_request_waiting_longer_and_it_still_ends() -> None:
    """Sensitivity: a limit of none shows no deferral at all, each further one some more states."""
    pending = []
    for limit in (0, 1, 2):
        instance = instances.admission(requests=1, defer_limit=limit, needs=(1, 2), growth=(0,))
        answer = seek(Graph(watched(instance, admission.RESPONSES)), admission.RESPONSES[0])
        assert answer.lasso is None
        pending.append(answer.pending)
    assert pending == [0, 3, 6]


# --- what must fail ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unfair() -> FateReport:
    return run_unfair()


def test_what_progress_rests_on_breaks_exactly_it_when_left_out(unfair: FateReport) -> None:
    assert [str(fate) for fate in unfair.twins if not fate.killed] == []
    assert len(unfair.twins) == 32
    assert unfair.verdict is Verdict.HOLDS


def test_every_assumption_is_left_out_once(unfair: FateReport) -> None:
    dropped = {fate.fault.drop for fate in unfair.twins} - {None}
    declared = {s for rs in RESPONSES.values() for r in rs for s in (*r.fair, *r.ceasing)}
    assert dropped == declared


def test_every_response_has_a_twin_that_breaks_it(unfair: FateReport) -> None:
    broken = {name for fate in unfair.twins for name in fate.broken}
    assert broken == {r.name for responses in RESPONSES.values() for r in responses}


def lasso_of(report: FateReport, what: str) -> Lasso:
    (fate,) = [f for f in report.twins if f.fault.what == what]
    assert fate.lasso is not None
    return fate.lasso


def labels(run: Lasso) -> tuple[list[str], list[str]]:
    return [step for step, _ in run.stem], [step for step, _ in run.cycle]


def test_V2_does_not_hold_of_a_claim_that_is_renewed_for_ever(unfair: FateReport) -> None:
    found = lasso_of(unfair, "for ever: renewals of a claim")
    assert labels(found) == (["submit(claim0, 2)", "accept(claim0)"], ["tick", "renew(claim0, 2)"])
    shown = list(found.lines())
    assert shown[2] == "  then for ever:"
    assert shown[3].split() == ["3.", "tick", "left(claim0):", "2", "→", "1"]


def test_V3_needs_a_queue_that_nobody_overtakes(unfair: FateReport) -> None:
    stem, cycle = labels(lasso_of(unfair, "smaller requests overtake one that waits"))
    assert stem[-1] == "wait(request0)"
    assert cycle == ["finish(request1)", "submit(request1, 2, 0)", "admit(request1)"]


def test_V3_needs_deferrals_to_be_counted(unfair: FateReport) -> None:
    found = lasso_of(unfair, "deferrals by claims are not counted")
    assert labels(found)[1] == []
    assert not found.dead, "claims may still come and go, only the request waits for ever"
    assert "nothing happens any more" in list(found.lines())[-1]


def test_V4_needs_a_fence_against_new_readers(unfair: FateReport) -> None:
    stem, cycle = labels(lasso_of(unfair, "a new reader delays the return for ever"))
    assert stem[-1] == "give_back"
    assert [label.split("(")[0] for label in cycle] == ["touch", "done"]


def test_a_fault_that_breaks_nothing_or_something_else_survives() -> None:
    idle = Fault("claims", "nothing is left out", ("every submitted claim is decided",))
    report = run_unfair(chosen=[idle])
    assert report.verdict is Verdict.VIOLATED
    assert "SURVIVES: expected every submitted claim is decided, got nothing" in str(
        report.twins[0]
    )
    other = next(f for f in faults() if f.drop is claims.EXPIRE)
    wrong = replace(other, breaks=("every submitted claim is decided",))
    assert not run_unfair(chosen=[wrong]).twins[0].killed


def test_a_fault_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(MachineError, match="does not update phase"):
        run_unfair(chosen=[replace(_hand("clock"), alter=lambda m: _forget(m, "tick", "phase"))])


def _hand(word: str) -> Fault:
    (found,) = [f for f in faults() if word in f.what and f.drop is None]
    return found


def _forget(machine: Machine, action: str, symbol: str) -> Machine:
    from kvclaims.checker import unfair as module

    return module._forgets(action, symbol)(machine)


# --- wrong rankings --------------------------------------------------------------------------


def not_proved(machine: Machine, response: Response, *, only: str) -> set[str]:
    """The obligations of a response that are not proved, among those of that name."""
    whole = ranked(machine, (response,))
    prover = Prover(whole, timeout_ms=2_000)
    return {
        f"{prop.name.partition(': ')[2]} under {prop.on}"
        for prop in whole.step_properties
        if only in prop.name and prop.on
        if prover.examine(prop, prop.on).verdict is not Verdict.PROVED
    }


def test_without_the_assumption_that_renewals_cease_time_is_no_rank() -> None:
    wrong = replace(response("every claim with a duration ends"), ceasing=())
    found = not_proved(claims.CLAIMS, wrong, only="the rank never rises")
    assert found == {"the rank never rises under renew"}


def test_a_rank_that_counts_no_growth_rises_when_a_request_is_sent_back() -> None:
    whole = response("every deferred request ends")
    assert whole.ranking is not None
    wrong = replace(whole, ranking=replace(whole.ranking, rank=whole.ranking.rank[1:]))
    found = not_proved(admission.ADMISSION, wrong, only="the rank never rises")
    assert found == {"the rank never rises under push_out"}


def test_a_case_left_out_is_missed() -> None:
    whole = response("every deferred request ends")
    assert whole.ranking is not None
    for left_out in range(len(whole.ranking.helpful)):
        cases = tuple(c for i, c in enumerate(whole.ranking.helpful) if i != left_out)
        wrong = replace(whole, ranking=replace(whole.ranking, helpful=cases))
        found = not_proved(admission.ADMISSION, wrong, only="some case applies")
        assert found == {f"some case applies under {STAY.name}"}


def test_a_tick_that_counts_nothing_does_not_help() -> None:
    tick = claims.CLAIMS.action("tick")
    twin = claims.CLAIMS.with_action(replace(tick, updates=()))
    found = not_proved(twin, response("every claim with a duration ends"), only="helps")
    assert found == {"case 1 helps under tick"}


def test_a_step_that_is_not_enabled_is_no_help() -> None:
    expire = claims.CLAIMS.action("expire")
    never = replace(expire, guards=(*expire.guards, Guard(("V2",), FALSE, "never")))
    twin = claims.CLAIMS.with_action(never)
    found = not_proved(twin, response("every claim with a duration ends"), only="enabled")
    assert found == {f"case 2 is enabled under {STAY.name}"}


def test_a_ranking_that_is_misdeclared_is_an_error() -> None:
    whole = response("every claim with a duration ends")
    assert isinstance(whole.ranking, Ranking)
    _, expires = whole.ranking.helpful
    short = replace(whole, ranking=replace(whole.ranking, helpful=(replace(expires, at=()),)))
    with pytest.raises(MachineError, match="at does not fit by"):
        ranked(claims.CLAIMS, (short,))
    with pytest.raises(MachineError, match="unfair"):
        ranked(claims.CLAIMS, (replace(whole, fair=()),))


def test_an_urgency_that_is_misdeclared_is_an_error() -> None:
    whole = response("every submitted claim is decided")
    with pytest.raises(MachineError, match="time advances is not assumed"):
        ranked(claims.CLAIMS, (replace(whole, fair=()),))
    for wrong, message in (
        (replace(whole, ceasing=(Steps("refusals", ("refuse",)),)), "nearer by steps that cease"),
        (_assuming(whole, replace(claims.TIME, distance=None)), "nearer by no distance"),
        (_assuming(whole, replace(claims.TIME, strong=True)), "be it for whom it may"),
    ):
        with pytest.raises(MachineError, match=message):
            ranked(claims.CLAIMS, (wrong,))


def _assuming(whole: Response, time: Recurring) -> Response:
    return replace(whole, fair=(time,), ranking=Urgency(claims.UNDECIDED, before=time))


# --- urgency -----------------------------------------------------------------------------------
#
# V1 rests on this alone, that time advances without end: not on decisions being made, and not on
# an assumption that no run fulfils.

DECIDED = "every submitted claim is decided"
SUBMITTED = ["absent", "→", "submitted"]


def test_V1_assumes_that_time_advances_and_nothing_else() -> None:
    whole = response(DECIDED)
    assert (whole.fair, whole.ceasing) == ((claims.TIME,), ())
    assert claims.TIME.actions == ("tick",)
    decides = {"accept", "clip", "refuse"}
    assert not decides & {name for r in claims.RESPONSES for f in r.fair for name in f.actions}


def without_urgency() -> Machine:
    tick = claims.CLAIMS.action("tick")
    return claims.CLAIMS.with_action(replace(tick, guards=()))


def undecided() -> Machine:
    """A machine that answers no claim: time stops with the first that is submitted."""
    machine = claims.CLAIMS
    for name in ("accept", "clip", "refuse"):
        whole = machine.action(name)
        never = Guard(("V1",), FALSE, "never")
        machine = machine.with_action(replace(whole, guards=(*whole.guards, never)))
    return machine


def told_of(machine: Machine, name: str = DECIDED) -> list[str]:
    instance = replace(instances.claims(), machine=machine)
    graph = Graph(watched(instance, claims.RESPONSES))
    (found,) = check(graph, (response(name),), "claims")
    assert found.verdict is Verdict.VIOLATED
    return [line.strip() for line in found.lines()]


def test_where_time_passes_over_a_claim_V1_fails() -> None:
    _, so, start, then, again = told_of(without_urgency())
    assert so == "every submitted claim is decided; but here, for c = claim0:"
    assert start.split() == ["1.", "submit(claim0,", "0)", "phase(claim0):", *SUBMITTED]
    assert (then, again.split()) == ("then for ever:", ["2.", "tick", "nothing", "changes"])
    found = not_proved(without_urgency(), response(DECIDED), only="not before")
    assert found == {f"not before: time advances under {STAY.name}"}


def test_where_no_claim_is_answered_time_stops_and_that_is_told() -> None:
    """No run is fair, so none is one on which a claim waits for ever: V1 would hold of nothing."""
    _, _, start, then = told_of(undecided())
    assert start.split() == ["1.", "submit(claim0,", "0)", "phase(claim0):", *SUBMITTED]
    assert then.startswith("and from here no run is fair: none in which time advances without end")
    assert "phase(claim0) = submitted" in then
    assert told_of(undecided(), "every claim with a duration ends")[-1] == then
    found = not_proved(undecided(), response(DECIDED), only="time advances: ")
    assert found == {f"time advances: is never stopped under {STAY.name}"}


def test_where_an_answer_brings_time_no_nearer_that_is_not_proved() -> None:
    refuse = claims.CLAIMS.action("refuse")
    idle = claims.CLAIMS.with_action(replace(refuse, updates=refuse.updates[1:]))
    found = not_proved(idle, response(DECIDED), only="time advances: ")
    assert found == {"time advances: comes nearer under refuse"}


def test_an_urgency_over_what_is_pending_no_longer_is_not_proved() -> None:
    """A claim that is accepted is not urgent: time passes over it."""
    whole = response(DECIDED)
    accepted = claims.is_in(claims.c, Phase.ACCEPTED)
    patient = replace(whole, premise=accepted, ranking=Urgency(accepted, before=claims.TIME))
    patient = replace(patient, goal=claims.ended(claims.c))
    assert not_proved(claims.CLAIMS, patient, only="not before")
    (found,) = check(graph("claims"), (patient,), "claims")
    assert found.lasso is not None
    assert "tick" in labels(found.lasso)[1]


def test_only_machines_with_responses_have_rankings_to_prove() -> None:
    asked = {machine.name for machine, _, _ in ranking_obligations(MACHINES.values())}
    assert asked == {f"{name}/progress" for name in RESPONSES}


# --- lassos --------------------------------------------------------------------------------

_at = Symbol("at", (), INT)


def _walk(*edges: tuple[int, int, str]) -> Instance:
    """A machine that walks along edges, one action for each name."""
    names = dict.fromkeys(name for _, _, name in edges)
    actions = []
    for name in names:
        for before, after in [(b, a) for b, a, n in edges if n == name]:
            guard = Guard(("V1",), eq(_at(), before), "it is there")
            label = f"{name}{before}"
            actions.append(Action(label, (), (guard,), (becomes(_at(), lit(after)),), "a step"))
    walk = Machine("walk", "edges", (_at,), (becomes(_at(), 0),), tuple(actions), ())
    return Instance(walk, {})


def _leads(goal: int, *fair: Fair, ceasing: tuple[Steps, ...] = ()) -> Response:
    return Response("V1", "it gets there", (), eq(_at(), 0), eq(_at(), goal), fair, "", "", ceasing)


LOOP = _walk((0, 1, "go"), (1, 0, "back"), (1, 2, "out"))


def test_weak_fairness_does_not_force_what_is_enabled_now_and_then() -> None:
    go, out = Fair("go", ("go0",)), Fair("out", ("out1",))
    found = seek(Graph(LOOP), _leads(2, go, out))
    assert found.lasso is not None
    assert labels(found.lasso) == ([], ["go0", "back1"])


def test_strong_fairness_does() -> None:
    go, out = Fair("go", ("go0",)), Fair("out", ("out1",), strong=True)
    assert seek(Graph(LOOP), _leads(2, go, out)).lasso is None


def test_strong_fairness_leaves_what_it_does_not_concern() -> None:
    """A cycle that never enables the strong step is fair, inside a component that does."""
    instance = _walk((0, 1, "go"), (1, 0, "back"), (1, 2, "out"), (0, 3, "side"), (3, 0, "home"))
    found = seek(Graph(instance), _leads(2, Fair("out", ("out1",), strong=True)))
    assert found.lasso is not None
    assert "go0" not in labels(found.lasso)[1]


def test_steps_that_cease_make_no_cycle() -> None:
    go, out = Fair("go", ("go0",)), Fair("out", ("out1",))
    back = Steps("back", ("back1",))
    assert seek(Graph(LOOP), _leads(2, go, out, ceasing=(back,))).lasso is None


def test_what_is_fair_does_not_cease() -> None:
    """Twin: no run fulfils both, so going round and round would be said to get anywhere."""
    go = ("go0",)
    with pytest.raises(MachineError, match=r"it gets there: go0 is fair \(go\) and ceases"):
        _leads(2, Fair("go", go), ceasing=(Steps("goings", go),))


def test_a_state_in_which_no_step_is_possible_is_a_deadlock() -> None:
    instance = _walk((0, 1, "go"), (0, 2, "off"))
    found = seek(Graph(instance), _leads(2, Fair("go", ("go0",)), Fair("off", ("off0",))))
    assert found.lasso is not None
    assert labels(found.lasso) == (["go0"], [])
    assert found.lasso.dead
    assert found.lasso.to_json()["deadlock"] is True
    assert list(found.lasso.lines())[-1] == "  and no step is possible: at = 1"


def test_a_cycle_meets_every_demand() -> None:
    """Two steps on either side of the start that are both to be taken: the cycle takes both."""
    instance = _walk((0, 1, "a"), (1, 0, "b"), (0, 2, "c"), (2, 0, "d"), (0, 9, "never"))
    fair = [Fair(n, (n,), strong=n in ("a0", "c0")) for n in ("a0", "b1", "c0", "d2")]
    found = seek(Graph(instance), _leads(9, *fair))
    assert found.lasso is not None
    assert sorted(labels(found.lasso)[1]) == ["a0", "b1", "c0", "d2"]


def test_a_premise_that_nothing_fulfils_is_vacuous() -> None:
    never = replace(_leads(2, Fair("go", ("go0",))), premise=eq(_at(), 7))
    (found,) = check(Graph(LOOP), (never,), "walk")
    assert found.verdict is Verdict.VACUOUS
    assert verdicts.exit_code(found.verdict) == 3


def test_a_goal_that_is_there_from_the_start_is_vacuous_too() -> None:
    (found,) = check(Graph(LOOP), (_leads(0, Fair("go", ("go0",))),), "walk")
    assert found.verdict is Verdict.VACUOUS


def test_a_step_that_a_limit_cuts_off_is_an_error() -> None:
    with pytest.raises(BadOperation, match=r"passes a limit of the instance"):
        Graph(replace(instances.claims(), limits={"generation": 1}))


def test_a_counter_that_nobody_reads_is_left_out() -> None:
    bare = watched(instances.claims(), claims.RESPONSES)
    assert "generation" not in {symbol.name for symbol in bare.machine.symbols}
    assert "left" in {symbol.name for symbol in bare.machine.symbols}


def test_an_instance_too_large_for_lassos_says_so() -> None:
    class Large:
        verdict = Verdict.HOLDS

        def to_json(self) -> dict[str, object]:
            return {"states": MOST_STATES + 1}

        def lines(self) -> list[str]:
            return ["explored"]

    report = with_progress(Large(), "admission", {})
    assert list(report.lines()) == ["explored", "  progress is not checked past 50,000 states"]
    assert report.to_json()["progress"] == []


def test_what_recurs_is_taken_whether_or_not_it_stays_enabled() -> None:
    go, out = Fair("go", ("go0",)), Recurring("out", ("out1",))
    ending = _walk((0, 1, "go"), (1, 0, "back"), (1, 2, "out"), (2, 2, "out"))
    assert seek(Graph(LOOP), _leads(2, go, replace(out, actions=("back1",)))).lasso is not None
    staying = _walk((0, 1, "go"), (1, 0, "back"), (1, 2, "out"), (2, 1, "in"))
    assert seek(Graph(staying), _leads(2, go, out)).lasso is None
    found = seek(Graph(ending), _leads(2, go, out)).lasso
    assert found is not None
    assert found.never == "out"


def test_what_recurs_and_changes_nothing_is_shown_in_the_cycle() -> None:
    """Time passes in a state that it does not change; where that is not possible, nothing does."""
    clock = _walk((0, 1, "go"), (1, 1, "tick"), (1, 0, "back"), (0, 2, "out"), (2, 1, "in"))
    found = seek(Graph(clock), _leads(2, Recurring("tick", ("tick1",)))).lasso
    assert found is not None
    assert labels(found) == (["go0"], ["tick1"])
    assert found.never == ""
    (line,) = [line for line in found.lines() if "tick1" in line]
    assert line.split() == ["2.", "tick1", "nothing", "changes"]


def test_a_state_from_which_no_run_is_fair_is_told_by_a_shortest_run() -> None:
    """Beside what recurs, what ceases counts too: time that only renewals let pass stops."""
    trap = _walk((0, 1, "go"), (1, 0, "back"), (0, 2, "fall"), (2, 3, "on"), (3, 2, "off"))
    back = Recurring("back", ("back1",))
    found = seek(Graph(trap), _leads(2, back)).lasso
    assert found is not None
    assert (labels(found), found.never) == (([], ["go0", "back1"]), "")
    goal = replace(_leads(0, back), premise=eq(_at(), 7))
    stopped = seek(Graph(trap), goal).lasso
    assert stopped is not None
    assert (labels(stopped), stopped.never) == ((["fall0"], []), "back")
    assert stopped.to_json()["stopped"] == "back"
    steps = Steps("go", ("go0",))
    everywhere = seek(Graph(trap), replace(goal, ceasing=(steps,))).lasso
    assert everywhere is not None
    assert labels(everywhere) == ([], []), "the start is such a state already"


# --- deadlock ------------------------------------------------------------------------------

AT_REST = {
    "pool": 17,
    "pool/soft": 15,
    "pool/requests": 9,
    "pool/keys": 5,
    "pool/soft-keys": 3,
    "pool/soft-copies": 3,
    "pool/ways": 9,
    "arbitration": 2,
    "arbitration/holds": 1,
    "arbitration/spare": 3,
}
"""The instances that may stop, and in how many states: the others never do."""


@pytest.mark.parametrize("name", PINNED)
def test_no_pinned_instance_has_a_deadlock(name: str) -> None:
    found = deadlock(PINNED[name]())
    assert (found.verdict, found.rest) == (Verdict.HOLDS, AT_REST.get(name, 0))


def test_a_state_of_rest_that_is_not_declared_is_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(REST, "pool")  # type: ignore[arg-type]
    out = io.StringIO()
    assert cli.run(["explore", "pool/keys", "--json"], out) == 1
    told = json.loads(out.getvalue())
    assert told["deadlock"]["lasso"]["stem"] == [
        "submit(claim0)",
        "refuse(claim0)",
        "overflow(request0, 3)",
    ]
    assert [v["rule"] for v in told["violations"]] == ["B11"]


# --- the command line ------------------------------------------------------------------------


def test_explore_tells_progress() -> None:
    out = io.StringIO()
    assert cli.run(["explore", "elastic", "--json"], out) == 0
    told = json.loads(out.getvalue())
    assert [(p["rule"], p["verdict"], p["lasso"]) for p in told["progress"]] == [
        ("V4", "HOLDS", None),
        ("V4", "HOLDS", None),
    ]
    out = io.StringIO()
    assert cli.run(["explore", "claims"], out) == 0
    assert "  V2 every claim with a duration ends: HOLDS: pending in 60 states" in out.getvalue()
    out = io.StringIO()
    assert cli.run(["explore", "tiers", "--json"], out) == 0
    told = json.loads(out.getvalue())
    assert (told["progress"], told["deadlock"]["verdict"]) == ([], "HOLDS")


def test_a_lasso_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = replace(response("every claim with a duration ends"), ceasing=())
    monkeypatch.setitem(RESPONSES, "claims", (impatient,))  # type: ignore[arg-type]
    out = io.StringIO()
    assert cli.run(["explore", "claims", "--json"], out) == 1
    told = json.loads(out.getvalue())
    (violation,) = told["violations"]
    assert violation["rule"] == "V2"
    assert violation["operations"] == [
        *("submit(claim0, 2)", "accept(claim0)", "tick", "renew(claim0, 2)")
    ]
    out = io.StringIO()
    assert cli.run(["explore", "claims"], out) == 1
    assert "but here, for c = claim0:" in out.getvalue()


def test_prove_takes_rankings_by_rule_and_machine(tmp_path: Path) -> None:
    report = prove("V1", "claims", ways=Ways(emit=tmp_path, cache=tmp_path / "cache"))
    asked = OBLIGATIONS["V1"] + 15  # no time runs meanwhile: for each action but renewals
    assert (report.verdict, len(report.obligations)) == (Verdict.PROVED, asked)
    assert (tmp_path / "claims/progress/stay").is_dir()
    assert prove("V1", "claims", ways=Ways(cache=tmp_path / "cache")).cached == asked
    with pytest.raises(BadOperation, match="machine pool does not state rule V1"):
        prove("V1", "pool")


def test_an_unshown_fate_is_told() -> None:
    fault = Fault("claims", "x", ("a",))
    assert FateReport((), 0.0).verdict is Verdict.VACUOUS
    assert FateReport((Fate(fault, ("a",), ("V1",), None, 0.0),), 0.0).verdict is Verdict.HOLDS
