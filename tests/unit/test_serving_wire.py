"""What a claim, settings and a trace file may look like, and what is said of those that may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvclaims.bridge.serving.settings import BadSettings, Settings, read_settings
from kvclaims.bridge.serving.tracefiles import TraceFiles, in_order
from kvclaims.bridge.serving.tracequeue import TraceQueue
from kvclaims.bridge.serving.wire import BadClaim, parse_order, read_duration, read_json, ticks
from kvclaims.bridge.vllm.limits import HardShare, Limits
from kvclaims.spec.fidelity import Fidelity
from kvclaims.spec.interface import Predicate, PredicateKind
from kvclaims.spec.telemetry import Recorder, parse_event


def test_a_claim_needs_only_its_name() -> None:
    order = parse_order({"claim_id": "c"}, prefix=False)
    assert (order.protection.value, order.predicate, order.duration) == (
        "hard_protected",
        None,
        None,
    )


def test_all_full_blocks_are_meant_where_nothing_is_said() -> None:
    order = parse_order({"claim_id": "c", "tokens": [1] * 11}, prefix=True)
    assert order.spec("o/c", "o", 4).predicate == Predicate(PredicateKind.LEADING, 2)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "JSON object"),
        ({}, "needs claim_id"),
        ({"claim_id": None}, "claim_id is a name"),
        ({"claim_id": "a/b"}, "letters"),
        ({"claim_id": "c", "tokens": [1]}, "unknown fields: tokens"),
        ({"claim_id": "c", "n": 3}, "unknown fields: n"),
        ({"claim_id": "c", "generation": True}, "whole number"),
        ({"claim_id": "c", "generation": 1 << 40}, "whole number"),
        ({"claim_id": "c", "duration": float("nan")}, "seconds"),
        ({"claim_id": "c", "duration": float("inf")}, "seconds"),
        ({"claim_id": "c", "duration": True}, "seconds"),
        ({"claim_id": "c", "duration": 0}, "seconds"),
        ({"claim_id": "c", "protection": "very"}, "hard_protected"),
        ({"claim_id": "c", "predicate": {"n": 2, "m": 1}}, "predicate is"),
        ({"claim_id": "c", "predicate": {"n": 2, "fidelity": "fine"}}, "fidelity is one of exact"),
        ({"claim_id": "c", "predicate": {"n": 2, "fidelity": [1]}}, "fidelity is one of exact"),
        ({"claim_id": "c", "predicate": {"n": 2, "bound": 0.5}}, "goes with bounded_loss"),
        (
            {"claim_id": "c", "predicate": {"n": 2, "fidelity": "bounded_loss", "bound": 10**400}},
            "bound is a positive number",
        ),
        (
            {"claim_id": "c", "predicate": {"n": 2, "fidelity": "bounded_loss", "bound": -1}},
            "bound is a positive number",
        ),
        (
            {"claim_id": "c", "predicate": {"n": 2, "fidelity": "bounded_loss", "bound": True}},
            "bound is a positive number",
        ),
        (
            {"claim_id": "c", "predicate": {"kind": "leading_prefix_at_least", "n": 2, "start": 1}},
            "0",
        ),
    ],
)
def test_each_bad_field_is_named(raw: Any, message: str) -> None:
    with pytest.raises(BadClaim, match=message):
        parse_order(raw, prefix=False)


@pytest.mark.parametrize("tokens", ["123", [1.5], [-1], [True], [1 << 40], {"a": 1}])
def test_tokens_are_token_ids(tokens: Any) -> None:
    with pytest.raises(BadClaim, match="token ids"):
        parse_order({"claim_id": "c", "tokens": tokens}, prefix=True)


def test_a_predicate_names_the_class_that_it_asks_for() -> None:
    order = parse_order({"claim_id": "c", "predicate": {"n": 2, "fidelity": "state"}}, prefix=False)
    assert order.predicate == Predicate(PredicateKind.LEADING, 2, fidelity=Fidelity.STATE)


def test_a_predicate_stays_within_its_content() -> None:
    order = parse_order({"claim_id": "c", "tokens": [1] * 8, "predicate": {"n": 3}}, prefix=True)
    with pytest.raises(BadClaim, match="past the 2"):
        order.spec("o/c", "o", 4)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', "[Infinity]", "{", "[" * 100_000, "1" * 5000, "\xff"]
)
def test_what_is_not_json_is_said_to_be_none(text: str) -> None:
    with pytest.raises(BadClaim, match="not JSON"):
        read_json(text)


def test_a_duration_never_ends_early() -> None:
    assert [ticks(s) for s in (0.0001, 1, 1.0001)] == [1, 1000, 1001]
    assert read_duration({"duration": 3}) == 3.0
    with pytest.raises(BadClaim):
        read_duration({"duration": 3, "more": 1})


def test_settings_of_the_engine_win_over_the_environment() -> None:
    environment = {"KVCLAIMS_SETTINGS": '{"defer_limit": 3, "retry_after": 5}'}
    found = read_settings({"kvclaims": {"defer_limit": 0}}, environment)
    assert found is not None
    assert (found.defer_limit, found.retry_after) == (0, 5)
    assert read_settings({}, environment) is None
    assert read_settings({}, environment, default=True) == Settings(defer_limit=3, retry_after=5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quota": {}}, "unknown settings of claims: quota"),
        ({"quotas": {"a": -1}}, "quotas.a"),
        ({"hard_share": 1.5}, "between 0 and 1"),
        ({"hard_share": True}, "between 0 and 1"),
        ({"owners": {"a": "secret"}}, "SHA-256"),
        ({"quotas": {"a/b": 1}}, "no owner"),
        ({"trace": 3}, "trace is a path"),
    ],
)
def test_settings_that_cannot_be_meant_stop_the_engine(given: Any, message: str) -> None:
    with pytest.raises(BadSettings, match=message):
        read_settings({"kvclaims": given}, {})


def test_the_tighter_of_quota_and_cap_decides() -> None:
    share = HardShare(Limits({"a": 5}, default=3, cap=6))
    assert share.room("a") == (5, "exceeds the owner's quota of 5 blocks")
    share.take("a", 4)
    assert share.room("a")[0] == 1
    assert share.room("b") == (2, "exceeds the 6 blocks that hard claims may have")
    share.give("a", 4)
    assert (dict(share.used), share.total, share.room("b")[0]) == ({}, 0, 3)


def recorder(queue: TraceQueue) -> Recorder:
    clock = iter(range(10**6))
    return Recorder("r", "p", 8, lambda: next(clock), sink=queue.hear, keep=1)


def traced(path: Path, keep: int) -> TraceQueue:
    return TraceQueue(TraceFiles(path, 1024, keep), threaded=False)


def test_full_files_are_put_aside_and_the_oldest_deleted(tmp_path: Path) -> None:
    files = traced(tmp_path / "t.jsonl", keep=2)
    told = recorder(files)
    for _ in range(40):
        told.emit("pool_reset", succeeded=True)
    files.close()
    paths = in_order(tmp_path / "t.jsonl")
    assert len(paths) == 3
    seen = [parse_event(line).seq for path in paths for line in path.open()]
    assert seen == list(range(seen[0], 40))
    assert seen[0] > 0
    assert all(path.stat().st_size < 1400 for path in paths)


@pytest.mark.parametrize("stem", ["t", "t[1]", "dp1-t"])
def test_traces_whose_names_begin_alike_leave_each_other_alone(tmp_path: Path, stem: str) -> None:
    """Two engines in one folder: what one puts aside or finds is its own."""
    own, other = tmp_path / f"{stem}.jsonl", tmp_path / f"{stem}-2.jsonl"
    for _ in range(2):  # the second time, each finds the files of the first
        traces = [traced(path, keep=1) for path in (other, own)]
        tellers = [recorder(trace) for trace in traces]
        for _ in range(40):
            for told in tellers:
                told.emit("pool_reset", succeeded=True)
        for trace in traces:
            trace.work()
        for path in (own, other):
            files = in_order(path)
            assert len(files) == 2
            seen = [parse_event(line).seq for file in files for line in file.open()]
            assert seen == list(range(seen[0], 40))
        for trace in traces:
            trace.close()
    assert len(list(tmp_path.glob("*-before-*"))) == 2


def test_every_file_is_kept_where_that_is_asked(tmp_path: Path) -> None:
    files = traced(tmp_path / "t.jsonl", keep=0)
    told = recorder(files)
    for _ in range(40):
        told.emit("pool_reset", succeeded=True)
    files.close()
    lines = [line for path in in_order(tmp_path / "t.jsonl") for line in path.open()]
    assert [parse_event(line).seq for line in lines] == list(range(40))


def test_runs_do_not_share_files(tmp_path: Path) -> None:
    """Each is whole by itself, however many files it has; the earlier ones lie in folders."""
    for run in range(3):
        files = traced(tmp_path / "t.jsonl", keep=0)
        told = recorder(files)
        for _ in range(40 - 10 * run):
            told.emit("pool_reset", succeeded=True)
        files.close()
    before = sorted(tmp_path.glob("t-before-*"))
    folders = [*before, tmp_path]
    seen = [
        [parse_event(line).seq for path in in_order(folder / "t.jsonl") for line in path.open()]
        for folder in folders
    ]
    assert seen == [list(range(n)) for n in (40, 30, 20)]
    assert all(len(in_order(folder / "t.jsonl")) > 1 for folder in folders)


def test_what_is_deleted_is_of_this_run(tmp_path: Path) -> None:
    for events in (60, 40):
        files = traced(tmp_path / "t.jsonl", keep=1)
        told = recorder(files)
        for _ in range(events):
            told.emit("pool_reset", succeeded=True)
        files.close()
    last = [
        parse_event(line).seq for path in in_order(tmp_path / "t.jsonl") for line in path.open()
    ]
    assert last == list(range(last[0], 40))
    assert len(in_order(tmp_path / "t.jsonl")) == 2
