"""A vLLM that serves with claims: one server in a process of its own, and words to talk to it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvclaims.bridge.vllm import setup

BLOCK = 32
USABLE = 80
KEYS = {"team-a": "key-a", "team-b": "key-b"}
OPERATOR = "the-operator"

SETTINGS: dict[str, Any] = {
    "quotas": {"team-b": 10},
    "hard_share": 0.8,
    "owners": {o: hashlib.sha256(k.encode()).hexdigest() for o, k in KEYS.items()},
    "operator_sha256": hashlib.sha256(OPERATOR.encode()).hexdigest(),
    "retry_after": 7,
    "trace_bytes": 20_000,
    "trace_files": 0,
}


def prompt(stream: int, blocks: int) -> list[int]:
    """Token ids of this stream's first blocks, without the model's special tokens."""
    return [3 + (7 * stream + 11 * i) % 250 for i in range(blocks * BLOCK)]


class Served:
    """A running server, asked as `owner`."""

    def __init__(self, url: str, trace: Path) -> None:
        self.url = url
        self.trace = trace

    def headers(self, owner: str = "team-a") -> dict[str, str]:
        return {"Authorization": f"Bearer {KEYS[owner]}"}

    def post(self, path: str, body: Any, owner: str = "team-a", **more: Any) -> httpx.Response:
        headers = {**self.headers(owner), **more.pop("headers", {})}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, **more)

    def get(self, path: str, owner: str = "team-a", **more: Any) -> httpx.Response:
        headers = {**self.headers(owner), **more.pop("headers", {})}
        return httpx.get(self.url + path, headers=headers, timeout=60, **more)

    def complete(
        self, tokens: list[int], owner: str = "team-a", claim: Any = None, **more: Any
    ) -> httpx.Response:
        body = {"model": "m", "prompt": tokens, "max_tokens": 1, "temperature": 0.0, **more}
        if claim is not None:
            body["vllm_xargs"] = {
                "kvclaims": claim if isinstance(claim, str) else json.dumps(claim)
            }
        return self.post("/v1/completions", body, owner)


@contextmanager
def server(folder: Path, *, as_group: bool = False) -> Iterator[Served]:
    """Start the OpenAI-compatible server with claims in force, and stop it; `as_group` stops all of
    its processes at once, as a terminal or a container does."""
    trace = folder / "trace.jsonl"
    with setup.model_folder(4096) as model, socket.socket() as free:
        give_words(Path(model))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        log = (folder / "server.log").open("w")
        process = subprocess.Popen(
            command(model, port, {**SETTINGS, "trace": str(trace)}),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=as_group,
        )
        try:
            wait(f"http://127.0.0.1:{port}/health", process, folder / "server.log")
            yield Served(f"http://127.0.0.1:{port}", trace)
        finally:
            if as_group:
                os.killpg(process.pid, signal.SIGTERM)
            else:
                process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def command(model: str, port: int, settings: dict[str, Any]) -> list[str]:
    options = {
        "--model": model,
        "--served-model-name": "m",
        "--load-format": "dummy",
        "--dtype": "float32",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--block-size": str(BLOCK),
        "--num-gpu-blocks-override": str(USABLE + 1),
        "--max-model-len": "2560",
        "--max-num-seqs": "16",
        "--shutdown-timeout": "30",
        "--scheduler-cls": "kvclaims.bridge.vllm.ClaimScheduler",
        "--middleware": "kvclaims.bridge.serving.http.Claims",
        "--additional-config": json.dumps({"kvclaims": settings}),
    }
    words = [word for pair in options.items() for word in pair]
    module = "vllm.entrypoints.openai.api_server"
    started = [sys.executable, "-m", module, *words, "--enforce-eager"]
    return [*started, "--api-key", *KEYS.values(), "other-key"]


def give_words(model: Path) -> None:
    """A tokenizer with one word for each token, and a chat that is the words of its messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = {name: i for i, name in enumerate(named.values())}
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), setup.VOCABULARY_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    chat = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat, **named}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def environment() -> dict[str, str]:
    whole = {k: v for k, v in setup.WHOLE.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    quiet = {**setup.QUIET, "VLLM_LOGGING_LEVEL": "WARNING"}
    ours = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    return {**quiet, **whole, "OMP_NUM_THREADS": "1", **ours, **os.environ}


def wait(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 500) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")
