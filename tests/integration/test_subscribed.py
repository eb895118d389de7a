"""KV events heard from vLLM's own publisher: what it sends is judged as a recorded stream is."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="KV events are published with pyzmq")
events = pytest.importorskip("vllm.distributed.kv_events", reason="needs vLLM's publisher")

from kvclaims.checker import cli, foreign, subscribed  # noqa: E402
from kvclaims.spec.interface import BadOperation  # noqa: E402
from kvclaims.spec.telemetry import TraceError  # noqa: E402
from kvclaims.spec.vocabulary import Verdict  # noqa: E402

pytestmark = pytest.mark.engine

HASHES = [bytes([number]) * 32 for number in range(9)]


def stored(*numbers: int, parent: int | None = None) -> Any:
    above = None if parent is None else HASHES[parent]
    return events.BlockStored(
        block_hashes=[HASHES[n] for n in numbers],
        parent_block_hash=above,
        token_ids=[1] * 16 * len(numbers),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


def removed(*numbers: int) -> Any:
    return events.BlockRemoved(block_hashes=[HASHES[n] for n in numbers], medium="GPU")


class Publisher:
    """vLLM's, at two sockets in this process's own folder."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        self._own = events.ZmqEventPublisher(0, self.endpoint, self.replay)
        self._sent = 0

    def send(self, *said: Any) -> None:
        self._own.publish(events.KVEventBatch(ts=float(self._sent), events=list(said)))
        self._sent += 1

    def is_done(self) -> bool:
        """Whether all was sent: what it keeps for a replay is what it has sent."""
        return len(self._own._buffer) == self._sent

    def close(self) -> None:
        self._own.shutdown()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    own = Publisher(tmp_path)
    yield own
    own.close()


def settled(publisher: Publisher) -> None:
    """Wait until the publisher's thread has sent all that it was given."""
    until = time.monotonic() + 30
    while not publisher.is_done():
        assert time.monotonic() < until, "vLLM's publisher does not send"
        time.sleep(0.01)


def heard(
    publisher: Publisher, seconds: float = 1.0, save: Path | None = None
) -> foreign.ForeignReport:
    return subscribed.audit(publisher.endpoint, publisher.replay, seconds, save, lambda _: None)


def test_what_was_sent_before_is_replayed_and_judged(publisher: Publisher, tmp_path: Path) -> None:
    publisher.send(stored(0, 1))
    publisher.send(stored(2, parent=1), removed(0))
    settled(publisher)
    save = tmp_path / "heard.jsonl"
    report = heard(publisher, save=save)
    (run,) = report.runs
    assert (report.verdict, run.replay.events, run.replay.unjudged) == (Verdict.HOLDS, 3, 0)
    assert run.replay.resident == {"rank 0, GPU": {HASHES[1].hex(), HASHES[2].hex()}}
    again = foreign.audit([save])
    assert again.runs[0].replay == run.replay


def test_a_removal_of_what_is_not_resident_breaks_B8(publisher: Publisher) -> None:
    publisher.send(stored(0))
    publisher.send(removed(3))
    settled(publisher)
    (violation,) = heard(publisher).runs[0].replay.violations
    assert (violation.rule, violation.seq) == ("B8", 1)
    assert "not resident" in violation.message


def test_what_comes_while_one_listens_follows_what_was_replayed(publisher: Publisher) -> None:
    publisher.send(stored(0))
    settled(publisher)
    talking = threading.Thread(
        target=lambda: [publisher.send(stored(n, parent=n - 1)) for n in range(1, 9)]
    )
    stream = subscribed.listen(publisher.endpoint, publisher.replay, 20.0, lambda _: None)
    first = next(stream)
    talking.start()
    numbers = [first["seq"], *(next(stream)["seq"] for _ in range(8))]
    stream.close()
    talking.join()
    assert numbers == list(range(9))


def test_what_was_lost_on_the_way_is_asked_for_again(publisher: Publisher) -> None:
    """A subscriber without its replay would have a gap: with it there is none."""
    batches = [{"seq": n, "ts": 0.0, "events": []} for n in range(4)]
    context = zmq.Context()
    live = context.socket(zmq.PUB)
    port = live.bind_to_random_port("tcp://127.0.0.1")
    publisher.send(stored(0))
    settled(publisher)
    stream = subscribed.listen(f"tcp://127.0.0.1:{port}", publisher.replay, 20.0, lambda _: None)
    assert next(stream)["seq"] == 0
    for n in range(1, 4):
        publisher.send(stored(n, parent=n - 1))
    settled(publisher)
    found: list[int] = []

    def say_the_last() -> None:
        payload = subscribed.msgspec.msgpack.encode([0.0, batches[3]["events"]])
        while len(found) < 3:
            live.send_multipart([b"", (3).to_bytes(8, "big"), payload])
            time.sleep(0.02)

    talking = threading.Thread(target=say_the_last)
    talking.start()
    found.extend(next(stream)["seq"] for _ in range(3))
    talking.join()
    stream.close()
    live.close(linger=0)
    context.term()
    assert found == [1, 2, 3]


