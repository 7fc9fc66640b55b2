"""stream.cu's machine code: nothing is overwritten in a ring that a warp may still be about to read.

Shared memory is loaded in a warp's order, but the copy engine does not wait for loads that are queued. A load
is past it if an instruction in front of the copy has read what it gave. No sanitizer sees that one was not,
and runs do by chance alone (test_cuda_shared.py): what the compiler made of the source shows it. See
after_loads in common.cuh.
(grouped.cu has activations in shared memory, too, whose loads look the same and may be queued.)
"""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbit.backends.cuda.compiler import CompiledKernel, compile_many
from kbit.backends.cuda.variants import all_specs

if sys.platform != "linux":
    pytest.skip("NVIDIA publishes its disassembler for Linux", allow_module_level=True)

nvidia = pytest.importorskip("nvidia", reason="nvidia-cuda-nvdisasm is not installed")

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
INSTRUCTION_BYTES = 16
WIDTH = {".64": 2, ".128": 4}  # registers


def instructions(code: str) -> Iterator[tuple[str, list[str]]]:
    """(name, operands) of nvdisasm's lines."""
    for name, operands in INSTRUCTION.findall(code):
        yield name, operands.split(", ")


def registers(name: str, operand: str) -> set[int]:
    """Numbers of the registers of an operand; of a matrix, of all that it may have."""
    found = {int(number) for number in re.findall(r"\bR(\d+)\b", operand)}
    return {number + i for number in found for i in range(4)} if name.startswith("HMMA") else found


def queued_at_copies(code: str) -> list[str]:
    """Loads from shared memory that nothing had read when the copy engine was asked; since the last wait."""
    queued: dict[str, set[int]] = {}
    found, waited = [], False
    for number, (name, operands) in enumerate(instructions(code)):
        if "PHASECHK" in name:
            queued, waited = {}, True
        if not queued and not name.startswith("LDS"):
            continue
        has_result = not name.startswith(("ST", "SYNCS", "UBLKCP"))
        read = {each for operand in operands[has_result:] for each in registers(name, operand)}
        queued = {load: results for load, results in queued.items() if not results & read}
        if name.startswith("LDS"):
            (first,) = registers(name, operands[0])
            width = next((count for suffix, count in WIDTH.items() if name.endswith(suffix)), 1)
            queued[f"{number}: {name} {', '.join(operands)}"] = set(range(first, first + width))
        if name.startswith("UBLKCP") and waited:
            found += queued
    return found


def disassembler(folder: Path) -> Path:
    """A copy that may be run: not every installer keeps the permission."""
    found = [file for root in nvidia.__path__ for file in Path(root).glob("*/bin/nvdisasm")]
    assert found, "nvidia-cuda-nvdisasm has no nvdisasm"
    copy = folder / "nvdisasm"
    copy.write_bytes(found[0].read_bytes())
    copy.chmod(0o755)
    return copy


def code_of(cubin: bytes) -> bytes:
    """A kernel's instructions: the section .text.* of an ELF file of 64 bits."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    names_at = sections[names][4]
    (found,) = (one for one in sections if cubin[names_at + one[0] :].startswith(b".text."))
    return cubin[found[4] : found[4] + found[5]]


def disassembled(nvdisasm: Path, codes: list[bytes], file: Path) -> list[str]:
    """What each is in words, by one run: to begin with, nvdisasm takes most of a second."""
    file.write_bytes(b"".join(codes))
    command = [nvdisasm, "--binary", "SM90a", file]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = [line for line in lines if INSTRUCTION.search(line)]
    ends = list(itertools.accumulate(len(code) // INSTRUCTION_BYTES for code in codes))
    assert len(lines) == ends[-1]
    return ["\n".join(lines[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def test_loads_of_a_ring_are_done_before_it_is_filled_again(tmp_path):
    specs = [spec for spec in all_specs("90a") if spec.source == "stream.cu"]
    specs = [spec for spec in specs if not dict(spec.config)["bf16"]]
    assert len(specs) > 50
    kernels = compile_many([(spec, "90a") for spec in specs])
    codes = [code_of(kernel.cubin) for kernel in kernels if isinstance(kernel, CompiledKernel)]
    assert len(codes) == len(specs), kernels
    complaints = []
    for spec, code in zip(specs, disassembled(disassembler(tmp_path), codes, tmp_path / "code"), strict=True):
        assert "UBLKCP" in code
        assert "PHASECHK" in code
        complaints += [f"{spec.name}: {load}" for load in queued_at_copies(code)]
    assert not complaints, "\n".join(complaints)


CODE = """
        /*2950*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR32+0x20080], R3 ;
        /*29a0*/                   LDS.128 R4, [R0+UR26] ;
        /*29b0*/                   LDS R21, [R3+UR26] ;
        /*29c0*/                   REDUX.OR UR11, R21 ;
        /*29d0*/              @P0  LDS R30, [R81+UR26+0xa60] ;
        /*29e0*/                   HMMA.16816.F32 R40, R4, R14, R48 ;
        {between}
        /*4040*/                   UBLKCP.S.G [UR26], [UR12], UR14 ;
        /*4050*/                   SHF.R.U32.HI R3, RZ, R48, R30 ;
"""


@pytest.mark.parametrize(
    ("between", "queued"),
    [("", ["4: LDS R30, [R81+UR26+0xa60]"]), ("/*29f0*/ LOP3.LUT R9, R30, R8, RZ, 0xc0, !PT ;", [])],
)
def test_a_load_behind_the_one_that_was_waited_for_is_seen(between, queued):
    assert queued_at_copies(CODE.format(between=between)) == queued
