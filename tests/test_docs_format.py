"""docs/format.md against the library: its example, its codebooks, its rules written out a second time."""

import json
import re

import numpy as np
import pytest
import torch

import kbit
from docs_blocks import ROOT, blocks_of
from kbit.format import CODEBOOKS, SUPPORTED_BITS, QuantizationPolicy, bitplanes
from kbit.format.codebook import BLOCK_SIZE
from kbit.format.layout import to_tiled
from kbit.format.policy import FORMAT_VERSION
from kbit.quantizers.scale_search import WINDOWS

PAGE = ROOT / "docs" / "format.md"
TEXT = PAGE.read_text()
EXAMPLE, CONFIG = (json.loads(block.text) for block in blocks_of(PAGE) if block.language == "json")


@pytest.fixture(scope="module")
def example():
    w = (torch.arange(EXAMPLE["in_features"], dtype=torch.float32)[None] - 16) / 16
    return kbit.quantize(w, bits=EXAMPLE["bits"], search=False)


def words(values: torch.Tensor) -> list[str]:
    return [f"{value & 0xFFFFFFFF:08x}" for value in values.flatten().tolist()]


def test_the_example_is_what_the_library_makes(example):
    codes = bitplanes.unpack(example.packed, EXAMPLE["bits"])[0, : EXAMPLE["in_features"]]
    assert codes.tolist() == EXAMPLE["codes"]
    assert words(example.packed) == EXAMPLE["packed_words"]
    assert example.packed.numpy().tobytes().hex(" ") == EXAMPLE["packed_bytes"]
    assert example.absmax.numpy().tobytes().hex(" ") == EXAMPLE["absmax_bytes"]
    assert example.scale.item() == EXAMPLE["scale"]
    decoded = kbit.dequantize(example)[0]
    assert {place: decoded[int(place)].item() for place in EXAMPLE["decoded"]} == EXAMPLE["decoded"]


def test_the_examples_tile_is_what_kernels_read(example):
    tile = words(to_tiled(example.packed, example.absmax, EXAMPLE["bits"], EXAMPLE["in_features"]))
    nonzero = {str(place): word for place, word in enumerate(tile) if int(word, 16)}
    assert nonzero == EXAMPLE["tile_words"]


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_tiles_are_as_the_page_says(bits):
    torch.manual_seed(bits)
    q = kbit.quantize(torch.randn(16, 64), bits=bits)
    tile = [int(word, 16) for word in words(to_tiled(q.packed, q.absmax, bits, 64))]
    codes = bitplanes.unpack(q.packed, bits).tolist()
    count, places = {
        2: (8, "8 (j div 2) + 2 (j mod 2) | 4"),
        3: (4, "8j | 3"),
        4: (4, "8j | 4"),
        5: (4, "8j | 4"),
    }[bits]
    assert f"| {bits} | {count} | {places} |" in TEXT
    vector = 2 if bits < 4 else 4
    expected = [0] * (32 * bits + 8)
    for lane in range(32):
        place = [vector * lane + w if w < vector else 32 * vector + lane for w in range(bits)]
        for pair in range(16):
            j, h, g, t = pair // 4, pair % 4, lane // 4, lane % 4
            row, column = g + 8 * (h & 1), 16 * j + 8 * (h >> 1) + 2 * t
            first, second = codes[row][column : column + 2]
            if bits == 5:
                signs = (first >> 4, second >> 4)
                expected[place[4]] |= signs[0] << 15 - pair | signs[1] << 31 - pair
                first, second = (
                    (15 - code % 16) if sign else code
                    for code, sign in zip((first, second), signs, strict=True)
                )
            if pair < bits * count:
                i = pair % count
                low, distance = (i // 2 * 8 + i % 2 * 2, 4) if bits == 2 else (i * 8, 3 if bits == 3 else 4)
                expected[place[pair // count]] |= first << low | second << low + distance
                continue
            value = first | second << bits
            for w in range(bits):
                expected[place[w]] |= (value >> 2 * w & 3) << 8 * (pair - 12) + 6
    for g in range(8):
        for r in range(2):
            for b in range(2):
                expected[32 * bits + g] |= int(q.absmax[g + 8 * r, b]) << 8 * (2 * r + b)
    assert tile == expected


@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_codebooks_are_those_of_the_library(name, bits):
    row = re.search(rf"^\| {name} \| {bits} \| (`.*`) \|$", TEXT, re.M)
    read = [(float.fromhex if "x" in level else float)(level) for level in re.findall(r"`([^`]+)`", row[1])]
    levels = np.array(read, np.float32)
    assert np.concatenate([-levels[::-1], levels]).tolist() == CODEBOOKS[name](bits).tolist()


def test_windows_are_those_of_the_library():
    for bits, (low, high) in WINDOWS.items():
        assert f"| {bits} | {low} to {high} |" in TEXT


def test_the_config_is_the_default_one():
    assert QuantizationPolicy().to_dict() == CONFIG
    for key in CONFIG:
        assert f"| `{key}` |" in TEXT
    assert f"Version {FORMAT_VERSION}." in TEXT
    assert BLOCK_SIZE == 32


def test_encoding_in_steps_is_the_librarys():
    torch.manual_seed(0)
    values = torch.cat([torch.rand(5000) * 40, torch.rand(5000) * 2.0**-9, torch.tensor([0.0, 31.0, 30.99])])
    v = np.clip(values.numpy(), 0, 31).astype(np.float64)
    with np.errstate(divide="ignore"):
        e = np.maximum(np.floor(np.log2(v)), -10) + 11
    byte = np.rint(v * 2.0 ** (15 - e)) + 16 * (e - 1)
    assert byte.astype(np.uint8).tolist() == kbit.format.e4m4.encode(values).tolist()
