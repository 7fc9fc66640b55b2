"""The work folder `OUT.partial`: taken by one process, resumed by the next, renamed when complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from kbit._version import __version__
from kbit.format import QuantizationPolicy
from kbit.format.model_files import JOURNAL_NAME, PARTIAL_SUFFIX
from kbit.format.names import SCALE
from kbit.format.safetensors_header import read_header
from kbit.format.words import counted, first_of
from kbit.integrations.streaming.jobs import Job, assign_shards
from kbit.integrations.streaming.other_files import is_model, others_folders

_OTHER_BYTES = 2**24  # kept for what is copied beside the weights: a tokenizer, say


def partial_of(target: Path) -> Path:
    """The work folder of a target."""
    return target.with_name(target.name + PARTIAL_SUFFIX)


def finished_shards(partial: Path) -> list[Path]:
    """The shards in a work folder, each of them whole unless somebody else changed it."""
    return list(partial.glob("*.safetensors"))


@contextmanager
def exclusive(partial: Path) -> Iterator[None]:
    """Hold the work folder against other processes.

    Raises:
        FileExistsError: another one holds it.
        OSError: the folder around it cannot be made or written to.
    """
    lock = FileLock(partial.with_name(partial.name + ".lock"), timeout=0)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        if not Path(lock.lock_file).exists():  # it could not be made
            raise OSError(errno.EIO, f"{partial.parent} cannot be written to. Write elsewhere.") from None
        raise FileExistsError(
            f"{partial} is being written by another process. Wait for it, or choose another name."
        ) from None
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"{partial.parent} cannot be written to: {error.strerror or error}. Write elsewhere.",
        ) from error
    try:
        yield
    finally:
        # Before the release: a file unlinked after it could be one that the next process holds by then.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def check_target(source: Path, target: Path, force: bool) -> None:
    """Refuse a target that exists, or that must not be replaced.

    Raises:
        FileExistsError: it exists and `force` is not set, or is something else than a model folder, or
            has folders in it that are no part of one.
        ValueError: source and target are one folder, or one is inside the other; or the target has no name of
            its own, such as "..", or holds the folder that the process runs in.
    """
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"{target} and the source {source} overlap. Write to a folder of its own.")
    if target.name in ("", "..") or Path.cwd().is_relative_to(there):
        raise ValueError(
            f"{target} has no name of its own or holds the folder that this command runs in, so it cannot be "
            f"replaced. Name a folder to create, such as {Path(target, 'quantized')}."
        )
    if target.is_symlink() and not target.exists():
        raise FileExistsError(f"{target} is a link to nothing, which no folder can replace. Remove it.")
    in_the_way = FileExistsError(
        f"{_replaced(target)} is in the way: an interrupted run with --force was to replace it, or it is "
        f"yours. Remove or rename it."
    )
    if not target.exists():
        if os.path.lexists(_replaced(target)) and partial_of(target).exists():
            raise in_the_way  # that run ended between its two renamings
        return
    empty = target.is_dir() and not any(target.iterdir())
    if not empty and not (target.is_dir() and is_model(target)):
        raise FileExistsError(f"{target} exists and is not a model folder. Choose another name.")
    if not empty and (others := others_folders(target)):
        raise FileExistsError(
            f"{target} exists and has folders that are no part of a model: {first_of(others)}. Choose "
            f"another name, or move them away."
        )
    if not empty and not force:
        raise FileExistsError(f"{target} exists. Choose another name, or pass --force to replace it.")
    if os.path.lexists(_replaced(target)):
        raise in_the_way


def prepare(
    partial: Path, source: Path, policy: QuantizationPolicy, jobs: list[Job], force: bool, key: str
) -> dict[str, list[Job]]:
    """Make the work folder, or take over one that the same task, of the same key, left; {shard file: jobs}.

    Raises:
        FileExistsError: a folder of that name is there that no run of this program left; or another task did,
            with finished shards in it, and `force` is not set.
        OSError: too little space is free, or the folder cannot be written.
    """
    shards = assign_shards(jobs)
    journal = {"task": _fingerprint(source, policy, shards, key), "shards": list(shards)}
    file = partial / JOURNAL_NAME
    same = file.is_file() and file.read_bytes() == json.dumps(journal).encode()
    if partial.exists() and not same:
        if not file.is_file() and any(partial.iterdir()):
            raise FileExistsError(f"{partial} is in the way and was not made by kbit. Remove or rename it.")
        kept = len(finished_shards(partial))
        if kept and not force:
            raise FileExistsError(
                f"{partial} keeps {counted(kept, 'finished shard')} of an interrupted run with other "
                f"settings, of another model or version. Repeat that command to go on, or pass --force to "
                f"begin anew."
            )
        with explained(source, partial):
            shutil.rmtree(partial)
    for path in partial.iterdir() if partial.exists() else ():
        _remove_unfinished(path, shards)
    done = sum(path.stat().st_size for path in finished_shards(partial))
    _check_space(partial.parent, sum(job.out_bytes for job in jobs) - done)
    if not same:
        with explained(source, partial):
            partial.mkdir(exist_ok=True)
            file.write_text(json.dumps(journal))
    return shards


def _remove_unfinished(path: Path, shards: dict[str, list[Job]]) -> None:
    """Remove what an interrupted run left but its journal and whole shards: copies may be cut off."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.name != JOURNAL_NAME and not (path.name in shards and _is_whole(path, shards[path.name])):
        path.unlink()


