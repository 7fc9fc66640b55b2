"""Tensor and expert parallelism through transformers: two gloo ranks on the CPU against one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kbit
from kbit.bench import model_build
from kbit.bench.model_split import rank_environment
from kbit.format.policy import QuantizationPolicy
from kbit.nn import QuantizedModule
from parallel_models import PARALLEL, build_parallel
from parallel_ranks import IDS, as_if_with_kernels, distributed_modes, evaluate, random_config, together

RANKS = 2
TIMEOUT_S = 600  # a busy machine
CONFIG = {"bits": 4, "overrides": {"down_proj": 3}, "embedding_bits": 5}
MODES = [(name, mode) for name in PARALLEL for mode in distributed_modes(name)]
TOO_NARROW = "too_narrow"
# The first name is Mixtral's in memory, the second that in its files.
BY_BOTH_NAMES = {"bits": 4, "overrides": {r"0\.mlp\.experts$": 3, r"1\.block_sparse_moe\.experts$": 5}}


def run_ranks(folder, cases, device="cpu", program="parallel_ranks.py"):
    """Run cases on two ranks of a program beside this; [{case: result} of rank 0, of rank 1]."""
    job = folder / "job.json"
    job.write_text(json.dumps({"out": str(folder), "device": device, "cases": cases}))
    program = [sys.executable, str(Path(__file__).with_name(program)), str(job)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(program, env=one, **pipes) for one in rank_environment(RANKS)]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def ranks_split_dense_layers():
    """Whether expert parallelism comes with tensor parallelism of everything else: since 5.21."""
    from transformers.distributed import DistributedConfig

    return "ep_size" in DistributedConfig.__dataclass_fields__


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, results of both ranks); one start of two processes serves every test."""
    folder = tmp_path_factory.mktemp("parallel")
    cases = []
    for name in PARALLEL:
        build_parallel(name).save_pretrained(folder / name)
        model = load(folder / name, CONFIG)
        model.save_pretrained(folder / f"{name}-kbit")
        for mode in distributed_modes(name):
            one = {"mode": mode, "architecture": name, "save": True}
            cases.append({"name": f"{name}-{mode}", "folder": str(folder / f"{name}-kbit"), **one})
            cases.append(
                {"name": f"{name}-{mode}-load", "folder": str(folder / name), "config": CONFIG, **one}
            )
        build_parallel(name, spread=False).save_pretrained(folder / f"{name}-even")
        case = {"name": f"{name}-tiles", "mode": "tp", "architecture": name, "tiles": True}
        cases.append({**case, "folder": str(folder / f"{name}-even"), "config": {"bits": 4}})
    model = build_parallel("llama", intermediate_size=96)
    model.save_pretrained(folder / TOO_NARROW)
    narrow = {"name": TOO_NARROW, "folder": str(folder / TOO_NARROW), "config": CONFIG}
    cases.append({**narrow, "mode": "tp", "architecture": "llama"})
    build_parallel("mixtral").save_pretrained(folder / "mixtral")
    load(folder / "mixtral", BY_BOTH_NAMES).save_pretrained(folder / "mixtral-kbit")
    one = {"mode": "tp", "architecture": "mixtral", "save": True}
    cases.append({"name": "mixtral-tp", "folder": str(folder / "mixtral-kbit"), **one})
    on_load = {"folder": str(folder / "mixtral"), "config": BY_BOTH_NAMES}
    cases.append({"name": "mixtral-tp-load", **on_load, **one})
    return folder, run_ranks(folder, cases + random_cases(PARALLEL) + [{"name": "trials"}])


def random_cases(architectures):
    """Models of random weights, built in parts: quantized with and without the embeddings, and in 16 bits."""
    policies = {"4": {"bits": 4}, "all": {"bits": 3, "embedding_bits": 4, "search": False}, "bf16": None}
    return [
        {"name": f"random-{name}-{mode}-{key}", "architecture": name, "mode": mode, "policy": policy}
        for name in architectures
        for mode in distributed_modes(name)
        for key, policy in policies.items()
    ]


def check_random(case, results, device="cpu"):
    """Compare with the model that `kbit bench model` builds on one device."""
    policy = case["policy"] and QuantizationPolicy(**case["policy"])
    config = random_config(case["architecture"])
    built = model_build.build(config, torch.device(device), torch.bfloat16, policy)
    with torch.no_grad():
        expected = built.model(IDS.to(device)).logits.cpu()
    bound = 2.0**-9 * expected.abs().max() * 8
    for result in results:
        assert (result["logits"] - expected).abs().max() <= bound, case["name"]
        assert result["bytes"] < built.weight_bytes, case["name"]


def load(folder, config=None):
    kwargs = {"quantization_config": kbit.KbitConfig(**config)} if config else {}
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


@pytest.mark.parametrize("suffix", ["", "-load"])
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_two_ranks_compute_what_one_does(name, mode, suffix, runs):
    folder, (first, second) = runs
    one = evaluate(load(folder / f"{name}-kbit"))
    results = [rank[f"{name}-{mode}{suffix}"] for rank in (first, second)]
    for key in ("logits", "gradient"):
        assert torch.equal(results[0][key], results[1][key])
        # Partial sums are rounded to bfloat16 before they are added: 2^-9 of the largest term, per layer.
        bound = 2.0**-9 * one[key].abs().max() * (8 if key == "logits" else 32)
        assert (results[0][key] - one[key]).abs().max() <= bound
    assert torch.equal(results[0]["generated"], one["generated"])


@pytest.mark.parametrize("case", random_cases(PARALLEL), ids=lambda case: case["name"])
def test_random_models_built_in_parts_are_those_of_one_rank(case, runs):
    _, ranks = runs
    check_random(case, [rank[case["name"]] for rank in ranks])


