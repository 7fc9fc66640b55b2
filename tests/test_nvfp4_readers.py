"""Readers of NVFP4 checkpoints: what was written comes back bit by bit, damage gives errors."""

from __future__ import annotations

import importlib
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kbit.nvfp4 import (
    NVFP4Tensor,
    dequantize_nvfp4,
    from_compressed_tensors,
    from_gguf,
    from_modelopt,
    global_scale_for,
    quantize_nvfp4,
    repack_nvfp4,
)

NAME = "model.layers.0.mlp.down_proj"
GGUF_NAME = "blk.0.ffn_down.weight"


@pytest.fixture
def weight() -> NVFP4Tensor:
    w = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    return quantize_nvfp4(w, global_scale=global_scale_for(w))


def modelopt_tensors(t: NVFP4Tensor) -> dict[str, torch.Tensor]:
    codes, scales = t.nv()
    return {
        f"{NAME}.weight": codes,
        f"{NAME}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{NAME}.weight_scale_2": t.global_scale,
        f"{NAME}.input_scale": torch.tensor(0.5),
    }


def same(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    (codes, scales), (others, other_scales) = a.nv(), b.nv()
    return a.shape == b.shape and torch.equal(codes, others) and torch.equal(scales, other_scales)


# -- safetensors ---------------------------------------------------------------------------------------------


def test_modelopt_file_and_folder(tmp_path: Path, weight: NVFP4Tensor) -> None:
    file = tmp_path / "model.safetensors"
    save_file(modelopt_tensors(weight), file)
    for path in (file, tmp_path, str(tmp_path)):
        t = from_modelopt(path, NAME)
        assert same(t, weight)
        assert torch.equal(t.global_scale, weight.global_scale)
    codes, scales = weight.nv()
    decoded = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * weight.global_scale
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    magnitudes = table[torch.stack([codes & 7, (codes >> 4) & 7], -1).flatten(1).long()]
    assert torch.allclose(dequantize_nvfp4(t).abs(), magnitudes * decoded, rtol=1e-6)


def test_compressed_tensors_divides_by_its_factor(tmp_path: Path, weight: NVFP4Tensor) -> None:
    codes, scales = weight.nv()
    file = tmp_path / "model.safetensors"
    tensors = {
        f"{NAME}.weight_packed": codes,
        f"{NAME}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{NAME}.weight_global_scale": torch.tensor([1536.0]),
    }
    save_file(tensors, file)
    t = from_compressed_tensors(file, NAME)
    assert same(t, weight)
    assert t.global_scale == torch.tensor(1.0) / torch.tensor(1536.0)


BAD_TENSORS = {
    "missing": ("weight_scale_2", None, "has no tensor"),
    "codes dtype": ("weight", torch.zeros(6, 64), "codes must be uint8"),
    "codes rank": ("weight", torch.zeros(6, 64, 1).byte(), r"codes must be uint8 \[N, K / 2\]"),
    "columns": ("weight", torch.zeros(6, 65).byte(), "K must be a multiple of 16, got 130"),
    "scale shape": ("weight_scale", torch.zeros(6, 9).byte(), r"must be float8_e4m3fn \(6, 8\)"),
    "scale dtype": ("weight_scale", torch.zeros(6, 8), "must be float8_e4m3fn"),
    "negative scale": (
        "weight_scale",
        torch.full((6, 8), 0x80).byte(),
        "48 block scales are negative",
    ),
    "nan scale": ("weight_scale", torch.full((6, 8), 0x7F).byte(), "48 block scales are negative"),
    "factor": ("weight_scale_2", torch.tensor(0.0), "positive normal float32, got 0.0"),
    "infinite factor": ("weight_scale_2", torch.tensor(float("inf")), "got inf"),
    "factor count": ("weight_scale_2", torch.ones(2), "must be one float32"),
    "factor dtype": ("weight_scale_2", torch.ones(1).half(), "must be one float32"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_damaged_modelopt_tensors_are_refused(tmp_path: Path, weight: NVFP4Tensor, case: str) -> None:
    part, value, message = BAD_TENSORS[case]
    tensors = modelopt_tensors(weight)
    del tensors[f"{NAME}.{part}"]
    if value is not None:
        tensors[f"{NAME}.{part}"] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        from_modelopt(tmp_path, NAME)


def test_the_error_names_layers_that_are_there(tmp_path: Path, weight: NVFP4Tensor) -> None:
    save_file(modelopt_tensors(weight), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"NVFP4 layers here: {NAME}"):
        from_modelopt(tmp_path, "model.layers.1.mlp.down_proj")
    with pytest.raises(ValueError, match=r"NVFP4 layers here: none\. The file is one for from_modelopt\."):
        from_compressed_tensors(tmp_path, NAME)
    codes = {f"{NAME}.weight_packed": torch.zeros(2, 4), f"{NAME}.weight_absmax": torch.zeros(2, 1)}
    save_file(codes, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="The file has k-bit codes, which transformers loads"):
        from_compressed_tensors(tmp_path, NAME)
    parts = {"codes": torch.zeros(2, 8), "scales": torch.zeros(2, 1), "global_scale": torch.ones(())}
    save_file({f"{NAME}.weight_{part}": each for part, each in parts.items()}, tmp_path / "model.safetensors")
    for read in (from_compressed_tensors, from_modelopt):
        with pytest.raises(
            ValueError, match=r"here: none\. The file is kbit's own, which transformers loads"
        ):
            read(tmp_path, NAME)


def write_model(folder: Path, t: NVFP4Tensor) -> Path:
    save_file(modelopt_tensors(t), folder / "model.safetensors")
    return folder


def write_file(folder: Path, t: NVFP4Tensor) -> Path:
    return write_model(folder, t) / "model.safetensors"


def write_gguf_file(folder: Path, t: NVFP4Tensor) -> Path:
    write_gguf(folder / "m.gguf", {GGUF_NAME: gguf_data(t)})
    return folder / "m.gguf"


@pytest.mark.parametrize(
    ("write", "read", "parser"),
    [
        (write_model, lambda path: from_modelopt(path, NAME), "safetensors.read_index"),
        (write_file, lambda path: from_modelopt(path, NAME), "safetensors.read_header"),
        (write_gguf_file, lambda path: from_gguf(path, GGUF_NAME), "gguf.read_tensors"),
    ],
)
def test_headers_are_parsed_once_until_a_file_changes(
    tmp_path: Path,
    weight: NVFP4Tensor,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, NVFP4Tensor], Path],
    read: Callable[[Path], NVFP4Tensor],
    parser: str,
) -> None:
    module, name = parser.split(".")
    original = getattr(importlib.import_module(f"kbit.nvfp4.readers.{module}"), name)
    parsed = []
    monkeypatch.setattr(f"kbit.nvfp4.readers.{parser}", lambda path: (parsed.append(path), original(path))[1])
    other = quantize_nvfp4(torch.randn(3, 256))  # as many bytes, in another shape
    now = time.time_ns()
    for age, t in enumerate([weight, other, weight]):
        path = write(tmp_path, t)
        (file,) = tmp_path.iterdir()
        os.utime(file, ns=(now, now))  # two writes may bear one time
        assert same(read(path), t)
        os.utime(file, (age, age))
        parsed.clear()
        assert all(same(read(path), t) for _ in range(3))
        assert len(parsed) == 1


# -- GGUF ----------------------------------------------------------------------------------------------------


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, int]], alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ä"])
    writer.add_array("some.numbers", [1.5, 2.5])
    writer.add_float32("some.number", 1e-6)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_data(t: NVFP4Tensor) -> tuple[np.ndarray, int]:
    return repack_nvfp4(t, "ggml").codes.numpy(), 40


