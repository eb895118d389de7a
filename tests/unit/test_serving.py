"""What requests are served: memory that holds something else is seen, by its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvclaims.checker.engines import find
from kvclaims.checker.supervise import Supervisor, features_of
from kvclaims.spec.interface import Feature, PoolConfig, Runtime
from kvclaims.spec.operations import parse

REFERENCE = find("reference")
POOL = PoolConfig(usable=6, block_size=4)


class Spoiled:
    """A reference runtime whose memory reads as `spoil` makes it."""

    def __init__(self, spoil: Callable[[int, int], int]) -> None:
        self._runtime = REFERENCE.open(POOL, "spoiled")
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def fingerprint(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        real = self._runtime.fingerprint(blocks)
        return tuple(self._spoil(b, d) for b, d in zip(blocks, real, strict=True))


def supervised(spoil: Callable[[int, int], int], features: frozenset[Feature]) -> Supervisor:
    runtime: Runtime = Spoiled(spoil)  # type: ignore[assignment]
    return Supervisor(runtime, features=features)


def found(supervisor: Supervisor, *operations: dict[str, Any]) -> list[str]:
    for operation in operations:
        supervisor.do(parse(operation))
    return [finding.rule for finding in supervisor.findings]


SUBMIT = {"op": "submit", "request": "r", "content": [["A", 2, 1]], "max_new_tokens": 3}
STEP = {"op": "step"}
DECLARE = {"op": "declare", "claim": "c", "content": [["A", 2]], "n": 2}
EXACT = features_of(REFERENCE)


def test_memory_as_written_is_right() -> None:
    supervisor = supervised(lambda _, digest: digest, EXACT)
    assert found(supervisor, SUBMIT, STEP, DECLARE, STEP) == []
    assert supervisor.serving.reads > 8


@pytest.mark.parametrize(
    ("block", "digest", "rules"),
    [
        (1, 0, ["B4", "B4"]),  # found under its content, and read by the request
        (2, 7, ["B4", "B5"]),
        (3, 0, ["B4"]),  # part of a block: only the request reads it
    ],
)
def test_a_block_that_holds_something_else(block: int, digest: int, rules: list[str]) -> None:
    supervisor = supervised(lambda b, d: digest if b == block else d, EXACT)
    assert found(supervisor, SUBMIT, STEP) == rules


def test_a_protected_block_that_is_written_over() -> None:
    broken: list[int] = []
    supervisor = supervised(lambda b, d: 7 if b in broken else d, EXACT)
    assert found(supervisor, SUBMIT, STEP, DECLARE) == []
    broken.append(1)
    assert found(supervisor, STEP)[0] == "P1"


def test_digests_that_mean_nothing_are_learned() -> None:
    """The same content has to have the same bytes; the first writer says which."""
    other: list[int] = []
    supervisor = supervised(lambda b, d: d + 1 if b in other else d, EXACT - {Feature.FINGERPRINTS})
    assert found(supervisor, SUBMIT, STEP) == []
    other.append(2)
    assert found(supervisor, STEP)[0] == "B4"


def test_a_claim_is_not_materialized_by_what_is_still_to_be_written() -> None:
    supervisor = Supervisor(REFERENCE.open(POOL, "run"), features=EXACT)
    assert found(supervisor, SUBMIT, {"op": "dispatch"}, DECLARE, {"op": "complete"}) == []
    assert supervisor.seen.claims["c"].phase == "materialized"
