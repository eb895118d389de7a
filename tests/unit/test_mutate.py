"""Mutation: what is changed, who notices, what is proved to be no change, what one more shows."""

from __future__ import annotations

import ast
import io
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvclaims.checker import cli, codemutants, monitor, mutate, mutatecode, sensitivity
from kvclaims.checker.altered import (
    compare,
    difference,
    digest,
    pinned,
    search_altered,
)
from kvclaims.checker.codemutants import CodeMutant, code_mutants
from kvclaims.checker.columns import Columns, table
from kvclaims.checker.equivalence import Equivalence, with_lemmas
from kvclaims.checker.explore import search
from kvclaims.checker.fates import Fate, Judged, declared, settle, stale
from kvclaims.checker.finite import compile_instance, evaluator
from kvclaims.checker.instances import MACHINES, PINNED
from kvclaims.checker.keptfates import PARTS, KeptFates
from kvclaims.checker.monitorcheck import check_monitor, check_reports
from kvclaims.checker.mutants import INIT, OPERATORS, Mutant, mutants
from kvclaims.checker.mutatecode import Answer, in_child, monitor_child, reference_child
from kvclaims.checker.mutatemachines import judge
from kvclaims.checker.sensitivity import ONE_MORE
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

# --- mutants of machines -----------------------------------------------------------------


def named(machine: str, part: str) -> Mutant:
    """The mutant of that name, or the only one that has this in its name."""
    made = list(mutants(MACHINES[machine]))
    (found,) = [m for m in made if m.name == part] or [m for m in made if part in m.name]
    return found


@pytest.mark.parametrize("machine", sorted(set(MACHINES) - {"pool", "groups"}))
def test_mutants_have_names_of_their_own_and_differ_in_one_place(machine: str) -> None:
    declared_machine = MACHINES[machine]
    seen = set()
    for mutant in mutants(declared_machine):
        assert mutant.name not in seen
        seen.add(mutant.name)
        changed = [
            a
            for a, b in zip(mutant.machine.actions, declared_machine.actions, strict=True)
            if a != b
        ]
        other_start = mutant.machine.init != declared_machine.init
        assert len(changed) + other_start == 1, mutant.name
        assert mutant.operator in OPERATORS


def test_every_operator_is_used() -> None:
    few = (MACHINES[name] for name in ("owners", "admission", "trace", "written"))
    assert {m.operator for machine in few for m in mutants(machine)} == set(OPERATORS)


def test_what_is_made_of_one_guard_and_one_update() -> None:
    made = [m for m in mutants(MACHINES["owners"]) if m.action == "renew"]
    assert [(m.operator, m.before, m.after) for m in made if m.place.startswith("guard")] == [
        ("close a guard", "owns(o, c) ∨ operator(o)", "false"),
        ("drop a guard", "owns(o, c) ∨ operator(o)", "true"),
        ("drop a disjunct", "owns(o, c) ∨ operator(o)", "owns(o, c)"),
        ("drop a disjunct", "owns(o, c) ∨ operator(o)", "operator(o)"),
        ("swap a connective", "owns(o, c) ∨ operator(o)", "owns(o, c) ∧ operator(o)"),
        ("negate a condition", "owns(o, c)", "¬owns(o, c)"),
        ("negate a condition", "operator(o)", "¬operator(o)"),
    ]
    assert [(m.operator, m.before, m.after) for m in made if m.place.startswith("version")] == [
        ("skip an update", "version(c) + 1", "version(c)"),
        ("spread an update", "version(c) + 1", "version(any0)"),
        ("swap an operation", "version(c) + 1", "version(c) − 1"),
        ("off by one", "1", "2"),
        ("off by one", "1", "0"),
    ]


# --- searching a machine that differs in one place ---------------------------------------

SAMPLES = {"owners/mixed": 11, "tiers": 61, "trace/clock": 31, "elastic/null": 61, "arbitration": 9}
"""Instances, and of which mutants every so-many-th is searched twice."""


