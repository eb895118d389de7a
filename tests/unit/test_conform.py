"""Conformance: the reference takes every step of the machine, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvclaims.checker.conform import INSTANCES, conform, replay_instance
from kvclaims.checker.engines import find
from kvclaims.checker.instances import PINNED
from kvclaims.spec.interface import NotExposed, Stepper
from kvclaims.spec.vocabulary import Verdict

EDGES = {
    # Steps replayed and disabled steps refused; pinned by hand.
    "pool/keys": (1_908, 13_823, 125_461),
    "pool/soft-keys": (1_236, 9_182, 81_046),
}


@pytest.mark.parametrize("name", EDGES)
def test_every_edge_is_replayed_and_every_disabled_step_refused(name: str) -> None:
    found = replay_instance(PINNED[name](), name, find("reference"))  # type: ignore[arg-type]
    assert found.difference is None
    assert (found.states, found.edges, found.refused) == EDGES[name]


def test_whole_reference_conforms() -> None:
    report = conform()
    assert report.verdict is Verdict.HOLDS
    assert {part.instance for part in report.parts} == set(INSTANCES)


class Broken:
    """The reference's stepper with one fault: an action that it takes, or refuses, or botches."""

    def __init__(self, inner: Stepper, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def apply(self, action: str, args: Mapping[str, Any]) -> bool:
        if self.fault == "refuses" and action == "register":
            return False
        if self.fault == "takes" and action == "overflow":
            self.inner.apply(action, args)
            return True
        return self.inner.apply(action, args)

    def state(self) -> Mapping[str, Any]:
        state = dict(self.inner.state())
        if self.fault == "botches" and state["held"]:
            state["free"] += 1
        return state

    def clone(self) -> Broken:
        return Broken(self.inner.clone(), self.fault)


class BrokenEngine:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def stepper(self, *args: Any) -> Stepper:
        return Broken(find("reference").stepper(*args), self.fault)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "step", "message"),
    [
        ("refuses", "register(request0, block1, key0)", "enabled in the machine, refused here"),
        ("takes", "overflow(request0, 0)", "disabled in the machine, taken here"),
        ("botches", "take(request0, block1)", "free: the machine says 1, the runtime 2"),
    ],
)
def test_a_fault_is_shown_with_the_shortest_way_there(fault: str, step: str, message: str) -> None:
    found = replay_instance(PINNED["pool/keys"](), "pool/keys", BrokenEngine(fault))
    assert found.verdict is Verdict.VIOLATED
    assert found.difference is not None
    assert found.difference.step == step
    assert found.difference.message == message


def test_an_engine_without_single_steps_says_so() -> None:
    with pytest.raises(NotExposed, match="cannot be driven one step at a time"):
        conform("vllm")
