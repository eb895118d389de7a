"""Elastic memory on the CPU twin: rules E1 to E5 and B5, each with what happens without it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvclaims.bridge.vmm import (
    BlockPool,
    DriverError,
    ElasticMemory,
    Failing,
    Misuse,
    Mode,
    OutOfMemory,
    Refused,
    Shape,
    StillHeld,
    StillRead,
    TwinDriver,
)
from kvclaims.bridge.vmm.judge import INSTANCES, ElasticMonitor, conform
from kvclaims.bridge.vmm.memory import ACT, KV
from kvclaims.spec.vocabulary import Verdict

torch = pytest.importorskip("torch", reason="the twin's conformance reads memory through torch")

PAGE = 4096
LAYERS = 3


def shape(layers: int = LAYERS, base: int = 4, lent: int = 2) -> Shape:
    return Shape.fit(layers, PAGE, base, lent, PAGE)


def memory(driver: Any = None, **sizes: int) -> ElasticMemory:
    return ElasticMemory(driver or TwinDriver(), shape(**sizes))


def at_rest(made: ElasticMemory) -> tuple[Mode, tuple[tuple[bool, bool, bool, bool], ...]]:
    sides = tuple(
        (kv.mapped, kv.open, act.mapped, act.open)
        for kv, act in ((made.side(KV, x), made.side(ACT, x)) for x in range(made.shape.layers))
    )
    return made.mode, sides


# --- the twin is as strict as a device -----------------------------------------------------


def test_only_whole_mappings_are_unmapped() -> None:
    twin = TwinDriver()
    start = twin.reserve(4 * PAGE)
    handle = twin.create(2 * PAGE)
    twin.map(start, 2 * PAGE, handle)
    for address, size in ((start, PAGE), (start + PAGE, PAGE), (start, 4 * PAGE)):
        with pytest.raises(Misuse, match="whole mapping"):
            twin.unmap(address, size)
    twin.unmap(start, 2 * PAGE)
    with pytest.raises(Misuse, match="whole mapping"):
        twin.unmap(start, 2 * PAGE)


def test_a_handle_is_mapped_whole_aligned_and_over_nothing() -> None:
    twin = TwinDriver(granularity=4 * PAGE)
    start = twin.reserve(8 * PAGE)
    assert start % (4 * PAGE) == 0
    handle = twin.create(8 * PAGE)
    for address, size, why in (
        (start, 4 * PAGE, "whole"),
        (start + PAGE, 8 * PAGE, "granularity"),
        (start + 4 * PAGE, 8 * PAGE, "reserved"),
        (start, 3 * PAGE, "multiple"),
    ):
        with pytest.raises(Misuse, match=why):
            twin.map(address, size, handle)
    twin.map(start, 8 * PAGE, handle)
    with pytest.raises(Misuse, match="already"):
        twin.map(start, 8 * PAGE, handle)
    with pytest.raises(Misuse, match="still mapped"):
        twin.free(start, 8 * PAGE)


def test_physical_memory_has_an_end() -> None:
    twin = TwinDriver(limit=2 * PAGE)
    twin.create(2 * PAGE)
    with pytest.raises(OutOfMemory):
        twin.create(PAGE)


TOUCH = """
import ctypes, sys
from kvclaims.bridge.vmm import ElasticMemory, Shape, TwinDriver
from kvclaims.bridge.vmm.memory import ACT, KV
m = ElasticMemory(TwinDriver(), Shape.fit(1, 4096, 1, 1, 4096))
def poke(address): (ctypes.c_char).from_address(address).value = b"x"
poke(m.address(0))
poke(m.activations[0])
print("before", flush=True)
{what}
print("after", flush=True)
"""

TAIL = "poke(m.side(KV, 0).address)"


@pytest.mark.parametrize(
    "what",
    [
        TAIL,
        f"m.lend(); {TAIL}; m.return_(); {TAIL}",
        "m.lend(); poke(m.activations[0])",
        f"m.begin_lend(); m.unmap(ACT, 0); m.map(KV, 0); {TAIL}",
    ],
    ids=["the tail at home", "the tail after a return", "lent activations", "access not set"],
)
def test_touching_a_hole_is_a_segmentation_fault(what: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TOUCH.format(what=what)], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "before\n", ran.stderr
    assert ran.returncode == -signal.SIGSEGV


def test_the_pointer_is_fixed_and_the_base_keeps_its_bytes() -> None:
    from kvclaims.bridge.vmm.tensors import bytes_at

    made = memory()
    starts = [made.address(x) for x in range(LAYERS)]
    layer = bytes_at(starts[1], made.kv_bytes, "cpu")
    layer[: 5 * PAGE] = 7
    for _ in range(3):
        assert made.lend()
        layer[5 * PAGE :] = 9
        assert int(layer.sum(dtype=torch.int64)) == 5 * PAGE * 7 + 2 * PAGE * 9
        assert made.return_()
        assert bool((layer[: 5 * PAGE] == 7).all())
    assert [made.address(x) for x in range(LAYERS)] == starts
    made.close()


def test_what_comes_back_is_blank_and_the_memory_really_went() -> None:
    from kvclaims.bridge.vmm.tensors import bytes_at

    twin = TwinDriver()
    made = memory(twin, lent=64)
    made.lend()
    layer = bytes_at(made.address(0), made.kv_bytes, "cpu")
    layer.fill_(5)
    filled = twin.physical()
    made.return_()
    assert filled - twin.physical() == 64 * PAGE
    made.lend()
    assert int(layer[5 * PAGE :].max()) == 0
    assert int(layer[: 5 * PAGE].min()) == 5
    made.close()


def test_the_seam_lies_on_the_granularity() -> None:
    whole = Shape.fit(1, PAGE, base_blocks=3, lent_blocks=2, granularity=2 * PAGE)
    assert (whole.base_bytes, whole.lent_bytes) == (4 * PAGE, 2 * PAGE)
    straddling = Shape.fit(1, 3 * PAGE, base_blocks=2, lent_blocks=3, granularity=2 * PAGE)
    # Blocks 0 to 2 take 9 pages, so the base has 10, and block 3 lies on both sides of the seam.
    assert (straddling.base_bytes, straddling.base_blocks) == (10 * PAGE, 2)
    assert straddling.lent == range(3, 6)
    with pytest.raises(ValueError, match="positive"):
        Shape.fit(0, PAGE, 1, 1, PAGE)


# --- conformance with the declared machine --------------------------------------------------

STATES = {
    "elastic": (1_056, 11_445, 31_851),
    "elastic/blocks": (808, 10_827, 23_109),
    "elastic/claims": (2_304, 28_608, 54_336),
}
"""States set up on the twin, steps taken from them, disabled steps refused."""


@pytest.mark.parametrize("name", INSTANCES)
def test_every_state_of_the_machine_on_the_twin(name: str) -> None:
    found = conform(name)
    assert found.difference is None
    assert found.verdict is Verdict.HOLDS
    assert (found.states, found.edges, found.refused) == STATES[name]


GUARDS = [
    (ElasticMemory, "nothing is lent, nothing is under way"),
    (ElasticMemory, "no prefill step runs"),
    (ElasticMemory, "no prefill needs the reserve"),
    (ElasticMemory, "the reserve is lent"),
    (ElasticMemory, "the ids are fenced"),
    (ElasticMemory, "the lent blocks are out of use"),
    (ElasticMemory, "the memory is on its way there"),
    (ElasticMemory, "every layer is on that side"),
    (ElasticMemory, "that side is out of use"),
    (ElasticMemory, "it is mapped in this layer"),
    (ElasticMemory, "not mapped otherwise"),
    (ElasticMemory, "it is not mapped yet"),
    (ElasticMemory, "it is mapped on that side"),
    (ElasticMemory, "the reserve is with the activations"),
    (BlockPool, "the block may be handed out"),
    (BlockPool, "a request holds the block"),
    (BlockPool, "the base alone has room for it"),
    (BlockPool, "the block lies in the base"),
    (BlockPool, "the reserve is lent"),
    (BlockPool, "no prefill needs the reserve"),
    (BlockPool, "the block is a lent one"),
]


@pytest.mark.parametrize(("owner", "why"), GUARDS, ids=[f"{o.__name__}: {w}" for o, w in GUARDS])
def test_without_a_guard_the_twin_is_no_such_machine(
    owner: type, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(self: Any, holds: bool, rule: str, text: str) -> None:
        if not holds and text != why:
            raise Refused(rule, text)

    monkeypatch.setattr(owner, "_require", require)
    assert any(_differs(name) for name in ("elastic/claims", "elastic/blocks"))


def _differs(name: str) -> bool:
    try:
        return conform(name).verdict is Verdict.VIOLATED
    except Misuse:  # the driver's own strictness met what the guard would have stopped
        return True


def test_the_monitor_judges_the_same_log() -> None:
    judge = ElasticMonitor(shape())
    made = ElasticMemory(TwinDriver(), shape(), tell=judge)
    pool = BlockPool(made, copy=lambda _old, _new: None)
    for _ in range(3):
        made.lend()
        blocks = pool.allocate(3)
        pool.keep(blocks[0])
        with pool.job("step", blocks):
            pass
        with made.prefill():
            pass
        for block in set(pool.held):
            pool.leave(block)
    assert judge.violations == []
    assert judge.broken() == ()
    assert judge.fired["drain"] == 6
    assert judge.mode is Mode.HOME
    judge("unmap_act", {"x": 0})
    assert [v.rule for v in judge.violations] == ["E5"]
    assert judge.broken() == ("E5",)


# --- the rules one by one --------------------------------------------------------------------


def test_e1_nothing_is_lent_to_a_prefill_that_needs_it() -> None:
    made = memory()
    made.need()
    with pytest.raises(Refused, match="E1"):
        made.lend()
    made.start_prefill()
    with pytest.raises(Refused, match="E1"):
        made.lend()
    made.end_prefill()
    assert made.lend()
    with pytest.raises(Refused, match="E1"):
        made.start_prefill()
    with made.prefill() as (address, size):
        assert made.mode is Mode.HOME
        assert size == LAYERS * made.shape.lent_bytes
        assert address == made.activations[0]


def test_e1_a_prefill_inside_another_ends_with_the_outer_one() -> None:
    made = memory()
    with made.prefill() as outer:
        with made.prefill() as inner:
            assert inner == outer
        with pytest.raises(Refused, match="E1"):
            made.lend()
    assert made.lend()


def test_e2_lent_ids_are_in_the_pool_only_while_mapped() -> None:
    made = memory()
    pool = BlockPool(made)
    assert pool.free == set(pool.base)
    made.lend()
    assert pool.free == {*pool.base, *pool.lent}
    assert pool.usable == 6
    made.return_()
    assert pool.free == set(pool.base)
    assert pool.usable == 4
    with pytest.raises(Refused, match="E2"):
        pool.take(pool.lent[0])


def test_e3_hard_claims_count_on_the_base_alone() -> None:
    made = memory()
    pool = BlockPool(made)
    made.lend()
    pool.accept("c", 4)
    with pytest.raises(Refused, match="E3"):
        pool.accept("d", 1)
    with pytest.raises(Refused, match="E3"):
        pool.cover("c", pool.lent[0])
    pool.end("c")
    pool.accept("d", 4)


def test_f2_a_claim_is_promised_what_is_free_and_nobody_elses() -> None:
    made = memory()
    pool = BlockPool(made)
    made.lend()
    pool.allocate(len(pool.lent) + 1)
    with pytest.raises(Refused, match="F2"):
        pool.declare("c", 4)
    pool.declare("c", 3)
    with pytest.raises(Refused, match="F2"):
        pool.declare("d", 1)
    with pytest.raises(Refused, match="F3"):
        pool.allocate(1)


def test_p1_what_a_claim_covers_is_allocated_to_nobody() -> None:
    pool = BlockPool(memory())
    pool.declare("c", 1)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.cover("c", block)
    pool.leave(block)
    assert set(pool.allocate(3)) == {*pool.base} - {block}
    with pytest.raises(Refused, match="F3"):
        pool.allocate(1)
    pool.end("c")
    assert pool.allocate(1) == [block]


@pytest.mark.parametrize("block", [-1, 99])
def test_e3_no_claim_covers_what_is_no_block_of_the_base(block: int) -> None:
    pool = BlockPool(memory())
    pool.accept("c", 1)
    with pytest.raises(Refused, match="E3"):
        pool.cover("c", block)


def test_less_than_no_blocks_is_no_request() -> None:
    """Asked for -1 blocks a pool must not hand out all but one, nor promise more than it has."""
    pool = BlockPool(memory())
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="negative"):
        pool.declare("c", -1)
    assert (pool.held, pool.promised) == (set(), {})


def test_e4_held_blocks_move_and_kept_ones_are_dropped() -> None:
    made = memory()
    copies: list[tuple[int, int]] = []
    moves: list[tuple[int, int]] = []
    pool = BlockPool(
        made, lambda old, new: copies.append((old, new)), lambda *pair: moves.append(pair)
    )
    made.lend()
    held, kept = pool.allocate(2)
    assert [held, kept] == list(pool.lent)
    pool.keep(kept)
    pool.leave(kept)
    made.return_()
    assert moves == copies == [(held, 1)]
    assert pool.held == {1}
    assert kept not in pool.hashed
    assert pool.free == {2, 3, 4}


def test_e4_a_return_that_has_no_room_goes_on_when_it_has() -> None:
    made = memory()
    pool = BlockPool(made, lambda _old, _new: None)
    made.lend()
    blocks = pool.allocate(6)
    with pytest.raises(StillHeld):
        made.return_()
    assert made.mode is Mode.DRAINING
    assert not pool.free  # fenced: nothing of the lent part can be taken meanwhile
    pool.leave(blocks[0])  # a lent block
    pool.leave(blocks[5])  # room in the base
    assert made.return_()
    assert made.mode is Mode.HOME


@pytest.mark.parametrize("part", ["copy", "moved"])
def test_b9_a_move_that_fails_leaves_the_holder_its_block_and_takes_no_other(part: str) -> None:
    """The user's own `copy` or `moved` raises: nothing is held that nobody holds."""
    failing = [True]

    def fails(_old: int, _new: int) -> None:
        if failing:
            raise OSError(part)

    def works(_old: int, _new: int) -> None: ...

    judge = ElasticMonitor(shape())
    made = ElasticMemory(TwinDriver(), shape(), tell=judge)
    pool = BlockPool(made, fails if part == "copy" else works, fails if part == "moved" else works)
    made.lend()
    (block,) = pool.allocate(1)
    pool.keep(block)
    with pytest.raises(OSError, match=part):
        made.return_()
    assert (pool.held, pool.hashed, pool.free) == ({block}, {block}, set(pool.base))
    failing.clear()
    assert made.return_()
    assert pool.held == pool.hashed == {1}
    assert judge.violations == []
    made.close()