@pytest.mark.parametrize("name", SAMPLES)
def test_both_searches_find_the_same(name: str) -> None:
    """Against the explorer, which knows nothing of the machine as it was."""
    known = pinned(name)
    for mutant in list(mutants(known.instance.machine))[:: SAMPLES[name]]:
        action = None if mutant.action == INIT else mutant.action
        quick = search_altered(known, mutant.machine, action, most_new=3_000)
        if not quick.finished:
            continue
        whole = search(compile_instance(replace(known.instance, machine=mutant.machine)))
        assert quick.broken == set(whole.broken), mutant.name
        assert (quick.states, quick.transitions) == (len(whole.order), whole.transitions)
        same = (set(whole.order), whole.transitions) == (set(known.number), known.transitions)
        if not difference(known, mutant.machine, action):
            assert same, mutant.name


@pytest.mark.parametrize("name", ["pool/ways", "owners/soft", "trace/foreign", "groups/soft"])
def test_terms_over_all_states_have_the_values_of_each(name: str) -> None:
    known = pinned(name)
    formulas = [p.formula for p in known.instance.machine.invariants]
    formulas += [
        g.condition for a in known.instance.machine.actions for g in a.guards if not a.params
    ]
    values = evaluator(known.instance, [(f, {}) for f in formulas])
    some = known.found.order[:: max(1, known.states // 50)]
    columns = Columns(known.world, table(some, len(known.compiled.slots)))
    for i, formula in enumerate(formulas):
        assert columns.mask(formula, {}).tolist() == [bool(values(state)[i]) for state in some]


def test_a_search_that_is_given_up_says_so() -> None:
    mutant = named("owners", "owners.renew, version(c) after the step: skip an update")
    found = search_altered(pinned("owners"), mutant.machine, "renew", most_new=0)
    assert not found.finished or found.broken


def test_steps_that_change_nothing_count_as_differences() -> None:
    """A runtime that refuses them differs from the machine, though no state does."""
    known = pinned("owners/soft")
    guard = next(iter(mutants(MACHINES["owners"])))
    assert guard.action == INIT
    for mutant in mutants(MACHINES["owners"]):
        if mutant.operator == "close a guard":
            assert [c.what for c in compare(known, mutant.machine, mutant.action) if c.what]


# --- fates -------------------------------------------------------------------------------

JUDGED = {
    "blockclaims": {"a property": 111, "counts": 75, "the graph": 1},
    "arbitration": {"a property": 40, "counts": 45, "the graph": 4},
}
"""By what the mutants of the smallest machines are killed: none of them lives."""


@pytest.mark.parametrize("machine", JUDGED)
def test_every_mutant_of_a_machine_is_killed(machine: str) -> None:
    judged = judge(machine, 0, 10_000)
    assert Counter(one.by for one in judged if one.fate is Fate.KILLED) == JUDGED[machine]
    assert [one.name for one in judged if one.fate is not Fate.KILLED] == []


GRAPHS = {
    "claims": "b8d0e5465dc6f129",
    "blockclaims": "38cb5285d908cb8e",
    "admission": "b40a280c7d4c61fc",
    "admission/claims": "1d67d5f25154a67d",
    "admission/congestion": "acbbc04c32bdefda",
    "admission/sizes": "ee013b7f6e0e9fdd",
    "groups": "8144b38d9c7bbc7d",
    "groups/claims": "de9436b0de07d334",
    "groups/soft": "19c6d9ca04aa316f",
    "groups/requests": "e66a3ddf21bffaea",
    "groups/two-claims": "dc17fe5e86bbf956",
    "groups/prompts": "a25c660c5009cf13",
    "groups/lengths": "f3bb2e70aefa8547",
    "groups/foreign": "d2898492cbcfcc0d",
    "groups/mixed": "8468df5d9c6a8a8c",
    "groups/skipped": "7e03afc80d36eb7d",
    "groups/two-soft": "8db4c0a78174992c",
    "groups/same": "6311508f599e484d",
    "groups/shared": "75f272b4b5ea40d0",
    "arbitration": "5f117ac24f562292",
    "arbitration/spare": "ffdd0500fe2b5fa0",
    "arbitration/holds": "ca92deacdb93609e",
    "feasible": "c48d0a3d25f3cb1c",
    "written": "8e9dc27320b571af",
    "written/keys": "cbf0d3d6fbfc91dc",
    "written/blocks": "b7593ba338c3ee24",
    "written/claims": "b8e4fdf889490321",
    "owners": "d5095c85245e821f",
    "owners/quota": "583ff55e8f7d62ec",
    "owners/cap": "674627c47ac0fc63",
    "owners/soft": "0568acefd9bad7af",
    "owners/mixed": "72e9baee879d9491",
    "tiers": "ca0a19f2598416cb",
    "elastic": "49b07f580a9d3c15",
    "elastic/blocks": "8f8d9312dd0fb5cf",
    "elastic/claims": "4440bf3d18290e42",
    "elastic/jobs": "b45ae6402e052204",
    "elastic/null": "19df445b07d38e41",
    "trace/facts": "3ab7f023cc74c333",
    "trace/clock": "6cf37c787cd6d95d",
    "trace/foreign": "e1f99f64f0840496",
    "trace": "a48d4c321b538731",
    "claims/two": "f709a16ef8f3e263",
    "admission/growth": "0537b97b880db8dc",
    "groups/promised": "731dcdd03bd49129",
    "groups/windows": "a4f7d057d6fc20b3",
    "written/pair": "3033a1aba0a6a002",
    "written/told": "ac39c96df082f064",
    "tiers/claims": "c61d42a5a73dcd19",
    "elastic/pair": "f99fcfe3b062e8ca",
    "elastic/promises": "ddfb26927e78079b",
    "events": "5cc4be3496dc4720",
    "events/tiers": "e16d32a59212fb35",
    "events/keys": "6be972c38fed6b8c",
    "ends": "180de3e89b831233",
    "ends/jobs": "4f7a056a89e7bc24",
    "ends/blocks": "577e38e9b13c7fcb",
    "ends/requests": "e0665321420fd0d6",
    "ends/at-once": "8e10976ed45b624d",
}
"""The reachable graphs of the machines that no runtime is compared with step by step.  What is
killed by the graph is killed by this table."""


@pytest.mark.parametrize("name", GRAPHS)
def test_reachable_graphs_are_as_pinned(name: str) -> None:
    assert digest(pinned(name)) == GRAPHS[name]


def test_every_instance_that_no_runtime_follows_has_a_pinned_graph() -> None:
    assert set(GRAPHS) == {name for name in PINNED if name.split("/")[0] != "pool"}


def test_no_change_is_proved_for_any_sizes() -> None:
    same = named("claims", "claims.tick, left(x) after the step: off by one: 0 ⇒ 1")
    other = named("claims", "claims.gain, holds(c) after the step: skip an update")
    equivalence = Equivalence(MACHINES["claims"])
    assert same.changed
    assert other.changed
    assert equivalence.proved(same.changed)
    assert not equivalence.proved(other.changed)
    at = [m.name for m in mutants(MACHINES["claims"])].index(same.name)
    assert [one.fate for one in judge("claims", at, at + 1)] == [Fate.PROVED]


def test_lemmas_are_proved_before_they_are_used() -> None:
    machine = with_lemmas(MACHINES["elastic"])
    lemmas = [p.name for p in machine.properties if p not in MACHINES["elastic"].properties]
    assert "∀at0. kv_access(at0) → kv_mapped(at0)" in lemmas
    # Seen in every pinned state, and not true of a larger pool.
    assert not any("promised" in lemma for lemma in lemmas)


def test_one_instance_less_lets_a_mutant_live() -> None:
    """Sensitivity: that claims do not interact is seen from two claims on."""
    mutant = named("claims", "claims.demote, phase(c) after the step: spread an update")
    assert difference(pinned("claims"), mutant.machine, "demote") is None
    assert difference(pinned("claims/two"), mutant.machine, "demote")


# --- declared equivalents ----------------------------------------------------------------


def living(name: str, fate: Fate = Fate.LIVES) -> Judged:
    return Judged("reference", name, "off by one", "1", "2", fate)


def test_a_declared_equivalent_is_no_survivor() -> None:
    (one,) = settle([living("a")], {"a": "because"})
    assert (one.fate, one.detail) == (Fate.DECLARED, "because")
    assert stale([one], {"a": "because"}) == []


@pytest.mark.parametrize("fate", [Fate.KILLED, Fate.PROVED])
def test_a_declaration_that_is_not_needed_is_stale(fate: Fate) -> None:
    settled = list(settle([living("a", fate)], {"a": "because", "b": "never made"}))
    assert stale(settled, {"a": "because", "b": "never made"}) == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "[[equivalent]]\nmutant = 'a'\n",
        "[[equivalent]]\nmutant = 'a'\nreason = ''\n",
        "[[equivalent]]\nmutant = 'a'\nreason = 'x'\n[[equivalent]]\nmutant = 'a'\nreason = 'y'\n",
        "not toml",
    ],
)
def test_a_bad_file_of_declarations_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "equivalents.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadOperation):
        declared(file)


