"""KV events of other engines, replayed and judged: B8 and T1 from the stream alone.

Three dialects are read from JSON lines (or one JSON array): vLLM's event batches as published over
ZMQ, Dynamo's router events, and TensorRT-LLM's cache events.  Each becomes the same few steps
(stored, removed, cleared) over a set of resident hashes; a stream is judged by what it says itself:
numbers or times that skip, repeat or run back (T1), a removal of what is not resident, a block
stored below a parent that is not, a hash removed while a copy of it remained (B8).  Of a block that
may have come in a part of the stream that is not there, nothing is said.

Numbers that a listener may have lost itself are no fault of the sender's: what follows is then not
known, and no violation.

Tiers below the device are told more loosely, by vLLM's own design: their stores come in any order
(each carries its parent's hash), a hash that is told several times is removed as often, and a clear
empties the device alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from kvclaims.checker.verdicts import Violation, counted
from kvclaims.spec.telemetry import TraceError
from kvclaims.spec.vocabulary import Verdict

Kind = Literal["stored", "removed", "cleared"]


@dataclass(frozen=True)
class Step:
    """One event: `hashes` in chain order below `parent`; `place` is the worker, rank, window or
    tier that the event speaks of (hashes at different places are different blocks).  `group` is the
    window or group of layers, empty where none is told; `on_device` is False for the tiers below.
    """

    kind: Kind
    place: str
    hashes: tuple[str, ...] = ()
    parent: str | None = None
    group: str = ""
    on_device: bool = True


@dataclass(frozen=True)
class Batch:
    """What was sent under one number; `source` counts by itself.  `time` is in seconds on a clock
    of the sender, None where none is told."""

    number: int
    source: str
    steps: tuple[Step, ...]
    time: float | None = None
    after_loss: bool = False
    """Numbers that are missing before it may have been lost on the way to the listener."""


Raw = Mapping[str, Any]

AFTER_LOSS: Final = "after_loss"
"""The field of a batch by which a listener says that it may have lost those before it."""

KEPT: Final = 10_000
"""Of how many batches it is known what they held, as many as vLLM's replay sends again."""


# --- dialects ----------------------------------------------------------------------------


def _vllm(raw: Raw) -> Batch:
    """`{"seq", "ts", "events": [{"type": "BlockStored", …}], "data_parallel_rank"}`, and what the
    listener says of itself."""
    source = f"rank {_named('rank', raw.get('data_parallel_rank')) or 0}"
    steps = tuple(_vllm_step(e, source) for e in raw["events"])
    lost = raw.get(AFTER_LOSS, False)
    if type(lost) is not bool:
        raise TraceError(f"{AFTER_LOSS} is true or false, not {lost!r}")
    return Batch(_whole(raw["seq"]), source, steps, _time(raw.get("ts")), lost)


def _vllm_step(event: Any, source: str) -> Step:
    if isinstance(event, list):
        # The wire form: the kind first, then the fields in order.
        kind, *values = event
        names = _VLLM_FIELDS.get(kind, ())
        event = {"type": kind, **dict(zip(names, values, strict=False))}
    medium = event.get("medium") or _DEVICE
    if not isinstance(medium, str):
        raise TraceError(f"a medium is a text, not {medium!r}")
    place = f"{source}, {medium}"
    for name in ("group_idx", "locality", "ownership"):
        what = name.removesuffix("_idx")
        if (value := _named(what, event.get(name))) is not None:
            place += f", {what} {value}"
    group = "" if event.get("group_idx") is None else f"group {event['group_idx']}"
    elsewhere = event.get("locality") not in (None, "LOCAL") or event.get("ownership") is not None
    on_device = medium.upper() == _DEVICE and not elsewhere
    match event["type"]:
        case "BlockStored":
            hashes, parent = _hashes(event["block_hashes"]), _hash(event.get("parent_block_hash"))
            return Step("stored", place, hashes, parent, group, on_device)
        case "BlockRemoved":
            hashes = _hashes(event["block_hashes"])
            return Step("removed", place, hashes, group=group, on_device=on_device)
        case "AllBlocksCleared":
            return Step("cleared", source)
    raise TraceError(f"unknown event {event['type']!r}")


_DEVICE: Final = "GPU"
"""vLLM's word for the device, on whatever device it runs."""

