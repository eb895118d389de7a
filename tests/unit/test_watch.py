"""Watching: what a trace tells so far, what a metrics page tells, and one line for what fails."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from kvclaims.checker.cli import run
from kvclaims.checker.watch import Blame, ClaimNow, Snapshot, watch
from kvclaims.checker.watchtrace import FollowedTrace
from kvclaims.reference.engine import ENGINE
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.operations import parse, perform
from kvclaims.spec.telemetry import TraceError

CONFLICT = [
    {"op": "submit", "request": "resident", "content": [["A", 60]]},
    {"op": "drain"},
    {"op": "declare", "claim": "keep", "content": [["A", 60]], "n": 60, "owner": "ada"},
    {"op": "submit", "request": "active", "content": [["B", 70]]},
    {"op": "drain"},
]


def conflict() -> list[str]:
    runtime = ENGINE.open(PoolConfig(80), "run")
    for raw in CONFLICT:
        perform(runtime, parse(raw))
    runtime.close()
    return [event.to_json() + "\n" for event in runtime.events()]


METRICS = """\
# TYPE kvclaims_info gauge
kvclaims_info{engine="vllm",version="0.32",run_id="r1",policy="resident_claims"} 1
# TYPE kvclaims_usable_blocks gauge
kvclaims_usable_blocks 80
# TYPE kvclaims_protected_blocks gauge
kvclaims_protected_blocks 60
# TYPE kvclaims_headroom_blocks gauge
kvclaims_headroom_blocks 20
# TYPE kvclaims_claims gauge
kvclaims_claims{phase="materialized"} 1
kvclaims_claims{phase="harmed"} 0
# TYPE kvclaims_claim_blocks gauge
kvclaims_claim_blocks{claim="keep",owner="ada",protection="hard_protected",phase="materialized",kind="footprint"} 60
kvclaims_claim_blocks{claim="keep",owner="ada",protection="hard_protected",phase="materialized",kind="covered"} 59
# TYPE kvclaims_refusals counter
kvclaims_refusals_total{claim="keep",owner="ada",outcome="refused"} 2
kvclaims_refusals_total{claim="keep",owner="ada",outcome="deferred"} 3
# TYPE other gauge
other 7
"""  # noqa: E501 - the format has one sample a line


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with one metrics page; its address."""
    text: str = getattr(request, "param", METRICS)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            if self.path == "/metrics":
                self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


# --- a trace


def test_a_trace_is_followed_as_it_is_written(tmp_path: Path) -> None:
    lines, file = conflict(), tmp_path / "trace.jsonl"
    file.write_text("")
    followed = FollowedTrace(str(file))
    assert followed.poll().note == "nothing was written yet"
    file.write_text("".join(lines[:8]))
    seen = followed.poll()
    assert (seen.events, seen.phases) == (8, {"accepted": 1})
    assert seen.blocks == {
        "usable": 80,
        "active": 0,
        "protected": 0,
        "reserved": 60,
        "free": 80,
        "headroom": 20,
    }
    half = lines[8][:40]
    file.write_text("".join(lines[:8]) + half)
    assert followed.poll() == seen  # a line that is being written waits for its end
    file.write_text("".join(lines))
    seen = followed.poll()
    assert seen.note == "the run has closed"
    assert seen.claims == (ClaimNow("keep", "ada", "hard_protected", "materialized", 60, 60, 0),)
    assert seen.blame == (Blame("keep", "ada", 1, 1),)
    assert seen.outcomes == {"served": 1, "refused": 1}
    assert str(seen.verdict) == "HOLDS"


def test_a_file_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    lines, file = conflict(), tmp_path / "trace.jsonl"
    file.write_text("".join(lines))
    followed = FollowedTrace(str(file))
    assert followed.poll().events == len(lines)
    file.write_text("".join(lines[:3]))
    assert followed.poll().events == 3


def test_a_trace_with_a_gap_is_rejected(tmp_path: Path) -> None:
    lines, file = conflict(), tmp_path / "trace.jsonl"
    file.write_text("".join([*lines[:4], *lines[5:]]))
    with pytest.raises(TraceError, match=r"line 5: seq 5 follows 3: events are missing \(T1\)"):
        FollowedTrace(str(file)).poll()


