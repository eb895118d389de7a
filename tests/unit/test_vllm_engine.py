"""The engine objects say what is missing, and names follow `spec.content`; no vLLM needed."""

from __future__ import annotations

import importlib.util

import pytest

from kvclaims.bridge.vllm.engine import IN_PROCESS, WHOLE_ENGINE
from kvclaims.bridge.vllm.names import ContentChain
from kvclaims.spec.content import content_ids
from kvclaims.spec.interface import EngineMissing, PoolConfig


def test_a_missing_engine_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for engine in (IN_PROCESS, WHOLE_ENGINE):
        with pytest.raises(EngineMissing, match=r"pip install 'kvclaims\[vllm\]'"):
            engine.info()
        with pytest.raises(EngineMissing):
            engine.open(PoolConfig(8), "t")


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_chains_grow_to_the_ids_of_the_contract(salt: str) -> None:
    tokens = tuple(range(1, 30))
    chain = ContentChain(4, salt)
    for end in (3, 4, 11, 29):
        assert tuple(chain.extend(tokens[:end])) == content_ids(tokens[:end], 4, salt)
