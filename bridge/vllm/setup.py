"""What a vLLM scheduler and its requests are made of, without weights and without a network."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Final

QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment for an engine that asks no network and writes nothing but errors."""

ALONE: Final = {"VLLM_TARGET_DEVICE": "cpu"}
"""Environment for allocator and scheduler alone, also of a build for another device."""

WHOLE: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment for a whole engine in this process."""

VOCABULARY_SIZE: Final = 256

MODEL: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A Llama small enough to be made up on the spot."""

MOST_RUNNING: Final = 256
"""Requests that may run at once: more than any program here submits."""


def quieten(more: dict[str, str] | None = None) -> None:
    """Set the environment before vLLM is imported; what the user has set stays."""
    for name, value in {**QUIET, **(more or {})}.items():
        os.environ.setdefault(name, value)
    logger = logging.getLogger("vllm")
    if not logger.handlers:  # without a handler, Python prints warnings by itself
        logger.addHandler(logging.NullHandler())
    # A checkout that was never built has no version file.
    warnings.filterwarnings("ignore", "Failed to read commit hash", RuntimeWarning)
    # It tells that there is no Triton, which is so on purpose where there is no GPU.
    logging.getLogger("torch._library.triton").addFilter(lambda _: False)


@contextmanager
def boot_noise() -> Iterator[None]:
    """Keep what engines say while they boot off standard output, which belongs to `--json`."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextmanager
def model_folder(max_tokens: int, model: Mapping[str, Any] = MODEL) -> Iterator[str]:
    """A folder with nothing but the model's configuration."""
    with tempfile.TemporaryDirectory(prefix="kvclaims-model-") as folder:
        config = {**model, "max_position_embeddings": max_tokens}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


ENCODER_ROOM: Final = 1 << 20
"""Tokens of modality inputs that one step may encode, and that are kept: never short of room."""

CONNECTORS: Final = {1: ("kv_consumer", "recompute"), 2: ("kv_both", "fail")}
"""`PoolConfig.connector` → the role that vLLM gives it, and what becomes of requests whose load
fails, where a version lets that be chosen."""


def scheduler_config(
    max_tokens: int,
    policy: str = "fcfs",
    asynchronous: bool = False,
    drafts: int = 0,
    connector: int = 0,
) -> Any:
    """vLLM's configuration for one engine that prefills any prompt in one chunk: one of its own
    for each caller, to make which takes a hundred times as long as to copy it."""
    made = _scheduler_config(max_tokens, policy, asynchronous, drafts, connector)
    config = copy(made)
    for part in ("model_config", "scheduler_config", "cache_config", "parallel_config"):
        setattr(config, part, copy(getattr(made, part)))
    # vLLM's platform for the CPU turns it off; here steps overlap on any platform.
    config.scheduler_config.async_scheduling = asynchronous
    return config


@cache
def _scheduler_config(
    max_tokens: int, policy: str, asynchronous: bool, drafts: int, connector: int
) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    with model_folder(max_tokens) as folder:
        model = ModelConfig(
            model=folder,
            dtype="float32",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=max_tokens,
        )
    return VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=MOST_RUNNING,
            max_num_batched_tokens=max(max_tokens, MOST_RUNNING),
            max_model_len=max_tokens,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            policy=policy,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),  # a build for GPUs works here without one
        **_speculation(drafts),
        **_transfers(connector),
    )


def _speculation(drafts: int) -> dict[str, Any]:
    """Drafts taken from the prompt: they have no model, so no KV of their own."""
    if not drafts:
        return {}
    from vllm.config import SpeculativeConfig

    return {
        "speculative_config": SpeculativeConfig(model="ngram", num_speculative_tokens=drafts),
    }


def _transfers(connector: int) -> dict[str, Any]:
    if not connector:
        return {}
    from vllm.config import KVTransferConfig

    role, policy = CONNECTORS[connector]
    config = KVTransferConfig(
        kv_connector="TellingConnector",
        kv_connector_module_path="kvclaims.bridge.vllm.connector",
        kv_role=role,
    )
    if hasattr(config, "kv_load_failure_policy"):
        config.kv_load_failure_policy = policy
    return {"kv_transfer_config": config}


