"""What others import says what it means: every name of the public surface is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    *("spec/language.py", "spec/interface.py", "spec/operations.py", "spec/content.py"),
    *("spec/fidelity.py", "spec/telemetry.py", "spec/vocabulary.py", "spec/lowering.py"),
    "bridge/serving/client.py",
)
"""For who writes rules, adapters, programs, readers of traces, and clients."""


def named(body: list[ast.stmt], before: str = "") -> Iterator[tuple[str, bool]]:
    """Public classes, functions and methods, and whether each says what it is."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield before + node.name, ast.get_docstring(node) is not None
            if isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{node.name}.")


@pytest.mark.parametrize("file", PUBLIC)
def test_every_public_name_is_documented(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    names = list(named(tree.body))
    assert names
    told = {name.rpartition(".")[2] for name, is_documented in names if is_documented}
    bare = [name for name, is_documented in names if not is_documented]
    # What overrides a method means what the method means.
    assert [name for name in bare if "." not in name or name.rpartition(".")[2] not in told] == []
