"""Folders with NVFP4 weights on the command line: kbit's, ModelOpt's and compressed-tensors'."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from kbit.cli.model_folder import load_model
from kbit.nn import leftovers
from kbit.nvfp4 import dequantize_nvfp4, global_scale_for, quantize_nvfp4
from tiny_models import build

ARCHITECTURES = ("llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite", "mixtral")
MODULE = "model.layers.0.self_attn.o_proj"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


def refuse(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert isinstance(result.exception, ValueError), repr(result.exception)
    return str(result.exception)


def inspected(*arguments: object) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(run(*arguments, "--json"))}


def saved(tmp_path: Path, architecture: str, **settings: object) -> tuple[Path, Path]:
    """(folder in NVFP4, folder it was made from)."""
    source, target = tmp_path / "source", tmp_path / "nvfp4"
    build(architecture, torch.bfloat16, spread=False).save_pretrained(source)
    config = kbit.NVFP4Config(**settings)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained(target)
    return target, source


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_stored_is_counted_and_compared(tmp_path: Path, architecture: str) -> None:
    folder, source = saved(tmp_path, architecture)
    rows = inspected(folder)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(row["bytes"] for row in rows.values()) == stored
    quantized = {name for name, row in rows.items() if row["format"] == "nvfp4"}
    assert {rows[name]["bits"] for name in quantized} == {4}
    assert {(row["bits"], row["format"]) for name, row in rows.items() if name not in quantized} == {
        (None, None)
    }
    compared = inspected(folder, "--source", source)
    assert {name for name, row in compared.items() if row["nmse"] is not None} == quantized
    assert all(0.004 < compared[name]["nmse"] < 0.012 for name in quantized)
    original = load_file(source / "model.safetensors")
    linear = {name for name in quantized if f"{name}.weight" in original}
    assert len(linear) > 4
    assert all(compared[name]["weights"] == original[f"{name}.weight"].numel() for name in linear)


def test_errors_are_those_of_the_decoded_weights(tmp_path: Path) -> None:
    folder, source = saved(tmp_path, "qwen3_moe")
    rows = inspected(folder, "--source", source)
    original = load_file(source / "model.safetensors")
    error = total = weights = 0.0
    for name, tensor in original.items():
        if name.startswith("model.layers.0.mlp.experts."):
            total += float(tensor.float().square().sum())
            weights += tensor.numel()
    model = AutoModelForCausalLM.from_pretrained(folder)
    experts = model.model.layers[0].mlp.experts
    for expert in range(4):
        names = [f"model.layers.0.mlp.experts.{expert}.{each}_proj.weight" for each in ("gate", "up", "down")]
        gate, up, down = (original[name].float() for name in names)
        for mine, theirs in (("gate_up", torch.cat([gate, up])), ("down", down)):
            decoded = dequantize_nvfp4(experts.quantized(mine).expert(expert))
            error += float((decoded - theirs).square().sum())
    row = rows["model.layers.0.mlp.experts"]
    assert (row["tensors"], row["weights"]) == (2, weights)
    assert row["nmse"] == pytest.approx(error / total)


@pytest.mark.parametrize(
    ("settings", "how"), [({"accum": "seq16"}, "W4A4, accum seq16"), ({"activations": "16bit"}, "W4A16")]
)
def test_the_table_says_how_it_multiplies_and_what_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, how: str
) -> None:
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    folder, _ = saved(tmp_path, "qwen3", modules_to_not_convert=["model.layers.1.mlp"], **settings)
    output = run(folder)
    assert re.search(rf"^ *NVFP4, {how} *$", output, re.M)
    for text in ("all NVFP4", "unquantized", MODULE):
        assert text in output
    assert re.search(r"unquantized lm_head.weight: .*: it is the output head\n", output)
    assert re.search(r"mlp.up_proj.weight: .*: modules_to_not_convert has 'model.layers.1.mlp'\n", output)
    assert re.search(r"embed_tokens.weight: .*: it is no linear layer", output)


def foreign(folder: Path, spelling: str) -> tuple[Path, torch.Tensor]:
    """A folder of one layer as another library writes it, and the layer before."""
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    t = quantize_nvfp4(weight, global_scale=global_scale_for(weight))
    assert t.scales is not None
    scales, name = t.scales.view(torch.float8_e4m3fn), "model.layers.0.mlp.up_proj"
    tensors = {f"{name}.weight_scale": scales, "model.norm.weight": torch.ones(64)}
    if spelling == "modelopt":
        tensors |= {f"{name}.weight": t.codes, f"{name}.weight_scale_2": t.global_scale}
        tensors[f"{name}.input_scale"] = torch.ones(())
    else:
        tensors |= {
            f"{name}.weight_packed": t.codes,
            f"{name}.weight_global_scale": 1 / t.global_scale.view(1),
        }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": spelling}}))
    return folder, weight


@pytest.mark.parametrize("spelling", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("stated", [True, False])
def test_folders_of_other_libraries(tmp_path: Path, spelling: str, stated: bool) -> None:
    folder, weight = foreign(tmp_path / "folder", spelling)
    if not stated:  # ModelOpt says it in hf_quant_config.json alone
        (folder / "config.json").write_text("{}")
    source = tmp_path / "source"
    source.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, source / "model.safetensors")
    rows = inspected(folder, "--source", source)
    assert set(rows) == {"model.layers.0.mlp.up_proj", "model.norm.weight"}
    row = rows["model.layers.0.mlp.up_proj"]
    assert (row["format"], row["tensors"], row["weights"]) == ("nvfp4", 1, 24 * 64)
    assert 0.004 < row["nmse"] < 0.012
    assert row["bytes"] == 24 * 64 * 4.5 / 8 + (8 if spelling == "modelopt" else 4)
    assert f"NVFP4 of {spelling}" in run(folder)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
def test_fused_experts_have_a_factor_each_or_one_for_all(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, name = torch.randn(3, 24, 64), "model.layers.0.mlp.experts.down_proj"
    t = quantize_nvfp4(weight)
    assert t.scales is not None
    tensors = {f"{name}.weight": t.codes, f"{name}.weight_scale": t.scales.view(torch.float8_e4m3fn)}
    tensors[f"{name}.weight_scale_2"] = torch.ones(shape)
    folder, source = tmp_path / "folder", tmp_path / "source"
    for one, parts in ((folder, tensors), (source, {f"{name}.weight": weight})):
        one.mkdir()
        save_file(parts, one / "model.safetensors")
        (one / "config.json").write_text("{}")
    assert 0.004 < inspected(folder, "--source", source)["model.layers.0.mlp.experts"]["nmse"] < 0.012


def test_scales_of_other_formats_are_listed(tmp_path: Path) -> None:
    """MXFP4's, of 8 bits of exponent alone."""
    codes, scales = torch.zeros(8, 32).byte(), torch.ones(8, 2).to(torch.float8_e8m0fnu)
    save_file({"up.weight_blocks": codes, "up.weight_scale": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert sum(row["bytes"] for row in inspected(tmp_path).values()) == 8 * 32 + 8 * 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder, source = saved(tmp_path, "qwen3")
    assert "is quantized. Give the folder" in refuse(folder, "--source", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)

    def refused(change: dict[str, torch.Tensor | None], *arguments: object) -> str:
        kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
        return refuse(folder, *arguments)

    codes = f"{MODULE}.weight_codes"
    for part in ("codes", "scales", "global_scale"):
        assert f"has no '{MODULE}.weight_{part}' beside it" in refused({f"{MODULE}.weight_{part}": None})
    assert "must be uint8" in refused({codes: tensors[codes][:-1].clone()})
    assert "must be uint8" in refused({codes: tensors[codes].int()})
    scales, factor = f"{MODULE}.weight_scales", f"{MODULE}.weight_global_scale"
    assert "must be float8_e4m3fn" in refused({scales: tensors[scales].view(torch.float8_e5m2)})
    assert "must be float8_e4m3fn" in refused({scales: tensors[scales].bfloat16()})
    for wrong in (torch.ones(4), torch.ones(0), torch.ones(1).int()):
        assert "must be one floating-point number for each matrix" in refused({factor: wrong})
    bad = {f"{MODULE}.weight_scales": torch.full_like(tensors[f"{MODULE}.weight_scales"], 0xFF)}
    assert "negative or NaN" in refused(bad, "--source", source)
    plain = {name: tensor for name, tensor in tensors.items() if not re.search("_(codes|.*scales?)$", name)}
    save_file(plain, file, metadata={"format": "pt"})
    assert "the config says kbit_nvfp4, but no tensor is called *_codes" in refuse(folder)


def test_a_source_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, source = saved(tmp_path, "qwen3_moe")
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = f"{MODULE}.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, metadata={"format": "pt"})
    assert f"{name} has shape" in refuse(folder, "--source", source)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    message = refuse(folder, "--source", source)
    assert "the source has no tensor 'model.layers.0.mlp.experts.gate_up_proj'. Is it the model" in message


def test_a_method_that_transformers_does_not_know_is_named_before_loading(tmp_path: Path) -> None:
    folder, _ = foreign(tmp_path / "folder", "modelopt")
    with pytest.raises(ValueError, match="is quantized by 'modelopt', which transformers cannot load"):
        load_model(folder)