@pytest.mark.parametrize("alignment", [None, 64])
def test_gguf_as_the_gguf_package_writes_it(tmp_path: Path, alignment: int | None) -> None:
    t = quantize_nvfp4(torch.randn(6, 192))
    other = (np.arange(7, dtype=np.float32), 0)
    path = tmp_path / "m.gguf"
    write_gguf(path, {"output_norm.weight": other, GGUF_NAME: gguf_data(t)}, alignment)
    read = from_gguf(path, GGUF_NAME)
    assert read.layout == "nv"
    assert same(read, t)
    assert read.global_scale == 1.0
    assert torch.equal(from_gguf(path, GGUF_NAME, layout="ggml").codes, repack_nvfp4(t, "ggml").codes)
    (stored,) = [each for each in gguf.GGUFReader(path).tensors if each.name == GGUF_NAME]
    decoded = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert torch.equal(dequantize_nvfp4(read), torch.from_numpy(decoded))


def test_gguf_experts_with_their_factors(tmp_path: Path) -> None:
    t = quantize_nvfp4(torch.randn(3, 4, 64))
    factors = np.array([0.5, 0.25, 3.0], dtype=np.float32)
    path = tmp_path / "m.gguf"
    name = "blk.0.ffn_down_exps"
    write_gguf(path, {f"{name}.weight": gguf_data(t), f"{name}.scale": (factors, 0)})
    read = from_gguf(path, f"{name}.weight")
    assert read.shape == (3, 4, 64)
    assert read.global_scale.tolist() == factors.tolist()
    assert torch.equal(dequantize_nvfp4(read), dequantize_nvfp4(t) * torch.from_numpy(factors)[:, None, None])


