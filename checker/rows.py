"""Traces as Parquet: one row an event, for runs of millions of them.

The base fields are columns of their own, the fields of an event one column of JSON text.  What
concerns a column as a whole (its type, that nothing is missing) is checked at once for a batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvclaims.spec.interface import EngineMissing
from kvclaims.spec.telemetry import EVENTS, SCHEMA_VERSION, Event, TraceError

PARQUET: Final = ".parquet"

BATCH: Final = 65_536
"""Rows that are in memory at once."""

_NUMBERS: Final = ("seq", "timestamp_ns", "usable_blocks")
_TEXTS: Final = ("run_id", "event", "policy", "data")
_MAYBE: Final = ("request_id", "claim_id", "prefix_id")


WORDS: Final = ["run_id", "event", "policy", "request_id", "claim_id", "prefix_id"]
"""Columns in which few values stand for many rows."""


class Row(NamedTuple):
    """One event as it stands in the file: the base fields in the order of `Event`."""

    base: tuple[Any, ...]
    event: str
    data: str


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file, batch by batch; `TraceError` where a column is not as it must be."""
    for batch in batches_of(path):
        yield from rows_in(batch)


def rows_in(batch: Any) -> Iterator[Row]:
    """The rows of a batch, or of a slice of one."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    base = zip(*(columns[name] for name in _BASE), strict=True)
    for fields, event, data in zip(base, columns["event"], columns["data"], strict=True):
        yield Row(fields, event, data)


def batches_of(path: Path) -> Iterator[Any]:
    """The record batches of a file, each with its columns checked; those of `WORDS` come as
    dictionaries, as they were written."""
    arrow, parquet = _arrow()
    try:
        schema = parquet.read_schema(path)
        file = parquet.ParquetFile(path, read_dictionary=WORDS)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (OSError, arrow.ArrowException) as error:
        raise TraceError(f"{path}: not Parquet: {str(error).splitlines()[0]}") from None
    _check_schema(schema, arrow)
    if file.metadata.num_rows == 0:
        raise TraceError("an empty trace (T3)")
    for batch in file.iter_batches(BATCH):
        _check_batch(batch)
        yield batch


_BASE: Final = (
    *("seq", "timestamp_ns", "run_id", "event", "policy", "usable_blocks"),
    *("request_id", "claim_id", "generation", "prefix_id"),
)


def _check_schema(schema: Any, arrow: Any) -> None:
    wanted = {
        **dict.fromkeys((*_NUMBERS, "generation"), arrow.int64()),
        **dict.fromkeys((*_TEXTS, *_MAYBE), arrow.string()),
    }
    found = {field.name: field.type for field in schema}
    for name, kind in wanted.items():
        if found.get(name) != kind:
            raise TraceError(f"column {name} is {found.get(name)}, must be {kind} (T3)")
    version = (schema.metadata or {}).get(b"schema_version")
    if set(found) != set(wanted) or version != str(SCHEMA_VERSION).encode():
        raise TraceError("not a trace of this schema version (T3)")


def _check_batch(batch: Any) -> None:
    for name in (*_NUMBERS, *_TEXTS):
        if batch.column(name).null_count:
            raise TraceError(f"column {name} lacks a value (T3)")
    for kind in batch.column("event").unique().to_pylist():
        if kind not in EVENTS:
            raise TraceError(f"unknown event {kind!r}")
    for prefix, column in (("resident_claim_", "claim_id"), ("active_request_", "request_id")):
        _check_subjects(batch, prefix, column)


def _check_subjects(batch: Any, prefix: str, column: str) -> None:
    """Events about a claim name it with its generation, events about a request name that."""
    import pyarrow
    from pyarrow import compute

    kinds = batch.column("event")
    which = [i for i, word in enumerate(kinds.dictionary.to_pylist()) if word.startswith(prefix)]
    about = compute.is_in(kinds.indices, pyarrow.array(which, kinds.indices.type))
    named = [column, "generation"] if column == "claim_id" else [column]
    for name in named:
        missing = compute.and_(about, compute.is_null(batch.column(name)))
        if compute.any(missing).as_py():
            raise TraceError(f"an event {prefix}… lacks {name} (T3)")


def write_parquet(events: Iterable[Event], path: Path) -> int:
    """Write events to a file, batch by batch; how many they were."""
    arrow, parquet = _arrow()
    fields = [arrow.field(name, arrow.int64()) for name in (*_NUMBERS, "generation")]
    fields += [arrow.field(name, arrow.string()) for name in (*_TEXTS, *_MAYBE)]
    schema = arrow.schema(fields, metadata={"schema_version": str(SCHEMA_VERSION)})
    written, rows = 0, []
    with parquet.ParquetWriter(path, schema) as writer:
        for event in events:
            base = {name: getattr(event, name) for name in _BASE}
            rows.append({**base, "data": json.dumps(dict(event.data), separators=(",", ":"))})
            if len(rows) == BATCH:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                written, rows = written + len(rows), []
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema))
    return written + len(rows)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise EngineMissing(
            "traces in Parquet need pyarrow. Install it: pip install pyarrow"
        ) from None
    return pyarrow, parquet
