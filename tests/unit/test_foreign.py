"""Event streams of other engines are judged by B8 and T1, and by nothing that they do not tell."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker import cli, foreign
from kvclaims.spec.telemetry import TraceError
from kvclaims.spec.vocabulary import Verdict

Say = list[tuple[str, list[int], int | None]]
"""Kind, hashes, parent: one event each."""


def vllm(says: Say) -> list[Any]:
    def event(kind: str, hashes: list[int], parent: int | None) -> dict[str, Any]:
        match kind:
            case "stored":
                return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
            case "removed":
                return {"type": "BlockRemoved", "block_hashes": hashes}
        return {"type": "AllBlocksCleared"}

    return [{"seq": i, "ts": 0.1, "events": [event(*say)]} for i, say in enumerate(says)]


def dynamo(says: Say) -> list[Any]:
    def data(kind: str, hashes: list[int], parent: int | None) -> Any:
        match kind:
            case "stored":
                blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes]
                return {"stored": {"parent_hash": parent, "blocks": blocks}}
            case "removed":
                return {"removed": {"block_hashes": hashes}}
        return "cleared"

    return [
        {"worker_id": 7, "event": {"event_id": i, "data": data(*say)}} for i, say in enumerate(says)
    ]


def tensorrt(says: Say) -> list[Any]:
    def data(kind: str, hashes: list[int], parent: int | None) -> Any:
        if kind == "stored":
            blocks = [{"type": "stored_block", "block_hash": h} for h in hashes]
            return {"type": "stored", "parent_hash": parent, "blocks": blocks}
        return {"type": "removed", "block_hashes": hashes}

    return [{"event_id": i, "data": data(*say)} for i, say in enumerate(says)]


DIALECTS = {"vllm": vllm, "dynamo": dynamo, "tensorrt": tensorrt}


def judged(folder: Path, lines: list[Any]) -> foreign.ForeignReport:
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return foreign.audit([path])


def messages(report: foreign.ForeignReport) -> list[tuple[str, str]]:
    return [(v.rule, v.message) for run in report.runs for v in run.replay.violations]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Any:
    return DIALECTS[request.param]


def test_a_sound_stream_holds_and_its_replay_is_the_resident_set(
    tmp_path: Path, dialect: Any
) -> None:
    report = judged(
        tmp_path,
        dialect([("stored", [1, 2], None), ("stored", [3], 2), ("removed", [3], None)]),
    )
    assert report.verdict is Verdict.HOLDS
    (resident,) = report.runs[0].replay.resident.values()
    assert resident == {"1", "2"}


def test_a_gap_in_the_numbers_is_t1(tmp_path: Path, dialect: Any) -> None:
    lines = dialect([("stored", [1], None), ("stored", [2], 1), ("stored", [3], 1)])
    del lines[1]
    ((rule, message),) = messages(judged(tmp_path, lines))
    assert rule == "T1"
    assert message.endswith("skips numbers 1 to 1")


def test_a_number_sent_twice_is_t1(tmp_path: Path, dialect: Any) -> None:
    lines = dialect([("stored", [1], None), ("stored", [2], 1)])
    found = messages(judged(tmp_path, [*lines, lines[1]]))
    assert [rule for rule, _ in found] == ["T1"]
    assert found[0][1].endswith("sends number 1 twice")


def test_numbers_that_run_back_are_t1(tmp_path: Path, dialect: Any) -> None:
    lines = dialect([("stored", [1], None), ("stored", [2], None), ("stored", [3], None)])
    found = messages(judged(tmp_path, [lines[0], lines[2], lines[1]]))
    assert [message.split(" ", 2)[2] for _, message in found] == [
        "skips numbers 1 to 1",
        "goes back from number 2 to 1",
    ]


def test_what_a_listener_may_have_lost_is_not_known(tmp_path: Path) -> None:
    lines = vllm([("stored", [1], None), ("stored", [2], 1), ("stored", [3], 2)])
    del lines[1]
    lines[1]["after_loss"] = True
    report = judged(tmp_path, lines)
    assert (messages(report), report.verdict) == ([], Verdict.UNKNOWN)
    replay = report.runs[0].replay
    assert (replay.lost, replay.unjudged) == (1, 1)
    lines[1]["after_loss"] = "yes"
    with pytest.raises(TraceError, match="line 2: after_loss is true or false, not 'yes'"):
        judged(tmp_path, lines)


def test_what_is_kept_of_a_long_stream_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "KEPT", 10)
    replay = foreign.Replay()
    for batch in foreign.batches(
        foreign.VLLM, "here", enumerate(vllm([("stored", [7], None)] * 500))
    ):
        replay.take(batch)
        assert len(replay.sent["rank 0"]) <= 10
    assert (replay.events, replay.violations) == (500, [])
    assert {place: len(hashes) for place, hashes in replay.resident.items()} == {"rank 0, GPU": 1}


@pytest.mark.parametrize(("number", "says"), [(495, "sends number 495 twice"), (3, "goes back")])
def test_a_number_of_long_ago_is_an_engine_that_counts_anew(
    monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    monkeypatch.setattr(foreign, "KEPT", 10)
    replay = foreign.Replay()
    lines = vllm([("stored", [n], None) for n in range(500)])
    stream = [*lines, lines[number], *lines[number + 1 : number + 3]]
    for batch in foreign.batches(foreign.VLLM, "here", enumerate(stream)):
        replay.take(batch)
    assert says in replay.violations[0].message
    assert replay.last["rank 0"] == (499 if number == 495 else 5)
    assert len(replay.violations) == (3 if number == 495 else 1)


def test_a_late_number_does_not_make_its_successor_late(tmp_path: Path, dialect: Any) -> None:
    lines = dialect([("stored", [n], None) for n in range(4)])
    found = messages(judged(tmp_path, [lines[0], lines[2], lines[1], lines[3]]))
    assert [message.split(" ", 2)[2] for _, message in found] == [
        "skips numbers 1 to 1",
        "goes back from number 2 to 1",
    ]


def test_what_is_sent_twice_happened_once(tmp_path: Path, dialect: Any) -> None:
    """The second sending neither makes a copy nor removes what is gone."""
    lines = dialect(
        [("stored", [1], None), ("removed", [1], None), ("stored", [1], None), ("stored", [2], 1)]
    )
    found = messages(judged(tmp_path, [line for line in lines for _ in range(2)]))
    assert [rule for rule, _ in found] == ["T1"] * 4


def test_an_engine_that_counts_anew_is_told_once(tmp_path: Path, dialect: Any) -> None:
    lines = dialect([("stored", [1], None), ("stored", [2], 1)])
    other = dialect([("stored", [3], None), ("stored", [4], 3)])
    ((rule, message),) = messages(judged(tmp_path, [*lines, *other]))
    assert rule == "T1"
    assert message.endswith("goes back from number 1 to 0")


@pytest.mark.parametrize("gap", [True, False])
def test_what_may_have_come_in_a_part_that_is_missing_is_not_judged(
    tmp_path: Path, dialect: Any, gap: bool
) -> None:
    lines = dialect(
        [
            ("stored", [1], None),
            ("stored", [2], 1),
            ("stored", [3], 2),
            ("removed", [2], None),
            ("removed", [9], None),
        ]
    )
    del lines[1 if gap else 0]
    if not gap:
        del lines[0]
    report = judged(tmp_path, lines)
    assert [rule for rule, _ in messages(report)] == ["T1"] * gap
    assert report.runs[0].replay.unjudged == 3
    assert any("3 blocks may have come in what this stream" in line for line in report.lines())


def test_after_a_clear_all_is_judged_again(tmp_path: Path) -> None:
    lines = vllm([("removed", [1], None), ("cleared", [], None), ("removed", [1], None)])
    late = [{**line, "seq": line["seq"] + 57} for line in lines]
    ((rule, message),) = messages(judged(tmp_path, late))
    assert rule == "B8"
    assert message.endswith("removes 1, not resident")


def test_removing_what_is_not_resident_is_b8(tmp_path: Path, dialect: Any) -> None:
    ((rule, message),) = messages(
        judged(tmp_path, dialect([("stored", [1], None), ("removed", [9], None)]))
    )
    assert rule == "B8"
    assert message.endswith("removes 9, not resident")


def test_a_removal_while_a_copy_remained_is_b8(tmp_path: Path, dialect: Any) -> None:
    says: Say = [
        ("stored", [1], None),
        ("stored", [1], None),
        ("removed", [1], None),
        ("removed", [1], None),
    ]
    ((rule, message),) = messages(judged(tmp_path, dialect(says)))
    assert rule == "B8"
    assert message.endswith("removes 1, removed before, while a copy remained")


def test_a_child_of_a_copy_that_was_called_removed_is_b8(tmp_path: Path, dialect: Any) -> None:
    says: Say = [
        ("stored", [1], None),
        ("stored", [1], None),
        ("removed", [1], None),
        ("stored", [2], 1),
    ]
    ((rule, message),) = messages(judged(tmp_path, dialect(says)))
    assert rule == "B8"
    assert message.endswith("stored below 1, which was removed while a copy remained")


def test_a_parent_that_was_never_reported_is_b8(tmp_path: Path, dialect: Any) -> None:
    ((rule, message),) = messages(judged(tmp_path, dialect([("stored", [2], 1)])))
    assert rule == "B8"
    assert message.endswith("stored below 1, which is not resident")


@pytest.mark.parametrize("name", ["vllm", "dynamo"])
def test_after_a_clear_nothing_is_resident(tmp_path: Path, name: str) -> None:
    says: Say = [("stored", [1], None), ("cleared", [], None), ("removed", [1], None)]
    ((rule, message),) = messages(judged(tmp_path, DIALECTS[name](says)))
    assert rule == "B8"
    assert message.endswith("removes 1, not resident")


def test_tiers_of_one_engine_are_told_apart(tmp_path: Path) -> None:
    lines = vllm([("stored", [1], None), ("stored", [1], None), ("removed", [1], None)])
    lines[1]["events"][0]["medium"] = "CPU"
    lines.append(
        {"seq": 3, "events": [{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}]}
    )
    assert judged(tmp_path, lines).verdict is Verdict.HOLDS


def test_the_wire_form_of_vllm_is_read_too(tmp_path: Path) -> None:
    lines = [
        {"seq": 0, "events": [["BlockStored", [1, 2], None, [5] * 32, 16, None, "GPU"]]},
        {"seq": 1, "events": [["BlockRemoved", [3], "GPU"]]},
    ]
    assert messages(judged(tmp_path, lines)) == [("B8", "rank 0, GPU: removes 3, not resident")]


def test_groups_are_told_apart_in_the_wire_form_too(tmp_path: Path) -> None:
    stored = [["BlockStored", [1], None, [], 16, None, "GPU", None, None, g] for g in (0, 1)]
    removed = [["BlockRemoved", [1], "GPU", g] for g in (0, 1)]
    lines = [{"seq": 0, "events": [*stored, *removed]}]
    assert judged(tmp_path, lines).verdict is Verdict.HOLDS


def lies(line: dict[str, Any], tier: str) -> dict[str, Any]:
    """The same event of vLLM's or Dynamo's, told of a tier below the device."""
    if "events" in line:
        medium = {"host_pinned": "CPU"}[tier]
        return {**line, "events": [{**event, "medium": medium} for event in line["events"]]}
    return {**line, "storage_tier": tier}


TIERED = pytest.mark.parametrize("name", ["vllm", "dynamo"])


@TIERED
@pytest.mark.parametrize("first", ["child", "parent"])
def test_a_tier_below_the_device_stores_in_any_order(tmp_path: Path, name: str, first: str) -> None:
    """vLLM's offload events carry their own parents, so that the order of keys is free."""
    says: Say = [("stored", [1, 2], None), ("stored", [2], 1), ("stored", [1], None)]
    if first == "parent":
        says[1:] = reversed(says[1:])
    device, *host = DIALECTS[name](says)
    lines = [device, *(lies(line, "host_pinned") for line in host)]
    assert judged(tmp_path, lines).verdict is Verdict.HOLDS