def test_b5_a_return_waits_for_readers_in_flight() -> None:
    made = memory()
    pool = BlockPool(made, lambda _old, _new: None, patience=20)
    made.lend()
    (block,) = pool.allocate(1)
    pool.touch("kernel", block)
    pool.leave(block)
    seen: list[tuple[Mode, bool]] = []
    fence = threading.Event()

    def reader() -> None:
        fence.wait()
        seen.append((made.mode, made.driver.opened(made.side(KV, 0).address)))  # type: ignore[attr-defined]
        pool.done("kernel", block)

    thread = threading.Thread(target=reader)
    thread.start()
    waited = pool.wait
    pool.wait = lambda: (fence.set(), waited())[1]  # type: ignore[method-assign,func-returns-value]
    assert made.return_()
    thread.join()
    assert seen == [(Mode.DRAINING, True)]


def test_b5_a_reader_that_never_ends_stops_the_return_not_the_memory() -> None:
    made = memory()
    pool = BlockPool(made, patience=0.01)
    made.lend()
    (block,) = pool.allocate(1)
    pool.touch("stuck", block)
    pool.leave(block)
    with pytest.raises(StillRead):
        made.return_()
    assert made.driver.opened(made.side(KV, 0).address)  # type: ignore[attr-defined]
    pool.done("stuck", block)
    assert made.return_()


