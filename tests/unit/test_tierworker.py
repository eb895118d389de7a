"""A worker's side of a tier: what it tells of its orders, and when; real tensors byte for byte."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvclaims.bridge.serving.tierfiles import BadCopy, TierFiles
from kvclaims.bridge.serving.tierqueue import TierQueue
from kvclaims.bridge.vllm.tier import Answers, Load, Loaded, Move, Orders, Results, Saved, Tier
from kvclaims.bridge.vllm.tierworker import TierWorker


class Blocks:
    """A device whose blocks hold bytes; what is too long is no block."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}

    def take(self, blocks: Sequence[int]) -> list[list[bytes]]:
        return [[self.held[block]] for block in blocks]

    def put(self, block: int, content: memoryview) -> None:
        if len(content) > 8:
            raise BadCopy("too long")
        self.held[block] = bytes(content)


class World:
    def __init__(self, folder: Path) -> None:
        self.device = Blocks()
        self.files = TierFiles(folder / "tier", "form")
        self.queue = TierQueue(self.files, threaded=False)
        self.worker = TierWorker(self.device, self.queue)

    def step(self, orders: Orders, work: bool = True) -> Results | None:
        self.worker.begin(orders)
        self.worker.save(orders.saves)
        while work and self.queue.work():
            pass
        self.worker.collect()
        return self.worker.results()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def load(request: str, *moves: tuple[str, int]) -> Load:
    return Load(request, tuple(name for name, _ in moves), tuple(Move(*move) for move in moves))


def test_what_is_saved_is_what_the_block_held_in_that_step(world: World) -> None:
    world.device.held[3] = b"right"
    assert world.step(Orders("x", saves=(Move("aa", 3),)), work=False) is None
    world.device.held[3] = b"later"
    assert world.step(Orders("x")) == Results("x", {"aa": Saved()})
    assert world.step(Orders("x")) is None
    told = world.step(Orders("x", loads=(load("r", ("aa", 5)),)))
    assert told == Results("x", loaded={"r": Loaded(1)})
    assert world.device.held[5] == b"right"
    assert (world.worker.received(), world.worker.failed()) == ({"r"}, set())
    assert (world.worker.received(), world.worker.failed()) == (set(), set())


def test_a_load_has_ended_when_it_is_on_the_device(world: World) -> None:
    world.device.held[3] = b"right"
    world.step(Orders("x", saves=(Move("aa", 3),)))
    orders = Orders("x", loads=(load("r", ("aa", 5), ("aa", 6)),))
    assert world.step(orders, work=False) is None
    assert world.worker.received() == set()
    assert world.step(Orders("x")) == Results("x", loaded={"r": Loaded(2)})
    assert world.worker.received() == {"r"}


def test_of_a_load_that_fails_the_rest_is_told_to_be_wrong(world: World) -> None:
    world.device.held.update({1: b"one", 2: b"much too long"})
    world.step(Orders("x", saves=(Move("aa", 1), Move("bb", 2))))
    for name, reason in (("cc", "the file is gone"), ("bb", "too long")):
        wanted = load("r", ("aa", 5), (name, 6), ("aa", 7))
        told = world.step(Orders("x", loads=(wanted,)))
        assert told == Results("x", loaded={"r": Loaded(1, reason)})
        assert (world.worker.received(), world.worker.failed()) == ({"r"}, {6, 7})
        assert 7 not in world.device.held


def test_a_load_that_a_new_life_ends_is_told_to_vllm_and_to_no_claim(world: World) -> None:
    world.device.held[1] = b"one"
    world.step(Orders("x", saves=(Move("aa", 1),)))
    world.step(Orders("x", loads=(load("r", ("aa", 5), ("aa", 6)),)), work=False)
    assert world.step(Orders("y")) is None
    assert (world.worker.received(), world.worker.failed()) == ({"r"}, {5, 6})
    assert 5 not in world.device.held


def test_without_a_life_there_is_nothing_to_do(world: World) -> None:
    assert world.step(Orders()) is None