@TIERED
def test_a_block_on_the_device_may_lie_below_one_that_is_in_another_tier(
    tmp_path: Path, name: str
) -> None:
    lines = DIALECTS[name]([("stored", [1], None), ("stored", [2], 1), ("stored", [3], 9)])
    lines[0] = lies(lines[0], "host_pinned")
    ((rule, message),) = messages(judged(tmp_path, lines))
    assert rule == "B8"
    assert message.endswith("stored below 9, which is not resident")


def test_a_parent_of_another_window_is_none(tmp_path: Path) -> None:
    lines = tensorrt([("stored", [1], None), ("stored", [2], 1)])
    lines[0]["window_size"], lines[1]["window_size"] = 128, 4096
    assert messages(judged(tmp_path, lines)) == [
        ("B8", "rank 0, window 4096: stored below 1, which is not resident")
    ]


@TIERED
def test_what_a_lower_tier_tells_twice_it_takes_back_twice(tmp_path: Path, name: str) -> None:
    """vLLM's offloaded chunks announce a shared block once each, to be counted."""
    says: Say = [("stored", [1], None)] * 2 + [("removed", [1], None)] * 3
    lines = [lies(line, "host_pinned") for line in DIALECTS[name](says)]
    assert judged(tmp_path, lines[:4]).verdict is Verdict.HOLDS
    ((rule, message),) = messages(judged(tmp_path, lines))
    assert rule == "B8"
    assert message.endswith("removes 1, not resident")


