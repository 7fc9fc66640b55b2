"""Quantize a checkpoint on disk, tensor by tensor, into a folder that appears only when it is complete.

Output goes to `OUT.partial`, shard by shard; each shard is written under another name, synced and renamed.
Which tensor goes into which shard follows from the source's headers, its config and the policy alone, so a
killed run resumes behind its last shard, once the headers of those that are there have been compared with
what belongs in them. The folder is renamed to OUT at the end.

Memory of each worker: one source tensor (of fused experts: one expert), its codes, and one output shard.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial as partial_of
from pathlib import Path
from typing import Any

import torch

from kbit import ops
from kbit.format import QuantizationPolicy, QuantizedTensor
from kbit.format.checkpoint import parts_to_save
from kbit.format.errors import NonFiniteWeightError
from kbit.format.model_files import CONFIG_NAME, INDEX_NAME
from kbit.format.names import SCALE, module_of
from kbit.format.safetensors_header import read_header
from kbit.integrations.streaming import folder
from kbit.integrations.streaming.jobs import Job, plan_jobs
from kbit.integrations.streaming.other_files import other_files
from kbit.integrations.streaming.reader import read_tensor
from kbit.integrations.streaming.workers import run_all, worker_devices

__all__ = ["Codes", "Report", "quantize_checkpoint"]

CPU = torch.device("cpu")


@dataclass
class Report:
    """What a run did. Bytes are of tensors, not of files.

    Attributes:
        resumed_shards: shards that an earlier run had finished; the counts of bytes and weights include them.
        written_weights: weights of the shards that this run wrote, in `seconds` from headers to the end.
        workers: one device for each.
        not_finite: tensors that stay unquantized and hold NaN or infinity, of the shards that this run wrote.
        without_codes: of these shards, too: tensors that were quantized here, where others had `codes`.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    weights: int = 0
    quantized_weights: int = 0
    quantized_bytes: int = 0
    resumed_shards: int = 0
    shards: list[str] = field(default_factory=list)
    written_weights: int = 0
    seconds: float = 0.0
    workers: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    without_codes: list[str] = field(default_factory=list)

    @property
    def weights_per_second(self) -> float:
        """Source weights read, quantized and written per second, disk included."""
        return self.written_weights / self.seconds if self.seconds else 0.0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the quantized tensors."""
        return 8 * self.quantized_bytes / max(1, self.quantized_weights)


Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Codes:
    """Parts of quantized weights that are made from the whole model, such as by what samples feed its layers.

    Attributes:
        key: what they follow from, beside the source and the policy.
        make: called if there is a shard to write; returns {name in the output: part}, on any device, where
            they need not be there yet. Tensors that it lacks are quantized as without it.
    """

    key: str
    make: Callable[[], Mapping[str, torch.Tensor]]


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    policy: QuantizationPolicy,
    force: bool = False,
    progress: Progress | None = None,
    jobs: int | None = None,
    devices: Sequence[str] = ("cpu",),
    codes: Codes | None = None,
) -> Report:
    """Quantize a model folder into another one.

    Without `codes` the result equals what `from_pretrained(source, quantization_config=...)` and
    `save_pretrained` give, bit for bit, whatever the model's size. What stays unquantized keeps the dtype
    that it has in the files, and a tied weight that they hold twice stays there twice.

    Args:
        source: folder with config.json and safetensors files, not quantized.
        target: folder to create.
        policy: which modules get how many bits.
        force: replace `target` if it exists, and what an interrupted run with other settings left.
        progress: called as progress(bytes done, bytes in all, tensor name), from any thread, one at a time.
        jobs: shards in work at a time; the bytes written do not depend on it. See `worker_devices`.
        devices: where to quantize, such as ("cuda:0", "cuda:1"); workers take them in turn.
        codes: quantized weights that are made elsewhere.

    Returns:
        A Report.

    Raises:
        FileExistsError: `target` exists and may not be replaced, another process is writing it, or a run with
            other settings left finished shards.
        NonFiniteWeightError: a weight holds NaN or Inf; nothing is left behind.
        OSError: the disk is full, or cannot be written; finished shards stay for the next run.
        ValueError: the source is damaged, pickled, quantized already, or overlaps the target; its tensors are
            not those of the model in its config, or would not be found again; a device is not there, or there
            are fewer jobs than devices.

    Warns:
        UserWarning: an override or a skip matches no module, or the model does not use some tensors.
    """
    start, source, target = time.perf_counter(), Path(source), Path(target)
    folder.check_target(source, target, force)
    where = worker_devices(devices, jobs)
    config, tensors = plan_jobs(source, policy)
    partial = folder.partial_of(target)
    with folder.exclusive(partial):
        folder.check_target(source, target, force)  # again: another process may have finished just now
        shards = folder.prepare(partial, source, policy, tensors, force, codes.key if codes else "")
        try:
            with folder.explained(source, partial):
                finished = all((partial / file).is_file() for file in shards)
                made = {} if codes is None or finished else _complete(codes.make())
                report = _write_shards(partial, shards, policy, progress, where, made)
                _write_rest(source, partial, config, policy, shards)
        except BaseException as error:  # a signal, too
            # A GPU's kernel that cannot be compiled, say, leaves what can be used later.
            if isinstance(error, NonFiniteWeightError) or not folder.finished_shards(partial):
                shutil.rmtree(partial, ignore_errors=True)  # a full disk has led to that already
            raise
        folder.publish(partial, target)
    report.seconds = time.perf_counter() - start
    return report


def _complete(made: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Codes that a GPU has written, not only been asked for: workers read them in streams of their own."""
    for device in {part.device for part in made.values() if part.is_cuda}:
        torch.cuda.synchronize(device)
    return made


