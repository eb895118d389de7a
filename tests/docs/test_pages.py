"""The pages of `docs/` do what they show: every command is run, all code shown is a file's.

A page is one session.  Its `console` blocks are run from top to bottom in a copy of the checkout,
so that it may plant bugs and leave files behind.  What a command prints is compared with what is
shown, without times and folders; a line `…`, or a `…` at the end of a line, stands for what is left
out.  A command ends with 0 unless `echo $?` follows and shows what else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from kvclaims.checker.cli import commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOLD = (
    *("index.md", "tutorial.md", "proved.md", "findings.md"),
    *("howto/rule.md", "howto/action.md", "howto/litmus.md", "howto/engine.md"),
)
"""Pages that are run as a whole; others have tests of their own."""

CODE = ("spec", "reference", "checker", "bridge")
FENCE = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<body>(?:.*\n)*?)(?P=indent)```$",
    re.MULTILINE,
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NEEDS_CODE = ("python", "toml")

MAKE = re.compile(r"make (?P<target>\w+)")
"""What sets up the environment that this runs in is looked at, and not done once more."""


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, and what it prints there."""

    text: str
    output: str


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def fences(page: str) -> Iterator[tuple[str | None, str, str]]:
    """The fenced blocks of a page: the file it is said to stand in, its language, its text."""
    for found in FENCE.finditer(read(page)):
        indent = found["indent"]
        lines = (line.removeprefix(indent) for line in found["body"].splitlines(keepends=True))
        yield found["file"], found["language"], "".join(lines)


def session(page: str) -> list[Command]:
    found = []
    for _, language, body in fences(page):
        if language != "console":
            continue
        first, *rest = re.split(r"^\$ ", body, flags=re.MULTILINE)
        assert not first, f"{page}: a console block begins with {first!r}"
        for part in rest:
            text, _, output = part.partition("\n")
            found.append(Command(text, output))
    return found


def timeless(text: str) -> str:
    """Without what differs from run to run: times, the spaces that align them, and folders."""
    text = re.sub(r"\(/[^)]*/(\w+)\)", r"(\1)", text)
    text = re.sub(r"\d[\d,.]*(?= s\b| states/s| a CPU second)", "T", text)
    return "\n".join(re.sub(r"\s+", " ", line).strip() for line in text.splitlines())


def fits(printed: str, shown: str) -> bool:
    """Whether what is shown is what was printed, but for times and what `…` stands for."""
    lines = timeless(shown).split("\n")
    pattern = "\n".join(".*" if line == "…" else _open_ended(line) for line in lines)
    return re.fullmatch(pattern, timeless(printed), re.DOTALL) is not None


def _open_ended(line: str) -> str:
    if line.endswith("…"):
        return re.escape(line[:-1].rstrip()) + r"[^\n]*"
    return re.escape(line)


# --- the copy in which a page runs -----------------------------------------------------------


def checkout(folder: Path) -> dict[str, str]:
    """A copy of the checkout that imports its own code; the environment of its commands."""
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name)
    leave = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=leave)
    package = folder / "path" / "kvclaims"
    package.mkdir(parents=True)
    for name in CODE:
        (package / name).symlink_to(folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    installed = folder / "installed"
    installed.mkdir()
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(installed)]),
        "PIP_TARGET": str(installed),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "100",
    }


def run(command: str, before: int, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Do what a reader's shell would do, `before` being the exit code of the last command."""
    ran = subprocess.run(
        ["bash", "-c", f"(exit {before}); {command}"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.returncode, ran.stdout


def planned(target: str, command: str) -> tuple[int, str]:
    """What make would do; that it would, and nothing printed, as for whoever runs it quietly."""
    ran = subprocess.run(
        [*command.split(), "--dry-run", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert target in ran.stdout, ran.stdout + ran.stderr
    return ran.returncode, ""


@pytest.mark.parametrize("page", TOLD)
def test_every_command_of_a_page_prints_what_is_shown(page: str, tmp_path: Path) -> None:
    shown = session(page)
    env = checkout(tmp_path) if shown else {}
    code = 0
    for command, after in pairwise([*shown, Command("", "")]):
        made = MAKE.match(command.text)
        if made:
            code, printed = planned(made["target"], command.text)
        else:
            code, printed = run(command.text, code, tmp_path, env)
        shows_code = after.text == "echo $?"
        assert code == 0 or shows_code, f"{command.text} ended with {code}:\n{printed}"
        assert fits(printed, command.output), f"$ {command.text}\n{printed}"


@pytest.mark.parametrize("page", TOLD)
def test_code_that_a_page_shows_stands_in_the_file_that_it_names(page: str) -> None:
    for file, language, body in fences(page):
        if language in NEEDS_CODE:
            assert file is not None, f"{page} shows {language} of no file:\n{body}"
        if file is not None:
            assert body in (ROOT / file).read_text(encoding="utf-8"), f"{page}: {file}"


@pytest.mark.parametrize("page", TOLD)
def test_a_command_that_is_mentioned_has_that_name_and_these_options(page: str) -> None:
    for words in map(str.split, re.findall(r"`kvclaims ([^`]+)`", read(page))):
        command = commands.commands[words[0]]
        known = {option for param in command.params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_the_pages_show_commands_and_code() -> None:
    assert sum(len(session(page)) for page in TOLD) >= 25
    assert sum(file is not None for page in TOLD for file, _, _ in fences(page)) >= 10


def test_another_output_does_not_fit() -> None:
    assert fits("a 1.5 s\nb\nc\n", "a 2.5 s\n…\nc\n")
    assert fits("one two\n", "one …\n")
    assert not fits("a\nb\n", "a\n")
    assert not fits("3 states\n", "4 states\n")
    assert not fits("b\n", "…\na\n")


# --- links and the site ------------------------------------------------------------------


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Relative links of a page: the file, and the heading in it ('' for none)."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in LINK.findall(text):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            yield (page.parent / path).resolve() if path else page, heading


def headings(page: Path) -> set[str]:
    """The anchors that Python-Markdown (and GitHub, for these) make of a page's headings."""
    titles = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    plain = (re.sub(r"[^\w\s-]", "", title.lower()) for title in titles)
    return {re.sub(r"[\s-]+", "-", title).strip("-") for title in plain}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for path, heading in links(page):
        assert path.exists(), f"{page.name}: {path}"
        if heading and path.suffix == ".md":
            assert heading in headings(path), f"{page.name}: {path.name}#{heading}"


def test_every_page_that_is_told_is_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in TOLD if f": {page}\n" not in site] == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    for page in TOLD:
        assert (tmp_path / "site" / page).with_suffix("").joinpath("index.html").exists() or (
            page == "index.md" and (tmp_path / "site" / "index.html").exists()
        )


# --- the findings ------------------------------------------------------------------------


def test_the_findings_page_names_every_script_with_its_sentence() -> None:
    page = read("findings.md")
    scripts = sorted((DOCS / "findings").glob("*.py"))
    assert scripts
    for script in scripts:
        sentence = script.read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
        assert f"(findings/{script.name})" in page, script.name
        assert sentence.rstrip(".") in page, sentence
