"""The monitor: the same machine read as closures over a shadow state."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvclaims.checker import instances
from kvclaims.checker.finite import Compiled, compile_instance
from kvclaims.checker.monitor import Monitor
from kvclaims.spec import claims, pool
from kvclaims.spec.interface import BlockFacts, PoolSnapshot, PoolStep
from kvclaims.spec.language import BOOL, NUMERIC, Sort


def steps(*told: tuple[Any, ...]) -> list[PoolStep]:
    """`("take", "r", 1)` and so on, with the machine's parameter names filled in."""
    return [
        PoolStep(
            name,
            {p.name: a for p, a in zip(pool.POOL.action(name).params, args, strict=True)},
        )
        for name, *args in told
    ]


def monitor() -> Monitor:
    watching = Monitor(range(5), null_block=0)
    watching.introduce(pool.REQUEST, "r", True)
    watching.introduce(pool.REQUEST, "quiet", False)
    watching.introduce(claims.CLAIM, "hard", True)
    watching.introduce(claims.CLAIM, "soft", False)
    return watching


def broken_by(*told: tuple[Any, ...]) -> list[str]:
    watching = monitor()
    for step in steps(*told):
        watching(step)
    return [violation.rule for violation in watching.violations]


RESIDENT = (
    ("admit", "r", 1),
    ("take", "r", 1),
    ("register", "r", 1, "A"),
    ("drop", "r", 1),
    ("retire", "r"),
)
CLAIMED = (
    ("submit", "hard"),
    ("accept", "hard", 1),
    ("cover", "hard", 1, True),
    ("materialize", "hard"),
)


def test_a_lawful_life_breaks_nothing() -> None:
    assert (
        broken_by(
            *RESIDENT,
            *CLAIMED,
            ("finish", "hard", "released"),
            ("uncover", "hard", 1),
            ("evict", 1, "A"),
        )
        == []
    )


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("B2", (*RESIDENT, ("drop", "r", 1))),
        ("P1", (*RESIDENT, *CLAIMED, ("evict", 1, "A"))),
        ("P1", (*RESIDENT, *CLAIMED, ("uncover", "hard", 1))),
        ("F3", (("admit", "r", 5),)),
        ("F2", (("submit", "hard"), ("accept", "hard", 5))),
        ("F2", (("admit", "r", 0), ("take", "r", 1))),
        ("B3", (*RESIDENT, ("admit", "r", 1), ("take", "r", 1))),
        ("P4", (("admit", "quiet", 1), ("take", "quiet", 1), ("register", "quiet", 1, "A"))),
        ("B6", (("admit", "r", 1), ("take", "r", 0))),
        ("L1", (*RESIDENT, *CLAIMED, ("materialize", "hard"))),
        ("L7", (("submit", "hard"), ("accept", "hard", 1), ("materialize", "hard"))),
        ("L2", (*RESIDENT, ("submit", "soft"), ("cover", "soft", 1, False))),
        ("B5", (("admit", "r", 1), ("take", "r", 1), ("register", "r", 1, "A"), ("evict", 1, "A"))),
        ("F4", (("overflow", "r", 4),)),
        ("F3", (("defer", "r", 4),)),
        ("B7", (("admit", "r", 1), ("take", "r", 1), ("retire", "r"))),
    ],
)
def test_a_step_whose_guard_fails_names_the_rule(rule: str, told: tuple[Any, ...]) -> None:
    found = broken_by(*told)
    if rule == "B6":  # the null block is never in the queue: the same guard as for P1
        assert found[0] == "P1"
    else:
        assert found[0] == rule


@pytest.mark.parametrize(
    ("rule", "facts", "free"),
    [
        ("B2", BlockFacts(ref=2, queued=False, keys=()), 3),
        ("B1", BlockFacts(ref=1, queued=True, keys=()), 3),
        ("B3", BlockFacts(ref=1, queued=False, keys=("A",)), 3),
        ("B1", BlockFacts(ref=1, queued=False, keys=()), 4),
    ],
)
def test_what_the_engine_holds_is_compared(rule: str, facts: BlockFacts, free: int) -> None:
    watching = monitor()
    admit, take = steps(("admit", "r", 1), ("take", "r", 1))
    watching(admit)
    watching(PoolStep(take.action, take.args, {1: facts}, free))
    assert [v.rule for v in watching.violations] == [rule]


def snapshot(**changes: Any) -> PoolSnapshot:
    blank = BlockFacts(ref=0, queued=True, keys=())
    whole: dict[str, Any] = {
        "null_block": 0,
        "queue": (1, 2, 3, 4),
        "counter": 4,
        "facts": dict.fromkeys(range(1, 5), blank),
        "holders": {},
        "pins": {},
        "lookup": {},
    }
    return PoolSnapshot(**{**whole, **changes})


