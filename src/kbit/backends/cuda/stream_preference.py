"""Which launch of csrc/stream.cu is fastest, by measurements on an H200 (132 multiprocessors).

`groups` are of 256 columns of the weight, `share` its row tiles for each multiprocessor. Wide groups are of
512 columns: fewer steps, and sums to hand over, for as many instructions that multiply.
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
        wide: groups of 8 tiles instead of 4.
    """

    workers: int
    stages: int
    blocks: int = 1
    compiled_for: int = 16
    cluster: int = 1
    wide: bool = False


def choose(available: list[Config], m: int, groups: int, share: float, bits: int) -> tuple[Wanted, Config]:
    """What to launch for m tokens, and the nearest of the available configurations."""
    wanted = _by_shape(m, groups, share, bits)
    if any(config.split for config in available):
        wanted = _in_clusters(m, groups, share, bits) or wanted
    if any(config.wide for config in available):
        wanted = _in_wide_groups(m, groups, share, bits) or wanted
    kinds = (wanted.cluster > 1, wanted.wide)
    return wanted, _nearest([config for config in available if (config.split, config.wide) == kinds], wanted)


def _by_shape(m: int, groups: int, share: float, bits: int) -> Wanted:
    """What was fastest on an H200 for 14 shapes at 4 and 5 bits, 5 at 2 and 3: behind a norm, as in models.

    Two blocks, or one beside the next kernel's, need 96 registers or fewer. One stage where there are few
    row tiles: weights that are fetched early come before the activations, which are waited for.
    """
    if m == 1:
        if groups <= 8 and not (bits == 5 and share > 4):
            return Wanted(8, 2, blocks=2 if share > 1 else 1)
        if groups <= 16 and 1 < share <= 2 and bits > 2:
            return Wanted(8, 1, blocks=2, compiled_for=20)
        if 16 < groups <= 20:
            return Wanted(20, 1, compiled_for=20)
        pairs = share > 4 if groups <= 16 else 20 < groups <= 64 and share > 1
        pairs = pairs and (bits == 4 or (bits == 5 and share <= 2))
        return Wanted(8, 2, blocks=2) if pairs else Wanted(16, 2)
    if m <= 4:
        if groups <= 8:
            if (m == 2 or bits == 5) and 1 < share <= 2:
                return Wanted(8, 1, blocks=2)
            return Wanted(8, 1 if share <= 0.5 else 2)
        if groups <= 16:
            if share <= 0.5 and m > 2:
                return Wanted(16, 1)
            return Wanted(8, 1, blocks=2) if 1 < share <= 2 else Wanted(8 if share <= 1 else 16, 2)
        if groups <= 20:
            return Wanted(10, 1, compiled_for=20)
        return Wanted(8, 2, blocks=2) if groups <= 64 and share > 1 else Wanted(16, 2)
    if m <= 8:
        if groups <= 8:
            stages = 1 if bits == 5 and share <= 2 else 2
            return Wanted(8, stages, compiled_for=12 if share > 4 else 16)
        return Wanted(16, 1 if groups <= 40 and 1 < share <= 4 else 2)
    return _by_groups(groups)


def _in_clusters(m: int, groups: int, share: float, bits: int) -> Wanted | None:
    """Where splitting K over a cluster was faster on an H200: x is read, and swapped, in fewer places.

    2048 x 4096 by 8 tokens, 4 bits: 4.3 us in blocks, 3.9 in pairs; 1024 x 8192: 6.0, 4.4 in fours. With more
    than 8 tokens wgmma.cu is faster still, and 2048 columns are too few for more than one token.
    """
    if share > 4 or groups <= 4 or (groups <= 8 and m > 1):
        return None
    if m == 1:
        # 512 x 2048: 1.8 us in pairs of blocks, 1.95 without; 2048 x 4096 at 5 bits: 3.0, and 3.3.
        few = groups <= 8 and share <= 0.5
        short = bits == 5 and 8 < groups <= 16 and 0.5 < share <= 1
        return Wanted(8, 2, cluster=2) if few or short else None
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


def _in_wide_groups(m: int, groups: int, share: float, bits: int) -> Wanted | None:
    """Where groups of 512 columns were faster on an H200, for up to 4 tokens.

    8192 x 28672, one token: 24.5 us, with wide groups 21.3 at 2 bits, 27.6 and 26.4 at 3; at 4 bits, where
    memory sets the speed, 30.5 and 30.2; at 5, for which fewer workers have room, 37.9 and 38.6.
    """
    if m > 4 or groups <= 8 or (m == 1 and bits == 5):
        return None
    # 2048 x 4096 behind a norm, one and four tokens: 3.7 and 4.2 us, otherwise 3.8 and 4.4.
    short = groups <= 16 and 0.5 < share <= 1
    if m == 1:
        few = short or (groups > 20 and share <= 0.5)
        many = share > 0.9 if bits == 2 else groups > 20 and share > 4 and bits == 3
    else:
        few, many = short, share > (4 if bits == 4 and groups > 16 else 2)
    if not few and not many:
        return None
    return Wanted(8 if m > 1 and 20 < groups <= 32 and share <= 4 else 16, 2, wide=True)


def _by_groups(groups: int) -> Wanted:
    """What to use where nothing has been measured."""
    # Between 17 and 24 groups, three passes of a narrow block keep fewer activations in flight.
    narrow = groups <= 8 or 16 < groups <= 24
    return Wanted(8, 2, compiled_for=8) if narrow else Wanted(16, 2)


def _nearest(available: list[Config], wanted: Wanted) -> Config:
    def distance(config: Config) -> tuple[bool, int, int]:
        neither = config.workers not in (wanted.compiled_for, wanted.workers)
        return neither, abs(config.stages - wanted.stages), abs(config.workers - wanted.compiled_for)

    return min(available, key=distance)
