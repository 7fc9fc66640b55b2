"""transformers' classes for other tasks than a model was quantized for, and what only some models tie."""

import re
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import modeling_utils
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

import kbit
from kbit.integrations.nvfp4.config import NVFP4Config
from kbit.integrations.streaming import quantize_checkpoint
from kbit.integrations.transformers.placement import plan_ties
from kbit.integrations.transformers.plan import Planned
from kbit.integrations.transformers.saving import copy_converter
from kbit.nn import KbitLinear
from kbit.nn.parts import QuantizedModule
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7]])
BERT = {"vocab_size": 72, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 72, "max_position_embeddings": 32}


@pytest.fixture
def masked(tmp_path):
    """A BERT for masked words, quantized in place, and its folder. It has no pooler."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).eval()
    kbit.quantize_model(model, kbit.KbitConfig(bits=4)).save_pretrained(tmp_path / "masked")
    return model, tmp_path / "masked"


def test_a_head_with_a_tied_bias_is_saved(masked):
    model, folder = masked
    assert isinstance(model.cls.predictions.decoder, nn.Linear)
    again = transformers.BertForMaskedLM.from_pretrained(folder)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.cls.predictions.decoder.bias is again.cls.predictions.bias
    assert not [name for name in load_file(folder / "model.safetensors") if "bias_" in name]


def test_a_quantized_head_with_a_tied_bias_is_saved(tmp_path):
    """Quantized in place, from the saved folder, and by shards: the tie of biases is none of weights."""
    torch.manual_seed(0)
    policy = kbit.KbitConfig(bits=4, embedding_bits=5)
    plain = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).eval()
    plain.save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "0", policy)
    model = kbit.quantize_model(plain, policy)
    model.save_pretrained(tmp_path / "1")
    for before, after in (("1", "2"), ("0", "3")):
        again = transformers.BertForMaskedLM.from_pretrained(tmp_path / before)
        again.save_pretrained(tmp_path / after)
        again = transformers.BertForMaskedLM.from_pretrained(tmp_path / after)
        assert again.config.tie_word_embeddings
        assert again.cls.predictions.decoder.bits == 5
        assert again.cls.predictions.decoder.bias is again.cls.predictions.bias
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_what_the_quantized_class_had_not_is_drawn_at_random(kind, masked):
    model, folder = masked
    other = getattr(transformers, kind).from_pretrained(folder).eval()
    base = other.base_model
    assert type(base.pooler.dense) is nn.Linear
    assert type(base.encoder.layer[0].attention.self.query) is KbitLinear
    states = [each(IDS).last_hidden_state for each in (base, model.bert)]
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification", "BertForMaskedLM"])
def test_what_it_had_must_be_there(kind, masked):
    _, folder = masked
    tensors = load_file(folder / "model.safetensors")
    for part in ("packed", "absmax"):
        del tensors[f"bert.encoder.layer.1.output.dense.weight_{part}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds no tensors.*encoder\.layer\.1\.output\.dense\.weight\. Its"):
        getattr(transformers, kind).from_pretrained(folder)


T5 = {"vocab_size": 72, "d_model": 48, "d_kv": 24, "d_ff": 72, "num_layers": 2, "num_heads": 2}
TOWER = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = TOWER | {"image_size": 28, "patch_size": 14, "projection_dim": 32}
TEXT = TOWER | {"vocab_size": 72, "max_position_embeddings": 32, "projection_dim": 32}
CLIP = {"vision_config": IMAGE, "text_config": TEXT, "projection_dim": 32}
QUANTIZED = {
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "T5Encoder": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "CLIP": lambda: transformers.CLIPModel(transformers.CLIPConfig(**CLIP)),
    "Bert": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
}


def folder_of(name, tmp_path, **how):
    torch.manual_seed(0)
    model = kbit.quantize_model(QUANTIZED[name]().eval(), kbit.KbitConfig(**{"bits": 4} | how))
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize(
    ("name", "kind", "changes", "added"),
    [
        ("T5", "T5ForQuestionAnswering", {}, {"qa_outputs"}),
        ("CLIP", "CLIPForImageClassification", {}, {"classifier"}),
        (
            "Bert",
            "BertLMHeadModel",
            {"is_decoder": True, "add_cross_attention": True},
            {"crossattention", "cls"},
        ),
    ],
)
def test_what_a_task_adds_is_drawn_at_random(name, kind, changes, added, tmp_path):
    folder_of(name, tmp_path)
    load = getattr(transformers, kind).from_pretrained
    _, info = load(tmp_path, output_loading_info=True, **changes)
    parts = {part for part in added for name in info["missing_keys"] if part in name.split(".")}
    assert parts == added
    assert all(added & {*name.split(".")} for name in info["missing_keys"])


@pytest.mark.parametrize(
    ("name", "kind", "changes", "missing"),
    [
        ("T5Encoder", "T5ForConditionalGeneration", {}, r"decoder\.block\.0"),
        ("Bert", "BertModel", {"num_hidden_layers": 3}, r"encoder\.layer\.2"),
        ("Bert", "BertForSequenceClassification", {"num_hidden_layers": 3}, r"bert\.encoder\.layer\.2"),
    ],
)
def test_decoders_and_layers_are_not_added(name, kind, changes, missing, tmp_path):
    folder_of(name, tmp_path)
    with pytest.raises(ValueError, match=rf"holds no tensors, quantized or not, of {missing}"):
        getattr(transformers, kind).from_pretrained(tmp_path, **changes)


@pytest.mark.parametrize("how", [{}, {"overrides": {r"vision_model\..*fc1": 2}}], ids=["plain", "overrides"])
def test_parts_of_a_composite_model_load_by_themselves(how, tmp_path):
    whole = folder_of("CLIP", tmp_path / "whole", **how)
    pixels = torch.randn(1, 3, 28, 28)
    load = transformers.CLIPVisionModelWithProjection.from_pretrained
    part = load(tmp_path / "whole")
    part.save_pretrained(tmp_path / "part")
    with torch.no_grad():
        expected = whole.visual_projection(whole.vision_model(pixels).pooler_output)
        for model in (part, load(tmp_path / "part")):
            assert model.vision_model.encoder.layers[0].mlp.fc1.bits == (2 if how else 4)
            assert torch.equal(model(pixels).image_embeds, expected)
        text = transformers.CLIPTextModel.from_pretrained(tmp_path / "whole")
        assert torch.equal(text(IDS).pooler_output, whole.text_model(IDS).pooler_output)
    assert (
        transformers.CLIPModel.from_pretrained(tmp_path / "whole")
        .config.vision_config.to_dict()
        .get("quantization_config")
        is None
    )


def test_a_saved_model_is_dequantized(tmp_path):
    """Saving writes the dtype's name into the config, which `dequantize` reads."""
    model = kbit.quantize_model(build("llama", torch.float32), kbit.KbitConfig())
    model.save_pretrained(tmp_path / "saved")
    assert model.dequantize().model.layers[0].self_attn.q_proj.weight.dtype == torch.float32


