"""The settings that a model folder has for answers, its generation_config.json."""

from __future__ import annotations

from pathlib import Path


def check_generation_config(folder: Path) -> None:
    """Say that a folder's settings for answers are none before loading its model fails by them.

    Raises:
        ValueError: transformers reads generation_config.json, and cannot use it.
    """
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none, or no JSON in it: transformers does without
        return
    except Exception as error:
        raise ValueError(
            f"{folder / 'generation_config.json'} cannot be used: {type(error).__name__}: {error}. Fetch it "
            f"again, or remove it: answers then have the defaults of transformers."
        ) from None
