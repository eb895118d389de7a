"""vLLM's KV events while they are published over ZMQ, as `checker.foreign` reads them from a file.

A publisher sends three frames a batch: a topic, the batch's number in eight bytes, and the batch in
MessagePack.  What was sent before anybody listened, or was lost on the way, its replay socket sends
again to whoever names the first number (vLLM 0.32, `vllm/distributed/kv_events.py`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

from kvclaims.checker import foreign
from kvclaims.checker.verdicts import Progress
from kvclaims.spec.interface import BadOperation, EngineMissing
from kvclaims.spec.telemetry import TraceError

try:
    import msgspec
    import zmq
except ImportError as error:  # pragma: no cover - vLLM brings both
    raise EngineMissing(
        f"KV events are received with pyzmq and msgspec (install: pip install 'kvclaims[events]'): "
        f"{error}"
    ) from None

ANSWER_S: Final = 5.0
"""How long a replay may keep silent."""

WAITING: Final = 10_000
"""How many batches may wait to be heard, as many as vLLM's replay keeps.  What comes beyond them is
lost: a gap in the numbers, which the replay fills.  Without one nobody can tell whether they were
sent, so that is not known."""

Raw = dict[str, Any]
Sent = tuple[int, Raw]
"""A number and what was sent under it."""

_NO_LIMIT: Final = 0

_WIDTH: Final = 8
"""Bytes of a number."""

_LAST: Final = (-1).to_bytes(_WIDTH, "big", signed=True)
"""The number that ends a replay."""


def audit(
    endpoint: str,
    replay: str | None,
    seconds: float,
    save: Path | None,
    progress: Progress,
) -> foreign.ForeignReport:
    """Listen for `seconds` and judge what came; with `replay` from the first batch on that the
    publisher still has.  The batches are kept in the file `save`, one a line.

    Raises BadOperation for an endpoint that is none and a file that cannot be written, TraceError
    for what is no batch of events, and for a replay that does not answer.
    """
    values = listen(endpoint, replay, seconds, progress)
    if save is None:
        return _judged(endpoint, values)
    try:
        with save.open("x", encoding="utf-8") as file:
            return _judged(endpoint, _kept(values, file))
    except OSError as error:
        raise BadOperation(f"cannot write {save}: {error.strerror}") from None


def _judged(endpoint: str, values: Iterable[Any]) -> foreign.ForeignReport:
    stream = foreign.batches(foreign.VLLM, endpoint, enumerate(values, 1))
    return foreign.ForeignReport((foreign.replayed(endpoint, foreign.VLLM, stream),))


def _kept(values: Iterable[Any], file: IO[str]) -> Iterator[Any]:
    for value in values:
        file.write(json.dumps(value) + "\n")
        yield value


def listen(endpoint: str, replay: str | None, seconds: float, progress: Progress) -> Iterator[Raw]:
    """Each batch as it comes, in the form of a recorded one; what the replay can still send is put
    where it was missing.  What is missing nevertheless is said to be lost, unless the replay sends
    again what came before: then it was never sent."""
    with zmq.Context() as context:
        live = _connected(context, zmq.SUB, endpoint, WAITING)
        live.set(zmq.SUBSCRIBE, b"")
        until = time.monotonic() + seconds
        awaited: dict[str, int] = {}
        heard = 0
        sent = set()
        """What the replay has sent already, and may come once more."""
        if replay is not None:
            for number, batch in _again(context, replay, 0):
                awaited[_rank(batch)], heard = number + 1, heard + 1
                sent.add((number, repr(batch["ts"])))
                yield batch
        while (left := until - time.monotonic()) > 0 and live.poll(math.ceil(1000 * left)):
            number, batch = _read(live.recv_multipart(), endpoint)
            next_one = awaited.get(_rank(batch), number if replay is None else 0)
            if (number, repr(batch["ts"])) in sent:
                continue
            sent.clear()
            if number > next_one:
                asked = replay and _again(context, replay, max(0, next_one - 1))
                yield from _filled(asked or (), next_one, number, batch)
            else:
                yield batch
            awaited[_rank(batch)], heard = number + 1, heard + 1
            progress(f"{heard:,} batches from {endpoint}")


def _filled(kept: Iterable[Sent], first: int, number: int, batch: Raw) -> Iterator[Raw]:
    """Those of what is `kept` that were missing from `first` on, and then the batch itself.  What
    is missing before all of them may have been lost: what is missing after one that is kept was
    never sent."""
    expected, may_be_lost = first, True
    for old, one in chain(((old, one) for old, one in kept if old < number), ((number, batch),)):
        if old < first:
            may_be_lost = False
            continue
        yield one | {foreign.AFTER_LOSS: True} if old > expected and may_be_lost else one
        expected, may_be_lost = old + 1, False


def _rank(batch: Raw) -> str:
    return str(batch.get("data_parallel_rank") or 0)


def _again(context: Any, replay: str, first: int) -> Iterator[Sent]:
    """What the publisher still has from this number on.  TraceError if it does not answer."""
    asking = _connected(context, zmq.DEALER, replay)
    asking.send_multipart([b"", first.to_bytes(_WIDTH, "big")])
    while True:
        if not asking.poll(int(1000 * ANSWER_S)):
            raise TraceError(f"{replay}: no answer within {ANSWER_S:g} s: is it the replay socket?")
        frames = asking.recv_multipart()
        if _LAST in frames:
            asking.close()
            return
        yield _read(frames, replay)


def _connected(context: Any, kind: int, endpoint: str, waiting: int = _NO_LIMIT) -> Any:
    """`waiting` is the number of messages that may wait; a replay sends what it has and no more,
    and what were lost of it nobody would send again."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, waiting)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise BadOperation(f"{endpoint} is no endpoint of ZMQ: {error.strerror}") from None
    return socket


def _read(frames: list[bytes], place: str) -> Sent:
    """The number in the last frame but one, and its batch: `[timestamp, events, rank]`."""
    try:
        number, payload = _number(frames[-2]), frames[-1]
        timestamp, events, *rank = _plain(_list(msgspec.msgpack.decode(payload)))
    except (IndexError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise TraceError(f"{place}: no batch of KV events ({error})") from None
    batch = {"seq": number, "ts": timestamp, "events": events}
    return number, batch | ({"data_parallel_rank": rank[0]} if rank else {})


def _number(frame: bytes) -> int:
    number = int.from_bytes(frame, "big", signed=True)
    if len(frame) != _WIDTH or number < 0:
        raise ValueError(f"its number is {frame!r}")
    return number


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"it is no list but a {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    """What JSON can say: a hash in bytes becomes its hexadecimal digits.  ValueError for what JSON
    cannot."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"a {type(value).__name__} in it is nothing that JSON can say")