def test_every_declared_mutant_is_still_made() -> None:
    made: set[str] = set()
    for path in (*mutatecode.reference_modules(), *mutatecode.MONITOR):
        made |= {mutant.name for mutant in mutatecode.mutants_of(path)}
    for machine in {name.split(".")[0] for name in declared()} & set(MACHINES):
        made |= {mutant.name for mutant in mutants(MACHINES[machine])}
    assert sorted(set(declared()) - made) == []


# --- mutants of code ---------------------------------------------------------------------

SOURCE = '''
"""A text is left alone."""

LIMIT = 3


def fits(blocks: list[int], need: int = 1) -> bool:
    """So is this one."""
    if need < 0 and blocks:
        raise ValueError("a message stays")
    return len(blocks) >= need
'''

MADE = [
    ("module", "off by one", "3", "4"),
    ("fits", "negate a condition", "if need < 0 and blocks:", "if not (need < 0 and blocks):"),
    ("fits", "delete a statement", "if need < 0 and blocks:", ""),
    ("fits", "swap a connective", "need < 0 and blocks", "need < 0 or blocks"),
    ("fits", "drop an operand", "need < 0 and blocks", "blocks"),
    ("fits", "drop an operand", "need < 0 and blocks", "need < 0"),
    ("fits", "flip a comparison", "need < 0", "need <= 0"),
    ("fits", "off by one", "0", "1"),
    ("fits", "delete a statement", "raise ValueError('a message stays')", ""),
    (
        "fits",
        "return another value",
        "return len(blocks) >= need",
        "return not len(blocks) >= need",
    ),
    ("fits", "flip a comparison", "len(blocks) >= need", "len(blocks) > need"),
]


