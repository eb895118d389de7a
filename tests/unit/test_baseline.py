"""A baseline allows what it names, in the versions that it names, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclaims.checker.baseline import BaselineError, read_baseline

FINDING = """
[[finding]]
name = "late-event"
rule = "B8"
package = "vllm"
versions = ">=0.24,<0.34"
signature = 'evict: hash \\w+ is resident'
meaning = "an event too early"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "baseline.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("package", "version", "rule", "text", "allowed"),
    [
        ("vllm", "0.32.0", "B8", "evict: hash ab is resident, told removed", True),
        ("vllm", "0.33.1.dev3+cpu", "B8", "evict: hash ab is resident", True),
        ("vllm", "0.34.0", "B8", "evict: hash ab is resident", False),
        ("vllm", "unknown", "B8", "evict: hash ab is resident", False),
        ("sglang", "0.32.0", "B8", "evict: hash ab is resident", False),
        ("vllm", "0.32.0", "B3", "evict: hash ab is resident", False),
        ("vllm", "0.32.0", "B8", "take: evict: hash ab is resident", False),
    ],
)
def test_only_the_named_is_allowed(
    tmp_path: Path, package: str, version: str, rule: str, text: str, allowed: bool
) -> None:
    found = read_baseline(write(tmp_path, FINDING)).allows(package, version, rule, text)
    assert (found is not None and found.name == "late-event") is allowed


def test_what_is_only_documented_is_not_allowed(tmp_path: Path) -> None:
    baseline = read_baseline(write(tmp_path, FINDING + "allow = false\n"))
    assert baseline.allows("vllm", "0.32.0", "B8", "evict: hash ab is resident") is None
    assert baseline.named("late-event").rule == "B8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "list of"),
        ("finding = 3", "list of"),
        ("[[finding]]\nname = 'x'", "lacks rule"),
        (FINDING.replace('"B8"', '"B99"'), "unknown rule B99"),
        (FINDING.replace(">=0.24", "about"), "late-event"),
        (FINDING.replace("evict:", "(evict:"), "late-event"),
        (FINDING + "more = 1\n", "unknown field more"),
        (FINDING + "allow = 3\n", "allow"),
        (FINDING + "goes_on = 3\n", "goes_on"),
        (FINDING + FINDING, "one name"),
        ("[[finding", "baseline.toml"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BaselineError, match=message):
        read_baseline(write(tmp_path, text))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="No such file"):
        read_baseline(tmp_path / "none.toml")
