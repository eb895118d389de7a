"""A pytest plugin: what vLLM's own tests name, and cannot be had without a network.

Their models only say what a scheduler is for.  A folder called like the model says how large it is;
here is a stand-in for the one that takes images, of which a scheduler knows the tokens of an image.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

_WORDS: Final = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272}
_SIZES: Final = {
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_OPT: Final = {**_WORDS, **_SIZES}
_TEXT: Final = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32064,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
_SIGHT: Final = {
    "model_type": "clip_vision_model",
    "image_size": 336,
    "patch_size": 14,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 64,
    "vocab_size": 32000,
}
_LLAVA: Final = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "torch_dtype": "float16",
    "text_config": _TEXT,
    "vision_config": _SIGHT,
}
_TOKENIZER: Final = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
"""One that knows no word: vLLM opens it, and no test has it read a text."""
CONFIGS: Final = {
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": _OPT,
    "Qwen/Qwen2.5-VL-3B-Instruct": _OPT,
    "llava-hf/llava-1.5-7b-hf": _LLAVA,
}
"""Model → what its folder says of it."""

IMAGE_TOKENS: Final = (336 // 14) ** 2
"""Tokens of an image of that model: one for each patch."""


def write_folders(at: Path) -> None:
    """A folder below `at` for every model, which vLLM finds when it runs there."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    for model, config in CONFIGS.items():
        (at / model).mkdir(parents=True)
        (at / model / "config.json").write_text(json.dumps(config))
        (at / model / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
        Tokenizer(WordLevel({"<unk>": 0}, "<unk>")).save(str(at / model / "tokenizer.json"))


class ImageSizes:
    """What vLLM asks of a model's processor to know how much room encoders need."""

    supported_mm_limits: Final[Mapping[str, int | None]] = {"image": None}
    allowed_mm_limits: Final = {"image": 999}

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
        return {modality: min(IMAGE_TOKENS, seq_len) for modality in mm_counts}


class Processor:
    def __init__(self, info: ImageSizes, dummy_inputs: None) -> None:
        self.info = info


def pytest_configure() -> None:
    import torch
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.multimodal import MULTIMODAL_REGISTRY

    class TakesImages(torch.nn.Module, SupportsMultiModal):  # type: ignore[misc]
        """No step is ever computed with it."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            raise NotImplementedError

        def embed_input_ids(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        def embed_multimodal(self, **kwargs: Any) -> Any:
            raise NotImplementedError

        def compute_logits(self, hidden_states: Any) -> Any:
            raise NotImplementedError

        def forward(self, input_ids: Any, positions: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    MULTIMODAL_REGISTRY.register_processor(
        Processor, info=ImageSizes, dummy_inputs=lambda info: None
    )(TakesImages)
    ModelRegistry.register_model("LlavaForConditionalGeneration", TakesImages)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM logs, which it keeps to itself."""
    logger = logging.getLogger("vllm")
    kept, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.propagate = kept