@TIERED
def test_a_clear_of_the_device_says_nothing_of_the_tiers_below(tmp_path: Path, name: str) -> None:
    says: Say = [
        ("stored", [1], None),
        ("stored", [1], None),
        ("cleared", [], None),
        ("removed", [1], None),
        ("removed", [1], None),
        ("removed", [1], None),
    ]
    lines = DIALECTS[name](says)
    for number in (1, 3, 4):
        lines[number] = lies(lines[number], "host_pinned")
    report = judged(tmp_path, lines)
    ((rule, message),) = messages(report)
    assert rule == "B8"
    assert message.endswith("removes 1, not resident")
    assert report.runs[0].replay.violations[0].seq == 5
    assert report.runs[0].replay.unjudged == 1


def test_a_clear_does_not_tell_what_lay_below_before_a_stream_began(tmp_path: Path) -> None:
    lines = vllm([("cleared", [], None), ("removed", [1], None), ("removed", [1], None)])
    lines[1] = lies(lines[1], "host_pinned")
    late = [{**line, "seq": line["seq"] + 57} for line in lines]
    ((_, message),) = messages(judged(tmp_path, late))
    assert message == "rank 0, GPU: removes 1, not resident"


@TIERED
def test_what_a_lower_tier_was_told_to_hold_may_lie_below_what_is_nowhere(
    tmp_path: Path, name: str
) -> None:
    """A chunk at the tail of a prefix is offloaded alone, and carries its parent's hash."""
    (line,) = DIALECTS[name]([("stored", [2], 1)])
    assert judged(tmp_path, [lies(line, "host_pinned")]).verdict is Verdict.HOLDS