def of_text(tmp_path: Path, text: str) -> list[CodeMutant]:
    file = tmp_path / "part.py"
    file.write_text(text, encoding="utf-8")
    return list(code_mutants(file, "reference/part.py"))


def test_mutants_of_a_small_function(tmp_path: Path) -> None:
    made = of_text(tmp_path, SOURCE)
    assert [(m.function, m.operator, m.before, m.after) for m in made] == MADE
    for mutant in made:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE))


def test_names_do_not_change_with_the_lines_around(tmp_path: Path) -> None:
    before = [mutant.name for mutant in of_text(tmp_path, SOURCE)]
    after = [mutant.name for mutant in of_text(tmp_path, "\n\n\nimport os\n" + SOURCE)]
    assert before == after


def test_every_operator_of_code_is_used() -> None:
    paths = (*mutatecode.reference_modules(), *mutatecode.MONITOR)
    used = {m.operator for path in paths for m in mutatecode.mutants_of(path)}
    assert used == set(codemutants.OPERATORS)


def of_reference(path: str, part: str) -> CodeMutant:
    return next(m for m in mutatecode.mutants_of(path) if part in m.name)


def test_a_mutant_of_the_reference_is_killed_by_conformance() -> None:
    mutant = of_reference("reference/pool.py", "Pool.take: delete a statement: self.owed")
    answer = in_child(lambda: reference_child(mutant, mutant.path))
    assert answer.by == "conformance"
    assert "owed" in answer.detail


