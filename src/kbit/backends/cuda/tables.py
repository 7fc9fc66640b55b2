"""Measured choices of kernels: one JSON file per GPU, written by `kbit tune`.

A file is for the GPU of its name alone. The user's own, in the cache folder, comes before the one in the
package (`tables/`); a file that is damaged, or of another GPU, is one warning and not used. Rows say what was
fastest, not what is legal: `kbit.backends.cuda.preference.decide` asks that of every row again.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kbit.backends.cuda import driver
from kbit.backends.cuda.compiler import cubin_folder
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.backends.cuda.wgmma_config import TOKENS, Tiling
from kbit.format.codebook import SUPPORTED_BITS
from kbit.format.errors import KbitError
from kbit.format.strict_json import parse_json

VERSION = 1
SHIPPED = Path(__file__).parent / "tables"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
KERNELS = ("stream", "wgmma", "mma", "cublas")  # of one weight; products of experts have no table
# A row also serves fewer tokens, down to half: the plan for 8192 tokens says nothing of 65.
_REACH = 2
_MOST_BYTES = 16 * 2**20
_LARGEST = 2**31 - 1


class TableError(KbitError):
    """A file is no table of measured choices."""


@dataclass(frozen=True)
class Problem:
    """y[M, N] = x[M, K] @ W^T but for M; `gated` means that W holds N / 2 gates and as many ups."""

    out_features: int
    in_features: int
    bits: int
    gated: bool
    dtype: str

    @classmethod
    def of(cls, weight: WeightShape, dtype: str) -> Problem:
        """The problem of a weight and activations of a dtype, on any GPU."""
        return cls(weight.out_features, weight.in_features, weight.bits, weight.gated, dtype)

    def weight_on(self, device: driver.DeviceLimits) -> WeightShape:
        """Its weight on a GPU."""
        return WeightShape(self.out_features, self.in_features, self.bits, self.gated, device)


@dataclass(frozen=True)
class Row:
    """The fastest of the kernels that were measured on a problem with `m` tokens.

    `tiling` is of wgmma's launch, None for other kernels. Times are medians in microseconds. `runner_up` is
    None if no other kernel may take the problem.
    """

    m: int
    kernel: str
    tiling: Tiling | None
    us: float
    runner_up: str | None
    runner_up_us: float | None


@dataclass(frozen=True, eq=False)
class Table:
    """A file's rows, for each problem ascending in m, and the tokens of wgmma's blocks that competed."""

    file: str
    device: driver.DeviceLimits
    rows: Mapping[Problem, tuple[Row, ...]]
    tokens: tuple[int, ...]

    def row(self, m: int, problem: Problem) -> Row | None:
        """The row of the nearest measured number of tokens from m on; None if that is over twice m.

        Without rows of a 16-bit dtype those of the other count: kernels for it differ in an instruction.
        """
        for dtype in (problem.dtype, *DTYPES):
            key = replace(problem, dtype=dtype)
            if key in self.rows:
                return next((row for row in self.rows[key] if m <= row.m <= _REACH * m), None)
        return None


def slug(gpu: str) -> str:
    """Stem of the file of a GPU: "nvidia-h200" of "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"


def user_file(gpu: str) -> Path:
    """Where `kbit tune` writes and tables are looked for first."""
    return cubin_folder().parent / "tables" / f"{slug(gpu)}.json"


def files_of(gpu: str) -> tuple[Path, Path]:
    """Where tables of a GPU are looked for, the user's first; they need not exist."""
    return user_file(gpu), SHIPPED / f"{slug(gpu)}.json"


@functools.cache
def for_device(index: int) -> tuple[Table, ...]:
    """The tables of a device, the user's first; read once, at the first product.

    Raises:
        DriverError: no driver, or no such device.
    """
    gpu = driver.device_name(index)
    return load_all(files_of(gpu), driver.device_limits(index))


def load_all(files: tuple[Path, ...], device: driver.DeviceLimits) -> tuple[Table, ...]:
    """The tables among the files that exist and are of such a device; others are a warning each."""
    found = []
    for file in files:
        try:
            table = load(file)
            if table is None:
                continue
            if table.device != device:
                raise TableError(f"it was made on {table.device}, this is {device}")
        except (TableError, OSError) as error:
            warnings.warn(
                f"kbit estimates which CUDA kernel is fastest, since the table of measurements {file} cannot "
                f"be used: {error}. Remove it, or make it again: kbit tune --fresh.",
                stacklevel=3,
            )
            continue
        found.append(table)
    return tuple(found)


