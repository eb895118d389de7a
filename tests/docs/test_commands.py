"""No document shows a command that nothing runs.

`tests/docs/test_pages.py` runs whole pages and `tests/unit/test_documents.py` the sessions of the
others; a command of `make` is looked at as a dry run, for what sets up this very environment is not
done once more.  What is left stands in `RUN_BY`, with the test that runs it.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvclaims.checker.cli import commands, run
from kvclaims.checker.engines import ready
from kvclaims.spec.interface import EngineMissing

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

SHELL = ("console", "text", "sh", "bash", "")
BEGINS = ("kvclaims", "make", "python", "curl", "cd", "cat", "pip", "sh", "git", "vllm")
"""What a command in an indented block begins with; such blocks also show formulas and paths."""

GUIDE = "tests/integration/test_gating_guide.py::test_the_commands_of_the_guide"
SERVER = "tests/integration/test_serving_http.py"
EXAMPLES = "tests/integration/test_serving_llm.py::test_an_example_says_what_it_shows"
SYSTEMS = "tests/docs/test_commands.py::test_the_commands_of_the_page_of_systems"

RUN_BY = {
    "gating-your-fork.md": {
        "kvclaims gate --engine vllm --engine-path": GUIDE,
        "kvclaims fuzz --engine vllm --engine-path": GUIDE,
        "kvclaims replay counterexamples/vllm-seed0-B2.json": GUIDE,
        "kvclaims replay gate/counterexamples/fuzz-vllm-1.json": GUIDE,
    },
    "serving-with-claims.md": {
        "python -m vllm.entrypoints.openai.api_server": f"{SERVER}::test_the_server_is_the_guides",
        "curl $SERVER/v1/completions": f"{SERVER}::test_what_the_guide_shows_is_answered",
        "cd examples && python pinned_system_prompt.py": EXAMPLES,
        "cd examples && python two_tenants.py": EXAMPLES,
        "cd examples && python pausing_agent.py": EXAMPLES,
    },
    "systems.md": {"kvclaims lower ": SYSTEMS},
}
"""Page → how a command begins → the test that runs it."""


def is_run_as_a_session(page: Path, language: str) -> bool:
    """Sessions are run, or compared, where they stand: see above."""
    return language == "console"


def shown(page: Path) -> Iterator[tuple[str, str]]:
    """Every command of a page, with the language of its block ("indented" for one without)."""
    language: str | None = None
    begun = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = re.match(r" *```(\w*)$", line)
        if fence:
            language = None if language is not None else fence[1]
            continue
        if begun:
            begun += " " + line.strip()
        elif language in SHELL:
            begun = line.strip().removeprefix("$ ") if line.strip().startswith("$ ") else ""
        elif language is None and re.match(r"    (?! )", line):
            words = line.split()
            begun = line.strip() if words[0] in BEGINS and len(words) > 1 else ""
        if begun.endswith("\\"):
            begun = begun[:-1].rstrip()
        elif begun:
            yield re.split(r"\s{2,}#", begun)[0], "indented" if language is None else language
            begun = ""


def names(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_command_of_a_document_is_run(page: Path) -> None:
    known = RUN_BY.get(page.name, {})
    begun = set()
    for command, language in shown(page):
        if is_run_as_a_session(page, language) or command.startswith("make "):
            continue
        runs = [start for start in known if command.startswith(start)]
        assert runs, f"{page.name}: nothing runs {command!r}"
        begun.update(runs)
    assert begun == set(known), f"{page.name} does not show {set(known) - begun}"


def test_the_tests_that_are_named_are_there() -> None:
    for test in {test for known in RUN_BY.values() for test in known.values()}:
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_commands_are_found_in_every_kind_of_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "    kvclaims a \\\n        --b   # why\n    usable = 3\n"
        "```text\n$ kvclaims c\nprinted\n```\n    make d\n```yaml\n    sh e\n```\n"
    )
    assert list(shown(page)) == [
        ("kvclaims a --b", "indented"),
        ("kvclaims c", "text"),
        ("make d", "indented"),
    ]


# --- make ------------------------------------------------------------------------------------


def made() -> list[str]:
    """Every command of make, in blocks and in lines of text."""
    found = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found.update(re.findall(r"`(make(?: [^`]+)?)`", text))
        found.update(command for command, _ in shown(page) if command.startswith("make "))
    return sorted(found)


@pytest.mark.parametrize("command", made())
def test_make_knows_what_it_is_asked_for(command: str) -> None:
    words = shlex.split(command)
    ran = subprocess.run(
        [*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_make_help_lists_every_target() -> None:
    ran = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {line.split()[1] for line in ran.stdout.splitlines()}
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.split())


# --- kvclaims in lines of text ---------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_a_command_that_is_mentioned_has_that_name_and_these_options(page: Path) -> None:
    for text in re.findall(r"`kvclaims ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
        words = re.sub(r"[\[\]]", " ", text.replace("\\|", "|")).split()
        command: click.Command = commands.commands[words[0]]
        if isinstance(command, click.Group):
            parts = [command.commands[name] for name in words[1].split("|")]
        else:
            parts = [command]
        known = {option for part in parts for param in part.params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= known, text


# --- the page of systems ---------------------------------------------------------------------


LOWER = [command for command, _ in shown(ROOT / "docs" / "systems.md")]


@pytest.mark.parametrize("command", LOWER)
def test_the_commands_of_the_page_of_systems(command: str) -> None:
    """What is supported holds; what nothing shows is not shown, and none of it is violated."""
    if "vllm" in command or "mechanism" in command:
        pytest.importorskip("vllm" if "vllm" in command else "torch", reason="not installed")
    if "sglang" in command and not ready_or_none("sglang"):
        pytest.skip("SGLang is not installed")
    out = io.StringIO()
    code = run(shlex.split(command)[1:], out)
    verdicts = section(command)
    assert code == (3 if all(word == "unknown" for word in verdicts) else 0), out.getvalue()
    for word in verdicts:
        assert word in out.getvalue()


def ready_or_none(engine: str) -> bool:
    try:
        ready(engine)
    except EngineMissing:
        return False
    return True


def section(command: str) -> list[str]:
    """The verdicts in the table below a command."""
    text = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    table = text.split(f"    {command}\n\n")[1].split("\n\n")[0]
    found = re.findall(r"\*\*(.*?)\*\* \|$", table, re.MULTILINE)
    assert found, table
    return found
