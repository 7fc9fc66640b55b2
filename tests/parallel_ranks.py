"""What one rank of tests/test_parallel.py runs: python parallel_ranks.py JOB.json, with torchrun's variables.

Loads models split over the ranks, or makes random ones; writes results and checkpoints for the parent to
compare. On GPUs where the job says so, each rank on its own.
"""

import contextlib
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from transformers import AutoModelForCausalLM, StaticCache

import kbit
from kbit.backends.cuda.capture import capture
from kbit.bench import model_split
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import collectives
from kbit.integrations.transformers.cache_argument import with_cache
from kbit.integrations.transformers.cuda_graphs import CUDAGraphWarning
from kbit.integrations.transformers.parallel_layers import ParallelModule
from kbit.nn import QuantizedModule
from kbit.nn.merged import Merged, are_joined
from kbit.nn.mixins import MixedIn
from kbit.nn.router import FusedRouter
from kbit.ops import forms
from parallel_models import PARALLEL

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
    """Logits, greedy continuations, column-split projections, and a gradient through the whole model."""
    ids = IDS.to(model.device)
    with torch.no_grad():
        result = {"logits": model(ids).logits.cpu(), "projections": projections(model)}
    result["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False).cpu()
    if model.device.type == "cuda":
        result["answers"], result["warnings"] = answers_from_graphs(model, ids)
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=x).logits.float().square().mean().backward()
    result["gradient"] = x.grad.cpu()
    norms = {name: one.grad for name, one in model.named_parameters() if name.endswith("q_norm.weight")}
    result["norms"] = {name: grad.cpu() for name, grad in norms.items()}
    return result


def answers_from_graphs(model, ids):
    """Logits of an answer that is given thrice, and what was warned of."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    kbit.enable_cuda_graphs(model)
    more = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    answers = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CUDAGraphWarning)
        for _ in range(3):
            cache.reset()
            answer = model.generate(ids, **with_cache(cache), max_new_tokens=6, min_new_tokens=6, **more)
            answers.append(torch.stack(answer.logits).cpu())
    kbit.disable_cuda_graphs(model)
    return answers, [str(one.message) for one in caught if issubclass(one.category, CUDAGraphWarning)]


def projections(model):
    """Outputs of layers that are split by columns: this rank's part."""
    results = {}
    for name, module in model.named_modules():
        if name.endswith(COLUMN_SPLIT) and isinstance(module, QuantizedModule):
            size = module.shapes["weight"][1]
            x = torch.linspace(-1, 1, 3 * size).view(3, size).to(module.codebook.device, torch.bfloat16)
            results[name] = module(x).detach().cpu()
    return results


def random_config(architecture):
    """A config whose head has a weight of its own, as `kbit bench model` gives it."""
    config = PARALLEL[architecture]()
    config.tie_word_embeddings = False
    return config


def run_random(case, device):
    """Logits of a model that is built in parts."""
    policy = case["policy"] and QuantizationPolicy(**case["policy"])
    arguments = (random_config(case["architecture"]), device, torch.bfloat16, policy)
    built = model_split.build(*arguments, by_expert=case["mode"] == "ep")
    with torch.no_grad():
        return {"logits": built.model(IDS.to(device)).logits.cpu(), "bytes": built.weight_bytes}


@contextlib.contextmanager
def as_if_with_kernels(on=True):
    """As if the CPU had kernels that multiply tiles, and routers'; nothing where it is not on."""
    if not on:
        yield
        return
    rule, takes = forms.set_rule(lambda op, device: True), FusedRouter.takes
    FusedRouter.takes = lambda self, x: not torch.is_grad_enabled()
    try:
        yield
    finally:
        forms.set_rule(rule)
        FusedRouter.takes = takes


@torch.no_grad()
def is_compiled_alike(model):
    """Whether a compiled layer that ends with a sum over ranks gives what it gives, for several lengths."""
    mlp = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    compiled, generator = torch.compile(mlp, backend="aot_eager"), torch.Generator().manual_seed(0)
    for tokens in (1, 3, 5):
        x = torch.randn(1, tokens, model.config.hidden_size, generator=generator).to(
            model.device, model.dtype
        )
        if not torch.equal(compiled(x), mlp(x)):
            return False
    return True


def count_sums(model):
    """How many sums over ranks a call of a model has."""
    own, counted = collectives.all_reduce, []
    collectives.all_reduce = lambda x, group: counted.append(x.shape) or own(x, group)
    try:
        with torch.no_grad():
            model(IDS.to(model.device))
    finally:
        collectives.all_reduce = own
    return len(counted)


def run(case, out):
    with as_if_with_kernels(case.get("tiles", False)):
        return run_loaded(case, out)


def run_loaded(case, out):
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
    more = {"together": together(model), "sums": count_sums(model)}
    if case.get("tiles"):
        more["compiled"] = is_compiled_alike(model)
    groups = [module.split.group for module in model.modules() if isinstance(module, ParallelModule)]
    more["one_group"] = all(group is groups[0] for group in groups)
    return {**evaluate(model), "layers": held, **more}


def together(model):
    """Modules that run by fewer kernels than their classes; and how many layers each merges."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, MixedIn)}
    merged = {name: module.siblings() for name, module in modules.items() if isinstance(module, Merged)}
    return {
        name: (type(module).__name__, [len(one.layers) for one in merged.get(name, ()) if are_joined(one)])
        for name, module in modules.items()
    }


def parts_of_all(generators, shape, dtype):
    """Every rank's part, which all of them make alike."""
    return [torch.randn(shape, generator=one, device=one.device).to(dtype) for one in generators]


