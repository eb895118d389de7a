"""The same claims on a whole vLLM: real forward passes, and the bytes of the KV cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from vllm_world import NEEDS_VLLM, World

from kvclaims.bridge.vllm.engine import WHOLE_ENGINE
from kvclaims.spec.interface import BadOperation, PoolConfig
from kvclaims.spec.vocabulary import Outcome, Phase

pytestmark = NEEDS_VLLM


def changed(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    return sum(a != b for a, b in zip(before, after, strict=True))


def test_native_reuse_loses_the_bytes() -> None:
    w = World(WHOLE_ENGINE, 80)
    blocks = w.cache("A60")
    before = w.runtime.fingerprint(blocks)
    assert len(set(before)) == 60
    w.ask("run", "B70")
    w.drain()
    assert w.asked("run").outcome is Outcome.SERVED
    assert w.counts()["allocation_victim_selected"] == 50
    assert changed(before, w.runtime.fingerprint(blocks)) == 50


def test_a_hard_claim_keeps_every_byte() -> None:
    w = World(WHOLE_ENGINE, 80)
    blocks = w.cache("A60")
    before = w.runtime.fingerprint(blocks)
    w.claim("keep", "A60")
    w.ask("run", "B70")
    w.drain()
    run = w.asked("run")
    assert (run.outcome, run.shortfall, run.blocking_claims) == (Outcome.REFUSED, 50, ("keep",))
    assert w.runtime.observe().free == 20
    assert changed(before, w.runtime.fingerprint(blocks)) == 0
    w.ask("owner", "A60+B5")
    w.drain()
    assert w.asked("owner").hit_blocks == 60
    assert changed(before, w.runtime.fingerprint(blocks)) == 0


@pytest.mark.parametrize("usable", [80, 90, 100, 110, 120, 130, 150])
def test_the_sweep(usable: int) -> None:
    victims = max(0, 130 - usable)
    for admit_reuse in (True, False):
        w = World(WHOLE_ENGINE, usable)
        w.cache("A60")
        w.ask("run", "B70", admit_reuse=admit_reuse)
        w.drain()
        assert w.counts()["allocation_victim_selected"] == victims
    w = World(WHOLE_ENGINE, usable)
    w.cache("A60")
    w.claim("keep", "A60")
    w.ask("run", "B70")
    w.drain()
    expected = Outcome.SERVED if usable >= 130 else Outcome.REFUSED
    assert w.asked("run").outcome is expected
    assert w.asked("run").shortfall == victims
    assert w.counts()["allocation_victim_selected"] == 0


def test_generated_tokens_are_forced_so_contents_compare() -> None:
    w = World(WHOLE_ENGINE, 20)
    w.ask("decodes", "A2", max_new_tokens=70)
    w.drain()
    zeros = (*w.tokens("A2"), *[0] * 64)
    assert None not in w.runtime.locate(zeros)


def test_preemption_under_a_claim_keeps_its_bytes() -> None:
    w = World(WHOLE_ENGINE, 20)
    blocks = w.cache("A6")
    w.claim("keep", "A6")
    before = w.runtime.fingerprint(blocks)
    for name in "xy":
        w.ask(name, f"{name.upper()}6", max_new_tokens=65)
    w.drain()
    assert w.counts()["active_request_preempted"] == 1
    assert w.view("keep").phase is Phase.MATERIALIZED
    assert changed(before, w.runtime.fingerprint(blocks)) == 0


def test_the_last_run_has_the_engine() -> None:
    first = World(WHOLE_ENGINE, 20)
    first.ask("left over", "A4", max_new_tokens=50)
    first.runtime.step()
    second = World(WHOLE_ENGINE, 30)
    second.cache("A4")
    with pytest.raises(BadOperation, match="taken over"):
        first.runtime.step()
    assert second.runtime.observe().free == 30


def test_sizes_it_does_not_have_are_refused() -> None:
    with pytest.raises(BadOperation, match="tokens"):
        WHOLE_ENGINE.open(PoolConfig(20, 16), "t")
    with pytest.raises(BadOperation, match="usable"):
        WHOLE_ENGINE.open(PoolConfig(10_000, 32), "t")


def test_it_boots_beside_a_loaded_native_compiler() -> None:
    """vLLM 0.32 scans all modules while it boots, and the C library of llvmlite upset it."""
    program = (
        "import llvmlite.binding, sys\n"
        "from kvclaims.bridge.vllm.whole_engine import booted\n"
        "booted()\n"
        "assert 'llvmlite.binding.ffi' in sys.modules\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kvclaims.bridge.vllm import setup; setup.quieten(setup.WHOLE)\n" + program,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