@pytest.mark.parametrize("path", [*mutatecode.reference_modules(), *mutatecode.MONITOR])
def test_a_module_can_be_planted_as_it_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of its mutants would die of that, and nothing would be known of them."""
    assert mutatecode.baseline(path, whole=False) is None
    monkeypatch.setattr(mutatecode.Planted, "exec_module", lambda *_: 1 // 0)
    assert "fails import" in (mutatecode.baseline(path, whole=False) or "")


def test_a_mutant_that_cannot_be_imported_is_killed() -> None:
    mutant = replace(
        of_reference("reference/pool.py", "Pool.take"), build=lambda: "raise OSError('no')"
    )
    answer = in_child(lambda: reference_child(mutant, mutant.path))
    assert (answer.by, answer.detail) == ("import", "OSError: no")


def test_programs_that_measure_mechanisms_are_not_run_for_each_mutant() -> None:
    programs = mutatecode._programs()
    assert not any(case.mechanism for program in programs for case in program.cases)
    assert {"L1", "L3", "S", "C1"} <= {program.id for program in programs}


def test_work_that_never_ends_is_ended() -> None:
    def work() -> Answer:
        while True:
            pass

    begun = time.monotonic()
    assert in_child(work, limit_s=1.0).by == "time"
    assert time.monotonic() - begun < 30


def test_a_check_that_is_stuck_is_ended_before_the_others_had_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutatecode, "STUCK_S", 0.5)

    def stuck(_: object) -> str | None:
        while True:
            pass

    quick = [("quick", lambda _: None)] * 3
    begun = time.process_time()
    engine = mutatecode.engines.find("reference")
    for checks, by in (([*quick, ("stuck", stuck)], "time"), (quick, "")):
        answer = in_child(lambda checks=checks: mutatecode._first_failing(iter(checks), engine))  # type: ignore[misc]
        assert answer.by == by
    assert time.process_time() - begun < mutatecode.LIMIT_S


def test_nothing_is_planted_in_this_process() -> None:
    mutant = of_reference("reference/pool.py", "Pool.take: delete a statement: self.owed")
    in_child(lambda: reference_child(mutant, mutant.path))
    assert mutatecode.conforms("pool/ways", mutatecode.engines.find("reference")) is None


# --- the monitor against the machine -----------------------------------------------------


def test_the_monitor_is_right_about_small_instances() -> None:
    assert check_reports() is None
    assert check_monitor("pool/ways", 5) is None
    assert check_monitor("pool/soft-keys", 61) is None


BROKEN_MONITORS = {
    "a guard that always holds": ("_report", lambda *_: None, "reported []"),
    "facts that are not compared": ("_compare_block", lambda *_: None, "reported []"),
    "an audit that looks at nothing": ("audit", lambda *_: None, "reported []"),
}


@pytest.mark.parametrize("fault", BROKEN_MONITORS)
def test_a_broken_monitor_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, said = BROKEN_MONITORS[fault]
    monkeypatch.setattr(monitor.Monitor, name, broken)
    found = check_monitor("pool/ways", 5)
    assert found is not None
    assert said in found


STEPS = "checker/stepcode.py"
HOLES = {
    "kvclaims.checker.stepcheck": (
        "check_steps = check_terms = lambda _: None\ndef check_refused(): pass\n"
    ),
    "kvclaims.checker.stepcost": "def check_cost(): pass\n",
    "kvclaims.checker.monitorcheck": (
        "def check_monitor(name, nth): pass\ndef check_reports(): pass\n"
    ),
}
"""Checks of the monitor that find nothing."""


def judged_with(holes: set[str], mutant: CodeMutant, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """What is seen of a mutant of the monitor where these checks find nothing."""
    planted = [mutatecode.Planted(name, HOLES[name], "a hole") for name in sorted(holes)]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", [*planted, *sys.meta_path])
        return in_child(lambda: monitor_child(mutant))


@pytest.mark.parametrize(
    ("part", "by"),
    [
        # A sum is counted out where the table knows it.
        ("_Writer._total: flip a comparison: argument == var", "cost"),
        # An element that a step tells of first does not become known.
        ("_Writer.meets: delete a statement: if not sort.values and sort != BOOL", "meaning"),
    ],
)
def test_a_hole_in_a_check_lets_a_mutant_of_the_text_of_steps_live(
    part: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = of_reference(STEPS, part)
    assert judged_with(set(), mutant, monkeypatch).by.startswith(by)
    assert judged_with(set(HOLES), mutant, monkeypatch) == Answer()


def test_the_target_monitor_is_all_that_gives_the_monitor_its_meaning() -> None:
    """Both modules are judged, by their own names, and declarations about either go stale."""
    assert set(mutatecode.MONITOR) == {"checker/monitor.py", STEPS}
    assert mutate._paths("monitor") == list(mutatecode.MONITOR)
    assert mutate._paths("all")[-2:] == list(mutatecode.MONITOR)
    for path in mutatecode.MONITOR:
        assert {mutant.path for mutant in mutatecode.mutants_of(path)} == {path}


def test_declarations_about_the_text_of_steps_go_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mutants of two modules one is killed and one is not made; a third is not asked."""
    names = [mutatecode.mutants_of(path)[0].name for path in mutatecode.MONITOR]
    said = dict.fromkeys((*names, f"{STEPS}:f: gone", "reference/pool.py:f: gone"), "because")
    monkeypatch.setattr(mutate, "declared", lambda: said)
    monkeypatch.setattr(mutatecode, "baseline", lambda *_, **__: None)
    fates = {names[0]: Fate.KILLED, names[1]: Fate.LIVES}
    judged = [living(name, fate) for name, fate in fates.items()]
    monkeypatch.setattr(mutate, "_judge_all", lambda *_: (judged, 0))
    report = mutate.mutate("monitor")
    assert report.stale == (names[0], f"{STEPS}:f: gone")
    assert [one.name for one in report.equivalents] == [names[1]]
    assert report.verdict is Verdict.VIOLATED


