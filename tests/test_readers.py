"""Layers whose weight code of transformers reads: they stay, so that quantized models can be called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import nn

import kbit
import warm_processes
from docs_blocks import ROOT
from kbit.nn import QuantizedModule, quantize_model
from kbit.nn.support import _READERS, left_alone

PINNED = transformers.__version__ in re.findall(
    r"^transformers==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M
)
# What is asked of a weight that codes know, too.
OF_CODES = {"device", "shape"}
# Functions that run before a model is quantized, or that kbit refuses or answers itself.
ELSEWHERE = re.compile(r"__init__|init_|_init|resize|tie_|reset_")
# (class, layer): reads that do no harm, or that only few calls have.
HARMLESS = {
    # With pretraining_tp above 1 and slow_but_exact, as no published model has.
    ("BloomAttention", "dense"),
    ("BloomMLP", "dense_4h_to_h"),
    # In training, with kernels of mamba-ssm that multiply by it, too.
    *((name, "out_proj") for name in ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer")),
    *((name, "out_proj") for name in ("Mamba2Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer")),
    *((name, layer) for name in ("MambaMixer", "FalconMambaMixer") for layer in ("x_proj", "out_proj")),
    ("DisentangledSelfAttention", "in_proj"),  # DeBERTa, with query_states, which none of its calls has
    ("Qwen4ExpTextModel", "embed_tokens"),  # called with inputs_embeds but without input_ids
    ("TimesFm2_5ResidualBlock", "input_layer"),  # its dtype, if that is one of floats
    # Routers, which stay in 16 bits.
    ("HunYuanMoEV1Gate", "wg"),
    ("LongcatFlashTopkRouter", "classifier"),
    # What is read of VJEPA2Embeddings is a convolution that is called so, too.
    ("VJEPA2Predictor", "proj"),
    ("VJEPA2RopeAttention", "proj"),
}

# -- the sources of transformers -----------------------------------------------------------------------------


def blocks(text: str) -> list[str]:
    """The classes of a module, as texts."""
    return re.findall(r"(?m)^class \w+.*\n(?:(?:[ \t].*)?\n)*", text)


def readers(text: str) -> Iterator[ast.ClassDef]:
    """The classes of a module that may read a weight: parsing all takes long."""
    for block in blocks(text):
        if re.search(r"\bself\.[.\w\[\]]*\.weight\b|\bself\.\w+\[.*\.weight\b", block):
            try:
                yield from ast.parse(block).body
            except SyntaxError:  # a text in it that is not indented
                name = re.match(r"class (\w+)", block)[1]
                yield from (one for one in ast.parse(text).body if getattr(one, "name", "") == name)


def path_of(node: ast.expr) -> list[str]:
    """["blocks", "0", "output"] of the expression self.blocks[i].output; of others nothing."""
    path: list[str] = []
    while not isinstance(node, ast.Name):
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return []
        path.append(node.attr if isinstance(node, ast.Attribute) else "0")
        node = node.value
    return path[::-1] if node.id == "self" else []


def made_in(text: str) -> set[tuple[str, str]]:
    """(class, attribute) of a module's linear layers and embeddings, lists of them included."""
    layer = re.compile(r"self\.(\w+) = [^=\n]*(?:\(\n[^=\n]*)?\bnn\.(?:Linear|Embedding)\b")
    return {
        (re.match(r"class (\w+)", block)[1], name) for block in blocks(text) for name in layer.findall(block)
    }


def reads_in(kind: ast.ClassDef) -> Iterator[list[str]]:
    """Paths of the modules whose weight a class reads in calls."""
    for function in kind.body:
        if not isinstance(function, ast.FunctionDef) or ELSEWHERE.search(function.name):
            continue
        attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
        harmless = {id(node.value) for node in attributes if node.attr in OF_CODES}
        for node in attributes:
            if node.attr == "weight" and isinstance(node.ctx, ast.Load) and id(node) not in harmless:
                yield path_of(node.value)


def stays(kind: str, path: list[str]) -> bool:
    """Whether a linear layer stays at a path of a module of a class that is called so."""
    *parents, name = path
    model = holder = type(kind, (nn.Module,), {})()
    for parent in parents:
        holder.add_module(parent, nn.Module())
        holder = holder.get_submodule(parent)
    holder.add_module(name, nn.Linear(1, 1))
    return ".".join(path) in left_alone(model)


def unknown_readers(text: str) -> Iterator[tuple[str, str]]:
    """(class, layer) of the layers of a module of transformers that do not stay although they are read."""
    made = made_in(text)
    for each in readers(text):
        for path in filter(None, reads_in(each)):
            depth = len(path) - (path[-1] == "0")
            name, own = path[depth - 1], path[depth - 1 :]
            # What another class makes, as in self.detr.model.queries, may stay by that class.
            kinds = {kind for kind, one in made if one == name and (depth > 1 or kind == each.name)}
            if not stays(each.name, path):
                yield from ((kind, name) for kind in kinds if not stays(kind, own))