def test_a_sound_pool_passes_the_deep_audit() -> None:
    watching = monitor()
    watching.audit(snapshot())
    assert watching.violations == []


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("B1", {"queue": (1, 2, 2, 4)}),
        ("B1", {"counter": 5}),
        ("B6", {"queue": (0, 1, 2, 3)}),
        ("B2", {"holders": {"r": (1,)}}),
        ("B2", {"pins": {"hard": (1,)}}),
        ("B3", {"lookup": {"A": (1,)}}),
        ("B2", {"facts": {1: BlockFacts(ref=1, queued=True, keys=())}}),
    ],
)
def test_the_deep_audit_finds_what_no_step_told(rule: str, changes: dict[str, Any]) -> None:
    watching = monitor()
    watching.audit(snapshot(**changes))
    assert [v.rule for v in watching.violations] == [rule]


@pytest.mark.parametrize("name", ["pool/soft", "pool/requests", "pool/keys"])
def test_shadow_and_compiled_instance_agree_on_whole_states(name: str) -> None:
    """Two readings of one declaration: random runs, compared place by place after each step."""
    compiled = compile_instance(instances.PINNED[name]())
    rng = random.Random(7)
    for _ in range(30):
        _run_beside(compiled, rng, length=120)


def _run_beside(compiled: Compiled, rng: random.Random, length: int) -> None:
    instance = compiled.instance
    (state,) = compiled.initial
    watching = Monitor(range(instance.sizes["Block"]), null_block=0)
    for sort, flags in ((claims.CLAIM, "hard"), (pool.REQUEST, "admit_reuse")):
        for (i,), flag in instance.rigid[flags].items():
            watching.introduce(sort, instance.element(sort, i), bool(flag))

    def named(sort: Sort, number: int) -> Any:
        if sort == pool.BLOCK or sort in NUMERIC:
            return number
        return bool(number) if sort == BOOL else instance.element(sort, number)

    for _ in range(length):
        following = compiled.successors(state)
        if not following:  # every claim refused, every request turned away
            return
        number, state = rng.choice(following)
        action = compiled.actions[number]
        params = instance.machine.action(action.name).params
        args = {p.name: named(p.sort, v) for p, v in zip(params, action.args, strict=True)}
        watching(PoolStep(action.name, args))
        assert watching.violations == []
        for (symbol, place), expected in zip(compiled.slots, state, strict=True):
            here = tuple(named(s, v) for s, v in zip(symbol.domain, place, strict=True))
            assert watching.shadow.get(symbol, here) == expected, (action.label, symbol, here)


def test_a_step_costs_what_it_touches_and_not_what_the_pool_holds() -> None:
    """Counted, not timed: the places that one life reads do not grow with the pool."""
    reads = []
    for blocks in (100, 10_000):
        watching = Monitor(range(blocks), null_block=0)
        watching.introduce(pool.REQUEST, "r", True)
        table = watching.shadow.tables[pool.queued]
        table.values = counted = _CountingDict(table.values)
        for step in steps(*RESIDENT, ("admit", "r", 1), ("share", "r", 1, "A"), ("drop", "r", 1)):
            watching(step)
        reads.append(counted.reads)
        assert watching.violations == []
    assert reads[0] == reads[1] > 0


def test_a_refusal_in_a_full_pool_looks_only_at_what_is_covered() -> None:
    """The pool is counted by what is not free and not covered: there are as many such blocks as
    the pool holds, and none of them is looked at."""
    looks = []
    for blocks in (100, 10_000):
        watching = Monitor(range(blocks + 1), null_block=0)
        watching.introduce(claims.CLAIM, "hard", True)
        for name in ("r", "late"):
            watching.introduce(pool.REQUEST, name, True)
        taken = [("take", "r", b) for b in range(2, blocks + 1)]
        life = steps(*RESIDENT, *CLAIMED, ("admit", "r", blocks - 1), *taken)
        for step in life:
            watching(step)
        table = watching.shadow.tables[pool.null]
        table.values = counted = _CountingDict(table.values)
        for step in steps(("turn_away", "late", blocks)):
            watching(step)
        assert watching.violations == []
        looks.append(counted.reads)
        for step in steps(("defer", "late", blocks - 1)):
            watching(step)
        assert [v.rule for v in watching.violations] == ["F4"]  # it was turned away before
    # The null block is listed and read in two counts; so is the one that is covered, in one.
    assert looks[0] == looks[1] == 5


class _CountingDict(dict[Any, Any]):
    """Counts how often it was asked, and how many places it handed out."""

    reads = 0

    def get(self, *args: Any) -> Any:
        self.reads += 1
        return super().get(*args)

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()