@pytest.mark.parametrize("suffix", ["", "-load"])
@pytest.mark.parametrize("name", PARALLEL)
def test_columns_are_bit_identical(name, suffix, runs):
    folder, ranks = runs
    one = evaluate(load(folder / f"{name}-kbit"))["projections"]
    split = [rank[f"{name}-tp{suffix}"]["projections"] for rank in ranks]
    assert one.keys() == split[0].keys()
    assert one
    for layer, expected in one.items():
        parts = [rank[layer] for rank in split]
        gathered = parts[0] if parts[0].shape == expected.shape else torch.cat(parts, dim=-1)
        assert torch.equal(gathered, expected), layer


@pytest.mark.parametrize("suffix", ["", "-load"])
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_two_ranks_save_the_bytes_of_one(name, mode, suffix, runs):
    folder, _ = runs
    saved, one = folder / f"saved-{name}-{mode}{suffix}", folder / f"{name}-kbit"
    assert (saved / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    assert json.loads((saved / "config.json").read_text()) == json.loads((one / "config.json").read_text())


@pytest.mark.parametrize("suffix", ["", "-load"])
def test_two_ranks_find_a_module_by_either_name(suffix, runs):
    folder, ranks = runs
    test_two_ranks_save_the_bytes_of_one("mixtral", "tp", suffix, runs)
    experts = load(folder / f"saved-mixtral-tp{suffix}").model.layers
    assert [layer.mlp.experts.bits for layer in experts] == [3, 5]
    assert all("model.layers.0.mlp.experts" in rank[f"mixtral-tp{suffix}"]["layers"] for rank in ranks)


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_each_rank_holds_its_part(name, mode, runs):
    folder, ranks = runs
    one = load(folder / f"{name}-kbit")
    whole = {n: m.shapes for n, m in one.named_modules() if isinstance(m, QuantizedModule)}
    for rank in ranks:
        for layer, (_, shapes) in rank[f"{name}-{mode}"]["layers"].items():
            for weight, shape in shapes.items():
                ratio = torch.Size(whole[layer][weight]).numel() / torch.Size(shape).numel()
                assert ratio == expected_ratio(one, mode, layer), layer


# Over ranks, of two layers: of linear attention, which stays whole, there is none; a shared expert that is
# split as the routed ones are has none of its own.
SUMS = {"llama": 4, "qwen3_moe": 4, "qwen3_next": 3, "qwen3_5_moe": 3, "glm4_moe_lite": 4}


@pytest.mark.parametrize("name", PARALLEL)
def test_parts_of_layers_run_together(name, runs):
    folder, ranks = runs
    with as_if_with_kernels():
        model = load(folder / f"{name}-even", {"bits": 4})
        # transformers gathers what projections of linear attention give, which merging would pass by.
        expected = together(model) | {
            name: (type(module).__name__, [])
            for name, module in model.named_modules()
            if name.endswith("linear_attn")
        }
        one = evaluate(model)
    for result in (rank[f"{name}-tiles"] for rank in ranks):
        assert result["together"] == expected
        assert result["sums"] == SUMS[name]
        assert result["compiled"]
        assert result["one_group"]  # the same object at every call
        bound = 2.0**-9 * one["logits"].abs().max() * 8
        assert (result["logits"] - one["logits"]).abs().max() <= bound
        assert torch.equal(result["generated"], one["generated"])


@pytest.mark.skipif(
    not ranks_split_dense_layers(), reason="transformers before 5.21 sums such gradients too early"
)
def test_gradients_of_norms_are_summed(runs):
    folder, ranks = runs
    one = evaluate(load(folder / "qwen3_moe-kbit"))["norms"]
    assert one
    for result in (rank["qwen3_moe-tp"]["norms"] for rank in ranks):
        for name, expected in one.items():
            assert (result[name] - expected).abs().max() <= 2.0**-9 * expected.abs().max() * 32, name


def expected_ratio(model, mode, layer):
    """Over how many ranks a layer is split."""
    if layer == "model.embed_tokens" and not model.config.tie_word_embeddings:
        return RANKS if layer in model.tp_plan else 1  # in transformers' plans since 5.21
    if layer.endswith("experts"):
        return RANKS
    whole = ("q_a_proj", "kv_a_proj_with_mqa", "shared_experts.")
    if any(part in layer for part in whole) or (mode == "ep" and not ranks_split_dense_layers()):
        return 1
    return RANKS


def test_ranks_agree_on_how_they_add_up(runs):
    for rank in runs[1]:
        told, uses = rank["trials"]
        assert told[:2] == ["no compiler", "a sum of whole numbers came out wrong"]
        assert "did not see what another wrote" in told[2]
        assert told[3:] == [None, None]
        assert uses == [True, False]  # not of a group that only has the same name


def test_what_cannot_be_split_is_one_clear_error(runs):
    _, ranks = runs
    for rank in ranks:
        message = rank[TOO_NARROW]["error"]
        assert "model.layers.0.mlp.down_proj" in message
        assert "2 ranks would split its 96 in-features into 48 each" in message
        assert "multiples of 32" in message
        assert (
            "Use 1 rank, or quantize with modules_to_not_convert=['model.layers.0.mlp.down_proj']" in message
        )


def test_the_example_runs_under_torchrun(runs):
    folder, _ = runs
    example = Path(__file__).parents[1] / "examples" / "parallel.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    program = [*launcher, str(example), str(folder / "llama-kbit"), "--new-tokens", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert result.returncode == 0, result.stderr
    assert f"{RANKS} ranks: " in result.stdout
