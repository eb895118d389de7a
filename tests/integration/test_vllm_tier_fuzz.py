"""Random acts on offloadable claims and the files that keep them; what is planted is found."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_world import NEEDS_VLLM

from kvclaims.spec.interface import EngineInfo
from kvclaims.spec.vocabulary import Verdict

pytestmark = NEEDS_VLLM

INFO = EngineInfo("vllm", "here", "here")


def fuzz(acts: int, seed: int = 0, output: Path | None = None) -> Any:
    from kvclaims.bridge.vllm import tierfuzz

    return tierfuzz.fuzz(INFO, acts, None, seed, lambda _: None, output)


def test_nothing_is_found_and_everything_is_met() -> None:
    report = fuzz(6000)
    assert report.verdict is Verdict.HOLDS, list(report.lines())
    assert report.never_met == []
    assert report.to_json()["violations"] == []


def test_too_few_acts_to_meet_everything_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm import tierfuzz

    monkeypatch.setattr(tierfuzz, "MET_FROM", 1)
    report = fuzz(50)
    assert report.verdict is Verdict.VACUOUS
    assert any("never met" in line for line in report.lines())


def test_a_version_without_the_interface_has_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.delattr(KVConnectorBase_V1, "has_pending_push_work")
    report = fuzz(50)
    assert report.verdict is Verdict.NOT_EXPOSED
    assert "a tier, in this version" in report.to_json()["not_exposed"][0]


# -- what is planted -------------------------------------------------------------------------------


def no_look(patch: pytest.MonkeyPatch) -> None:
    """A copy is served without a look at its checksum."""
    from kvclaims.bridge.serving.tierfiles import TierFiles

    patch.setattr(TierFiles, "_check", lambda *_: None)


def counted_at_once(patch: pytest.MonkeyPatch) -> None:
    """A copy counts when it is ordered, not when it is published."""
    from kvclaims.bridge.vllm.tier import Saved, Tier

    orders = Tier.orders

    def hasty(self: Tier, *args: Any) -> Any:
        told = orders(self, *args)
        from kvclaims.bridge.vllm.tier import Results

        self.saved(Results(self.life, {move.name: Saved() for move in told[0].saves}))
        return told

    patch.setattr(Tier, "orders", hasty)


def copied_late(patch: pytest.MonkeyPatch) -> None:
    """A block is copied off the device when its file is written, not in its step."""
    from kvclaims.bridge.vllm.tierworker import TierWorker

    def late(self: Any, moves: Sequence[Any]) -> None:
        for move in moves:
            self.queue.write(move.name, Late(self._device, move.block))

    patch.setattr(TierWorker, "save", late)


class Late(list[Any]):
    """The content of a block, looked up when somebody asks."""

    def __init__(self, device: Any, block: int) -> None:
        super().__init__()
        self._look: Callable[[], Any] = lambda: device.take([block])[0]

    def __iter__(self) -> Any:
        return iter(self._look())


def any_room(patch: pytest.MonkeyPatch) -> None:
    """More is promised than the tier has room for."""
    from kvclaims.bridge.vllm.tier import Tier

    patch.setattr(Tier, "fits", lambda _, contents: len(contents))


def promised_copies_go(patch: pytest.MonkeyPatch) -> None:
    """Room is made of copies that are promised."""
    from kvclaims.bridge.vllm.tier import Tier

    spare = Tier._spare
    patch.setattr(Tier, "_spare", lambda self: next(iter(self._copies), None) or spare(self))


def no_quota(patch: pytest.MonkeyPatch) -> None:
    """What an owner was promised is forgotten."""
    from kvclaims.bridge.vllm.limits import TierShare

    patch.setattr(TierShare, "take", lambda *_: None)
    patch.setattr(TierShare, "give", lambda *_: None)


def no_limit(patch: pytest.MonkeyPatch) -> None:
    """The limit in bytes is not looked at."""
    from kvclaims.bridge.serving.tierfiles import TierFiles

    patch.setattr(TierFiles, "_check_limit", lambda *_: None)


def loads_are_good(patch: pytest.MonkeyPatch) -> None:
    """A load that failed is told to be good."""
    from kvclaims.bridge.vllm.tierworker import TierWorker

    end = TierWorker._end

    def good(self: Any, number: int, load: Any, _: int, reason: str = "") -> None:
        end(self, number, load, len(load.moves), reason)

    patch.setattr(TierWorker, "_end", good)


def blamed_on_all(patch: pytest.MonkeyPatch) -> None:
    """A restore that failed is told of every claim that is being restored."""
    from kvclaims.bridge.vllm.offloading import Offloading
    from kvclaims.spec.vocabulary import Phase

    def everybody(self: Any, contents: list[str], phase: Phase) -> list[str]:
        return [c for c, claim in self._book.claims.items() if claim.phase is phase]

    patch.setattr(Offloading, "_owners", everybody)


def rests_stay(patch: pytest.MonkeyPatch) -> None:
    """An engine that starts keeps what another has left."""
    from kvclaims.bridge.serving.tierfiles import TierFiles

    clear = TierFiles.clear
    patch.setattr(TierFiles, "clear", lambda self: clear(self) if self.life else None)


def a_reset_spares_the_tier(patch: pytest.MonkeyPatch) -> None:
    """A reset of the prefix cache leaves the tier as it is."""
    from kvclaims.bridge.vllm.offloading import Offloading

    patch.setattr(Offloading, "cleared", lambda _: None)


def computed_is_restored(patch: pytest.MonkeyPatch) -> None:
    """Content that was computed anew is told to be restored."""
    from kvclaims.bridge.vllm.claims import ClaimBook

    def restored(self: Any, claim: Any) -> None:
        claim.away.clear()
        claim.returned = max(1, claim.returned)
        is_back(self, claim)

    is_back = ClaimBook._restored
    patch.setattr(ClaimBook, "_restored", restored)


def offloaded_without_copies(patch: pytest.MonkeyPatch) -> None:
    """A claim is offloaded though the tier lacks some of it."""
    from kvclaims.bridge.vllm.claims import ClaimBook

    patch.setattr(ClaimBook, "_is_kept", lambda *_: True)


def every_copy_is_written(patch: pytest.MonkeyPatch) -> None:
    """What one step has written counts as written wherever it stands."""
    from kvclaims.bridge.vllm.scheduler import ClaimEnforcer

    written = ClaimEnforcer.written

    def all_of_them(self: Any) -> None:
        ended = list(self._in_flight[0]) if self._in_flight else []
        written(self)
        for key, _ in ended:
            self._unwritten.difference_update(self.observer.where.get(key, ()))

    patch.setattr(ClaimEnforcer, "written", all_of_them)


PLANTED: dict[Any, set[str]] = {
    no_look: {"B4", "O2"},
    counted_at_once: {"O1"},
    copied_late: {"B4", "O1"},
    any_room: {"O1"},
    promised_copies_go: {"O2"},
    no_quota: {"Q2"},
    no_limit: {"O1"},
    loads_are_good: {"B4", "O2"},
    blamed_on_all: {"O2"},
    rests_stay: {"O1"},
    a_reset_spares_the_tier: {"B10", "O1", "O2"},
    computed_is_restored: {"O1", "O3"},
    offloaded_without_copies: {"O1", "O2"},
    every_copy_is_written: {"B4"},
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvclaims.bridge.vllm import tierfuzz

    monkeypatch.setattr(tierfuzz, "SHRINK_S", 0.0)
    plant(monkeypatch)
    report = fuzz(12_000)
    assert report.verdict is Verdict.VIOLATED, plant.__doc__
    assert report.finding.rule in PLANTED[plant], report.finding


# -- what is written -------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit code, and what it told as JSON."""
    from kvclaims.checker.cli import run

    out = io.StringIO()
    code = run([*arguments, "--json"], out)
    return code, json.loads(out.getvalue())


