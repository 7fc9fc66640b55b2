"""Quantize a checkpoint on disk, tensor by tensor, into a folder that appears only when it is complete.

Output goes to `OUT.partial`, shard by shard; each shard is written under another name, synced and renamed, so
a shard that is there is whole. Which tensor goes into which shard follows from the source's headers and the
policy alone, so a killed run resumes behind its last shard. The folder is renamed to OUT at the end.

Memory: one source tensor (of fused experts: one expert), its codes, and one output shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kbit import ops
from kbit.format import QuantizationPolicy, QuantizedTensor
from kbit.format.checkpoint import parts_to_save
from kbit.format.model_files import CONFIG_NAME, INDEX_NAME, PICKLE_SUFFIXES
from kbit.integrations.streaming import folder
from kbit.integrations.streaming.jobs import Job, plan_jobs

__all__ = ["Report", "quantize_checkpoint"]

# Where transformers keeps named chat templates; the only folder inside a model folder that it reads.
CHAT_TEMPLATES = "additional_chat_templates"


@dataclass
class Report:
    """What a run did. Bytes are of tensors, not of files."""

    bytes_in: int = 0
    bytes_out: int = 0
    weights: int = 0
    quantized_weights: int = 0
    quantized_bytes: int = 0
    resumed_shards: int = 0
    shards: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized tensors."""
        return 8 * self.quantized_bytes / max(1, self.quantized_weights)


Progress = Callable[[int, int, str], None]


def quantize_checkpoint(
    source: Path,
    target: Path,
    policy: QuantizationPolicy,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize a model folder into another one.

    The result equals what `from_pretrained(source, quantization_config=...)` and `save_pretrained` give, bit
    for bit, whatever the model's size.

    Args:
        source: folder with config.json and safetensors files, not quantized.
        target: folder to create.
        policy: which modules get how many bits.
        force: replace `target` if it exists.
        progress: called as progress(bytes done, bytes in all, tensor name).

    Returns:
        A Report.

    Raises:
        FileExistsError: `target` exists and may not be replaced, or another process is writing it.
        NonFiniteWeightError: a weight holds NaN or Inf; nothing is left behind.
        OSError: the disk is full, or cannot be written; finished shards stay for the next run.
        ValueError: the source is damaged, pickled, quantized already, or overlaps the target.
    """
    folder.check_target(source, target, force)
    config, jobs = plan_jobs(source, policy)
    partial = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder.exclusive(partial):
        folder.check_target(source, target, force)  # again: another process may have finished just now
        shards = folder.prepare(partial, source, policy, jobs)
        try:
            report = _write_shards(partial, shards, policy, progress)
            _write_rest(source, partial, config, policy, shards)
        except ValueError:
            shutil.rmtree(partial)
            raise
        except OSError as error:
            raise folder.explain(error, partial) from error
        folder.publish(partial, target)
    return report


def _write_shards(
    partial: Path, shards: dict[str, list[Job]], policy: QuantizationPolicy, progress: Progress | None
) -> Report:
    report = Report(shards=list(shards))
    total = sum(job.info.nbytes for jobs in shards.values() for job in jobs)
    for file, jobs in shards.items():
        path = partial / file
        finished = path.is_file()
        report.resumed_shards += finished
        tensors: dict[str, torch.Tensor] = {}
        for job in jobs:
            if not finished:
                tensors |= _run(job, policy)
            _count(report, job)
            if progress is not None:
                progress(report.bytes_in, total, job.name)
        if not finished:
            folder.save_shard(tensors, path)
    return report


def _count(report: Report, job: Job) -> None:
    report.bytes_in += job.info.nbytes
    report.bytes_out += job.out_bytes
    report.weights += job.info.numel
    if job.bits is not None:
        report.quantized_weights += job.info.numel
        report.quantized_bytes += job.out_bytes


def _run(job: Job, policy: QuantizationPolicy) -> dict[str, torch.Tensor]:
    with safe_open(job.info.file, framework="pt") as file:
        if job.bits is None:
            return {job.name: file.get_tensor(job.name)}
        settings = (job.bits, policy.codebook_for(job.bits), policy.absmax_format, policy.search)
        if len(job.info.shape) == 2:
            return parts_to_save(job.name, ops.quantize(file.get_tensor(job.name), *settings, where=job.name))
        view = file.get_slice(job.name)
        experts = [
            ops.quantize(view[expert], *settings, where=f"{job.name}[{expert}]")
            for expert in range(job.info.shape[0])
        ]
    return parts_to_save(job.name, QuantizedTensor.stack(experts))


def _write_rest(
    source: Path,
    partial: Path,
    config: dict[str, Any],
    policy: QuantizationPolicy,
    shards: dict[str, list[Job]],
) -> None:
    """Config, index, and every other file of the model: tokenizer, chat template, generation config."""
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", *PICKLE_SUFFIXES) or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != CONFIG_NAME:
            shutil.copyfile(path, partial / path.name)
        elif path.is_dir() and path.name == CHAT_TEMPLATES:
            shutil.copytree(path, partial / path.name, dirs_exist_ok=True)
    config = config | {"quantization_config": policy.to_dict()}
    (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    if len(shards) > 1:
        weight_map: dict[str, str] = {}
        size = 0
        for file in shards:
            with safe_open(partial / file, framework="pt") as shard:
                weight_map |= dict.fromkeys(shard.keys(), file)
            size += (partial / file).stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
