"""examples/ run and do what they say; client.py does in test_serve.py, parallel.py in test_parallel.py."""

import importlib.util
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import kbit
import warm_processes
from docs_blocks import ROOT
from tiny_models import build, build_with_tokenizer, quantize_files

EXAMPLES = ROOT / "examples"


def finished(name: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = warm_processes.command(EXAMPLES / name, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def run(name: str, *arguments: object) -> str:
    result = finished(name, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_quantize_llama_without_a_model(tmp_path):
    text = run("quantize_llama.py", "--out", tmp_path / "out", "--bits", 3)
    assert "14 layers, 3." in text
    assert "the same 32 tokens: True" in text
    assert kbit.format.checkpoint.validate_checkpoint(tmp_path / "out").bits == 3


def test_quantize_llama_with_a_model(tmp_path):
    source = build_with_tokenizer("llama", tmp_path / "in")
    text = run("quantize_llama.py", source, "--out", tmp_path / "out", "--prompt", "w1 w2", "--new-tokens", 4)
    assert "tokens: True" in text
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_moe_without_a_model():
    text = run("moe.py", "--bits", 5, "--expert-bits", 2)
    assert "2 x KbitExperts: 2 bits" in text
    assert "8 x KbitLinear: 5 bits" in text


def test_moe_with_a_model(tmp_path):
    text = run("moe.py", build_with_tokenizer("qwen3_moe", tmp_path / "in"), "--tokens", 16)
    assert "1 x KbitExperts: 3 bits" in text


@pytest.mark.parametrize("example", ["quantize_llama.py", "moe.py"])
def test_a_model_that_is_quantized_already_is_refused(example, tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    for folder, told in ((tmp_path, "is quantized already"), (tmp_path / "missing", "not a model's folder")):
        result = finished(example, folder)
        assert result.returncode == 2
        assert told in result.stderr


def test_lora(tmp_path):
    source = build_with_tokenizer("qwen3_moe", tmp_path / "in")
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"w{i % 72}" for i in range(400)))
    text = run(
        "lora.py", source, book, "--out", tmp_path / "adapter", "--steps", 2, "--tokens", 16, "--rank", 2
    )
    assert "step 1: loss" in text
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


# -- the reader in numpy -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader():
    spec = importlib.util.spec_from_file_location("read_packed", EXAMPLES / "read_packed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


POLICIES = [
    *(kbit.QuantizationPolicy(bits=bits) for bits in (2, 3, 4, 5)),
    *(kbit.QuantizationPolicy(bits=bits, codebook="bof") for bits in (2, 3, 4, 5)),
    kbit.QuantizationPolicy(bits=4, absmax_format="float16"),
    kbit.QuantizationPolicy(bits=2, codebook=[-1.0, -0.25, 0.125, 0.5], overrides={"down": 2}),
    kbit.QuantizationPolicy(
        bits=2, overrides={"down": 3}, codebook={2: [-1, 0, 0.5, 0.75], 3: kbit.normal_float(3).tolist()}
    ),
]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_numpy_reads_what_the_library_reads(reader, policy, tmp_path):
    model = build("qwen3_moe", torch.float32)  # with magnitudes for which factors are needed
    model.save_pretrained(tmp_path / "in")
    quantize_files(tmp_path / "in", tmp_path / "out", policy)
    names = ["self_attn.o_proj.weight", "mlp.experts.1.gate_proj.weight", "mlp.experts.1.down_proj.weight"]
    weights = {name: w for name, w in kbit_source(tmp_path / "in") if name.startswith("model.layers.0.")}
    for name in (f"model.layers.0.{name}" for name in names):
        bits = policy.bits_for(kbit.format.names.module_of(name))
        settings = (policy.codebook_for(bits), policy.absmax_format, policy.search)
        expected = kbit.dequantize(kbit.quantize(weights[name], bits, *settings)).numpy()
        got = reader.read_packed(tmp_path / "out", name, expected.shape[-1])
        assert got.dtype == np.float32
        assert np.array_equal(got, expected)


def kbit_source(folder: Path):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors").items()


def test_read_packed_as_a_command(tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path / "in")
    quantize_files(tmp_path / "in", tmp_path / "out", kbit.QuantizationPolicy(bits=4))
    text = run("read_packed.py", tmp_path / "out", "model.layers.0.mlp.down_proj.weight", 72)
    assert "(40, 72)" in text


def test_read_packed_names_what_is_missing(tmp_path):
    result = finished("read_packed.py", tmp_path, "model.norm.weight")
    assert result.returncode == 1
    file = tmp_path / "config.json"
    assert result.stderr == f"there is no {file}: give the folder of a k-bit checkpoint\n"