@TIERED
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([("stored", [1], None)], [("stored", [1], None), ("removed", [1], None)]),
        ([("stored", [1], None), ("removed", [1], None)], []),
    ],
)
def test_a_clear_forgets_the_copies(tmp_path: Path, name: str, before: Say, after: Say) -> None:
    says: Say = [("stored", [1], None), *before, ("cleared", [], None), *after]
    lines = DIALECTS[name]([*says, ("removed", [1], None)])
    ((_, message),) = messages(judged(tmp_path, lines))
    assert message.endswith("removes 1, not resident")


def test_a_clear_of_a_lower_tier_heals_nothing(tmp_path: Path) -> None:
    _, cleared, removed = dynamo(
        [("stored", [1], None), ("cleared", [], None), ("removed", [2], None)]
    )
    report = judged(tmp_path, [lies(cleared, "host_pinned"), removed])
    assert (report.verdict, report.runs[0].replay.unjudged) == (Verdict.HOLDS, 1)


def test_a_clear_of_a_lower_tier_leaves_the_device(tmp_path: Path) -> None:
    lines = dynamo(
        [("stored", [1], None), ("cleared", [], None), ("stored", [2], 1), ("removed", [1], None)]
    )
    lines[1] = lies(lines[1], "host_pinned")
    assert judged(tmp_path, lines).verdict is Verdict.HOLDS


