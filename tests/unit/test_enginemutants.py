"""Mutants of an engine's source: drawn by a seed, planted in the live function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvclaims.checker.enginemutants import (
    Place,
    Places,
    all_mutants,
    places_of,
    plant,
    read_places,
    sample,
)
from kvclaims.checker.engines import find
from kvclaims.checker.faults import FaultError
from kvclaims.spec.interface import BadOperation

SOURCE = """\
LIMIT = 3


class Queue:
    size: int = 0

    def is_short(self, n: int) -> bool:
        return n < LIMIT

    def longest(self, items):
        def key(item):
            return len(item) + 1
        return max(items, key=key)


def half(n: int) -> int:
    return n // 2
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, ModuleType]]:
    folder = tmp_path / "engine_under_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "queue.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path, importlib.import_module("engine_under_test.queue")
    for name in ("engine_under_test.queue", "engine_under_test"):
        del sys.modules[name]


PLACE = Place("engine_under_test/queue.py")


def places(*only: str, count: int = 3, seed: int = 1) -> Places:
    return Places((Place(PLACE.path, only),), count, seed)


def test_statements_of_modules_and_classes_are_left_out(made: tuple[Path, ModuleType]) -> None:
    functions = {m.function for m in all_mutants(places(), made[0])}
    assert functions == {"Queue.is_short", "Queue.longest", "Queue.longest.key", "half"}


def test_a_class_stands_for_its_methods_and_a_method_for_what_is_inside(
    made: tuple[Path, ModuleType],
) -> None:
    of_class = {m.function for m in all_mutants(places("Queue"), made[0])}
    assert of_class == {"Queue.is_short", "Queue.longest", "Queue.longest.key"}
    of_method = {m.function for m in all_mutants(places("Queue.longest"), made[0])}
    assert of_method == {"Queue.longest", "Queue.longest.key"}


def test_a_function_that_is_named_and_gone_is_an_error(made: tuple[Path, ModuleType]) -> None:
    with pytest.raises(BadOperation, match=r"has no Queue\.gone that could be changed"):
        list(all_mutants(places("Queue.gone"), made[0]))


def test_the_same_seed_draws_the_same_mutants(made: tuple[Path, ModuleType]) -> None:
    first, total = sample(places(seed=7), made[0])
    again, _ = sample(places(seed=7), made[0])
    other, _ = sample(places(seed=8), made[0])
    assert (len(first), total) == (3, 11)
    assert first == again
    assert first != other


def test_a_mutant_is_planted_in_the_live_function(made: tuple[Path, ModuleType]) -> None:
    root, module = made
    queue = module.Queue()
    found = {m.name: m for m in all_mutants(places(), root)}
    flipped = next(m for name, m in found.items() if "n < LIMIT ⇒ n <= LIMIT" in name)
    assert not queue.is_short(3)
    plant(flipped)
    assert queue.is_short(3)


def test_what_stands_inside_of_a_function_is_planted_with_it(
    made: tuple[Path, ModuleType],
) -> None:
    root, module = made
    inner = list(all_mutants(places("Queue.longest.key"), root))
    by_none = next(m for m in inner if m.operator == "return another value")
    plant(by_none)
    with pytest.raises(TypeError):
        module.Queue().longest(["a", "bb"])


def test_a_function_that_is_not_there_any_more_is_an_error(made: tuple[Path, ModuleType]) -> None:
    root, module = made
    mutant = next(m for m in all_mutants(places("half"), root))
    del module.half  # type: ignore[attr-defined]
    with pytest.raises(FaultError, match="no function half"):
        plant(mutant)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count = 3", "lacks or mistakes 'seed'|lacks or mistakes 'module'"),
        ("count = 0\nseed = 1\n[[module]]\npath = 'x.py'", "needs a module and a count"),
        ("count = ", "lacks or mistakes"),
    ],
)
def test_malformed_places(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mutants.toml"
    path.write_text(text)
    with pytest.raises(BadOperation, match=message):
        read_places(path)


def test_the_places_of_vllm_are_enough_for_a_comparison() -> None:
    found = places_of(find("vllm"))
    assert found.count >= 150
    assert [Path(place.path).name for place in found.modules] == [
        *("block_pool.py", "kv_cache_utils.py", "kv_cache_manager.py"),
        *("single_type_kv_cache_manager.py", "kv_cache_coordinator.py", "scheduler.py"),
    ]
