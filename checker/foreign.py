"""KV events of other engines, replayed and judged: B8 and T1 from the stream alone.

Three dialects are read from JSON lines (or one JSON array): vLLM's event batches as published over
ZMQ, Dynamo's router events, and TensorRT-LLM's cache events.  Each becomes the same few steps
(stored, removed, cleared) over a set of resident hashes; a stream is judged by what it says itself:
numbers that skip, repeat or run back (T1), a removal of what is not resident, a block stored below
a parent that is not, a hash removed while a copy of it remained (B8).  Of a block that may have
come in a part of the stream that is not there, nothing is said.
"""

from __future__ import annotations

import json
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
    tier that the event speaks of (hashes at different places are different blocks)."""

    kind: Kind
    place: str
    hashes: tuple[str, ...] = ()
    parent: str | None = None


@dataclass(frozen=True)
class Batch:
    """What was sent under one number; `source` counts by itself."""

    number: int
    source: str
    steps: tuple[Step, ...]


Raw = Mapping[str, Any]


# --- dialects ----------------------------------------------------------------------------


def _vllm(raw: Raw) -> Batch:
    """`{"seq", "ts", "events": [{"type": "BlockStored", …}], "data_parallel_rank"}`."""
    source = f"rank {raw.get('data_parallel_rank') or 0}"
    return Batch(_whole(raw["seq"]), source, tuple(_vllm_step(e, source) for e in raw["events"]))


def _vllm_step(event: Any, source: str) -> Step:
    if isinstance(event, list):
        # The wire form: the kind first, then the fields in order.
        kind, *values = event
        names = _VLLM_FIELDS.get(kind, ())
        event = {"type": kind, **dict(zip(names, values, strict=False))}
    place = f"{source}, {event.get('medium') or 'GPU'}"
    for name in ("group_idx", "locality", "ownership"):
        if (value := event.get(name)) is not None:
            place += f", {name.removesuffix('_idx')} {value}"
    match event["type"]:
        case "BlockStored":
            parent = event.get("parent_block_hash")
            return Step("stored", place, _hashes(event["block_hashes"]), _hash(parent))
        case "BlockRemoved":
            return Step("removed", place, _hashes(event["block_hashes"]))
        case "AllBlocksCleared":
            return Step("cleared", source)
    raise TraceError(f"unknown event {event['type']!r}")


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
    rank = event.get("dp_rank")
    source = f"worker {raw['worker_id']}" + (f" rank {rank}" if rank else "")
    tier = raw.get("storage_tier")
    place = f"{source}, {tier}" if tier else source
    data = event["data"]
    if data == "cleared" or (isinstance(data, dict) and "cleared" in data):
        step = Step("cleared", source)
    elif "stored" in data:
        stored = data["stored"]
        hashes = _hashes([block["block_hash"] for block in stored["blocks"]])
        step = Step("stored", place, hashes, _hash(stored.get("parent_hash")))
    else:
        step = Step("removed", place, _hashes(data["removed"]["block_hashes"]))
    return Batch(_whole(event["event_id"]), source, (step,))


def _tensorrt(raw: Raw) -> Batch:
    """`{"event_id", "data": {"type": "created" | "stored" | "removed" | "updated", …}}`."""
    source = f"rank {raw.get('attention_dp_rank') or 0}"
    data = raw["data"]
    place = f"{source}, window {raw.get('window_size') or 'full'}"
    match data["type"]:
        case "stored":
            hashes = _hashes([block["block_hash"] for block in data["blocks"]])
            steps: tuple[Step, ...] = (
                Step("stored", place, hashes, _hash(data.get("parent_hash"))),
            )
        case "removed":
            steps = (Step("removed", place, _hashes(data["block_hashes"])),)
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
    return value


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
    twice: dict[str, set[str]] = field(default_factory=dict)
    """Hashes that were stored again while resident: a second copy, as far as events tell."""
    removed_early: dict[str, set[str]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    sent: dict[str, dict[int, tuple[Step, ...]]] = field(default_factory=dict)
    """What each source sent under each number."""
    broken: set[str] = field(default_factory=set)
    """Sources that may have stored and removed what this stream does not tell: it began in the
    middle, or numbers are missing, and nothing was cleared since."""
    events: int = 0
    unjudged: int = 0
    """Blocks that may have come in what a stream does not tell."""
    violations: list[Violation] = field(default_factory=list)

    def take(self, batch: Batch) -> None:
        if not self._number(batch):
            return
        for step in batch.steps:
            self.events += 1
            match step.kind:
                case "stored":
                    self._stored(step, batch)
                case "removed":
                    self._removed(step, batch)
                case "cleared":
                    self._cleared(step)

    def _number(self, batch: Batch) -> bool:
        """Judge the number; False where the batch was only sent again."""
        source, number = batch.source, batch.number
        last = self.last.get(source)
        sent = self.sent.setdefault(source, {})
        again = number in sent
        if again and sent[number] == batch.steps:
            self._broken("T1", f"{source} sends number {number} twice", batch)
            return False
        if last is None:
            if number != 0:
                self._gap(source)
        elif number <= last:
            self._broken("T1", f"{source} goes back from number {last} to {number}", batch)
            self._gap(source)
            if again:
                # The same number for something else: it began to count anew.
                sent.clear()
                self.last[source] = number
        elif number > last + 1:
            self._broken("T1", f"{source} skips numbers {last + 1} to {number - 1}", batch)
            self._gap(source)
        sent[number] = batch.steps
        self.last[source] = max(number, self.last.get(source, number))
        return True

    def _gap(self, source: str) -> None:
        """What came before may no longer be so."""
        self.broken.add(source)
        for known in (self.twice, self.removed_early):
            for place in _places(known, source):
                known[place] = set()

    def _stored(self, step: Step, batch: Batch) -> None:
        resident = self.resident.setdefault(step.place, set())
        if step.parent is not None and step.parent not in resident and self._judged(batch):
            early = step.parent in self.removed_early.get(step.place, ())
            why = "which was removed while a copy remained" if early else "which is not resident"
            self._broken("B8", f"{step.place}: stored below {step.parent}, {why}", batch)
        for one in step.hashes:
            if one in resident:
                self.twice.setdefault(step.place, set()).add(one)
            resident.add(one)
            self.removed_early.get(step.place, set()).discard(one)

    def _removed(self, step: Step, batch: Batch) -> None:
        resident = self.resident.setdefault(step.place, set())
        early = self.removed_early.setdefault(step.place, set())
        for one in step.hashes:
            if one not in resident:
                if not self._judged(batch):
                    continue
                why = "removed before, while a copy remained" if one in early else "not resident"
                self._broken("B8", f"{step.place}: removes {one}, {why}", batch)
                early.discard(one)
                continue
            resident.discard(one)
            if one in self.twice.get(step.place, ()):
                self.twice[step.place].discard(one)
                early.add(one)

    def _cleared(self, step: Step) -> None:
        self.broken.discard(step.place)
        for known in (self.resident, self.twice, self.removed_early):
            for place in _places(known, step.place):
                known[place] = set()

    def _judged(self, batch: Batch) -> bool:
        """Whether what is not resident here cannot have come in a part that is not there."""
        self.unjudged += batch.source in self.broken
        return batch.source not in self.broken

    def _broken(self, rule: str, message: str, batch: Batch) -> None:
        said = Violation(
            rule, _printable(message), run_id=_printable(batch.source), seq=batch.number
        )
        self.violations.append(said)


def _printable(text: str) -> str:
    """JSON can name halves of characters, which no output can carry."""
    return text.encode(errors="backslashreplace").decode()


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
        return Verdict.HOLDS if all(run.replay.events for run in self.runs) else Verdict.VACUOUS

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "file": run.path,
                    "dialect": run.dialect,
                    "events": run.replay.events,
                    "unjudged": run.replay.unjudged,
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
