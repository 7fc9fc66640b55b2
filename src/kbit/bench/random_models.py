"""Checkpoints of random weights on disk, for what reads them from there: serving and quantizing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import torch

from kbit.bench import model_build
from kbit.format.policy import QuantizationPolicy

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SHARD_SIZE = "2GB"


def write(name: str, layers: int | None, folder: Path, device: torch.device) -> int:
    """Write a model in bfloat16, with a tokenizer; the number of its weights.

    Args:
        name, layers: see `model_build.load_config`.
        folder: to be made.
        device: where random numbers are drawn.

    Raises:
        OSError: too little space is free.
    """
    config = model_build.load_config(name, layers)
    needed, free = model_build.sixteen_bit_bytes(config), shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{folder.parent} has {free / 1e9:.1f} GB free, {name} takes {needed / 1e9:.1f} GB. Keep fewer "
            f"layers (--layers), or set TMPDIR to a folder on another disk",
        )
    model = model_build.build(config, device).model
    model.generation_config.eos_token_id = None  # every answer is as long as was asked for
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    write_tokenizer(folder, config.get_text_config().vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of whole words, numbers from 0 on, with a chat template that passes messages through."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *map(str, range(size - len(_SPECIAL)))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    fast.save_pretrained(folder)


def write_pair(
    name: str, layers: int | None, folder: Path, policy: QuantizationPolicy, device: torch.device
) -> list[Path]:
    """A model in bfloat16 and quantized: the two folders, made in `folder`."""
    from kbit.integrations.streaming import quantize_checkpoint

    plain, quantized = folder / "bf16", folder / f"kbit-{policy.bits}"
    write(name, layers, plain, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a server wants the memory
    quantize_checkpoint(plain, quantized, policy, devices=(str(device),))
    return [plain, quantized]


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of a folder's files in memory, so that they are read from disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only what is written can be dropped
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
