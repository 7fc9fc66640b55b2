"""The work folder `OUT.partial`: taken by one process, resumed by the next, renamed when complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from kbit._version import __version__
from kbit.format import QuantizationPolicy
from kbit.integrations.streaming.jobs import SHARD_BYTES, Job, assign_shards

JOURNAL = "kbit-journal.json"


@contextmanager
def exclusive(partial: Path) -> Iterator[None]:
    """Hold the work folder against other processes.

    Raises:
        FileExistsError: another one holds it.
    """
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


def prepare(partial: Path, source: Path, policy: QuantizationPolicy, jobs: list[Job]) -> dict[str, list[Job]]:
    """Make the work folder, or take over one that the same task left; {shard file: jobs}."""
    shards = assign_shards(jobs)
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


def save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
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


def publish(partial: Path, target: Path) -> None:
    """Rename the finished folder; an old one makes way only now."""
    old = target.with_name(target.name + ".replaced")
    if target.exists():
        target.replace(old)
    partial.replace(target)
    if old.is_dir():
        shutil.rmtree(old)


def explain(error: OSError, partial: Path) -> OSError:
    """The error of a failed write, with what is left and what to do."""
    reason = error.strerror or str(error)
    return OSError(
        error.errno or 0,
        f"writing {partial} failed: {reason}. Finished shards are kept: fix the cause and run the same "
        f"command again to go on, or delete that folder",
    )