class Flood:
    """A publisher that never pauses."""

    def __init__(self, endpoint: str, *said: Any) -> None:
        self.endpoint, self._said = endpoint, list(said)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, 2)
        self._socket.bind(endpoint)
        self._stopped = threading.Event()
        self._talking = threading.Thread(target=self._talk)

    def __enter__(self) -> Flood:
        self._talking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._talking.join()
        self._socket.close(linger=0)
        self._context.term()

    def _talk(self) -> None:
        payload, number = subscribed.msgspec.msgpack.encode([0.0, self._said]), 0
        while not self._stopped.is_set():
            self._socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            number += 1


def test_one_listens_no_longer_than_was_said_however_much_is_sent(tmp_path: Path) -> None:
    with Flood(f"ipc://{tmp_path}/flood") as flood:
        until = time.monotonic() + 20
        stream = subscribed.listen(flood.endpoint, None, 1.0, lambda _: None)
        with closing(stream):
            heard = sum(1 for _ in takewhile(lambda _: time.monotonic() < until, stream))
    assert time.monotonic() < until, "it goes on listening"
    assert heard


def test_what_a_slow_listener_loses_is_not_the_publishers_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sockets are full while it sleeps: what is lost there was sent, and nobody can know."""
    monkeypatch.setattr(subscribed, "WAITING", 2)
    said = ["BlockStored", [1], None, [7] * 100_000, 16, None, "GPU"]
    with Flood(f"ipc://{tmp_path}/flood", said) as flood:
        save = tmp_path / "heard.jsonl"
        report = subscribed.audit(flood.endpoint, None, 3.0, save, lambda _: time.sleep(0.3))
    (run,) = report.runs
    assert run.replay.lost > 0
    assert run.replay.violations == []
    assert report.verdict is Verdict.UNKNOWN
    said = (
        f"  {run.replay.lost:,} numbers not heard, lost on the way or never sent: not known which"
    )
    assert said in list(report.lines())
    kept = foreign.audit([save])
    assert (kept.verdict, kept.runs[0].replay) == (Verdict.UNKNOWN, run.replay)


class Canned:
    """A live socket that says one number, and a replay that sends certain numbers again."""

    def __init__(self, live: int, *answers: list[int]) -> None:
        self._live, self._answers = live, list(answers)
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.endpoint, self.replay = (
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for socket in (self._pub, self._router)
        )
        self._stopped = threading.Event()
        self._talking = threading.Thread(target=self._talk)
        self.asked: list[int] = []

    def _talk(self) -> None:
        payload, live = (subscribed.msgspec.msgpack.encode([time, []]) for time in (0.0, 1.0))
        while not self._stopped.is_set():
            if self._router.poll(10):
                who, _, first = self._router.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                for number in self._answers.pop(0):
                    self._router.send_multipart([who, b"", number.to_bytes(8, "big"), payload])
                self._router.send_multipart([who, b"", subscribed._LAST, b""])
            elif len(self.asked):
                self._pub.send_multipart([b"", self._live.to_bytes(8, "big"), live])

    def __enter__(self) -> Canned:
        self._talking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._talking.join()
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()


@pytest.mark.parametrize(
    ("again", "verdict", "lost", "skipped"),
    [
        ([0, 1, 2, 3], Verdict.VACUOUS, 0, []),
        ([2, 3], Verdict.UNKNOWN, 1, []),
        ([], Verdict.UNKNOWN, 3, []),
        ([0, 2, 3], Verdict.VIOLATED, 0, ["1 to 1"]),
        ([0, 1, 3], Verdict.VIOLATED, 0, ["2 to 2"]),
        ([0], Verdict.VIOLATED, 0, ["1 to 3"]),
        ([2], Verdict.VIOLATED, 1, ["3 to 3"]),
    ],
)
def test_what_the_replay_no_longer_has_may_have_been_sent_and_a_hole_in_it_was_not(
    again: list[int], verdict: Verdict, lost: int, skipped: list[str]
) -> None:
    with Canned(4, [0], again) as publisher:
        stream = subscribed.listen(publisher.endpoint, publisher.replay, 20.0, lambda _: None)
        replay = foreign.Replay()
        for batch in foreign.batches(foreign.VLLM, "here", enumerate(stream, 1)):
            replay.take(batch)
            if batch.number == 4:
                break
        stream.close()
        assert publisher.asked == [0, 0]
    assert replay.lost == lost
    said = [f"rank 0 skips numbers {numbers}" for numbers in skipped]
    assert [violation.message for violation in replay.violations] == said
    report = foreign.ForeignReport((foreign.ForeignRun("here", foreign.VLLM, replay),))
    assert report.verdict is verdict


@pytest.mark.parametrize("asks", [True, False])
def test_an_engine_that_begins_anew_is_heard(asks: bool) -> None:
    """Its numbers go back; they are none that the replay has sent."""
    with Canned(0, [6, 7]) as again:
        replay = again.replay if asks else None
        if not asks:
            again.asked.append(0)
        with closing(subscribed.listen(again.endpoint, replay, 20.0, lambda _: None)) as stream:
            numbers = [next(stream)["seq"] for _ in range(4)]
    assert numbers == [6, 7, 0, 0] if asks else [0, 0, 0, 0]


def test_what_waits_to_be_heard_is_bounded(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes beyond it is lost, and the replay sends it again."""
    marks: dict[int, int] = {}
    connected = subscribed._connected

    def noted(context: Any, kind: int, *more: Any) -> Any:
        socket = connected(context, kind, *more)
        marks[kind] = socket.get(zmq.RCVHWM)
        return socket

    monkeypatch.setattr(subscribed, "WAITING", 2)
    monkeypatch.setattr(subscribed, "_connected", noted)
    stream = subscribed.listen(publisher.endpoint, publisher.replay, 30.0, lambda _: None)
    publisher.send(stored(0))
    assert next(stream)["seq"] == 0
    for number in range(1, 3000):
        publisher.send(stored(number % 9))
    settled(publisher)
    numbers = [next(stream)["seq"] for _ in range(2)]
    talking = threading.Thread(target=lambda: [publisher.send(stored(1)) for _ in range(20)])
    talking.start()
    numbers += [next(stream)["seq"] for _ in range(2997)]
    talking.join()
    stream.close()
    assert numbers == list(range(1, 3000))
    assert marks == {zmq.SUB: 2, zmq.DEALER: 0}


