"""How long launches of csrc/wgmma.cu take, where no table of measurements says so: estimates."""

from __future__ import annotations

import functools
import statistics

from kbit.backends.cuda import wgmma_config as config
from kbit.format.layout import TILE_COLUMNS


def alone(tiles: int, grid: int, cluster: int) -> int:
    """How many tiles one block computes alone, without splitting K; Problem::find_alone in wgmma.cuh.

    Those of full waves; or all, if clusters would need as many rounds for the rest as they have blocks.
    """
    whole = tiles // grid * grid
    return whole if cluster > 1 and (tiles - whole) * cluster <= (cluster - 1) * grid else tiles


def clocks(tiles: int, in_features: int, block: config.Config, tiling: config.Tiling, grid: int) -> float:
    """Estimated clocks: steps of K, bound by shared memory or tensor cores; ends of tiles; sums of clusters.

    Fitted to an H200's table, 14 layers at 4 and 5 bits by 1 to 8192 tokens: the choice takes 1% longer than
    the best on average. For experts, to its times of 8 to 512 of them by 16 to 2048 rows each.
    """
    if block.apart:
        return _apart_clocks(tiles, in_features, block, grid)
    tokens, teams, width = block.tokens, block.teams, block.columns // TILE_COLUMNS
    cluster, workers = tiling.cluster, grid // tiling.sharers
    steps, sums, ends = block.steps_of(in_features), 2500 + 30 * tokens, 1500.0 + 5 * tokens
    if block.rows == config.HALF_ROWS:  # two teams take turns
        step = width * max(190, (120 if block.bits < 5 else 140) + 2.1 * tokens)
        sums = 2500 + 15 * tokens + 150 * cluster
    elif block.rows == config.WIDE_ROWS:
        step, ends = 260 + 5.65 * tokens, 2500 + 8 * tokens
        sums = 3500 + 30 * tokens + 300 * cluster
    elif block.grouped:
        step, ends = width * (185 + 4 * tokens), 700 + 10.5 * tokens
    elif teams == 1 and width == 1:
        step = 200 + 3.56 * tokens
    else:
        step = width * ((240 if teams > 1 else 280) + 3.06 * tokens)
    if teams > 1:  # one hands its sums to the other
        sums, ends = sums + 300 + 2 * tokens, ends + 300 + 2 * tokens
    if block.multicast:
        step, ends = 0.98 * step, ends + 1000
    elif block.narrow:  # or a little less: measurements choose it
        step = 1.01 * step
    by_one, even = alone(tiles, grid, cluster), 2 * teams
    found = -(-by_one // workers) * (-(-steps // even) * even * step + ends)
    if by_one < tiles:
        found += -(-(tiles - by_one) // (grid // cluster)) * (-(-steps // cluster) * step + sums)
    return found


def _apart_clocks(tiles: int, in_features: int, block: config.Config, grid: int) -> float:
    """Clocks of blocks whose two teams have tiles of their own; a team that is alone takes 0.6 of both's."""
    both = 285 + 8.7 * block.tokens + 40 * (block.bits - 4)
    pair = -(-in_features // TILE_COLUMNS) * both + 1600 + 8 * block.tokens
    rounds, rest = divmod(tiles, 2 * grid)
    return pair * (rounds + (rest > grid) + 0.6 * (0 < rest <= grid))


def clocks_of_experts(
    m: int,
    experts: int,
    row_blocks: int,
    in_features: int,
    block: config.Config,
    tiling: config.Tiling,
    grid: int,
) -> float:
    """Estimated clocks for m rows of experts that have so many row blocks each.

    How rows are dealt is not known. A router deals them nearly at random, a batch that was made for it
    evenly, which counts for a third here; or for all, where tiles may be too few to fill the machine. On an
    H200 choices take 0.4% longer than the best on average over 60 problems whose rows were dealt at random.
    Of a quarter they would take no longer, but 128 experts by 512 rows each, evenly, 12 and 14%.
    """
    evenly = experts * row_blocks * -(-m // (experts * block.tokens))
    found = clocks(evenly, in_features, block, tiling, grid)
    if experts * row_blocks < grid:
        return found
    at_random = round(experts * row_blocks * tiles_of_expert(m, experts, block.tokens))
    return (found + 2 * clocks(at_random, in_features, block, tiling, grid)) / 3


@functools.lru_cache(maxsize=4096)
def tiles_of_expert(m: int, experts: int, tokens: int) -> float:
    """Tiles of so many tokens that one of the experts has of m rows, dealt at random, as an expectation.

    Their numbers are nearly Poisson-distributed, nearly normal.
    """
    rows = m / experts
    of_expert = statistics.NormalDist(rows, rows**0.5)
    most = int(rows + 4 * rows**0.5)
    return 1.0 + sum(1 - of_expert.cdf(full + 0.5) for full in range(tokens, most + 1, tokens))
