"""Names of GPU architectures: "80", "89", "90a", as in sm_90a."""

from __future__ import annotations

import re

from kbit.backends.cuda.compiler.errors import UnsupportedArchError

# cp.async and the bfloat16 tensor-core instructions, which every kernel uses, came with it.
OLDEST_ARCH = 80
FIRST_WITH_LETTER = 90


def canonical_arch(arch: str) -> str:
    """ "sm_90a", "90a" and "9.0a" as "90a".

    Raises:
        UnsupportedArchError: it is no architecture's name, or older than sm_80.
    """
    match = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)([af]?)", arch.strip().lower())
    if match is None:
        raise UnsupportedArchError(
            f"arch {arch!r} is no GPU architecture. Write it as 80, 89, 90a or 100a "
            f"(`nvidia-smi --query-gpu=compute_cap --format=csv` prints it as 8.0, 8.9, ...)."
        )
    number = int(match[1] + match[2])
    if number < OLDEST_ARCH:
        raise UnsupportedArchError(
            f"arch {arch!r}: kbit's CUDA kernels need sm_{OLDEST_ARCH} or newer (A100, RTX 30 and later). "
            f"On this GPU, use KBIT_BACKEND=reference."
        )
    return f"{number}{match[3]}"


def arch_of(major: int, minor: int) -> str:
    """Architecture to compile for, given a device's compute capability; (9, 0) is "90a".

    From Hopper on, the "a" unlocks what only that very chip has (wgmma, setmaxnreg); the cubin then runs
    nowhere else, which is right for one compiled where it runs.

    Raises:
        UnsupportedArchError: older than sm_80.
    """
    return as_on_chips(canonical_arch(f"{major}{minor}"))


def as_on_chips(arch: str) -> str:
    """A canonical architecture as `arch_of` has it: of "90" and "100f" kbit would load nothing."""
    number = arch.rstrip("af")
    return f"{number}a" if int(number) >= FIRST_WITH_LETTER else arch


def require_known(arch: str, known: tuple[str, ...], compiler: str, remedy: str) -> None:
    """Check that a compiler's version knows an architecture.

    Args:
        arch: canonical.
        known: numbers without letter, such as ("80", "90").

    Raises:
        UnsupportedArchError: it does not.
    """
    if arch.rstrip("af") not in known:
        raise UnsupportedArchError(
            f"{compiler} cannot compile for sm_{arch}; it knows {', '.join(known)}. {remedy}"
        )
