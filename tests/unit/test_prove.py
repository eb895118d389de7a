"""Proofs: everything declared is proved, and what is not true is not."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvclaims.checker import cli
from kvclaims.checker.induction import Facts, Given, Taken
from kvclaims.checker.instances import MACHINES
from kvclaims.checker.proofcache import Keys, ProofCache, canonical, default_folder
from kvclaims.checker.prove import (
    ProofReport,
    Prover,
    Ways,
    obligations,
    prove,
    prove_machine,
)
from kvclaims.checker.verdicts import exit_code
from kvclaims.spec import elastic, tiers
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.claims import CLAIMS, hard, is_in
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import (
    FALSE,
    INITIALLY,
    INT,
    NAT,
    TRUE,
    Action,
    Guard,
    Machine,
    MachineError,
    Partition,
    Property,
    Sort,
    Symbol,
    Term,
    Update,
    Var,
    becomes,
    both,
    count,
    eq,
    every,
    some,
    total,
    without_guard,
)
from kvclaims.spec.pool import (
    POOL,
    admit_reuse,
    b,
    c,
    covers,
    entry,
    hashed,
    held,
    k,
    key,
    queued,
    r,
    ref,
)
from kvclaims.spec.vocabulary import Phase, Verdict

OBLIGATIONS = {
    "claims": 245,
    "pool": 679,
    "admission": 169,
    "groups": 684,
    "arbitration": 27,
    "written": 175,
    "owners": 71,
    "tiers": 285,
    "elastic": 439,
    "trace": 199,
    "events": 133,
    "ends": 56,
    "blockclaims": 55,
    "feasible": 88,
}
"""Each invariant at the start and under every action, each step property under its actions."""


@pytest.mark.parametrize("name", MACHINES)
def test_every_obligation_of_a_machine_is_proved(name: str) -> None:
    found = prove_machine(MACHINES[name])
    assert len(found) == OBLIGATIONS[name]
    assert [o for o in found if o.verdict is not Verdict.PROVED] == []


def test_a_missing_guard_is_shown_as_two_states_and_the_step_between_them() -> None:
    evict = POOL.action("evict")
    (index,) = [i for i, g in enumerate(evict.guards) if "hard claim" in g.why]
    twin = without_guard(POOL, "evict", index)
    (prop,) = [p for p in POOL.properties if p.name == "a protected block keeps its hash"]
    found = Prover(twin).step(prop, twin.action("evict"))
    assert found.verdict is Verdict.NOT_INDUCTIVE
    assert found.gap is not None
    assert found.gap.action == "evict(block0, key0)"
    assert any(name.startswith("key(") for name in found.gap.before)
    assert found.gap.before != found.gap.after
    assert any("after evict" in line for line in found.gap.lines())


def test_a_wrong_counter_is_not_proved_by_the_facts_about_sums() -> None:
    """The ghost totals must not prove too much: a drop that forgets the counter fails B2."""
    drop = POOL.action("drop")
    updates = tuple(u for u in drop.updates if u.target.symbol is not ref)
    twin = POOL.with_action(replace(drop, updates=updates))
    (prop,) = [p for p in POOL.properties if p.name == "references have names"]
    assert Prover(twin).step(prop, twin.action("drop")).verdict is Verdict.NOT_INDUCTIVE


def test_a_forgotten_queue_counter_is_not_proved() -> None:
    take = POOL.action("take")
    updates = tuple(u for u in take.updates if u.target.symbol.name != "free")
    twin = POOL.with_action(replace(take, updates=updates))
    (prop,) = [p for p in POOL.properties if p.name == "the counter agrees"]
    assert Prover(twin).step(prop, twin.action("take")).verdict is Verdict.NOT_INDUCTIVE


def test_a_false_invariant_fails_at_the_start() -> None:
    nothing = Property("B1", "nothing is queued", every(b, ~queued(b)), "not so at the start")
    wrong = replace(POOL, properties=(nothing,))
    assert Prover(wrong).initially(nothing).verdict is Verdict.NOT_INDUCTIVE


def test_a_true_but_not_inductive_property_is_told_apart_from_a_false_one() -> None:
    """Alone, without its strengthenings, F1 holds in every reachable state and is not proved."""
    alone = tuple(p for p in POOL.properties if p.rule == "F1")
    bare = replace(POOL, properties=alone)
    assert Prover(bare).step(alone[0], bare.action("drop")).verdict is Verdict.NOT_INDUCTIVE


def test_a_proof_that_runs_out_of_time_is_unknown() -> None:
    (prop,) = [p for p in POOL.properties if p.name == "union fits"]
    found = Prover(POOL, timeout_ms=1, quick_ms=1).step(prop, POOL.action("cover"))
    assert found.verdict is Verdict.UNKNOWN
    assert found.reason


def test_obligations_cover_the_initial_state_and_every_action() -> None:
    named = [
        name for prop, name in obligations(CLAIMS) if prop.name == "materialized means it holds"
    ]
    assert named == [INITIALLY, *(action.name for action in CLAIMS.actions)]


def test_a_rule_selects_its_obligations() -> None:
    report = prove(rule="P2")
    assert report.verdict is Verdict.PROVED
    assert {o.rule for o in report.obligations} == {"P2"}
    assert all(o.seconds > 0 for o in report.obligations)


@pytest.mark.parametrize(
    ("rule", "machine", "message"),
    [
        ("Z9", None, "unknown rule 'Z9'"),
        (None, "engine", "unknown machine 'engine'"),
        ("B8", "pool", "machine pool does not state rule B8"),
    ],
)
def test_wrong_selections_are_named(rule: str | None, machine: str | None, message: str) -> None:
    with pytest.raises(BadOperation, match=message):
        prove(rule, machine)


def test_an_engine_that_hands_out_held_blocks_is_not_proved() -> None:
    """Must-fail: a `take` that also works on held blocks breaks P1, for any size of pool."""
    take = POOL.action("take")
    guards = tuple(g for g in take.guards if g.why != "the block is in the free queue")
    twin = POOL.with_action(replace(take, guards=guards))
    broken = {
        p.rule
        for p in POOL.properties
        if p.speaks_of("take")
        and Prover(twin).step(p, twin.action("take")).verdict is not Verdict.PROVED
    }
    assert {"P1", "B2", "B6"} <= broken


def test_register_by_one_who_does_not_hold_the_block_is_not_proved() -> None:
    (prop,) = [p for p in POOL.properties if p.name == "only holders register"]
    register = POOL.action("register")
    (index,) = [i for i, g in enumerate(register.guards) if "holds the block" in g.why]
    twin = without_guard(POOL, "register", index)
    assert Prover(twin).step(prop, twin.action("register")).verdict is Verdict.NOT_INDUCTIVE


def test_what_is_undecided_is_exit_3() -> None:
    (prop,) = [p for p in POOL.properties if p.name == "union fits"]
    found = Prover(POOL, timeout_ms=1, quick_ms=1).step(prop, POOL.action("cover"))
    report = ProofReport((found,), 0.1)
    assert report.verdict is Verdict.UNKNOWN
    assert exit_code(report.verdict) == 3
    assert any(line.startswith("UNKNOWN: F1 'union fits' of pool") for line in report.lines())


@pytest.mark.parametrize("solver", ["yices", ""])
def test_a_wrong_solver_is_named(solver: str) -> None:
    with pytest.raises(BadOperation, match="unknown solver"):
        prove("P2", ways=Ways(solver=solver))
    assert cli.run(["prove", "--no-cache", "--solver", solver], io.StringIO()) == 2


def test_processes_report_in_the_order_of_declaration() -> None:
    named: list[str] = []
    found = prove_machine(BLOCKCLAIMS, progress=named.append, ways=Ways(jobs=2))
    assert [(o.name, o.action) for o in found] == [(p.name, a) for p, a in obligations(BLOCKCLAIMS)]
    assert {o.verdict for o in found} == {Verdict.PROVED}
    assert len(named) == len(found)
    assert named[-1].startswith("55/55 ")


# --- actions that nobody has declared ------------------------------------------------------

_any, _all_keys = Var("any", c.sort), Var("each", k.sort)
_of_a_soft_claim = some(_any, covers(_any, b) & ~hard(_any))
_materialized = some(_any, covers(_any, b) & is_in(_any, Phase.MATERIALIZED))
_WIPE = (becomes(key(b, k), False), becomes(entry(k, b), False))
_OVERWRITE = (
    becomes(key(b, _all_keys), eq(_all_keys, k), over=(_all_keys,)),
    becomes(entry(_all_keys, b), eq(_all_keys, k), over=(_all_keys,)),
)


def _not_inductive(machine: Machine, *updates: Update, given: Term = TRUE) -> set[str]:
    """The properties that an action of these updates breaks, added to the machine."""
    params = dict.fromkeys(
        var
        for term in (given, *(part for u in updates for part in (u.target, u.value)))
        for var in term.free
        if not any(var in u.over for u in updates)
    )
    more = Action("more", tuple(params), (Guard((), given, "as given"),), updates, "one more")
    whole = replace(machine, actions=(*machine.actions, more))
    prover = Prover(whole)
    asked = [prop for prop, action in obligations(whole) if action == "more"]
    assert asked, "nothing is asked of an action that was added"
    verdicts = {prop.name: prover.step(prop, more).verdict for prop in asked}
    assert set(verdicts.values()) <= {Verdict.PROVED, Verdict.NOT_INDUCTIVE}
    return {name for name, verdict in verdicts.items() if verdict is Verdict.NOT_INDUCTIVE}


def test_an_action_that_wipes_a_block_of_an_accepted_hard_claim_is_not_inductive() -> None:
    broken = _not_inductive(POOL, *_WIPE, given=key(b, k) & ~_materialized)
    assert broken == {"a protected block keeps its hash"}


def test_an_action_that_overwrites_the_block_of_a_hard_claim_is_not_inductive() -> None:
    """By a request that may register, with no soft claim on the block: only P1 and L3 object."""
    may_write = some(r, held(r, b) & admit_reuse(r))
    broken = _not_inductive(
        POOL, *_OVERWRITE, given=hashed(b) & may_write & ~_of_a_soft_claim & _materialized
    )
    assert broken == {"a protected block keeps its hash", "a hard loss is told"}


def test_an_action_that_harms_a_hard_claim_is_not_inductive() -> None:
    """However honestly it is told: only a fault may."""
    lose = POOL.action("lose")
    broken = _not_inductive(POOL, *lose.updates, given=lose.enabled)
    assert broken == {"a protected block keeps its hash", "no hard claim harmed by choice"}


def test_an_action_that_wipes_a_block_of_no_claim_is_inductive() -> None:
    free = both(key(b, k), ~some(_any, covers(_any, b)))
    assert _not_inductive(POOL, *_WIPE, given=free) == set()


def test_a_fault_of_which_no_hard_claim_is_told_is_not_inductive() -> None:
    """A fault may take a protected block, and then the claim is told."""
    lose = POOL.action("lose")
    untold = replace(lose, updates=_WIPE)
    found = _broken_under(POOL.with_action(untold), "lose")
    assert {"a hard loss is told", "a soft loss is told"} <= found
    assert "a protected block keeps its hash" not in found


def test_a_return_that_empties_every_block_is_not_inductive() -> None:
    a = Var("each", elastic.BLOCK)
    empty = [becomes(of(a), False, over=(a,)) for of in (elastic.hashed, elastic.intact)]
    withdraw = elastic.ELASTIC.action("withdraw")
    emptier = replace(
        withdraw, updates=(*withdraw.updates, *empty, becomes(elastic.held(a), False, over=(a,)))
    )
    found = _broken_under(elastic.ELASTIC.with_action(emptier), "withdraw")
    assert found == {"what a hard claim covers stays"}


def test_a_failure_that_is_forgotten_is_not_inductive() -> None:
    broken = _not_inductive(tiers.TIERS, becomes(tiers.failed(tiers.c), False))
    assert broken == {"a failure is not forgotten"}


def _broken_under(machine: Machine, action: str) -> set[str]:
    prover = Prover(machine)
    verdicts = {
        prop.name: prover.step(prop, machine.action(action)).verdict
        for prop, name in obligations(machine)
        if name == action
    }
    return {name for name, verdict in verdicts.items() if verdict is not Verdict.PROVED}


# --- proofs kept from before ---------------------------------------------------------------


def _cached(machine: Machine, folder: Path) -> dict[tuple[str, str], bool]:
    found = prove_machine(machine, ways=Ways(cache=folder))
    assert {o.verdict for o in found} == {Verdict.PROVED}
    return {(o.name, o.action): o.cached for o in found}


def test_what_has_not_changed_is_not_proved_again(tmp_path: Path) -> None:
    assert not any(_cached(BLOCKCLAIMS, tmp_path).values())
    assert all(_cached(BLOCKCLAIMS, tmp_path).values())
    report = prove(machine="blockclaims", ways=Ways(cache=tmp_path))
    assert report.to_json()["cached"] == report.cached == len(report.obligations)
    assert [*report.lines()][-1].endswith(", 55 of them proved before (cached)")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_change_to_one_action_proves_its_obligations_anew(tmp_path: Path) -> None:
    _cached(BLOCKCLAIMS, tmp_path)
    alloc = BLOCKCLAIMS.action("alloc")
    tighter = replace(alloc, guards=(*alloc.guards, replace(alloc.guards[0], condition=TRUE)))
    cached = _cached(BLOCKCLAIMS.with_action(tighter), tmp_path)
    assert {action for (_, action), hit in cached.items() if not hit} == {"alloc"}
    assert all(not hit for (_, action), hit in cached.items() if action == "alloc")


def test_a_change_to_words_alone_changes_no_key() -> None:
    alloc = BLOCKCLAIMS.action("alloc")
    reworded = BLOCKCLAIMS.with_action(replace(alloc, meaning="in other words"))
    prop = BLOCKCLAIMS.properties[0]
    a, b = (Keys(m).of(prop, "alloc", {"z3": "1"}) for m in (BLOCKCLAIMS, reworded))
    assert a == b
    assert a != Keys(BLOCKCLAIMS).of(prop, "alloc", {"z3": "2"})


def test_a_new_invariant_proves_every_step_anew() -> None:
    more = Property("L1", "nothing new", TRUE, "a premise more")
    prop = BLOCKCLAIMS.properties[0]
    wider = replace(BLOCKCLAIMS, properties=(*BLOCKCLAIMS.properties, more))
    old, new = Keys(BLOCKCLAIMS), Keys(wider)
    assert old.of(prop, "alloc", {"z3": "1"}) != new.of(prop, "alloc", {"z3": "1"})
    assert old.of(prop, INITIALLY, {"z3": "1"}) == new.of(prop, INITIALLY, {"z3": "1"})


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"verdict": "PROVED"}'])
def test_a_damaged_entry_is_ignored_and_written_anew(tmp_path: Path, damage: str) -> None:
    ways = Ways(cache=tmp_path)
    prove_machine(BLOCKCLAIMS, "F3", ways=ways)
    (entry,) = tmp_path.rglob("*.json")
    whole = entry.read_text()
    entry.write_text(damage)
    assert [o.cached for o in prove_machine(BLOCKCLAIMS, "F3", ways=ways)] == [False]
    assert json.loads(entry.read_text()) == json.loads(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("key", "0" * 64), ("verdict", "UNKNOWN"), ("facts", True), ("facts", ["x"])),
        *(("facts", [99_999]), ("facts", [-1]), ("facts", [1]), ("machine", "other")),
        *(("given", "none"), ("given", None), ("given", ["all"]), ("given", "itself")),
    ],
)
def test_an_entry_that_says_something_else_is_none(
    tmp_path: Path, field: str, value: object
) -> None:
    cache, key = ProofCache(tmp_path), "ab" * 32
    taken = Taken((1, 2), Given.ALONE)
    cache.keep(key, taken, {"solver": "z3"})
    assert cache.find(key) == taken
    (entry,) = tmp_path.rglob("*.json")
    entry.write_text(json.dumps({**json.loads(entry.read_text()), field: value}))
    assert cache.find(key) is None


@pytest.mark.parametrize("facts", [(-1,), (1, 1), (True,)])
def test_facts_that_no_proof_takes_are_none(tmp_path: Path, facts: Facts) -> None:
    cache, key = ProofCache(tmp_path), "ab" * 32
    cache.keep(key, Taken(facts), {"solver": "z3"})
    assert cache.find(key) is None


def test_a_kept_proof_with_facts_that_there_are_not_is_shown_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProofCache, "find", lambda *_: Taken((99_999,)))
    ways = Ways(cache=tmp_path / "cache", emit=tmp_path / "files")
    (found,) = prove_machine(BLOCKCLAIMS, "F3", ways=ways)
    assert (found.verdict, found.cached) == (Verdict.PROVED, False)


def test_only_proofs_are_kept(tmp_path: Path) -> None:
    wrong = Property("F3", "never", FALSE, "not so", on="alloc")
    machine = replace(BLOCKCLAIMS, properties=(*BLOCKCLAIMS.properties, wrong))
    for _ in range(2):
        verdicts = {o.name: o for o in prove_machine(machine, "F3", ways=Ways(cache=tmp_path))}
        assert verdicts["never"].verdict is Verdict.NOT_INDUCTIVE
        assert not verdicts["never"].cached
    assert len([*tmp_path.rglob("*.json")]) == len(verdicts) - 1


def test_the_cache_lies_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "kvclaims"
    out = io.StringIO()
    assert cli.run(["prove", "--machine", "blockclaims", "--rule", "F3", "--json"], out) == 0
    assert json.loads(out.getvalue())["cached"] == 0
    kept = len([*(tmp_path / "kvclaims").rglob("*.json")])
    assert kept == 2  # the proof, and that what it proves says something
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache" / "kvclaims"


def test_a_cache_folder_that_cannot_be_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOperation, match="cannot keep proofs in"):
        prove("F3", ways=Ways(cache=tmp_path / "file" / "cache"))
    arguments = ["prove", "--no-cache", "--cache", str(tmp_path)]
    assert cli.run(arguments, io.StringIO()) == 2


def test_canonical_texts_tell_terms_apart() -> None:
    terms = {t for m in MACHINES.values() for p in m.properties for t in (p.formula,)}
    assert len({canonical(term) for term in terms}) == len(terms)


THING = Sort("Thing")
x, y = Var("x", THING), Var("y", THING)
near = Symbol("near", (THING, THING), rigid=True)
marked = Symbol("marked", (THING,))


def test_what_an_update_binds_is_not_the_place_at_which_it_is_read() -> None:
    """The mark of x says that something is near to x, not that something is near to itself."""
    step = becomes(marked(y), some(x, near(x, y)), over=(y,))
    own = Property("P1", "own", every(x, marked(x) >> some(y, near(y, y))), "")
    machine = Machine(
        "marks",
        "marks",
        (marked, near),
        (becomes(marked(x), False, over=(x,)),),
        (Action("mark", (), (), (step,), "everything is marked that something is near to"),),
        (own,),
    )
    found = {o.action: o.verdict for o in prove_machine(machine, ways=Ways(solver="both"))}
    assert found == {INITIALLY: Verdict.PROVED, "mark": Verdict.NOT_INDUCTIVE}


def test_no_symbol_is_called_like_a_sum() -> None:
    named = Symbol("total0", (), INT)
    counted = Property("P1", "counted", eq(named(), count(x, marked(x))), "")
    with pytest.raises(MachineError, match="total0 is a name that proofs use themselves"):
        Prover(
            Machine(
                "marks",
                "marks",
                (marked, named),
                (becomes(marked(x), False, over=(x,)), becomes(named(), 7)),
                (),
                (counted,),
            )
        )


@pytest.mark.parametrize(
    ("index", "name"), [(0, "who waits keeps what it needs"), (2, "an answer is final")]
)
def test_a_counterexample_may_take_two_elements_for_two_parameters(index: int, name: str) -> None:
    """Twin: with the two requests of `push_out` always one, none is found."""
    twin = without_guard(MACHINES["admission"], "push_out", index)
    prop = next(prop for prop in twin.properties if prop.name == name)
    found = Prover(twin, timeout_ms=1000).step(prop, twin.action("push_out"))
    assert found.verdict is Verdict.NOT_INDUCTIVE
    assert found.gap is not None
    assert found.gap.action == "push_out(request0, request1)"


def test_which_sums_make_up_which_is_part_of_a_key() -> None:
    """Twin: the same sums, told apart otherwise, number the facts that a proof took otherwise."""
    symbols = tuple(Symbol(name, (THING,), INT, rigid=True) for name in "fghk")
    sums = [total(x, symbol(x)) for symbol in symbols]
    apart = (Partition(sums[0], (sums[1],)), Partition(sums[2], (sums[3],)))
    together = (Partition(sums[0], tuple(sums[1:])),)
    prop = Property("P1", "any", sums[0] >= 0, "")
    keys = {
        Keys(Machine("sums", "", symbols, (), (), (prop,), parts)).of(prop, INITIALLY, {"z3": "1"})[
            "z3"
        ]
        for parts in (apart, together)
    }
    assert len(keys) == 2


_level, _n = Symbol("level", (), NAT), Var("n", NAT)
_RISE = Action("rise", (), (), (becomes(_level(), _level() + 1),), "one more")


@pytest.mark.parametrize("solver", ["z3", "cvc5"])
def test_every_natural_number_is_every_one_from_zero_on(solver: str) -> None:
    """∃n. n < 0 is true of whole numbers, ∀n. 0 ≤ n is not."""

    def proved(formula: Term, guard: Term = TRUE) -> list[Verdict]:
        step = replace(_RISE, guards=(Guard(("F1",), guard, "so it is"),))
        start = (becomes(_level(), 0),)
        wanted = Property("F1", "it is so", formula, "It is so.")
        made = Machine("numbers", "a number", (_level,), start, (step,), (wanted,))
        return [found.verdict for found in prove_machine(made, ways=Ways(solver=solver))]

    assert proved(some(_n, _n < _level())) == [Verdict.NOT_INDUCTIVE, Verdict.PROVED]
    assert proved(every(_n, _n >= 0)) == [Verdict.PROVED, Verdict.PROVED]
    stands = proved(eq(_level(), 0), guard=every(_n, _n >= 0))
    assert stands == [Verdict.PROVED, Verdict.NOT_INDUCTIVE]
