"""The work on a tier's files, off the engine's step: asked for in one thread, done in another.

What is written is written in the order in which it was asked for; what a load reads goes first, as
it was published long before.  Contents are kept in memory until they are written, and so are those
that were read until they are taken: the scheduler bounds the former, a bound here the latter.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvclaims.bridge.serving.tierfiles import BadCopy, Buffer

_LOG: Final = logging.getLogger("kvclaims.tier")
MOST_READ: Final = 32
"""Blocks that were read and not taken yet, at which reading stops for a while."""


class Store(Protocol):
    """Where copies are: `TierFiles`, or a stand-in for it."""

    life: str

    def begin(self, life: str) -> None: ...
    def publish(self, name: str, content: Sequence[Buffer]) -> None: ...
    def read(self, name: str) -> memoryview: ...
    def drop(self, names: Iterable[str]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Wrote:
    """A copy is published and synced, or there is a reason why it is not."""

    name: str
    reason: str = ""


@dataclass(frozen=True)
class Read:
    """The block at a position of a load; None and the reason where its copy is not right, after
    which nothing more of that load is read."""

    load: int
    position: int
    content: memoryview | None
    reason: str = ""


@dataclass(frozen=True)
class _Begin:
    life: str


@dataclass(frozen=True)
class _Drop:
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Write:
    name: str
    content: Sequence[Buffer]


@dataclass
class _Reading:
    load: int
    names: tuple[str, ...]
    done: int = 0


class TierQueue:
    """Work on one store.  Without a thread it is done when `work` is called."""

    def __init__(self, store: Store, threaded: bool = True) -> None:
        self._store = store
        self._life = store.life
        self._writes: deque[_Begin | _Drop | _Write] = deque()
        self._reads: deque[_Reading] = deque()
        self._done: list[Wrote | Read] = []
        self._working = False
        self._closed = False
        self._fault: Exception | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="kvclaims-tier", daemon=True)
            self._thread.start()

    # -- asked for in the engine's thread --------------------------------------------------------

    def begin(self, life: str) -> None:
        """From now on copies are of `life`; what was asked for before is no longer wanted."""
        with self._changed:
            self._writes.clear()
            self._reads.clear()
            self._done.clear()
            self._life = life
            self._ask(_Begin(life))

    def drop(self, names: Sequence[str]) -> None:
        if names:
            with self._changed:
                self._ask(_Drop(tuple(names)))

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        """Publish `content`, which nobody changes any more."""
        with self._changed:
            self._ask(_Write(name, content))

    def read(self, load: int, names: Sequence[str]) -> None:
        """Read these copies in their order, up to the first that is not right."""
        with self._changed:
            self._reads.append(_Reading(load, tuple(names)))
            self._changed.notify_all()

    def taken(self) -> list[Wrote | Read]:
        """What was done since the last time, in its order.  Raises what ended the thread."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            done, self._done = self._done, []
            self._changed.notify_all()
            return done

    def wait(self, seconds: float) -> None:
        """Until something is done or nothing is under way, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._fault or not self._has_work, seconds)

    def close(self) -> None:
        """Give up what is under way, and the copies; idempotent."""
        with self._changed:
            self._closed = True
            self._writes.clear()
            self._reads.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def _ask(self, job: _Begin | _Drop | _Write) -> None:
        self._writes.append(job)
        self._changed.notify_all()

    # -- done in the other -----------------------------------------------------------------------

    def work(self) -> bool:
        """Do the next thing; False if there is none that can be done now."""
        with self._changed:
            job = self._next()
            life = self._life
            self._working = job is not None
        if job is None:
            return False
        try:
            done = self._do(job)
        finally:
            with self._changed:
                self._working = False
        with self._changed:
            if life == self._life:
                self._done += done
                if isinstance(job, _Reading) and done and _goes_on(job, done[-1]):
                    self._reads.appendleft(job)
            self._changed.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work_now)
                if self._closed:
                    return
            try:
                self.work()
            except Exception as error:  # noqa: BLE001  (it is raised where results are taken)
                with self._changed:
                    self._fault = error
                    self._changed.notify_all()
                return

    @property
    def _has_work(self) -> bool:
        return bool(self._writes or self._reads or self._working)

    @property
    def _has_work_now(self) -> bool:
        return bool(self._writes) or (bool(self._reads) and self._may_read)

    @property
    def _may_read(self) -> bool:
        return sum(isinstance(one, Read) for one in self._done) < MOST_READ

    def _next(self) -> _Begin | _Drop | _Write | _Reading | None:
        begins = bool(self._writes) and isinstance(self._writes[0], _Begin)
        if self._reads and self._may_read and not begins:
            return self._reads.popleft()
        return self._writes.popleft() if self._writes else None

    def _do(self, job: _Begin | _Drop | _Write | _Reading) -> list[Wrote | Read]:
        if isinstance(job, _Reading):
            return [self._read(job)]
        if isinstance(job, _Write):
            return [self._write(job)]
        try:
            if isinstance(job, _Begin):
                self._store.begin(job.life)
            else:
                self._store.drop(job.names)
        except OSError as error:  # it takes up room, and is never read: its life or claim is over
            _LOG.warning("copies that are given up could not be removed: %s", error)
        return []

    def _write(self, job: _Write) -> Wrote:
        try:
            self._store.publish(job.name, job.content)
        except OSError as error:
            return Wrote(job.name, error.strerror or str(error))
        return Wrote(job.name)

    def _read(self, job: _Reading) -> Read:
        position, job.done = job.done, job.done + 1
        try:
            return Read(job.load, position, self._store.read(job.names[position]))
        except BadCopy as error:
            return Read(job.load, position, None, str(error))


def _goes_on(job: _Reading, last: Wrote | Read) -> bool:
    return isinstance(last, Read) and last.content is not None and job.done < len(job.names)
