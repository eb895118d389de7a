"""`kvclaims elastic plan`: what the activation reserve costs in KV, and what to do about it.

An engine sizes its KV cache by what is left when the largest prefill chunk has its activations:
the *reserve*.  Elastic memory could lend it to the KV while batches only decode; a smaller chunk
frees the same memory always.  The estimate (sources and assumptions: `docs/elastic.md`):

    reserve(chunk) = max(chunk × bytes of activations a token, bytes of the sampler)
    activations    = 2 bytes × (3 × intermediate / tp + 2 × hidden [+ hidden where tp > 1])
    sampler        = sequences × vocabulary × 22 bytes
    KV             = memory × utilization − weights / tp − overhead − reserve(chunk)
    KV a token     = 2 × layers × KV heads / tp × head size × 2 bytes

Three published configurations (arXiv 2608.23658) are recomputed beside what was measured there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

GIB: Final = 1 << 30
_HALF: Final = 2
"""Bytes of a 16-bit number: weights, activations and KV are taken to be such."""

_SAMPLER_BYTES: Final = 22
"""Bytes an entry of the logits: 16-bit, 32-bit copy, sorted values with 64-bit indices, sums."""

OVERHEAD_GIB: Final = 0.9
"""Context, graphs, communication: chosen once so that the first published KV size comes out."""

_LEND_MS_PER_GIB: Final = 23.8 / 3.09
_RETURN_MS_PER_GIB: Final = 3.8 / 3.09
"""Published: 3.09 GiB over 28 layers, memory allocated anew at each lend."""

_STEP_MS: Final = (26 + 1.5 + 36) / 1000
"""Published cost of one unmap, map and set access: what a layer takes where nothing is created."""

PAYS_FROM_SHARE: Final = 0.10
PAYS_FROM_SLOWDOWN: Final = 1.10
SMALL_CHUNK: Final = 2048


@dataclass(frozen=True)
class Model:
    """The sizes of a dense decoder that memory depends on."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Weights of attention, gated MLP, norms and embeddings."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def splits(self, devices: int) -> bool:
        """Whether tensor parallelism can split the heads, or keep a whole KV head on each."""
        kv = self.kv_heads % devices == 0 or devices % self.kv_heads == 0
        return self.heads % devices == 0 and kv

    def kv_bytes(self, tensor_parallel: int) -> int:
        """KV of one token on one device; heads that cannot be split are kept on each."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_size * _HALF


PRESETS: Final[Mapping[str, Model]] = {
    "7b": Model("7b", 28, 3584, 18944, 152064, 28, 4, 128, tied=False),
    "32b": Model("32b", 64, 5120, 27648, 152064, 40, 8, 128, tied=False),
}
"""Two widely used dense decoders with 56 KiB and 256 KiB of KV a token; the published
measurements name their sizes and the former figure, not the models."""


@dataclass(frozen=True)
class Setting:
    """A model on devices of `memory_gib` each, with the larger and the smaller prefill chunk."""

    model: Model
    memory_gib: float = 39.39
    utilization: float = 0.9
    tensor_parallel: int = 1
    chunk: int = 32768
    small_chunk: int = SMALL_CHUNK
    sequences: int = 256
    overhead_gib: float = OVERHEAD_GIB
    slowdown: float | None = None
    """Time to first token at the small chunk over that at the larger one, if it was measured."""

    def __post_init__(self) -> None:
        memory, overhead = self.memory_gib * GIB, self.overhead_gib * GIB
        sizes = (memory, self.utilization, overhead, self.slowdown or 1.0)
        if not all(map(math.isfinite, sizes)):
            raise BadOperation("memory, utilization, overhead and slowdown are finite numbers")
        numbers = (self.memory_gib, self.utilization, self.tensor_parallel, self.chunk)
        if min(*numbers, self.small_chunk, self.sequences) <= 0 or self.overhead_gib < 0:
            raise BadOperation("memory, utilization, parallelism, chunks and sequences are > 0")
        if self.utilization > 1:
            raise BadOperation("utilization is a share of the memory, at most 1")
        if self.small_chunk > self.chunk:
            raise BadOperation("the small chunk is larger than the chunk")
        if self.slowdown is not None and self.slowdown <= 0:
            raise BadOperation("a slowdown is a ratio of times, above 0")
        if not self.model.splits(self.tensor_parallel):
            raise BadOperation(
                f"{self.model.heads} heads with {self.model.kv_heads} KV heads cannot be split "
                f"over {self.tensor_parallel} devices"
            )


@dataclass(frozen=True)
class Plan:
    """What a setting comes to, on each device.  Sizes in bytes, KV in tokens, times in ms."""

    setting: Setting
    token_bytes: int
    activation_bytes: int
    reserve: int
    small_reserve: int
    kv: int

    @classmethod
    def of(cls, setting: Setting) -> Plan:
        """Raises `BadOperation` where the model leaves no room for KV."""
        model, tp = setting.model, setting.tensor_parallel
        width = 3 * model.intermediate // tp + model.hidden * (3 if tp > 1 else 2)
        activations = _HALF * width
        sampler = setting.sequences * model.vocabulary * _SAMPLER_BYTES
        reserve = max(setting.chunk * activations, sampler)
        small = max(setting.small_chunk * activations, sampler)
        whole = setting.memory_gib * setting.utilization - setting.overhead_gib
        kv = int(whole * GIB) - _HALF * model.parameters // tp - reserve
        if kv <= 0:
            raise BadOperation(
                f"{model.name} leaves no room for KV in {setting.memory_gib:g} GiB at chunk "
                f"{setting.chunk}: lower the chunk, or add memory or devices"
            )
        return cls(setting, model.kv_bytes(tp), activations, reserve, small, kv)

    @property
    def freed(self) -> int:
        """Bytes that the small chunk frees for good, and elastic memory while it is lent."""
        return self.reserve - self.small_reserve

    @property
    def tokens(self) -> int:
        return self.kv // self.token_bytes

    @property
    def small_tokens(self) -> int:
        """KV tokens at the small chunk."""
        return (self.kv + self.freed) // self.token_bytes

    @property
    def share(self) -> float:
        """What the reserve takes of the KV that the small chunk has."""
        return self.freed / (self.kv + self.freed)

    @property
    def lend_ms(self) -> tuple[float, float]:
        """One lend: as published, and with single-call costs where nothing is created."""
        return _LEND_MS_PER_GIB * self.freed / GIB, _STEP_MS * self.setting.model.layers

    @property
    def return_ms(self) -> tuple[float, float]:
        return _RETURN_MS_PER_GIB * self.freed / GIB, _STEP_MS * self.setting.model.layers

    @property
    def may_pay(self) -> bool:
        """Small chunks are known to hurt, and the reserve is a large part of the KV."""
        slow = self.setting.slowdown
        hurts = slow is not None and slow >= PAYS_FROM_SLOWDOWN
        return hurts and self.share >= PAYS_FROM_SHARE

    @property
    def recommendation(self) -> str:
        chunk, small = self.setting.chunk, self.setting.small_chunk
        if not self.freed:
            return f"nothing to gain: chunk {chunk} reserves no more than chunk {small}"
        if self.may_pay:
            return (
                f"elastic memory may pay: chunk {small} slows prefills by a factor of "
                f"{self.setting.slowdown:g}, and the reserve is {self.share:.1%} of the KV: "
                "measure it"
            )
        return (
            f"lower the chunk instead: max_num_batched_tokens={small} frees {self.freed / GIB:.2f} "
            f"GiB ({self.share:.1%} of the KV) in every step, with nothing to toggle"
        )

    def to_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "model": setting.model.name,
            "tensor_parallel": setting.tensor_parallel,
            "memory_gib": setting.memory_gib,
            "utilization": setting.utilization,
            "chunk": setting.chunk,
            "small_chunk": setting.small_chunk,
            "kv_bytes_a_token": self.token_bytes,
            "activation_bytes_a_token": self.activation_bytes,
            "reserve_bytes": self.reserve,
            "freed_bytes": self.freed,
            "kv_tokens": self.tokens,
            "kv_tokens_small_chunk": self.small_tokens,
            "reserve_share": round(self.share, 4),
            "lend_ms": [round(ms, 2) for ms in self.lend_ms],
            "return_ms": [round(ms, 2) for ms in self.return_ms],
            "recommendation": self.recommendation,
        }

    def lines(self) -> Iterator[str]:
        setting = self.setting
        yield (
            f"{setting.model.name} on {setting.tensor_parallel} × {setting.memory_gib:g} GiB, "
            f"chunk {setting.chunk} against {setting.small_chunk}"
        )
        yield (
            f"  KV a token {self.token_bytes / 1024:g} KiB, activations a token "
            f"{self.activation_bytes / 1024:.1f} KiB, reserve {self.reserve / GIB:.2f} GiB"
        )
        yield (
            f"  KV tokens {self.small_tokens:,} at chunk {setting.small_chunk}, {self.tokens:,} at "
            f"{setting.chunk}: the difference is {self.share:.1%}"
        )
        yield (
            f"  one lend {self.lend_ms[0]:.1f} ms and one return {self.return_ms[0]:.1f} ms as "
            f"published; {self.lend_ms[1]:.1f} ms each where handles are kept"
        )
        yield f"  {self.recommendation}"


@dataclass(frozen=True)
class Published:
    """A published configuration, and its reserve as a share of the KV, in per cent."""

    plan: Plan
    share: float
    tokens: tuple[int, int] | None = None
    """KV tokens at the small and at the large chunk, where they were published."""

    TOLERANCE: Final = 0.5
    """Percentage points that the estimate may be off."""

    @property
    def difference(self) -> float:
        return 100 * self.plan.share - self.share

    @property
    def near(self) -> bool:
        return abs(self.difference) <= self.TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {
            **self.plan.to_json(),
            "published_share": round(self.share / 100, 4),
            "published_tokens": self.tokens,
            "difference_points": round(self.difference, 2),
        }

    def lines(self) -> Iterator[str]:
        plan = self.plan
        yield (
            f"{plan.setting.model.name} on {plan.setting.tensor_parallel}: reserve "
            f"{100 * plan.share:.1f}% of the KV, published {self.share:g}% "
            f"({self.difference:+.1f} points)"
        )
        if self.tokens:
            ours = (plan.small_tokens, plan.tokens)
            shown = [f"{t / 1000:.0f}K" for t in (*ours, *self.tokens)]
            yield (
                f"  KV tokens {shown[0]} to {shown[1]}, published {shown[2]} to {shown[3]}; "
                f"{plan.token_bytes // 1024} KiB a token, published 56"
            )


@dataclass(frozen=True)
class PlanReport:
    """Plans asked for, or the published configurations: VIOLATED where the estimate is off."""

    plans: tuple[Plan, ...] = ()
    published: tuple[Published, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return Verdict.HOLDS if all(one.near for one in self.published) else Verdict.VIOLATED

    def to_json(self) -> dict[str, Any]:
        return {
            "plans": [plan.to_json() for plan in self.plans],
            "published": [one.to_json() for one in self.published],
        }

    def lines(self) -> Iterator[str]:
        for plan in self.plans:
            yield from plan.lines()
        for one in self.published:
            yield from one.lines()
        if self.published:
            yield "each time: " + self.published[0].plan.recommendation.split(":")[0]


def published() -> PlanReport:
    """The three configurations of the publication, estimated."""
    seven, more = PRESETS["7b"], PRESETS["32b"]
    return PlanReport(
        published=(
            Published(Plan.of(Setting(seven)), 16.0, (366_000, 308_000)),
            Published(Plan.of(Setting(more, tensor_parallel=4)), 7.7),
            Published(Plan.of(Setting(seven, tensor_parallel=4)), 2.7),
        )
    )


def read_model(text: str) -> Model:
    """A preset by name, or a `config.json` as model hubs have them (a file or its folder).

    Raises `BadOperation` for anything that is not a dense decoder's configuration.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    try:
        if path.is_dir():
            path = path / "config.json"
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(PRESETS)
        raise BadOperation(f"{text[:200]}: {error.strerror} (presets: {known})") from None
    except UnicodeDecodeError:
        raise BadOperation(f"{path} is no JSON: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise BadOperation(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadOperation(f"{path}: a configuration is a JSON object")
    if outside := _not_covered(found):
        raise BadOperation(f"{path}: {outside}: this is not covered")
    return _model(path, found)


def _not_covered(found: Mapping[str, Any]) -> str | None:
    """What the configuration has that the estimate knows nothing of, if anything."""
    if any(found.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "mixtures of experts, not a dense decoder"
    window = found.get("sliding_window") and found.get("use_sliding_window", True)
    kinds = found.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if found.get("kv_lora_rank") or window or not full:
        return "layers without full attention"
    return "quantized weights" if found.get("quantization_config") else None


def _model(path: Path, found: Mapping[str, Any]) -> Model:
    def size(key: str, default: int | None = None) -> int:
        value = found.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise BadOperation(f"{path}: {key} is a whole number above 0")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadOperation(f"{path}: num_key_value_heads divides num_attention_heads")
    if hidden < heads:
        raise BadOperation(f"{path}: num_attention_heads is at most hidden_size")
    tied = found.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise BadOperation(f"{path}: tie_word_embeddings is true or false")
    return Model(
        name=path.parent.name or path.name,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size("head_dim", hidden // heads),
        tied=tied,
    )
