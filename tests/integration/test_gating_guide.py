"""docs/gating-your-fork.md: the change that it shows breaks what it says, as it is printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclaims.bridge.vllm.engine import IN_PROCESS
from kvclaims.checker.codemutants import CodeMutant
from kvclaims.checker.counterexample import described
from kvclaims.checker.enginemutants import plant
from kvclaims.checker.engines import ready
from kvclaims.checker.locating import locate
from kvclaims.checker.supervise import Program, oracle_for, supervise
from kvclaims.spec.interface import Engine, EngineMissing, PoolConfig
from kvclaims.spec.operations import parse

pytestmark = pytest.mark.engine

GUIDE = (Path(__file__).parents[2] / "docs" / "gating-your-fork.md").read_text(encoding="utf-8")
PATH, FUNCTION = "vllm/v1/core/block_pool.py", "BlockPool.touch"

PROGRAM = Program(
    PoolConfig(23, 4, 0),
    tuple(
        parse(raw)
        for raw in (
            {"op": "submit", "request": "r7", "content": [["A", 1]]},
            {"op": "submit", "request": "r8", "content": [["A", 2]]},
            {"op": "step"},
        )
    ),
)
"""The counterexample of the guide."""


@pytest.fixture
def vllm() -> Engine:
    try:
        return ready("vllm")[0]
    except EngineMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def patched(vllm: Engine) -> Iterator[Engine]:
    """vLLM with the guide's diff applied to the function that it changes."""
    from vllm.v1.core.block_pool import BlockPool

    code = BlockPool.touch.__code__
    source = (Path(vllm.info().path).parent / PATH).read_text(encoding="utf-8")
    old, new = hunk()
    assert source.count(old) == 1, "the guide's diff does not apply to this vLLM"
    plant(CodeMutant(PATH, FUNCTION, 0, "", "", "", lambda: source.replace(old, new)))
    yield vllm
    BlockPool.touch.__code__ = code


def hunk() -> tuple[str, str]:
    """The lines before and after the change, as the guide shows them."""
    (diff,) = re.findall(r"```diff\n(.*?)```", GUIDE, re.DOTALL)
    assert f"+++ b/{PATH}\n" in diff
    lines = diff.partition("@@\n")[2].splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    return old, new


def test_the_guide_prints_what_the_change_breaks(patched: Engine) -> None:
    finding = supervise(patched, oracle_for(patched), PROGRAM)[0]
    assert f"  VIOLATED {finding}\n" in GUIDE
    assert all(f"    {line}\n" in GUIDE for line in described(PROGRAM))
    assert all(name in GUIDE for name in finding.after)


def test_the_guide_names_the_line(patched: Engine) -> None:
    finding = supervise(patched, oracle_for(patched), PROGRAM)[0]
    places = locate(patched, PROGRAM, finding)
    assert f"in {places[0]}\n" in GUIDE
    assert all(f"called by {place}\n" in GUIDE for place in places[1:])


def shown_after(command: str) -> list[str]:
    """The lines that the guide shows of a command, without those that tell of time."""
    blocks = re.findall(r"```text\n\$ (.*)\n((?:.*\n)*?)```", GUIDE)
    shown = "".join(output for told, output in blocks if told == command)
    return [line for line in shown.splitlines() if "a CPU second" not in line and line != "  …"]


@pytest.mark.slow
def test_the_commands_of_the_guide(vllm: Engine, tmp_path: Path) -> None:
    """Each as it stands there, in a home with a fork; only the budget is made shorter."""
    fork = tmp_path / "fork"
    shutil.copytree(Path(vllm.info().path), fork / "vllm", copy_function=os.symlink)
    changed = fork / PATH
    source = changed.read_text(encoding="utf-8")
    changed.unlink()
    changed.write_text(source.replace(*hunk()), encoding="utf-8")
    (tmp_path / "known.toml").write_bytes(Path(str(IN_PROCESS.findings)).read_bytes())
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    gate, fuzz, replay = re.findall(r"^\$ (kvclaims .*)$", GUIDE, re.MULTILINE)
    (again,) = re.findall(r"^    (kvclaims replay .*)$", GUIDE, re.MULTILINE)
    for command, shown in (
        (fuzz, "run it again: kvclaims replay counterexamples/vllm-seed0-B2.json"),
        (replay, "VIOLATED B2 "),
        (gate.replace("--budget 120", "--budget 10"), "VIOLATED B2 in fuzz vllm"),
        (again, "VIOLATED B2 "),
    ):
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        assert ran.returncode == 1, ran.stdout + ran.stderr
        printed = ran.stdout.replace(str(tmp_path), "~")
        for line in shown_after(command):
            assert line in printed, line
        assert shown in ran.stdout, ran.stdout + ran.stderr
    made = {path.name for path in (tmp_path / "gate").iterdir()}
    assert made >= {"report.html", "junit.xml", "results.sarif", "trace.jsonl", "counterexamples"}


def test_without_the_change_nothing_is_broken(vllm: Engine) -> None:
    assert supervise(vllm, oracle_for(vllm), PROGRAM) == ()
