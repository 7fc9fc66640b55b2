"""The configurations of csrc/wgmma.cu: what is compiled, and the shared memory that it takes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kbit.backends.cuda import operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format import nvfp4_layout
from kbit.format.codebook import SUPPORTED_BITS
from kbit.format.layout import TILE_COLUMNS, TILE_ROWS

# Of a block, fixed at compile time. A step takes 3 clocks a token or more, and 140 to 200 beside. 88 are for
# 256 tokens, 85 for each of three blocks: 5120 x 2048 by these takes 11.5 us on an H100, by blocks of 96 12.
TOKENS = (16, 32, 48, 64, 80, 88, 96, 112, 128, 144, 160, 176, 192, 224, 256)
# Of experts, one team. Rows are dealt at random, and a tile of few takes as long as a full one: 128 experts
# of 1536 x 2048, gated, by 128 rows on average take 203 us on an H200 by tiles of 144 tokens, by 128 242.
GROUPED_TOKENS = (32, 128, 144, 192, 256)
HALF_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128)  # of blocks of 64 rows, two teams of one warpgroup each
# The same for experts whose tiles of 128 rows leave half of the machine idle: 8 of 512 x 2048 by 64 rows each
# take 7.1 us on an H200, by tiles of 128 rows 8.0.
GROUPED_HALF_TOKENS = (32, 64)
# Of blocks of 64 rows that may have steps of one tile where others have two, see Config.columns: where K and
# the weight are small, the first step is there sooner. 512 x 2048 by 1024 tokens take 6.9 us on an H100, not
# 7.3; 4096 x 2048 by 128 tokens 7.0, not 6.8.
NARROW_TOKENS = (64,)
# Of blocks of 192 rows, where tiles of 128 leave much of the last wave empty: 10240 x 2048 by 256 tokens
# take 18.8 us on an H200, by tiles of 128 rows 22.1.
WIDE_TOKENS = (96, 128, 192)
MULTICAST_TOKENS = (176, 256)  # of pairs of blocks that copy activations for each other
# Of blocks of two teams of two warpgroups each, which take turns at the steps. Not for experts.
TEAM_TOKENS = (16, 32, 48, 64, 80, 88, 96)
# Of blocks for experts of which each team has tiles of its own: the end of one's hides behind the other's
# steps. 512 experts of 1024 x 2048 by 40 rows on average take 287 us on an H200 by 48 tokens, with one team
# 341. Of 32 tokens from 4 bits on six steps in flight are too few.
APART_TOKENS = (16, 48, 64, 80, 96)
ROWS, HALF_ROWS, WIDE_ROWS = 128, 64, 192  # rows of W of a block
# Up to so many columns a block, two teams lose more by adding up at the end than they gain.
_FEW_COLUMNS = 16 * TILE_COLUMNS
SHARED_BYTES = 227 * 1024
MOST_STAGES = 12
# By tokens: where a cluster's sums have memory of their own, which saves a barrier.
_SUMS_BYTES = {16: 16 * 1024, 32: 24 * 1024, 64: 36 * 1024}
_UNIT_BYTES = 2048  # sums of 32 rows by 16 tokens
_STAGING_BYTES = 256  # for a token of y: two buffers of a warpgroup of 128 bytes each
_BARRIER_BYTES = 32
SCRATCH_BYTES = 272 + 16 * MOST_STAGES


class Tiling(NamedTuple):
    """What tells the launches of one problem apart.

    Attributes:
        tokens, rows: tokens, and rows of W, of a block.
        cluster: blocks that split K.
        multicast: whether two blocks have the same activations and copy them for each other.
        narrow: whether a step has one tile of columns where two are usual.
    """

    tokens: int
    cluster: int
    rows: int = ROWS
    multicast: bool = False
    narrow: bool = False

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What estimates tell apart less well than tokens and clusters."""
        return self.rows, self.multicast, self.narrow

    @property
    def sharers(self) -> int:
        """How many blocks have the same activations."""
        return 2 if self.multicast else 1

    def __str__(self) -> str:
        of_rows = "" if self.rows == ROWS else f" of {self.rows} rows"
        how = f"{' multicast' if self.multicast else ''}{' narrow' if self.narrow else ''}"
        return f"{self.tokens}x{self.cluster}{of_rows}{how}"


