"""What the documents show is what the commands print."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make setup)"
)
SESSION = re.compile(r"```console\n\$ kvclaims (?P<command>.*)\n(?P<output>(?:.*\n)*?)```")
TIMES = re.compile(r"\d[\d,.]*(?= s\b| states/s)")
PATHS = re.compile(r"\(/[^)]*/(\w+)\)")


TOLD_ELSEWHERE = ("index", "tutorial", "proved", "findings", "rule", "action", "litmus", "engine")
"""Pages that `tests/docs` runs as a whole, each as one session."""


def sessions() -> list[tuple[str, str]]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.stem in TOLD_ELSEWHERE:
            continue
        shown = SESSION.finditer(path.read_text(encoding="utf-8"))
        found += [(match["command"], match["output"]) for match in shown]
    return found


def timeless(text: str) -> str:
    """Without what differs from run to run: times, spaces that align them, and folders."""
    return re.sub(r"\s+", " ", PATHS.sub(r"(\1)", TIMES.sub("T", text))).strip()


@pytest.mark.parametrize(("command", "output"), sessions())
def test_a_shown_command_prints_what_is_shown(command: str, output: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvclaims.checker.cli", *command.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert timeless(ran.stdout) == timeless(output)


def test_the_documents_show_commands() -> None:
    assert len(sessions()) >= 3


@pytest.mark.parametrize(
    "tool",
    [
        "pictures.py",
        "contract.py",
        pytest.param("systems.py", marks=[pytest.mark.engine, pytest.mark.slow, NEEDS]),
    ],
)
def test_what_is_drawn_from_the_machines_is_up_to_date(tool: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_command_of_the_table_exists() -> None:
    from kvclaims.checker.cli import commands

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\| `kvclaims (\w+)", readme))
    assert named == set(commands.commands)


def test_rules_of_the_machines_are_rules_of_the_contract() -> None:
    from kvclaims.checker.instances import MACHINES
    from kvclaims.spec.vocabulary import RULES

    for machine in MACHINES.values():
        for prop in machine.properties:
            assert prop.rule in RULES
        for action in machine.actions:
            for guard in action.guards:
                assert set(guard.protects) <= set(RULES)
