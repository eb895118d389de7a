"""A violation is shown at the line of vLLM that made the breaking call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclaims.checker.engines import ready
from kvclaims.checker.faults import named, planted
from kvclaims.checker.locating import Place, locate
from kvclaims.checker.supervise import oracle_for, supervise
from kvclaims.spec.interface import Engine, EngineMissing

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def vllm() -> Iterator[Engine]:
    try:
        yield ready("vllm")[0]
    except EngineMissing as error:
        pytest.skip(str(error))


def places_of(fault_id: str, engine: Engine) -> tuple[Place, ...]:
    fault = named(fault_id, engine)
    assert fault.program is not None
    with planted(fault, engine):
        finding = supervise(engine, oracle_for(engine), fault.program)[0]
        return locate(engine, fault.program, finding)


def statement(place: Place, engine: Engine) -> str:
    """The source of the smallest statement around a place."""
    text = (Path(engine.info().path).parent / place.file).read_text(encoding="utf-8")
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= place.line <= (node.end_lineno or 0)
    ]
    smallest = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return ast.unparse(smallest)


def test_an_allocator_step_is_shown_where_the_engine_asked_for_it(vllm: Engine) -> None:
    first, *callers = places_of("freed-twice", vllm)
    assert first.function == "SingleTypeKVCacheManager.free"
    assert "free_blocks(" in statement(first, vllm)
    assert callers[0].function == "KVCacheCoordinator.free"
    assert all(place.file.startswith("vllm/") for place in callers)


def test_what_is_asked_for_from_outside_is_shown_at_the_function_itself(vllm: Engine) -> None:
    (only,) = places_of("touch-not-counted", vllm)
    assert only.function == "BlockPool.touch"
    assert only.file == "vllm/v1/core/block_pool.py"


def test_an_exception_is_shown_where_it_was_raised(vllm: Engine) -> None:
    first, *callers = places_of("abort-in-the-queue-raises", vllm)
    assert first.function.endswith("pop_blocks_for_free")
    assert "req_to_blocks.pop(request_id" in statement(first, vllm)
    assert any(place.function.endswith("finish_requests") for place in callers)
