"""Generate with a model split over several GPUs, or over processes on the CPU; print tokens per second.

    torchrun --nproc-per-node 2 examples/parallel.py MODEL [--bits 4] [--experts] [--new-tokens 64]

MODEL is a folder or a hub name, quantized by kbit already, or not: then --bits quantizes it while it loads.
transformers wants accelerate for it.
"""

import argparse
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kbit  # before the model is loaded: it teaches transformers to read such checkpoints


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--bits", type=int, help="quantize while loading")
    parser.add_argument("--experts", action="store_true", help="split experts by id")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args()


def distributed_config(experts: bool) -> DistributedConfig:
    """Everything that transformers' plan for the model splits, over all ranks."""
    ranks = dist.get_world_size()
    if not experts:
        return DistributedConfig(tp_size=ranks, tp_plan="auto")
    if "ep_size" in DistributedConfig.__dataclass_fields__:  # since transformers 5.21
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def main() -> None:
    """Load, and generate twice."""
    args = arguments()
    if not dist.is_torchelastic_launched():
        raise SystemExit("Start it by torchrun: torchrun --nproc-per-node 2 examples/parallel.py MODEL")
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    quantize = {"quantization_config": kbit.KbitConfig(bits=args.bits)} if args.bits else {}
    model = AutoModelForCausalLM.from_pretrained(
        args.model, distributed_config=distributed_config(args.experts), **quantize
    )
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.arange(16, device=model.device)[None].expand(args.batch, -1) % vocabulary
    how = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens, "do_sample": False}
    if model.device.type == "cuda":  # a step is one CUDA graph, sums between GPUs included
        kbit.enable_cuda_graphs(model)
        how["cache_implementation"] = "static"
    for _ in range(2):  # the first call compiles kernels, and records
        start = time.perf_counter()
        tokens = model.generate(prompt, **how)
        seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        speed = args.batch * args.new_tokens / seconds
        first = tokens[0, 16:24].tolist()
        print(f"{dist.get_world_size()} ranks: {speed:.1f} tokens/s, first continuation {first}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
