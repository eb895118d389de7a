"""A tier as the scheduler sees it: what it keeps, what it owes, what is on its way (O1 to O3).

Pure bookkeeping over content ids; a worker moves the bytes, in its own time.  A copy counts once
every worker has published it.  What claims in force were promised room for is never given up for
something else, nor is a copy that a load reads; other copies go as room is needed, the least
recently used first.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

FILES: Final = "files"
"""What traces call this tier."""


_LONGEST_PAUSE: Final = 1024
"""Steps after which a tier that could not be written to is tried again at the latest."""

MOST_UNDER_WAY: Final = 64
"""Copies that are being written at a time: until they are, workers keep them in memory."""


@dataclass(frozen=True)
class Move:
    """A block of the device and the copy that it goes to or comes from."""

    name: str
    block: int


@dataclass(frozen=True)
class Load:
    """What is loaded for a request: contents in order, and the blocks that they go to."""

    request_id: str
    contents: tuple[str, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Orders:
    """What the worker is to do in a step, in this order: forget, load, and save what is on the
    device when the step has ended.  Copies of another life it removes first."""

    life: str = ""
    drops: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    saves: tuple[Move, ...] = ()
    idle: bool = False
    """Whether nothing is computed in the step, so that it may wait a little for what is under
    way."""


@dataclass(frozen=True)
class Saved:
    """What so many workers say of a copy: it is kept, or why it is not."""

    reason: str = ""
    workers: int = 1

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.reason or other.reason, self.workers + other.workers)


@dataclass(frozen=True)
class Loaded:
    """What so many workers say of a load: how many of its blocks, from the first on, hold what they
    should in each of them, and what is wrong with the next."""

    good: int
    reason: str = ""
    workers: int = 1

    def __add__(self, other: Loaded) -> Loaded:
        worse = min(self, other, key=lambda one: one.good)
        return Loaded(worse.good, worse.reason, self.workers + other.workers)


@dataclass
class Results:
    """What became of orders of one life: of copies by name, of loads by request."""

    life: str = ""
    saved: dict[str, Saved] = field(default_factory=dict)
    loaded: dict[str, Loaded] = field(default_factory=dict)

    def merged(self, other: Results) -> Results:
        """The same of more workers, which hold a part of every block each."""
        if other.life != self.life:
            raise ValueError("workers answer orders of different lives")
        saved, loaded = dict(self.saved), dict(self.loaded)
        for name, told in other.saved.items():
            saved[name] = saved[name] + told if name in saved else told
        for request_id, found in other.loaded.items():
            loaded[request_id] = loaded[request_id] + found if request_id in loaded else found
        return Results(self.life, saved, loaded)


class Answers:
    """Gathers what `workers` workers answer, each in its own time: of a copy or a load it is known
    what became of it when all have said so."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._some = Results()

    def take(self, results: Results) -> Results:
        """What all have answered by now, once."""
        if results.life != self._some.life:
            self._some = Results(results.life)
        some = self._some.merged(results)
        by_all = Results(
            some.life,
            {n: told for n, told in some.saved.items() if told.workers == self._workers},
            {r: told for r, told in some.loaded.items() if told.workers == self._workers},
        )
        for name in by_all.saved:
            del some.saved[name]
        for request_id in by_all.loaded:
            del some.loaded[request_id]
        self._some = some
        return by_all


Source = Callable[[str], Move | None]
"""Where on the device a content is, written when this step has ended, and its copy's name."""