def test_layers_stay_whose_weight_is_read(sources_of_models):
    if not PINNED:
        pytest.skip(f"transformers {transformers.__version__} is none of constraints.txt")
    found = {one for text in sources_of_models for one in unknown_readers(text)}
    assert found - HARMLESS == set()
    if sys.version_info >= (3, 11):  # which has the newest
        assert HARMLESS - found == set()


def test_every_entry_is_of_a_class(sources_of_models):
    if not PINNED or sys.version_info < (3, 11):
        pytest.skip("other versions may lack some")
    kinds = {name for text in sources_of_models for name in re.findall(r"(?m)^class (\w+)", text)}
    assert [kind for kind, _ in _READERS if not any(re.search(kind, name) for name in kinds)] == []


# -- models --------------------------------------------------------------------------------------------------

IDS = torch.arange(3, 12)[None]
TEXT = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 96, "max_position_embeddings": 64}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "legacy": False}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
AUDIO = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
SAM = {
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 64}
    | {"patch_size": 16, "mlp_dim": 96, "output_channels": 32, "window_size": 2, "global_attn_indexes": [0]}
    | {"num_pos_feats": 16},
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4}
    | {"iou_head_hidden_dim": 32},
}
# Class, its config, what it is called with, and layers that stay.
MODELS = [
    (
        "LayoutLMv3Model",
        TEXT | {"coordinate_size": 11, "shape_size": 10, "visual_embed": False},
        {"input_ids": IDS, "bbox": torch.zeros(1, 9, 4, dtype=torch.long)},
        ["encoder.rel_pos_bias", "encoder.rel_pos_x_bias", "encoder.rel_pos_y_bias"],
    ),
    (
        "RwkvForCausalLM",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64}
        | {"intermediate_size": 96, "context_length": 64, "rescale_every": 1},
        {"input_ids": IDS},
        ["rwkv.blocks.1.attention.output", "rwkv.blocks.1.feed_forward.value"],
    ),
    ("DebertaForMaskedLM", TEXT | RELATIVE, {"input_ids": IDS}, ["deberta.encoder.rel_embeddings"]),
    ("DebertaV2ForMaskedLM", TEXT | RELATIVE, {"input_ids": IDS}, ["deberta.embeddings.word_embeddings"]),
    (
        "Siglip2VisionModel",
        VISION | {"num_patches": 16, "patch_size": 8},
        {"pixel_values": torch.zeros(1, 16, 192), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
        | {"spatial_shapes": torch.tensor([[4, 4]])},
        ["embeddings.position_embedding"],
    ),
    (
        "Qwen2AudioEncoder",
        AUDIO | {"d_model": 64, "max_source_positions": 8},
        {"input_features": torch.zeros(1, 16, 16)},
        ["embed_positions"],
    ),
    (
        "SamModel",
        SAM,
        {"pixel_values": torch.zeros(1, 3, 64, 64), "input_points": torch.tensor([[[[10.0, 10.0]]]])},
        ["mask_decoder.iou_token", "prompt_encoder.point_embed.0", "prompt_encoder.no_mask_embed"],
    ),
]


@pytest.mark.parametrize(("kind", "settings", "given", "layers"), MODELS, ids=[kind for kind, *_ in MODELS])
@pytest.mark.filterwarnings("ignore:kbit found no module for embedding_bits")
@torch.no_grad()
def test_models_with_such_layers_can_be_called(kind, settings, given, layers):
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    model = made(made.config_class(**settings)).eval()
    kept = {name: model.get_submodule(name) for name in layers}
    quantize_model(model, kbit.KbitConfig(bits=4, embedding_bits=4))
    assert {name: model.get_submodule(name) for name in layers} == kept
    assert any(isinstance(module, QuantizedModule) for module in model.modules())
    assert all(part.isfinite().all() for part in model(**given).to_tuple() if isinstance(part, torch.Tensor))


# In a process of its own: transformers fuses in all models from then on.
FUSED = """
import sys
import torch, transformers
import kbit

rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
config = transformers.Qwen2VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
kind = transformers.Qwen2VLForConditionalGeneration
kind(config).save_pretrained(sys.argv[1])
model = kind.from_pretrained(sys.argv[1], fusion_config={"patch_embeddings": True})
first = model.model.visual.patch_embed.linear_proj
kbit.quantize_model(model, kbit.KbitConfig(bits=4))
assert model.model.visual.patch_embed.linear_proj is first
patches, grid = torch.randn(16, 3 * 2 * 4 * 4), torch.tensor([[1, 4, 4]])
with torch.no_grad():
    assert model.model.visual(patches, grid_thw=grid).last_hidden_state.isfinite().all()
"""


@pytest.mark.skipif(not find_spec("transformers.fusion_mapping"), reason="transformers has no fusions")
def test_fused_patch_embeddings_stay(tmp_path):
    script = tmp_path / "fused.py"
    script.write_text(FUSED)
    done = subprocess.run(warm_processes.command(script, tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
