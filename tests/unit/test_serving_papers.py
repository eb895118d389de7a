"""What is written about serving agrees with the code: arbiter study, dashboard, walkthrough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvclaims.bridge.metrics import exposition
from kvclaims.bridge.serving.http import PREFIX
from kvclaims.bridge.serving.settings import Settings
from kvclaims.bridge.serving.wire import parse_order

ROOT = Path(__file__).parents[2]
WALKTHROUGH = (ROOT / "docs" / "serving-with-claims.md").read_text()


def arbiter(*words: str) -> Any:
    command = [sys.executable, str(ROOT / "benchmarks" / "arbiter.py"), "--json", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_the_arbiter_study_by_hand() -> None:
    """50 blocks are missing: kept spans 2 × 17 = 34, served 13, less what the mechanism costs."""
    said = arbiter()
    utilities = {row["mechanism"]: row["utility"] for row in said["rows"]}
    assert len(utilities) == 14
    assert utilities["native eviction"] == 13
    assert utilities["hard, refuse"] == 34
    assert utilities["hard, defer once"] == 33
    assert utilities["route elsewhere"] == 34 + 13 - 4
    assert utilities["more capacity"] == 34 + 13 - 50 * 0.20
    assert utilities["recompute by chunks"] == 34 + 13 - (20 + 40 + 60) * 0.10
    assert utilities["offload what is missing"] == 34 + 13 - 50 * 0.05
    assert said["oracle"] == "offload what is missing"
    assert all(row["regret"] >= 0 for row in said["rows"] if row["exact"])


@pytest.mark.parametrize(("usable", "lost"), [("80", 2), ("100", 1), ("129", 1), ("130", 0)])
def test_native_eviction_loses_spans_in_silence(usable: str, lost: int) -> None:
    rows = {row["mechanism"]: row for row in arbiter("--usable", usable)["rows"]}
    assert rows["native eviction"]["spans_lost_in_silence"] == lost
    assert rows["hard, refuse"]["spans_lost_in_silence"] == 0
    assert rows["hard, refuse"]["served"] is (usable == "130")


def test_demotion_takes_no_more_claims_than_it_needs() -> None:
    rows = {row["mechanism"]: row for row in arbiter("--usable", "110")["rows"]}
    assert rows["demote fewest"]["spans_kept"] == 1  # 20 missing: one span of 30 is enough (F6)


def test_the_dashboard_asks_for_families_that_exist() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "claims.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"kvclaims_\w+", target["expr"])
    }
    blocks = ("usable", "active", "protected", "reserved", "free", "headroom")
    stats: dict[str, Any] = {f"{name}_blocks": 0 for name in blocks}
    who = {"claim": "c", "owner": "o"}
    claim = {**who, "protection": "p", "phase": "x", "footprint": 1, "covered": 1, "reserve": 0}
    page = exposition(
        {
            **stats,
            "run_id": "r",
            "phases": {},
            "requests": {"waiting": 0},
            "claims": [claim],
            "refusals": [{**who, "outcome": "refused", "count": 1}],
            "harms": [{**who, "cause": "fault", "count": 1}],
            "unsaved": [{**who, "count": 1}],
            "outcomes": {"served": 1},
            "shortfall": 1,
            "ages": [0] * 9,
            "age_sum": 0.0,
            "trace_waiting": 1,
            "trace_lost": 0,
        }
    ).decode()
    exposed = set(re.findall(r"^(kvclaims_\w+)", page, re.MULTILINE))
    assert asked <= exposed
    assert len(asked) == 17


def test_the_walkthrough_names_every_setting_and_no_other() -> None:
    table = WALKTHROUGH.split("| setting |")[1].split("\n\n")[0]
    told = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert told == {field.name for field in fields(Settings)}


def test_the_walkthrough_names_every_field_of_a_claim() -> None:
    table = WALKTHROUGH.split("| field |")[1].split("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    told = {re.findall(r"`(\w+)`", row)[0] for row in rows} | {"generation"}
    sample = {"claim_id": "c", "predicate": {"n": 1}, "min_blocks": 1, "generation": 1}
    sample |= {"protection": "demotable", "duration": 1, "owner": "o"}
    parse_order(sample, prefix=False)
    assert told == set(sample)
    assert PREFIX in WALKTHROUGH
