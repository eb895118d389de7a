"""A graph of states as one page to look around in: no network, any browser, any size of screen.

Groups of states are boxes, laid out from left to right by how soon they are reached; in each box
a dot for each state.  Choosing a state draws the steps into and out of it and a shortest way to
it from the start.  The page is data and a small script; nothing in it is fetched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment, PackageLoader

from kvclaims.checker.stategraph import StateGraph

LIMIT: Final = 2_500
"""States that a phone draws without stuttering."""

CELL: Final = 14
"""Distance of two dots, in the page's units."""

TITLE: Final = 22
GAP: Final = 60
CHARACTER: Final = 6.8
"""Width of a title's character, about."""


@dataclass(frozen=True)
class Box:
    """A group of states on the page; `across` dots stand in a row."""

    title: str
    states: tuple[int, ...]
    x: float
    y: float
    width: float
    height: float
    across: int


def page(graph: StateGraph, lit: Sequence[int] = ()) -> str:
    """The page's text.  `lit` are edges, in the order of a run, that stay marked."""
    environment = Environment(loader=PackageLoader("kvclaims.checker"), autoescape=True)
    template = environment.get_template("states.html.jinja")
    return template.render(machine=graph.machine, meaning=graph.meaning, data=_data(graph, lit))


def layout(graph: StateGraph) -> list[Box]:
    """The groups in columns by the depth at which each is first reached."""
    members: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        members.setdefault(node.group, []).append(i)
    first = {title: min(graph.nodes[i].depth for i in own) for title, own in members.items()}
    columns: dict[int, list[str]] = {}
    for title in sorted(members, key=lambda t: (first[t], t)):
        columns.setdefault(first[title], []).append(title)
    boxes = []
    x = 0.0
    for titles in columns.values():
        y = widest = 0.0
        for title in titles:
            box = _box(title, tuple(members[title]), x, y)
            boxes.append(box)
            y += box.height + GAP / 2
            widest = max(widest, box.width)
        x += widest + GAP
    return boxes


def _box(title: str, states: tuple[int, ...], x: float, y: float) -> Box:
    across = max(1, math.ceil(math.sqrt(len(states) * 1.6)))
    rows = math.ceil(len(states) / across)
    width = max(across * CELL + CELL, len(title) * CHARACTER + CELL)
    return Box(title, states, x, y, width, rows * CELL + CELL + TITLE, across)


def _data(graph: StateGraph, lit: Sequence[int]) -> str:
    """Everything the script needs, as JSON that may stand in a page."""
    names = list(graph.nodes[0].values) if graph.nodes else []
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    nodes = []
    for node in graph.nodes:
        values = [word(node.values[name]) for name in names]
        nodes.append([node.depth, int(node.initial), values, [word(b) for b in node.broken]])
    edges = [
        [edge.before, edge.after, word(edge.label), [word(b) for b in edge.broken]]
        for edge in graph.edges
    ]
    boxes: list[Mapping[str, Any]] = [
        {
            "title": box.title,
            "states": box.states,
            "across": box.across,
            "at": [round(v) for v in (box.x, box.y, box.width, box.height)],
        }
        for box in layout(graph)
    ]
    whole = {
        "names": names,
        "nodes": nodes,
        "edges": edges,
        "boxes": boxes,
        "lit": list(lit),
        "words": list(words),
    }
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
