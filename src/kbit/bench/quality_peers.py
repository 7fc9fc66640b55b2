"""Other libraries' formats on the weights that kbit quantizes: the rows of `kbit eval --peers`.

A library quantizes one matrix after another and decodes it again; the model computes with what came out, all
else as it is. Sizes are those of the tensors that the library makes: codes, scales and zero points. Tables
that are the same for every weight, as codebooks are, count for none, kbit included.

* bitsandbytes: NF4 and FP4 in blocks of 64, a float32 for each, or a byte for each and a float32 for 256.
* HQQ: integers by its own settings, a scale and a zero point of 16 bits for 64.
* GGUF: what the package gguf can quantize as llama.cpp does, and through llama-cpp-python the rest.
* Integers of 4 bits, rounded, a float16 scale and a zero point of 4 bits for 64: as in files of GPTQ and AWQ,
  without what these methods add.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kbit.bench.quality import compare, sharing_copy
from kbit.format.words import first_line

GROUP = 64
# In place of a type whose blocks do not divide rows: llama.cpp's choice (tensor_type_fallback).
_BLOCKS_OF_32 = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "IQ2_S": "IQ4_NL",
    "IQ3_S": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
}


@dataclass(frozen=True)
class Stored:
    """A matrix as a library stores it: what it stands for [N, K], and the bytes of all that this takes."""

    values: torch.Tensor
    nbytes: int


@dataclass(frozen=True)
class Format:
    """One way to store weights: `make(w)` does it to a matrix [N, K], or raises what the library raises.

    Attributes:
        peer: whose it is, such as "GGUF".
        method: what it is called there, such as "Q4_0".
        package, version: what makes it; pip's name.
    """

    peer: str
    method: str
    package: str
    version: str | None
    make: Callable[[torch.Tensor], Stored]

    @property
    def name(self) -> str:
        """Peer and method."""
        return f"{self.peer} {self.method}"


@dataclass(frozen=True)
class Library:
    """A package by pip's name, the modules that are imported, and methods: `make(w, *modules)`."""

    peer: str
    package: str
    modules: tuple[str, ...]
    methods: Mapping[str, Callable[..., Stored]]

    def load(self) -> list[Format]:
        """Its formats, ready to use. Raises whatever an import of it raises."""
        modules = [importlib.import_module(name) for name in self.modules]
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            version = None

        def bound(make: Callable[..., Stored]) -> Callable[[torch.Tensor], Stored]:
            return lambda w: make(w, *modules)

        return [
            Format(self.peer, method, self.package, version, bound(make))
            for method, make in self.methods.items()
        ]


def _bitsandbytes(w: torch.Tensor, functional: Any, kind: str, double: bool = False) -> Stored:
    codes, state = functional.quantize_4bit(
        w.contiguous(), blocksize=GROUP, compress_statistics=double, quant_type=kind
    )
    parts = [codes, state.absmax, *([state.state2.absmax, state.offset] if double else [])]
    return Stored(functional.dequantize_4bit(codes, state), sum(part.nbytes for part in parts))


def _hqq(w: torch.Tensor, core: Any, bits: int) -> Stored:
    # It computes and keeps scales in 16 bits.
    dtype = torch.float16 if w.dtype == torch.float32 else w.dtype
    settings = core.BaseQuantizeConfig(nbits=bits, group_size=GROUP)["weight_quant_params"]
    codes, meta = core.Quantizer.quantize(w, device=str(w.device), compute_dtype=dtype, **settings)
    meta["compute_dtype"] = dtype
    codes, meta = core.Quantizer.to_inplace(codes, meta, device=w.device)
    parts = [codes, *(part for part in meta.values() if isinstance(part, torch.Tensor))]
    return Stored(core.Quantizer.dequantize(codes, meta), sum(part.nbytes for part in parts))


def _gguf(w: torch.Tensor, gguf: Any, kind: str) -> Stored:
    kind = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(w.float().cpu().numpy(), kind)
    return Stored(torch.from_numpy(gguf.quants.dequantize(packed, kind)), packed.nbytes)


