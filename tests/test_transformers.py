"""transformers: quantize on load, save, reload, generate, on tiny random models of seven architectures."""

import subprocess
import sys

import accelerate
import pytest
import torch
import transformers
from packaging import version
from safetensors.torch import load_file, save_file
from torch import nn

import kbit
from kbit.format import SUPPORTED_BITS
from kbit.integrations.streaming import quantize_checkpoint
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear, QuantizedModule
from tiny_models import ARCHITECTURES, build, quantize_files

AutoModelForCausalLM = transformers.AutoModelForCausalLM


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{architecture: folder of an unquantized bfloat16 checkpoint}, made when first asked for."""

    class Folders(dict):
        def __missing__(self, architecture):
            folder = tmp_path_factory.mktemp("models") / architecture
            build(architecture, torch.bfloat16).save_pretrained(folder)
            self[architecture] = folder
            return folder

    return Folders()


def assert_same(one, other):
    """Equal names, dtypes and bits of everything that is stored."""
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def load(folder, config=None, **kwargs):
    if config is not None:  # None would hide the checkpoint's own config from transformers
        kwargs["quantization_config"] = config
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def assert_reloads(model, folder):
    """Saved and loaded again it stores and computes the same; what was loaded."""
    model.save_pretrained(folder)
    again = load(folder)
    assert_same(model, again)
    assert torch.equal(model(IDS).logits, again(IDS).logits)
    return again


def widths(model):
    return {n: m.bits for n, m in model.named_modules() if isinstance(m, QuantizedModule)}


IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])
POLICY = {"bits": 4, "overrides": {"down_proj": 3, r"layers\.\d\..*\.experts$": 5}}


@pytest.mark.parametrize("embedding_bits", [None, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantize_save_reload_generate(architecture, embedding_bits, sources, tmp_path):
    config = kbit.KbitConfig(**POLICY, embedding_bits=embedding_bits)
    model = load(sources[architecture], config)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    # Names and shapes alone do not tell what is what in Granite's files.
    by_names = quantize_checkpoint if architecture == "granitemoe" else quantize_files
    by_names(sources[architecture], tmp_path / "files", config)
    from_files = load(tmp_path / "files")
    assert_same(model, again)
    assert_same(model, from_files)

    with torch.no_grad():
        logits = model(IDS).logits
        assert logits.isfinite().all()
        assert torch.equal(logits, again(IDS).logits)
        assert torch.equal(logits, from_files(IDS).logits)
    generated = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, again.generate(IDS, max_new_tokens=4, do_sample=False))
    assert generated.shape == (2, 9)

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    files = load_file(tmp_path / "files" / "model.safetensors")
    assert saved.keys() == files.keys()
    assert all(torch.equal(saved[name], files[name]) for name in saved)


@pytest.mark.parametrize("embedding_bits", [None, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantizing_in_place_gives_the_same_model(architecture, embedding_bits, sources, tmp_path):
    config = kbit.KbitConfig(**POLICY, embedding_bits=embedding_bits)
    on_load = load(sources[architecture], config)
    in_place = kbit.quantize_model(load(sources[architecture]), config)
    assert_same(on_load, in_place)
    assert torch.equal(on_load(IDS).logits, in_place(IDS).logits)
    in_place.save_pretrained(tmp_path / "saved")
    assert_same(on_load, load(tmp_path / "saved"))


def test_every_kind_of_layer_is_replaced(sources):
    model = load(sources["qwen3_moe"], kbit.KbitConfig(**POLICY, embedding_bits=5))
    attention, sparse, dense = (
        model.model.layers[0].self_attn,
        model.model.layers[0].mlp,
        model.model.layers[1].mlp,
    )
    assert type(attention.q_proj) is KbitLinear
    assert type(sparse.experts) is KbitExperts
    assert type(model.model.embed_tokens) is KbitEmbedding
    assert type(model.lm_head) is KbitLinear
    assert not isinstance(sparse.gate, QuantizedModule)
    bits = [attention.q_proj.bits, sparse.experts.bits, dense.down_proj.bits, model.lm_head.bits]
    assert bits == [4, 5, 3, 5]
    assert attention.q_proj.layer_name == "model.layers.0.self_attn.q_proj"
    assert sparse.experts.gate_up_proj_scale.shape == (4, 2)
    assert model.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters() if p.dtype != torch.bfloat16)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_width(bits, sources, tmp_path):
    model = load(sources["llama"], kbit.KbitConfig(bits=bits))
    assert set(widths(model).values()) == {bits}
    model.save_pretrained(tmp_path)
    assert_same(model, load(tmp_path))


@pytest.mark.parametrize("absmax_format", ["float16", "float32"])
def test_other_scale_formats_leave_the_models_dtype_alone(absmax_format, sources, tmp_path):
    config = kbit.KbitConfig(absmax_format=absmax_format, embedding_bits=4)
    model = load(sources["llama"], config)
    assert model.dtype == torch.bfloat16
    again = assert_reloads(model, tmp_path)
    assert not any(p.requires_grad for n, p in again.named_parameters() if n.endswith("_absmax"))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_do_not_depend_on_the_dtype_of_loading(dtype, architecture, tmp_path):
    if architecture == "mixtral" and version.parse(transformers.__version__) < version.parse("5.21"):
        pytest.skip("before 5.21 transformers ignores dtype for renamed tensors of a quantized checkpoint")
    build(architecture, torch.float32).save_pretrained(tmp_path / "float32")
    config = kbit.KbitConfig(**POLICY, embedding_bits=4)
    quantize_files(tmp_path / "float32", tmp_path / "files", config)
    model = load(tmp_path / "float32", config, dtype=dtype)
    from_files = load(tmp_path / "files", dtype=dtype)
    assert_same(model, from_files)
    assert model(IDS).logits.dtype == dtype
    assert torch.equal(model(IDS).logits, from_files(IDS).logits)


def test_a_tied_table_is_stored_once(sources, tmp_path):
    model = load(sources["llama"], kbit.KbitConfig(embedding_bits=4))
    assert model.lm_head.weight_packed is model.model.embed_tokens.weight_packed
    model.save_pretrained(tmp_path)
    names = [n for n in load_file(tmp_path / "model.safetensors") if "embed_tokens" in n or "lm_head" in n]
    assert sorted(names) == ["model.embed_tokens.weight_absmax", "model.embed_tokens.weight_packed"]
    again = load(tmp_path)
    assert again.lm_head.weight_packed is again.model.embed_tokens.weight_packed
    again.tie_weights()
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_tied_table_with_a_factor(tmp_path):
    source = build("llama", torch.bfloat16)
    with torch.no_grad():
        source.model.embed_tokens.weight.mul_(4096)
    source.save_pretrained(tmp_path / "source")
    model = load(tmp_path / "source", kbit.KbitConfig(embedding_bits=4))
    assert model.lm_head.weight_scale is model.model.embed_tokens.weight_scale
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert_same(model, again)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not [n for n in load_file(tmp_path / "saved" / "model.safetensors") if "lm_head" in n]


def test_modules_left_out_and_a_custom_codebook(sources, tmp_path):
    levels = [-1.0, -0.4, 0.1, 0.6]
    config = kbit.KbitConfig(bits=2, codebook=levels, modules_to_not_convert=["model.layers.1"])
    model = load(sources["qwen3_moe"], config)
    assert widths(model)
    assert not [name for name in widths(model) if "layers.1" in name]
    assert model.model.layers[0].mlp.experts.codebook.tolist() == pytest.approx(levels)
    assert_reloads(model, tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_quantizing_the_rest_later_states_every_codebook(architecture, sources, tmp_path):
    levels = torch.linspace(-1, 1, 16).tolist()
    config = kbit.KbitConfig(
        codebook=levels, embedding_bits=4, absmax_format="float16", overrides={r"1\.": 0}
    )
    model = kbit.quantize_model(load(sources[architecture]), config)
    before = widths(model)
    for other in ({"bits": 4, "absmax_format": "float16"}, {"bits": 3}):
        with pytest.raises(ValueError, match=r"quantized already, has .*Use the same for all"):
            kbit.quantize_model(model, kbit.KbitConfig(**other))
    assert widths(model) == before
    skipped = ["model.layers.0", "lm_head"]  # quantized already
    rest = kbit.KbitConfig(bits=3, absmax_format="float16", modules_to_not_convert=skipped)
    kbit.quantize_model(model, rest)
    assert set(widths(model).values()) == {3, 4}
    assert_reloads(model, tmp_path)


@pytest.mark.parametrize("way", ["in place", "on load"])
def test_a_model_without_quantized_layers_is_saved_as_any_other(way, sources, tmp_path):
    config = kbit.KbitConfig(modules_to_not_convert=["model.layers"])
    if way == "on load":
        model = load(sources["llama"], config)
    else:
        with pytest.warns(
            UserWarning, match="kbit quantized no layer: the model has none that can be, or the policy"
        ):
            model = kbit.quantize_model(load(sources["llama"]), config)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert_same(load(sources["llama"]), load(tmp_path / "saved"))


SMALL = {"vocab_size": 72, "pad_token_id": 0}
READ_BY_OTHERS = {
    "t5": (
        transformers.T5ForConditionalGeneration,
        {"d_model": 40, "d_kv": 16, "d_ff": 72, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
        {"wo"},
    ),
    "mamba": (
        transformers.MambaForCausalLM,
        {"hidden_size": 40, "state_size": 4, "num_hidden_layers": 1},
        {"dt_proj", "lm_head", "embeddings"},  # those are tied
    ),
}


@pytest.mark.parametrize("architecture", READ_BY_OTHERS)
def test_layers_whose_weight_others_read_stay(architecture, tmp_path):
    kind, sizes, left = READ_BY_OTHERS[architecture]
    kind(kind.config_class(**SMALL, **sizes)).save_pretrained(tmp_path / "source")
    config = kbit.KbitConfig(embedding_bits=4)
    kbit.quantize_model(kind.from_pretrained(tmp_path / "source"), config).save_pretrained(tmp_path / "saved")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config)
    on_load = kind.from_pretrained(tmp_path / "source", quantization_config=config)
    plain = [name for name, module in on_load.named_modules() if type(module) in (nn.Linear, nn.Embedding)]
    assert {name.rpartition(".")[2] for name in plain} - {"relative_attention_bias"} == left
    generated = on_load.generate(IDS, max_new_tokens=4, do_sample=False)
    for folder in ("saved", "files"):
        again = kind.from_pretrained(tmp_path / folder)
        assert_same(on_load, again)
        assert torch.equal(again.generate(IDS, max_new_tokens=4, do_sample=False), generated)


def test_a_policy_alone_is_a_config(sources, tmp_path):
    settings = {"bits": 3, "overrides": {r"down_proj": 5}, "embedding_bits": 4}
    model = load(sources["llama"], kbit.QuantizationPolicy(**settings))
    assert model.config.quantization_config == kbit.KbitConfig(**settings)
    assert_same(model, load(sources["llama"], kbit.KbitConfig(**settings)))
    model.save_pretrained(tmp_path / "saved")
    assert_same(model, load(tmp_path / "saved"))


def set_by_hand(model, **settings):
    """Two layers of a model that was never quantized, the second as the settings say."""
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    first.o_proj = KbitLinear.from_linear(first.o_proj, bits=5)
    second.q_proj = KbitLinear.from_linear(second.q_proj, **{"bits": 3} | settings)
    return model.eval()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_layers_set_by_hand_are_saved_and_loaded(architecture, tmp_path):
    model = set_by_hand(build(architecture, torch.float32))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same(model, again)
    assert again.model.layers[1].self_attn.q_proj.bits == 3
    assert type(again.model.layers[0].self_attn.q_proj) is nn.Linear


def test_layers_set_by_hand_that_no_config_states(tmp_path):
    model = set_by_hand(build("llama", torch.float32), bits=5, codebook=torch.linspace(-1, 1, 32).tolist())
    with pytest.raises(ValueError, match=r"save_pretrained: .* has another codebook of 5 bits"):
        model.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*.safetensors"))


def test_some_experts_stay_unquantized(sources, tmp_path):
    config = kbit.KbitConfig(overrides={r"layers\.0\.mlp\.experts": 0})
    model = load(sources["qwen3_next"], config)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, nn.Parameter)
    assert type(model.model.layers[1].mlp.experts) is KbitExperts
    model.save_pretrained(tmp_path / "saved")
    quantize_files(sources["qwen3_next"], tmp_path / "files", config)
    assert_same(model, load(tmp_path / "saved"))
    assert_same(model, load(tmp_path / "files"))


def test_shards_and_fused_experts_on_disk(sources, tmp_path):
    model = load(sources["qwen3_moe"], kbit.KbitConfig(embedding_bits=4))
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same(model, load(tmp_path / "shards"))


def test_tables_narrower_than_the_hidden_size(tmp_path):
    sizes = {"hidden_size": 96, "word_embed_proj_dim": 48, "ffn_dim": 72, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 72, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    policy = kbit.KbitConfig(bits=4, embedding_bits=4)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", policy)
    loaded = load(tmp_path / "out")
    assert loaded.get_input_embeddings().weight_packed.shape == (72, 2 * 4)
    assert torch.equal(loaded(IDS).logits, kbit.quantize_model(model, policy)(IDS).logits)


def test_the_base_model_of_a_checkpoint(sources, tmp_path):
    config = kbit.KbitConfig(embedding_bits=4)
    model = load(sources["qwen3_moe"], config)
    model.save_pretrained(tmp_path / "saved")
    base = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert_same(model.model, base)
    assert_same(
        base, transformers.AutoModel.from_pretrained(sources["qwen3_moe"], quantization_config=config)
    )


def test_a_quantized_model_compiles_whole(sources):
    model = load(sources["llama"], kbit.KbitConfig(embedding_bits=4))
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_accelerate_offloads_quantized_tables(architecture, sources):
    model = load(sources[architecture], kbit.KbitConfig(embedding_bits=4))
    expected = model(IDS).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.get_input_embeddings().weight.is_meta
    assert model.dtype == torch.bfloat16
    assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("config", [{"embedding_bits": 4}, {"overrides": {"lm_head": 4}}], ids=str)
def test_quantized_tables_and_heads_keep_their_size(config, sources):
    model = load(sources["qwen3"], kbit.KbitConfig(**config))
    model.lm_head.prepare(force=True)
    expected, table = model(IDS).logits, model.get_input_embeddings()
    assert model.resize_token_embeddings(72) is model.resize_token_embeddings(70, 8) is table
    for wanted in ((80,), (72, 64)):
        with pytest.raises(
            ValueError, match=rf"has 72 rows, got {128 if wanted[1:] else 80}.*Resize the unq"
        ):
            model.resize_token_embeddings(*wanted)
    assert torch.equal(model(IDS).logits, expected)


def test_unquantized_tables_are_resized(sources, tmp_path):
    model = load(sources["llama"], kbit.KbitConfig())
    model.resize_token_embeddings(80, mean_resizing=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(IDS).logits, model(IDS).logits)


def test_gradients_reach_the_input_embeddings(sources):
    model = load(sources["qwen3_moe"], kbit.KbitConfig(bits=4), dtype=torch.float32)
    x = torch.randn(1, 4, 48, requires_grad=True)
    model(inputs_embeds=x).logits.square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


class SharesProjection(transformers.LlamaForCausalLM):
    """One linear layer is in it under two names."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp.up_proj = self.model.layers[0].mlp.up_proj


