"""Every kernel that there is, compiled for every architecture that matters: no error, no register spill.

Needs no GPU. What is in the cache already is not compiled again; from an empty one all of it takes ten to
twenty minutes on two cores.
"""

from __future__ import annotations

import sys

import pytest

from kbit.backends.cuda.compiler import CompiledKernel, compile_many
from kbit.backends.cuda.variants import all_specs

ARCHS = ("80", "89", "90a", "100a", "120a")

if sys.platform == "darwin":
    pytest.skip("NVIDIA publishes no compiler for macOS", allow_module_level=True)


def complaint(arch: str, spec, outcome) -> str | None:
    if not isinstance(outcome, CompiledKernel):
        return str(outcome)
    if outcome.spill_bytes:
        spilled = f"spills {outcome.spill_bytes} bytes at {outcome.registers} registers"
        return f"{spec.name} for sm_{arch} {spilled}; loosen its launch bounds or hold less."
    return (
        None
        if outcome.registers
        else f"{spec.name} for sm_{arch}: the log tells no registers:\n{outcome.log}"
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_without_a_spill(arch):
    specs = all_specs(arch)
    assert specs
    assert len(set(specs)) == len(specs)
    outcomes = compile_many([(spec, arch) for spec in specs])
    complaints = [complaint(arch, *pair) for pair in zip(specs, outcomes, strict=True)]
    assert not any(complaints), "\n".join(filter(None, complaints))
