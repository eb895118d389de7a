"""A grounded instance as machine code, through LLVM (`llvmlite`, the compiler inside Numba).

A state is one number, its slots' values in mixed radix; a step adds to it.  The code is written
as LLVM's own text, not as Python for Numba to translate: the same successor function takes 20 s
to compile that way (75 s for a pool), and a fraction of a second this way.

`expand` takes the states of a level in turn: it reads the digits, checks the invariants,
evaluates every guard without branching and writes the successors' numbers into a small buffer;
after some states it moves those that were not seen yet to the next level.  `find` looks for the
first state that has a given successor, `absorb` takes states that come from elsewhere.

What needs a closer look is not decided here: a state that breaks an invariant goes to `broken`
and is not expanded; one with a step that leaves a domain or breaks a property of steps, also
one that changes nothing, goes to `events`.  `checker.native` then asks `checker.finite` what
happened.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import llvmlite.binding as llvm

from kvclaims.checker.grounded import Grounded, Node, Slot, Value
from kvclaims.checker.symmetry import Symmetry
from kvclaims.checker.symmetrycode import functions
from kvclaims.checker.visitedcode import REHASH, insert

CONTROL: Final = ("found", "limit", "mask", "shift", "events", "broken", "whole")
"""The fields of the array that `expand` reads and writes: states in the next level and how many
it may hold, for a hash table its size less one and 64 less its bits, states noted so far, and
under symmetry how many states the expanded ones stand for."""

_GROUP: Final = 8


@dataclass(frozen=True)
class Layout:
    """Where each slot stands in a state's number."""

    slots: tuple[Slot, ...]
    strides: tuple[int, ...]
    space: int

    @property
    def wide(self) -> bool:
        """A state's number needs 64 bits."""
        return self.space >= 1 << 31

    def encode(self, state: Sequence[int]) -> int:
        pairs = zip(self.slots, self.strides, state, strict=True)
        return sum((value - slot.lo) * stride for slot, stride, value in pairs)

    def decode(self, code: int) -> tuple[int, ...]:
        pairs = zip(self.slots, self.strides, strict=True)
        return tuple(slot.lo + code // stride % slot.size for slot, stride in pairs)


def layout(slots: Sequence[Slot], symmetry: Symmetry | None = None) -> Layout:
    """Domains of 2, 4, 8 … values come lowest: their digits are cut out by shifts.  What
    `symmetry` sorts comes last, column by column."""
    columns = [i for group in symmetry.inner for c in group for i in c] if symmetry else []
    others = (i for i in range(len(slots)) if i not in columns)
    strides = [1] * len(slots)
    space = 1
    for i in [*sorted(others, key=lambda i: slots[i].size.bit_count() != 1), *columns]:
        strides[i] = space
        space *= slots[i].size
    return Layout(tuple(slots), tuple(strides), space)


def batch(grounded: Grounded) -> int:
    """States whose successors are gathered before they are looked up."""
    return max(4, min(64, 2048 // max(len(grounded.steps), 1)))


@dataclass(frozen=True)
class Build:
    """Which code is wanted: with what set of visited states (`visitedcode`), whether rules are
    checked, whether threads share the set, and which states count as the same."""

    visited: str
    checked: bool = True
    shared: bool = False
    symmetry: Symmetry | None = None


def text(grounded: Grounded, where: Layout, build: Build) -> str:
    """The code of `expand`: all that a search does."""
    writer = _Writer(grounded, where, build)
    return "\n".join(writer.module(writer.expand()))


class Kernel:
    """The compiled functions of one instance."""

    def __init__(self, grounded: Grounded, where: Layout, build: Build) -> None:
        self._writer = _Writer(grounded, where, build)
        self._engine = _compile(text(grounded, where, build))
        address = self._engine.get_function_address
        span = [ctypes.c_int64, ctypes.c_int64]
        pointer = ctypes.c_void_p
        self.expand = ctypes.CFUNCTYPE(ctypes.c_int64, pointer, *span, *[pointer] * 6)(
            address("expand")
        )
        self.rehash = ctypes.CFUNCTYPE(None, pointer, ctypes.c_int64, pointer, *span)(
            address("rehash")
        )

    @cached_property
    def find(self) -> Callable[[int, int, int, int], int]:
        """Compiled where a run is to be shown."""
        self._finder = _compile("\n".join(self._writer.module(self._writer.find())))
        span = [ctypes.c_int64, ctypes.c_int64]
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *span, ctypes.c_int64)(
            self._finder.get_function_address("find")
        )

    @cached_property
    def absorb(self) -> Callable[[int, int, int, int, int], int]:
        """Compiled where states come from elsewhere: those not seen yet go to the next level.
        What is absorbed is overwritten."""
        self._absorber = _compile("\n".join(self._writer.module(self._writer.absorb())))
        pointer = ctypes.c_void_p
        return ctypes.CFUNCTYPE(ctypes.c_int64, pointer, ctypes.c_int64, pointer, pointer, pointer)(
            self._absorber.get_function_address("absorb")
        )


def _compile(text: str) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=2,
        codemodel="jitdefault",
    )
    module = llvm.parse_assembly(text)
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    llvm.create_pass_builder(machine, tuning).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, tuning)
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


