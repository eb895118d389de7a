"""Sets of visited states as LLVM text: what happens to a buffer of successors' numbers.

Each function yields the blocks from label `sift` to label `inserted`.  They find `%n_out` numbers
in `%buffer` and `%m` numbers in `%next`, append those that were not seen yet, each once, and leave
`%m1` as the new count.  Block `came` is where control comes from.

bitmap   one bit for each number
hash     open addressing over 64-bit words, a number each
sent     no set but a filter: each place remembers the number that was last there, so most
         repetitions are left out, never a number that was not there before

With `shared` several threads may work on the same set: a number is appended by the one whose
atomic operation put it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

EMPTY: Final = -1

_HASH: Final = -7046029254386353131
"""2^64 divided by the golden ratio: multiplication spreads neighbours over the table."""


def insert(visited: str, kind: str, came: str, shared: bool) -> Iterator[str]:
    """`kind` is i32 or i64, the type of a state's number."""
    match visited:
        case "bitmap":
            yield from _bitmap(kind, came, shared)
        case "hash":
            yield from _hashed(kind, came, shared)
        case "sent":
            yield from _sent(kind, came)
        case _:
            raise ValueError(f"no set of visited states is called {visited!r}")


def _load(kind: str, place: str, shared: bool) -> str:
    if shared:
        return f"load atomic {kind}, ptr {place} monotonic, align {4 if kind == 'i32' else 8}"
    return f"load {kind}, ptr {place}"


def _bit(name: str, code: str, kind: str) -> Iterator[str]:
    """The word of the bitmap that a state's bit is in, and the bit."""
    yield f"%word_{name} = lshr {kind} {code}, {6 if kind == 'i64' else 5}"
    yield f"%place_{name} = and {kind} {code}, {63 if kind == 'i64' else 31}"
    yield f"%bit_{name} = shl {kind} 1, %place_{name}"
    yield f"%p_{name} = getelementptr {kind}, ptr %seen, {kind} %word_{name}"


def _bitmap(kind: str, came: str, shared: bool) -> Iterator[str]:
    """First leave out what was seen, reading only; then mark the rest, twins among it."""
    yield "sift:"
    yield f"%js = phi i64 [0, %{came}], [%js1, %sift]"
    yield f"%c = phi i64 [0, %{came}], [%c1, %sift]"
    yield f"%p_any = getelementptr {kind}, ptr %buffer, i64 %js"
    yield f"%ts = load {kind}, ptr %p_any"
    yield from _bit("s", "%ts", kind)
    yield f"%w_s = {_load(kind, '%p_s', shared)}"
    yield f"%p_c = getelementptr {kind}, ptr %buffer, i64 %c"
    yield f"store {kind} %ts, ptr %p_c"
    yield f"%known_s = and {kind} %w_s, %bit_s"
    yield f"%unseen = icmp eq {kind} %known_s, 0"
    yield "%unseen64 = zext i1 %unseen to i64"
    yield "%c1 = add i64 %c, %unseen64"
    yield "%js1 = add i64 %js, 1"
    yield "%again_s = icmp slt i64 %js1, %n_out"
    yield "br i1 %again_s, label %sift, label %sifted"
    yield "sifted:"
    yield "br label %each"
    yield "each:"
    yield "%j = phi i64 [0, %sifted], [%j1, %put]"
    yield "%m1 = phi i64 [%m, %sifted], [%m2, %put]"
    yield "%again = icmp slt i64 %j, %c1"
    yield "br i1 %again, label %put, label %inserted"
    yield "put:"
    yield f"%p_fresh = getelementptr {kind}, ptr %buffer, i64 %j"
    yield f"%t = load {kind}, ptr %p_fresh"
    yield from _bit("t", "%t", kind)
    if shared:
        yield f"%w_t = atomicrmw or ptr %p_t, {kind} %bit_t monotonic"
    else:
        yield f"%w_t = load {kind}, ptr %p_t"
    yield f"%w1 = or {kind} %w_t, %bit_t"
    if not shared:
        yield f"store {kind} %w1, ptr %p_t"
    yield f"%p_n = getelementptr {kind}, ptr %next, i64 %m1"
    yield f"store {kind} %t, ptr %p_n"
    yield f"%new = icmp ne {kind} %w_t, %w1"
    yield "%new64 = zext i1 %new to i64"
    yield "%m2 = add i64 %m1, %new64"
    yield "%j1 = add i64 %j, 1"
    yield "br label %each"
    yield "inserted:"


