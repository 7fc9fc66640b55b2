"""KbitEmbedding: nn.Embedding on a quantized table, which a KbitLinear head may share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from kbit.format.words import at
from kbit.nn import symbolic
from kbit.nn.fuse import parts_of
from kbit.nn.linear import KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.nn.refusals import refuse_others
from kbit.nn.sizes import refuse_other_sizes
from kbit.ops import api, checks, places


class KbitEmbedding(QuantizedModule, nn.Embedding):
    """Look rows up in a table [num_embeddings, embedding_dim] of 2 to 5 bits, decoding only those rows.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in nn.Embedding.
        bits: code width, 2 to 5.
        codebook: "nf", "bof", or 2^bits ascending levels with largest magnitude 1.
        absmax_format: block scale format.
        device: where the table lives.
        dtype: dtype of the rows returned; follows .half(), .bfloat16() and .to(dtype).
        name: the layer's name in its model, for error messages.

    >>> table = KbitEmbedding.from_embedding(nn.Embedding(1000, 64), bits=4)
    >>> table(torch.tensor([1, 2, 3])).shape
    torch.Size([3, 64])
    """

    _hf_quantized_needs_local_tp = True

    dtype_probe: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        bits: int = 4,
        codebook: str | Sequence[float] | torch.Tensor = "nf",
        absmax_format: str = "e4m4",
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str = "",
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        # The rest of nn.Embedding's attributes, at its defaults: renormalizing would write to the table.
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self._set_dtype(dtype or torch.get_default_dtype(), device)
        shape = (num_embeddings, embedding_dim)
        self._init_parts({"weight": shape}, bits, codebook, absmax_format, device, name)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed codes, int32 [num_embeddings, blocks * bits]; see KbitLinear.weight."""
        stand_in = self._stand_in()
        return self.weight_packed if stand_in is None else stand_in

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> NoReturn:
        """Not there: a table is quantized by `from_embedding`.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "KbitEmbedding.from_pretrained: use KbitEmbedding.from_embedding, with an "
            "nn.Embedding.from_pretrained(...)."
        )

    @classmethod
    @torch.inference_mode(False)  # gradients may be asked for later
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        bits: int = 4,
        codebook: str | Sequence[float] | torch.Tensor = "nf",
        absmax_format: str = "e4m4",
        search: bool = True,
        name: str = "",
    ) -> KbitEmbedding:
        """Quantize an embedding.

        Raises:
            NonFiniteWeightError: the table holds NaN or Inf.
            TypeError, ValueError: see `kbit.quantize`; also what is no embedding, quantized already, has
                max_norm or a forward of its own, or states other sizes than its table has.
        """
        refuse_others("KbitEmbedding.from_embedding", embedding, nn.Embedding, name)
        refuse_other_sizes("KbitEmbedding.from_embedding", embedding, name)
        if embedding.max_norm is not None:
            raise ValueError(
                f"KbitEmbedding.from_embedding: takes no embedding that rewrites its table in use, got "
                f"max_norm={embedding.max_norm}{at(name)}. Leave it out (modules_to_not_convert)."
            )
        where = f"{name}.weight" if name else ""
        weight = embedding.weight.detach()
        q = api.quantize(weight, bits, codebook, absmax_format, search, where=where)
        layer = cls.empty_like(embedding, bits, absmax_format, name, device="meta")
        layer.fill("weight", parts_of(q))
        layer._set_dtype(weight.dtype, weight.device)
        return layer

    @classmethod
    def empty_like(
        cls, embedding: nn.Embedding, bits: int, absmax_format: str, name: str = "", device: Any = None
    ) -> KbitEmbedding:
        """A layer of the same shape with empty parts."""
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            bits=bits,
            absmax_format=absmax_format,
            device=embedding.weight.device if device is None else device,
            dtype=embedding.weight.dtype,
            name=name,
        )
        layer.training = embedding.training
        return layer

    def tied_head(self, head: nn.Linear | None = None, name: str = "") -> KbitLinear:
        """A linear layer whose weight is this very table: its parameters are the same objects.

        Args:
            head: the layer it replaces, for its bias; None makes a head without one.
            name: its name in the model.
        """
        layer = KbitLinear(
            self.embedding_dim,
            self.num_embeddings,
            bias=False,
            bits=self.bits,
            device="meta",
            name=name,
        )
        layer.register_parameter("bias", None if head is None else head.bias)
        layer.share(self)
        layer.training = self.training
        return layer

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[num_embeddings, embedding_dim] of `dtype`: the table decoded."""
        return api.dequantize(self.quantized(), dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """int ids of any shape -> [*ids.shape, embedding_dim].

        Args:
            input: the ids, under the name that nn.Embedding has for them.

        Raises:
            IndexError: an id is out of range (on the CPU); this message, too, names the layer.
            TypeError, ValueError: ids are no integers, or elsewhere, or the model was cast to a dtype that
                rows cannot have; the message names this layer.
        """
        if not isinstance(input, torch.Tensor):
            node = symbolic.call_of(self, self.layer_name, KbitEmbedding.forward, input)
            if node is not None:
                return node
        dtype = self.dtype_probe.dtype
        if dtype not in checks.FLOAT_DTYPES:
            raise TypeError(
                f"embedding: the layer must be float32, float16 or bfloat16, was cast to {dtype}"
                f"{at(self.layer_name)}. Cast the model back, such as by model.to(torch.float32)."
            )
        checks.embedding_ids(input, self.weight_packed.device, self.layer_name)
        parts = (self.weight_packed, self.weight_absmax, self.codebook, self.weight_scale)
        try:
            return torch.ops.kbit.embedding(input, *parts, self.embedding_dim, dtype)
        except IndexError as error:
            raise places.looked_up(error, self.layer_name) from None

    def _set_dtype(self, dtype: torch.dtype, device: Any) -> None:
        # A parameter without elements: .half() and .to(dtype) cast it, so it remembers the dtype of the
        # rows. And a model of transformers takes its dtype from its first float parameter, which must be this
        # one and not a block scale, so it is registered first.
        probe = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
        self._parameters["dtype_probe"] = probe

    def reset_constants(self, codebook: torch.Tensor) -> None:
        """Fill what no checkpoint holds; see `QuantizedModule.reset_constants`."""
        super().reset_constants(codebook)
        self._set_dtype(self.dtype_probe.dtype, self.weight_packed.device)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Without `dtype_probe` if asked without `recurse`, as by what offloads: no state dict has it.

        With `recurse` they include it: torch.export wants all that forward reads.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        return (pair for pair in found if recurse or pair[1] is not self.dtype_probe)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "dtype_probe"]

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, *args)
        if prefix + "dtype_probe" in missing_keys:
            missing_keys.remove(prefix + "dtype_probe")

    def reset_parameters(self) -> None:
        """Restore what no checkpoint holds; see `QuantizedModule.reset_parameters`."""
        super().reset_parameters()
        if self.dtype_probe.device != self.weight_packed.device:
            self._set_dtype(self.dtype_probe.dtype, self.weight_packed.device)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{nn.Embedding.extra_repr(self)}, {self._describe()}"