def load(file: Path) -> Table | None:
    """The table in a file; None if there is no such file.

    Raises:
        TableError: the file holds something else.
        OSError: it cannot be read.
    """
    if not file.exists():
        return None
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        raise TableError(f"it is not a file of at most {_MOST_BYTES >> 20} MB")
    return parse(file.read_bytes(), str(file))


def parse(content: bytes, file: str) -> Table:
    """The table in a file's content.

    Raises:
        TableError: it is none.
    """
    try:
        data = parse_json(content)
    except ValueError as error:
        raise TableError(f"it is not JSON ({error})") from None
    data = _object(data, "the file")
    if data.get("version") != VERSION:
        raise TableError(f"version must be {VERSION}, got {data.get('version')!r}")
    about = _object(data.get("device"), "device")
    device = driver.DeviceLimits(
        _integer(about, "multiprocessors"), _integer(about, "shared_bytes"), _text(about, "arch")
    )
    items = data.get("rows")
    if not isinstance(items, list):
        raise TableError(f"rows must be a list, got {type(items).__name__}")
    rows: dict[Problem, dict[int, Row]] = {}
    for number, item in enumerate(items):
        try:
            problem, row = read_row(item)
        except TableError as error:
            raise TableError(f"row {number}: {error}") from None
        if rows.setdefault(problem, {}).setdefault(row.m, row) is not row:
            raise TableError(f"row {number}: there is one of {problem}, m={row.m} already")
    ordered = {problem: tuple(found[m] for m in sorted(found)) for problem, found in rows.items()}
    return Table(file, device, ordered, _tokens(data.get("tokens")))


def read_row(item: object) -> tuple[Problem, Row]:
    """A row of the file.

    Raises:
        TableError: a field is missing, of another type, or out of range.
    """
    item = _object(item, "it")
    bits, gated = _integer(item, "bits"), _flag(item, "gated")
    dtype, kernel = _text(item, "dtype"), _text(item, "kernel")
    for name, value, known in (
        ("bits", bits, SUPPORTED_BITS),
        ("dtype", dtype, tuple(DTYPES)),
        ("kernel", kernel, KERNELS),
    ):
        if value not in known:
            raise TableError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
    tiling = _tiling(_object(item.get("plan"), "plan")) if kernel == "wgmma" else None
    us, runner_up, runner_up_us = _microseconds(item, "us"), None, None
    if item.get("runner_up") is not None:
        runner_up, runner_up_us = _text(item, "runner_up"), _microseconds(item, "runner_up_us")
        if us > runner_up_us:
            raise TableError(f"{kernel} with {us} us is slower than its runner-up with {runner_up_us}")
    problem = Problem(_integer(item, "out_features"), _integer(item, "in_features"), bits, gated, dtype)
    return problem, Row(_integer(item, "m"), kernel, tiling, us, runner_up, runner_up_us)


def write_row(problem: Problem, row: Row) -> dict[str, Any]:
    """The object that `read_row` reads."""
    return {
        **asdict(problem),
        "m": row.m,
        "kernel": row.kernel,
        "plan": {} if row.tiling is None else row.tiling._asdict(),
        "us": row.us,
        "runner_up": row.runner_up,
        "runner_up_us": row.runner_up_us,
    }


def _tokens(value: object) -> tuple[int, ...]:
    if value is None:
        return TOKENS
    if not isinstance(value, list):
        raise TableError(f"tokens must be a list, got {type(value).__name__}")
    return tuple(_whole(one, "tokens") for one in value)


def _tiling(plan: dict[str, Any]) -> Tiling:
    plan = Tiling._field_defaults | plan
    return Tiling(
        tokens=_integer(plan, "tokens"),
        cluster=_integer(plan, "cluster"),
        rows=_integer(plan, "rows"),
        multicast=_flag(plan, "multicast"),
        narrow=_flag(plan, "narrow"),
    )


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{name} must be an object, got {type(value).__name__}")
    return value


def _integer(item: Mapping[str, Any], name: str) -> int:
    return _whole(item.get(name), name)


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise TableError(f"{name} must be a whole number from 1 to 2^31 - 1, got {value!r:.40}")
    return value


def _flag(item: Mapping[str, Any], name: str) -> bool:
    value = item.get(name)
    if not isinstance(value, bool):
        raise TableError(f"{name} must be true or false, got {value!r:.40}")
    return value


def _microseconds(item: Mapping[str, Any], name: str) -> float:
    value = item.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise TableError(f"{name} must be a positive number, got {value!r:.40}")
    return value


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise TableError(f"{name} must be a string, got {value!r:.40}")
    return value
