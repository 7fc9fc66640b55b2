"""`kbit gate`: prove that an NVFP4 lever changes no bit of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbit.cli.consoles import Console
from kbit.cli.options import numbers, one_of
from kbit.cli.outputs import check_file, write_json
from kbit.integrations.devices import find_device

console = Console(soft_wrap=True)


def gate(
    toggle: Annotated[str, typer.Option(help="Which optimization: dedup, fold, tile or all.")] = "all",
    tokens: Annotated[str, typer.Option(help="Batch sizes, such as 1,32,128.")] = "1,32,128",
    accum: Annotated[str, typer.Option(help="Order of sums: exact, seq16 or tc.")] = "exact",
    device: Annotated[str, typer.Option(help="Where to run: cpu or cuda.")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=check_file, help="Also write the verdicts here.")
    ] = None,
    write_reference: Annotated[
        Path | None,
        typer.Option(
            callback=check_file, help="Write the reference for these batch sizes here, and run nothing."
        ),
    ] = None,
) -> None:
    """Check that NVFP4's optimizations change no byte. A small MoE model, each on and off; exit 1 if not."""
    from kbit.bench import gpu_timing
    from kbit.nvfp4.gate import TOGGLES, make_reference, run_gate
    from kbit.nvfp4.gemm import ACCUMULATIONS, CONTRACT_VERSION

    batches = numbers("--tokens", tokens)
    if write_reference is not None and json_file is not None:
        raise ValueError("--write-reference runs nothing of which --json could tell. Leave one of them out.")
    if write_reference is not None:
        write_json(write_reference, make_reference(batches))
        return
    one_of("--accum", accum, ACCUMULATIONS)
    find_device(device)  # before the levers are listed for it
    toggles = _toggles(toggle, accum, device, TOGGLES)
    console.print(f"contract {accum}, version {CONTRACT_VERSION}, on {device}")
    contract = {"contract": accum, "version": CONTRACT_VERSION, "device": _device_name(device)}
    about = {"machine": gpu_timing.describe(device), **contract}
    verdicts = []
    for each in toggles:
        for verdict in run_gate(each, batches, accum, device):
            verdicts.append(verdict)
            write_json(json_file, about | {"verdicts": [vars(one) for one in verdicts]})
            held = "holds" if verdict.failure is None else "FAILS"
            console.print(f"{held}  {verdict.lever}, {verdict.tokens} tokens")
            console.print(f"       fired: {verdict.fired or 'nothing'}", markup=False)
            if verdict.failure is None:
                console.print(f"       {len(verdict.digests)} digests equal those of {verdict.compared}")
            else:
                console.print(f"       {verdict.failure}", markup=False)
    if any(verdict.failure for verdict in verdicts):
        raise typer.Exit(1)


def _toggles(toggle: str, accum: str, device: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The levers to pull; "all" leaves tiles out where a contract has no choice of them."""
    from kbit.nvfp4 import tiles_nvfp4

    one_of("--toggle", toggle, ("all", *known))
    if toggle != "all":
        return (toggle,)
    return tuple(name for name in known if name != "tile" or tiles_nvfp4(accum, device))


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