def test_a_copied_converter_leaves_the_other_its_patterns():
    """Undone on saving, `experts.down_proj` would be found in shared_experts.down_proj, too."""
    operations = [MergeModulelist(dim=0), Concatenate(dim=1)]
    entry = WeightConverter([r"\.experts.*.w2.weight"], [r"\.experts.down_proj"], operations=operations)
    patterns = entry._original_source_patterns, entry._original_target_patterns
    wanted = [[*each] for each in patterns]
    copy_converter(entry, *patterns, operations)
    assert [*patterns] == wanted


def granite(spread):
    """A Granite of experts; with `spread`, gate and up of one need different factors."""
    model = build("granitemoe", torch.float32)
    if spread:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.block_sparse_moe.experts.gate_up_proj[1, :24] *= 2.0**-12
    return model


@pytest.mark.parametrize("pattern", ["input_linear|output_linear", r"block_sparse_moe\.experts", "nothing"])
def test_experts_that_files_hold_fused_under_other_names(pattern, tmp_path):
    """Three ways to one checkpoint, which is loaded, and dequantized has the names that it began with."""
    config = kbit.KbitConfig(overrides={pattern: 3})
    granite(spread=True).save_pretrained(tmp_path / "source")
    kind = transformers.GraniteMoeForCausalLM
    kbit.quantize_model(kind.from_pretrained(tmp_path / "source"), config).save_pretrained(
        tmp_path / "memory"
    )
    on_load = kind.from_pretrained(tmp_path / "source", quantization_config=config)
    on_load.save_pretrained(tmp_path / "load")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config)
    wanted = load_file(tmp_path / "load" / "model.safetensors")
    assert wanted["model.layers.0.block_sparse_moe.experts.gate_up_proj_scale"].shape == (4,)
    for way in ("memory", "load", "files"):
        stored = load_file(tmp_path / way / "model.safetensors")
        assert stored.keys() == wanted.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())
        model = kind.from_pretrained(tmp_path / way)
        assert model.model.layers[0].block_sparse_moe.experts.bits == (4 if pattern == "nothing" else 3)
        assert torch.equal(model(IDS).logits, on_load(IDS).logits)
        model.dequantize().save_pretrained(tmp_path / f"plain-{way}")
        names = [load_file(tmp_path / each / "model.safetensors") for each in ("source", f"plain-{way}")]
        assert names[0].keys() == names[1].keys()


