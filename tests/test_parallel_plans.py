"""A user's own parallel plan, errors on one rank, and what a split model says of its size: two gloo ranks.

Run as a program, this is one of the ranks: python test_parallel_plans.py JOB.json, with torchrun's variables.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kbit
from kbit.integrations.transformers import failures, parallel
from parallel_models import build_parallel
from parallel_ranks import IDS, distributed
from test_parallel import load, ranks_split_dense_layers, run_ranks

CONFIG = {"bits": 4, "embedding_bits": 5}
# Since transformers 5.21; before, a user's plan takes the place of the model's.
REPLICATES = ranks_split_dense_layers()
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {}),
    "3-heads": (
        "llama",
        {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "narrow": ("llama", {"intermediate_size": 96}),
    "moe": ("qwen3_moe", {}),
    "latent-96": ("glm4_moe_lite", {"hidden_size": 96}),
}
ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."
HEAD, TABLE = "lm_head", "model.embed_tokens"


def every(prefix, names, style):
    return {f"{prefix}{name}_proj": style for name in names}


# (model, the user's plan, a layer, the shape of every rank's part of it)
PLANS = {
    "head-row": ("llama", {HEAD: "rowwise_split_input"}, HEAD, (72, 32)),
    "tied-head-row": ("tied", {TABLE: "embedding_rowwise", HEAD: "rowwise_split_input"}, HEAD, (36, 64)),
    "down-rows": (
        "llama",
        every(MLP, ("gate", "up", "down"), "colwise_gather_output"),
        "model.layers.0.mlp.down_proj",
        (32, 128),
    ),
}
# Of styles that transformers has since 5.21.
NEWER_PLANS = {
    "tied-table-columns": ("tied", {TABLE: "embedding_colwise", HEAD: "colwise_rep"}, HEAD, (72, 32)),
    "head-whole": ("llama", {HEAD: "replicate"}, HEAD, (72, 64)),
    "tied-head-whole": ("tied", {HEAD: "replicate"}, HEAD, (36, 64)),
    "tied-table-whole": ("tied", {TABLE: "replicate"}, HEAD, (72, 64)),
    "3-heads": (
        "3-heads",
        every(ATTENTION, "qkvo", "replicate"),
        "model.layers.1.self_attn.o_proj",
        (192, 192),
    ),
    "mlp-whole": (
        "narrow",
        every(MLP, ("gate", "up", "down"), "replicate"),
        "model.layers.0.mlp.down_proj",
        (64, 96),
    ),
}
PLANS |= NEWER_PLANS if REPLICATES else {}
# (model, the user's plan, what the error says)
REFUSED = {
    "row-96": (
        "latent-96",
        {f"{ATTENTION}q_a_proj": "rowwise_split_input"},
        "model.layers.0.self_attn.q_a_proj.weight: 2 ranks would split its 96 in-features into 48 each",
    ),
    "tied-head-part": (
        "tied",
        {TABLE: "replicate", HEAD: "colwise"} if REPLICATES else {HEAD: "colwise"},
        "lm_head: its codes are split nowhere, as those of the table that it is tied to, but the parallel "
        "style 'colwise' wants them split along dimension 0. Use 'colwise_gather_output'.",
    ),
    "experts-half": (
        "moe",
        {f"{MLP}experts.gate_up_proj": "replicate"} if REPLICATES else {f"{MLP}experts.down_proj": "rowwise"},
        "model.layers.0.mlp.experts: the plan splits gate_up_proj nowhere and down_proj along dimension 2",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, results of both ranks); one start of two processes serves every test."""
    folder, cases = tmp_path_factory.mktemp("plans"), []
    for name, (architecture, sizes) in MODELS.items():
        build_parallel(architecture, **sizes).save_pretrained(folder / name)
        load(folder / name, CONFIG).save_pretrained(folder / f"{name}-kbit")
    for key, (name, plan, *rest) in (PLANS | REFUSED).items():
        one = {"do": "plan", "plan": plan, "layer": rest[0] if key in PLANS else None}
        cases.append({"name": key, "folder": str(folder / f"{name}-kbit"), **one})
        cases.append({"name": f"{key}-load", "folder": str(folder / name), "config": CONFIG, **one})
    cases += failing_cases(folder)
    for name, mode in (("llama", "tp"), ("moe", "tp"), ("moe", "ep")):
        load(folder / f"{name}-kbit").save_pretrained(folder / f"{name}-files", max_shard_size="20KB")
        one = {"folder": str(folder / f"{name}-kbit"), "mode": mode}
        cases.append({"name": f"{name}-{mode}", "do": "sizes", **one})
    cases.append({"name": "table", "do": "table", "folder": str(folder / "llama-kbit")})
    return folder, run_ranks(folder, cases, program=Path(__file__).name)


