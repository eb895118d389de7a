"""Benchmarks keep what they measured, and say when it became worse."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "figures")


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", FOLDER / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("better", "kept", "now", "worse"),
    [
        ("more", 100.0, 61.0, False),
        ("more", 100.0, 59.0, True),
        ("less", 60.0, 99.0, False),
        ("less", 60.0, 101.0, True),
        ("less", 0.0, 1.0, True),
        ("more", 0.0, 1.0, False),
        ("same", 38.0, 38.0, False),
        ("same", 38.0, 39.0, True),
    ],
)
def test_when_a_figure_is_worse(
    figures: ModuleType, better: str, kept: float, now: float, worse: bool
) -> None:
    figure = figures.Figure("f", now, "unit", better)
    lines, fine = figures.compare([figure], {"f": {"value": kept}})
    assert (figure.is_worse(kept), fine) == (worse, not worse)
    assert lines[0].endswith(" WORSE") is worse


def test_nothing_compared_is_not_fine(figures: ModuleType) -> None:
    figure = figures.Figure("new", 1.0, "unit", "more")
    lines, fine = figures.compare([figure], {"old": {"value": 1.0}})
    assert lines == [
        "new: 1 unit, not kept before",
        "nothing to compare: no figure is in both",
    ]
    assert not fine


def test_what_is_kept_is_read_again_and_the_rest_of_the_file_stays(
    figures: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "kept.json"
    figures.save(
        [figures.Figure("a", 1.5, "s", "less"), figures.Figure("b", 2.0, "s", "less")], file
    )
    figures.save([figures.Figure("b", 3.0, "s", "less")], file)
    kept = figures.load(file)
    assert {name: one["value"] for name, one in kept.items()} == {"a": 1.5, "b": 3.0}
    assert all("cores, load" in one["measured"] for one in kept.values())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": 3}', '{"figures": {"a": {}}}'])
def test_a_file_without_figures_is_one_line(
    figures: ModuleType, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text)
    given = argparse.Namespace(compare=file, save=None)
    assert figures.finish([figures.Figure("a", 1.0, "s", "less")], given) == 2
    assert capsys.readouterr().err == f"benchmark: {file}: no figures of a benchmark\n"


def test_figures_are_numbers_and_have_names_of_their_own(
    figures: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no figure"):
        figures.Figure("a", float("nan"), "s", "less")
    twice = [figures.Figure("a", 1.0, "s", "less")] * 2
    with pytest.raises(ValueError, match="one name"):
        figures.save(twice, tmp_path / "kept.json")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_baseline_and_compares_with_it(
    figures: ModuleType, name: str
) -> None:
    kept = figures.load(FOLDER / "baselines" / f"{name}.json")
    assert kept
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert f'figures.options(parser, "{name}")' in source
    assert "figures.finish(" in source


def arbiter(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "arbiter.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_benchmark_is_held_against_its_baseline(tmp_path: Path) -> None:
    same = arbiter("--compare")
    assert same.returncode == 0, same.stderr
    assert len(same.stderr.splitlines()) == 14
    file = tmp_path / "kept.json"
    assert arbiter("--save", str(file)).returncode == 0
    whole: dict[str, Any] = json.loads(file.read_text())
    whole["figures"]["more capacity in 80"]["value"] += 1
    file.write_text(json.dumps(whole))
    other = arbiter("--compare", str(file))
    assert other.returncode == 1
    assert "more capacity in 80: 37 utility, kept 38 WORSE" in other.stderr.splitlines()
