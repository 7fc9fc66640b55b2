"""Quantize a dense model, save it, load it again, and generate: on a GPU if there is one.

    python examples/quantize_llama.py [MODEL] [--out OUT] [--bits 4] [--prompt "What is a lighthouse?"]

MODEL is an unquantized folder, Llama or another. Without one, a tiny random Llama is made, which says nothing
of interest, but runs in seconds. OUT can be served afterwards: kbit serve OUT
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import kbit  # before anything quantized is loaded: it teaches transformers to read such checkpoints


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=Path, nargs="?", help="unquantized folder; by default a tiny random one"
    )
    parser.add_argument("--out", type=Path, help="folder to write; a temporary one by default")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 5))
    parser.add_argument("--prompt", default="What is a lighthouse?")
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is not a model's folder")
    if args.model and "quantization_config" in json.loads((args.model / "config.json").read_text()):
        parser.error(f"{args.model} is quantized already: give the unquantized model")
    return args


def tiny_llama(folder: Path) -> Path:
    """A random model of 0.2 M weights, without a tokenizer."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def encode(folder: Path, prompt: str) -> tuple[torch.Tensor, AutoTokenizer | None]:
    """Token ids of the prompt [1, T], and the tokenizer; some ids or other, where the model has none."""
    if not any(folder.glob("tokenizer*")):
        vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        return torch.tensor([[byte % vocabulary for byte in prompt.encode()]]), None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(prompt, return_tensors="pt").input_ids, tokenizer


def main(args: argparse.Namespace, scratch: Path) -> None:
    """Quantize while loading, save, load, compare."""
    torch.manual_seed(0)
    source = args.model or tiny_llama(scratch / "tiny-llama")
    target = args.out or scratch / "quantized"
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # Overrides are regular expressions on module names: one bit more for these.
    config = kbit.KbitConfig(bits=args.bits, overrides={r"down_proj$": min(args.bits + 1, 5)})
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config).to(device)
    layers = [module for module in model.modules() if isinstance(module, kbit.nn.KbitLinear)]
    stored = sum(layer.quantized().nbytes for layer in layers)
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    print(f"{len(layers)} layers, {8 * stored / weights:.2f} bits per weight")

    ids, tokenizer = encode(source, args.prompt)
    limits = {"max_new_tokens": args.new_tokens, "do_sample": False}
    tokens = model.generate(ids.to(device), **limits)
    model.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
        print(tokenizer.decode(tokens[0], skip_special_tokens=True))

    again = AutoModelForCausalLM.from_pretrained(target).to(device)
    same = torch.equal(again.generate(ids.to(device), **limits), tokens)
    print(f"{target}: reloaded, the same {tokens.shape[1] - ids.shape[1]} tokens: {same}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(arguments(), Path(folder))