def failing_cases(folder):
    """Models of which only what the second rank reads is wrong: NaN in a weight, a factor in a file."""
    model = build_parallel("qwen3_moe")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[3, 0, 0] = torch.nan
    model.save_pretrained(folder / "nan")
    load(folder / "moe", CONFIG).save_pretrained(folder / "damaged")
    file = folder / "damaged" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.3.gate_proj.weight_scale"].fill_(0.3)
    save_file(tensors, file, {"format": "pt"})
    one = {"do": "fail", "mode": "ep"}
    damaged = {"name": "damaged", "folder": str(folder / "damaged"), **one}
    return [{"name": "nan", "folder": str(folder / "nan"), "config": CONFIG, **one}, damaged]


def results(model):
    """Logits and greedy continuations."""
    with torch.no_grad():
        logits = model(IDS).logits
    return {"logits": logits, "generated": model.generate(IDS, max_new_tokens=4, do_sample=False)}


@pytest.mark.parametrize("suffix", ["", "-load"])
@pytest.mark.parametrize("key", PLANS)
def test_a_users_plan_is_that_of_quantized_weights(key, suffix, runs):
    folder, ranks = runs
    name, _, _, shape = PLANS[key]
    one = results(load(folder / f"{name}-kbit"))
    for result in (rank[key + suffix] for rank in ranks):
        assert not result["error"]
        assert result["shape"] == shape
        # Partial sums are rounded to bfloat16 before they are added: 2^-9 of the largest term, per layer.
        bound = 2.0**-9 * one["logits"].abs().max() * 8
        assert (result["logits"] - one["logits"]).abs().max() <= bound
        assert torch.equal(result["generated"], one["generated"])


@pytest.mark.parametrize("suffix", ["", "-load"])
@pytest.mark.parametrize("key", REFUSED)
def test_a_plan_that_cannot_be_is_refused(key, suffix, runs):
    for rank in runs[1]:
        assert REFUSED[key][2] in rank[key + suffix]["error"]


def test_the_users_settings_stay_as_they_were(runs):
    for rank in runs[1]:
        for key, (_, plan, *_) in PLANS.items():
            assert rank[key]["settings"] == plan


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("nan", "NonFiniteWeightError", "layers.0.mlp.experts.3.gate_proj.weight holds 1 NaN or Inf value"),
        ("damaged", "ValueError", "model.layers.0.mlp.experts.gate_up_proj_scale must be a power of two"),
    ],
)
def test_all_ranks_raise_what_one_finds(key, kind, said, runs):
    for rank in runs[1]:
        assert rank[key][0] == kind
        assert said in rank[key][1]


def test_errors_that_no_other_process_can_read_are_sent_as_text():
    class Local(Exception):
        pass

    sent = failures._as_sent(Local("of a kind that cannot be pickled"))
    assert type(sent) is RuntimeError
    assert str(sent) == "of a kind that cannot be pickled"


def test_parts_that_no_rule_made_are_refused():
    model = kbit.quantize_model(build_parallel("llama"), kbit.KbitConfig(**CONFIG))
    model.config.distributed_config = SimpleNamespace(tp_size=1)  # its plans are not those of any ranks
    name = "model.layers.0.mlp.down_proj"
    parallel.check_fits(model, name, model.get_submodule(name), {"weight": None})
    with pytest.raises(
        ValueError, match="down_proj.weight: its codes are split along dimension 1, by no rule"
    ):
        parallel.check_fits(model, name, model.get_submodule(name), {"weight": 1})