def sum_of(parts):
    """In float32, in the order of ranks, rounded once."""
    total = torch.zeros(parts[0].shape, device=parts[0].device)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


def run_sums(device, repeats):
    """How often whole results of one-shot sums are wrong, by kind; ranks come early and late."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert collectives.use_one_shot(world, torch.bfloat16, device) is None
    assert collectives.use_one_shot(world, torch.float16, device) is None
    generators = [torch.Generator(device=device).manual_seed(one) for one in range(dist.get_world_size())]
    same, own = random.Random(0), random.Random(1 + rank)
    wrong = {kind: torch.zeros((), dtype=torch.int64, device=device) for kind in ("sum", "gather")}
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # what nobody writes to is NaN
    for _ in range(repeats):
        rows, columns = same.choice(((1, 4), (1, 2048), (7, 520), (3, 4096), (32, 2048), (1, 8192), (5, 36)))
        dtype, kind = same.choice((torch.float16, torch.bfloat16)), same.choice(list(wrong))
        parts = parts_of_all(generators, (rows, columns), dtype)
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(1, 300_000))
        if kind == "sum":
            have, want = collectives.all_reduce(parts[rank].clone(), world), sum_of(parts)
        else:
            have, want = collectives.gather(parts[rank], world), torch.cat(parts, dim=-1)
        wrong[kind] += (have.view(torch.int16) != want.view(torch.int16)).any()
    torch.use_deterministic_algorithms(False)
    return {kind: int(count) for kind, count in wrong.items()} | {"replays": replayed_sums(device, repeats)}


def replayed_sums(device, repeats):
    """How often a replayed chain of sums gives something else than it gave at first."""
    x = torch.randn(4, 2048, device=device).to(torch.bfloat16) / 64

    def chain():
        y = x
        for _ in range(32):
            y = collectives.all_reduce(y, dist.group.WORLD) / 2
        return y

    first, graph = chain().clone(), torch.cuda.CUDAGraph()
    dist.barrier()
    with capture(graph, device):
        y = chain()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(repeats):
        graph.replay()
        wrong += (y != first).any()
    return int(wrong)


class _Trials:
    """What `use_one_shot` asks of GPUs, by a CPU and the process group; some ranks fail as `how` says."""

    def __init__(self, monkeypatch):
        self.how, self.rank = "", dist.get_rank()
        monkeypatch.setattr(symmetric_memory, "empty", lambda n, dtype, device: torch.empty(n, dtype=dtype))
        monkeypatch.setattr(symmetric_memory, "rendezvous", self.meet)
        monkeypatch.setattr(collectives, "_check", lambda *given: None)
        monkeypatch.setattr(collectives, "load", self.load)
        monkeypatch.setattr(collectives, "one_shot", self.one_shot)

    def meet(self, memory, group):
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * dist.get_world_size(group))

    def load(self, ranks, index):
        if self.how == "no compiler" and self.rank == 1:
            raise OSError("no compiler")

    def one_shot(self, x, inboxes, out, gathers):
        if gathers:
            dist.all_gather_into_tensor(out, x)
        else:
            out.copy_(x)
            dist.all_reduce(out)
        if self.how == "wrong" and self.rank == 0:
            out[3] += 1
        if self.how == "late" and self.rank == 1:
            inboxes.state[2] = 1


def run_trials():
    """What ranks are told where one of them fails, and of a group that is made anew."""
    told = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        trials = _Trials(monkeypatch)
        for trials.how in ("no compiler", "wrong", "late", "", ""):
            told.append(collectives.use_one_shot(dist.group.WORLD, torch.bfloat16, torch.device("cpu")))
        x = torch.zeros(8, dtype=torch.bfloat16)
        groups = [dist.group.WORLD, SimpleNamespace(group_name=dist.group.WORLD.group_name)]
        uses = [collectives._inboxes_for(x, 8, group) is not None for group in groups]
        collectives._mapped.clear()
    return told, uses


def run_alone(device):
    """What the first rank is told of a sum to which no other comes; the process cannot use its GPU then."""
    assert collectives.use_one_shot(dist.group.WORLD, torch.bfloat16, device) is None
    if dist.get_rank():
        time.sleep(6)
        return ""
    name = dist.group.WORLD.group_name
    mapped = collectives._mapped[name]
    assert mapped.inboxes.seconds == 600, "as NCCL waits"
    collectives._mapped[name] = mapped._replace(inboxes=mapped.inboxes._replace(seconds=1))
    try:
        collectives.all_reduce(torch.ones(64, dtype=torch.bfloat16, device=device), dist.group.WORLD)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def main():
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device(job["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    out = Path(job["out"])
    results = {}
    for case in job["cases"]:
        print(case["name"], flush=True)  # the parent shows it if something fails
        if case["name"] == "sums":
            results["sums"] = run_sums(device, case["repeats"])
        elif case["name"] == "trials":
            results["trials"] = run_trials()
        elif case["name"] == "alone":
            results["alone"] = run_alone(device)
        else:
            results[case["name"]] = run_random(case, device) if "policy" in case else run(case, out)
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    if "alone" in results:
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
