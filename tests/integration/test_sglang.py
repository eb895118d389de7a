"""SGLang's radix cache and token pool under the contract, on a CPU.

Runs where `sglang` can be imported, or where KVCLAIMS_SGLANG_PATH says in which folders it lies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvclaims.bridge.sglang import engine as adapter
from kvclaims.bridge.sglang.engine import ENGINE
from kvclaims.checker import faults, lower, profiles
from kvclaims.checker.engines import ready
from kvclaims.checker.litmus import WITH_ITS_LEAF, litmus
from kvclaims.checker.programs import select
from kvclaims.checker.supervise import oracle_for, supervise
from kvclaims.checker.watching import introduce, watch
from kvclaims.spec.content import Segment, content_ids, fingerprint, tokens_of
from kvclaims.spec.interface import (
    BadOperation,
    ClaimSpec,
    EngineMissing,
    NotExposed,
    PoolConfig,
    Predicate,
    PredicateKind,
    RequestSpec,
    Runtime,
)
from kvclaims.spec.lowering import Lowering
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.vocabulary import Protection, Verdict


@pytest.fixture
def _sglang() -> None:
    try:
        ready("sglang")
        ENGINE.open(PoolConfig(4, 1), "probe").close()
    except (EngineMissing, BadOperation) as error:
        pytest.skip(str(error))


live = pytest.mark.usefixtures("_sglang")
pytestmark = pytest.mark.engine

EXPRESSIBLE = (
    *("C1", "L1", "L2", "L3", "L4", "L5", "L7", "S", "capacity", "congestion", "demotable"),
    *("lease-read", "minimal-blame", "observed", "oversubscribed", "shared-release", "soft-harm"),
    *("soft-order", "generations", "free-queue", "counted", "null-block", "turned-down"),
    "lease-ends",
)
LACKING = (
    *(
        "L6",
        "abort-in-flight",
        "fidelity",
        "load-aborted",
        "load-failed",
        "owner-reuse",
        "recomputed",
        "routed",
        "two-images",
        "wake",
    ),
)


def tokens(text: str) -> tuple[int, ...]:
    """`A3+B1` is three tokens of stream A and one of B."""
    return tokens_of(tuple(Segment(p[0], int(p[1:])) for p in text.split("+")), 1)


def opened(usable: int) -> Any:
    return ENGINE.open(PoolConfig(usable, 1, 0), "run")


def served(runtime: Runtime, name: str, text: str, new: int = 1, reuse: bool = True) -> None:
    runtime.submit(RequestSpec(name, tokens(text), new, reuse))
    while runtime.observe().requests[name].state != "finished":
        runtime.step()


def reasons(runtime: Runtime) -> list[str]:
    victims = [e for e in runtime.events() if e.event == "allocation_victim_selected"]
    return [e.data["reason"] for e in victims]


# --- the commands ------------------------------------------------------------------------


@live
def test_litmus_holds_where_it_can_be_expressed() -> None:
    engine, info = ready("sglang")
    report = litmus(engine, info, select((*EXPRESSIBLE, *LACKING)), lambda _: None)
    verdicts = {p.program.id: p.verdict for p in report.programs}
    assert [p for p in EXPRESSIBLE if verdicts[p] is not Verdict.HOLDS] == []
    assert [p for p in LACKING if verdicts[p] is not Verdict.NOT_EXPOSED] == []
    assert sum(case.monitored for p in report.programs for case in p.cases) == 16579


@live
def test_without_a_word_of_ours_the_tree_evicts_what_a_soft_claim_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvclaims.bridge.vllm.claims.ClaimBook.has_preferred", False)
    engine, info = ready("sglang")
    report = litmus(engine, info, select(["soft-order"]), lambda _: None)
    assert "harmed is 1, expected 0" in str([str(p) for _, p in report.programs[0].problems])


@live
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    """In a process of its own: Hypothesis also draws constants of whatever else is imported."""
    arguments = ["fuzz", "--engine", "sglang", "--steps", "200", "--seed", "3", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "kvclaims.checker.cli", *arguments, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["verdict"]) == (0, Verdict.HOLDS), ran.stdout + ran.stderr
    assert report["monitored_steps"] > 300
    assert report["blocks_read"] > 500


@live
def test_every_planted_fault_is_caught_by_its_rule(tmp_path: Path) -> None:
    engine, _ = ready("sglang")
    caught = {}
    for fault in faults.faults_of(engine):
        assert fault.program is not None
        assert supervise(engine, oracle_for(engine), fault.program) == (), fault.id
        with faults.planted(fault, engine):
            found = supervise(engine, oracle_for(engine), fault.program)
        caught[fault.id] = (fault.rule, found[0].rule if found else "nothing")
    assert len(caught) == 10
    assert {f: c for f, c in caught.items() if c[0] != c[1]} == {}


@live
def test_hard_claims_are_kept_by_the_adapter_and_not_without_its_evidence() -> None:
    profile = profiles.load("sglang-claims")
    hard, _, soft = lower.lower(profile).modes
    assert (hard.lowering, hard.verdict) == (Lowering.POLICY, Verdict.HOLDS)
    assert (soft.lowering, soft.verdict) == (Lowering.POLICY, Verdict.HOLDS)

    def nothing_runs(wanted: profiles.Probe) -> lower.ProbeResult:
        return lower.ProbeResult(Verdict.UNKNOWN, f"{wanted.program} did not run")

    assert lower.judge(profile.modes[0], nothing_runs).lowering is Lowering.REJECTED


@live
def test_what_it_offers_by_itself_is_observed_in_a_run() -> None:
    report = lower.lower(profiles.load("sglang"))
    (observed, *rest) = report.modes
    assert observed.lowering is Lowering.OBSERVATIONAL
    assert observed.places == ["kvclaims litmus observed --engine sglang"]
    assert [str(mode.lowering) for mode in rest] == ["unknown", "rejected", "unknown"]
    assert report.verdict is Verdict.HOLDS


@live
def test_beside_it_nobody_finds_the_kernels_that_it_brings() -> None:
    """vLLM fails on a triton this old: in one process both run, whichever comes first."""
    ENGINE.open(PoolConfig(4, 1), "first").close()
    assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
    assert importlib.util.find_spec("triton") is None


# --- what SGLang does ----------------------------------------------------------------------


@live
def test_its_trace_tells_its_version() -> None:
    opening = opened(8).events()[0]
    info = ENGINE.info()
    assert (opening.data["engine"], opening.data["engine_version"]) == (info.name, info.version)


@live
def test_content_has_the_names_of_the_contract_and_memory_holds_it() -> None:
    runtime = opened(8)
    served(runtime, "r", "A3+B1")
    keys = content_ids(tokens("A3+B1"), 1)
    seen = runtime.observe()
    assert set(seen.resident) == set(keys)
    blocks = runtime.locate(tokens("A3+B1"))
    assert runtime.fingerprint(blocks) == tuple(map(fingerprint, keys))
    assert (seen.free, seen.headroom) == (8, 8)


@live
def test_a_whole_leaf_goes_where_one_token_is_missing_and_the_trace_says_so() -> None:
    runtime = opened(4)
    served(runtime, "first", "A3")
    served(runtime, "second", "B2")
    assert sorted(reasons(runtime)) == ["cached_prefix_reuse", *[WITH_ITS_LEAF] * 2]
    assert set(runtime.observe().resident) == set(content_ids(tokens("B2"), 1))


@live
def test_a_recomputed_last_token_is_given_up_for_the_one_in_the_tree() -> None:
    runtime = opened(6)
    served(runtime, "first", "A2")
    runtime.submit(RequestSpec("again", tokens("A2"), 3))
    runtime.step()
    seen = runtime.observe().requests["again"]
    assert seen.hit_blocks == 1
    assert seen.blocks == runtime.locate(tokens("A2"))


@live
def test_a_claim_locks_its_prefix_and_no_more() -> None:
    runtime = opened(6)
    served(runtime, "first", "A4")
    leading = Predicate(PredicateKind.LEADING, 2)
    runtime.declare(ClaimSpec("keep", tokens("A4"), leading))
    facts = runtime.snapshot().facts
    blocks = [b for b in runtime.locate(tokens("A4")) if b is not None]
    assert [facts[b].ref for b in blocks] == [1, 1, 0, 0]
    served(runtime, "second", "B4")
    assert runtime.locate(tokens("A4"))[2:] == (None, None)
    assert None not in runtime.locate(tokens("A2"))
    runtime.release("keep")
    assert runtime.observe().free == 6


@live
def test_two_claims_on_one_prefix_count_apart() -> None:
    runtime = opened(6)
    served(runtime, "first", "A3")
    for name, n in (("a", 3), ("b", 2)):
        runtime.declare(ClaimSpec(name, tokens("A3"), Predicate(PredicateKind.LEADING, n)))
    facts = runtime.snapshot().facts
    blocks = [b for b in runtime.locate(tokens("A3")) if b is not None]
    assert [facts[b].ref for b in blocks] == [2, 2, 1]
    runtime.release("a")
    facts = runtime.snapshot().facts
    assert [facts[b].ref for b in blocks] == [1, 1, 0]


@live
def test_a_promise_is_kept_free_until_its_content_is_computed() -> None:
    runtime = opened(4)
    runtime.declare(ClaimSpec("keep", tokens("A3"), Predicate(PredicateKind.LEADING, 3)))
    served(runtime, "other", "B2")
    assert str(runtime.observe().requests["other"].outcome) == "refused"
    served(runtime, "owner", "A3")
    claim = runtime.observe().claims["keep"]
    assert (str(claim.phase), claim.covered, claim.reserve) == ("materialized", 3, 0)


@live
def test_what_the_monitor_would_have_to_catch_is_caught() -> None:
    """A slot that is on the free list while the tree has it: a lie that only the pool can tell."""
    runtime = opened(4)
    monitor = watch(runtime)
    submitted = parse({"op": "submit", "request": "r", "content": [["A", 2]]})
    introduce(monitor, submitted)
    perform(runtime, submitted)
    runtime.step()
    assert monitor.violations == []
    pool = runtime._pool
    pool.free(runtime.locate(tokens("A1")))
    monitor.audit(runtime.snapshot())
    assert {v.rule for v in monitor.violations} == {"B1"}


# --- what it does not have -------------------------------------------------------------------


@live
@pytest.mark.parametrize(
    "operation",
    [
        {"op": "submit", "request": "r", "content": [["A", 1]], "salt": "s"},
        {
            "op": "declare",
            "claim": "c",
            "content": [["A", 2]],
            "n": 1,
            "start": 1,
            "kind": "contiguous_range",
        },
        {"op": "lose", "content": [["A", 1]], "position": 0},
        {"op": "dispatch"},
        {"op": "sleep"},
    ],
    ids=lambda operation: operation["op"],
)
def test_what_sglang_lacks_is_said_and_changes_nothing(operation: dict[str, Any]) -> None:
    runtime = opened(4)
    before = runtime.observe(), runtime.events()
    with pytest.raises(NotExposed):
        perform(runtime, parse(operation))
    assert (runtime.observe(), runtime.events()) == before


@live
def test_its_kv_events_do_not_name_content() -> None:
    """Why the adapter exposes none: two contents that end alike are told under one hash (B8)."""
    from kvclaims.bridge.sglang.pool import RadixPool

    pool = RadixPool(8)
    pool.tree.enable_kv_cache_events = True
    for prompt in ([1, 7], [2, 7]):
        slots = pool.allocator.alloc(2)
        pool.tree.insert(prompt, slots)
    stored = [event.block_hashes[0] for event in pool.tree.take_events()]
    assert len(pool.resident()) == 4
    assert len(set(stored)) == 3


# --- where it cannot run ---------------------------------------------------------------------


@pytest.fixture
def _no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(adapter.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_no_sglang")
def test_without_sglang_one_line_says_how_to_install_it() -> None:
    with pytest.raises(EngineMissing, match=r"requirements/sglang\.txt") as caught:
        ENGINE.info()
    assert "\n" not in str(caught.value)


def test_a_package_with_another_interface_is_refused_by_name(tmp_path: Path) -> None:
    module = tmp_path / "sglang" / "srt" / "mem_cache" / "radix_cache.py"
    module.parent.mkdir(parents=True)
    for folder in (module.parent, module.parent.parent, module.parent.parent.parent):
        (folder / "__init__.py").write_text("")
    (tmp_path / "sglang" / "version.py").write_text('__version__ = "9.9"\n')
    module.write_text("class RadixCache:\n    def __init__(self, params): ...\n")
    program = (
        "from kvclaims.bridge.sglang.engine import ENGINE\n"
        "from kvclaims.spec.interface import EngineMissing, PoolConfig\n"
        "try:\n    ENGINE.open(PoolConfig(4, 1), 'run')\n"
        "except EngineMissing as error:\n    print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert "SGLang 9.9" in ran.stdout
    assert "another radix cache than 0.5.2" in ran.stdout


@live
@pytest.mark.parametrize("config", [PoolConfig(4, 2), PoolConfig(4, 1, token_budget=2)])
def test_other_pools_are_not_exposed(config: PoolConfig) -> None:
    with pytest.raises(NotExposed):
        ENGINE.open(config, "run")


@live
def test_protections_that_need_a_tier_are_refused() -> None:
    runtime = opened(4)
    leading = Predicate(PredicateKind.LEADING, 1)
    answer = runtime.declare(ClaimSpec("c", tokens("A1"), leading, Protection.OFFLOADABLE))
    assert answer.granted is None