def _write_shards(
    partial: Path,
    shards: dict[str, list[Job]],
    policy: QuantizationPolicy,
    progress: Progress | None,
    where: Sequence[torch.device],
    made: Mapping[str, torch.Tensor],
) -> Report:
    where = where[: max(1, len(shards))]  # the others would only take threads
    report = Report(shards=list(shards), workers=[str(device) for device in where])
    total = sum(job.info.nbytes for jobs in shards.values() for job in jobs)
    lock = threading.Lock()

    def count(job: Job, finished: bool) -> None:
        with lock:
            _count(report, job, finished)
            if progress is not None:
                progress(report.bytes_in, total, job.name)

    def write(file: str, device: torch.device, stopped: Callable[[], bool]) -> None:
        path = partial / file
        finished = path.is_file()
        tensors: dict[str, torch.Tensor] = {}
        for job in shards[file]:
            if stopped():
                return
            if not finished:
                tensors |= _run(job, policy, made, device)
                if job.bits is None and not _is_finite(tensors[job.name]):
                    report.not_finite.append(job.name)
                if made and job.bits is not None and not job.is_among(made):
                    report.without_codes.append(job.name)
            count(job, finished)
        if finished:
            with lock:
                report.resumed_shards += 1
        else:
            folder.save_shard(tensors, path)

    run_all([partial_of(write, file) for file in shards], where)
    return report


def _count(report: Report, job: Job, finished: bool) -> None:
    report.bytes_in += job.info.nbytes
    report.bytes_out += job.out_bytes
    report.weights += job.info.numel
    if not finished:
        report.written_weights += job.info.numel
    if job.bits is not None:
        report.quantized_weights += job.info.numel
        report.quantized_bytes += job.out_bytes


def _run(
    job: Job, policy: QuantizationPolicy, made: Mapping[str, torch.Tensor], device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    if job.bits is None:
        return {job.name: read_tensor(job.name, job.info, CPU)}
    if job.is_among(made):
        names = (*job.parts, job.parts_name + SCALE)
        return {name: made[name].cpu() for name in names if name in made}
    settings = (job.bits, policy.codebook_for(job.bits), policy.absmax_format, policy.search)

    def quantized(where: str, expert: int | None = None) -> QuantizedTensor:
        w = read_tensor(job.name, job.info, device, expert)
        return ops.quantize(w, *settings, where=where).to("cpu")

    if len(job.info.shape) == 2:
        return parts_to_save(job.parts_name, quantized(job.name))
    experts = [quantized(f"{job.name}[{expert}]", expert) for expert in range(job.info.shape[0])]
    return parts_to_save(job.parts_name, QuantizedTensor.stack(experts))


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())  # NaN, if there is any


def _write_rest(
    source: Path,
    partial: Path,
    config: dict[str, Any],
    policy: QuantizationPolicy,
    shards: dict[str, list[Job]],
) -> None:
    """Config, index, and every other file of the model: tokenizer, chat template, generation config."""
    for path in other_files(source):
        copy = partial / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    widths = {module_of(job.parts_name): job.bits for jobs in shards.values() for job in jobs if job.bits}
    config = config | {"quantization_config": policy.stating(widths).to_dict()}
    (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    if len(shards) > 1:
        weight_map: dict[str, str] = {}
        size = 0
        for file in shards:
            tensors = read_header(partial / file)
            weight_map |= dict.fromkeys(tensors, file)
            size += sum(info.nbytes for info in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