def test_nobody_who_speaks_is_vacuous(tmp_path: Path) -> None:
    report = subscribed.audit(f"ipc://{tmp_path}/nobody", None, 0.2, None, lambda _: None)
    assert report.verdict is Verdict.VACUOUS


def test_a_replay_that_does_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed, "ANSWER_S", 0.2)
    nobody = f"ipc://{tmp_path}/nobody"
    with pytest.raises(TraceError, match=r"no answer within 0\.2 s"):
        subscribed.audit(nobody, nobody, 1.0, None, lambda _: None)


def test_what_is_no_endpoint_is_said() -> None:
    with pytest.raises(BadOperation, match="is no endpoint of ZMQ"):
        subscribed.audit("tcp://nowhere", None, 1.0, None, lambda _: None)


def test_a_file_that_is_there_is_not_overwritten(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(BadOperation, match="cannot write"):
        heard(publisher, save=tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "mine"


def packed(value: Any) -> bytes:
    return bytes(subscribed.msgspec.msgpack.encode(value))


NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x91\x01",
        b"\x91" * 5000 + b"\x01",
        packed({"a": 1, "b": 2}),
        packed([NOW, []]),
        packed([0.0, [["BlockRemoved", [NOW]]]]),
        packed([0.0, [], subscribed.msgspec.msgpack.Ext(1, b"x")]),
    ],
)
def test_what_is_no_batch_of_events_is_said(payload: bytes) -> None:
    with pytest.raises(TraceError, match="no batch of KV events"):
        subscribed._read([b"", (0).to_bytes(8, "big"), payload], "here")


@pytest.mark.parametrize("number", [b"", b"\0\1", bytes(9), (-2).to_bytes(8, "big", signed=True)])
def test_what_is_no_number_of_a_batch_is_said(number: bytes) -> None:
    with pytest.raises(TraceError, match="no batch of KV events"):
        subscribed._read([b"", number, packed([0.0, []])], "here")


def test_what_cannot_be_kept_is_said(publisher: Publisher, tmp_path: Path) -> None:
    """A time of MessagePack's own is none that a line of JSON can tell."""
    publisher._own.publish(events.KVEventBatch(ts=NOW, events=[stored(0)]))
    publisher._sent += 1
    settled(publisher)
    with pytest.raises(TraceError, match=r"no batch of KV events .*datetime"):
        heard(publisher, save=tmp_path / "heard.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tcp://127.0.0.1:1", "x.jsonl"], "listened to alone"),
        (["x.jsonl", "--save", "y"], "go with an endpoint"),
        (["tcp://127.0.0.1:1", "--seconds", "0"], "seconds"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: list[str], message: str) -> None:
    out = StringIO()
    assert cli.run(["audit", *arguments, "--json"], out) == 2
    assert message in json.loads(out.getvalue())["error"]