def test_a_find_is_made_shorter_and_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        any_room(patch)
        report = fuzz(6000, output=tmp_path)
        assert len(report.program.acts) <= 12
        code, told = command("replay", str(report.file))
        assert (code, told["violations"][0]["rule"]) == (1, "O1")
        assert f"run it again: kvclaims replay {report.file}" in "\n".join(report.lines())
    code, told = command("replay", str(report.file))
    assert (code, told["violations"]) == (0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"acts": [["rmtree", 1]]}, "no run of a tier"),
        ({"acts": [["kill"]]}, "no run of a tier"),
        ({"acts": [["step", "many"]]}, "no run of a tier"),
        ({"acts": 3}, "no run of a tier"),
        ({"world": {"usable": 10, "tower": 3}}, "no run of a tier"),
        ({"world": {"usable": "ten"}}, "no run of a tier"),
        ({"rule": "Z9"}, "no run of a tier"),
        ({"engine": "nobody"}, "nobody"),
    ],
)
def test_a_file_that_is_no_run_is_turned_down(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    good = {"format": "kvclaims tier 1", "engine": "vllm", "rule": "O1", "world": {}, "acts": []}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(good))
    assert command("replay", str(path))[0] == 0
    path.write_text(json.dumps({**good, **change}))
    code, told = command("replay", str(path))
    assert (code, says in told["error"]) == (2, True), told


def test_the_command_fuzzes_a_tier(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = command("fuzz", "--engine", "vllm", "--tier", "--steps", "300")
    assert (code, told["verdict"]) == (0, "HOLDS")
    assert told["operations"] >= 300
    assert told["monitored_steps"] > 300
    code, told = command("fuzz", "--engine", "reference", "--tier")
    assert (code, told["error"]) == (2, "engine reference has no tier to fuzz")
    code, told = command("fuzz", "--engine", "vllm", "--tier", "--floor", "2")
    assert code == 2
    assert "--tier goes with" in capsys.readouterr().err
