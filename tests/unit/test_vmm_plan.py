"""`kvclaims elastic`: the estimate beside published numbers, bad input, the show, the script."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvclaims.checker.cli import run
from kvclaims.checker.plan import PRESETS, Plan, Setting, published, read_model
from kvclaims.spec.interface import BadOperation
from kvclaims.spec.vocabulary import Verdict

ROOT = Path(__file__).resolve().parents[2]
SEVEN = PRESETS["7b"]


def test_the_published_configurations_beside_the_estimate() -> None:
    report = published()
    assert report.verdict is Verdict.HOLDS
    assert [round(100 * one.plan.share, 1) for one in report.published] == [15.9, 7.6, 2.4]
    assert [one.share for one in report.published] == [16.0, 7.7, 2.7]
    first = report.published[0].plan
    assert (round(first.small_tokens, -3), round(first.tokens, -3)) == (366_000, 308_000)
    assert first.token_bytes == 56 * 1024


def test_an_estimate_that_is_off_is_violated() -> None:
    report = published()
    off = replace(report.published[0], share=14.0)
    assert replace(report, published=(off,)).verdict is Verdict.VIOLATED


def test_the_numbers_of_one_plan() -> None:
    plan = Plan.of(Setting(SEVEN))
    assert plan.activation_bytes == 2 * (3 * 18944 + 2 * 3584)
    assert plan.reserve == 32768 * plan.activation_bytes
    assert plan.small_reserve == 256 * 152064 * 22  # the sampler, not the small chunk
    assert SEVEN.parameters == 7_615_487_488
    assert [round(ms, 1) for ms in (*plan.lend_ms, *plan.return_ms)] == [23.9, 1.8, 3.8, 1.8]
    assert plan.recommendation.startswith("lower the chunk instead: max_num_batched_tokens=2048")


def test_when_elastic_may_pay() -> None:
    slow = Setting(SEVEN, slowdown=1.3)
    assert Plan.of(slow).may_pay
    assert not Plan.of(replace(slow, slowdown=1.05)).may_pay
    assert not Plan.of(replace(slow, tensor_parallel=4)).may_pay
    same = replace(slow, chunk=2048)
    assert Plan.of(same).recommendation.startswith("nothing to gain")


CONFIG: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def test_a_configuration_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read = read_model(str(tmp_path))
    assert replace(read, name="7b") == SEVEN


def test_a_window_that_is_not_used_and_layers_of_full_attention_are_covered(
    tmp_path: Path,
) -> None:
    unused = {"sliding_window": 131072, "use_sliding_window": False}
    full = {"layer_types": ["full_attention"] * 28}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **unused, **full}))
    assert replace(read_model(str(tmp_path)), name="7b") == SEVEN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object"),
        (json.dumps({**CONFIG, "hidden_size": -1}), "hidden_size"),
        (json.dumps({**CONFIG, "vocab_size": True}), "vocab_size"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "num_hidden_layers"}), "num_hidden"),
        (json.dumps({**CONFIG, "num_experts": 8}), "mixtures"),
        (json.dumps({**CONFIG, "n_routed_experts": 256}), "mixtures"),
        (json.dumps({**CONFIG, "kv_lora_rank": 512}), "full attention"),
        (json.dumps({**CONFIG, "sliding_window": 4096}), "full attention"),
        (json.dumps({**CONFIG, "layer_types": ["linear_attention"] * 28}), "full attention"),
        (json.dumps({**CONFIG, "quantization_config": {"bits": 4}}), "quantized"),
        (json.dumps({**CONFIG, "tie_word_embeddings": "false"}), "tie_word_embeddings"),
        (json.dumps({**CONFIG, "num_key_value_heads": 5}), "num_key_value_heads"),
        (json.dumps({**CONFIG, "num_key_value_heads": 64}), "num_key_value_heads"),
        (json.dumps({**CONFIG, "hidden_size": 8}), "num_attention_heads"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(BadOperation, match=message):
        read_model(str(file))
    assert run(["elastic", "plan", "--model", str(file)], io.StringIO()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "no such file"],
        ["--model", "32b"],
        ["--model", "x" * 5000],
        ["--model", "7b", "--tensor-parallel", "0"],
        ["--model", "7b", "--tensor-parallel", "3"],
        ["--model", "7b", "--tensor-parallel", "7"],
        ["--model", "7b", "--memory", "1e300"],
        ["--model", "7b", "--overhead", "1e308"],
        ["--model", "7b", "--utilization", "1.5"],
        ["--model", "7b", "--chunk", "1024"],
        ["--model", "7b", "--memory", "nan"],
        ["--model", "7b", "--memory", "inf"],
        ["--model", "7b", "--slowdown", "0"],
        ["--chunk", "4096"],
    ],
)
def test_settings_that_make_no_sense_are_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["elastic", "plan", *arguments], io.StringIO()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("pace", ["nan", "-1", "inf"])
def test_a_pace_that_is_no_number_of_seconds_is_one_line_and_exit_2(
    pace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["elastic", "demo", "--pace", pace], io.StringIO()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_plan_prints_one_json_object() -> None:
    out = io.StringIO()
    assert run(["elastic", "plan", "--json"], out) == 0
    found = json.loads(out.getvalue())
    assert found["verdict"] == "HOLDS"
    assert [one["published_share"] for one in found["published"]] == [0.16, 0.077, 0.027]


def test_the_show_is_a_behaviour_of_the_machine() -> None:
    pytest.importorskip("torch")
    from kvclaims.bridge.vmm.demo import demo

    report = demo(lambda _text: None, pace=0)
    assert report.verdict is Verdict.HOLDS
    assert report.steps == 105
    assert [scene.mode for scene in report.scenes] == (
        ["home", "lent", "lent", "lent", "draining"] + ["home"] * 4 + ["lent", "home"]
    )
    sizes = [scene.physical_kib for scene in report.scenes]
    assert sizes[3] - sizes[5] == 1024  # three lent blocks went, two of them moved
    report = replace(report, violations=(object(),))  # type: ignore[arg-type]
    assert report.verdict is Verdict.VIOLATED


def test_the_guide_runs() -> None:
    text = (ROOT / "docs" / "elastic.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    ran = subprocess.run(
        [sys.executable, "-c", blocks[0]], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_gpu_script_runs_on_the_twin_and_skips_without_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    script = str(ROOT / "tools" / "gpu_check.py")
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, script, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )

    twin = ran("--twin", "failures", "rules", "graphs")
    assert twin.returncode == 0, twin.stdout + twin.stderr
    assert [line.split()[0] for line in twin.stdout.splitlines()] == ["holds", "holds", "skipped"]
    if not torch.cuda.is_available():
        bare = ran()
        assert bare.returncode == 0
        assert bare.stdout == "skipped: no CUDA device here; nothing was checked\n"