def test_a_broken_rule_shows(tmp_path: Path) -> None:
    lines, file = conflict(), tmp_path / "trace.jsonl"
    blames = lines[-2].replace('"blocking_claim_ids":["keep"]', '"blocking_claim_ids":["ghost"]')
    file.write_text("".join([*lines[:-2], blames]))
    out = io.StringIO()
    assert run(["watch", str(file), "--once"], out) == 1
    assert "VIOLATED F4: 1 time" in out.getvalue()


# --- metrics


def test_metrics_tell_the_same_words(page: str) -> None:
    out = io.StringIO()
    assert run(["watch", f"{page}/metrics", "--json"], out) == 0
    told = json.loads(out.getvalue())
    assert (told["engine"], told["run_id"]) == ("vllm 0.32", "r1")
    assert told["blocks"] == {
        "usable": 80,
        "active": None,
        "protected": 60,
        "reserved": None,
        "free": None,
        "headroom": 20,
    }
    assert told["claims_by_phase"] == {"materialized": 1}
    assert told["claims"] == [
        {
            "claim": "keep",
            "owner": "ada",
            "protection": "hard_protected",
            "phase": "materialized",
            "footprint": 60,
            "covered": 59,
            "reserve": None,
        }
    ]
    assert told["refusals"] == [{"claim": "keep", "owner": "ada", "refused": 2, "deferred": 3}]
    assert told["verdict"] == "not_exposed"
    assert "broken rules" in told["not_exposed"]


@pytest.mark.parametrize("page", ["other 7\n"], indirect=True)
def test_a_page_without_our_metrics_says_so(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", f"{page}/metrics", "--once"], io.StringIO()) == 2
    assert "no metric begins with kvclaims_" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["<html> what\n"], indirect=True)
def test_a_page_of_another_kind_says_so(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", f"{page}/metrics", "--once"], io.StringIO()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_be_read_is_one_line(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, said in (
        (f"{page}/nothing", "404"),
        ("http://127.0.0.1:9/metrics", "cannot be read"),
        (str(tmp_path / "nowhere"), "No such file"),
        ("ftp://somewhere", "give a trace file or an http(s) address"),
    ):
        assert run(["watch", source, "--once"], io.StringIO()) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvclaims: ")
        assert error.count("\n") == 1
        assert said in error


# --- the view


class Canned:
    """A source of given snapshots, the last one for ever."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.left = list(snapshots)

    def poll(self) -> Snapshot:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def ends_after(times: int) -> object:
    left = iter(range(times))

    def wait(_: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return wait


def snapshot(events: int, **more: object) -> Snapshot:
    blocks = {"usable": 80, "active": 10, "protected": 60, "reserved": 5, "free": 10, "headroom": 5}
    return Snapshot("t.jsonl", "reference", "run", events, blocks, {"accepted": 1}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_the_view_with_the_last_snapshot(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    source = Canned(snapshot(1), snapshot(1), snapshot(2))
    seen = watch(source, console, once=False, wait=ends_after(3))  # type: ignore[arg-type]
    assert seen.events == 2
    assert "2 events" in out.getvalue()
    if not terminal:
        assert out.getvalue().count("blocks: usable 80") == 2  # only what changed


def test_the_terminal_view_names_all_that_matters() -> None:
    claims = (ClaimNow("keep", "ada", "hard_protected", "materialized", 60, 59, 1),)
    seen = snapshot(
        3, claims=claims, blame=(Blame("keep", "ada", 2, 3),), broken={"P1": 1}, note="late"
    )
    out = io.StringIO()
    Console(file=out, width=100).print(seen.renderable())
    shown = out.getvalue()
    bar = next(line for line in shown.splitlines() if "█" in line and "·" in line)
    assert (bar.count("█"), bar.count("▓"), bar.count("▒")) == (6, 36, 3)
    for word in ("headroom 5", "keep", "ada", "materialized", "VIOLATED P1: 1 time", "late"):
        assert word in shown


def test_a_source_that_fails_later_keeps_the_last_numbers(page: str) -> None:
    from kvclaims.checker.watchmetrics import Metrics

    metrics = Metrics(f"{page}/metrics")
    first = metrics.poll()
    metrics._address = f"{page}/gone"
    later = metrics.poll()
    assert later.blocks == first.blocks
    assert later.note.startswith("not up to date: ")
    with pytest.raises(BadOperation):
        Metrics(f"{page}/gone").poll()


def test_without_a_claim_there_is_no_empty_table() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(Snapshot("trace.jsonl", blocks={"usable": 8}).renderable())
    assert "claims: none\n" in out.getvalue()
    assert "footprint" not in out.getvalue()
