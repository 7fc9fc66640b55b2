"""Texts that models are scored on and calibrated by, as token ids."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbit.cli.consoles import warn
from kbit.cli.model_folder import load_tokenizer
from kbit.format.model_files import read_config

if TYPE_CHECKING:
    import torch

SHIPPED_TEXT = "text.txt"
WINDOW = 512  # tokens that a model sees at a time, where nobody says otherwise
_SAMPLED = 2**15  # tokens of a text to calibrate by, at most
# As many activations as a layer has inputs, or some inputs are never seen apart from others.
FEW_TOKENS = 4096


def read_text(file: Path | None, option: str = "--text") -> str:
    """A file's text, or the public-domain one that ships with kbit; `option` named the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    if file is None:
        return (resources.files("kbit") / "data" / SHIPPED_TEXT).read_text(encoding="utf-8")
    from kbit.bench.result_files import read_text as read

    leave_out = f", or leave {option} out: kbit ships one" if option == "--text" else ""
    return read(file, f"{option} {file}", f"Give a UTF-8 text file{leave_out}.")


def encode_windows(
    folder: Path, text: str, size: int, max_tokens: int | None, what: str = "the text"
) -> torch.Tensor:
    """Token ids of a text, int64 [n, size], by the tokenizer of a model folder; `what` is the text's name.

    Raises:
        ValueError: it has fewer than two tokens, or windows are longer than the model's context.
    """
    from kbit.bench.quality import windows

    tokenizer = load_tokenizer(folder)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    found = windows(ids, size, max_tokens, what)
    most = _stated_positions(folder)
    if most is not None and found.shape[1] > most:
        raise ValueError(
            f"windows of {found.shape[1]} tokens are longer than the {most} that the model knows positions "
            f"for (max_position_embeddings). Give --window {most} or less."
        )
    return found


def _stated_positions(folder: Path) -> int | None:
    config = read_config(folder)
    text = config.get("text_config")
    most = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return most if isinstance(most, int) and most > 0 else None


def known_positions(model: Any) -> int | None:
    """Positions that a model was trained for, as its config has them; None where it does not say."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def too_long(tokens: int, positions: int) -> str:
    """What to say of a prompt that leaves no position for an answer."""
    return (
        f"the prompt has {tokens} tokens, and the model knows {positions} positions "
        f"(max_position_embeddings), of which an answer needs at least 1. Shorten it."
    )


def check_positions(model: Any, tokens: int, options: str) -> None:
    """Raise ValueError for more tokens than a model knows positions for; `options` asked for so many."""
    most = known_positions(model)
    if most is not None and tokens > most:
        raise ValueError(
            f"{options} takes {tokens} positions, more than the {most} that the model knows "
            f"(max_position_embeddings). Give fewer."
        )


def wrong_ids(ids: torch.Tensor, model: Any) -> str | None:
    """What of a tokenizer's ids a model's table of tokens has no rows for, or None."""
    known, most = getattr(model.get_input_embeddings(), "num_embeddings", None), int(ids.max())
    if isinstance(known, int) and most >= known:
        return f"tokenizer gives ids up to {most}, its model knows {known}"
    return None


def check_ids(folder: Path, ids: torch.Tensor, model: Any) -> None:
    """Raise ValueError for ids of tokens that a model does not have: its tokenizer is another model's."""
    if wrong := wrong_ids(ids, model):
        raise ValueError(f"{folder}: its {wrong}. Fetch the tokenizer of this model.")


def calibration_samples(folder: Path, text: str, file: Path, size: int | None = None) -> torch.Tensor:
    """Token ids of the text of an option --calibrate, int64 [n, size]; raises what `encode_windows` does.

    Warns on stderr of a text with few tokens.

    Args:
        folder: of the model.
        text: what `read_text` gave.
        file: where it was read, for messages.
        size: of a window; None: `WINDOW`, or as many positions as the model knows, if these are fewer.
    """
    size = size or min(WINDOW, _stated_positions(folder) or WINDOW)
    ids = encode_windows(folder, text, size, _SAMPLED, f"--calibrate {file}")
    if ids.numel() < FEW_TOKENS:
        warn(
            f"{file} has {ids.numel()} tokens only, and codes go by what layers see of it. Give a text of "
            f"{FEW_TOKENS} tokens or more."
        )
    return ids