def _fingerprint(source: Path, policy: QuantizationPolicy, shards: dict[str, list[Job]], key: str) -> str:
    """Hash of all that the shards' bytes follow from; of config.json, the bits that it gives each job."""
    files = sorted({job.info.file for jobs in shards.values() for job in jobs})
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    content = {file: [(job.name, job.bits, job.parts_name) for job in jobs] for file, jobs in shards.items()}
    task = [__version__, str(source.resolve()), state, policy.to_dict(), content, key]
    return hashlib.sha256(json.dumps(task).encode()).hexdigest()


def _is_whole(path: Path, jobs: list[Job]) -> bool:
    """Whether a shard of an earlier run can be read, and has the tensors of its jobs and no others."""
    try:
        stored = {name: (info.dtype, info.shape) for name, info in read_header(path).items()}
    except (OSError, ValueError):
        return False
    expected = {name: part for job in jobs for name, part in job.parts.items()}
    factors = {job.parts_name + SCALE: (torch.float32, job.info.shape[:-2]) for job in jobs if job.bits}
    return stored == expected | {name: part for name, part in factors.items() if name in stored}


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    needed += _OTHER_BYTES
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            # Rounded apart, or the two could read the same.
            f"{folder} has {free // 10**6} MB free, the output needs {-(-needed // 10**6)} MB. "
            f"Make room, or write elsewhere.",
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
    """Rename the finished folder; an old one makes way only now, and comes back if that fails.

    Raises:
        OSError: a folder cannot be renamed.
    """
    old, exists = _replaced(target), target.exists()
    _sync(partial)
    try:
        if exists:
            target.replace(old)
        partial.replace(target)
    except OSError as error:
        if exists and not target.exists():
            old.replace(target)
        raise OSError(
            error.errno or errno.EIO,
            f"{partial} is complete but cannot be renamed to {target}: {error.strerror}. Rename it, or fix "
            f"the cause and run the same command again.",
        ) from error
    (target / JOURNAL_NAME).unlink()
    if exists and old.is_symlink():
        old.unlink()  # what it points to is not ours
    elif exists:
        try:
            shutil.rmtree(old)
        except OSError as error:
            warnings.warn(
                f"{target} is complete, but {old}, which it replaced, cannot be removed: {error.strerror}. "
                f"Remove it.",
                stacklevel=2,
            )


def _sync(folder: Path) -> None:
    """Have all files on the disk before the folder's new name is: power may fail at any time."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    if hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replaced(target: Path) -> Path:
    """Where an old folder is while the new one takes its name."""
    return target.with_name(target.name + ".replaced")


@contextmanager
def explained(source: Path, partial: Path) -> Iterator[None]:
    """Have an error say which file it is of, what is left and what to do.

    Without a finished shard the work folder is removed.
    """
    try:
        yield
    except OSError as error:
        shards = [path.stat().st_size for path in finished_shards(partial)]
        free = shutil.disk_usage(partial.parent).free
        if shards:
            left = (
                f"{partial} keeps {counted(len(shards), 'finished shard')} of {sum(shards) / 1e6:.0f} MB: "
                f"fix the cause and run the same command again to go on from there, or delete that folder."
            )
        else:
            shutil.rmtree(partial, ignore_errors=True)
            left = "Nothing is left behind: fix the cause and run the same command again."
        raise OSError(
            error.errno or errno.EIO,
            f"{_attempt(error, source, partial)} failed: {error.strerror or error} "
            f"({free / 1e6:.0f} MB free). {left}",
        ) from error


def _attempt(error: OSError, source: Path, partial: Path) -> str:
    if error.filename2 is not None:
        return f"copying {error.filename} to {error.filename2}"
    if error.filename is None:
        return f"writing {partial}"
    read = source.resolve() in Path(error.filename).resolve().parents
    return f"{'reading' if read else 'writing'} {error.filename}"
