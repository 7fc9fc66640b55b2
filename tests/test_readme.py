"""Every Python block of the README runs, on a tiny random model; its tables show the committed results."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import build_with_tokenizer

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    build_with_tokenizer("llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block)
    runpy.run_path(str(script), init_globals={"folder": tmp_path / "model"})


def test_there_are_blocks():
    assert len(BLOCKS) >= 2


def test_tables_show_the_results():
    command = [sys.executable, str(ROOT / "tools" / "render_readme.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# -- the GPU's figures, whose file may be missing ------------------------------------------------------------


@pytest.fixture
def rendering(tmp_path, monkeypatch):
    """tools/render_readme.py on a README of its own, and results without those of the GPU."""
    spec = importlib.util.spec_from_file_location("render_readme", ROOT / "tools" / "render_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "README", tmp_path / "README.md")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    module.README.write_text(
        "fast<!-- gpu_claim -->old<!-- /gpu_claim -->.\n<!-- gpu -->\nold\n<!-- /gpu -->\n"
        "Slow.<!-- gpu_losses -->old<!-- /gpu_losses -->\n"
    )
    return module


def rendered(module, monkeypatch) -> str:
    """The README written, and found up to date."""
    for argument in ("--write", "--check"):
        monkeypatch.setattr(sys, "argv", ["render_readme.py", argument])
        assert module.main() == 0
    return module.README.read_text()


def test_without_the_gpu_file_its_sections_say_nothing(rendering, monkeypatch):
    text = rendered(rendering, monkeypatch)
    assert re.sub("<!-- .*? -->", "", text) == "fast.\n\nSlow.\n"


def test_gpu_sections_show_the_file(rendering, monkeypatch):
    def row(tokens: int, speedup: float, **other: object) -> dict[str, object]:
        layer = {"shape": "l70b", "in_features": 8192, "out_features": 28672, "dtype": "fp16"}
        cell = {"rows": tokens, "bits": 4, "kernel": "kbit", "us": 40.0, "gb_s": 3000.0, "vs_fp16": speedup}
        return layer | cell | other

    rows = [row(1, 3.456), row(64, 0.999), row(256, 0.971), row(1024, 0.71), row(4096, 0.5, dtype="bf16")]
    rows += [row(1, 9.0, bits=2), row(1, 9.0, kernel="stream"), row(2, 0.1), row(8, 0.2, shape="unlisted")]
    machine = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11"}
    result = {"machine": machine, "read_bandwidth_gb_s": 4000.0, "rows": rows}
    (rendering.RESULTS / rendering.GPU_FILE).write_text(json.dumps(result))
    text = rendered(rendering, monkeypatch)
    assert (
        "fast<!-- gpu_claim -->, and 3.5 times as fast as in float16 on an H200<!-- /gpu_claim -->." in text
    )
    assert "| 8192 → 28672 (l70b) | 3.46 | 1.00 | 0.97 | 0.71 |" in text
    assert "takes 40.0 µs: 3000 GB/s of packed weights, 75% of the 4000 GB/s" in text
    lost = (
        "1 of the table's 4 cells lose to float16 cuBLAS by more than 3% (runs differ by about 2%), from M="
    )
    assert f"{lost}1024 on" in text
    assert "8192 → 28672 at M=1024, 0.71 times as fast.<!--" in text


def width_rows(**ratios: tuple[float, ...]) -> list[dict[str, object]]:
    """Rows of layers by their ratios at M = 1, 2, 4 and so on; a layer of n letters has n outputs."""
    return [
        {"shape": name, "in_features": 8, "out_features": len(name), "bits": 4, "dtype": "fp16"}
        | {"rows": 2**i, "kernel": "kbit", "vs_fp16": ratio}
        for name, of_layer in ratios.items()
        for i, ratio in enumerate(of_layer)
    ]


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        (
            {"a": (2.0, 0.98), "bb": (0.9, 0.8), "ccc": (2.0, 0.96)},
            "1 of the 3 layers never loses; of those that do, 8 → 2 is the first, at M=1, 8 → 3 is the last, "
            "at M=2. The worst is 8 → 2 at 4 bits, M=2: 0.80 times",
        ),
        (
            {"a": (2.0, 0.9), "bb": (2.0, 0.96)},
            "each of the 2 layers loses somewhere; of those that do, 8 → 1 and 8 → 2 are the first, at M=2. ",
        ),
        ({"a": (2.0, 2.0), "bb": (2.0, 1.0), "ccc": (2.0, 0.5)}, "2 of the 3 layers never lose; of those"),
    ],
)
def test_losses_are_beyond_the_noise_and_name_who_never_loses(rendering, ratios, said):
    result = {"machine": {"gpu": "NVIDIA H200"}, "rows": width_rows(**ratios)}
    (rendering.RESULTS / rendering.WIDTHS_FILE).write_text(json.dumps(result))
    text = rendering.losses()
    lost = sum(ratio < 0.97 for of_layer in ratios.values() for ratio in of_layer)
    assert (
        f"kbit loses to float16 cuBLAS by more than 3% (runs differ by about 2%) in {lost} at 4 bits" in text
    )
    assert said in text


def test_peers_are_judged_by_the_same_noise(rendering):
    rows = [
        {"shape": "s", "in_features": 8, "out_features": 8, "rows": count, "dtype": "fp16"}
        | {"kernel": kernel, "kind": kind, "bits": bits, "us": us}
        for count, peer_us in ((1, 20.0), (2, 10.2), (4, 9.8), (8, 9.0))
        for kernel, kind, bits, us in (("kbit", "kbit", 4, 10.0), ("other", "peer", None, peer_us))
    ]
    machine = {"commit": "0123456789ab+changes"}
    (rendering.RESULTS / rendering.PEERS_FILE).write_text(json.dumps({"machine": machine, "rows": rows}))
    text = rendering.gpu_peers()
    assert (
        "(of commit 0123456+changes) by more than 3% in 1 of 4 problems of one run, and faster by as" in text
    )
    assert "much in 1; the worst for kbit is 8 → 8 at M=8, 0.90 times as fast" in text


# -- whole models --------------------------------------------------------------------------------------------


def model_result(compiled: bool, bf16_ways: dict[str, float], **of_rows: object) -> dict[str, object]:
    """A result of `kbit bench model` at batch 1, and 4 where nothing was compiled."""
    batches = [1] if compiled else [1, 4]

    def arm(name: str, ways: dict[str, float]) -> dict[str, object]:
        decode = [{"arm": w, "batch": b, "tokens_s": s} | of_rows for w, s in ways.items() for b in batches]
        sizes = {"weight_bytes": 10**9, "run_peak_bytes": 2 * 10**9, "prefill_tokens_s": None}
        return {"name": name, "absent": None, "decode": decode} | sizes

    plan = {"batches": batches, "prompt": 128, "prefill": 0 if compiled else 2048, "compiled": compiled}
    machine = {"gpu": "NVIDIA H200", "commit": "0123456789ab+changes"}
    arms = [arm("kbit k=4", {"kbit k=4": 600.0}), arm("bf16", bf16_ways)]
    return {"machine": machine, "model": "small", "plan": plan, "arms": arms}


def test_models_say_what_brackets_compare_with(rendering):
    plain = model_result(False, {"bf16 grouped_mm": 100.0, "bf16 batched_mm": 80.0})
    (rendering.RESULTS / "h200-qwen3-a.json").write_text(json.dumps(plain))
    text = rendering.models()
    assert "decoding after a prompt of 128 tokens, and of a prefill of 2048 tokens" in text
    assert "measured at this batch size, with the faster" in text
    assert "all ways of running experts that were tried (small, bf16). " in text
    assert "kbit at 0123456+changes: small." in text
    compiled = model_result(True, {"bf16": 150.0})
    (rendering.RESULTS / "h200-qwen3-b.json").write_text(json.dumps(compiled))
    text = rendering.models()
    assert "measured at this batch size (torch.compile's at batch 1 of small only), with the faster" in text
    assert "| small, k=4 | 1.0 | 2.0 | 600 (4.00) | 600 (6.00) |  |" in text
    of_each = model_result(False, {"bf16 grouped_mm": 100.0, "bf16 batched_mm": 80.0}, peak_bytes=10**9)
    (rendering.RESULTS / "h200-qwen3-a.json").write_text(json.dumps(of_each))
    assert "that were tried" not in rendering.models()


def test_a_commit_is_short_and_tells_changes(rendering):
    assert [rendering.short(commit) for commit in ("", "0123456789ab")] == ["", "0123456"]
    assert rendering.short("0123456789ab+changes") == "0123456+changes"
