"""The engine that the examples run on: a vLLM with claims, with a model made up on the spot.

For your own: `LLM(model=…, scheduler_cls="kvclaims.bridge.vllm.ClaimScheduler",
additional_config={"kvclaims": {…}})`.
"""

from __future__ import annotations

from typing import Any

from kvclaims.bridge.vllm import setup

BLOCK = 32
SETTINGS = {"quotas": {"team-a": 40, "team-b": 20}, "hard_share": 0.8}


def engine(blocks: int = 80) -> Any:
    """A `vllm.LLM` whose pool has `blocks` usable blocks of 32 tokens."""
    setup.quieten(setup.WHOLE)
    with setup.boot_noise(), setup.model_folder(blocks * BLOCK) as folder:
        from vllm import LLM

        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK,
            num_gpu_blocks_override=blocks + 1,
            max_model_len=blocks * BLOCK,
            disable_log_stats=True,
            scheduler_cls="kvclaims.bridge.vllm.ClaimScheduler",
            additional_config={"kvclaims": SETTINGS},
        )


def text(stream: int, blocks: int) -> list[int]:
    """Token ids that stand for a text of so many blocks."""
    return [3 + (7 * stream + 11 * i + i // 250) % 250 for i in range(blocks * BLOCK)]


def ask(llm: Any, tokens: list[int], extra_args: dict[str, Any] | None = None) -> Any:
    """One request, one token of an answer: vLLM's `RequestOutput`."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra_args)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    return output
