"""A request as SGLang's cache knows it, and what the scheduler keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvclaims.bridge.vllm.names import ContentChain
from kvclaims.bridge.vllm.requests import RequestRecord
from kvclaims.spec.content import GENERATED_TOKEN
from kvclaims.spec.interface import RequestSpec


def _nothing() -> torch.Tensor:
    return torch.empty((0,), dtype=torch.int64)


@dataclass(eq=False)
class CachedRequest:
    """The fields of a request that `RadixCache` reads and writes, under SGLang's names."""

    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: torch.Tensor = field(default_factory=_nothing)
    last_node: Any = None
    req_pool_idx: int | None = None


@dataclass(eq=False)
class Job:
    """One request.  `written` leading tokens have KV; `length` slots of its row are its own or
    locked for it."""

    spec: RequestSpec
    record: RequestRecord
    request: CachedRequest
    chain: ContentChain = field(default_factory=lambda: ContentChain(1))
    length: int = 0
    written: int = 0

    @property
    def name(self) -> str:
        return self.spec.request_id

    @property
    def tokens(self) -> list[int]:
        return self.request.origin_input_ids + self.request.output_ids

    @property
    def keys(self) -> list[str]:
        """The contents of its tokens so far: a block is one token."""
        return self.chain.extend(self.tokens)

    @property
    def is_done(self) -> bool:
        return len(self.request.output_ids) >= self.spec.max_new_tokens

    def sampled(self) -> None:
        self.request.output_ids.append(GENERATED_TOKEN)

    def start_over(self) -> None:
        """As SGLang's `reset_for_retract`: the tokens stay, what was computed is gone."""
        request = self.request
        request.prefix_indices, request.last_node, request.req_pool_idx = _nothing(), None, None
        self.length = self.written = 0


def job_of(spec: RequestSpec) -> Job:
    record = RequestRecord(spec.request_id, spec.admit_reuse)
    job = Job(spec, record, CachedRequest(list(spec.tokens)))
    record.prefix_id = job.keys[-1]
    return job
