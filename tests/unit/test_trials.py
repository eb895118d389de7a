"""Trials that an engine brings: how many are drawn, what is told of them, and the file of one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvclaims.checker import replay, trials
from kvclaims.checker.baseline import KnownFinding, SpecifierSet, re
from kvclaims.checker.engines import find
from kvclaims.checker.trials import Trial, attempt
from kvclaims.checker.verdicts import Violation
from kvclaims.spec.interface import BadOperation, Engine, EngineInfo, NotExposed
from kvclaims.spec.vocabulary import Verdict


@dataclass
class Made:
    """Two kinds of trials: `breaks` says which numbers break a rule."""

    breaks: frozenset[int] = frozenset()
    lacks: str = ""
    kinds = ("plain", "odd")
    operations = ("submit", "step", "never")

    def run(self, seed: int, number: int) -> Trial:
        kind = self.kinds[number % 2]
        if kind == self.lacks:
            raise NotExposed(f"{kind} things")
        found = None
        if number in self.breaks:
            found = Violation("B4", f"seed {seed} is wrong", operation=2)
        return Trial(kind, "a pool", ("submit r", "step"), Counter(submit=1, step=1), found)


def nothing(_rule: str, _text: str) -> None:
    return None


def test_there_is_one_of_each_kind_at_least_and_no_more_than_asked_for() -> None:
    assert attempt(Made(), 0, nothing, 0).runs == {"plain": 1, "odd": 1}
    assert attempt(Made(), 0, nothing, 5).runs == {"plain": 3, "odd": 2}
    assert attempt(Made(), 0, nothing, 5, until=0.0).runs == {"plain": 1, "odd": 1}


def test_what_no_run_has_done_is_told_but_where_a_kind_is_missing() -> None:
    tried = attempt(Made(), 0, nothing, 4)
    assert (tried.never, tried.done) == (("never",), {"submit": 4, "step": 4})
    assert list(tried.lines()) == [
        "  4 trials of 2 kinds, 8 operations",
        "  never done in them: never",
    ]
    tried = attempt(Made(lacks="odd"), 0, nothing, 4)
    assert (tried.never, list(tried.not_exposed)) == ((), ["trial: odd things"])


def test_the_first_that_breaks_a_rule_ends_them() -> None:
    tried = attempt(Made(frozenset({3, 4})), 7, nothing, 20)
    assert tried.failure is not None
    assert (tried.number, sum(tried.runs.values())) == (3, 4)
    assert list(trials.shown(tried.failure))[1:] == [
        "  odd, a pool; broken in operation 2 of:",
        "      1 submit r",
        "      2 step",
    ]


def test_what_is_known_is_counted_and_ends_nothing() -> None:
    known = KnownFinding("old", "B4", "made", SpecifierSet(">=0"), re.compile("step: seed"), "so")

    def permitted(rule: str, text: str) -> KnownFinding | None:
        return known if known.covers("made", "1.0", rule, text) else None

    tried = attempt(Made(frozenset({1, 2})), 0, permitted, 6)
    assert (tried.failure, tried.allowed, sum(tried.runs.values())) == (None, {"old": 2}, 6)


@dataclass(frozen=True)
class MadeEngine:
    """The reference, with trials."""

    trials: Made
    name: str = "reference"

    def info(self) -> EngineInfo:
        return EngineInfo("reference", "1.0", "/nowhere")


def test_a_kept_trial_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = (MadeEngine(Made(b)) for b in (frozenset({3}), frozenset[int]()))
    found = broken.trials.run(5, 3)
    path = trials.write(tmp_path, broken.info(), 5, 3, found)
    assert path.name == "reference-trial3-seed5-B4.json"
    engine: Engine = find("reference")
    with pytest.raises(BadOperation, match="reference has no trials"):
        replay.replay(path)
    for made, verdict in ((broken, Verdict.VIOLATED), (whole, Verdict.HOLDS)):
        monkeypatch.setattr(replay.engines, "ready", lambda _, made=made: (made, made.info()))
        report = replay.replay(path)
        assert report.verdict is verdict
        assert report.to_json()["operations"] == 2
        assert list(report.lines())[-1] == verdict
    assert engine.name == "reference"


@pytest.mark.parametrize(
    ("field", "value"), [("seed", "5"), ("rule", "B99"), ("trial", True), ("version", None)]
)
def test_a_file_of_a_trial_that_cannot_be_read_is_said_so(
    tmp_path: Path, field: str, value: object
) -> None:
    path = trials.write(tmp_path, EngineInfo("e", "1", "/"), 5, 3, Made(frozenset({3})).run(5, 3))
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(BadOperation, match="not a trial of this format"):
        trials.read(path)


def test_files_of_programs_are_no_trials(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    assert trials.read(path) is None
    path.write_text("{}")
    assert trials.read(path) is None