_VLLM_FIELDS: Final = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def _dynamo(raw: Raw) -> Batch:
    """`{"worker_id", "event": {"event_id", "data": {"stored" | "removed": …} or "cleared"}}`."""
    event = raw["event"]
    rank, worker = _named("rank", event.get("dp_rank")), _named("worker", raw["worker_id"])
    if worker is None:
        raise TraceError("a worker is a whole number or a word, not None")
    source = f"worker {worker}" + (f" rank {rank}" if rank else "")
    tier = _named("tier", raw.get("storage_tier"))
    place = f"{source}, {tier}" if tier else source
    on_device = tier in (None, "", "device")
    data = event["data"]
    if isinstance(data, dict) and len(data) > 1:
        raise TraceError("an event is stored, removed or cleared, and no two of these")
    if data == "cleared" or (isinstance(data, dict) and "cleared" in data):
        step = Step("cleared", source, on_device=on_device)
    elif "stored" in data:
        stored = data["stored"]
        hashes = _hashes([block["block_hash"] for block in stored["blocks"]])
        parent = _hash(stored.get("parent_hash"))
        step = Step("stored", place, hashes, parent, on_device=on_device)
    else:
        hashes = _hashes(data["removed"]["block_hashes"])
        step = Step("removed", place, hashes, on_device=on_device)
    return Batch(_whole(event["event_id"]), source, (step,))


def _tensorrt(raw: Raw) -> Batch:
    """`{"event_id", "data": {"type": "created" | "stored" | "removed" | "updated", …}}`."""
    source = f"rank {_named('rank', raw.get('attention_dp_rank')) or 0}"
    data = raw["data"]
    window = f"window {_named('window', raw.get('window_size')) or 'full'}"
    place = f"{source}, {window}"
    match data["type"]:
        case "stored":
            hashes = _hashes([block["block_hash"] for block in data["blocks"]])
            steps: tuple[Step, ...] = (
                Step("stored", place, hashes, _hash(data.get("parent_hash")), window),
            )
        case "removed":
            steps = (Step("removed", place, _hashes(data["block_hashes"]), group=window),)
        case "created" | "updated":
            steps = ()
        case other:
            raise TraceError(f"unknown event {other!r}")
    return Batch(_whole(raw["event_id"]), source, steps)


VLLM: Final = "vLLM KV events"

_DIALECTS: Final[Mapping[str, tuple[frozenset[str], Callable[[Raw], Batch]]]] = {
    VLLM: (frozenset({"seq", "events"}), _vllm),
    "Dynamo router events": (frozenset({"worker_id", "event"}), _dynamo),
    "TensorRT-LLM KV cache events": (frozenset({"event_id", "data"}), _tensorrt),
}


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TraceError(f"an event number is a whole number, not {value!r}")
    if value < 0:
        raise TraceError(f"an event number is at least 0, not {value}")
    return value


_JOINTS: Final = (", ", " rank ")
"""What the name of a place is put together with."""


def _named(what: str, value: Any) -> int | str | None:
    """A part of the name of a place, None where none is told.  One that could be taken for several
    would make two places one."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and not any(joint in value for joint in _JOINTS):
        return value
    raise TraceError(f"a {what} is a whole number or a word, not {value!r}")


def _time(value: Any) -> float | None:
    """A time that no other can be compared with would hide one that runs back."""
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TraceError(f"a time is a finite number, not {value!r}")
    return float(value)


def _hash(value: Any) -> str | None:
    return None if value is None else _hashes([value])[0]


def _hashes(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TraceError(f"hashes are a list, not {values!r}")
    for value in values:
        if type(value) not in (int, str):
            raise TraceError(f"a hash is a whole number or a text, not {value!r}")
    return tuple(str(value) for value in values)


def dialect_of(first: Any) -> str | None:
    """The dialect that a line of JSON is in, None if it is none of these."""
    if isinstance(first, dict) and "schema_version" not in first:
        for name, (fields, _) in _DIALECTS.items():
            if fields <= first.keys():
                return name
    return None


def recognises(path: Path) -> bool:
    """Whether the file holds events of another engine, by its first line."""
    try:
        _, first = next(_values(path), (0, None))
    except (OSError, TraceError):
        return False
    return dialect_of(first) is not None


def read(path: Path) -> tuple[str, Iterator[Batch]]:
    """The dialect and its batches, in order; raises TraceError with the number of the line."""
    values = _values(path)
    first = next(values, None)
    name = dialect_of(first[1]) if first else None
    if first is None or name is None:
        raise TraceError(f"{path.name}: no KV events that are known here")
    return name, batches(name, path.name, chain((first,), values))


def batches(name: str, place: str, values: Iterable[tuple[int, Any]]) -> Iterator[Batch]:
    """The numbered values of a stream in the dialect `name`, one by one; raises TraceError with
    `place` and the number of the one that is none."""
    reader = _DIALECTS[name][1]
    for line, raw in values:
        try:
            yield reader(raw)
        except TraceError as error:
            raise TraceError(f"{place}: line {line}: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TraceError(f"{place}: line {line}: not a {name[:-1]} ({error!r})") from None


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """JSON lines one by one, or the entries of one array."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if first.lstrip().startswith("["):
                yield from enumerate(_entries(file, path), 1)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _entry(line, number, path)
    except UnicodeDecodeError:
        raise TraceError(f"{path.name}: not UTF-8 text") from None


def _entries(file: TextIO, path: Path) -> list[Any]:
    try:
        return list(json.load(file))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError):
        raise TraceError(f"{path.name}: not a JSON array") from None


