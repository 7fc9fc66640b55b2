"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and what it counts, such as "1 shard" or "2 shards"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