def test_e5_both_ways_are_idempotent() -> None:
    twin = TwinDriver()
    made = memory(twin)
    assert made.lend()
    calls = sum(made.costs.calls.values())
    assert not made.lend()
    assert sum(made.costs.calls.values()) == calls
    assert made.return_()
    assert not made.return_()
    assert (made.costs.lends, made.costs.returns, made.costs.failures) == (1, 1, 0)
    assert made.costs.calls["create"] == 2 * LAYERS
    made.close()
    made.close()
    assert twin.left_over() == (0, 0, 0)


# --- every failure ----------------------------------------------------------------------------


def _calls(act: Callable[[ElasticMemory], Any], prepare: Callable[[ElasticMemory], Any]) -> int:
    """How many driver calls `act` makes."""
    driver = Failing(TwinDriver(), lambda _call: False)
    made = ElasticMemory(driver, shape())
    prepare(made)
    before = driver.calls
    act(made)
    return driver.calls - before


MOVES: dict[str, tuple[Callable[[ElasticMemory], Any], Callable[[ElasticMemory], Any]]] = {
    "lend": (lambda m: None, lambda m: m.lend()),
    "return": (lambda m: m.lend(), lambda m: m.return_()),
}


@pytest.mark.parametrize("which", MOVES)
def test_e5_a_move_that_fails_at_any_call_leaves_all_as_it_was(which: str) -> None:
    prepare, act = MOVES[which]
    number = _calls(act, prepare)
    assert number == 1 + 3 * LAYERS
    for k in range(1, number + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        made = ElasticMemory(driver, shape())
        pool = BlockPool(made)
        prepare(made)
        before, free, first = at_rest(made), set(pool.free), driver.calls
        driver.fails = lambda call, at=first + k: call == at  # type: ignore[misc]
        with pytest.raises(DriverError, match="on purpose"):
            act(made)
        assert at_rest(made) == before
        assert pool.free == free
        assert made.costs.failures == 1
        assert act(made), "the error sticks"
        assert at_rest(made) != before
        made.close()
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)