def _llama_cpp(w: torch.Tensor, gguf: Any, ggml: Any, kind: str) -> Stored:
    rows, columns = w.shape
    if columns % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = _BLOCKS_OF_32.get(kind, kind)
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    if columns % block:
        raise ValueError(f"rows of {columns} are not whole blocks of {block}")
    given = w.float().cpu().contiguous()
    packed = torch.empty(rows, columns // block * size, dtype=torch.uint8)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (given, packed)]
    sizes = [ctypes.c_int64(size) for size in (0, rows, columns)]
    ggml.libggml.ggml_quantize_chunk(ctypes.c_int(number), *pointers, *sizes, None)
    return Stored(torch.from_numpy(gguf.quants.dequantize(packed.numpy(), number)), packed.nbytes)


def _rounded(w: torch.Tensor, _torch: Any) -> Stored:
    rows, columns = w.shape
    if columns % GROUP:
        raise ValueError(f"rows of {columns} are not whole groups of {GROUP}")
    groups = w.float().view(rows, -1, GROUP)
    least, most = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((most - least) / 15).half()
    divisor = torch.where(scale == 0, 1, scale.float())
    zero = (-least / divisor).round().clamp(0, 15)
    codes = (groups / divisor + zero).round().clamp(0, 15)
    values = (codes - zero) * scale
    return Stored(values.view_as(w), scale.nbytes + (codes.numel() + zero.numel() + 1) // 2)


LIBRARIES = (
    Library(
        "bitsandbytes",
        "bitsandbytes",
        ("bitsandbytes.functional",),
        {
            "NF4": partial(_bitsandbytes, kind="nf4"),
            "NF4, double": partial(_bitsandbytes, kind="nf4", double=True),
            "FP4": partial(_bitsandbytes, kind="fp4"),
        },
    ),
    Library(
        "HQQ",
        "hqq",
        ("hqq.core.quantize",),
        {f"{bits} bits": partial(_hqq, bits=bits) for bits in (2, 3, 4)},
    ),
    Library(
        "GGUF",
        "gguf",
        ("gguf",),
        {kind: partial(_gguf, kind=kind) for kind in ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    ),
    Library(
        "GGUF",
        "llama-cpp-python",
        ("gguf", "llama_cpp._ggml"),
        {kind: partial(_llama_cpp, kind=kind) for kind in ("IQ4_NL", *_BLOCKS_OF_32)},
    ),
    Library("rounded", "torch", ("torch",), {"int4": _rounded}),
)


def formats(libraries: Iterable[Library] = LIBRARIES) -> tuple[list[Format], list[str]]:
    """The formats of libraries that can be imported, and of each other library why it cannot."""
    found: list[Format] = []
    absent = []
    for library in libraries:
        try:
            found += library.load()
        except Exception as error:  # they load libraries of their own, which fail in their own ways
            absent.append(
                f"{library.package} is left out, since it cannot be imported ({first_line(error)}): "
                f"pip install {library.package}"
            )
    return found, absent


def quantize(model: nn.Module, places: Sequence[tuple[str, str]], form: Format) -> dict[str, float]:
    """Give some weights of a model the values that a library's format stands for; their size and error.

    Args:
        model: unquantized; it gets new parameters, so that the old ones may be another model's, too.
        places: (module, weight) of each, [N, K] or [E, N, K]; whatever else holds the same tensor follows.
        form: what to store them in.

    Returns:
        "bits_per_weight", and "nmse": the squared error over the squared sum.

    Raises:
        ValueError: the library refuses one of them.
    """
    nbytes = count = 0
    error = total = 0.0
    for name, weight in places:
        old = model.get_submodule(name)._parameters[weight]
        assert old is not None
        new = torch.empty_like(old, requires_grad=False)
        for into, exact in zip(_matrices(new), _matrices(old.detach()), strict=True):
            try:
                stored = form.make(exact)
                decoded = stored.values.view_as(exact).to(exact.device)
            except Exception as refusal:  # in ways of its own
                raise ValueError(
                    f"{form.name} is left out, since it refuses {name}.{weight} "
                    f"{tuple(exact.shape)}: {first_line(refusal)}"
                ) from refusal
            into.copy_(decoded)
            nbytes, count = nbytes + stored.nbytes, count + exact.numel()
            error += float((decoded.float() - exact.float()).square().sum())
            total += float(exact.float().square().sum())
        _replace(model, old, nn.Parameter(new, requires_grad=False))
    return {"bits_per_weight": round(8 * nbytes / count, 4), "nmse": error / total if total else 0.0}


def score(
    base: nn.Module,
    places: Sequence[tuple[str, str]],
    ids: torch.Tensor,
    form: Format,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """A row of results for a format: its size, error and quality. One more model in memory, while it runs.

    Args:
        base: the unquantized model.
        places, form: see `quantize`, which also says what is raised.
        ids, progress: see `kbit.bench.quality.compare`.

    Raises:
        ValueError: the library refuses a weight.
    """
    model = sharing_copy(base)
    figures = quantize(model, places, form)
    about = {"bits": None, "method": form.method, "peer": form.peer}
    return about | figures | vars(compare(model, ids, base, progress))


def by_size(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of results with those of similar size beside each other, the smallest first, then the best."""
    return sorted(rows, key=lambda row: (row.get("bits_per_weight") or 0, row["kl_divergence"] or 0))


def _matrices(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from weight.unbind(0) if weight.dim() == 3 else [weight]


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new
