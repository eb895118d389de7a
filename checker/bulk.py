"""Folds a trace in Parquet by whole batches, where there is nothing in them to look at twice.

Most events tell of requests that come, grow and go as they should, and of victims that no claim
covers.  For a stretch of such events columns are compared at once: that they follow one another,
that their fields are as they must be, and that every request moves as it may.  Events of claims,
of answers, and of requests that were answered are folded one by one, in between.  Where anything
in a stretch is not as it should be, nothing of it has been folded yet: then all of it is folded
event by event, so that what is found, and how it is told, never depends on the path.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyarrow import compute

from kvclaims.checker.audit import Fold, Frame, RequestLife, event_of, fields_of
from kvclaims.checker.rows import batches_of, rows_in
from kvclaims.spec.telemetry import Event, TraceError
from kvclaims.spec.vocabulary import Outcome

SUBMITTED: Final = "active_request_submitted"
ADMITTED: Final = "active_request_admitted"
GREW: Final = "active_request_blocks"
PREEMPTED: Final = "active_request_preempted"
FINISHED: Final = "active_request_finished"
ABORTED: Final = "active_request_aborted"
REUSED: Final = "future_reuse_admitted"
DENIED: Final = "future_reuse_denied"
VICTIM: Final = "allocation_victim_selected"
COVERED: Final = "resident_block_materialized"

LIFE: Final = (SUBMITTED, ADMITTED, GREW, PREEMPTED, FINISHED, ABORTED, REUSED, DENIED)
"""Kinds of event in the life of a request that nobody had to answer."""

ABSENT, WAITING, RUNNING, LOADING, ENDED, GAVE_WAY = range(6)
STATES: Final = ("", "waiting", "running", "loading", "finished", "waiting")

_AFTER: Final = {
    SUBMITTED: WAITING,
    ADMITTED: RUNNING,
    PREEMPTED: GAVE_WAY,
    FINISHED: ENDED,
    ABORTED: ENDED,
}
_BEFORE: Final = {
    SUBMITTED: (ABSENT,),
    ADMITTED: (WAITING, GAVE_WAY),
    GREW: (RUNNING, LOADING),
    PREEMPTED: (RUNNING,),
    FINISHED: (RUNNING, GAVE_WAY),
    ABORTED: (WAITING, RUNNING, LOADING, GAVE_WAY),
    REUSED: (WAITING, RUNNING, ENDED, GAVE_WAY),
    DENIED: (WAITING, RUNNING, ENDED, GAVE_WAY),
}
"""In which states an event may come: what the handlers of `Fold` ask for."""

_TABLES: Final = (GREW, PREEMPTED, FINISHED, ABORTED)
"""Kinds that change the tables of blocks."""

_READS_TABLES: Final = frozenset(
    {
        *_TABLES,
        "active_request_found",
        "active_request_deferred",
        "active_request_refused",
        "resident_claim_submitted",
    }
)
"""Kinds that read them, or change them themselves."""

_NUMBER: Final = r"(?:0|-?[1-9]\d{0,14})"
_STRING: Final = r'"[ !#-\[\]-~]*"'
"""Plain ASCII: any other text is told one by one."""
_PAIR: Final = rf"\[{_STRING},{_NUMBER}\]"
_VICTIM: Final = {
    "block_id": _NUMBER,
    "hash": _STRING,
    "ref_count": _NUMBER,
    "protected": "false",
    "reason": _STRING,
}
_GREW: Final = {
    "blocks": rf"\[(?:{_NUMBER}(?:,{_NUMBER})*)?\]",
    "lent": rf"\[(?:{_PAIR}(?:,{_PAIR})*)?\]",
}
Run = tuple[str, int, Fold]
"""Its id, how many events it has, and what they add up to."""


def runs_in(path: Path) -> Iterator[Run]:
    """Every run of a file; `TraceError` names the row that does not conform."""
    reader = _Reader()
    for batch in batches_of(path):
        yield from reader.read(batch)
    reader.frame.end(f"row {reader.number}")


class _Reader:
    """One file on its way: the run that goes on, and how far it was read."""

    def __init__(self) -> None:
        self.frame = Frame()
        self.number = 0
        self._fold, self._count = Fold(()), 0

    def read(self, batch: Any) -> Iterator[Run]:
        """Fold a batch; the runs that close in it."""
        kinds = batch.column("event")
        words = np.array(kinds.dictionary.to_pylist())
        edges = np.isin(words, ("trace_opened", "trace_closed"))[kinds.indices.to_numpy()]
        start = 0
        for edge in [*np.flatnonzero(edges).tolist(), len(batch)]:
            if edge > start:
                yield from self._stretch(batch.slice(start, edge - start))
            if edge < len(batch):
                yield from self._one_by_one(batch.slice(edge, 1))
            start = edge + 1

    def _stretch(self, rows: Any) -> Iterator[Run]:
        with _no_garbage():
            is_folded = self._at_once(rows)
        if not is_folded:
            yield from self._one_by_one(rows)

    def _at_once(self, rows: Any) -> bool:
        """Fold all of the rows, or nothing."""
        stretch = (
            None if self.frame.last is None else read_stretch(rows, self.frame.last, self._fold)
        )
        if stretch is None:
            return False
        stretch.fold_into(self._fold, self.number + 1)
        self.number += len(rows)
        self._count += len(rows)
        self.frame.last = event_of(next(rows_in(rows.slice(len(rows) - 1, 1))))
        return True

    def _one_by_one(self, rows: Any) -> Iterator[Run]:
        for row in rows_in(rows):
            self.number += 1
            try:
                event = event_of(row)
                closes = self.frame.follow(event)
            except TraceError as error:
                raise TraceError(f"row {self.number}: {error}") from None
            self._fold.take(event)
            self._count += 1
            if closes:
                yield event.run_id, self._count, self._fold
                self._fold, self._count = Fold(()), 0


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Python does not look for cycles: a fold grows, and makes none."""
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.enable()