@pytest.mark.parametrize("stored", [(0, 1), (0,), (1,)])  # by which names the file has it
def test_a_module_of_several_names_is_replaced_under_each(stored, sources, tmp_path):
    paths = [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)]
    model = load(sources["llama"])
    model.get_submodule(paths[1]).load_state_dict(model.get_submodule(paths[0]).state_dict())
    model.save_pretrained(tmp_path / "source")
    load(tmp_path / "source", kbit.KbitConfig()).save_pretrained(tmp_path / "quantized")
    expected = load(tmp_path / "quantized")(IDS).logits
    gone = tuple(paths[layer] for layer in (0, 1) if layer not in stored)
    for name, config in (("source", {"quantization_config": kbit.KbitConfig()}), ("quantized", {})):
        file = tmp_path / name / "model.safetensors"
        kept = {key: tensor for key, tensor in load_file(file).items() if not key.startswith(gone)}
        save_file(kept, file, metadata={"format": "pt"})
        shared = SharesProjection.from_pretrained(tmp_path / name, **config)
        one, other = map(shared.get_submodule, paths)
        assert type(one) is KbitLinear
        assert one is other
        assert torch.equal(shared(IDS).logits, expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("override", "first", "second"),
    [((1, 3), "4 bits", "3 bits"), ((1, 0), "4 bits", "unquantized"), ((0, 0), "unquantized", "4 bits")],
)
def test_names_of_one_module_must_get_the_same_bits(override, first, second, quantized, sources, tmp_path):
    layer, bits = override
    config = kbit.KbitConfig(overrides={rf"layers\.{layer}\.mlp\.up_proj": bits})
    folder, kwargs = sources["llama"], {"quantization_config": config}
    if quantized:
        load(folder, config).save_pretrained(tmp_path)
        folder, kwargs = tmp_path, {}
    elif not bits:  # a skip by either name is for both
        model = SharesProjection.from_pretrained(folder, **kwargs)
        assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is nn.Linear
        return
    told = rf"layers.0.mlp.up_proj \({first}\) and model.layers.1.mlp.up_proj \({second}\) are one module"
    with pytest.raises(ValueError, match=told + ".*Change overrides"):
        SharesProjection.from_pretrained(folder, **kwargs)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_tied_table_that_is_stored_twice(quantized, sources, tmp_path):
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "twice")
    file = tmp_path / "twice" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})

    def loaded(**overrides):
        config = kbit.KbitConfig(embedding_bits=4, overrides=overrides)
        if not quantized:
            return load(tmp_path / "twice", config)
        target = tmp_path / "-".join(overrides)
        quantize_files(tmp_path / "twice", target, config)
        return load(target)

    model = loaded(lm_head=5)  # two tables then, as transformers takes weights that differ
    assert [model.model.embed_tokens.bits, model.lm_head.bits] == [4, 5]
    plain = loaded(embed_tokens=0)
    if not quantized:  # a skip of either is for both
        assert plain.lm_head.weight is plain.model.embed_tokens.weight
        return
    # Where a writer has treated them apart, they are two.
    assert torch.equal(plain.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert plain.lm_head.bits == 4


CHECK = """
import sys
{imports}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model.model.layers[0].self_attn.q_proj).__name__ == "KbitLinear"
assert type(model.model.layers[0].self_attn.q_proj.weight_packed).__name__ == "Parameter"
"""


# kbit is imported while another thread is in the middle of importing a module of transformers.
MEANWHILE = """
import importlib, threading, time
import torch, transformers
other = threading.Thread(target=importlib.import_module, args=["transformers.modeling_utils"])
other.start()
while "{module}" not in sys.modules:
    time.sleep(0)
import kbit
other.join()
assert transformers.PreTrainedModel.resize_token_embeddings.knows_kbit
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import kbit",
        "import transformers.quantizers\nimport kbit",
        "import kbit.integrations.transformers.quantizer",
        MEANWHILE.format(module="transformers.quantizers.auto"),
        MEANWHILE.format(module="transformers.modeling_utils"),
    ],
    ids=["before", "after", "quantizer", "during the registry's import", "during the models' import"],
)
def test_importing_kbit_suffices_before_or_after_transformers(imports, sources, tmp_path):
    load(sources["llama"], kbit.KbitConfig()).save_pretrained(tmp_path)
    subprocess.run([sys.executable, "-c", CHECK.format(imports=imports), str(tmp_path)], check=True)


def test_importing_kbit_does_not_import_transformers():
    program = "import sys, kbit; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
