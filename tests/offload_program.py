"""A vLLM with a tier, as a process of its own: `python offload_program.py POLICY FOLDER [CALL]`.

It prints one JSON object: what it found, what was served, and what became of claims.  With CALL it
kills itself at that call of fsync after its claim is away, and prints nothing more.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from kvclaims.bridge.fingerprint import fingerprints
from kvclaims.bridge.serving import tierfiles
from kvclaims.bridge.serving.client import LocalClaims, claim_args
from kvclaims.bridge.vllm import setup
from kvclaims.spec.content import content_ids

BLOCK = 32
BLOCKS = 40
PROMPT = 12


def text(stream: int, blocks: int) -> list[int]:
    return [3 + (7 * stream + 11 * i + i // 250) % 250 for i in range(blocks * BLOCK)]


class Engine:
    def __init__(self, policy: str, folder: Path) -> None:
        setup.quieten(setup.WHOLE)
        with setup.boot_noise(), setup.model_folder(BLOCKS * BLOCK) as model:
            from vllm import LLM

            self.llm = LLM(
                model=model,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                block_size=BLOCK,
                num_gpu_blocks_override=BLOCKS + 1,
                max_model_len=BLOCKS * BLOCK,
                disable_log_stats=True,
                scheduler_cls="kvclaims.bridge.vllm.ClaimScheduler",
                additional_config={"kvclaims": {"trace": str(folder / f"{policy}.jsonl")}},
                kv_transfer_config=setup.tier_config(str(folder / "tier"), 100, policy),
            )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.claims = LocalClaims(self.llm, owner="a")
        self.files = folder / "tier" / "0-0"
        self.asked = 0

    def ask(self, tokens: list[int], **extra: Any) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=4,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kvclaims_owner": "a", **extra},
        )
        prompts = [{"prompt_token_ids": tokens}]
        (output,) = self.llm.generate(prompts, params, use_tqdm=False)
        self.settle()
        return output

    def settle(self) -> None:
        """Until copies are written: nobody waits for them (a serving engine's loop does this)."""
        while self.core.scheduler.has_requests():
            self.core.step_fn()

    def press(self) -> None:
        """Enough others to take every block of the pool."""
        self.asked += 1
        for i in range(2):
            self.ask(text(100 * self.asked + i, BLOCKS - 2))

    def digests(self, tokens: list[int]) -> list[int]:
        """What the blocks that hold this content hold, in the engine's KV tensors."""
        observer = self.core.scheduler.enforcer.observer
        found = [observer.lookup(key) for key in content_ids(tuple(tokens), BLOCK)]
        runner = self.core.model_executor.driver_worker.worker.model_runner
        return list(fingerprints(runner.kv_caches, [b for b in found if b is not None]))

    def copies(self) -> list[str]:
        return sorted(path.name for path in self.files.iterdir())

    def phase(self, claim: str) -> str:
        return str(self.claims.inspect(claim)["phase"])


def die_at(call: int) -> None:
    """Die in the `call`-th fsync from now, having written and synced nothing of it."""
    count, fsync = 0, os.fsync

    def fatal(file: int) -> None:
        nonlocal count
        count += 1
        if count == call:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)

    tierfiles.os.fsync = fatal  # type: ignore[assignment]


def main(policy: str, folder: Path, call: int) -> None:
    engine = Engine(policy, folder)
    told: dict[str, Any] = {"left": engine.copies()}
    prompt, longer = text(1, PROMPT), text(1, PROMPT) + text(2, 1)
    plain = engine.ask(longer)
    engine.press()
    claimed = engine.ask(prompt, **claim_args("c", protection="offloadable"))
    told["claim"] = claimed.kv_transfer_params["kvclaims"]["claim"]["decision"]
    told["before"] = engine.digests(prompt)
    told["phases"] = [engine.phase("c")]
    told["copies"] = engine.copies()
    engine.press()
    told["away"] = engine.digests(prompt)
    told["phases"].append(engine.phase("c"))
    if call:
        resident = text(100 * engine.asked + 1, 3)
        engine.claims.declare("d", resident, protection="offloadable")
        print(json.dumps(told), flush=True)
        die_at(call)
        engine.ask(text(3, 1))
        raise AssertionError("it outlived that")
    again = engine.ask(longer)
    told["after"] = engine.digests(prompt)
    told["phases"].append(engine.phase("c"))
    told["found"] = again.num_cached_tokens // BLOCK
    told["same"] = list(again.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    engine.press()
    told["phases"].append(engine.phase("c"))
    spoil(sorted(engine.files.glob("*.kv"), key=lambda p: p.stat().st_mtime_ns)[5])
    refused = engine.ask(longer)
    told["phases"].append(engine.phase("c"))
    told["finish"] = str(refused.outputs[0].finish_reason)
    told["blamed"] = refused.kv_transfer_params["kvclaims"]["restoration_failed"]
    last = engine.ask(longer)
    told["recovered"] = list(last.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    told["recomputed"] = engine.digests(prompt) == told["before"]
    fill_disk()
    engine.ask(text(5, PROMPT), **claim_args("full", protection="offloadable"))
    engine.press()
    told["full"] = engine.claims.inspect("full")
    engine.core.scheduler.shutdown()
    engine.core.model_executor.shutdown()
    told["closed"] = engine.copies()
    print(json.dumps(told), flush=True)


def fill_disk() -> None:
    """From now on nothing more can be written to the tier."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tierfiles._write = full


def spoil(path: Path) -> None:
    """One bit of a copy turns over."""
    whole = bytearray(path.read_bytes())
    whole[-100] ^= 4
    path.write_bytes(whole)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
