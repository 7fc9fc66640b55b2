"""Quantize a checkpoint on disk, tensor by tensor, into a folder that appears only when it is complete.

Output goes to `OUT.partial`, shard by shard; each shard is written under another name, synced and renamed, so
a shard that is there is whole. Which tensor goes into which shard follows from the source's headers and the
policy alone, so a killed run resumes behind its last shard. The folder is renamed to OUT at the end.

Memory: one source tensor (of fused experts: one expert), its codes, and one output shard.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kbit import ops
from kbit._version import __version__
from kbit.format import QuantizationPolicy, QuantizedTensor
from kbit.format.checkpoint import parts_to_save
from kbit.format.model_files import (
    CONFIG_NAME,
    INDEX_NAME,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
    read_config,
    read_index,
)
from kbit.format.reference import blocks_of
from kbit.format.safetensors_header import TensorInfo
from kbit.format.scales import absmax_format
from kbit.ops.checks import FLOAT_DTYPES

# Tensors of a shard are in memory together, and once more while they are written.
SHARD_BYTES = 256 * 2**20
JOURNAL = "kbit-journal.json"


@dataclass
class Job:
    """What happens to one tensor of the source: quantized to `bits`, or copied where that is None."""

    name: str
    info: TensorInfo
    bits: int | None
    out_bytes: int


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
        FileExistsError: `target` exists, or another process is writing it.
        NonFiniteWeightError: a weight holds NaN or Inf; nothing is left behind.
        OSError: the disk is full, or cannot be written; finished shards stay for the next run.
        ValueError: the source is damaged, pickled, or quantized already.
    """
    config, jobs = plan_jobs(source, policy)
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists. Choose another name, or pass --force to replace it.")
    partial = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(partial):
        shards = _prepare(partial, source, policy, jobs)
        try:
            report = _write_shards(partial, shards, policy, progress)
            _write_rest(source, partial, config, policy, shards)
        except ValueError:
            shutil.rmtree(partial)
            raise
        except OSError as error:
            raise _explain(error, partial) from error
        _publish(partial, target)
    return report


def plan_jobs(source: Path, policy: QuantizationPolicy) -> tuple[dict[str, Any], list[Job]]:
    """Decide what happens to every tensor of a checkpoint; reads headers only.

    Raises:
        ValueError: see `quantize_checkpoint`; also a tensor to be quantized that is not float.
    """
    config = read_config(source)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"{source} is quantized already ({method}). Start from the unquantized model.")
    index = read_index(source)
    widths = _widths(source, policy, index)
    jobs = []
    for name, info in index.items():
        bits = widths.get(name)
        if bits is not None and info.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} is {info.dtype}; only float32, float16 and bfloat16 can be quantized. "
                f"Convert the model, or leave it out with --skip."
            )
        jobs.append(Job(name, info, bits, _out_bytes(info, bits, policy)))
    if not widths:
        raise ValueError(
            f"{source}: the options leave every tensor unquantized. Check --skip and --override."
        )
    return config, jobs


def _widths(source: Path, policy: QuantizationPolicy, index: dict[str, TensorInfo]) -> dict[str, int]:
    """{tensor: bits} by the plan that quantizing on load follows, so that both give the same."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    from kbit.integrations.transformers.placement import plan_ties
    from kbit.integrations.transformers.plan import build_plan

    config = AutoConfig.from_pretrained(source)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        model = architecture(config) if architecture else AutoModelForCausalLM.from_config(config)
    plan = build_plan(model, policy, index, pre_quantized=False)
    plan_ties(model, plan, refuse=False)
    return {
        name: planned.bits
        for planned in plan.values()
        for names in planned.sources.values()
        for name in names
    }


def _out_bytes(info: TensorInfo, bits: int | None, policy: QuantizationPolicy) -> int:
    if bits is None:
        return info.nbytes
    rows = info.numel // max(1, info.shape[-1])
    per_block = 4 * bits + absmax_format(policy.absmax_format).bytes
    return rows * blocks_of(info.shape[-1]) * per_block


@contextmanager
def _exclusive(partial: Path) -> Iterator[None]:
    lock = FileLock(partial.with_name(partial.name + ".lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FileExistsError(
            f"{partial} is being written by another process. Wait for it, or choose another name."
        ) from None
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _prepare(
    partial: Path, source: Path, policy: QuantizationPolicy, jobs: list[Job]
) -> dict[str, list[Job]]:
    """Make the work folder, or take over one that the same task left; {shard file: jobs}."""
    shards = _assign(jobs)
    journal = {"task": _fingerprint(source, policy, jobs), "shards": list(shards)}
    file = partial / JOURNAL
    same = file.is_file() and file.read_text() == json.dumps(journal)
    if partial.exists() and not same:
        shutil.rmtree(partial)
    done = sum(path.stat().st_size for path in partial.glob("*.safetensors")) if same else 0
    _check_space(partial.parent, sum(job.out_bytes for job in jobs) - done)
    partial.mkdir(exist_ok=True)
    file.write_text(json.dumps(journal))
    return shards


def _assign(jobs: list[Job]) -> dict[str, list[Job]]:
    groups: list[list[Job]] = [[]]
    for job in jobs:
        if groups[-1] and sum(other.out_bytes for other in groups[-1]) + job.out_bytes > SHARD_BYTES:
            groups.append([])
        groups[-1].append(job)
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _fingerprint(source: Path, policy: QuantizationPolicy, jobs: list[Job]) -> str:
    files = sorted({job.info.file for job in jobs})
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    task = [__version__, str(source.resolve()), state, policy.to_dict(), SHARD_BYTES]
    return hashlib.sha256(json.dumps(task).encode()).hexdigest()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + 16 * 2**20:
        raise OSError(
            errno.ENOSPC,
            f"{folder} has {free / 1e6:.0f} MB free, the output needs {needed / 1e6:.0f} MB. "
            f"Make room, or write elsewhere",
        )


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
            _save(tensors, path)
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


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a shard so that it is there whole or not at all."""
    temporary = path.with_suffix(".writing")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # The library creates files that only their owner can read; models are shared.
        temporary.chmod(path.parent.stat().st_mode & 0o666)
        temporary.replace(path)
    except SafetensorError as error:
        # The library wraps the system's error in its own exception; only the text tells a full disk.
        full = "no space" in str(error).lower()
        temporary.unlink(missing_ok=True)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    config = config | {"quantization_config": policy.to_dict()}
    (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    if len(shards) > 1:
        weight_map, size = {}, 0
        for file in shards:
            with safe_open(partial / file, framework="pt") as shard:
                weight_map |= dict.fromkeys(shard.keys(), file)
            size += (partial / file).stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    (partial / JOURNAL).unlink()


def _publish(partial: Path, target: Path) -> None:
    """Rename the finished folder; an old one makes way only now."""
    old = target.with_name(target.name + ".replaced")
    if target.exists():
        target.replace(old)
    partial.replace(target)
    if old.is_dir():
        shutil.rmtree(old)


def _explain(error: OSError, partial: Path) -> OSError:
    reason = error.strerror or str(error)
    return OSError(
        error.errno or 0,
        f"writing {partial} failed: {reason}. Finished shards are kept: fix the cause and run the same "
        f"command again to go on, or delete that folder",
    )
