"""Input that is out of all measure gets one line and exit 2, as any other wrong input."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvclaims.checker.cli import run


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments, io.StringIO()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_seconds_are_finite(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a finite number" in fails(["prove", "--timeout", value], capsys)
    assert "not a finite number" in fails(
        ["fuzz", "--engine", "reference", "--seconds", value], capsys
    )


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000])
def test_json_that_nobody_can_read(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd"
    file.write_text(text + "\n")
    assert "JSON" in fails(["audit", str(file)], capsys)
    assert "JSON" in fails(["replay", str(file)], capsys)


def test_a_pool_beyond_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvclaims.spec import operations

    source = Path(operations.__file__).with_name("programs") / "L1.toml"
    file = tmp_path / "huge.toml"
    file.write_text(source.read_text().replace("usable = 80", "usable = 99999999999"))
    assert "more than 1,000,000 blocks" in fails(["litmus", str(file)], capsys)
