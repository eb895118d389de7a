"""A KV connector of vLLM's own interface for any arrangement of KV groups: it offers tokens.

vLLM makes it, asks it how many tokens it has beyond those found on the device, and tells it which
blocks they go into.  `GroupedRun` fills these: before the step that reads them, or later.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvclaims.bridge.vllm.connector import SchedulerSide


class OfferingConnector(SchedulerSide, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side.  Who drives it sets what is set here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offers: dict[str, int] = {}
        """Request → leading tokens that there are for it."""
        self.found: dict[str, int] = {}
        """Request → the tokens found on the device when it was asked last."""
        self.waits = False
        """Whether a request waits while it is loaded."""
        self.completes = False
        """Whether it brings the states that a group lacks at the end of what is found."""
        self.started: dict[str, tuple[int, int, tuple[tuple[int, ...], ...]]] = {}
        """Request → the tokens of its load, from and to, and its tables."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self.completes

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offered = min(self.offers.get(request.request_id, 0), int(request.num_tokens) - 1)
        self.found[request.request_id] = num_computed_tokens
        news = max(0, offered - num_computed_tokens)
        return news, self.waits and news > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            start = self.found[request.request_id]
            tables = tuple(map(tuple, blocks.get_block_ids()))
            self.started[request.request_id] = (start, start + num_external_tokens, tables)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ARG002
        block_ids: Any,  # noqa: ARG002
    ) -> tuple[bool, None]:
        return False, None
