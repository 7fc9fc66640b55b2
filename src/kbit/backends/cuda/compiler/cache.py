"""Compiled kernels on disk, one file each, named by a hash of all that they were made from.

A file is the cubin, as cuobjdump reads it, followed by JSON about it and the JSON's length. It is written
beside its place and renamed, so readers see all of it or none of it, under any number of processes. A file is
used only if it is whole, made for this very key, and nobody outside the user's groups could have written it:
a cubin is code that runs with the reader's rights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kbit.backends.cuda.compiler.spec import Sources

MAGIC = b"kbitcub1"
TRAILER = struct.Struct("<Q8s")
# All may read, whatever the umask: root may fill the cache of a container whose users are others.
FOLDER_MODE, FILE_MODE = 0o755, 0o644
# Waiting for another process that compiles the same kernel; after that, compile it too.
LOCK_SECONDS = 120
# A pipe in a file's place is not waited for, a link not followed.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_warned: set[Path] = set()


@dataclass(frozen=True)
class Entry:
    """What is stored of a kernel: its code, the compiler's log, and the seconds that compiling it took."""

    cubin: bytes
    log: str
    seconds: float


def cubin_folder() -> Path:
    """Where cubins are: in KBIT_CACHE, or among the user's caches.

    Among temporary files for a container's user without a home.
    """
    import platformdirs

    if given := os.environ.get("KBIT_CACHE"):
        return Path(given, "cubin")
    # No home is an error of new versions; old ones give "~/.cache", to be made where the process runs.
    with contextlib.suppress(RuntimeError):
        folder = Path(platformdirs.user_cache_dir("kbit"))
        if folder.is_absolute():
            return folder / "cubin"
    # Not in a folder of kbit's: that could be another user's, who would put others in place of this one.
    return Path(tempfile.gettempdir(), f"kbit-{getattr(os, 'geteuid', int)()}-cubin")


def content_key(sources: Sources, options: tuple[str, ...], compiler: str) -> str:
    """Hash of everything that decides what a kernel is compiled to.

    Args:
        sources: the texts; a spec's configuration is in one of them.
        options: the compiler's, the architecture among them.
        compiler: its kind and version.
    """
    content = json.dumps([MAGIC.decode(), compiler, options, asdict(sources)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def folder_problem(folder: Path) -> str | None:
    """Why kernels cannot be kept in a folder, which is made if it is missing; None where they can."""
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _doubt(os.stat(folder), folder)
    except OSError as error:
        return f"nothing can be written there: {error.strerror}"


class CubinCache:
    """A folder of cubins. What goes wrong with it stops no compilation: it warns once and does without."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cubin_folder()

    def load(self, stem: str, key: str) -> Entry | None:
        """The entry of a key; None where there is none to use.

        Args:
            stem: start of the file's name, for people.
            key: see `content_key`.
        """
        path, descriptor = self._path(stem, key), -1
        try:
            descriptor = os.open(path, _READ_FLAGS)
            status = os.fstat(descriptor)
            doubt = _doubt(status, path) or _doubt(os.stat(self.folder), self.folder)
            if doubt is None and not stat.S_ISREG(status.st_mode):
                doubt = f"{path} is no file"
            if doubt is not None:
                self._warn(doubt)
                return None
            with open(descriptor, "rb", closefd=False) as file:
                return _parse(file.read(), key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{path.name} cannot be read: {error.strerror}")
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def store(self, stem: str, key: str, entry: Entry) -> None:
        """Write an entry, replacing one that may be there."""
        about = {"key": key, "sha256": hashlib.sha256(entry.cubin).hexdigest(), "length": len(entry.cubin)}
        text = json.dumps(about | {"log": entry.log, "seconds": entry.seconds}).encode()
        temporary = ""
        try:
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            doubt = _doubt(os.stat(self.folder), self.folder)
            if doubt is not None:
                self._warn(doubt)
                return
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            with open(descriptor, "wb") as file:
                os.chmod(temporary, FILE_MODE)
                file.write(entry.cubin + text + TRAILER.pack(len(text), MAGIC))
            os.replace(temporary, self._path(stem, key))
        except OSError as error:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._warn(f"nothing can be written there: {error.strerror}")

    @contextlib.contextmanager
    def lock(self, stem: str, key: str) -> Iterator[None]:
        """Held while compiling a key, so that the ranks of one job compile it once; a help, not a need."""
        from filelock import FileLock, Timeout

        lock, held = FileLock(self._path(stem, key).with_suffix(".lock"), timeout=LOCK_SECONDS), False
        # `store` says what is wrong with the folder.
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            # Others could put a link in the lock's place: filelock empties what it opens.
            if _doubt(os.stat(self.folder), self.folder) is None:
                lock.acquire()
                held = True
        try:
            yield
        finally:
            if held:
                lock.release()

    def _path(self, stem: str, key: str) -> Path:
        return self.folder / f"{stem}-{key[:32]}.cubin"

    def _warn(self, reason: str) -> None:
        if self.folder in _warned:
            return
        _warned.add(self.folder)
        warnings.warn(
            f"kbit compiles its CUDA kernels anew in every process, since the cache in {self.folder} cannot "
            f"be used: {reason}. Set KBIT_CACHE to a folder of your own.",
            stacklevel=4,
        )


def _parse(content: bytes, key: str) -> Entry | None:
    """The entry in a file's bytes; None where they are damaged or belong to another key."""
    try:
        length, magic = TRAILER.unpack(content[-TRAILER.size :])
        text = content[-TRAILER.size - length : -TRAILER.size]
        about = json.loads(text)
        cubin = content[: about["length"]]
        whole = len(content) == len(cubin) + length + TRAILER.size
        if (
            magic == MAGIC
            and whole
            and (about["key"], about["sha256"]) == (key, hashlib.sha256(cubin).hexdigest())
        ):
            return Entry(cubin, about["log"], about["seconds"])
    except (struct.error, ValueError, KeyError, TypeError):
        pass
    return None


def _doubt(status: os.stat_result, path: Path) -> str | None:
    """Why somebody else may have put this there; None where only the user or root may have."""
    if not hasattr(os, "geteuid"):  # Windows: the user's profile is private
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o002:
        return f"everybody may write to {path}"
    return None
