"""Exports: read back by other tools, whole or not at all, and refused before the work is done."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pydot
import pytest

from kvclaims.checker import instances
from kvclaims.checker.cli import run
from kvclaims.checker.exports import ENDINGS, export, export_instance, target
from kvclaims.checker.finite import Instance
from kvclaims.checker.stategraph import as_networkx, dot, graphml, state_graph
from kvclaims.checker.statepage import layout, page
from kvclaims.spec.blockclaims import BLOCKCLAIMS
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.language import without_guard


def small() -> Instance:
    """One claim of one block and one request in a pool of one."""
    return instances.blockclaims((1,), 1, 1, 1)


def broken() -> Instance:
    """The same without what keeps the claim and the request from taking the block both."""
    return replace(small(), machine=without_guard(BLOCKCLAIMS, "alloc", 1))


def test_the_graph_has_the_counted_states_and_steps() -> None:
    graph = state_graph(instances.claims())
    assert (len(graph.nodes), len(graph.edges)) == (732, 3_086)
    assert sum(node.initial for node in graph.nodes) == 2
    assert max(node.depth for node in graph.nodes) == 10


def test_a_label_says_what_differs_from_the_start() -> None:
    graph = state_graph(small())
    start = next(node for node in graph.nodes if node.initial)
    assert start.label == "initial"
    edge = next(e for e in graph.edges if e.action == "offer")
    assert edge.label == "offer(claim0)"
    assert graph.nodes[edge.after].label == "status(claim0) = Offered"
    assert graph.nodes[edge.after].group == "claim0 Offered"


def test_states_that_break_a_rule_are_in_the_graph_and_marked() -> None:
    assert not any(node.broken for node in state_graph(small()).nodes)
    graph = state_graph(broken())
    wrong = [i for i, node in enumerate(graph.nodes) if node.broken]
    assert wrong
    assert "F1 resident and active fit" in {b for i in wrong for b in graph.nodes[i].broken}
    assert not any(edge.before in wrong for edge in graph.edges)
    assert "color=red" in dot(graph)
    assert "color=red" not in dot(state_graph(small()))


def test_graphs_are_read_back_as_they_were_written() -> None:
    graph = state_graph(instances.claims())
    again = nx.read_graphml(io.BytesIO(graphml(graph).encode()))
    assert (again.number_of_nodes(), again.number_of_edges()) == (732, 3_086)
    known = as_networkx(graph)
    assert again.nodes["0"] == dict(known.nodes[0])
    drawn = state_graph(small())
    (picture,) = pydot.graph_from_dot_data(dot(drawn))
    assert len(picture.get_edges()) == len(drawn.edges)
    labels = {node.get("label") for node in picture.get_nodes() if node.get("label")}
    assert '"status(claim0) = Offered"' in labels


def test_a_page_holds_every_state_and_fetches_nothing() -> None:
    graph = state_graph(broken())
    text = page(graph)
    assert not re.search(r'(src|href)="|url\((?!#)|@import|fetch\(|XMLHttp', text)
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert (len(data["nodes"]), len(data["edges"])) == (len(graph.nodes), len(graph.edges))
    shown = sorted(state for box in data["boxes"] for state in box["states"])
    assert shown == list(range(len(graph.nodes)))
    assert sum(bool(node[3]) for node in data["nodes"]) == sum(bool(n.broken) for n in graph.nodes)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_groups_of_a_page_do_not_overlap() -> None:
    boxes = layout(state_graph(instances.claims()))
    assert {box.title for box in boxes} >= {"claim0 accepted", "claim0 harmed"}
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = (
                a.x + a.width <= b.x
                or b.x + b.width <= a.x
                or a.y + a.height <= b.y
                or b.y + b.height <= a.y
            )
            assert apart, (a.title, b.title)


def test_data_cannot_end_the_script_that_holds_it() -> None:
    machine = replace(BLOCKCLAIMS, meaning="</script><script>alert(1)</script> & more")
    text = page(state_graph(replace(small(), machine=machine)))
    assert text.count("</script>") == 2


@pytest.mark.parametrize("form", ENDINGS)
def test_a_format_by_name_writes_a_file_called_as_the_instance(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = export_instance(small(), target(form, "block/claims"))
    assert found.files[0] == Path(f"block_claims{ENDINGS[form]}")
    assert found.files[0].stat().st_size == found.size > 0
    assert found.line().startswith(f"wrote block_claims{ENDINGS[form]}")
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {path.name for path in found.files}, "nothing else is left"


def test_a_module_is_written_under_the_name_of_its_file(tmp_path: Path) -> None:
    export("tiers", {}, target(str(tmp_path / "Mine.tla"), "tiers"))
    assert "MODULE Mine " in (tmp_path / "Mine.tla").read_text(encoding="utf-8")
    assert "SPECIFICATION Spec" in (tmp_path / "Mine.cfg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("png", "cannot export to 'png'"),
        ("g.svg", "cannot export to 'g.svg'"),
        ("", "cannot export to ''"),
        ("missing/g.dot", "there is no folder"),
        ("a-b.tla", "a TLA. module is called as its file"),
        ("folder.html", "it is a folder"),
    ],
)
def test_a_bad_target_is_refused_before_anything_is_explored(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(BadOperation, match=message):
        target(name, "claims")


def test_the_command_refuses_with_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explore", "claims", "--export", "/nowhere/g.dot"], io.StringIO()) == 2
    assert capsys.readouterr().err == (
        "kvclaims: cannot write /nowhere/g.dot: there is no folder /nowhere\n"
    )


def test_the_command_names_the_file_and_how_to_read_it(tmp_path: Path) -> None:
    out = io.StringIO()
    assert run(["explore", "tiers", "--export", str(tmp_path / "t.smt2"), "--json"], out) == 0
    said = json.loads(out.getvalue())
    assert said["states"] == 458
    assert said["exported"]["files"] == [str(tmp_path / "t.smt2")]
    assert "each unsat" in said["exported"]["reading"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.pml"
    path.write_text("old", encoding="utf-8")
    where = target(str(path), "tiers")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BadOperation, match="No space left"):
        export_instance(small(), where)
    assert [p.name for p in tmp_path.iterdir()] == ["t.pml"]
    assert path.read_text(encoding="utf-8") == "old"


def test_a_graph_too_large_to_look_at_is_refused() -> None:
    with pytest.raises(BadOperation, match="too many for this form of graph"):
        state_graph(instances.blockclaims(), limit=100)
