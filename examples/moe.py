"""Quantize a mixture-of-experts model, experts to other bits than the rest; compare with the original.

    python examples/moe.py [MODEL] [--bits 4] [--expert-bits 3] [--tokens 64]

MODEL is an unquantized folder. Without one, a tiny random Qwen3-MoE is made, which runs on a CPU in seconds.
"""

import argparse
import copy
import json
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import kbit


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=Path, nargs="?", help="unquantized folder; by default a tiny random one"
    )
    widths = (2, 3, 4, 5)
    parser.add_argument("--bits", type=int, default=4, choices=widths, help="of everything but experts")
    parser.add_argument("--expert-bits", type=int, default=3, choices=widths)
    parser.add_argument("--tokens", type=int, default=64, help="random tokens to compare on")
    args = parser.parse_args()
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is not a model's folder")
    if args.model and "quantization_config" in json.loads((args.model / "config.json").read_text()):
        parser.error(f"{args.model} is quantized already: give the unquantized model")
    return args


def tiny_moe() -> torch.nn.Module:
    """A random model of 8 experts a layer, of which a token takes 2."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def report(model: torch.nn.Module) -> None:
    """How many modules of each kind have how many bits, and their bytes."""
    count, size = Counter(), Counter()
    for module in model.modules():
        if isinstance(module, kbit.nn.QuantizedModule):
            names = ("gate_up_proj", "down_proj") if isinstance(module, kbit.nn.KbitExperts) else ("weight",)
            parts = [module.quantized(name) for name in names]
            key = type(module).__name__, parts[0].bits
            count[key] += 1
            size[key] += sum(part.nbytes for part in parts)
    for (kind, bits), modules in count.items():
        print(f"{modules} x {kind}: {bits} bits, {size[kind, bits] / 1e6:.3f} MB")


def main() -> None:
    """Quantize a copy in place, and compare what both say."""
    args = arguments()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    original = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_moe()
    original = original.to(device).eval()
    policy = kbit.QuantizationPolicy(bits=args.bits, overrides={r"experts$": args.expert_bits})
    model = kbit.quantize_model(copy.deepcopy(original), policy)
    report(model)

    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, args.tokens), device=device)
    with torch.no_grad():
        wanted, got = (m(ids).logits.float().log_softmax(-1) for m in (original, model))
    divergence = (wanted.exp() * (wanted - got)).sum(-1).mean()
    print(f"KL divergence from the original on {args.tokens} random tokens: {divergence.item():.4f}")
    tokens = model.generate(ids[:, :8], max_new_tokens=8, do_sample=False)
    print(f"continuation: {tokens[0, 8:].tolist()}")


if __name__ == "__main__":
    main()
