"""The parts of a weight while a checkpoint is loaded; vLLM slices their rows, and blocks of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none

from kbit.format.codebook import BLOCK_SIZE
from kbit.format.policy import QuantizationPolicy
from kbit.format.reference import blocks_of
from kbit.format.scales import absmax_format

Loader = Callable[..., Any]
PARTS = ("weight_packed", "weight_absmax", "weight_scale")


def empty_parts(
    policy: QuantizationPolicy, rows: Sequence[int], columns: int, bits: int, factors: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts of a weight, in the order of `PARTS`, on the device that vLLM has set.

    Args:
        policy: the checkpoint's.
        rows: of the weight; for experts [E, N].
        columns: of the weight.
        bits: of the widest matrix in it.
        factors: shape of the factors.

    Returns:
        Zeros, int32 [*rows, blocks * bits] and uint8 (or what the format has) [*rows, blocks]; float32 ones.
    """
    blocks = blocks_of(columns)
    return (
        torch.zeros(*rows, blocks * bits, dtype=torch.int32),
        torch.zeros(*rows, blocks, dtype=absmax_format(policy.absmax_format).dtype),
        torch.ones(tuple(factors), dtype=torch.float32),
    )


def take_parts(layer: nn.Module, prefix: str = "") -> list[torch.Tensor]:
    """Take the parts of a weight, whose names begin with `prefix`, away from a layer."""
    names = [prefix + part for part in PARTS]
    parts = [getattr(layer, name).data for name in names]
    for name in names:
        delattr(layer, name)
    return parts


class Filling:
    """A loader that passes what it gets on to vLLM's, and remembers which pieces came.

    Args:
        load: vLLM's loader of the layer.
        columns: words in a row of the parameter; stored rows of fewer are padded. None: as they come.

    Attributes:
        pieces: ids of the merged matrices that came; None for a whole layer.
        drawn: whether vLLM fills parameters itself (`--load-format dummy`), and none come.
    """

    def __init__(self, load: Loader, columns: int | None = None) -> None:
        self.load, self.columns = load, columns
        self.pieces: set[Any] = set()
        config = get_current_vllm_config_or_none()
        self.drawn = config is not None and config.load_config.load_format == "dummy"

    @property
    def __name__(self) -> str:
        """What vLLM asks for before it puts its own loader around this one, to load once more."""
        raise NotImplementedError(
            "kbit: new weights cannot be loaded into a running vLLM engine (reload_weights, and waking from "
            "sleep level 2). Start it again."
        )

    def __call__(self, param: nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's loader; `args` may begin with the id of a merged matrix, or of several."""
        piece = args[0] if args else kwargs.get("loaded_shard_id", getattr(loaded_weight, "shard_id", None))
        self.pieces.update(piece if isinstance(piece, tuple) else (piece,))
        if self.columns is not None and loaded_weight.shape[1] < self.columns:
            loaded_weight = nn.functional.pad(loaded_weight, (0, self.columns - loaded_weight.shape[1]))
        return self.load(param, loaded_weight, *args, **kwargs)

    def refuse_missing(self, count: int, name: str) -> None:
        """Raise ValueError unless all of `count` matrices came, or vLLM was to draw weights."""
        if self.drawn or None in self.pieces or len(self.pieces) >= count:
            return
        raise ValueError(
            f"{name}: {len(self.pieces)} of {count} quantized weights came from the checkpoint. Does vLLM's "
            f"model expect other names than the files have? Leave the layer unquantized "
            f"(modules_to_not_convert), or fetch the checkpoint again."
        )


class ExpertsFilling(Filling):
    """That of experts, whose pieces are gates, ups and downs, "w1", "w3" and "w2", of this rank's experts."""

    supports_moe_loading = True  # asked for by models that load their experts themselves

    def __call__(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """As vLLM's loader; factors of experts that are stored as one tensor go to them one by one."""
        one = (weight_name, shard_id, expert_id)
        if loaded_weight.dim() == 1 and loaded_weight.numel() > 1:
            each = [self.load(param, factor, *one[:2], e, True) for e, factor in enumerate(loaded_weight)]
            taken = any(each)
        else:
            taken = bool(self.load(param, loaded_weight, *one, True))
            if taken:
                self.pieces.add(one[1:])
        return taken if return_success else None


def refuse_split_blocks(columns: int, whole: int, name: str, otherwise: str = "") -> None:
    """Raise ValueError where a rank's columns are no whole blocks; `otherwise` is one more way out."""
    if columns != whole and columns % BLOCK_SIZE:
        raise ValueError(
            f"{name}: {whole} in-features over {whole // columns} ranks are {columns} each, which is no "
            f"multiple of {BLOCK_SIZE}, the block size. Use fewer GPUs (--tensor-parallel-size){otherwise}."
        )


def show_weight(layer: nn.Module, name: str, inner: nn.Module) -> None:
    """Let vLLM's adapters find where a layer's weight is. No parameter of the layer's: it is `inner`'s."""
    object.__setattr__(layer, name, inner.weight)
