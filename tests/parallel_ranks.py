"""What one rank of tests/test_parallel.py runs: python parallel_ranks.py JOB.json, with torchrun's variables.

Loads models split over the ranks; writes results and checkpoints for the parent to compare.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import kbit
from kbit.nn import QuantizedModule

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])
COLUMN_SPLIT = ("q_proj", "q_b_proj", "lm_head", "in_proj_qkvz")


def distributed_modes(architecture):
    """Tensor parallelism for all; experts split by id where there are any."""
    return ["tp"] if architecture == "llama" else ["tp", "ep"]


def distributed(mode):
    """Keyword arguments of from_pretrained."""
    if mode == "tp":
        return {"tp_plan": "auto"}
    from transformers.distributed import DistributedConfig

    size = dist.get_world_size()
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return {"distributed_config": DistributedConfig(tp_size=size, ep_size=size)}
    return {"distributed_config": DistributedConfig(tp_size=size, enable_expert_parallel=True)}


def evaluate(model):
    """Logits, a greedy continuation, column-split projections, and a gradient through the whole model."""
    with torch.no_grad():
        result = {"logits": model(IDS).logits, "projections": projections(model)}
    result["generated"] = model.generate(IDS, max_new_tokens=4, do_sample=False)
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=x).logits.float().square().mean().backward()
    result["gradient"] = x.grad
    return result


def projections(model):
    """Outputs of layers that are split by columns: this rank's part."""
    results = {}
    for name, module in model.named_modules():
        if name.endswith(COLUMN_SPLIT) and isinstance(module, QuantizedModule):
            size = module.shapes["weight"][1]
            results[name] = module(torch.linspace(-1, 1, 3 * size).view(3, size).to(torch.bfloat16))
    return results


def run(case, out):
    config = case.get("config")
    kwargs = {"quantization_config": kbit.KbitConfig(**config)} if config else {}
    kwargs |= distributed(case["mode"])
    try:
        model, info = AutoModelForCausalLM.from_pretrained(case["folder"], output_loading_info=True, **kwargs)
    except ValueError as error:
        return {"error": str(error)}
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    if case.get("save"):
        model.save_pretrained(out / f"saved-{case['name']}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedModule)}
    held = {name: (type(m).__name__, dict(m.shapes)) for name, m in layers.items()}
    return {**evaluate(model), "layers": held}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(job["out"])
    results = {}
    for case in job["cases"]:
        print(case["name"], flush=True)  # the parent shows it if something fails
        results[case["name"]] = run(case, out)
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
