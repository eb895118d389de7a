"""A pool that several KV groups share, judged as a whole: contents, events and hits.

Nothing here knows how vLLM looks content up or what it keeps.  What a hash stands for is known from
the requests that have it, what a block holds from the runner that wrote it, and what is certainly
found from what is resident and what each group reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvclaims.bridge.vllm.grouped_memory import Runner, Text
from kvclaims.bridge.vllm.layouts import CHUNKS, FULL, REPLAY, RING, WINDOW, Layout
from kvclaims.bridge.vllm.wholepool import Broken, Key


class Names:
    """What hashes stand for: those of requests, each for a number of leading tokens."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._known: dict[bytes, tuple[Text, int]] = {}
        self._seen: dict[str, int] = {}

    def learn(self, request: Any, text: Text) -> None:
        """Remember the hashes that the request has by now."""
        hashes = request.block_hashes
        for at in range(self._seen.get(request.request_id, 0), len(hashes)):
            self._known.setdefault(bytes(hashes[at]), (text, (at + 1) * self._unit))
        self._seen[request.request_id] = len(hashes)

    def forget(self, request: str) -> None:
        """The request is over; one of its name may come again."""
        self._seen.pop(request, None)

    def of(self, raw: bytes) -> tuple[Text, int] | None:
        """The text, and how many leading tokens of it the hash stands for."""
        return self._known.get(raw)

    def told(self) -> Iterator[tuple[bytes, Text, int]]:
        """Every hash there was."""
        return ((raw, text, tokens) for raw, (text, tokens) in self._known.items())


def contents_stand(
    found: Mapping[Key, tuple[int, ...]], names: Names, runner: Runner
) -> Iterator[tuple[Key, int, str]]:
    """Content that a lookup finds and that its block does not hold (B4): what, where, in words."""
    for (raw, group), blocks in found.items():
        named = names.of(raw)
        for block in blocks:
            if named is None:
                yield (raw, group), block, f"block {block} is found under a hash of no request"
            elif not runner.holds(group, block, *named):
                yield (
                    (raw, group),
                    block,
                    (
                        f"block {block} is found as the first {named[1]} tokens of a text in KV "
                        f"group {group}, and holds something else"
                    ),
                )


class Router:
    """The engine's KV events, folded to what a router believes, and judged one by one (B8)."""

    def __init__(self, layout: Layout, names: Names) -> None:
        self._layout = layout
        self._names = names
        self._believes: set[tuple[Any, int]] = set()
        self._raw: dict[Any, bytes] = {}
        self._seen = 0
        self.told = 0

    def follow(self, events: Iterable[Any], found: Mapping[Key, Any]) -> Iterator[Broken]:
        """Fold what was told, and compare it with what can be found."""
        self._learn()
        news, removed = list(events), set()
        for event in news:
            self.told += 1
            kind = type(event).__name__
            group = getattr(event, "group_idx", None) or 0
            if kind == "BlockStored":
                yield from self._stored(event, group)
                self._believes.update((h, group) for h in event.block_hashes)
            elif kind == "BlockRemoved":
                gone = {(h, group) for h in event.block_hashes}
                self._believes -= gone
                removed |= gone
            else:
                self._believes.clear()
        yield from self._agrees(found, removed)

    def _learn(self) -> None:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        told = list(self._names.told())
        for raw, _, _ in told[self._seen :]:
            self._raw[maybe_convert_block_hash(raw)] = raw
        self._seen = len(told)

    def _agrees(self, found: Mapping[Key, Any], removed: set[tuple[Any, int]]) -> Iterator[Broken]:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        resident = {(maybe_convert_block_hash(raw), group) for raw, group in found}
        differs, self._believes = resident ^ self._believes, resident
        for name in sorted(differs, key=str):
            what = f"content {str(name[0])[:12]} of KV group {name[1]}"
            if name not in resident:
                yield "B8", f"{what} is gone, and its events say stored"
            elif name in removed:
                yield "B8", f"another copy of {what} is resident, its events say removed"
            else:
                yield "B8", f"{what} is resident, and no event told of it"

    def _stored(self, event: Any, group: int) -> Iterator[Broken]:
        """What an event says of a content is so: behind which, which tokens, in which blocks."""
        where = f"an event of KV group {group}"
        parent = event.parent_block_hash
        start: tuple[Text, int] | None = None
        if parent is not None:
            start = self._names.of(self._raw.get(parent, b""))
            if start is None:
                yield "B8", f"{where} names a parent that is no content"
                return
        size = self._layout.block_of(group)
        if event.block_size not in (size, self._layout.unit):  # the end of a prompt is told apart
            yield "B8", f"{where} tells of blocks of {event.block_size} tokens, they have {size}"
            return
        for told in event.block_hashes:
            named = self._names.of(self._raw.get(told, b""))
            if named is None:
                yield "B8", f"{where} tells of a hash that is no content"
                return
            text, tokens = named
            begin, before = (start[1], start[0]) if start else (0, text)
            prints = before.follows(begin, event.token_ids)
            behind = tokens - begin
            fits = 0 < behind < len(prints) and behind % event.block_size == 0
            if not fits or prints[behind] != text.after(tokens):
                yield (
                    "B8",
                    f"{where} tells of the first {tokens} tokens of a text as {len(prints) - 1} "
                    f"others behind {begin}, in blocks of {event.block_size}",
                )
                return
        yield from self._group_told(event, group, where)

    def _group_told(self, event: Any, group: int, where: str) -> Iterator[Broken]:
        if not hasattr(event, "kv_cache_spec_sliding_window"):
            return
        kind = self._layout.groups[group]
        reads = kind.reads if kind.kind in (WINDOW, REPLAY) else None
        if event.kv_cache_spec_kind is None or event.kv_cache_spec_sliding_window != reads:
            yield (
                "B8",
                f"{where} says that it is of kind {event.kv_cache_spec_kind} with a window of "
                f"{event.kv_cache_spec_sliding_window}, and its window is {reads}",
            )