@pytest.mark.parametrize(("name", "mode"), [("llama", "tp"), ("moe", "tp"), ("moe", "ep")])
def test_a_split_model_has_the_size_of_all_parts(name, mode, runs):
    folder, ranks = runs
    one, files = load(folder / f"{name}-kbit"), folder / f"{name}-files"
    for rank in ranks:
        assert rank[f"{name}-{mode}"] == counts(one)
    saved = folder / f"saved-{name}-{mode}"
    assert (files / "model.safetensors.index.json").is_file()
    assert sorted(path.name for path in saved.iterdir()) == sorted(path.name for path in files.iterdir())
    for path in files.glob("model*"):
        assert (saved / path.name).read_bytes() == path.read_bytes(), path.name


def test_distributed_checkpoints_are_refused(runs):
    folder, ranks = runs
    for rank in ranks:
        for message in rank["table"]["checkpoint"]:
            assert message.startswith("save_pretrained: model.embed_tokens is quantized")
            assert "Leave out distributed_checkpoint=True" in message
    assert not (folder / "distributed").exists()


def test_resizing_asks_for_the_rows_of_all_ranks(runs):
    for rank in runs[1]:
        same, fewer = rank["table"]["resized"]
        assert same == ""
        assert "embedding or head is quantized and has 72 rows, got 36." in fewer


def test_a_split_table_refuses_what_a_whole_one_does(runs):
    folder, ranks = runs
    expected = lookups(load(folder / "llama-kbit").get_input_embeddings())
    assert expected[0] == (
        "IndexError: embedding: id 72 at position 1 is outside 0..71 (model.embed_tokens). "
        "Are the ids those of another tokenizer?"
    )
    assert all(expected)
    for rank in ranks:
        assert rank["table"]["lookups"] == expected


# -- what a rank does ----------------------------------------------------------------------------------------


def load_split(case):
    config = case.get("config")
    kwargs = {"quantization_config": kbit.KbitConfig(**config)} if config else {}
    kwargs |= {"tp_plan": case["plan"]} if "plan" in case else distributed(case.get("mode", "tp"))
    return AutoModelForCausalLM.from_pretrained(case["folder"], **kwargs)


def error_of(function, *args, **kwargs):
    """What a call raises, "" if nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_plan(case, out):
    try:
        model = load_split(case)
        found = results(model)
    except Exception as error:  # the same on all ranks
        return {"error": str(error)}
    settings = model.config.distributed_config.tp_plan
    layer = case["layer"] and model.get_submodule(case["layer"])
    return {**found, "error": "", "settings": settings, "shape": layer and layer.shapes["weight"]}


def run_fail(case, out):
    kind, _, said = error_of(load_split, case).partition(": ")
    return kind, said


def counts(model):
    """What `num_parameters` says with every setting, with biases that are trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    kinds = [{}, {"only_trainable": True}, {"exclude_embeddings": True}]
    return [model.num_parameters(**kind) for kind in kinds] + [model.model.num_parameters()]


def run_sizes(case, out):
    model = load_split(case)
    model.save_pretrained(out / f"saved-{case['name']}", max_shard_size="20KB")
    return counts(model)


def lookups(table):
    """What a table says of ids that it cannot look up."""
    above, below = torch.tensor([[0, 72]]), torch.tensor([-1], dtype=torch.int32)
    return [error_of(table, ids) for ids in (above, below, [1, 2], torch.tensor([1.0]))]


def run_table(case, out):
    plan = {TABLE: "embedding_rowwise", HEAD: "colwise_gather_output"}
    model = load_split({**case, "plan": plan})
    table, folder = model.get_input_embeddings(), str(out / "distributed")
    assert table.shapes["weight"] == (36, 64)
    positional = (folder, True, None, False, "50GB", None, None, True, True, True)
    saves = [
        error_of(model.save_pretrained, folder, distributed_checkpoint=True),
        error_of(model.save_pretrained, *positional),
    ]
    return {
        "lookups": lookups(table),
        "resized": [error_of(model.resize_token_embeddings, rows) for rows in (72, 36)],
        "checkpoint": [message.removeprefix("ValueError: ") for message in saves],
    }


def main():
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    out, found = Path(job["out"]), {}
    kinds = {"plan": run_plan, "fail": run_fail, "sizes": run_sizes, "table": run_table}
    for case in job["cases"]:
        print(case["name"], flush=True)  # the parent shows it if something fails
        found[case["name"]] = kinds[case["do"]](case, out)
    torch.save(found, out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