@pytest.mark.parametrize("names", [("input_linear", "output_linear"), ("output_linear", "input_linear")])
def test_experts_of_which_files_name_the_weights_apart_get_one_width(names, tmp_path):
    model = granite(spread=False)
    model.save_pretrained(tmp_path / "source")
    config = kbit.KbitConfig(overrides={names[0]: 3})
    refused = pytest.raises(ValueError, match=r"experts: its tensors would get . bits .* and . bits .* alike")
    with refused as on_load:
        transformers.GraniteMoeForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config)
    with refused as in_place:
        kbit.quantize_model(model, config)
    for error in (on_load, in_place):
        assert re.search(rf"3 bits \(.*\.{names[0]}\b", str(error.value))
        assert re.search(rf"4 bits \(.*\.{names[1]}\b", str(error.value))
    assert not any(isinstance(module, QuantizedModule) for module in model.modules())


def test_experts_of_which_files_leave_out_one_weight_stay(tmp_path):
    model = granite(spread=False)
    model.save_pretrained(tmp_path / "source")
    config = kbit.KbitConfig(overrides={"output_linear": 0})
    loaded = transformers.GraniteMoeForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=config
    )
    for each in (loaded, kbit.quantize_model(model, config)):
        assert not isinstance(each.model.layers[0].block_sparse_moe.experts, QuantizedModule)
        assert isinstance(each.model.layers[0].self_attn.q_proj, QuantizedModule)


def test_experts_that_a_model_initializes_by_their_names(tmp_path, monkeypatch):
    """As Qwen3-Omni does, from the block around them, also where it finds every weight in the files."""
    from transformers import initialization
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    initialize = modeling.Qwen3MoePreTrainedModel._init_weights

    def by_name(self, module):
        initialize(self, module)
        if isinstance(module, modeling.Qwen3MoeSparseMoeBlock):
            initialization.normal_(module.experts.gate_up_proj)
            initialization.normal_(module.experts.down_proj)

    monkeypatch.setattr(modeling.Qwen3MoePreTrainedModel, "_init_weights", by_name)
    source = build("qwen3_moe", torch.float32)
    source.save_pretrained(tmp_path / "source")
    kind, config = transformers.Qwen3MoeForCausalLM, kbit.KbitConfig(bits=4)
    on_load = kind.from_pretrained(tmp_path / "source", quantization_config=config)
    on_load.save_pretrained(tmp_path / "saved")
    wanted = kbit.quantize_model(source, config)(IDS).logits
    for model in (on_load, kind.from_pretrained(tmp_path / "saved")):
        assert torch.equal(model(IDS).logits, wanted)
        assert not hasattr(model.model.layers[0].mlp.experts, "gate_up_proj")


def test_all_that_are_tied_stay_with_the_one_that_cannot_be_quantized():
    sizes = {"vocab_size": 72, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1}
    with torch.device("meta"):
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
    ties = sorted(model.all_tied_weights_keys.items(), key=lambda pair: pair[0] != "lm_head.weight")
    assert len(ties) == 3
    model.all_tied_weights_keys = dict(ties)  # the head first, which could be
    plan = {"model.shared.weight": Planned(4)}
    assert plan_ties(model, plan, refuse=False) == []
    assert plan == {}


