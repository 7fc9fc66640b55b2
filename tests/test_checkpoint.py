"""Damaged and hostile checkpoints: every one gets a ValueError that names the file, never anything else."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from kbit.format import QuantizationPolicy
from kbit.format.checkpoint import check_index, parts_to_save, validate_checkpoint
from kbit.format.model_files import checkpoint_files, read_config, read_index
from kbit.format.safetensors_header import MAX_HEADER_BYTES, read_header
from kbit.format.tensor import QuantizedTensor
from kbit.quantizers import quantize

DOWN = "model.layers.0.mlp.down_proj.weight"
EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"
CONFIG = {"hidden_size": 64, "vocab_size": 40, "moe_intermediate_size": 24}


def quantized(rows: int, columns: int, bits: int = 4, scale: float = 1.0) -> QuantizedTensor:
    policy = QuantizationPolicy(bits=bits)
    codebook = policy.codebook_for(bits)
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * scale
    return QuantizedTensor(*quantize(w, codebook, "e4m4", False)[:2], codebook, torch.ones(()), bits, w.shape)


def good_tensors() -> dict[str, torch.Tensor]:
    tensors = {"model.norm.weight": torch.ones(64)}
    tensors |= parts_to_save(DOWN, quantized(64, 96))
    tensors |= parts_to_save(EXPERT, quantized(24, 64))
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], policy: dict | None = None, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section = QuantizationPolicy().to_dict() | (policy or {})
    content = CONFIG | {"quantization_config": section} | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_good_checkpoint_passes(tmp_path):
    folder = write(tmp_path, good_tensors())
    assert validate_checkpoint(folder) == QuantizationPolicy()
    infos = read_index(folder)
    assert infos[DOWN + "_packed"].shape == (64, 3 * 4)
    assert infos[DOWN + "_packed"].dtype == torch.int32
    assert infos[DOWN + "_absmax"].nbytes == 64 * 3
    assert infos[DOWN + "_absmax"].file == folder / "model.safetensors"


def test_scale_is_written_only_where_it_is_not_one():
    q = quantized(8, 32)
    assert set(parts_to_save("x.weight", q)) == {"x.weight_packed", "x.weight_absmax"}
    scaled = QuantizedTensor(q.packed, q.absmax, q.codebook, torch.tensor(0.5), q.bits, q.shape)
    assert torch.equal(parts_to_save("x.weight", scaled)["x.weight_scale"], torch.tensor(0.5))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("F32", [2], 0, 8)}, bytes(7), "holds 7"),
        ({"a": entry("F32", [2], 0, 8)}, bytes(9), "holds 9"),
        ({"a": entry("F32", [3], 0, 8)}, bytes(8), "contradicts itself"),
        ({"a": entry("F32", [2], 8, 16)}, bytes(16), "leaves a hole"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12), "overlaps"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, bytes(8), "overlaps"),
        ({"a": entry("F32", [2**40], 0, 2**42)}, bytes(8), "describes 4398046511104 bytes"),
        ({"a": entry("F32", [2**62, 4], 0, 8)}, bytes(8), "contradicts itself"),
        ({"a": entry("F32", [2**70], 0, 8)}, bytes(8), "shape must be"),
        ({"a": entry("F32", [0, 2**62, 4], 0, 0)}, b"", "too large for any tensor"),
        ({"a": entry("F32", [-2], 0, 8)}, bytes(8), "shape must be"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "shape must be"),
        ({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4), "shape must be"),
        ({"a": entry("F32", [2], -8, 0)}, bytes(8), "data_offsets must be"),
        ({"a": entry("F32", [2], 8, 0)}, bytes(8), "contradicts itself"),
        ({"a": entry("Q4", [2], 0, 1)}, bytes(1), "dtype must be"),
        ({"a": entry(["F32"], [2], 0, 8)}, bytes(8), "dtype must be"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "needs dtype"),
        ({"a": 3}, b"", "needs dtype"),
        ({"\ud800": entry("F32", [2], 0, 8)}, bytes(8), "surrogates not allowed"),
        ({"__metadata__": {"a": "\udfff"}}, b"", "surrogates not allowed"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ([], b"", "JSON object"),
        (b"{", b"", "JSON"),
        (b"\xff\xfe{}", b"", "JSON"),
        (b"[" * 100_000, b"", "JSON"),
        (b'{"a": NaN}', b"", "JSON"),
        (b'{"a": 1, "a": 2}', b"", "occurs twice"),
        (b'{"a": ' + b"1" * 5000 + b"}", b"", "JSON"),
    ],
)
def test_a_lying_header(tmp_path, header, data, message):
    path = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [1, 1000, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_lying_header_length(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"a":1}')
    with pytest.raises(ValueError, match="header says"):
        read_header(path)


@pytest.mark.parametrize("length", [0x80, 0x280, 0x4B50])
def test_a_header_length_that_looks_like_a_pickle(tmp_path, length):
    """0x80 begins a pickle and "PK" a zip of pickles; both begin lawful header lengths too."""
    header = json.dumps({"a": entry("F32", [2], 0, 8)}).encode().ljust(length)
    assert list(read_header(raw_file(tmp_path / "x.safetensors", header, bytes(8)))) == ["a"]


def test_truncation_at_every_byte(tmp_path):
    whole = save({"a": torch.arange(3), "b": torch.ones(2, 2)})
    path = tmp_path / "x.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x\.safetensors"):
            read_header(path)


GOOD_BYTES = save(good_tensors())
GOOD_HEADER_END = 8 + int.from_bytes(GOOD_BYTES[:8], "little")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, GOOD_HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4),
)
@example([(0, 0)])
@example([(8, ord("["))])
def test_any_change_to_a_header_is_a_value_error_or_harmless(tmp_path, edits):
    damaged = bytearray(GOOD_BYTES)
    for position, byte in edits:
        damaged[position] = byte
    write(tmp_path, good_tensors())
    (tmp_path / "model.safetensors").write_bytes(damaged)
    try:
        validate_checkpoint(tmp_path)
    except ValueError:
        return
    # What passed describes the file truthfully: every tensor lies inside it.
    infos = read_index(tmp_path).values()
    assert GOOD_HEADER_END + sum(info.nbytes for info in infos) == len(damaged)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_error(tmp_path, content):
    path = tmp_path / "x.safetensors"
    for prefix in (b"", len(content).to_bytes(8, "little")):
        path.write_bytes(prefix + content)
        try:
            read_header(path)
        except ValueError:
            continue


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
POLICY_KEYS = st.sampled_from(sorted(QuantizationPolicy().to_dict()))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(POLICY_KEYS, JSON_VALUES)
def test_any_quantization_config_is_a_value_error_or_legal(tmp_path, key, value):
    write(tmp_path, good_tensors(), {key: value})
    try:
        policy = validate_checkpoint(tmp_path)
    except ValueError:
        return
    assert policy.bits_for("model.layers.0.mlp.down_proj") == 4


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in good_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "policy", "config", "message"),
    [
        (without(DOWN + "_absmax"), {}, {}, "has no"),
        (without(DOWN + "_packed"), {}, {}, "has no"),
        (good_tensors() | {"x.weight_scale": torch.ones(())}, {}, {}, "has no"),
        (good_tensors() | {DOWN: torch.ones(64, 96)}, {}, {}, "both quantized and unquantized"),
        ({"model.norm.weight": torch.ones(64)}, {}, {}, "no tensor is called"),
        (good_tensors(), {"bits": 3}, {}, "at 3 bits"),
        (good_tensors(), {"overrides": {"experts": 5}}, {}, "at 5 bits"),
        (good_tensors(), {"overrides": {"down_proj": 0}}, {}, "leaves module"),
        (good_tensors(), {"modules_to_not_convert": ["model.layers.0.mlp.experts"]}, {}, "leaves module"),
        (good_tensors(), {"absmax_format": "float16"}, {}, "must be float16"),
        *((good_tensors(), {"version": v}, {}, f"version {v!r}") for v in (2, 0, -5, 1.5, "1", True, None)),
        (good_tensors(), {"quant_method": "gptq"}, {}, "quant_method"),
        (good_tensors(), {"block_size": 64}, {}, "block_size"),
        (good_tensors(), {"bits": 7}, {}, "bits must be"),
        (good_tensors(), {"codebook": [1.0, 0.0]}, {}, "levels"),
        (good_tensors(), {"surprise": 1}, {}, "surprise"),
        (good_tensors(), {}, {"hidden_size": 128}, "config's sizes give 128 rows"),
        (good_tensors(), {}, {"moe_intermediate_size": 25}, "config's sizes give 25 rows"),
        (good_tensors(), {}, {"quantization_config": None}, "no quantization_config"),
        (good_tensors(), {}, {"quantization_config": [1]}, "object"),
        (good_tensors() | {DOWN + "_packed": torch.zeros(64, 12)}, {}, {}, "must be int32"),
        (good_tensors() | {DOWN + "_absmax": torch.zeros(64, 3)}, {}, {}, "must be uint8"),
        (good_tensors() | {DOWN + "_absmax": torch.zeros(63, 3, dtype=torch.uint8)}, {}, {}, "absmax"),
        (good_tensors() | {DOWN + "_packed": torch.zeros(12, dtype=torch.int32)}, {}, {}, "must be "),
        (good_tensors() | {DOWN + "_packed": torch.zeros(0, 12, dtype=torch.int32)}, {}, {}, "none 0"),
        (good_tensors() | {DOWN + "_scale": torch.ones(1)}, {}, {}, "must be float32 of shape"),
        (good_tensors() | {DOWN + "_scale": torch.ones((), dtype=torch.float64)}, {}, {}, "must be float32"),
    ],
)
def test_config_and_tensors_disagree(tmp_path, tensors, policy, config, message):
    with pytest.raises(ValueError, match=message):
        validate_checkpoint(write(tmp_path, tensors, policy, **config))


def test_a_config_may_hold_what_python_writes_of_infinity(tmp_path):
    folder = write(tmp_path, good_tensors(), time_step_limit=[0.0, math.inf])
    assert "Infinity" in (folder / "config.json").read_text()
    validate_checkpoint(folder)
    assert read_config(folder)["time_step_limit"] == [0.0, math.inf]


def test_no_folder_and_no_weights(tmp_path):
    with pytest.raises(ValueError, match="is not a folder. Give a model's folder, or its name"):
        read_index(tmp_path / "missing")
    with pytest.raises(ValueError, match="neither"):
        read_index(tmp_path)
    with pytest.raises(ValueError, match=r"test_checkpoint\.py is a file\. Give a model's folder, or"):
        read_config(Path(__file__))
    with pytest.raises(ValueError, match="has no config.json. Give a model"):
        validate_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "x.ckpt"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="pickle"):
        read_index(tmp_path)
    (tmp_path / name).rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="pickle"):
        read_index(tmp_path)
    torch.save({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="pickle"):
        read_index(tmp_path)


def shard(folder: Path, **files: dict[str, torch.Tensor]) -> dict[str, str]:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return {key: f"{name}.safetensors" for name, tensors in files.items() for key in tensors}


def write_map(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path):
    weight_map = shard(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(3)})
    write_map(tmp_path, weight_map)
    assert {name: info.shape for name, info in read_index(tmp_path).items()} == {"a": (2,), "b": (3,)}


def test_a_shard_is_looked_for_once(tmp_path, monkeypatch):
    many = {f"w{number}": torch.ones(1) for number in range(50)}
    write_map(tmp_path, shard(tmp_path, one=many, two={"b": torch.ones(3)}))
    seen, real = [], Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: seen.append(self.name) or real(self))
    assert len(read_index(tmp_path)) == 51
    assert max(seen.count(f"{name}.safetensors") for name in ("one", "two")) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": "gone.safetensors"}, "missing"),
        ({"a": "../one.safetensors"}, "same folder"),
        ({"a": "/etc/passwd"}, "same folder"),
        ({"a": "one.bin"}, "same folder"),
        ({"a": 3}, "same folder"),
        ({"a": "two.safetensors"}, "not in two"),
        ({"c": "one.safetensors"}, "not in one"),
    ],
)
def test_an_index_that_lies(tmp_path, change, message):
    write_map(tmp_path, shard(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(3)}) | change)
    with pytest.raises(ValueError, match=message):
        read_index(tmp_path)


def test_one_file_goes_before_an_index(tmp_path):
    write_map(tmp_path, {"a": "gone.safetensors"})  # of an older model
    shard(tmp_path, model={"b": torch.ones(3)})
    assert list(read_index(tmp_path)) == ["b"]
    assert checkpoint_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_tensor_in_two_shards(tmp_path):
    shard(tmp_path, one={"a": torch.ones(2)}, two={"a": torch.ones(2), "b": torch.ones(3)})
    write_map(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ValueError, match="is in one"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [[], {}, None, {"a": 1}])
def test_an_index_of_the_wrong_form(tmp_path, content):
    write_map(tmp_path, content)
    with pytest.raises(ValueError, match="weight_map|shards"):
        read_index(tmp_path)


def test_check_index_names_what_is_quantized(tmp_path):
    folder = write(tmp_path, good_tensors())
    assert sorted(check_index(read_index(folder), QuantizationPolicy(), CONFIG)) == [DOWN, EXPERT]


def test_names_that_a_terminal_would_obey_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a\x1b[31mred\nline.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"tensor name 'a\\x1b\[31mred\\nline.weight' has characters"):
        read_header(path)
