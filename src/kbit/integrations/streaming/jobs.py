"""Which tensors of a checkpoint are quantized, and into which shard of the output each goes.

Both follow from the source's headers, its config and the policy alone, so a killed run finds its place again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kbit.format import QuantizationPolicy
from kbit.format.counts import refuse_more_than_tensors
from kbit.format.model_files import CONFIG_NAME, OWN_CODE, SINGLE_NAME, read_config, read_index
from kbit.format.names import ABSMAX, PACKED, SCALE
from kbit.format.reference import blocks_of
from kbit.format.safetensors_header import TensorInfo
from kbit.format.scales import absmax_format
from kbit.nn.refusals import require_policy
from kbit.ops.checks import FLOAT_DTYPES

# Tensors of a shard are in memory together, and once more while they are written.
SHARD_BYTES = 256 * 2**20


@dataclass
class Job:
    """What happens to one tensor of the source: quantized to `bits`, or copied where that is None.

    Attributes:
        parts: {name: (dtype, shape)} of what becomes of it. Factors are not known: they are written if not 1.
        parts_name: the parts' name without suffix; the tensor's own, where transformers finds them by it.
    """

    name: str
    info: TensorInfo
    bits: int | None
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    parts_name: str

    def is_among(self, made: Mapping[str, Any]) -> bool:
        """Whether all parts were made already."""
        return made.keys() >= {*self.parts}

    @property
    def out_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.parts.values())


def plan_jobs(source: Path, policy: QuantizationPolicy) -> tuple[dict[str, Any], list[Job]]:
    """Decide what happens to every tensor of a checkpoint; reads headers, and tied weights that it has twice.

    Raises:
        TypeError: the policy is none.
        ValueError: see `quantize_checkpoint`; also a tensor to be quantized that is not float.
    """
    require_policy(policy, "quantize_checkpoint")
    config = read_config(source)
    stated = config.get("quantization_config")
    if stated is not None:
        method = stated.get("quant_method") if isinstance(stated, dict) else stated
        raise ValueError(f"{source} is quantized already ({method}). Start from the unquantized model.")
    index = read_index(source)
    widths, stored = _widths(source, policy, index)
    jobs = []
    for name, info in index.items():
        bits = widths.get(name)
        if bits is not None and info.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} is {info.dtype}; only float32, float16 and bfloat16 can be quantized. "
                f"Convert the model, or leave it out with --skip."
            )
        parts_name = stored.get(name, name)
        jobs.append(Job(name, info, bits, _parts(parts_name, info, bits, policy), parts_name))
    _refuse_parts_of_others(source, jobs)
    if not widths:
        raise ValueError(
            f"{source}: every linear layer, embedding and experts module of this model stays unquantized. "
            f"Check --skip, --override and --embedding-bits. Layers of other classes, such as GPT-2's "
            f"Conv1D, are never quantized."
        )
    return config, jobs


def _refuse_parts_of_others(source: Path, jobs: list[Job]) -> None:
    """Raises ValueError where a tensor of the source has the name of what a quantized one becomes."""
    quantized = {job.parts_name: job.name for job in jobs if job.bits is not None}
    for job in jobs:
        for suffix in (PACKED, ABSMAX, SCALE):
            whose = quantized.get(job.name.removesuffix(suffix))
            if job.bits is None and job.name.endswith(suffix) and whose is not None:
                raise ValueError(
                    f"{source}: {job.name} has the name of a part of {whose}, once that is quantized. Did "
                    f"another tool quantize this model? Start from the unquantized model, or leave out the "
                    f"weight with --skip."
                )


def _widths(
    source: Path, policy: QuantizationPolicy, index: dict[str, TensorInfo]
) -> tuple[dict[str, int], dict[str, str]]:
    """{tensor: bits} and {tensor: name of its parts}.

    By the plan that quantizing on load follows, so that both give the same.
    """
    from kbit.integrations.transformers.placement import plan_ties
    from kbit.integrations.transformers.plan import build_plan
    from kbit.integrations.transformers.refusals import names_of_parts
    from kbit.integrations.transformers.rehearsal import check_complete

    model = meta_model(source)
    unused = check_complete(model, index, str(source))
    if unused is not None:
        warnings.warn(unused, stacklevel=2)
    plan = build_plan(model, policy, index, pre_quantized=False)
    plan_ties(model, plan, refuse=False)
    widths = {
        name: planned.bits
        for planned in plan.values()
        for names in planned.sources.values()
        for name in names
    }
    return widths, names_of_parts(model, plan)


def meta_model(source: Path) -> Any:
    """The model of a folder's config, without weights.

    Raises:
        ValueError: transformers does not know this type of model, or refuses what the config says, or that is
            a model of more layers than there are tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from kbit.integrations.transformers.names import class_in

    refuse_more_than_tensors(source, read_config(source))
    try:
        # Unless told not to, it asks on a terminal whether to run a folder's own code.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        known = class_in(config)
        with torch.device("meta"):
            if known is not None:
                return known(config)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ImportError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        unknown = "does not recognize this architecture" in reason
        remedy = "A newer transformers may know it." if unknown else "Fetch it again."
        reason = OWN_CODE if "trust_remote_code" in reason else f"{reason.rstrip('.')}. {remedy}"
        raise ValueError(
            f"{source / CONFIG_NAME}: transformers makes no model of this config: {reason}"
        ) from error


def _parts(
    name: str, info: TensorInfo, bits: int | None, policy: QuantizationPolicy
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if bits is None:
        return {name: (info.dtype, info.shape)}
    *rows, columns = info.shape
    blocks, absmax = blocks_of(columns), absmax_format(policy.absmax_format).dtype
    return {name + PACKED: (torch.int32, (*rows, blocks * bits)), name + ABSMAX: (absmax, (*rows, blocks))}


def assign_shards(jobs: list[Job]) -> dict[str, list[Job]]:
    """{shard file: its jobs}, shards of at most `SHARD_BYTES` unless one tensor is larger."""
    groups: list[list[Job]] = [[]]
    for job in jobs:
        if groups[-1] and sum(other.out_bytes for other in groups[-1]) + job.out_bytes > SHARD_BYTES:
            groups.append([])
        groups[-1].append(job)
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": group for n, group in enumerate(groups, start=1)}