# --- a stretch ---------------------------------------------------------------------------


@dataclass
class _Stretch:
    """Events that follow one another inside a run, with the simple ones sorted out.

    `simple` are the rows of simple events in order, `kinds` their kinds and `codes` their requests
    (-1 for victims); `single` are the rows to be folded one by one.
    """

    rows: Any
    counts: dict[str, int]
    names: Sequence[str]
    simple: Any
    kinds: Any
    codes: Any
    single: Any
    admits: Any
    """Code → whether the request leaves its content for reuse."""
    hits: Any
    """For each simple row, the hit blocks that an admission tells."""
    lends: bool
    """A table names blocks that claims lent."""

    def fold_into(self, fold: Fold, number: int) -> None:
        """Fold all of it; the first row has this number."""
        tables = _Tables(self, fold)
        is_born = self.kinds == LIFE.index(SUBMITTED)
        codes = self.codes[is_born]
        born = [self.names[code] for code in codes.tolist()]
        admits = self.admits[codes].tolist()
        where = np.searchsorted(self.simple[is_born], self.single).tolist()
        done = 0
        for row, until in zip([*self.single.tolist(), None], [*where, len(born)], strict=True):
            for name, admit in zip(born[done:until], admits[done:until], strict=True):
                fold.requests[name] = RequestLife(name, admit)
            done = until
            if row is not None:
                self._take(fold, row, number, tables)
        tables.catch_up(len(self.rows))
        self._settle(fold)
        for kind, count in self.counts.items():
            fold.counts[kind] = fold.counts.get(kind, 0) + count

    def _take(self, fold: Fold, row: int, number: int, tables: _Tables) -> None:
        try:
            event = event_of(next(rows_in(self.rows.slice(row, 1))))
        except TraceError as error:
            raise TraceError(f"row {number + row}: {error}") from None
        ends_a_loan = event.event == COVERED and (self.lends or fold.tables.lent)
        if event.event in _READS_TABLES or ends_a_loan:
            tables.catch_up(row)
        fold.take(event)

    def _settle(self, fold: Fold) -> None:
        """What the simple events make of their requests."""
        lives = self.codes >= 0
        kinds, codes = self.kinds[lives], self.codes[lives]
        size = len(self.names)
        reused = np.bincount(codes[kinds == LIFE.index(REUSED)], minlength=size)
        denied = np.bincount(codes[kinds == LIFE.index(DENIED)], minlength=size)
        moves = np.isin(kinds, [LIFE.index(kind) for kind in _AFTER])
        last, hits = np.full(size, -1), np.full(size, -1)
        last[codes[moves]] = kinds[moves]  # the last of several assignments stays
        is_admitted = kinds == LIFE.index(ADMITTED)
        hits[codes[is_admitted]] = self.hits[lives][is_admitted]
        touched = np.flatnonzero(np.bincount(codes, minlength=size)).tolist()
        columns = (a[touched].tolist() for a in (last, hits, reused, denied))
        for code, kind, hit, admissions, denials in zip(touched, *columns, strict=True):
            request = fold.requests[self.names[code]]
            request.admissions += admissions
            request.denials += denials
            if hit >= 0:
                request.hit_blocks = hit
            if kind >= 0:
                name = LIFE[kind]
                request.state = STATES[_AFTER[name]]
                request.gave_way = name == PREEMPTED
                if name == FINISHED:
                    served = request.admit_reuse
                    request.outcome = Outcome.SERVED if served else Outcome.SERVED_NO_ADMIT
                elif name == ABORTED:
                    request.outcome = Outcome.ABORTED