@TIERED
def test_a_clear_that_comes_late_heals_nothing(tmp_path: Path, name: str) -> None:
    """What was stored after it, in the order of the numbers, is still there."""
    lines = DIALECTS[name](
        [
            ("stored", [1], None),
            ("cleared", [], None),
            ("stored", [2], None),
            ("removed", [2], None),
        ]
    )
    found = messages(judged(tmp_path, [lines[0], lines[2], lines[1], lines[3]]))
    assert [rule for rule, _ in found] == ["T1", "T1"]


def test_a_clear_after_an_engine_began_to_count_anew_heals(tmp_path: Path) -> None:
    lines = vllm([("stored", [1], None), ("stored", [2], 1)])
    anew = vllm([("cleared", [], None), ("removed", [1], None)])
    assert [rule for rule, _ in messages(judged(tmp_path, [*lines, *anew]))] == ["T1", "B8"]


def timed(*times: Any) -> list[Any]:
    lines = vllm([("stored", [n], None) for n in range(len(times))])
    return [{**line, "ts": time} for line, time in zip(lines, times, strict=True)]


def test_time_that_runs_back_is_t1(tmp_path: Path) -> None:
    report = judged(tmp_path, timed(5.0, 5.0, 1.0, 2))
    assert messages(report) == [("T1", "rank 0: time runs back from 5.0 to 1.0")]
    assert report.runs[0].replay.violations[0].seq == 2


def test_time_is_that_of_one_clock_and_of_the_order_of_numbers(tmp_path: Path) -> None:
    lines = timed(1.0, 2.0, 3.0, 4.0)
    late = messages(judged(tmp_path, [lines[0], lines[2], lines[1], lines[3]]))
    assert [message.split(" ", 2)[2] for _, message in late] == [
        "skips numbers 1 to 1",
        "goes back from number 2 to 1",
    ]
    other = [{**line, "data_parallel_rank": 1} for line in timed(0.5)]
    assert judged(tmp_path, [*lines, *other]).verdict is Verdict.HOLDS
    anew = [{**line, "events": []} for line in timed(0.5, 0.25)]
    assert [
        message.split(" ", 2)[2] for _, message in messages(judged(tmp_path, lines + anew))
    ] == [
        "goes back from number 3 to 0",
        "time runs back from 0.5 to 0.25",
    ]


@pytest.mark.parametrize("time", [float("nan"), float("inf"), "5", True, [5.0]])
def test_what_is_no_time_is_said(tmp_path: Path, time: Any) -> None:
    with pytest.raises(TraceError, match="line 2: a time is a finite number, not "):
        judged(tmp_path, timed(1.0, time))


def test_a_stream_writes_no_lines_of_its_own(tmp_path: Path) -> None:
    forged = "\x1b[31mX\nHOLDS: ok\u202e"
    removed = {"type": "BlockRemoved", "block_hashes": [forged], "medium": forged}
    line = {"seq": 0, "events": [removed], "data_parallel_rank": forged}
    code, out = audited(tmp_path / "forged.jsonl", json.dumps(line).encode())
    assert code == 1
    told = "\\x1b[31mX\\nHOLDS: ok\\u202e"
    assert f"rank {told}, {told}: removes {told}, not resident" in out
    assert all(one.isprintable() for one in out.splitlines())
    assert [text for text in out.splitlines() if text.startswith("HOLDS")] == []


