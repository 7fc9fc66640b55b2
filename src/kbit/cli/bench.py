"""`kbit bench`: measurements, as tables and JSON. Each is a command in a file of its own."""

from __future__ import annotations

import typer

from kbit.cli.bench_attention import attention
from kbit.cli.bench_chat import chat
from kbit.cli.bench_cpu import cpu
from kbit.cli.bench_decode import decode
from kbit.cli.bench_generate import generate
from kbit.cli.bench_kernels import check, dequant, kernels, plot
from kbit.cli.bench_model import model
from kbit.cli.bench_moe import moe
from kbit.cli.bench_nvfp4 import nvfp4
from kbit.cli.bench_quantize import quantize
from kbit.cli.bench_report import report
from kbit.cli.bench_serve import serve
from kbit.cli.bench_train import train
from kbit.cli.bench_workload import workload

app = typer.Typer(help="Measure kernels and models.", no_args_is_help=True, rich_markup_mode=None)
app.command()(kernels)
app.command()(check)
app.command()(dequant)
app.command()(plot)
app.command()(workload)
app.command()(model)
app.command()(generate)
app.command()(chat)
app.command()(moe)
app.command()(attention)
app.command()(nvfp4)
app.command()(report)
app.command()(train)
app.command()(quantize)
app.command()(serve)
app.command()(cpu)
app.command()(decode)