def give_encoder_room(scheduler: Any, room: int = ENCODER_ROOM) -> None:
    """Let requests bring modality inputs, of so many tokens at a time; the model is one for text,
    and has no room for them."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler.max_num_encoder_input_tokens = room
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=room)


def make_scheduler(
    scheduler_class: type,
    usable: int,
    block_size: int,
    *,
    policy: str = "fcfs",
    asynchronous: bool = False,
    windows: tuple[int, ...] = (0,),
    tier_blocks: int = 0,
    load_failure_policy: str = "recompute",
    drafts: int = 0,
    connector: int = 0,
    clears: bool = False,
    stages: int = 1,
    longest: int | None = None,
) -> Any:
    """A scheduler with `usable` blocks, and a tier for `tier_blocks` copies of blocks.

    `windows` has a layer and KV group each: 0 for full attention, else the tokens of its sliding
    window.  `drafts` and `connector` as in `PoolConfig`.  With `clears` its workers want to be told
    of new blocks, to fill them with zeros.  They are `stages` of a pipeline.  `longest` is the
    length of the longest request that is taken, in tokens; a little more than the pool holds where
    it is not said.
    """
    import torch
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    most = longest or (usable + 2) * block_size
    config = scheduler_config(most, policy, asynchronous, drafts, connector)
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = usable + 1
    config.parallel_config.pipeline_parallel_size = stages
    if tier_blocks:
        from vllm.config import KVTransferConfig

        tier = tier_config("(in memory)", tier_blocks, load_failure_policy)
        config.kv_transfer_config = KVTransferConfig(**tier)
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [
        SlidingWindowSpec(**shape, sliding_window=w) if w else FullAttentionSpec(**shape)
        for w in windows
    ]
    register_all_kvcache_specs(config)
    kind = _clearing(KVCacheConfig) if clears else KVCacheConfig
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=kind(
            num_blocks=usable + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )


def _clearing(kind: type) -> type:
    """vLLM's configuration of a cache that is cleared, which it says of mixed precisions alone."""
    if not hasattr(kind, "needs_kv_cache_zeroing"):
        raise AttributeError("blocks are not cleared")
    return type("ClearedKVCacheConfig", (kind,), {"needs_kv_cache_zeroing": True})


def tier_config(folder: str, blocks: int, load_failure_policy: str) -> dict[str, Any]:
    """What vLLM is given to keep offloadable claims in files (`kvclaims.bridge.vllm.offload`)."""
    return {
        "kv_connector": "ClaimTier",
        "kv_connector_module_path": "kvclaims.bridge.vllm.offload",
        "kv_role": "kv_both",
        "kv_load_failure_policy": load_failure_policy,
        "kv_connector_extra_config": {"folder": folder, "blocks": blocks},
    }


def block_hasher(block_size: int) -> Callable[[Any], list[bytes]]:
    """vLLM's own chain of block hashes (sha256)."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    hasher: Callable[[Any], list[bytes]] = get_request_block_hasher(block_size, sha256)
    return hasher


def _lora(name: str) -> Any:
    """A LoRA adapter by name; nothing of it is ever loaded."""
    if not name:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1 + zlib.crc32(name.encode()), f"/none/{name}")


def make_request(
    request_id: str,
    tokens: tuple[int, ...],
    max_new_tokens: int,
    hasher: Callable[[Any], list[bytes]],
    *,
    salt: str = "",
    adapter: str = "",
    priority: int = 0,
    only_token: int | None = None,
    stop: int | None = None,
    resumable: bool = False,
    pools: bool = False,
    extra_args: dict[str, Any] | None = None,
    inputs: list[Any] | None = None,
) -> Any:
    """A request as the engine core takes it; `only_token` is the one token it may generate, and
    `inputs` are what of `modality_inputs` its tokens stand for.  It ends before its time at the
    token `stop`, is a session that may get more input where it is `resumable`, and generates
    nothing where it `pools`."""
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=None if only_token is None else [only_token],
        stop_token_ids=None if stop is None else [stop],
        extra_args=extra_args,
    )
    params.update_from_generation_config({}, MODEL["eos_token_id"])
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=None if pools else params,
        pooling_params=PoolingParams() if pools else None,
        cache_salt=salt or None,
        lora_request=_lora(adapter),
        priority=priority,
        block_hasher=hasher,
        **({"mm_features": inputs} if inputs else {}),
        **({"resumable": True} if resumable else {}),
    )


def modality_inputs(name: str, tokens: int, block_size: int) -> list[Any]:
    """The input of that name, in pieces: one in each full block of a prompt, the odd ones a token
    short of its start; one over all of a prompt that fills no block.

    So a block's own tokens and those before it decide what it stands for, as its content does.
    """
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    places = [
        (f"{name}/{p}", p * block_size + p % 2, block_size - p % 2)
        for p in range(tokens // block_size)
    ]
    return [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=piece,
            mm_position=PlaceholderRange(offset=start, length=length),
        )
        for piece, start, length in places or [(f"{name}/of {tokens}", 0, tokens)]
    ]


def modality_of(request: Any) -> str:
    """The input that a request's tokens stand for, empty for plain text."""
    inputs = getattr(request, "mm_features", None)
    return "" if not inputs else str(inputs[0].identifier).rpartition("/")[0]
