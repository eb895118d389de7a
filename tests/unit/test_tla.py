"""TLA+: what is written parses, means the same by another reading, and counts alike under TLC."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tla_reader import Module, parse, reachable

from kvclaims.checker import instances
from kvclaims.checker.explore import search
from kvclaims.checker.finite import Instance, compile_instance
from kvclaims.checker.tla import count_with_tlc, is_module_name, property_name, tla, tla2tools
from kvclaims.spec.blockclaims import BLOCKCLAIMS, STATUS, i, status
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import Property, Term, eq, ne, new, some, value, without_guard

needs_tlc = pytest.mark.skipif(
    tla2tools() is None,
    reason="needs Java and a tla2tools.jar (its path in TLA2TOOLS, or in the home folder)",
)

COUNTED = {
    "arbitration": 297,
    "claims": 732,
    "elastic/null": 96,
    "groups/two-claims": 332,
    "written/claims": 369,
}
"""Distinct states of instances that the reader of the tests covers in a second or two."""

BY_TLC = {
    "claims": 732,
    "claims/two": 19_456,
    "pool/ways": 191,
    "admission/claims": 108,
    "groups/requests": 1_932,
    "arbitration": 297,
    "written/claims": 369,
    "owners/mixed": 384,
    "tiers": 458,
    "elastic": 1_056,
    "trace/clock": 954,
    "events/keys": 908,
    "ends/jobs": 341,
    "blockclaims": 6_656,
    "feasible": 258,
    "runtime/ends": 375,
    "runtime/layers": 258,
    "pool-refines-claims/ways": 326,
    "pool-refines-feasible/ways": 191,
}
"""Distinct states of an instance of every machine at least, which TLC covers in some seconds."""


def read(instance: Instance) -> Module:
    written = tla(instance)
    return Module(written.text, written.config)


@pytest.mark.parametrize("name", instances.KNOWN)
def test_every_module_is_tla(name: str) -> None:
    instance = instances.KNOWN[name]()
    written = tla(instance)
    tree = parse(written.text)
    (module,) = (part for part in tree.parts if part.type == "module")
    called = instance.machine.name.replace("-", "_")
    assert f"MODULE {called} " in module.text.splitlines()[0]
    names = {property_name(prop) for prop in instance.machine.properties}
    assert {line.strip() for line in written.config.splitlines()} >= names


@pytest.mark.parametrize(("name", "states"), COUNTED.items())
def test_another_reader_finds_as_many_states(name: str, states: int) -> None:
    found, _ = reachable(read(instances.PINNED[name]()))
    assert len(found) == states


def test_every_property_is_written_and_holds_by_the_other_reading() -> None:
    instance = instances.blockclaims((1,), 1, 1, 1)
    module = read(instance)
    names = {property_name(prop) for prop in instance.machine.properties}
    assert {*module.invariants, *module.properties} == names
    _, wrong = reachable(module, check=True)
    assert wrong == set()


def test_a_twin_is_broken_by_the_other_reading_too() -> None:
    twin = without_guard(BLOCKCLAIMS, "alloc", 1)
    instance = replace(instances.blockclaims((1,), 1, 1, 1), machine=twin)
    _, wrong = reachable(read(instance), check=True)
    assert wrong == {"F1_resident_and_active_fit", "F2_committed_and_active_fit"}


def test_a_property_of_steps_is_read_as_one() -> None:
    twin = without_guard(BLOCKCLAIMS, "demote", 0)
    instance = replace(instances.blockclaims((1,), 1, 1, 1), machine=twin)
    _, wrong = reachable(read(instance), check=True)
    assert wrong == {"L1_moves_along_the_table"}


@pytest.mark.parametrize(
    ("but", "expected"), [("demote", set()), ("alloc", {"L1_never_demoted_by_others"})]
)
def test_a_property_of_all_actions_but_one_is_read_as_one(but: str, expected: set[str]) -> None:
    """Whoever explores, and whoever reads the text, lets the one action do what others may not."""
    never = Property("L1", "never demoted by others", ~some(i, _demoted(i)), "", but=but)
    whole = replace(BLOCKCLAIMS, properties=(never,))
    instance = replace(instances.blockclaims((1,), 1, 1, 1), machine=whole)
    _, wrong = reachable(read(instance), check=True)
    assert wrong == expected
    assert bool(search(compile_instance(instance)).broken) == bool(expected)


def _demoted(claim: Term) -> Term:
    demoted = value(STATUS, "Demoted")
    return ne(status(claim), demoted) & eq(new(status(claim)), demoted)


def test_an_equation_does_not_swallow_a_disjunction() -> None:
    """`=` binds more tightly than `\\/`: a truth that is assigned stands in parentheses."""
    assert "/\\ misused' = (misused \\/" in tla(instances.elastic()).text


def test_a_text_that_is_no_tla_is_not_read() -> None:
    text = tla(instances.claims()).text
    with pytest.raises(SyntaxError):
        parse(text.replace("/\\ phase' = ", "/\\ phase' = = ", 1))


def test_each_guard_stands_with_its_rule() -> None:
    text = tla(instances.pool()).text
    assert "~queued[b]" in text
    assert "\\* P1: no responsible hard claim covers the block" in text


def test_limits_are_part_of_every_step() -> None:
    text = tla(instances.claims(generations=3)).text
    assert "\\A x0 \\in Claim : generation[x0] <= 3" in text
    assert "/\\ Within'" in text
    assert "Within" not in tla(instances.tiers()).text


def test_a_module_is_called_as_it_can_be() -> None:
    assert is_module_name("pool_keys")
    assert not is_module_name("pool-keys")
    assert not is_module_name("7up")
    assert not is_module_name("CHOOSE")
    with pytest.raises(BadOperation, match="cannot name a TLA"):
        tla(instances.claims(), "a-b")


def test_tlc_is_to_cover_every_machine() -> None:
    machines = {instances.KNOWN[name]().machine.name for name in BY_TLC}
    assert machines == {make().machine.name for make in instances.KNOWN.values()}


@needs_tlc
@pytest.mark.parametrize(("name", "states"), BY_TLC.items())
def test_tlc_counts_as_many_states(name: str, states: int) -> None:
    found = count_with_tlc(instances.KNOWN[name]())
    assert (found.states, found.errors) == (states, False)


@needs_tlc
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in instances.KNOWN if name not in BY_TLC])
def test_tlc_counts_as_many_states_of_every_other_instance(name: str) -> None:
    """What this checker counts is pinned by hand in `test_explore` and `test_composed`."""
    instance = instances.KNOWN[name]()
    found = count_with_tlc(instance)
    ours = search(compile_instance(instance))
    assert (found.states, found.errors) == (len(ours.order), False)


def test_without_tlc_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLA2TOOLS", "/nowhere/tla2tools.jar")
    with pytest.raises(BadOperation, match=r"needs Java and tla2tools\.jar"):
        count_with_tlc(instances.claims())
