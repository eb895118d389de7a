"""A KV connector of vLLM's own interface that tells: what it loads and sends is done elsewhere.

vLLM makes it (`--kv-transfer-config`), asks it what it has for a request, and tells it which
blocks a transfer is to fill.  `SimulatedDriver` does the transfers, when its caller says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus


@dataclass(frozen=True)
class Transfer:
    """A load that vLLM waits for: positions `first` to `first + blocks` of `table`."""

    first: int
    blocks: int
    table: tuple[int, ...]


class SchedulerSide(KVConnectorBase_V1):  # type: ignore[misc]
    """What is the same in any connector that is asked by a scheduler, and does its transfers
    elsewhere."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    # The worker's side is elsewhere: vLLM asks for it, and nothing here calls it.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class TellingConnector(SchedulerSide):
    """The scheduler's side.  Who drives it sets what is set here, and fills `offers`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_size = 1
        self.sends = False
        self.offers: dict[str, int] = {}
        """Request → full blocks from position 0 that there are for it."""
        self.asked: set[str] = set()
        """Requests that it has been asked about; `slow` ones are told nothing the first time."""
        self.slow: set[str] = set()
        self.loading: dict[str, Transfer] = {}
        self.sending: list[str] = []
        """Requests that were served, and whose blocks a transfer still reads."""
        self.on_load: Callable[[Any, int], None] | None = None
        self.on_send: Callable[[Any], None] | None = None

    def _offered(self, request: Any) -> int:
        whole = int(request.num_tokens) // self.block_size
        return min(self.offers.get(request.request_id, 0), whole)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        is_new = request.request_id not in self.asked
        self.asked.add(request.request_id)
        if is_new and request.request_id in self.slow:
            return None, False  # to be asked again
        news = max(0, self._offered(request) * self.block_size - num_computed_tokens)
        return news, news > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        number = num_external_tokens // self.block_size
        table = tuple(blocks.get_block_ids()[0])
        first = self._offered(request) - number
        self.loading[request.request_id] = Transfer(first, number, table)
        if self.on_load is not None:
            self.on_load(request, number)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """What was served is sent, if this one sends; nothing of what was aborted is."""
        sends = self.sends and request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if sends:
            self.sending.append(request.request_id)
            if self.on_send is not None:
                self.on_send(request)
        return sends, None
