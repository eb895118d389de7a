"""What a model runner keeps in the blocks of several KV groups: prints of tokens, and of states.

For every token that a step computes, the runner writes a print of all tokens up to there into
each group: into the block that its own table names, as a real one does, which knows no table but
what each step told it.  A recurrent group has one print for the state after all of them.  It reads
what the token's attention reads, and tells where a block holds something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvclaims.bridge.vllm.layouts import CHUNKS, RECURRENT, REPLAY, RING, WINDOW, Layout
from kvclaims.bridge.vllm.wholepool import Broken
from kvclaims.spec.content import GENERATED_TOKEN

_BLANK: Final = 0


class Text:
    """The tokens of a request, those to be generated too, and a print of each prefix."""

    def __init__(self, domain: str, tokens: Sequence[int]) -> None:
        self._prints = [zlib.crc32(domain.encode())]
        self._add(tokens)

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._prints.append(hash((self._prints[-1], token)))

    def after(self, tokens: int) -> int:
        """The print of the first so many tokens."""
        missing = tokens + 1 - len(self._prints)
        if missing > 0:
            self._add([GENERATED_TOKEN] * missing)
        return self._prints[tokens]

    def follows(self, tokens: int, more: Sequence[int]) -> list[int]:
        """The prints of the first so many tokens, and of `more` behind them one by one."""
        found = [self.after(tokens)]
        for token in more:
            found.append(hash((found[-1], token)))
        return found


@dataclass(frozen=True)
class Work:
    """What a step computes for a request: its tokens `start` to `end`."""

    request: str
    text: Text
    start: int
    end: int


@dataclass(frozen=True)
class Step:
    """A step under way, as its scheduler told it; `loads` are done before anything is read."""

    output: Any
    work: tuple[Work, ...]
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True)
class Load:
    """Tokens `start` to `end` of a request that come from elsewhere."""

    text: Text
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]


class Runner:
    """The memory of all blocks, and the runner's own tables."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._groups = tuple(enumerate(layout.groups))
        self._sizes = tuple(layout.block_of(g) for g, _ in self._groups)
        self._memory: dict[int, tuple[int, list[int]]] = {}
        """Block → the group that wrote it last, and its prints by offset."""
        self._tables: dict[str, list[list[int]]] = {}
        self._found: dict[str, int] = {}
        """Request → the tokens that were there when it was let in."""
        self._rings: dict[str, int] = {}
        """Request → the token that its ring has been written up to."""
        self._early: dict[int, int] = {}
        """Blocks that the step under way fills with a copy of one that it writes as well."""
        self.reads = 0
        self.copies = 0

    # -- what a step tells ---------------------------------------------------------------------

    def learn(self, output: Any) -> None:
        """Take over the tables of a step."""
        for request in output.finished_req_ids:
            self._tables.pop(request, None)
        for new in output.scheduled_new_reqs:
            self._let_in(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for at, request in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[at]
            if request in cached.resumed_req_ids:
                self._let_in(request, blocks or (), cached.num_computed_tokens[at])
                continue
            for table, more in zip(self._tables[request], blocks or (), strict=False):
                table.extend(more)

    def _let_in(self, request: str, blocks: Sequence[Sequence[int]], found: int) -> None:
        self._tables[request] = [list(table) for table in blocks]
        # What is computed again behind a hit is no less found.
        self._found[request] = found + self._layout.replays if found else 0
        self._rings.pop(request, None)

    def found(self, request: str) -> int:
        """Tokens that were there when the request was let in."""
        return self._found[request]

    # -- a step --------------------------------------------------------------------------------

    def run(self, step: Step) -> Iterator[Broken]:
        """Copy, load, compute; what was not as it should be."""
        written = {block for _, block, _ in self.written_by(step)}
        self._early = {}
        for copy in getattr(step.output, "kv_cache_block_copies", None) or ():
            self.copies += 1
            if copy.src_block_id in written:
                self._early[copy.dst_block_id] = copy.src_block_id
            if copy.src_block_id in self._memory:
                group, prints = self._memory[copy.src_block_id]
                self._memory[copy.dst_block_id] = (group, list(prints))
            else:
                self._memory.pop(copy.dst_block_id, None)
        for load in step.loads:
            yield from self.load(load)
        recurrent = [(g, w) for w in step.work for g, x in self._groups if x.kind == RECURRENT]
        for group, work in recurrent:
            yield from self._read_state(group, work)
        attention = [(g, w) for w in step.work for g, x in self._groups if x.kind != RECURRENT]
        for group, work in attention:
            yield from self._write(group, work)
        for group, work in attention:
            yield from self._read(group, work)
        for group, work in recurrent:
            yield from self._write_state(group, work)

    def load(self, load: Load) -> Iterator[Broken]:
        """A transfer fills the blocks of its tables; one that is longer than a table is wrong."""
        for group, kind in self._groups:
            size, table = self._sizes[group], load.tables[group]
            if kind.kind in (RING, REPLAY):
                continue
            if (load.end - 1) // size >= len(table):
                yield (
                    "B5",
                    f"tokens {load.start} to {load.end} are loaded, and KV group {group} has "
                    f"{len(table)} blocks of {size}",
                )
                return
            if kind.kind == RECURRENT:
                self._put(group, table[(load.end - 1) // size], 0, load.text.after(load.end))
                continue
            for position in range(load.start, load.end):
                kept = load.text.after(position + 1)
                self._put(group, table[position // size], position % size, kept)

    def _put(self, group: int, block: int, offset: int, kept: int) -> None:
        if not block:
            return  # the null block takes anything, and keeps nothing
        owner, prints = self._memory.get(block, (-1, []))
        if owner != group:
            prints = [_BLANK] * self._sizes[group]
            self._memory[block] = (group, prints)
        prints[offset] = kept

    def _got(self, group: int, block: int, offset: int) -> int:
        owner, prints = self._memory.get(block, (-1, []))
        return prints[offset] if owner == group and block else _BLANK

    def _block(self, group: int, request: str, index: int) -> int | None:
        table = self._tables[request][group]
        return table[index] if index < len(table) else None

    def _first(self, group: int, work: Work) -> int:
        """The first token that the work reads: behind a hit, a group that is replayed has none of
        those before."""
        found, token = self._layout.groups[group], work.start
        if found.kind == REPLAY:
            replayed = self._found[work.request] - self._layout.replays
            return max(0, replayed, token - found.reads + 1)
        if found.kind == WINDOW:
            return max(0, token - found.reads + 1)
        return token // found.reads * found.reads if found.kind == CHUNKS else 0

    def _begins(self, group: int, work: Work) -> int:
        """The first token that the work writes: what is found stays, but where it is replayed."""
        if self._layout.groups[group].kind == REPLAY:
            return work.start
        return max(work.start, self._found[work.request]) if self._layout.replays else work.start

    def _write(self, group: int, work: Work) -> Iterator[Broken]:
        if self._layout.groups[group].kind == RING:
            yield from self._turn(group, work)
            return
        size = self._sizes[group]
        for position in range(self._begins(group, work), work.end):
            block = self._block(group, work.request, position // size)
            if not block:
                yield "B5", self._nowhere(group, work, position, "computes")
                return
            self._put(group, block, position % size, work.text.after(position + 1))

    def _read(self, group: int, work: Work) -> Iterator[Broken]:
        if self._layout.groups[group].kind == RING:
            return
        size = self._sizes[group]
        for position in range(self._first(group, work), work.end):
            self.reads += 1
            block = self._block(group, work.request, position // size) or 0
            if self._got(group, block, position % size) != work.text.after(position + 1):
                yield self._wrong(group, work, position, block)
                return

    def _wrong(self, group: int, work: Work, position: int, block: int) -> Broken:
        if position < self._found[work.request]:
            rule, how = "B4", f"was served {self._found[work.request]} tokens"
        else:
            rule, how = "B5", f"computed token {position}"
        whence = self._early.get(block)
        early = f", a copy of block {whence}, which the same step is to compute" if whence else ""
        return rule, (
            f"request {work.request} {how}, and KV group {group} holds something else for token "
            f"{position}, in block {block}{early}"
        )

    def _nowhere(self, group: int, work: Work, position: int, does: str) -> str:
        return (
            f"request {work.request} {does} token {position}, and has no block for it in KV group "
            f"{group}"
        )

    def _read_state(self, group: int, work: Work) -> Iterator[Broken]:
        if not work.start:
            return
        self.reads += 1
        size = self._sizes[group]
        block = self._block(group, work.request, (work.start - 1) // size) or 0
        if self._got(group, block, 0) != work.text.after(work.start):
            rule = "B4" if work.start <= self._found[work.request] else "B5"
            yield (
                rule,
                f"request {work.request} goes on behind token {work.start}, and KV group {group} "
                f"does not hold its state there, in block {block}",
            )

    def _write_state(self, group: int, work: Work) -> Iterator[Broken]:
        size = self._sizes[group]
        block = self._block(group, work.request, (work.end - 1) // size)
        if not block:
            yield "B5", self._nowhere(group, work, work.end - 1, "computes")
            return
        self._put(group, block, 0, work.text.after(work.end))
        if saved := self._saved(group, work):
            kept, tokens = saved
            self._put(group, kept, 0, work.text.after(tokens))

    def _saved(self, group: int, work: Work) -> tuple[int, int] | None:
        """The block that gets a state from inside of the chunk, and the tokens that it stands for:
        the last place but the end where a hit may end, in the block before that of the end.  None
        where the chunk has no such place, or begins in that block; and as in a runner, where it
        begins behind or at the first place that it could save."""
        unit, size = self._layout.ends, self._sizes[group]
        tokens = (work.end - 1) // unit * unit
        index = -(-work.end // size) - 2
        if not self._layout.groups[group].saves or work.start % unit:
            return None
        if index <= (work.start - 1) // size or tokens < work.start + unit:
            return None
        return self._block(group, work.request, index) or 0, tokens

    def _turn(self, group: int, work: Work) -> Iterator[Broken]:
        """A ring: what the last step of the request left in it is still there."""
        block = self._block(group, work.request, 0)
        if not block:
            yield "B5", self._nowhere(group, work, work.start, "computes")
            return
        mine = zlib.crc32(work.request.encode())
        if work.request in self._rings:
            self.reads += 1
            if self._got(group, block, 0) != hash((mine, self._rings[work.request])):
                yield (
                    "B5",
                    f"the ring of request {work.request} in KV group {group} was written by "
                    f"another, in block {block}",
                )
        self._rings[work.request] = work.end
        self._put(group, block, 0, hash((mine, work.end)))

    # -- what is kept --------------------------------------------------------------------------

    def holds(self, group: int, block: int, text: Text, tokens: int) -> bool:
        """Whether the block holds what its group keeps of the last of the first so many tokens."""
        if self._layout.groups[group].kind == RECURRENT:
            return self._got(group, block, 0) == text.after(tokens)
        size = self._sizes[group]
        return all(
            self._got(group, block, position % size) == text.after(position + 1)
            for position in range((tokens - 1) // size * size, tokens)
        )

    def written_by(self, step: Step) -> set[tuple[int, int, int]]:
        """Group and block of all that the step writes, and the first token written there."""
        written = set()
        for work in step.work:
            for group, kind in self._groups:
                size = self._sizes[group]
                first = work.end - 1 if kind.kind == RECURRENT else self._begins(group, work)
                for index in range(first // size, -(-work.end // size)):
                    if block := self._block(group, work.request, index):
                        written.add((group, block, max(first, index * size)))
                if kind.saves and (saved := self._saved(group, work)) and saved[0]:
                    written.add((group, saved[0], saved[1] - 1))
        return written