def _entry(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f"{path.name}: line {number}: not JSON") from None


# --- judging -----------------------------------------------------------------------------


@dataclass
class Replay:
    """The resident hashes of each place, and what the stream got wrong."""

    resident: dict[str, set[str]] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    """The group of each place that blocks were told of."""
    below: set[str] = field(default_factory=set)
    """The places below the device."""
    copies: dict[str, Counter[str]] = field(default_factory=dict)
    """How often a hash was stored again while resident: further copies, as far as events tell."""
    removed_early: dict[str, set[str]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    """When each source sent its last number."""
    sent: dict[str, OrderedDict[int, int]] = field(default_factory=dict)
    """What each source sent under each of its last `KEPT` numbers, as a hash of its steps."""
    broken: set[str] = field(default_factory=set)
    """Sources that may have stored and removed what this stream does not tell: it began in the
    middle, or numbers are missing, and nothing was cleared since."""
    unsure: set[str] = field(default_factory=set)
    """Places below the device that a clear may have emptied; a source where that is any of its
    places below the device, since what they held before was not told."""
    events: int = 0
    lost: int = 0
    """Numbers that were not heard, and that the listener may have lost itself."""
    unjudged: int = 0
    """Blocks that may have come in what a stream does not tell."""
    violations: list[Violation] = field(default_factory=list)

    def take(self, batch: Batch) -> None:
        if not self._number(batch):
            return
        is_late = batch.number < self.last[batch.source]
        if not is_late:
            self._time(batch)
        for step in batch.steps:
            self.events += 1
            if step.kind == "cleared":
                self._cleared(step, batch, is_late)
                continue
            self._know(step)
            if step.kind == "stored":
                self._stored(step, batch)
            else:
                self._removed(step, batch)

    def _number(self, batch: Batch) -> bool:
        """Judge the number; False where the batch was only sent again."""
        source, number = batch.source, batch.number
        last = self.last.get(source)
        sent = self.sent.setdefault(source, OrderedDict())
        held = hash(batch.steps)
        # What it held under a number of long ago is not known, so it is taken for something else.
        again = number in sent or (last is not None and number <= last - KEPT)
        if sent.get(number) == held:
            self._broken("T1", f"{source} sends number {number} twice", batch)
            return False
        if last is None:
            if number != 0:
                self.broken.add(source)
        elif number <= last:
            self._broken("T1", f"{source} goes back from number {last} to {number}", batch)
            self.broken.add(source)
            if again:
                # The same number for something else: it began to count anew, by another clock.
                sent.clear()
                self.last[source] = number
                self.times.pop(source, None)
        elif number > last + 1:
            if batch.after_loss:
                self.lost += number - last - 1
            else:
                self._broken("T1", f"{source} skips numbers {last + 1} to {number - 1}", batch)
            self.broken.add(source)
        sent[number] = held
        if len(sent) > KEPT:
            sent.popitem(last=False)
        self.last[source] = max(number, self.last.get(source, number))
        return True

    def _time(self, batch: Batch) -> None:
        """Judge the time against that of the number before."""
        if batch.time is None:
            return
        last = self.times.get(batch.source, batch.time)
        if batch.time < last:
            message = f"{batch.source}: time runs back from {last!r} to {batch.time!r}"
            self._broken("T1", message, batch)
        self.times[batch.source] = batch.time

    def _know(self, step: Step) -> None:
        self.resident.setdefault(step.place, set())
        self.groups[step.place] = step.group
        if not step.on_device:
            self.below.add(step.place)

    def _stored(self, step: Step, batch: Batch) -> None:
        resident = self.resident[step.place]
        if step.on_device and not self._has_parent(step, batch) and self._judged(step, batch):
            early = step.parent in self.removed_early.get(step.place, ())
            why = "which was removed while a copy remained" if early else "which is not resident"
            self._broken("B8", f"{step.place}: stored below {step.parent}, {why}", batch)
        for one in step.hashes:
            if one in resident:
                self.copies.setdefault(step.place, Counter())[one] += 1
            resident.add(one)
            self.removed_early.get(step.place, set()).discard(one)

    def _has_parent(self, step: Step, batch: Batch) -> bool:
        """Whether the block above is in any tier: it may be read from there."""
        if step.parent is None or step.parent in self.resident[step.place]:
            return True
        return any(
            step.parent in self.resident[place]
            for place in _places(self.resident, batch.source)
            if not step.group or self.groups[place] in ("", step.group)
        )

    def _removed(self, step: Step, batch: Batch) -> None:
        resident = self.resident[step.place]
        copies = self.copies.setdefault(step.place, Counter())
        early = self.removed_early.setdefault(step.place, set())
        for one in step.hashes:
            if one not in resident:
                if not self._judged(step, batch):
                    continue
                why = "removed before, while a copy remained" if one in early else "not resident"
                self._broken("B8", f"{step.place}: removes {one}, {why}", batch)
                early.discard(one)
            elif not step.on_device and copies[one]:
                # Below the device each telling is taken back by one of its own.
                copies[one] -= 1
            else:
                resident.discard(one)
                if copies.pop(one, 0):
                    early.add(one)

    def _cleared(self, step: Step, batch: Batch, is_late: bool) -> None:
        """A clear empties the device; of the tiers below nobody knows.  One that comes late says
        nothing of what was stored under the numbers that came before it."""
        source = batch.source
        places = _places(self.resident, source)
        self.unsure.update(self.below.intersection(places))
        if source in self.broken:
            self.unsure.add(source)
        if not step.on_device:
            return
        for place in set(places) - self.below:
            self.resident[place] = set()
            self.copies.pop(place, None)
            self.removed_early.pop(place, None)
        if not is_late:
            self.broken.discard(source)

    def _judged(self, step: Step, batch: Batch) -> bool:
        """Whether what is not resident here cannot have come in a part that is not there."""
        hidden = batch.source in self.broken or (
            not step.on_device and not self.unsure.isdisjoint((batch.source, step.place))
        )
        self.unjudged += hidden
        return not hidden

    def _broken(self, rule: str, message: str, batch: Batch) -> None:
        said = Violation(
            rule, _printable(message), run_id=_printable(batch.source), seq=batch.number
        )
        self.violations.append(said)


def _printable(text: str) -> str:
    """A stream can name halves of characters, which no output can carry, and controls that would
    write lines and colours of their own."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _places(known: Iterable[str], source: str) -> list[str]:
    return [place for place in known if place == source or place.startswith(f"{source}, ")]


@dataclass(frozen=True)
class ForeignRun:
    path: str
    dialect: str
    replay: Replay


@dataclass(frozen=True)
class ForeignReport:
    """Streams of other engines, each judged by itself."""

    runs: tuple[ForeignRun, ...]

    @property
    def verdict(self) -> Verdict:
        if any(run.replay.violations for run in self.runs):
            return Verdict.VIOLATED
        if any(run.replay.lost for run in self.runs):
            return Verdict.UNKNOWN
        return Verdict.HOLDS if all(run.replay.events for run in self.runs) else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "file": run.path,
                    "dialect": run.dialect,
                    "events": run.replay.events,
                    "unjudged": run.replay.unjudged,
                    "lost": run.replay.lost,
                    "resident": {place: len(h) for place, h in run.replay.resident.items()},
                    "violations": [v.to_json() for v in run.replay.violations],
                }
                for run in self.runs
            ],
            "violations": [v.to_json() for run in self.runs for v in run.replay.violations],
        }

    def lines(self) -> Iterator[str]:
        for run in self.runs:
            resident = sum(map(len, run.replay.resident.values()))
            yield (
                f"{run.path}: {run.dialect}: {counted(run.replay.events, 'event')}, "
                f"{counted(resident, 'block')} resident at the end"
            )
            for violation in run.replay.violations:
                yield f"  VIOLATED {violation}"
            if run.replay.lost:
                lost = counted(run.replay.lost, "number")
                yield f"  {lost} not heard, lost on the way or never sent: not known which"
            if run.replay.unjudged:
                unjudged = counted(run.replay.unjudged, "block")
                yield f"  {unjudged} may have come in what this stream does not tell: not judged"
        yield f"{self.verdict}: judged by B8 and T1; what no event tells was not judged"


def audit(paths: Sequence[Path]) -> ForeignReport:
    """Replay each file; raises TraceError for one that is not a stream of a known dialect."""
    return ForeignReport(tuple(replayed(str(path), *read(path)) for path in paths))


def replayed(place: str, name: str, stream: Iterable[Batch]) -> ForeignRun:
    """Replay a stream in the dialect `name` to its end."""
    replay = Replay()
    for batch in stream:
        replay.take(batch)
    return ForeignRun(place, name, replay)