class Tier:
    """Room for `blocks` copies."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.life = ""
        self._copies: OrderedDict[str, str] = OrderedDict()
        """Content → the name of its copy, least recently used first."""
        self._promised: dict[str, dict[str, int]] = {}
        """Content → claims that it is promised to, with the position it has there."""
        self._saving: dict[str, str] = {}
        """Name of a copy under way → its content."""
        self._ready: dict[str, None] = {}
        """Promised contents on the device that have no copy, and none on its way."""
        self._failed: dict[str, None] = {}
        """Those whose copy could not be written: they are tried again after `_pause` steps."""
        self.unsaved: dict[str, str] = {}
        """Promised contents whose copy could not be written the last time, with the reason."""
        self._pause = 1
        self._steps = 0
        self._loads: dict[str, Load] = {}
        self._new_loads: list[Load] = []
        self._drops: list[str] = []
        self._has_stale = False
        """Whether the worker has copies of a life that is over, and was not told of the next."""
        self._arriving: dict[int, str] = {}
        """Blocks that loads fill → their content, until it is visible there."""
        self.clear()

    # -- what is kept and owed -----------------------------------------------------------------

    @property
    def kept(self) -> int:
        return len(self._copies)

    @property
    def promised(self) -> int:
        """Contents that claims in force were promised room for, each counted once."""
        return len(self._promised)

    @property
    def is_busy(self) -> bool:
        """Whether the worker has something to do though no request does."""
        return bool(self._ready or self._saving or self._drops or self._has_stale)

    def keeps(self, content: str) -> bool:
        return content in self._copies

    def is_safe(self, content: str) -> bool:
        """Whether the tier has the content, though its copy may not count yet."""
        return content in self._copies or content in self._saving.values()

    @property
    def lacks_copies(self) -> bool:
        """Whether promised contents wait for a copy that nobody writes yet."""
        return bool(self._ready or self._failed)

    def lacks(self, content: str) -> bool:
        """Whether this is one of them."""
        return content in self._ready or content in self._failed

    @property
    def under_way(self) -> list[str]:
        """Contents whose copies are being written."""
        return list(self._saving.values())

    @property
    def copies(self) -> dict[str, str]:
        """Every content that is kept, with the name of its copy."""
        return dict(self._copies)

    def fits(self, contents: Sequence[str]) -> int:
        """How many of these contents, from the first on, can be promised room."""
        room = self.blocks - len(self._promised)
        for n, content in enumerate(contents):
            room -= content not in self._promised
            if room < 0:
                return n
        return len(contents)

    def promise(self, claim: str, contents: Mapping[str, int]) -> None:
        """Owe the claim these contents, each at a position of it."""
        for content, position in contents.items():
            self._promised.setdefault(content, {})[claim] = position
            self.appeared(content)

    def release(self, claim: str, contents: Iterable[str]) -> None:
        """The claim has ended.  Copies stay until their room is needed (L6)."""
        for content in contents:
            owed = self._promised.get(content, {})
            owed.pop(claim, None)
            if not owed:
                self._promised.pop(content, None)
                self._ready.pop(content, None)
                self.unsaved.pop(content, None)

    def owners(self, content: str) -> dict[str, int]:
        """The claims in force that the content is promised to, with its position there."""
        return dict(self._promised.get(content, {}))

    # -- saving --------------------------------------------------------------------------------

    def appeared(self, content: str) -> None:
        """The content may be on the device: save it if a claim waits for its copy."""
        if content in self._promised and not self.keeps(content):
            self._ready[content] = None

    def orders(self, source: Source, idle: bool = False) -> tuple[Orders, list[str]]:
        """What the worker does in the step that was just scheduled (`idle`: it computes nothing),
        and which contents are given up for it."""
        saves, gone = [], []
        self._try_again()
        for content in list(self._ready):
            if len(self._saving) >= MOST_UNDER_WAY:
                break
            del self._ready[content]
            move = source(content)
            if move is None or move.name in self._saving:
                continue
            if self.kept + len(self._saving) >= self.blocks:
                spared = self._spare()
                if spared is None:
                    self._ready[content] = None
                    break
                gone.append(spared)
                self._drops.append(self._copies.pop(spared))
            self._saving[move.name] = content
            saves.append(move)
        drops, self._drops = self._drops, []
        loads, self._new_loads = self._new_loads, []
        self._has_stale = False
        return Orders(self.life, tuple(drops), tuple(loads), tuple(saves), idle), gone

    def _try_again(self) -> None:
        self._steps += bool(self._failed)
        if self._steps >= self._pause:
            self._steps = 0
            for content in self._failed:
                self.appeared(content)
            self._failed.clear()

    def _spare(self) -> str | None:
        """The copy to give up next: one that nobody was promised and no load reads."""
        read = {content for load in self._loads.values() for content in load.contents}
        free = (c for c in self._copies if c not in self._promised and c not in read)
        return next(free, None)

    def failing(self, results: Results) -> dict[str, str]:
        """Contents whose copy could not be written by these results, each with the reason; asked
        for before they are taken (`saved`)."""
        if results.life != self.life:
            return {}
        told = ((self._saving.get(name), told) for name, told in results.saved.items())
        return {content: said.reason for content, said in told if content and said.reason}

    def saved(self, results: Results) -> list[str]:
        """Contents that have a copy now.  Where one could not be written, its claims go without
        until it can; it is tried again after ever longer pauses."""
        if results.life != self.life:
            return []
        new = []
        for name, told in results.saved.items():
            content = self._saving.pop(name, None)
            if content is None:
                continue
            if told.reason:
                if told.workers > 1:
                    self._drops.append(name)  # another of them may have written its part
                self._failed[content] = None
                if content in self._promised:
                    self.unsaved[content] = told.reason
            else:
                self.unsaved.pop(content, None)
                self._ready.pop(content, None)
                self._copies[content] = name
                new.append(content)
        if any(told.reason for told in results.saved.values()):
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif new:
            self._pause = 1
        return new

    # -- loading -------------------------------------------------------------------------------

    def matching(self, contents: Sequence[str], names: Sequence[str]) -> int | None:
        """How many of these contents, from the first on, have copies under these names; None
        while the first of them is on its way for somebody else.  Promises nothing (O3)."""
        arriving = set(self._arriving.values())
        for n, (content, name) in enumerate(zip(contents, names, strict=True)):
            if content in arriving:
                return n or None
            if self._copies.get(content) != name:
                return n
        return len(contents)

    def begin(self, request_id: str, contents: Sequence[str], blocks: Sequence[int]) -> Load:
        """Load these contents into these blocks; their copies are kept until that has ended."""
        moves = tuple(
            Move(self._copies[content], block)
            for content, block in zip(contents, blocks, strict=True)
        )
        load = Load(request_id, tuple(contents), moves)
        self._loads[request_id] = load
        self._new_loads.append(load)
        for content, block in zip(contents, blocks, strict=True):
            self._copies.move_to_end(content)
            self._arriving[block] = content
        return load

    def ended(self, request_id: str, good: int) -> Load | None:
        """The load of a request has ended: its first `good` blocks are right."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            for move in load.moves[good:]:
                self._arriving.pop(move.block, None)
        return load

    def arrived(self, block: int, content: str) -> bool:
        """The content is visible in `block`: whether a load brought it there."""
        return self._arriving.pop(block, None) == content

    def abandoned(self, blocks: Iterable[int]) -> None:
        """A request let go of these blocks before what was loaded into them became visible."""
        for block in blocks:
            self._arriving.pop(block, None)

    def lost(self, content: str) -> None:
        """The copy is not right: nobody gets it again."""
        name = self._copies.pop(content, None)
        if name is not None:
            self._drops.append(name)

    def clear(self) -> list[str]:
        """Give up every copy, also those under way; what was kept."""
        gone = list(self._copies)
        self._has_stale = bool(gone or self._saving)
        self._copies.clear()
        self._saving.clear()
        self._drops.clear()
        self._failed.clear()
        self.unsaved.clear()
        self._ready = dict.fromkeys(c for c in self._promised)
        self.life = secrets.token_hex(8)
        return gone