@pytest.mark.parametrize("which", MOVES)
def test_e5_where_undoing_fails_too_the_next_call_finishes_it(which: str) -> None:
    prepare, act = MOVES[which]
    for k in range(1, _calls(act, prepare) + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        made = ElasticMemory(driver, shape())
        pool = BlockPool(made)
        prepare(made)
        before, first = at_rest(made), driver.calls
        driver.fails = lambda call, at=first + k: call >= at  # type: ignore[misc]
        with pytest.raises(DriverError) as caught:
            act(made)
        assert any("not undone yet" in note for note in caught.value.__notes__)
        assert not pool.free & set(pool.lent)
        if which == "lend":  # no prefill starts on what is half done
            with pytest.raises(Refused, match="E1"):
                made.start_prefill()
        driver.fails = lambda _call: False
        assert act(made)
        prepare(made) if which == "return" else made.return_()
        assert at_rest(made) == before
        made.close()
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)


@pytest.mark.parametrize("which", MOVES)
def test_e5_a_move_that_is_interrupted_at_any_call_is_undone_by_the_next(which: str) -> None:
    """What is no driver's error, such as Ctrl-C, leaves the move where it stands."""
    prepare, act = MOVES[which]
    for k in range(1, _calls(act, prepare) + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        made = ElasticMemory(driver, shape())
        BlockPool(made)
        prepare(made)
        before, first = at_rest(made), driver.calls

        def interrupted(call: int, at: int = first + k) -> bool:
            if call == at:
                raise KeyboardInterrupt
            return False

        driver.fails = interrupted
        with pytest.raises(KeyboardInterrupt):
            act(made)
        assert act(made)
        prepare(made) if which == "return" else made.return_()
        assert at_rest(made) == before
        made.close()
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)