@pytest.mark.parametrize("field", ["locality", "ownership"])
def test_copies_that_lie_elsewhere_are_told_apart(tmp_path: Path, field: str) -> None:
    lines = vllm([("stored", [1], None), ("stored", [1], None), ("removed", [1], None)])
    lines[1]["events"][0][field] = "elsewhere"
    lines.append({**lines[2], "seq": 3, "events": [{**lines[2]["events"][0], field: "elsewhere"}]})
    assert judged(tmp_path, lines).verdict is Verdict.HOLDS


def test_ranks_and_tiers_of_a_worker_are_told_apart(tmp_path: Path) -> None:
    (line,) = dynamo([("stored", [1], None)])
    other = {"worker_id": 7, "event": {**line["event"], "dp_rank": 1}}
    host = {**line, "event": {**line["event"], "event_id": 1}, "storage_tier": "host_pinned"}
    report = judged(tmp_path, [line, other, host])
    assert report.verdict is Verdict.HOLDS
    places = list(report.runs[0].replay.resident)
    assert places == ["worker 7", "worker 7 rank 1", "worker 7, host_pinned"]


COMMA = "7, host_pinned"


@pytest.mark.parametrize("odd", [COMMA, "7 rank 1", True, 0.5, ["7"], {"7": 7}])
@pytest.mark.parametrize(
    ("what", "name", "changed"),
    [
        ("worker", "dynamo", lambda line, odd: {**line, "worker_id": odd}),
        ("rank", "dynamo", lambda line, odd: {**line, "event": {**line["event"], "dp_rank": odd}}),
        ("tier", "dynamo", lambda line, odd: {**line, "storage_tier": odd}),
        ("rank", "vllm", lambda line, odd: {**line, "data_parallel_rank": odd}),
        (
            "group",
            "vllm",
            lambda line, odd: {**line, "events": [{**line["events"][0], "group_idx": odd}]},
        ),
        (
            "locality",
            "vllm",
            lambda line, odd: {**line, "events": [{**line["events"][0], "locality": odd}]},
        ),
        ("rank", "tensorrt", lambda line, odd: {**line, "attention_dp_rank": odd}),
        ("window", "tensorrt", lambda line, odd: {**line, "window_size": odd}),
    ],
)
def test_what_names_a_place_is_a_word_or_a_number(
    tmp_path: Path, what: str, name: str, changed: Any, odd: Any
) -> None:
    """Two names may not come to the same: worker 7 in a tier, and a worker called 7, tier."""
    (line,) = DIALECTS[name]([("stored", [1], None)])
    with pytest.raises(TraceError, match=f"line 1: a {what} is a whole number or a word, not "):
        judged(tmp_path, [changed(line, odd)])


def test_a_worker_has_a_name(tmp_path: Path) -> None:
    (line,) = dynamo([("stored", [1], None)])
    with pytest.raises(TraceError, match="line 1: a worker is a whole number or a word, not None"):
        judged(tmp_path, [{**line, "worker_id": None}])


def test_workers_count_by_themselves(tmp_path: Path) -> None:
    one = dynamo([("stored", [1], None), ("stored", [2], 1)])
    other = [{**line, "worker_id": 8} for line in one]
    mixed = [one[0], other[0], one[1], other[1]]
    assert judged(tmp_path, mixed).verdict is Verdict.HOLDS


