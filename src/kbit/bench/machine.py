"""What a result was measured on; stands in every result file."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from kbit._version import __version__
from kbit.backends import cpu


def describe() -> dict[str, object]:
    """CPU, threads, versions and commit, as JSON values; of transformers None where it is not loaded."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "kbit": __version__,
        "torch": torch.__version__,
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": cpu.isa() if cpu.available() else None,
        "last_level_cache_mb": round(last_level_cache_bytes() / 2**20, 1),
    }


def cpu_model() -> str:
    """The processor's name, with its family and model where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(
        reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)])
    )
    name = fields.get("model name", platform.machine())
    known = "cpu family" in fields and "model" in fields  # not on Arm
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if known else name


def last_level_cache_bytes() -> int:
    """Size of the largest cache; 32 MiB where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes) or 32 * 2**20


def peak_resident_bytes() -> int | None:
    """Largest resident memory of this process so far; None where it is not told as Linux does."""
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def reset_gpu_peak(device: torch.device) -> None:
    """Count the most memory that is allocated on a GPU from now on; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def gpu_peak_bytes(device: torch.device) -> int | None:
    """Most memory that was allocated on a GPU since; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _commit() -> str | None:
    """Commit of the source tree this runs from, "+changes" where it differs; None outside a checkout.

    An environment or a copy that lies in the checkout of another project is not part of that.
    """
    root = Path(__file__).parent
    try:
        _git(root, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", str(root.parent))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