class _Tables:
    """The tables of blocks, brought up to date only when somebody looks at them."""

    def __init__(self, stretch: _Stretch, fold: Fold) -> None:
        self._stretch = stretch
        self._tables = fold.tables
        chosen = np.isin(stretch.kinds, [LIFE.index(kind) for kind in _TABLES])
        self._rows = stretch.simple[chosen]
        self._codes = stretch.codes[chosen]
        self._grows = stretch.kinds[chosen] == LIFE.index(GREW)
        self._next = 0

    def catch_up(self, row: int) -> None:
        """Take what the simple events before a row did."""
        first, self._next = self._next, int(np.searchsorted(self._rows, row))
        if first == self._next:
            return
        texts = self._stretch.rows.column("data").take(self._rows[first : self._next])
        codes, grows = self._codes[first : self._next], self._grows[first : self._next]
        lent = self._lent(texts, grows)
        on_loan = frozenset(self._tables.lent).union(*lent.values())
        if on_loan:
            self._loans(codes, grows, texts, lent, on_loan)
        self._last_tables(codes, grows, texts)
        self._tables.exact |= bool(grows.any())

    def _last_tables(self, codes: Any, grows: Any, texts: Any) -> None:
        """Of the tables that a request had, the last counts, unless it has left since."""
        blocks, names = self._tables.blocks, self._stretch.names
        size, at = len(names), np.arange(len(codes))
        left = np.full(size, -1)
        left[codes[~grows]] = at[~grows]  # the last of several assignments stays
        for code in np.flatnonzero(left >= 0).tolist():
            blocks.pop(names[code], None)
        kept = at[grows & (at > left[codes])]
        first, last = np.full(size, -1), np.full(size, -1)
        first[codes[kept[::-1]]] = kept[::-1]
        last[codes[kept]] = kept
        for code in codes[np.sort(first[first >= 0])].tolist():
            blocks[names[code]] = tuple(_table(texts, last[code])["blocks"])

    def _loans(
        self,
        codes: Any,
        grows: Any,
        texts: Any,
        lent: dict[int, frozenset[int]],
        on_loan: frozenset[int],
    ) -> None:
        """A loan ends when a request leaves and nobody holds its block: only requests that hold
        a block on loan at some time are looked at one by one."""
        tables, names = self._tables, self._stretch.names
        holds = {name: h for name, b in tables.blocks.items() if (h := on_loan.intersection(b))}
        naming = self._naming(texts, on_loan) & grows
        concerned = np.array([name in holds for name in names], bool)
        concerned[codes[naming]] = True
        leaving = np.flatnonzero(~grows)
        stale: int | None = 0
        """Since when a block on loan may be held by nobody, None where all are held."""

        def settle(until: int) -> None:
            nonlocal stale
            if stale is not None and np.searchsorted(leaving, stale) < np.searchsorted(
                leaving, until
            ):
                held = frozenset().union(*holds.values())
                tables.lent = {b: claim for b, claim in tables.lent.items() if b in held}
                stale = None

        for i in np.flatnonzero(concerned[codes]).tolist():
            settle(i)
            name = names[codes[i]]
            before = holds.pop(name, None)
            if naming[i]:
                data = _table(texts, i)
                holds[name] = on_loan.intersection(data["blocks"])
                tables.lent.update({block: claim for claim, block in data["lent"]})
            if i in lent or (before is not None and before != holds.get(name)):
                stale = i
        settle(len(codes))

    def _lent(self, texts: Any, grows: Any) -> dict[int, frozenset[int]]:
        """Where a table names blocks that claims lent: which."""
        if not self._stretch.lends:
            return {}
        empty = compute.match_substring(texts, '"lent":[]').to_numpy(zero_copy_only=False)
        found = {}
        for i in np.flatnonzero(~empty & grows).tolist():
            found[i] = frozenset(block for _, block in _table(texts, i)["lent"])
        return found

    def _naming(self, texts: Any, blocks: frozenset[int]) -> Any:
        """Which texts name one of the blocks."""
        wanted = "|".join(map(str, sorted(blocks)))
        found = compute.match_substring_regex(texts, rf"[\[,](?:{wanted})[,\]]")
        return found.to_numpy(zero_copy_only=False)


def _table(texts: Any, at: int) -> dict[str, Any]:
    return fields_of(GREW, texts[at].as_py())