def test_a_stream_without_events_is_vacuous(tmp_path: Path) -> None:
    assert judged(tmp_path, [{"seq": 0, "events": []}]).verdict is Verdict.VACUOUS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"seq": "1", "events": []}, "line 2: an event number is a whole number, not '1'"),
        ({"seq": -1, "events": []}, "line 2: an event number is at least 0, not -1"),
        (
            {"seq": 1, "events": [{"type": "BlockRemoved", "block_hashes": [], "medium": ["x"]}]},
            r"line 2: a medium is a text, not \['x'\]",
        ),
        ({"seq": 1, "events": [{"type": "Odd"}]}, "line 2: unknown event 'Odd'"),
        ({"seq": 1, "events": [{"type": "BlockStored"}]}, "line 2: not a vLLM KV event"),
        ([], "line 2: not a vLLM KV event"),
        (
            {"seq": 1, "events": [{"type": "BlockRemoved", "block_hashes": "abc"}]},
            "line 2: hashes are a list, not 'abc'",
        ),
        *(
            (
                {"seq": 1, "events": [{"type": "BlockRemoved", "block_hashes": [odd]}]},
                "line 2: a hash is a whole number or a text, not ",
            )
            for odd in (None, True, 1.5, [1])
        ),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        judged(tmp_path, [{"seq": 0, "events": []}, line])


def test_the_command_line_tells_foreign_streams_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_text(json.dumps(tensorrt([("removed", [4], None)])), encoding="utf-8")
    out = StringIO()
    assert cli.run(["audit", str(path), "--json"], out) == 1
    found = json.loads(out.getvalue())
    assert found["verdict"] == "VIOLATED"
    assert found["runs"][0]["dialect"] == "TensorRT-LLM KV cache events"


def audited(path: Path, text: bytes) -> tuple[int, str]:
    path.write_bytes(text)
    out = StringIO()
    return cli.run(["audit", str(path)], out), out.getvalue()


FIRST = json.dumps(vllm([("stored", [1], None)])[0]).encode()


def test_a_first_line_of_any_length_is_recognised(tmp_path: Path) -> None:
    (line,) = vllm([("stored", [1], None)])
    line["events"][0]["token_ids"] = list(range(30_000))
    code, out = audited(tmp_path / "long.jsonl", json.dumps(line).encode())
    assert code == 0
    assert "vLLM KV events: 1 event" in out


@pytest.mark.parametrize("text", [b"\xef\xbb\xbf" + FIRST, b"\n  [" + FIRST + b"]", b"\n" + FIRST])
def test_a_mark_or_a_blank_line_in_front_changes_nothing(tmp_path: Path, text: bytes) -> None:
    assert audited(tmp_path / "front.json", text)[0] == 0


def test_half_a_character_can_be_told(tmp_path: Path) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": ["\ud800"]}
    line = {"seq": 0, "events": [removed], "data_parallel_rank": "\ud800"}
    code, out = audited(tmp_path / "half.jsonl", json.dumps(line).encode())
    assert code == 1
    assert "removes \\ud800, not resident" in out.encode().decode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "an empty trace"),
        (b"[]", "line 1: not a JSON object"),
        (b"[" + FIRST, "not JSON"),
        (FIRST + b"\n" + FIRST[:-4], "line 2: not JSON"),
        (FIRST + b"\n" + b'{"seq": ' + b"9" * 5000 + b"}", "line 2: not JSON"),
        (FIRST + b"\n" + b"[" * 100_000, "line 2: not JSON"),
        ((FIRST + b"\n") * 3000 + b"\xff\n", "not UTF-8 text"),
        (b"[" + FIRST + b', "\xff"]', "not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, says: str
) -> None:
    code, out = audited(tmp_path / "bad.json", text)
    error = capsys.readouterr().err
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert says in error


@pytest.mark.parametrize(
    "data",
    [
        {"stored": {"blocks": [{"block_hash": 1}]}, "removed": {"block_hashes": [9]}},
        {"cleared": None, "stored": {"blocks": [{"block_hash": 1}]}},
    ],
)
def test_an_event_that_says_two_things_at_once_is_none(tmp_path: Path, data: Any) -> None:
    event = {"worker_id": 7, "event": {"event_id": 0, "data": data}}
    with pytest.raises(TraceError, match="line 1: an event is stored, removed or cleared"):
        judged(tmp_path, [event])