def _interrupted(driver: Failing, at: int) -> Callable[..., Any]:
    """The driver's calls; Ctrl-C comes when number `at` has done its part."""
    real = driver._call

    def call(name: str, *args: int) -> Any:
        result = real(name, *args)
        if driver.calls == at:
            signal.raise_signal(signal.SIGINT)
        return result

    return call


@pytest.mark.parametrize("which", MOVES)
def test_e5_an_interrupt_that_arrives_while_a_call_is_made_tears_nothing_apart(which: str) -> None:
    """Else the memory would say of a layer what is no longer so."""
    prepare, act = MOVES[which]
    for k in range(1, _calls(act, prepare) + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        made = ElasticMemory(driver, shape())
        BlockPool(made)
        prepare(made)
        before, at = at_rest(made), driver.calls + k

        driver._call = _interrupted(driver, at)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            act(made)
        assert act(made)
        prepare(made) if which == "return" else made.return_()
        assert at_rest(made) == before
        made.close()
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_e5_building_that_fails_at_any_call_gives_everything_back() -> None:
    counting = Failing(TwinDriver(), lambda _call: False)
    ElasticMemory(counting, shape())
    assert counting.calls == 1 + 7 * LAYERS
    for k in range(1, counting.calls + 1):
        twin = TwinDriver()
        with pytest.raises(DriverError):
            ElasticMemory(Failing(twin, lambda call, at=k: call == at), shape())  # type: ignore[misc]
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)


