"""Representatives of orbits as LLVM text: what `checker.symmetry` does, on numbers of states.

`@representative` renames a state to the least number of its orbit, `@orbit` says how many states
a representative stands for.  Columns lie together in a state's number (`machinecode.layout`), so
that sorting them is a network of comparisons on parts of the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from kvclaims.checker.symmetry import Symmetry


def functions(
    symmetry: Symmetry, sizes: Sequence[int], strides: Sequence[int], kind: str
) -> Iterator[str]:
    """Both functions, for slots with `sizes` values that stand at `strides`; `kind` is i32 or
    i64."""
    for name, result in (("representative", kind), ("orbit", "i64")):
        code = _Code(symmetry, sizes, strides, kind)
        yield f"define internal {result} @{name}({kind} %code) {{"
        value = code.representative() if name == "representative" else code.orbit()
        yield from code.lines
        yield f"ret {result} {value}"
        yield "}"


class _Code:
    def __init__(
        self, symmetry: Symmetry, sizes: Sequence[int], strides: Sequence[int], kind: str
    ) -> None:
        self.symmetry = symmetry
        self.sizes = sizes
        self.strides = strides
        self.kind = kind
        self.lines: list[str] = []
        self.columns = [column for group in symmetry.inner for column in group]
        inner = {slot for column in self.columns for slot in column}
        self.others = [slot for slot in range(len(sizes)) if slot not in inner]
        self._digits: dict[int, str] = {}

    def let(self, code: str) -> str:
        name = f"%y{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return name

    def representative(self) -> str:
        candidates = self._candidates()
        least = candidates[0]
        for other in candidates[1:]:
            less = self.let(f"icmp ult {self.kind} {other}, {least}")
            least = self.let(f"select i1 {less}, {self.kind} {other}, {self.kind} {least}")
        return least

    def orbit(self) -> str:
        """Columns of a representative are sorted: equal ones stand side by side."""
        fixing = "0"
        for candidate in self._candidates():
            same = self.let(f"icmp eq {self.kind} {candidate}, %code")
            fixing = self.let(f"add i64 {fixing}, {self.let(f'zext i1 {same} to i64')}")
        for group in self.symmetry.inner:
            keys = [self._key(column) for column in group]
            run = "1"
            for before, key in pairwise(keys):
                same = self.let(f"icmp eq {self.kind} {before}, {key}")
                longer = self.let(f"add i64 {run}, 1")
                run = self.let(f"select i1 {same}, i64 {longer}, i64 1")
                fixing = self.let(f"mul i64 {fixing}, {run}")
        return self.let(f"udiv i64 {self.symmetry.order}, {fixing}")

    def _candidates(self) -> list[str]:
        first, *others = self.symmetry.outer
        result = ["%code"]
        assert first == tuple(range(len(self.sizes)))
        for group in self.symmetry.inner:
            keys = [self._key(column) for column in group]
            for column, old, new in zip(group, keys, self._sorted(keys), strict=True):
                moved = self.let(f"sub {self.kind} {new}, {old}")
                result[0] = self._plus(result[0], moved, self.strides[column[0]])
        return result + [self._renamed(renaming) for renaming in others]

    def _renamed(self, renaming: Sequence[int]) -> str:
        result = "0"
        for slot in self.others:
            result = self._plus(result, self._digit(renaming[slot]), self.strides[slot])
        for group in self.symmetry.inner:
            keys = []
            for column in group:
                key, stride = "0", 1
                for slot in column:
                    key = self._plus(key, self._digit(renaming[slot]), stride)
                    stride *= self.sizes[slot]
                keys.append(key)
            for column, key in zip(group, self._sorted(keys), strict=True):
                result = self._plus(result, key, self.strides[column[0]])
        return result

    def _sorted(self, keys: Sequence[str]) -> list[str]:
        """By exchanging neighbours: classes are small."""
        row = list(keys)
        for end in range(len(row) - 1, 0, -1):
            for i in range(end):
                swap = self.let(f"icmp ugt {self.kind} {row[i]}, {row[i + 1]}")
                low, high = (f"{self.kind} {row[i]}", f"{self.kind} {row[i + 1]}")
                row[i] = self.let(f"select i1 {swap}, {high}, {low}")
                row[i + 1] = self.let(f"select i1 {swap}, {low}, {high}")
        return row

    def _plus(self, result: str, value: str, stride: int) -> str:
        term = self.let(f"mul {self.kind} {value}, {stride}")
        return self.let(f"add {self.kind} {result}, {term}")

    def _key(self, column: Sequence[int]) -> str:
        size = prod(self.sizes[slot] for slot in column)
        return self._part(self.strides[column[0]], size)

    def _digit(self, slot: int) -> str:
        if slot not in self._digits:
            self._digits[slot] = self._part(self.strides[slot], self.sizes[slot])
        return self._digits[slot]

    def _part(self, stride: int, size: int) -> str:
        above = self.let(f"udiv {self.kind} %code, {stride}")
        return self.let(f"urem {self.kind} {above}, {size}")