def test_gguf_tensors_that_are_missing_or_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"a.weight": (np.zeros((2, 32), np.float32), 0)})
    with pytest.raises(ValueError, match=r"'b.weight' is not there. NVFP4 tensors here: none"):
        from_gguf(path, "b.weight")
    with pytest.raises(ValueError, match="has type 0"):
        from_gguf(path, "a.weight")


@pytest.fixture(scope="module")
def honest_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, {GGUF_NAME: gguf_data(quantize_nvfp4(torch.randn(2, 64)))})
    return path.read_bytes()


def test_damaged_gguf_headers_are_refused(tmp_path: Path, honest_gguf: bytes) -> None:
    honest, path = honest_gguf, tmp_path / "m.gguf"
    offset = honest.index(GGUF_NAME.encode()) + len(GGUF_NAME)
    cases = {
        "does not begin with GGUF": b"GGML" + honest[4:],
        "version must be 2 or 3": honest[:4] + struct.pack("<I", 1) + honest[8:],
        "tensors, the limit is": honest[:8] + struct.pack("<Q", 2**40) + honest[16:],
        "key-value pairs, the limit is": honest[:16] + struct.pack("<Q", 2**63) + honest[24:],
        "bytes in a string": honest[:24] + struct.pack("<Q", 2**62) + honest[32:],
        "at most 4 dimensions": honest[:offset] + struct.pack("<I", 9) + honest[offset + 4 :],
        "multiple of 64": honest[: offset + 4] + struct.pack("<Q", 65) + honest[offset + 12 :],
        "truncated": honest[: offset + 4] + struct.pack("<Q", 2**36) + honest[offset + 12 :],
        "not aligned": honest[: offset + 24] + struct.pack("<Q", 3) + honest[offset + 32 :],
        "header ends early": honest[: offset + 8],
        "negative or NaN": honest[:-72] + b"\xff" * 72,
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            from_gguf(path, GGUF_NAME)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_gives_a_value_error_or_a_tensor(
    tmp_path: Path, honest_gguf: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(honest_gguf[: data.draw(st.integers(0, len(honest_gguf)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(damaged))
    try:
        t = from_gguf(path, GGUF_NAME)
    except ValueError:
        return
    assert dequantize_nvfp4(t).isfinite().all()


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, honest_gguf, monkeypatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(honest_gguf)
    read = np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *args, **options: read(*args, **options)[:-1])
    with pytest.raises(ValueError, match=r"a\.gguf: tensor .*: only 71 of 72 bytes were read"):
        from_gguf(file, GGUF_NAME)


def test_truncated_safetensors_are_refused(tmp_path: Path, weight: NVFP4Tensor) -> None:
    path = tmp_path / "model.safetensors"
    save_file(modelopt_tensors(weight), path)
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(ValueError, match="truncated"):
        from_modelopt(path, NAME)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header[f"{NAME}.weight"]["shape"] = [6, 1 << 40]
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + int.from_bytes(data[:8], "little") :])
    with pytest.raises(ValueError, match="contradicts itself"):
        from_modelopt(path, NAME)
