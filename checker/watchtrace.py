"""Follows a trace that is being written: each poll folds what was appended since the last."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kvclaims.checker.audit import Fold, parse_line
from kvclaims.checker.reporttimeline import is_owed, reserve_of
from kvclaims.checker.watch import Blame, ClaimNow, Snapshot, in_force
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.telemetry import Event, TraceError

Named = tuple[str, str]
"""A claim and its owner."""


class FollowedTrace:
    """The last run of a trace file, as far as it is written.  A file that became shorter was
    begun anew, and is read from its start."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._begin()

    def _begin(self) -> None:
        self._position = 0
        self._rest = b""
        self._line = 0
        self._open()

    def _open(self) -> None:
        """A run begins."""
        self._fold = Fold(())
        self._last: Event | None = None
        self._engine = ""
        self._owners: dict[str, str] = {}
        self._refused: Counter[Named] = Counter()
        self._deferred: Counter[Named] = Counter()

    def poll(self) -> Snapshot:
        """Fold what is new.  `BadOperation` where there is no such file, `TraceError` where a
        whole line does not conform or follow (T1, T3)."""
        for line in self._new_lines():
            self._line += 1
            try:
                self._take(parse_line(line.decode()))
            except UnicodeDecodeError:
                raise TraceError(f"{self._path}: line {self._line}: not UTF-8 text") from None
            except TraceError as error:
                raise TraceError(f"{self._path}: line {self._line}: {error}") from None
        if self._rest and not self._rest.startswith(b"{"):  # whatever follows, it is no event
            raise TraceError(f"{self._path}: line {self._line + 1}: not a JSON object")
        return self._snapshot()

    def _new_lines(self) -> list[bytes]:
        """Whole lines only: one that is still being written waits for its end."""
        try:
            if self._path.stat().st_size < self._position:
                self._begin()
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError as error:
            raise BadOperation(f"{self._path}: {error.strerror}") from None
        self._position += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return lines

    def _take(self, event: Event) -> None:
        is_first = self._last is None or self._last.event == "trace_closed"
        if is_first != (event.event == "trace_opened"):
            raise TraceError("a run goes from trace_opened to trace_closed (T3)")
        if is_first:
            self._open()
            self._engine = event.data["engine"]
        elif self._last is not None and event.seq != self._last.seq + 1:
            raise TraceError(f"seq {event.seq} follows {self._last.seq}: events are missing (T1)")
        self._last = event
        if event.event == "resident_claim_submitted":
            self._owners[event.claim_id or ""] = event.data["owner"]
        counter = {
            "active_request_refused": self._refused,
            "active_request_deferred": self._deferred,
        }.get(event.event)
        if counter is not None:
            names = event.data["blocking_claim_ids"]
            counter.update((name, self._owners.get(name, "")) for name in names)
        self._fold.take(event)

    def _snapshot(self) -> Snapshot:
        fold, last = self._fold, self._last
        note = "nothing was written yet" if last is None else ""
        if last is not None and last.event == "trace_closed":
            note = "the run has closed"
        named = sorted({*self._refused, *self._deferred})
        return Snapshot(
            source=str(self._path),
            engine=self._engine,
            run_id=last.run_id if last else "",
            events=last.seq + 1 if last else 0,
            blocks=self._blocks() if last else {},
            phases=Counter(str(claim.phase) for claim in fold.claims.values()),
            claims=tuple(self._claims()),
            requests=Counter(r.state for r in fold.requests.values() if r.state != "finished"),
            outcomes=Counter(
                str(r.outcome) for r in fold.requests.values() if r.state == "finished"
            ),
            blame=tuple(Blame(*n, self._refused[n], self._deferred[n]) for n in named),
            broken=Counter(violation.rule for violation in fold.violations),
            note=note,
        )

    def _blocks(self) -> dict[str, int]:
        fold = self._fold
        owed = [claim for claim in fold.claims.values() if is_owed(claim)]
        protected = {block for claim in owed for block in claim.blocks.values()}
        used = fold.tables.used
        reserved = sum(reserve_of(claim, fold.tables.lent) for claim in owed)
        free = fold.usable - len(protected | used)
        return {
            "usable": fold.usable,
            "active": len(used),
            "protected": len(protected),
            "reserved": reserved,
            "free": free,
            "headroom": free - reserved,
        }

    def _claims(self) -> list[ClaimNow]:
        lent = self._fold.tables.lent
        return [
            ClaimNow(
                claim=name,
                owner=self._owners.get(name, ""),
                protection=str(life.protection),
                phase=str(life.phase),
                footprint=(life.granted or life.asked)["n"],
                covered=len(life.blocks),
                reserve=reserve_of(life, lent) if is_owed(life) else 0,
            )
            for name, life in self._fold.claims.items()
            if in_force(life.phase)
        ]