def test_building_and_closing_that_are_interrupted_leave_nothing_behind() -> None:
    for k in range(1, 1 + 7 * LAYERS + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        driver._call = _interrupted(driver, k)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ElasticMemory(driver, shape())
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)
    number = _calls(lambda m: m.close(), lambda m: m.lend())
    for k in range(1, number + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        made = ElasticMemory(driver, shape())
        made.lend()
        driver._call = _interrupted(driver, driver.calls + k)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            made.close()
        made.close()
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)


def test_closing_that_fails_at_any_call_can_be_repeated() -> None:
    number = _calls(lambda m: m.close(), lambda m: m.lend())
    for k in range(1, number + 1):
        twin = TwinDriver()
        driver = Failing(twin, lambda _call: False)
        made = ElasticMemory(driver, shape())
        made.lend()
        driver.fails = lambda call, at=driver.calls + k: call == at  # type: ignore[misc]
        with pytest.raises(DriverError):
            made.close()
        made.close()
        assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)


# --- the fault kinds about memory that were seen in the field ----------------------------------


def _half_done(monkeypatch: pytest.MonkeyPatch, move: str, fail_at: int) -> ElasticMemory:
    """A move that fails at its `fail_at`-th call, in memory that undoes nothing."""
    monkeypatch.setattr(ElasticMemory, "_settle", lambda self: None)
    driver = Failing(TwinDriver(), lambda _call: False)
    made = ElasticMemory(driver, shape())
    if move == "return_":
        made.lend()
    first = driver.calls
    driver.fails = lambda call: call == first + fail_at
    with pytest.raises(DriverError):
        getattr(made, move)()
    return made


def test_kind_a_partial_mapping_that_is_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of two is mapped, or a wake runs out of memory half way (E5)."""
    for fail_at in range(3, 2 + 3 * LAYERS):
        made = _half_done(monkeypatch, "lend", fail_at)
        assert at_rest(made)[0] is not Mode.HOME
        assert len(set(at_rest(made)[1])) > 1 or not at_rest(made)[1][0][1]


def test_kind_undoing_unmaps_what_was_never_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bulk undo that asks no layer what it has is a misuse that the twin rejects (E5)."""
    made = _half_done(monkeypatch, "lend", 5)
    twin = made.driver._driver  # type: ignore[attr-defined]
    made.driver.fails = lambda _call: False  # type: ignore[attr-defined]
    mapped = [made.side(KV, layer).mapped for layer in range(LAYERS)]
    assert mapped == [True, False, False]
    with pytest.raises(Misuse, match="whole mapping"):
        twin.unmap(made.side(KV, 1).address, made.shape.lent_bytes)
    assert twin.misused == 1
    monkeypatch.undo()
    assert made.lend()  # what asks each layer undoes the one, and then lends
    assert twin.misused == 1