@pytest.mark.parametrize("boundary", [True, False])
def test_codes_are_not_converted_as_if_they_were_weights(boundary, tmp_path, monkeypatch):
    """As in Qwen3-VL-MoE, whose files hold experts transposed, and in GTE, with q, k and v in one tensor."""
    from kbit.integrations.transformers import names, saving

    # transformers' patterns end where a name does, unless they end with a dot or the like.
    source, target = (
        (r"self_attn.q_proj.weight",) * 2 if boundary else (r"self_attn.qq\.", r"self_attn.q_proj\.")
    )
    entry = WeightConverter([source], [target], operations=[Transpose(0, 1)])
    for module in (names, saving):
        monkeypatch.setattr(module, "get_model_conversion_mapping", lambda model, **kwargs: [entry])
    model = kbit.quantize_model(build("llama", torch.float32), kbit.KbitConfig(bits=4))
    if not boundary:
        with pytest.raises(ValueError, match=r"hold in another layout model\.layers\.0\.self_attn\.q_proj, "):
            model.save_pretrained(tmp_path / "saved")
        assert not list(tmp_path.glob("saved/*.safetensors"))
        return
    model.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(
        modeling_utils, "get_model_conversion_mapping", lambda model, *rest, **kwargs: [entry]
    )
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "JambaForCausalLM", "BertForMaskedLM"])
def test_nvfp4_leaves_alone_on_reload_what_it_left_alone(kind, tmp_path):
    """What others read the weight of, and what is tied."""
    t5 = {"vocab_size": 72, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    jamba = {"vocab_size": 72, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    jamba |= {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_offset": 1, "num_experts": 2}
    jamba |= {"attn_layer_period": 2, "use_mamba_kernels": False}
    sizes = {"T5": t5, "Jamba": jamba, "BertF": BERT | {"hidden_size": 64, "intermediate_size": 64}}
    (chosen,) = [each for name, each in sizes.items() if kind.startswith(name)]
    model = getattr(transformers, kind)
    model(model.config_class(**chosen)).save_pretrained(tmp_path / "source")
    once = model.from_pretrained(tmp_path / "source", quantization_config=NVFP4Config())
    once.save_pretrained(tmp_path / "saved")
    again = model.from_pretrained(tmp_path / "saved")
    kinds = [{name: type(each) for name, each in m.named_modules()} for m in (once, again)]
    assert kinds[0] == kinds[1]
    assert {each.__name__ for each in kinds[0].values()} >= {"Linear", "NVFP4Linear"}


MOBILE = {"vocab_size": 72, "embedding_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("hidden", [64, 32])  # 32: dense has no rows, since it makes up for the difference
@pytest.mark.parametrize("way", ["memory", "load", "files"])
def test_a_head_that_reads_two_weights_itself(way, hidden, tmp_path):
    """MobileBERT multiplies by the table and by another matrix beside it."""
    sizes = MOBILE | dict.fromkeys(("hidden_size", "intra_bottleneck_size", "true_hidden_size"), hidden)
    kind, config = transformers.MobileBertForMaskedLM, kbit.KbitConfig(embedding_bits=4)
    model = kind(transformers.MobileBertConfig(**sizes, intermediate_size=48)).eval()
    model.save_pretrained(tmp_path / "source")
    if way == "files":
        quantize_checkpoint(tmp_path / "source", tmp_path / "saved", config)
    elif way == "load":
        kind.from_pretrained(tmp_path / "source", quantization_config=config).save_pretrained(
            tmp_path / "saved"
        )
    kbit.quantize_model(model, config)
    if way == "memory":
        model.save_pretrained(tmp_path / "saved")
    assert model.mobilebert.encoder.layer[0].attention.self.query.bits == 4
    assert torch.equal(kind.from_pretrained(tmp_path / "saved")(IDS).logits, model(IDS).logits)


def test_a_head_tied_to_a_table_of_another_kind_stays_in_place_too(tmp_path):
    """I-BERT's own class of embeddings."""
    torch.manual_seed(0)
    kind = transformers.IBertForMaskedLM
    sizes = BERT | {"num_hidden_layers": 1, "pad_token_id": 1}
    model = kbit.quantize_model(kind(transformers.IBertConfig(**sizes)).eval(), kbit.KbitConfig())
    assert type(model.lm_head.decoder) is nn.Linear
    assert model.lm_head.dense.bits == 4
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(kind.from_pretrained(tmp_path / "saved").eval()(IDS).logits, model(IDS).logits)


@pytest.mark.skipif(
    not hasattr(transformers, "Inkling2TextConfig"), reason="transformers has no Inkling2 yet"
)
def test_codes_are_not_saved_under_names_that_only_weights_have(tmp_path):
    """Weights are called `weight_proj` in Inkling2's files; with a suffix, they go elsewhere."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {
        "vocab_size": 72,
        "unpadded_vocab_size": 72,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "d_rel": 8,
    }
    sizes |= heads | {f"swa_{key}": value for key, value in heads.items()} | {"layer_types": ["hybrid"]}
    sizes |= {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    kind = transformers.Inkling2ForCausalLM
    kind(transformers.Inkling2TextConfig(**sizes)).save_pretrained(tmp_path / "source")
    load = partial(kind.from_pretrained, tmp_path / "source")
    for model in (
        load(quantization_config=kbit.KbitConfig()),
        kbit.quantize_model(load(), kbit.KbitConfig()),
    ):
        refusal = r"give .*k(_|_proj\.)sconv\.weight_proj, .*v(_|_proj\.)sconv\.weight_proj names by"
        with pytest.raises(ValueError, match=refusal):
            model.save_pretrained(tmp_path / "saved")
    config = kbit.KbitConfig(overrides={"weight_proj": 0})
    kbit.quantize_model(model := load(), config).save_pretrained(tmp_path / "saved")
    again = kind.from_pretrained(tmp_path / "saved")
    ids = {"input_ids": IDS, "use_cache": False}
    assert torch.equal(again(**ids).logits, model(**ids).logits)


class Wrapped(transformers.LlamaPreTrainedModel):
    """Has a model as a part, and draws what is not there yet."""

    def __init__(self, part):
        super().__init__(part.config)
        self.part = part
        self.post_init()


@pytest.mark.parametrize("way", ["quantized", "dequantized"])
def test_a_model_that_becomes_a_part_keeps_its_weights(way, tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    if way == "dequantized":
        kbit.dequantize_model(model)
    before = model(IDS).logits
    assert torch.equal(Wrapped(model).part(IDS).logits, before)


def test_a_quantized_model_on_the_meta_device():
    model = kbit.quantize_model(build("qwen3_moe", torch.bfloat16), kbit.KbitConfig(bits=4)).to("meta")
    with torch.no_grad():
        assert model(IDS.to("meta")).logits.shape == (*IDS.shape, 72)


READERS = {
    "Siglip2VisionModel": {"num_patches": 16, "patch_size": 4},
    "WavLMModel": {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
}


@pytest.mark.parametrize("kind", READERS)
def test_models_that_read_weights_themselves(kind):
    model = getattr(transformers, kind)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_conv_pos_embedding_groups": 4} if kind == "WavLMModel" else {}
    model = model(model.config_class(**sizes, **READERS[kind], **more)).eval()
    kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    if kind == "WavLMModel":
        model(torch.randn(1, 800))
        assert kinds["encoder.layers.0.attention.q_proj"] == "Linear"
        assert kinds["encoder.layers.0.feed_forward.output_dense"] == "KbitLinear"
        return
    mask, shapes = torch.ones(1, 16, dtype=torch.long), torch.tensor([[4, 4]])
    model(pixel_values=torch.randn(1, 16, 48), pixel_attention_mask=mask, spatial_shapes=shapes)
    assert kinds["embeddings.patch_embedding"] == "Linear"
    assert kinds["encoder.layers.0.mlp.fc1"] == "KbitLinear"


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its parts"])
def test_flash_attention_casts_to_no_dtype_of_codes(whole):
    """As to queries in float32 that float32 norms make, or peft's prepare_model_for_kbit_training."""
    from transformers.integrations.flash_attention import get_target_dtype

    model = build("qwen3", torch.bfloat16)
    layers, query = model.model.layers, torch.zeros(1, 2, 3, 16)
    for part in [model] if whole else layers:
        kbit.quantize_model(part, kbit.KbitConfig(bits=4))
    assert [get_target_dtype(query, layer.self_attn) for layer in layers] == [torch.bfloat16] * 2
    assert "_is_quantized" not in model.config.to_dict()
    if whole:
        kbit.dequantize_model(model, torch.float16)
        assert [get_target_dtype(query, layer.self_attn) for layer in layers] == [torch.float16] * 2
