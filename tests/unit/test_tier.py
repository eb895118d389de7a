"""The scheduler's book of a tier, without an engine (O1 to O3)."""

from __future__ import annotations

import pytest

from kvclaims.bridge.vllm.tier import (
    MOST_UNDER_WAY,
    Answers,
    Loaded,
    Move,
    Results,
    Saved,
    Tier,
)


def name(content: str) -> str:
    return f"{ord(content):04x}"


class Device:
    """Contents by block; the tier is told of each as it appears."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.at: dict[str, int] = {}

    def put(self, content: str, block: int) -> None:
        self.at[content] = block
        self.tier.appeared(content)

    def source(self, content: str) -> Move | None:
        return Move(name(content), self.at[content]) if content in self.at else None

    def save(self) -> list[str]:
        """A step in which every copy is made; what was given up for them."""
        orders, gone = self.tier.orders(self.source)
        self.tier.saved(Results(self.tier.life, {m.name: Saved() for m in orders.saves}))
        return gone


def promised(tier: Tier, claim: str, contents: str) -> None:
    tier.promise(claim, {content: position for position, content in enumerate(contents)})


def test_only_what_was_promised_is_saved_and_each_once() -> None:
    tier = Tier(4)
    device = Device(tier)
    device.put("a", 1)
    promised(tier, "one", "ab")
    promised(tier, "two", "b")
    device.put("b", 2)
    device.put("c", 3)
    orders, _ = tier.orders(device.source)
    assert {move.block for move in orders.saves} == {1, 2}
    assert tier.orders(device.source)[0].saves == ()  # they are under way
    assert (tier.kept, tier.promised, tier.is_busy) == (0, 2, True)
    assert sorted(tier.saved(Results(tier.life, {name(c): Saved() for c in "ab"}))) == ["a", "b"]
    assert (tier.kept, tier.is_busy) == (2, False)
    assert tier.owners("b") == {"one": 1, "two": 0}


def test_room_is_promised_to_contents_and_shared_by_claims() -> None:
    tier = Tier(3)
    assert tier.fits("abc") == 3
    promised(tier, "one", "abc")
    assert (tier.fits("ab"), tier.fits("ad"), tier.fits("d")) == (2, 1, 0)
    tier.release("one", "abc")
    assert tier.fits("def") == 3


def test_what_was_said_of_another_life_counts_for_nothing() -> None:
    tier = Tier(2)
    device = Device(tier)
    promised(tier, "one", "a")
    device.put("a", 1)
    orders, _ = tier.orders(device.source)
    assert tier.clear() == []
    assert tier.saved(Results(orders.life, {name("a"): Saved()})) == []
    assert not tier.keeps("a")
    assert device.save() == []
    assert tier.keeps("a")


def test_a_run_from_the_first_content_matches_and_under_its_name_only() -> None:
    tier = Tier(4)
    device = Device(tier)
    promised(tier, "one", "abc")
    for block, content in enumerate("ab", 1):
        device.put(content, block)
    device.save()
    names = [name(c) for c in "abc"]
    assert tier.matching("abc", names) == 2
    assert tier.matching("cab", [names[2], *names[:2]]) == 0
    assert tier.matching("ab", ["ffff", names[1]]) == 0


def test_what_is_on_its_way_is_waited_for() -> None:
    tier = Tier(4)
    device = Device(tier)
    promised(tier, "one", "ab")
    device.put("a", 1)
    device.put("b", 2)
    device.save()
    names = [name(c) for c in "ab"]
    load = tier.begin("r", "a", [7])
    assert tier.matching("ab", names) is None
    assert tier.matching("ba", names[::-1]) == 1
    assert tier.ended("r", 1) == load
    assert tier.matching("a", names[:1]) is None  # it is there, and cannot be seen yet
    assert tier.arrived(7, "a")
    assert tier.matching("ab", names) == 2
    assert not tier.arrived(8, "a")  # a request computed it


@pytest.mark.parametrize("good", [0, 1])
def test_what_nobody_waits_for_any_more_is_not_on_its_way(good: int) -> None:
    tier = Tier(4)
    device = Device(tier)
    promised(tier, "one", "a")
    device.put("a", 1)
    device.save()
    tier.begin("r", "a", [7])
    tier.ended("r", good)
    tier.abandoned([7])
    assert tier.matching("a", [name("a")]) == 1


def test_a_copy_that_a_load_reads_is_not_given_up() -> None:
    tier = Tier(2)
    device = Device(tier)
    promised(tier, "old", "ab")
    device.put("a", 1)
    device.put("b", 2)
    device.save()
    tier.release("old", "ab")
    tier.begin("r", "b", [5])
    promised(tier, "new", "c")
    device.put("c", 3)
    assert device.save() == ["a"]
    promised(tier, "newer", "d")
    device.put("d", 4)
    assert device.save() == []
    assert tier.is_busy
    tier.ended("r", 1)
    assert device.save() == ["b"]
    assert tier.copies.keys() == {"c", "d"}


def test_a_tier_that_cannot_be_written_to_is_tried_again_ever_more_rarely() -> None:
    tier = Tier(2)
    device = Device(tier)
    promised(tier, "one", "a")
    device.put("a", 1)
    tried = []
    for step in range(40):
        orders, _ = tier.orders(device.source)
        if orders.saves:
            tried.append(step)
            tier.saved(Results(tier.life, {name("a"): Saved("full")}))
            assert tier.unsaved == {"a": "full"}
        assert not tier.is_busy
    assert tried == [0, 2, 6, 14, 30]


def test_what_could_not_be_written_is_told_until_it_is_written_or_nobody_waits() -> None:
    tier = Tier(3)
    device = Device(tier)
    promised(tier, "one", "ab")
    for block, content in enumerate("ab"):
        device.put(content, block)
    tier.orders(device.source)
    tier.saved(Results(tier.life, {name(c): Saved("full") for c in "ab"}))
    assert tier.unsaved == {"a": "full", "b": "full"}
    while not tier.kept:
        tier.orders(device.source)
        tier.saved(Results(tier.life, {name("a"): Saved(), name("b"): Saved("full")}))
    assert tier.unsaved == {"b": "full"}
    tier.release("one", "ab")
    assert tier.unsaved == {}


@pytest.mark.parametrize("room", [1, 2])
def test_what_is_promised_again_while_it_is_written_needs_no_second_copy(room: int) -> None:
    tier = Tier(room)
    device = Device(tier)
    promised(tier, "one", "a")
    device.put("a", 1)
    tier.orders(device.source)
    promised(tier, "two", "a")
    assert tier.saved(Results(tier.life, {name("a"): Saved()})) == ["a"]
    assert not tier.is_busy
    assert tier.orders(device.source)[0].saves == ()


def test_only_so_many_copies_are_under_way() -> None:
    tier = Tier(3 * MOST_UNDER_WAY)
    contents = [f"c{i}" for i in range(2 * MOST_UNDER_WAY + 1)]
    tier.promise("one", {content: position for position, content in enumerate(contents)})
    seen: list[str] = []
    counts = []
    while tier.is_busy:
        orders, _ = tier.orders(lambda content: Move(content, 1))
        counts.append(len(orders.saves))
        seen += [move.name for move in orders.saves]
        assert tier.orders(lambda content: Move(content, 1))[0].saves == ()
        tier.saved(Results(tier.life, {move.name: Saved() for move in orders.saves}))
    assert counts == [MOST_UNDER_WAY, MOST_UNDER_WAY, 1]
    assert seen == contents


def test_two_workers_have_done_what_both_have_done() -> None:
    one = Results("x", {"a": Saved(), "b": Saved("full")}, {"r": Loaded(3), "s": Loaded(2)})
    two = Results("x", {"a": Saved(), "b": Saved()}, {"r": Loaded(1, "wrong")})
    for merged in (one.merged(two), two.merged(one)):
        assert merged.saved == {"a": Saved(workers=2), "b": Saved("full", 2)}
        assert merged.loaded == {"r": Loaded(1, "wrong", 2), "s": Loaded(2)}
    with pytest.raises(ValueError, match="different lives"):
        one.merged(Results("y"))


def test_workers_answer_each_in_its_own_time() -> None:
    answers = Answers(2)
    assert answers.take(Results("x", {"a": Saved()}, {"r": Loaded(2)})) == Results("x")
    told = answers.take(Results("x", {"a": Saved("full"), "b": Saved()}))
    assert told == Results("x", {"a": Saved("full", 2)})
    told = answers.take(Results("x", {"b": Saved()}, {"r": Loaded(1, "wrong")}))
    assert told == Results("x", {"b": Saved(workers=2)}, {"r": Loaded(1, "wrong", 2)})
    assert answers.take(Results("x", {"c": Saved()})) == Results("x")
    assert answers.take(Results("y", {"c": Saved()})) == Results("y")  # of another life
    assert answers.take(Results("y", {"c": Saved()})) == Results("y", {"c": Saved(workers=2)})


def test_what_one_worker_could_not_write_leaves_no_part_with_the_others() -> None:
    """Nobody would ever remove it, nor count the room that it takes."""
    tier = Tier(2)
    device = Device(tier)
    promised(tier, "one", "a")
    device.put("a", 1)
    tier.orders(device.source)
    answers = Answers(2)
    for said in (Saved(), Saved("No space left on device")):
        tier.saved(answers.take(Results(tier.life, {name("a"): said})))
    tier.release("one", "a")
    orders, _ = tier.orders(device.source)
    assert (orders.drops, orders.saves) == ((name("a"),), ())
    assert not tier.is_busy


def test_a_copy_that_is_tried_again_is_removed_before_it_is_written() -> None:
    tier = Tier(2)
    device = Device(tier)
    promised(tier, "one", "a")
    device.put("a", 1)
    tier.orders(device.source)
    tier.saved(Results(tier.life, {name("a"): Saved("full", 2)}))
    told = [tier.orders(device.source)[0] for _ in range(3)]
    assert [(o.drops, [m.name for m in o.saves]) for o in told if o.drops or o.saves] == [
        ((name("a"),), []),
        ((), [name("a")]),
    ]