def test_kind_memory_is_taken_from_a_running_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait and the guard behind it, a reader in flight loses its memory (B5, E4)."""
    made = memory()
    pool = BlockPool(made, patience=0.01)
    made.lend()
    (block,) = pool.allocate(1)
    pool.touch("kernel", block)
    pool.leave(block)
    monkeypatch.setattr(pool, "wait", lambda: None)
    with pytest.raises(Refused, match="E4"):  # the guard alone still holds it
        made.return_()
    assert made.driver.opened(made.side(KV, 0).address)  # type: ignore[attr-defined]
    monkeypatch.setattr(pool, "in_use", lambda: False)
    made.return_()
    assert ("kernel", block) in pool.touching
    assert not made.driver.opened(made.side(KV, 0).address)  # type: ignore[attr-defined]


def test_kind_contents_discarded_and_hashes_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the drain a lookup finds a block whose content is gone (E4, B10)."""
    from kvclaims.bridge.vmm.tensors import bytes_at

    judge = ElasticMonitor(shape())
    made = ElasticMemory(TwinDriver(), shape(), tell=judge)
    pool = BlockPool(made)
    made.lend()
    (block,) = pool.allocate(1)
    layer = bytes_at(made.address(0), made.kv_bytes, "cpu")
    layer[block * PAGE] = 77
    pool.keep(block)
    pool.leave(block)
    monkeypatch.setattr(pool, "drain", lambda: None)
    monkeypatch.setattr(pool, "in_use", lambda: False)
    made.return_()
    made.lend()
    assert block in pool.hashed
    assert int(layer[block * PAGE]) == 0
    assert {v.rule for v in judge.violations} == {"E4"}


def test_kind_scattered_live_blocks_pin_the_memory() -> None:
    """One live block in the lent part keeps all of it, where nobody can move it (E4, V4)."""
    made = memory()
    pool = BlockPool(made)  # it was given no way to copy
    made.lend()
    first, _ = pool.allocate(2)
    pool.leave(first)
    with pytest.raises(StillHeld):
        made.return_()
    pool._copy = lambda _old, _new: None
    assert made.return_()


def test_kind_virtual_blocks_are_free_and_physical_ones_are_not() -> None:
    """Ids whose memory somebody else has are not handed out, however many are asked for (E2)."""
    made = memory()
    pool = BlockPool(made)
    with pytest.raises(Refused, match="F3"):
        pool.allocate(5)
    assert not pool.held
    pool.free |= set(pool.lent)  # as if the fence had been forgotten
    judge = ElasticMonitor(made.shape)
    made._tell = judge
    pool.allocate(5)
    assert {v.rule for v in judge.violations} == {"E2"}


def test_kind_a_second_return_after_a_failed_one_starts_over() -> None:
    """Errors do not stick: the failed return is undone, and the next one succeeds (E5)."""
    driver = Failing(TwinDriver(), lambda _call: False)
    made = ElasticMemory(driver, shape())
    pool = BlockPool(made)
    made.lend()
    at = driver.calls + 4
    driver.fails = lambda call: call == at
    with pytest.raises(DriverError):
        made.return_()
    assert made.mode is Mode.LENT
    assert pool.free >= set(pool.lent)
    assert made.return_()


OPERATIONS = st.lists(
    st.sampled_from(["lend", "return", "prefill", "allocate", "leave", "keep", "heal"]),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sets(st.integers(30, 250), max_size=30), st.integers(1, 3))
def test_any_run_with_any_failures_is_a_behaviour_of_the_machine(
    operations: list[str], failing: set[int], layers: int
) -> None:
    """Random runs where any set of driver calls fails: the monitor finds nothing, no call is
    misused, nothing of the base is lost, and in the end everything works and is given back."""
    twin = TwinDriver()
    driver = Failing(twin, lambda call: call in failing)
    form = shape(layers=layers)
    judge = ElasticMonitor(form)
    made = ElasticMemory(driver, form, tell=judge)
    pool = BlockPool(made, copy=lambda _old, _new: None, patience=0)
    acts: dict[str, Callable[[], Any]] = {
        "lend": made.lend,
        "return": made.return_,
        "prefill": lambda: made.prefill().__enter__() and made.end_prefill(),
        "allocate": lambda: pool.allocate(2),
        "leave": lambda: pool.leave(max(pool.held, default=0)),
        "keep": lambda: pool.keep(max(pool.held, default=0)),
        "heal": failing.clear,
    }
    for name in operations:
        with suppress(DriverError, Refused, StillHeld):
            acts[name]()
        assert judge.violations == []
        assert judge.mode is made.mode
    failing.clear()
    for block in sorted(pool.held):
        pool.leave(block)
    made.return_()
    made.start_prefill()
    made.end_prefill()
    assert made.lend()
    assert pool.free >= set(pool.lent)
    assert judge.broken() == ()
    made.close()
    assert (twin.left_over(), twin.misused) == ((0, 0, 0), 0)