# --- reading one -------------------------------------------------------------------------


def read_stretch(rows: Any, last: Event, fold: Fold) -> _Stretch | None:
    """The stretch that follows this event; None where not all of it is as it should be."""
    if not _follow(rows, last):
        return None
    encoded = rows.column("event")
    words, which = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    to_kind = np.array([_kind(word) for word in words])
    kinds = to_kind[which]
    lives, victims = kinds >= 0, kinds == _VICTIMS
    names, codes = _codes(rows.column("request_id"))
    if not names or (codes[lives] < 0).any():
        return None  # an event of a request that names none, or nothing of requests at all
    known = [fold.requests.get(name) for name in names]
    answered = np.zeros(len(names), bool)
    answered[codes[~lives & ~victims & (codes >= 0)]] = True
    lives &= ~answered[np.maximum(codes, 0)]
    fields = _Fields(rows.column("data"))
    told = fields.of_lives(kinds, lives, words, which)
    if told is None or not fields.are_victims(victims):
        return None
    admits, hits = told
    flags = _flags(known, codes, kinds, lives, admits)
    if not _moves(known, codes, kinds, lives, flags, fields.served):
        return None
    victims &= ~_may_be_covered(rows, which, words, victims, fields, fold)
    simple = lives | victims
    counted = np.bincount(which[simple], minlength=len(words)).tolist()
    return _Stretch(
        rows,
        {word: count for word, count in zip(words, counted, strict=True) if count},
        names,
        np.flatnonzero(simple),
        kinds[simple],
        np.where(victims, -1, codes)[simple],
        np.flatnonzero(~simple),
        flags,
        hits[simple],
        fields.lends,
    )


_VICTIMS: Final = -1
_OTHERS: Final = -2


def _kind(word: str) -> int:
    if word == VICTIM:
        return _VICTIMS
    return LIFE.index(word) if word in LIFE else _OTHERS


def _follow(rows: Any, last: Event) -> bool:
    """Whether the rows continue the run that this event is in (T1)."""
    seq, time = (rows.column(name).to_numpy() for name in ("seq", "timestamp_ns"))
    return bool(
        seq[0] == last.seq + 1
        and (np.diff(seq) == 1).all()
        and time[0] >= last.timestamp_ns
        and (np.diff(time) >= 0).all()
        and (rows.column("usable_blocks").to_numpy() == last.usable_blocks).all()
        and all(_words(rows.column(name)) == {getattr(last, name)} for name in ("run_id", "policy"))
    )


def _words(column: Any) -> set[str]:
    """The values in a column (its dictionary may be that of a longer one)."""
    values = column.dictionary.to_pylist()
    used = np.bincount(column.indices.to_numpy(), minlength=len(values))
    return {values[i] for i in np.flatnonzero(used).tolist()}


def _codes(requests: Any) -> tuple[list[str], Any]:
    """The distinct requests, and for each row which of them it names (-1: none)."""
    values = requests.dictionary.to_pylist()
    numbers = requests.indices.fill_null(-1).to_numpy() + 1
    used = np.bincount(numbers, minlength=len(values) + 1) > 0
    used[0] = False
    codes = np.cumsum(used) - 1
    codes[0] = -1
    return [values[i - 1] for i in np.flatnonzero(used).tolist()], codes[numbers]


