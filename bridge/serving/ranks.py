"""One answer of a server whose engines have a pool each (data parallelism).

A claim by prefix is made on every engine or on none, as any of them may get the request that needs
it; one that came with a request is where that request went.  So each operation is done on all, and
the answer of one that has the claim is the server's, with every engine's own under `engines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvclaims.bridge.serving.desk import Answer

_ONE: Final = ("block_size", "tier_copy_bytes")
"""Numbers that are the same on every engine, and of one thing."""


def together(op: str, answers: Sequence[Answer]) -> Answer:
    """The server's answer to an operation; `answers` has one of each engine, in their order."""
    if len(answers) == 1:
        return answers[0]
    if op in ("check", "declare"):  # one that says no speaks for all
        chosen = _first(answers, lambda answer: answer.status >= 400)
    else:  # one that knows of it, or failing that, one that had something to say
        chosen = _first(
            answers, lambda answer: answer.status < 400, lambda answer: answer.status != 404
        )
    if op in ("check", "verdict", "decision") or chosen.status == 404:
        return chosen
    told = {n: a.body for n, a in enumerate(answers) if a.status < 400}  # one may be ending
    if op in ("list", "pool", "stats") and not told:
        return chosen
    if op == "stats":
        return Answer(chosen.status, _in_all([*told.values()]))
    if op == "list":
        listed = [{**c, "engine": n} for n, body in told.items() for c in body["claims"]]
        left_out = sum(body["left_out"] for body in told.values())
        return Answer(chosen.status, {"claims": listed, "left_out": left_out})
    body = _in_all([*told.values()]) if op == "pool" else chosen.body
    own = [{**a.body, "engine": n, "status": a.status} for n, a in enumerate(answers)]
    return Answer(chosen.status, {**body, "engines": own})


def are_at_odds(answers: Sequence[Answer]) -> bool:
    """Whether some engines did it and some did not."""
    return len({answer.status < 400 for answer in answers}) > 1


def _first(answers: Sequence[Answer], *wanted: Any) -> Answer:
    """The first that the first of these holds of, or else the next, or else the first."""
    for holds in wanted:
        for answer in answers:
            if holds(answer):
                return answer
    return answers[0]


def _in_all(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    added: dict[str, Any] = _added(bodies)
    return {**added, **{name: bodies[0][name] for name in _ONE if name in bodies[0]}}


def _added(values: Sequence[Any]) -> Any:
    """Numbers added up, and what is made of them; of texts the first, and no limit is none."""
    first = values[0]
    if None in values:
        return None
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _added([v[name] for v in values if name in v]) for name in names}
    if isinstance(first, list):
        return _lists(values)
    return first if isinstance(first, str) else sum(values)


def _lists(values: Sequence[list[Any]]) -> list[Any]:
    """Numbers by their place, and objects by what their texts say."""
    if not any(isinstance(item, Mapping) for value in values for item in value):
        return [_added(items) for items in zip(*values, strict=True)]
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for item in (item for value in values for item in value):
        said = tuple((name, text) for name, text in item.items() if isinstance(text, str))
        alike.setdefault(said, []).append(item)
    return [_added(items) for items in alike.values()]
