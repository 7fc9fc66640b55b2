"""Which launch of csrc/stream.cu is fastest, by measurements on an H200 (132 multiprocessors).

`groups` are of 256 columns of the weight, `share` its row tiles for each multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from kbit.backends.cuda.stream_config import Config


@dataclass(frozen=True)
class Wanted:
    """What would be fastest.

    Attributes:
        workers: warps that split K, at most.
        stages: groups of tiles that a worker has in flight.
        blocks: blocks at once on a multiprocessor.
        compiled_for: most workers of the kernel to use; fewer leave each more registers.
        cluster: blocks that split K before their workers do.
    """

    workers: int
    stages: int
    blocks: int = 1
    compiled_for: int = 16
    cluster: int = 1


def choose(available: list[Config], m: int, groups: int, share: float, bits: int) -> tuple[Wanted, Config]:
    """What to launch for m tokens, and the nearest of the available configurations."""
    wanted = _by_groups(m, groups) if bits == 5 else _by_shape(m, groups, share)
    if any(config.split for config in available):
        wanted = _in_clusters(m, groups, share) or wanted
    return wanted, _nearest([config for config in available if config.split == (wanted.cluster > 1)], wanted)


def _by_shape(m: int, groups: int, share: float) -> Wanted:
    """What was fastest for 14 shapes (k = 4) on an H200.

    Two blocks, or one beside the next kernel's, need 96 registers or fewer. One stage where there are few
    row tiles: weights that are fetched early come before the activations, which are waited for.
    """
    if m == 1:
        if groups <= 8:
            return Wanted(8, 2, blocks=2 if share > 2 else 1)
        if groups <= 16 and 1 < share <= 2:
            return Wanted(8, 1, blocks=2, compiled_for=20)
        if 16 < groups <= 20:
            return Wanted(20, 1, compiled_for=20)
        return Wanted(8, 2, blocks=2) if 20 < groups <= 64 and share > 1 else Wanted(16, 2)
    if m <= 4:
        if groups <= 8:
            return Wanted(8, 1 if share <= 0.5 else 2, blocks=2 if share > 4 else 1)
        if groups <= 16:
            if share <= 0.5 and m > 2:
                return Wanted(16, 1)
            return Wanted(8, 1, blocks=2) if 1 < share <= 4 else Wanted(8 if share <= 1 else 16, 2)
        if groups <= 20:
            return Wanted(10, 1, compiled_for=20)
        return Wanted(8, 2, blocks=2) if groups <= 64 and share > 1 else Wanted(16, 2)
    if m <= 8:
        if groups <= 8:
            return Wanted(8, 2, compiled_for=12 if share > 2 else 16)
        return Wanted(16, 1 if groups <= 40 and 1 < share <= 8 else 2)
    return _by_groups(m, groups)


def _in_clusters(m: int, groups: int, share: float) -> Wanted | None:
    """Where splitting K over a cluster was faster on an H200: x is read, and swapped, in fewer places.

    2048 x 4096 by 8 tokens, 4 bits: 4.3 us in blocks, 3.9 in pairs; 1024 x 8192: 6.0, 4.4 in fours. With more
    than 8 tokens wgmma.cu is faster still, and 2048 columns are too few for more than one token. At 5 bits,
    with a larger table in each block and one stage, it was slower by up to 30%.
    """
    if share > 4 or groups <= 4 or (groups <= 8 and m > 1):
        return None
    if m == 1:
        # 2048 x 512: 1.8 us in pairs of blocks, 1.95 without.
        pairs = share <= 0.5 if groups > 20 or groups <= 8 else groups <= 16 and 0.5 < share <= 1
        return Wanted(8, 2, cluster=2) if pairs else None
    if m <= 4:
        if groups <= 20:
            return None
        if share <= 0.5:
            return Wanted(8, 2, cluster=2)
        if m <= 2:
            return None
        return Wanted(16, 2, cluster=2) if groups > 40 else Wanted(8, 2, blocks=2, cluster=2)
    if share <= 0.5:
        return Wanted(8, 2, cluster=2 if groups <= 20 else 4)
    if groups > 40:
        return Wanted(16, 2, cluster=2 if share > 2 else 4)
    if groups > 20:
        return Wanted(8, 2, blocks=2, cluster=4)
    return Wanted(16, 2, cluster=2) if share <= 1 else None


def _by_groups(m: int, groups: int) -> Wanted:
    """What to use where look-up tables are large, or nothing has been measured."""
    # Between 17 and 24 groups, three passes of a narrow block keep fewer activations in flight.
    narrow = (groups <= 8 and m != 2) or (16 < groups <= 24 and m > 2)
    return Wanted(8, 2, compiled_for=8) if narrow else Wanted(16, 2)


def _nearest(available: list[Config], wanted: Wanted) -> Config:
    def distance(config: Config) -> tuple[bool, int, int]:
        neither = config.workers not in (wanted.compiled_for, wanted.workers)
        return neither, abs(config.stages - wanted.stages), abs(config.workers - wanted.compiled_for)

    return min(available, key=distance)