def test_real_tensors_come_back_byte_for_byte(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from kvclaims.bridge.vllm.offload import Tensors

    made = torch.Generator().manual_seed(7)
    layers = {
        "half": torch.randn(9, 4, 2, generator=made).to(torch.bfloat16),
        "whole": torch.randint(-99, 99, (9, 3, 5), generator=made, dtype=torch.int32),
        "strided": torch.randn(9, 6, 4, generator=made).transpose(1, 2),
    }
    was = {name: tensor[4].clone() for name, tensor in layers.items()}
    device = Tensors(layers, 9)
    queue = TierQueue(TierFiles(tmp_path / "tier", device.form), threaded=False)
    worker = TierWorker(device, queue)
    worker.begin(Orders("x"))
    worker.save((Move("aa", 4), Move("bb", 2)))
    for tensor in layers.values():
        tensor.zero_()
    while queue.work():
        pass
    worker.begin(Orders("x", loads=(load("r", ("aa", 7)),)))
    while queue.work():
        pass
    worker.collect()
    for name, tensor in layers.items():
        assert torch.equal(tensor[7], was[name])
        assert not tensor[:7].any()
        assert not tensor[8].any()
    with pytest.raises(BadCopy, match="a block has 172"):
        device.put(1, memoryview(bytearray(195)))
    with pytest.raises(ValueError, match="needs the 8 blocks in the first place"):
        Tensors(layers, 8)


class Ranks:
    """Two workers with a part of every block each, and the scheduler's side of their tier."""

    def __init__(self, folder: Path) -> None:
        self.worlds = [World(folder / str(rank)) for rank in range(2)]
        self.tier = Tier(4)
        self._answers = Answers(2)

    def write(self, block: int) -> None:
        for rank, world in enumerate(self.worlds):
            world.device.held[block] = b"part %d" % rank

    def step(self, work: tuple[bool, bool] = (True, True)) -> Results:
        """One that all orders go to; the workers that `work` do what they were told."""
        orders, _ = self.tier.orders(lambda content: Move(content, 3))
        told = [w.step(orders, work=does) for w, does in zip(self.worlds, work, strict=True)]
        known = Results(orders.life)
        for results in filter(None, told):
            answered = self._answers.take(results)
            self.tier.saved(answered)
            known = known.merged(answered)
        return known


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    ranks = Ranks(tmp_path)
    ranks.tier.promise("claim", {"aa": 0})
    ranks.write(3)
    return ranks


def test_a_copy_is_kept_when_every_worker_has_its_part(ranks: Ranks) -> None:
    ranks.step(work=(True, False))
    assert [world.files.names() for world in ranks.worlds] == [{"aa"}, set()]
    assert not ranks.tier.keeps("aa")
    ranks.step()
    assert ranks.tier.keeps("aa")
    assert [bytes(w.files.read("aa")) for w in ranks.worlds] == [b"part 0", b"part 1"]


def test_a_load_is_right_when_every_part_is(ranks: Ranks) -> None:
    ranks.step()
    ranks.tier.begin("r", ["aa"], [5])
    assert ranks.step().loaded == {"r": Loaded(1, workers=2)}
    assert [w.device.held[5] for w in ranks.worlds] == [b"part 0", b"part 1"]
    path = ranks.worlds[1].files.folder / "aa.kv"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    ranks.tier.ended("r", 1)
    ranks.tier.begin("s", ["aa"], [6])
    assert ranks.step().loaded == {"s": Loaded(0, "the checksum is wrong", 2)}
    assert [w.worker.failed() for w in ranks.worlds] == [set(), {6}]


def test_one_worker_with_a_full_disk_leaves_nothing_with_the_other(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ranks.worlds[1].files, "publish", full)
        ranks.step()
    assert not ranks.tier.keeps("aa")
    assert ranks.tier.unsaved == {"aa": "No space left on device"}
    ranks.tier.release("claim", ["aa"])
    ranks.step()
    assert [world.files.names() for world in ranks.worlds] == [set(), set()]