def _hashed(kind: str, came: str, shared: bool) -> Iterator[str]:
    """First ask the memory for every place in the table, then go there."""
    yield "sift:"
    yield f"%js = phi i64 [0, %{came}], [%js1, %sift]"
    yield f"%p_ts = getelementptr {kind}, ptr %buffer, i64 %js"
    yield f"%ts = load {kind}, ptr %p_ts"
    yield from _hash("s", "%ts", kind)
    yield "call void @llvm.prefetch.p0(ptr %p_slot_s, i32 1, i32 3, i32 1)"
    yield "%js1 = add i64 %js, 1"
    yield "%again_s = icmp slt i64 %js1, %n_out"
    yield "br i1 %again_s, label %sift, label %each"
    yield "each:"
    yield "%j = phi i64 [0, %sift], [%j1, %kept]"
    yield "%mi = phi i64 [%m, %sift], [%m1, %kept]"
    yield f"%p_t = getelementptr {kind}, ptr %buffer, i64 %j"
    yield f"%t = load {kind}, ptr %p_t"
    yield from _hash("t", "%t", kind)
    yield "br label %probe"
    yield "probe:"
    yield "%h = phi i64 [%home_t, %each], [%h1, %onward]"
    yield "%p_h = getelementptr i64, ptr %seen, i64 %h"
    yield f"%held = {_load('i64', '%p_h', shared)}"
    yield "%same = icmp eq i64 %held, %key_t"
    yield "br i1 %same, label %kept, label %other"
    yield "other:"
    yield f"%empty = icmp eq i64 %held, {EMPTY}"
    yield "br i1 %empty, label %put, label %onward"
    yield "onward:"
    yield "%h0 = add i64 %h, 1"
    yield "%h1 = and i64 %h0, %c_mask"
    yield "br label %probe"
    yield "put:"
    if shared:
        yield f"%pair = cmpxchg ptr %p_h, i64 {EMPTY}, i64 %key_t monotonic monotonic"
        yield "%won = extractvalue {i64, i1} %pair, 1"
        yield "br i1 %won, label %mine, label %theirs"
        yield "theirs:"
        yield "%there = extractvalue {i64, i1} %pair, 0"
        yield "%twin = icmp eq i64 %there, %key_t"
        yield "br i1 %twin, label %kept, label %onward"
        yield "mine:"
    else:
        yield "store i64 %key_t, ptr %p_h"
    yield f"%p_n = getelementptr {kind}, ptr %next, i64 %mi"
    yield f"store {kind} %t, ptr %p_n"
    yield "%mp = add i64 %mi, 1"
    yield "br label %kept"
    yield "kept:"
    known = ", [%mi, %theirs]" if shared else ""
    yield f"%m1 = phi i64 [%mi, %probe], [%mp, %{'mine' if shared else 'put'}]{known}"
    yield "%j1 = add i64 %j, 1"
    yield "%again = icmp slt i64 %j1, %n_out"
    yield "br i1 %again, label %each, label %inserted"
    yield "inserted:"


def _sent(kind: str, came: str) -> Iterator[str]:
    yield "sift:"
    yield f"%js = phi i64 [0, %{came}], [%js1, %sift]"
    yield f"%ms = phi i64 [%m, %{came}], [%m1, %sift]"
    yield f"%p_ts = getelementptr {kind}, ptr %buffer, i64 %js"
    yield f"%ts = load {kind}, ptr %p_ts"
    yield from _hash("s", "%ts", kind)
    yield "%held = load i64, ptr %p_slot_s"
    yield "store i64 %key_s, ptr %p_slot_s"
    yield f"%p_n = getelementptr {kind}, ptr %next, i64 %ms"
    yield f"store {kind} %ts, ptr %p_n"
    yield "%new = icmp ne i64 %held, %key_s"
    yield "%new64 = zext i1 %new to i64"
    yield "%m1 = add i64 %ms, %new64"
    yield "%js1 = add i64 %js, 1"
    yield "%again_s = icmp slt i64 %js1, %n_out"
    yield "br i1 %again_s, label %sift, label %inserted"
    yield "inserted:"


def _hash(name: str, code: str, kind: str) -> Iterator[str]:
    key = f"zext i32 {code} to i64" if kind == "i32" else f"add i64 {code}, 0"
    yield f"%key_{name} = {key}"
    yield f"%mix_{name} = mul i64 %key_{name}, {_HASH}"
    yield f"%home_{name} = lshr i64 %mix_{name}, %c_shift"
    yield f"%p_slot_{name} = getelementptr i64, ptr %seen, i64 %home_{name}"


REHASH: Final = f"""
define void @rehash(ptr noalias %old, i64 %size, ptr noalias %seen, i64 %c_mask, i64 %c_shift) {{
entry:
br label %head
head:
%k = phi i64 [0, %entry], [%k1, %latch]
%more = icmp slt i64 %k, %size
br i1 %more, label %body, label %exit
body:
%p = getelementptr i64, ptr %old, i64 %k
%key = load i64, ptr %p
%unused = icmp eq i64 %key, {EMPTY}
br i1 %unused, label %latch, label %start
start:
%mix = mul i64 %key, {_HASH}
%home = lshr i64 %mix, %c_shift
br label %probe
probe:
%h = phi i64 [%home, %start], [%h1, %onward]
%p_h = getelementptr i64, ptr %seen, i64 %h
%held = load i64, ptr %p_h
%empty = icmp eq i64 %held, {EMPTY}
br i1 %empty, label %put, label %onward
onward:
%h0 = add i64 %h, 1
%h1 = and i64 %h0, %c_mask
br label %probe
put:
store i64 %key, ptr %p_h
br label %latch
latch:
%k1 = add i64 %k, 1
br label %head
exit:
ret void
}}
"""
"""Puts every number of an old table into an empty one; one thread at a time."""