# --- bounds ------------------------------------------------------------------------------


def test_every_machine_is_looked_at_with_one_more() -> None:
    assert set(MACHINES) - set(ONE_MORE) == set()


ROWS = {
    ("claims", "generations 3"): (1_096, 364),
    ("claims", "duration 3"): (908, 176),
    ("tiers", "tiers 3"): (2_074, 262),
    ("written", "keys 3"): (1_620, 51),
    ("events", "keys 3"): (7_020, 375),
    ("ends", "requests 3"): (4_185, 6),
    ("blockclaims", "growth 4"): (8_384, 1),
}
"""States, and situations of one element that no pinned instance shows."""


@pytest.mark.parametrize("machine", ["claims", "tiers", "written", "events", "ends", "blockclaims"])
def test_what_one_more_shows(machine: str) -> None:
    rows = list(sensitivity.sensitivity(machine, ()))
    assert len(rows) == len(ONE_MORE[machine])
    assert all(row.holds for row in rows)
    for row in rows:
        pinned_row = ROWS.get((machine, row.setting))
        if pinned_row:
            assert (row.states, row.situations) == pinned_row


def test_a_bound_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one claim alone pinned, two show a mutant that one did not."""
    mutant = named("claims", "claims.demote, phase(c) after the step: spread an update")
    monkeypatch.setattr(sensitivity, "instances_of", lambda _: ["claims"])
    monkeypatch.setitem(ONE_MORE, "claims", {"claims 2": PINNED["claims/two"]})
    (row,) = sensitivity.sensitivity("claims", [mutant])
    assert not row.holds
    assert row.caught == (mutant.name,)


def test_a_small_bound_misses_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "instances_of", lambda _: ["elastic/null"])
    monkeypatch.setitem(ONE_MORE, "elastic", {"jobs 1": PINNED["elastic/jobs"]})
    (row,) = sensitivity.sensitivity("elastic", ())
    assert "touch" in row.fired
    assert not row.holds


# --- the command -------------------------------------------------------------------------


def told(*arguments: str) -> tuple[int, dict[str, object]]:
    out = io.StringIO()
    code = cli.run(["mutate", *arguments, "--json"], out)
    return code, json.loads(out.getvalue())


def test_the_command_tells_counts_score_and_survivors(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, found = told("--machine", "arbitration", "--jobs", "1", "--output", str(file))
    assert (code, found["verdict"], found["survivors"]) == (0, "HOLDS", [])
    (target,) = found["targets"]  # type: ignore[misc]
    assert target["killed"] == target["mutants"] == 89
    assert found["score"] == 1.0
    assert len(json.loads(file.read_text(encoding="utf-8"))["judged"]) == 89


def test_a_survivor_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    report = mutate.MutationReport((living("a"),), (), (), 0, 1.0)
    assert report.verdict is Verdict.VIOLATED
    assert any("lives: a" in line for line in report.lines())


def test_a_stale_declaration_ends_with_1() -> None:
    killed = living("a", Fate.KILLED)
    report = mutate.MutationReport((killed,), (), ("a",), 0, 1.0)
    assert report.verdict is Verdict.VIOLATED


def test_what_time_did_not_suffice_for_is_not_passed() -> None:
    code, found = told("--machine", "arbitration", "--jobs", "1", "--seconds", "0.0001")
    assert (code, found["verdict"], found["left"]) == (3, "UNKNOWN", 89)


def test_a_run_goes_on_from_what_an_earlier_one_judged(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    arguments = ("--machine", "arbitration", "--jobs", "1", "--resume", str(kept))
    code, first = told(*arguments)
    assert (code, first["kept"]) == (0, 0)
    code, again = told(*arguments)
    assert (code, again["kept"]) == (0, 89)
    assert again["targets"] == first["targets"]
    files = sorted(kept.rglob("*.json"))
    files[0].write_text("{}", encoding="utf-8")
    whole = json.loads(files[1].read_text(encoding="utf-8"))
    rest = len(whole["record"]["judged"])
    assert told(*arguments)[1]["kept"] == rest < 89


def test_fates_count_only_for_the_text_that_they_were_found_for(tmp_path: Path) -> None:
    root, judged = tmp_path / "package", [living("a", Fate.KILLED)]
    for part in PARTS:
        (root / part).mkdir(parents=True)
        (root / part / "part.py").write_text(part, encoding="utf-8")
    KeptFates(tmp_path / "kept", root).keep("claims", 0, 20, judged)
    assert KeptFates(tmp_path / "kept", root).find("claims", 0, 20) == judged
    assert KeptFates(tmp_path / "kept", root).find("claims", 0, 40) is None
    assert KeptFates(tmp_path / "kept", root).find("pool", 0, 20) is None
    for part in PARTS:
        (root / part / "part.py").write_text("other", encoding="utf-8")
        assert KeptFates(tmp_path / "kept", root).find("claims", 0, 20) is None
        (root / part / "part.py").write_text(part, encoding="utf-8")
    assert KeptFates(tmp_path / "kept", root).find("claims", 0, 20) == judged


@pytest.mark.parametrize(
    "arguments", [["--machine", "no-such"], ["--machine", "pool", "--target", "monitor"]]
)
def test_wrong_use_ends_with_2(arguments: list[str]) -> None:
    assert cli.run(["mutate", *arguments], io.StringIO()) == 2


def test_the_checks_must_pass_before_anything_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutatecode, "in_child", lambda _: Answer("litmus", "L1: VIOLATED"))
    with pytest.raises(BadOperation, match="nothing can be judged"):
        mutate.mutate("monitor")