class Config(NamedTuple):
    """A compiled block.

    Attributes:
        bits: code width.
        tokens, rows: tokens, and rows of W, of a block.
        teams: groups with a warpgroup for every 64 rows, which share tiles or, see `apart`, do not.
        grouped: whether it multiplies experts.
        nvfp4: whether tiles are those of NVFP4.
        multicast: whether two blocks copy activations for each other.
        narrow: whether a step has one tile of columns in any case.
    """

    bits: int
    tokens: int
    teams: int = 1
    grouped: bool = False
    nvfp4: bool = False
    rows: int = ROWS
    multicast: bool = False
    narrow: bool = False

    def tiling(self, cluster: int) -> Tiling:
        """The tiling of launches of this block in clusters of so many."""
        return Tiling(self.tokens, cluster, self.rows, self.multicast, self.narrow)

    @property
    def apart(self) -> bool:
        """Whether each team has tiles of its own, and does not take turns with the other at the steps."""
        return self.grouped and self.teams > 1 and self.rows == ROWS

    @property
    def turns(self) -> int:
        """Teams that take turns at the steps of a tile."""
        return 1 if self.apart else self.teams

    @property
    def sums_bytes(self) -> int:
        """Memory for a cluster's sums alone; else they go where activations were. Teams apart have none."""
        return 0 if self.apart else _SUMS_BYTES.get(self.tokens, 0)

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return self.teams * self.rows // HALF_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup copies, the others multiply."""
        return 128 * (1 + self.warpgroups)

    @property
    def columns(self) -> int:
        """Columns of a step: those of two tiles, where decoding has more latency than products hide."""
        few = self.tokens <= (64 if self.warpgroups == 2 else 32)
        return 2 * TILE_COLUMNS if few and not self.narrow else TILE_COLUMNS

    def steps_of(self, in_features: int) -> int:
        """Steps that K takes; the blocks of a cluster share them."""
        return -(-in_features // self.columns)

    def splits(self, in_features: int, cluster: int) -> bool:
        """Whether every block of a cluster has steps of its own, and room for the sums it is sent."""
        if self.apart or self.steps_of(in_features) < cluster * self.teams:
            return False
        teams = self.teams if self.tokens > 16 else 1
        groups = -(-self.tokens // (16 * teams)) * teams  # of 16 tokens, kSumTokens in csrc/wgmma.cuh
        units = -(-groups * (self.rows // 32) // cluster)
        activations = stages(self) * self.tokens * self.columns * 2
        return cluster * units * _UNIT_BYTES <= (self.sums_bytes or activations)


def of_tiling(bits: int, tiling: Tiling, teams: int, grouped: bool, nvfp4: bool) -> Config:
    """The block that a launch runs.

    Launches are planned alike for k-bit weights and NVFP4, but four warpgroups lack registers for 96 tokens
    of NVFP4, so those get one team.
    """
    most = 1 if nvfp4 and tiling.rows == ROWS and tiling.tokens == TEAM_TOKENS[-1] else 2
    how = tiling.rows, tiling.multicast, tiling.narrow
    return Config(bits, tiling.tokens, min(teams, most), grouped, nvfp4, *how)


def blocks(bits: int, in_features: int, cluster: int, gated: bool) -> list[Config]:
    """The blocks that may be launched in clusters of so many.

    Blocks of gated weights have 128 rows: the copy engine takes multiples of 128 bytes, and two row tiles, or
    six, are none.
    """
    found = [Config(bits, tokens, best_teams(tokens, in_features, cluster)) for tokens in TOKENS]
    if not gated:
        half = [Config(bits, tokens, teams=2, rows=HALF_ROWS) for tokens in HALF_TOKENS]
        wide = [block for block in half if block.tokens in NARROW_TOKENS and block.columns > TILE_COLUMNS]
        found += half + [block._replace(narrow=True) for block in wide]
        found += [Config(bits, tokens, rows=WIDE_ROWS) for tokens in WIDE_TOKENS]
    if cluster == 1:
        found += [Config(bits, tokens, multicast=True) for tokens in MULTICAST_TOKENS]
    return found


def grouped_blocks(bits: int, gated: bool) -> list[Config]:
    """The blocks that may be launched for experts; those of gated weights have 128 rows, see `blocks`."""
    found = [Config(bits, tokens, grouped=True) for tokens in GROUPED_TOKENS]
    found += [Config(bits, t, 2, grouped=True) for t in (*APART_TOKENS, *((32,) if bits < 4 else ()))]
    if not gated:
        found += [Config(bits, tokens, 2, grouped=True, rows=HALF_ROWS) for tokens in GROUPED_HALF_TOKENS]
    return found


def best_teams(tokens: int, in_features: int, cluster: int) -> int:
    """The number of teams, 1 or 2, that is faster.

    Two: 4096 x 14336 by 16 tokens takes 13.2 us on an H200, with one team 14.9. One where a block has few
    steps: 2048 x 512 by 16 tokens in clusters of 8 takes 3.8 us with two teams, 3.4 with one.
    """
    return 2 if in_features > _FEW_COLUMNS * cluster and tokens in TEAM_TOKENS else 1


def _round(config: Config) -> int:
    """Tokens of y staged at a time; at 5 bits, fewer leave room for a fourth step in flight of 256 tokens."""
    few = config.tokens // config.turns <= 16 or (config.bits == 5 and config.tokens == 256)
    return 16 if few else 32


def _fixed_bytes(config: Config) -> int:
    outside = config.sums_bytes + list_bytes(config.bits, config.grouped)
    if config.bits in operands.HOLES:
        outside = max(0, outside - operands.HOLE_BYTES)
    staging = config.warpgroups * _round(config) * _STAGING_BYTES
    return operands.TABLE_BYTES + outside + staging + (SCRATCH_BYTES if config.grouped else 0)


def list_bytes(bits: int, grouped: bool) -> int:
    """Memory for the first rows of experts, and the row behind the last; whole units of a table's holes."""
    if not grouped:
        return 0
    unit = _UNIT_BYTES if bits in operands.HOLES else 16
    return -(-4 * (operands.MOST_EXPERTS + 1) // unit) * unit


def stage_bytes(tokens: int, rows: int, columns: int, tile_words: int) -> int:
    """Shared memory of a step in flight: activations and weights of so many columns, barriers."""
    tile = tokens * TILE_COLUMNS * 2 + rows // TILE_ROWS * 4 * tile_words
    return columns // TILE_COLUMNS * tile + _BARRIER_BYTES


def _stage_bytes(config: Config) -> int:
    words = operands.tile_words(config.bits, config.nvfp4)
    return stage_bytes(config.tokens, config.rows, config.columns, words)


@functools.cache
def stages(config: Config) -> int:
    """Steps in flight: as many as fit, the same number for each team."""
    fit = min(MOST_STAGES, (SHARED_BYTES - _fixed_bytes(config)) // _stage_bytes(config))
    return fit // config.teams * config.teams


@functools.cache
def shared_bytes(config: Config) -> int:
    """Shared memory of a block, which the constants of wgmma.cuh are checked against."""
    return _fixed_bytes(config) + stages(config) * _stage_bytes(config)


@functools.cache
def spec(config: Config, dtype: torch.dtype, symmetric: bool = True) -> KernelSpec:
    """The kernel of a configuration; `symmetric`: for codebooks that are, around 0."""
    return KernelSpec.make(
        "wgmma.cu",
        bits=config.bits,
        bf16=dtype == torch.bfloat16,
        tokens=config.tokens,
        rows=config.rows,
        multicast=config.multicast,
        teams=config.teams,
        apart=config.apart,
        columns=config.columns,
        stages=stages(config),
        round=_round(config),
        sums=config.sums_bytes,
        experts=operands.MOST_EXPERTS if config.grouped else 0,
        list_bytes=list_bytes(config.bits, config.grouped),
        scratch_bytes=SCRATCH_BYTES,
        shared_bytes=shared_bytes(config),
        **operands.nvfp4_config(config.nvfp4),
        **operands.codebook_config(config.bits, symmetric),
    )


def configs() -> list[Config]:
    """Every configuration that plans of kbit.backends.cuda.wgmma may choose."""
    dense: dict[Config, None] = {}
    for bits, nvfp4 in (*((bits, False) for bits in SUPPORTED_BITS), (nvfp4_layout.BITS, True)):
        for columns in (1, _FEW_COLUMNS + 1):  # few have one team
            for block in blocks(bits, columns, cluster=1, gated=False):
                dense[of_tiling(bits, block.tiling(1), block.teams, grouped=False, nvfp4=nvfp4)] = None
    grouped = [block for bits in SUPPORTED_BITS for block in grouped_blocks(bits, gated=False)]
    return [*dense, *grouped, *nvfp4_grouped_blocks()]


def nvfp4_grouped_blocks() -> list[Config]:
    """The blocks that may be launched for experts of NVFP4, which are never gated."""
    bits = nvfp4_layout.BITS
    return [of_tiling(bits, one.tiling(1), one.teams, True, True) for one in grouped_blocks(bits, False)]


def specs() -> list[KernelSpec]:
    """The kernels of all configurations."""
    return [
        spec(config, dtype, symmetric)
        for config in configs()
        for bits, symmetric in operands.CODES
        if bits == config.bits
        for dtype in operands.DTYPES
    ]