class _Fields:
    """The column of fields, checked: each distinct text once, and long ones by their form."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.lends = False
        self._victims: Any = None
        self.served = np.ones(len(data), bool)
        """For each row, whether an end is told as that of a request that left its content."""

    def of_lives(
        self, kinds: Any, lives: Any, words: Sequence[str], which: Any
    ) -> tuple[Any, Any] | None:
        """For each row: whether a new request admits reuse, and how many blocks an admitted one
        hit.  None where a field is not as it must be, or cannot be told at once."""
        admits, hits = np.zeros(len(kinds), bool), np.full(len(kinds), -1)
        for kind in (k for k in words if k in LIFE):
            chosen = np.flatnonzero(lives & (which == words.index(kind)))
            if not len(chosen):
                continue
            if kind == GREW:
                tables = self._data.take(chosen)
                if not self._have_form(tables, _GREW):
                    return None
                lent = compute.match_substring(tables, '"lent":[]')
                self.lends = not compute.all(lent).as_py()
                continue
            texts = self._data.take(chosen).dictionary_encode()
            try:
                told = [fields_of(kind, text) for text in texts.dictionary.to_pylist()]
            except TraceError:
                return None
            each = texts.indices.to_numpy()
            if kind == SUBMITTED:
                admits[chosen] = np.array([one["admit_reuse"] for one in told])[each]
            elif kind == ADMITTED:
                found = [one["hit_blocks"] for one in told]
                if not all(0 <= hit < 1 << 62 for hit in found):
                    return None
                hits[chosen] = np.array(found)[each]
            elif kind == FINISHED:
                if not all(one["outcome"] in _ENDS for one in told):
                    return None
                served = np.array([one["outcome"] == Outcome.SERVED for one in told])
                self.served[chosen] = served[each]
        return admits, hits

    def are_victims(self, victims: Any) -> bool:
        """Whether none of these is told to be protected, and all have the fields they must."""
        self._victims = self._data.take(np.flatnonzero(victims))
        return not len(self._victims) or self._have_form(self._victims, _VICTIM)

    def are_among(self, wanted: Sequence[int]) -> Any:
        """Which of the victims, in order, are among these blocks."""
        if len(wanted) <= _FEW:
            form = rf'"block_id":(?:{"|".join(map(str, wanted))}),'
            found = compute.match_substring_regex(self._victims, form)
            return found.to_numpy(zero_copy_only=False)
        found = compute.extract_regex(self._victims, r'"block_id":(?P<b>-?\d+)')
        blocks = compute.cast(compute.struct_field(found, "b"), "int64").to_numpy()
        return np.isin(blocks, wanted)

    def _have_form(self, texts: Any, values: dict[str, str]) -> bool:
        """Whether the texts are these fields with such values, in the order of the first text."""
        keys = re.findall(r'"(\w+)":', texts[0].as_py())
        if sorted(keys) != sorted(values):
            return False
        form = ",".join(f'"{key}":{values[key]}' for key in keys)
        return bool(compute.all(compute.match_substring_regex(texts, rf"^\{{{form}\}}$")).as_py())


_FEW: Final = 200
"""As many numbers are looked for by one pattern."""

_ENDS: Final = (Outcome.SERVED, Outcome.SERVED_NO_ADMIT)


def _flags(
    known: Sequence[RequestLife | None], codes: Any, kinds: Any, lives: Any, told: Any
) -> Any:
    """Code → whether the request leaves its content for reuse."""
    flags = np.array([one is not None and one.admit_reuse for one in known], bool)
    born = lives & (kinds == LIFE.index(SUBMITTED))
    flags[codes[born]] = told[born]
    return flags


def _moves(
    known: Sequence[RequestLife | None],
    codes: Any,
    kinds: Any,
    lives: Any,
    admits: Any,
    served: Any,
) -> bool:
    """Whether each event comes in a state in which it may, and tells of an end that is right."""
    rows = np.flatnonzero(lives)
    rows = rows[np.argsort(codes[rows], kind="stable")]
    code, kind = codes[rows], kinds[rows]
    if not len(rows):
        return True
    start = np.zeros(len(rows), np.int64)
    begins = np.flatnonzero(np.diff(code, prepend=-1) != 0)
    start[begins] = begins
    start = np.maximum.accumulate(start)
    after = _STATE_AFTER[kind]
    changed = np.where(after >= 0, np.arange(len(rows)), -1)
    latest = np.concatenate(([-1], np.maximum.accumulate(changed)[:-1]))
    first = np.array([_state_of(one) for one in known])
    before = np.where(latest >= start, after[np.maximum(latest, 0)], first[code])
    if not _MAY[kind, before].all():
        return False
    ends, reuses = kind == LIFE.index(FINISHED), kind == LIFE.index(REUSED)
    return bool((served[rows][ends] == admits[code][ends]).all() and admits[code][reuses].all())


def _state_of(life: RequestLife | None) -> int:
    if life is None:
        return ABSENT
    late = life.gave_way and life.state == STATES[GAVE_WAY]
    return GAVE_WAY if late else STATES.index(life.state)


_STATE_AFTER: Final = np.array([_AFTER.get(kind, -1) for kind in LIFE])
_MAY: Final = np.array([[s in _BEFORE[kind] for s in range(len(STATES))] for kind in LIFE])


def _may_be_covered(
    rows: Any, which: Any, words: Sequence[str], victims: Any, fields: _Fields, fold: Fold
) -> Any:
    """The victims that a claim covers now or then, or will before the stretch is over."""
    covered = set(fold.covered_ever)
    if COVERED in words:
        texts = rows.column("data").take(np.flatnonzero(which == words.index(COVERED)))
        found = re.findall(r'"block_id":\s*(-?\d+)', "\n".join(texts.to_pylist()))
        covered.update(map(int, found))
    marked = np.zeros(len(victims), bool)
    if covered and victims.any():
        marked[victims] = fields.are_among(sorted(covered))
    return marked