class _Expressions:
    """Writes nodes as straight code; every node once."""

    def __init__(self, where: Layout, kind: str) -> None:
        self.where = where
        self.type = kind
        self.lines: list[str] = []
        self._done: dict[int, str] = {}
        self._count = 0

    def let(self, code: str) -> str:
        self._count += 1
        self.lines.append(f"%x{self._count} = {code}")
        return f"%x{self._count}"

    def truth(self, value: Value) -> str:
        if isinstance(value, int):
            return "true" if value else "false"
        if not value.truth:
            return self.let(f"icmp ne {self.type} {self.number(value)}, 0")
        return self._once(value)

    def number(self, value: Value) -> str:
        if isinstance(value, int):
            return str(value)
        done = self._once(value)
        return self.let(f"zext i1 {done} to {self.type}") if value.truth else done

    def _once(self, node: Node) -> str:
        if node.number not in self._done:
            self._done[node.number] = self._write(node)
        return self._done[node.number]

    def _write(self, node: Node) -> str:
        args: Any = node.args
        kind = self.type
        match node.kind:
            case "slot":
                lo = self.where.slots[args[0]].lo
                return self.let(f"add {kind} %d{args[0]}, {lo}") if lo else f"%d{args[0]}"
            case "in":
                return self._member(*args)
            case "not":
                return self.let(f"xor i1 {self.truth(args[0])}, true")
            case "and" | "or":
                result = self.truth(args[0])
                for part in args[1:]:
                    result = self.let(f"{node.kind} i1 {result}, {self.truth(part)}")
                return result
            case "sum":
                return self._sum(args)
            case "plus":
                return self.let(f"add {kind} {self.number(args[0])}, {args[1]}")
            case "le" | "eq":
                sign = "sle" if node.kind == "le" else "eq"
                return self.let(f"icmp {sign} {kind} {self.number(args[0])}, {args[1]}")
            case "if":
                condition, then, otherwise = self.truth(args[0]), *map(self.number, args[1:])
                return self.let(f"select i1 {condition}, {kind} {then}, {kind} {otherwise}")
        raise TypeError(f"not a node: {node!r}")

    def _sum(self, terms: Sequence[tuple[int, Node]]) -> str:
        result = ""
        for factor, part in terms:
            if part.truth:
                code = f"select i1 {self.truth(part)}, {self.type} {factor}, {self.type} 0"
                term = self.let(code)
            elif factor == 1:
                term = self.number(part)
            else:
                term = self.let(f"mul {self.type} {self.number(part)}, {factor}")
            result = self.let(f"add {self.type} {result}, {term}") if result else term
        return result

    def _member(self, slot: int, values: int) -> str:
        kind, digit = self.type, f"%d{slot}"
        runs = list(_runs(values))
        if len(runs) == 1:
            first, last = runs[0]
            if first == last:
                return self.let(f"icmp eq {kind} {digit}, {first}")
            moved = self.let(f"sub {kind} {digit}, {first}") if first else digit
            return self.let(f"icmp ule {kind} {moved}, {last - first}")
        if self.where.slots[slot].size <= 31:
            shifted = self.let(f"lshr {kind} {values}, {digit}")
            return self.let(f"trunc {kind} {shifted} to i1")
        result = self._member(slot, _span(*runs[0]))
        for run in runs[1:]:
            result = self.let(f"or i1 {result}, {self._member(slot, _span(*run))}")
        return result

    def shift(self, shifts: Sequence[tuple[int, Value]]) -> str:
        """What a step adds to a state's number."""
        known = 0
        result = ""
        for slot, value in shifts:
            stride = self.where.strides[slot]
            if isinstance(value, int):
                known += stride * value
                continue
            term = self.let(f"mul {self.type} {self.number(value)}, {stride}")
            result = self.let(f"add {self.type} {result}, {term}") if result else term
        if not result:
            return str(known)
        return self.let(f"add {self.type} {result}, {known}") if known else result


