"""What is done with whole models: quantizing checkpoints, generating, serving, training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.report import markup
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section


def _gb(count: float | None) -> str:
    return markup.number(None if count is None else count / 1e9, ".2f")


# -- quantizing ----------------------------------------------------------------------------------------------


def _quantize(results: Sequence[Result]) -> str:
    parts = []
    headers = ["shards at a time", "seconds", "million weights/s", "GB read", "GB written", "80 B, minutes"]
    for result in results:
        caption = f"{result.data['model']}, {result.device}, {result.name}"
        parts.append(markup.table(headers, map(_run_row, result.data["runs"]), caption))
    return "".join(parts)


def _run_row(run: Mapping[str, Any]) -> Row:
    speed = [f"{run['seconds']:.1f}", f"{run['weights_per_second'] / 1e6:.0f}"]
    sizes = [_gb(run["bytes_in"]), _gb(run["bytes_out"])]
    return Row([str(run["jobs"]), *speed, *sizes, f"{run['seconds_for_80b'] / 60:.1f}"])


# -- attention -----------------------------------------------------------------------------------------------


def _attention(results: Sequence[Result]) -> str:
    parts = []
    headers = ["model", "sequences", "tokens", "room", "kernel", "us", "spread", "GB/s", "% of read"]
    for result in results:
        bandwidth = float(result.data["read_bandwidth_gb_s"])
        rows = [_attention_row(row, bandwidth) for row in result.data["rows"]]
        caption = f"{result.device}, {result.name}"
        parts.append(markup.table([*headers, "vs PyTorch"], rows, caption))
    return "".join(parts)


def _attention_row(row: Mapping[str, Any], bandwidth: float) -> Row:
    known = [row["model"], *(str(row[name]) for name in ("batch", "tokens", "room")), row["arm"]]
    return Row([*known, *markup.speed(row, bandwidth), markup.heat(row["vs_torch"])])


# -- generating ----------------------------------------------------------------------------------------------


def _generate(results: Sequence[Result]) -> str:
    parts = []
    headers = ["arm", "way", "tokens/s", "first token, s", "first call, s", "vs bf16"]
    for result in results:
        plan = result.data["plan"]
        caption = (
            f"{result.data['model']}, {result.data['layers']} layers, {plan['prompt']} tokens of prompt and "
            f"{plan['new_tokens']} of answer, {result.device}, {result.name}"
        )
        parts.append(markup.table(headers, _ways(result.data["rows"]), caption, left=2))
    return "".join(parts)


def _ways(rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    sixteen_bit = {row["way"]: row["tokens_s"] for row in rows if not row["arm"].startswith("kbit")}
    previous = None
    for row in rows:
        speed, base = row["tokens_s"], sixteen_bit.get(row["way"])
        times = [markup.number(row[key], ".2f") for key in ("first_token_s", "first_call_s")]
        ratio = markup.heat(speed / base) if speed and base else markup.Cell(markup.MISSING)
        cells = [row["arm"], row["way"], markup.number(speed, ".1f"), *times, ratio]
        yield Row(cells, first=previous not in (None, row["arm"]))
        previous = row["arm"]


# -- chats ---------------------------------------------------------------------------------------------------


def _chat(results: Sequence[Result]) -> str:
    parts = []
    headers = ["arm", "way", "turn", "tokens of prompt", "first token, ms", "tokens/s", "vs whole prompts"]
    for result in results:
        plan = result.data["plan"]
        caption = (
            f"{result.data['model']}, {result.data['layers']} layers, messages of {plan['message']} tokens, "
            f"answers of {plan['new_tokens']}, {result.device}, {result.name}"
        )
        parts.append(markup.table(headers, _turns(result.data["rows"]), caption, left=2))
    return "".join(parts)


def _turns(rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    whole: dict[tuple[str, int], float] = {}
    previous = None
    for row in rows:
        wait = row["first_token_s"]
        first = whole.setdefault((row["arm"], row["turn"]), wait)
        numbers = [markup.number(wait * 1e3, ".1f"), markup.number(row["tokens_s"], ".1f")]
        cells = [row["arm"], row["way"], str(row["turn"]), str(row["prompt"]), *numbers]
        yield Row([*cells, markup.heat(first / wait)], first=previous not in (None, row["arm"]))
        previous = row["arm"]


# -- serving -------------------------------------------------------------------------------------------------


def _serve(results: Sequence[Result]) -> str:
    parts = []
    headers = ["clients", "model", "requests", "errors", "tokens/s", "p50, s", "p95, s", "resident GB"]
    headers.append("GPU GB")
    for result in results:
        caption = f"{result.device}, {result.name}"
        parts.append(markup.table(headers, _levels(result.data["models"]), caption, left=2))
    return "".join(parts)


def _levels(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Row]:
    found = [(level["clients"], name, level) for name, levels in models.items() for level in levels]
    previous = None
    for clients, name, level in sorted(found, key=lambda item: item[0]):
        counts = [str(level["requests"]), str(len(level["errors"]))]
        times = [markup.number(level[key], ".2f") for key in ("p50_s", "p95_s")]
        memory = [_gb(level["resident_bytes"]), _gb(level["device_bytes"])]
        cells = [str(clients), name, *counts, f"{level['tokens_per_second']:.1f}", *times, *memory]
        yield Row(cells, first=previous not in (None, clients))
        previous = clients


# -- training ------------------------------------------------------------------------------------------------


def _train(results: Sequence[Result]) -> str:
    parts = []
    headers = ["arm", "ms a step", "spread", "vs bf16", "weights GB", "adapters GB", "peak GB"]
    headers += ["first loss", "last loss"]
    for result in results:
        plan = result.data["plan"]
        caption = (
            f"{result.data['model']}, {result.data['layers']} layers, {plan['sequences']} x {plan['tokens']} "
            f"tokens, rank {plan['rank']}, {result.device}, {result.name}"
        )
        parts.append(markup.table(headers, map(_arm_row, result.data["arms"]), caption))
    return "".join(parts)


def _arm_row(arm: Mapping[str, Any]) -> Row:
    ratio = arm["time_vs_bf16"]
    sizes = [_gb(arm[key]) for key in ("weight_bytes", "adapter_bytes", "peak_bytes")]
    losses = [f"{arm[key]:.4f}" for key in ("first_loss", "last_loss")]
    faster = markup.Cell(markup.MISSING) if ratio is None else markup.heat(1 / ratio)
    return Row([arm["name"], f"{arm['ms']:.1f}", f"{100 * arm['spread']:.0f}%", faster, *sizes, *losses])


SECTIONS = (
    Section(
        "quantizing",
        "Quantizing checkpoints",
        "From disk to disk, shard by shard: everything that `kbit quantize` does.",
        ("quantize",),
        "kbit bench quantize llama-3-8b --json {folder}/quantize.json",
        _quantize,
    ),
    Section(
        "attention",
        "Attention while decoding",
        "Between its projections, for one new token of each sequence: norms of heads, rotary embeddings, the "
        "cache, attention, its gate. GB/s are of keys and values so far.",
        ("attention",),
        "kbit bench attention --json {folder}/attention.json",
        _attention,
    ),
    Section(
        "generating",
        "Generating",
        "`model.generate` by itself and from CUDA graphs: one sequence, token by token.",
        ("generate",),
        "kbit bench generate llama-3-8b --compile --json {folder}/generate.json",
        _generate,
    ),
    Section(
        "chats",
        "Chats",
        "How long the turns of a chat wait for their first token, with and without prefix caching.",
        ("chat",),
        "kbit bench chat llama-3-8b --json {folder}/chat.json",
        _chat,
    ),
    Section(
        "serving",
        "Serving",
        "`transformers serve` on loopback: clients at once, latency of whole answers, memory after a level.",
        ("serve",),
        "kbit bench serve --random llama-3-8b --json {folder}/serve.json",
        _serve,
    ),
    Section(
        "training",
        "Training adapters",
        "A LoRA step through frozen weights: time (as a speed-up), and memory.",
        ("train",),
        "kbit bench train llama-3-8b --json {folder}/train.json",
        _train,
    ),
)