class Certain:
    """How many leading tokens a request certainly finds: every group has what is read behind them,
    and a drafter the block after, which it gives up (P5)."""

    def __init__(self, layout: Layout, found: Iterable[Key]) -> None:
        self._layout = layout
        self._found = frozenset(found)

    def hit(self, hashes: list[Any], tokens: int) -> int:
        """The most tokens, of a request with so many tokens and these hashes."""
        ends = self._layout.ends
        raw = [bytes(h) for h in hashes]
        for hit in range((tokens - 1) // ends * ends, self._layout.replays, -ends):
            if all(self._finds(g, raw, hit, tokens) for g in range(len(self._layout.groups))):
                return hit
        return 0

    def gives_up(self, group: int, hashes: list[Any], hit: int) -> bool:
        """Whether the block behind a hit, or what of it is found, is there for a drafter to give
        up: what it keeps of the last token before depends on the one that comes next."""
        raw = [bytes(h) for h in hashes]
        size = self._layout.block_of(group)
        end = (hit // size + 1) * size
        units = range(hit + self._layout.unit, end + 1, self._layout.unit)
        return any(self._has(group, raw, n) for n in (units if self._layout.inside else (end,)))

    def _has(self, group: int, hashes: list[bytes], tokens: int) -> bool:
        at = tokens // self._layout.unit - 1
        return at < len(hashes) and (hashes[at], group) in self._found

    def _finds(self, group: int, hashes: list[bytes], hit: int, tokens: int) -> bool:
        kind, size = self._layout.groups[group], self._layout.block_of(group)
        if kind.kind in (RING, REPLAY):
            return True
        if kind.kind == CHUNKS:
            return False  # what is found there depends on what is asked for
        if kind.kind == FULL:
            more = (self._layout.unit if self._layout.inside else size) if kind.drafts else 0
            return hit + more < tokens and self._covers(group, hashes, hit + more, tokens)
        if kind.kind == WINDOW:
            first = max(0, hit - kind.reads + 1) // size
            if kind.drafts and hit + size >= tokens:
                return False
            ends = range(first, hit // size + kind.drafts)
            return all(self._has(group, hashes, (i + 1) * size) for i in ends)
        return self._has(group, hashes, hit)

    def _covers(self, group: int, hashes: list[bytes], hit: int, tokens: int) -> bool:
        """Whole blocks, and what is found of the last one up to the hit or beyond it."""
        size, unit = self._layout.block_of(group), self._layout.unit
        whole = hit // size
        if not all(self._has(group, hashes, (i + 1) * size) for i in range(whole)):
            return False
        beyond = range(hit, min((whole + 1) * size, tokens - 1) + 1, unit)
        return hit % size == 0 or any(self._has(group, hashes, n) for n in beyond)