def _runs(values: int) -> Iterator[tuple[int, int]]:
    """The stretches of neighbouring values in a bit set."""
    place = 0
    while values:
        skip = (values & -values).bit_length() - 1
        place, values = place + skip, values >> skip
        length = (~values & (values + 1)).bit_length() - 1
        yield place, place + length - 1
        place, values = place + length, values >> length


def _span(first: int, last: int) -> int:
    return (1 << (last + 1)) - (1 << first)


class _Writer:
    def __init__(self, grounded: Grounded, where: Layout, build: Build) -> None:
        self.grounded = grounded
        self.where = where
        self.build = build
        self.checked = build.checked
        self.type = "i64" if where.wide else "i32"
        self.width = max(len(grounded.steps), 1)
        self.actions = [action.name for action in grounded.instance.machine.actions]

    def module(self, function: Iterator[str]) -> Iterator[str]:
        yield from function
        yield "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        if self.build.symmetry:
            sizes = [slot.size for slot in self.where.slots]
            yield from functions(self.build.symmetry, sizes, self.where.strides, self.type)

    # -- the part that both functions share

    def _digits(self) -> Iterator[str]:
        kind = self.type
        for i, (slot, stride) in enumerate(zip(self.where.slots, self.where.strides, strict=True)):
            if slot.size == 1:
                yield f"%d{i} = add {kind} 0, 0"
                continue
            yield f"%q{i} = udiv {kind} %code, {stride}"
            yield f"%d{i} = urem {kind} %q{i}, {slot.size}"

    def _successors(self, count: bool) -> Iterator[str]:
        """Digits, invariants, guards; the successors' numbers go to %buffer from place %n
        on; %fresh is the place after the last."""
        kind = self.type
        yield from self._digits()
        code = _Expressions(self.where, kind)
        sound = code.truth(self.grounded.invariant if self.checked else 1)
        yield from code.lines
        code.lines = []
        yield f"br i1 {sound}, label %whole, label %unsound"
        yield "whole:"
        weight = self._weight(code) if count else ""
        fired: dict[str, list[str]] = {}
        suspicious: list[str] = []
        if self.checked and self.grounded.idle != 1:
            suspicious.append(code.let(f"xor i1 {code.truth(self.grounded.idle)}, true"))
        base, fresh = "%n", "0"
        for number, step in enumerate(self.grounded.steps):
            guard = code.truth(step.guard)
            fired.setdefault(step.action, []).append(guard)
            fine = [code.truth(v) for v in self._conditions(step.inside, step.kept) if v != 1]
            taken = guard
            if fine:
                for part in fine:
                    taken = code.let(f"and i1 {taken}, {part}")
                suspicious.append(code.let(f"xor i1 {guard}, {taken}"))
            after = code.let(f"add {kind} %code, {code.shift(step.shifts)}")
            if number % _GROUP == 0:
                # Places within a group do not wait for the groups before.
                base, fresh = code.let(f"add i64 {base}, {fresh}"), "0"
                group = code.let(f"getelementptr {kind}, ptr %buffer, i64 {base}")
            place = code.let(f"getelementptr {kind}, ptr {group}, i64 {fresh}")
            code.lines.append(f"store {kind} {after}, ptr {place}")
            more = code.let(f"zext i1 {taken} to i64")
            fresh = code.let(f"add i64 {fresh}, {more}")
        if count:
            self._count(code, fired, weight)
        odd = "false"
        for part in suspicious:
            odd = code.let(f"or i1 {odd}, {part}")
        yield from code.lines
        yield f"%fresh = add i64 {base}, {fresh}"
        yield f"%odd = or i1 {odd}, false"

    def _conditions(self, inside: Value, kept: Value) -> tuple[Value, Value]:
        return inside, (kept if self.checked else 1)

    def _weight(self, code: _Expressions) -> str:
        """How many states this one stands for, empty where each counts as itself."""
        if not self.build.symmetry:
            return ""
        weight = code.let(f"call i64 @orbit({self.type} %code)")
        before = code.let("load i64, ptr %p_whole")
        code.lines.append(f"store i64 {code.let(f'add i64 {before}, {weight}')}, ptr %p_whole")
        return weight

    def _count(self, code: _Expressions, fired: dict[str, list[str]], weight: str) -> None:
        for name, guards in fired.items():
            total = "0"
            for guard in guards:
                one = code.let(f"zext i1 {guard} to i64")
                total = code.let(f"add i64 {total}, {one}")
            if weight:
                total = code.let(f"mul i64 {total}, {weight}")
            place = code.let(f"getelementptr i64, ptr %fired, i64 {self.actions.index(name)}")
            before = code.let(f"load i64, ptr {place}")
            after = code.let(f"add i64 {before}, {total}")
            code.lines.append(f"store i64 {after}, ptr {place}")

    # -- the functions

    def expand(self) -> Iterator[str]:
        kind = self.type
        seen = "ptr %seen" if self.build.shared else "ptr noalias %seen"
        yield (
            f"define i64 @expand(ptr noalias %front, i64 %from, i64 %to, {seen}, "
            "ptr noalias %next, ptr noalias %control, ptr noalias %fired, ptr noalias %events, "
            "ptr noalias %broken) {"
        )
        yield "entry:"
        yield f"%buffer = alloca [{batch(self.grounded) * self.width} x {kind}], align 64"
        yield from _controls()
        yield "br label %head"
        yield "head:"
        yield "%k = phi i64 [%from, %entry], [%k1, %moved]"
        yield "%m = phi i64 [%c_found, %entry], [%m_out, %moved]"
        yield "%left = icmp slt i64 %k, %to"
        yield "%room = icmp sle i64 %m, %c_limit"
        yield "%go = and i1 %left, %room"
        yield "br i1 %go, label %start, label %exit"
        yield "start:"
        yield f"%k_full = add i64 %k, {batch(self.grounded)}"
        yield "%short = icmp slt i64 %to, %k_full"
        yield "%k_end = select i1 %short, i64 %to, i64 %k_full"
        yield "br label %body"
        yield "body:"
        yield "%kk = phi i64 [%k, %start], [%k1, %latch]"
        yield "%n = phi i64 [0, %start], [%n_out, %latch]"
        yield f"%p_code = getelementptr {kind}, ptr %front, i64 %kk"
        yield f"%code = load {kind}, ptr %p_code"
        yield from self._successors(count=True)
        yield "br i1 %odd, label %event, label %latch"
        yield "event:"
        yield from _note("event", "events", kind)
        yield "br label %latch"
        yield "unsound:"
        yield from _note("unsound", "broken", kind)
        yield "br label %latch"
        yield "latch:"
        yield "%n_out = phi i64 [%n, %unsound], [%fresh, %whole], [%fresh, %event]"
        yield "%k1 = add i64 %kk, 1"
        yield "%again_k = icmp slt i64 %k1, %k_end"
        yield "br i1 %again_k, label %body, label %filled"
        yield "filled:"
        yield "%any = icmp ne i64 %n_out, 0"
        first = "rename" if self.build.symmetry else "sift"
        yield f"br i1 %any, label %{first}, label %moved"
        if self.build.symmetry:
            yield from self._rename()
        came = "renamed" if self.build.symmetry else "filled"
        yield from insert(self.build.visited, kind, came, self.build.shared)
        yield "br label %moved"
        yield "moved:"
        yield "%m_out = phi i64 [%m, %filled], [%m1, %inserted]"
        yield "br label %head"
        yield "exit:"
        yield "store i64 %m, ptr %p_found"
        yield "ret i64 %k"
        yield "}"
        yield from REHASH.splitlines()

    def _rename(self) -> Iterator[str]:
        """Every successor becomes the representative of its orbit."""
        kind = self.type
        yield "rename:"
        yield "%jr = phi i64 [0, %filled], [%jr1, %rename]"
        yield f"%p_r = getelementptr {kind}, ptr %buffer, i64 %jr"
        yield f"%tr = load {kind}, ptr %p_r"
        yield f"%least = call {kind} @representative({kind} %tr)"
        yield f"store {kind} %least, ptr %p_r"
        yield "%jr1 = add i64 %jr, 1"
        yield "%again_r = icmp slt i64 %jr1, %n_out"
        yield "br i1 %again_r, label %rename, label %renamed"
        yield "renamed:"
        yield "br label %sift"

    def absorb(self) -> Iterator[str]:
        yield (
            "define i64 @absorb(ptr noalias %buffer, i64 %n_out, ptr noalias %seen, "
            "ptr noalias %next, ptr noalias %control) {"
        )
        yield "entry:"
        yield from _controls()
        yield "%m = add i64 %c_found, 0"
        yield "%any = icmp ne i64 %n_out, 0"
        yield "br i1 %any, label %filled, label %moved"
        yield "filled:"
        yield "br label %sift"
        yield from insert(self.build.visited, self.type, "filled", shared=False)
        yield "br label %moved"
        yield "moved:"
        yield "%m_out = phi i64 [%m, %entry], [%m1, %inserted]"
        yield "ret i64 %m_out"
        yield "}"

    def find(self) -> Iterator[str]:
        kind = self.type
        yield "define i64 @find(ptr noalias %front, i64 %from, i64 %to, i64 %target) {"
        yield "entry:"
        yield f"%buffer = alloca [{self.width} x {kind}], align 64"
        yield f"%wanted = {'add' if self.where.wide else 'trunc'} i64 %target" + (
            ", 0" if self.where.wide else " to i32"
        )
        yield "%n = add i64 0, 0"
        yield "br label %head"
        yield "head:"
        yield "%k = phi i64 [%from, %entry], [%k1, %latch]"
        yield "%more = icmp slt i64 %k, %to"
        yield "br i1 %more, label %body, label %absent"
        yield "body:"
        yield f"%p_code = getelementptr {kind}, ptr %front, i64 %k"
        yield f"%code = load {kind}, ptr %p_code"
        yield from self._successors(count=False)
        yield "br label %look"
        yield "look:"
        yield "%j = phi i64 [0, %whole], [%j1, %compare]"
        yield "%left = icmp slt i64 %j, %fresh"
        yield "br i1 %left, label %compare, label %latch"
        yield "compare:"
        yield f"%p_t = getelementptr {kind}, ptr %buffer, i64 %j"
        if self.build.symmetry:
            yield f"%tr = load {kind}, ptr %p_t"
            yield f"%t = call {kind} @representative({kind} %tr)"
        else:
            yield f"%t = load {kind}, ptr %p_t"
        yield f"%hit = icmp eq {kind} %t, %wanted"
        yield "%j1 = add i64 %j, 1"
        yield "br i1 %hit, label %present, label %look"
        yield "unsound:"
        yield "br label %latch"
        yield "latch:"
        yield "%k1 = add i64 %k, 1"
        yield "br label %head"
        yield "present:"
        yield "ret i64 %k"
        yield "absent:"
        yield "ret i64 -1"
        yield "}"


def _controls() -> Iterator[str]:
    for place, name in enumerate(CONTROL):
        yield f"%p_{name} = getelementptr i64, ptr %control, i64 {place}"
        yield f"%c_{name} = load i64, ptr %p_{name}"


def _note(prefix: str, array: str, kind: str) -> Iterator[str]:
    """Keep the state for a closer look; a call notes each state once at most."""
    yield f"%{prefix}_n = load i64, ptr %p_{array}"
    yield f"%{prefix}_p = getelementptr {kind}, ptr %{array}, i64 %{prefix}_n"
    yield f"store {kind} %code, ptr %{prefix}_p"
    yield f"%{prefix}_n1 = add i64 %{prefix}_n, 1"
    yield f"store i64 %{prefix}_n1, ptr %p_{array}"
