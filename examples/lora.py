"""Train a LoRA adapter on a model held in k bits, experts included, and save it.

    python examples/lora.py MODEL TEXT --out ADAPTER [--bits 4] [--rank 8] [--steps 50]

MODEL is an unquantized model folder with a tokenizer, or one that `kbit quantize` wrote; TEXT a text file.
peft comes with kbit's extra `train`.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kbit


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="model folder, quantized or not")
    parser.add_argument("text", type=Path, help="UTF-8 text to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--bits", type=int, default=4, help="of an unquantized model's weights")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=512, help="of one sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    args = parser.parse_args()
    for file in (args.model / "config.json", args.text):
        if not file.is_file():
            parser.error(f"there is no {file}")
    return args


def load(folder: Path, bits: int) -> torch.nn.Module:
    """The model with quantized weights, on the GPU if there is one."""
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    options = {} if quantized else {"quantization_config": kbit.KbitConfig(bits=bits)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).to(device)


def main() -> None:
    """Train."""
    args = arguments()
    torch.manual_seed(0)
    model = load(args.model, args.bits)
    # "experts" adapts gate_up_proj and down_proj of every expert; without fused experts it matches nothing.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.print_trainable_parameters()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(args.text.read_text()[:200_000])["input_ids"])
    windows = ids[: len(ids) // args.tokens * args.tokens].view(-1, args.tokens).to(model.device)
    if not len(windows):
        sys.exit(f"{args.text} has {len(ids)} tokens: give more text, or less than --tokens {args.tokens}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.rate)
    for step in range(args.steps):
        batch = windows[torch.arange(step * args.batch, (step + 1) * args.batch) % len(windows)]
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.out)  # the adapter alone; the model stays as it is


if __name__ == "__main__":
    main()
