"""Put the figures of benchmarks/results/ into README.md, between its markers; `make readme` runs it.

A marker pair `<!-- NAME -->` ... `<!-- /NAME -->` is filled by the function of that name; with nothing, where
the GPU's result file is missing. `--check` only says whether README.md is up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kbit.bench.quality_peers import by_size

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
GPU_FILE, WIDTHS_FILE, PEERS_FILE = "h200-kernels.json", "h200-widths.json", "h200-peers.json"
# What README.md shows of the CPU, at GPU_BITS; the documentation has all of it.
CPU_KERNELS = ("torch bfloat16", "avx512", "avx2", "portable")
MODEL_FILES = ("h200-qwen3*.json", "h200-glm-*.json", "h200-llama-*.json")  # of kbit bench model
TWO_GPUS_FILE = "h200-parallel-qwen3-coder-next.json"
LEAD_FILES = "h200-qwen3-30b-a3b*.json"  # of kbit bench model, of the model that README.md begins with
LEAD_NAME = "Qwen3-30B-A3B"
H100 = "h100-80gb-hbm3-"  # how names of its results begin
QUALITY_FILE = "quality-tiny-moe.json"
GENERATE_FILES = "h200-generate-*.json"
GPU_SHAPES = ("l70b", "sq8k", "l8b", "glm_gu", "gateup", "down", "q", "kv")
GPU_TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024, 4096)
GPU_BITS = 4
# A ratio below this is a loss. GPU_FILE and WIDTHS_FILE, two runs, have 210 problems in common, whose ratios
# differ by 1.8%, as standard deviation.
LOSS = 0.97
BY_MORE, NOISE = f"by more than {100 * (1 - LOSS):.0f}%", "(runs differ by about 2%)"


def load(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / name).read_text())


def load_if_there(name: str) -> dict[str, Any]:
    """A result file; empty where it is missing."""
    return load(name) if (RESULTS / name).exists() else {}


def short(commit: str) -> str:
    """A commit as tables have it: seven characters, and whether there were changes that it does not have."""
    name, plus, changes = commit.partition("+")
    return name[:7] + plus + changes


def markdown(headers: list[str], rows: Iterable[list[str]]) -> str:
    """A table, its first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows))


def _linear(result: dict[str, Any], shape: str) -> dict[tuple[int, str, int | None], dict[str, Any]]:
    rows = [row for row in result["linear"] if row["shape"] == shape]
    return {(row["rows"], row["kernel"], row["bits"]): row for row in rows}


def model_claim() -> str:
    """The lead: weights and tokens a second of a whole model, one sequence, against the fastest bfloat16."""
    results = [load(path.name) for path in sorted(RESULTS.glob(LEAD_FILES))]
    best: dict[bool, tuple[float, dict[str, Any], dict[str, Any]]] = {}
    for result in results:
        for arm in result["arms"]:
            row = None if arm["absent"] else _fastest(arm, batch=1)
            ours = arm["name"] == f"kbit k={GPU_BITS}"
            if row and (ours or arm["name"] == "bf16") and row["tokens_s"] > best.get(ours, (0.0,))[0]:
                best[ours] = (row["tokens_s"], arm, result)
    if len(best) < 2:
        return ""
    (speed, here, result), (half_speed, half, half_result) = best[True], best[False]
    compiled = " (with torch.compile)" if half_result["plan"]["compiled"] else ""
    size, half_size = (arm["weight_bytes"] / 1e9 for arm in (here, half))
    return (
        f" With its layers in {GPU_BITS} bits, {LEAD_NAME} takes {size:.1f} GB instead of {half_size:.1f}, "
        f"and one {gpu_name(result)} decodes {speed:.0f} tokens a second at batch 1; the fastest run in "
        f"bfloat16{compiled} decodes {half_speed:.0f}. Both have random weights and replay CUDA graphs."
    )


def claim() -> str:
    """A number in the lead: decoding a layer at 4 bits against bfloat16, one token."""
    row = _linear(load("cpu.json"), "llama-8b up")[1, "avx512", 4]
    return f"{row['vs_bfloat16']:.1f}"


def cpu_all() -> str:
    """The large layer: every kernel at every number of tokens."""
    return cpu(kernels=None)


def cpu(kernels: tuple[str, ...] | None = CPU_KERNELS) -> str:
    """The large layer: some kernels, or all, at every number of tokens."""
    result = load("cpu.json")
    rows = _linear(result, "llama-8b up")
    counts = sorted({count for count, _, _ in rows})
    measured = dict.fromkeys((kernel, bits) for _, kernel, bits in rows)
    body = []
    for kernel, bits in measured:
        if kernels is not None and (kernel not in kernels or bits not in (None, GPU_BITS)):
            continue
        cells = [f"{kernel}, k={bits}" if bits else kernel]
        for count in counts:
            row = rows[count, kernel, bits]
            cells.append(f"{row['ms']:.2f} ({row['vs_bfloat16']:.2f})")
        body.append(cells)
    about = result["machine"]
    caption = (
        f"4096 → 14336, bfloat16 activations, milliseconds (in brackets: times as fast as torch's bfloat16). "
        f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, "
        f"{result['read_bandwidth_gb_s']:.0f} GB/s read bandwidth."
    )
    return caption + "\n\n" + markdown(["kernel", *(f"M={count}" for count in counts)], body)


def _gpu_cells(result: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """What kbit.linear chose by itself, by shape and number of tokens, in the order of the table."""
    chosen = {
        (row["shape"], row["rows"]): row
        for row in result["rows"]
        if (row["kernel"], row["bits"], row["dtype"]) == ("kbit", GPU_BITS, "fp16")
    }
    places = [(shape, tokens) for shape in GPU_SHAPES for tokens in GPU_TOKENS]
    return {place: chosen[place] for place in places if place in chosen}


def _layer(row: dict[str, Any]) -> str:
    return f"{row['in_features']} → {row['out_features']}"


def named_layer(row: dict[str, Any]) -> str:
    """In and out features of a row's layer, and its name."""
    return f"{_layer(row)} ({row['shape']})"


def gpu(file: str = GPU_FILE) -> str:
    """Every layer at every number of tokens against cuBLAS, those that lose included."""
    result = load_if_there(file)
    cells = _gpu_cells(result) if result else {}
    if not cells:
        return ""
    about = result["machine"]
    counts = [tokens for tokens in GPU_TOKENS if any(tokens == count for _, count in cells)]
    body = []
    for shape in dict.fromkeys(shape for shape, _ in cells):
        here = [cells.get((shape, tokens)) for tokens in counts]
        name = next(named_layer(row) for row in here if row)
        body.append([name, *(f"{row['vs_fp16']:.2f}" if row else "" for row in here)])
    text = (
        f"`kbit bench kernels` on a GPU: times as fast as float16 cuBLAS, k={GPU_BITS}, float16 activations, "
        f"weights colder than the cache, CUDA-graph replays, medians. {about['gpu']}, driver "
        f"{about['driver']}, CUDA {about['cuda']}, torch {about['torch']}."
    )
    if "dispatch" in result:
        text += f" Dispatch {result['dispatch']}."
    table = markdown(["layer", *(f"M={tokens}" for tokens in counts)], body)
    large = cells.get(("l70b", 1))
    if large is None:
        return f"{text}\n\n{table}"
    bandwidth = result["read_bandwidth_gb_s"]
    reads = (
        f"{_layer(large)} at M=1 takes {large['us']:.1f} µs: {large['gb_s']:.0f} GB/s of packed weights, "
        f"{100 * large['gb_s'] / bandwidth:.0f}% of the {bandwidth:.0f} GB/s that reading alone reaches."
    )
    return f"{text}\n\n{table}\n\n{reads}"


def gpu_claim() -> str:
    """The GPU's part of the lead: the large layer, one token."""
    result = load_if_there(GPU_FILE)
    row = _gpu_cells(result).get(("l70b", 1)) if result else None
    return f", and {row['vs_fp16']:.1f} times as fast as in float16 on an {gpu_name(result)}" if row else ""


def gpu_losses() -> str:
    """Where the table's ratios are losses."""
    result = load_if_there(GPU_FILE)
    cells = _gpu_cells(result) if result else {}
    losses = [row for row in cells.values() if row["vs_fp16"] < LOSS]
    if not losses:
        return ""
    worst = min(losses, key=lambda row: row["vs_fp16"])
    return (
        f" On an {gpu_name(result)} {len(losses)} of the table's {len(cells)} cells lose to float16 cuBLAS "
        f"{BY_MORE} {NOISE}, from M={min(row['rows'] for row in losses)} on; the worst is "
        f"{_layer(worst)} at M={worst['rows']}, {worst['vs_fp16']:.2f} times as fast."
    )


def peer_ratios() -> dict[str, list[tuple[dict[str, Any], float]]]:
    """By other people's kernel: kbit's float16 rows, and how many times as fast they are in the same run."""
    rows = [row for row in load_if_there(PEERS_FILE).get("rows", []) if row["dtype"] == "fp16"]
    ours = {
        (row["shape"], row["rows"]): row for row in rows if (row["kernel"], row["bits"]) == ("kbit", GPU_BITS)
    }
    ratios: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for row in (row for row in rows if row.get("kind") == "peer"):
        here = ours[row["shape"], row["rows"]]
        ratios.setdefault(row["kernel"], []).append((here, row["us"] / here["us"]))
    return ratios


def gpu_peers() -> str:
    """In how many problems of a run each of other people's kernels is slower, or faster; kbit's worst."""
    sentences, run = [], load_if_there(PEERS_FILE)
    for peer, ratios in peer_ratios().items():
        slower = sum(1 / ratio < LOSS for _, ratio in ratios)
        faster = sum(ratio < LOSS for _, ratio in ratios)
        worst, least = min(ratios, key=lambda pair: pair[1])
        sentences.append(
            f" Another library's kernels of {GPU_BITS} bits, [{peer.capitalize()}]"
            f"(docs/benchmarks.md#other-kernels-same-run)'s, are slower than kbit's (of commit "
            f"{short(run['machine']['commit'])}) {BY_MORE} in {slower} of {len(ratios)} problems of one run, "
            f"and faster by as much in {faster or 'none'}; the worst for kbit is {_layer(worst)} at "
            f"M={worst['rows']}, {least:.2f} times as fast."
        )
    return "".join(sentences)


def losses() -> str:
    """How many problems of every width lose to cuBLAS, from how many tokens on, and the worst."""
    result = load_if_there(WIDTHS_FILE)
    rows = [row for row in result.get("rows", []) if (row["kernel"], row["dtype"]) == ("kbit", "fp16")]
    lost = [row for row in rows if row["vs_fp16"] < LOSS]
    if not lost:
        return ""
    layers, tokens = (sorted({row[key] for row in rows}) for key in ("shape", "rows"))
    counts = []
    for bits in sorted({row["bits"] for row in lost}):
        here = [row["rows"] for row in lost if row["bits"] == bits]
        counts.append(f"{len(here)} at {bits} bits (from M={min(here)} on)")
    listed = [", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts
    worst = min(lost, key=lambda row: row["vs_fp16"])
    return (
        f" On an {gpu_name(result)}, of the {len(layers) * len(tokens)} problems of each width "
        f"({len(layers)} layers, {len(tokens)} values of M from {tokens[0]} to {tokens[-1]}), kbit loses to "
        f"float16 cuBLAS {BY_MORE} {NOISE} in {' and '.join(listed)}."
        f"{_first_losses(lost, len(layers))} The worst is {_layer(worst)} at {worst['bits']} bits, "
        f"M={worst['rows']}: {worst['vs_fp16']:.2f} times as fast."
    )


def _first_losses(lost: list[dict[str, Any]], layers: int) -> str:
    """How many layers never lose; of the others, which do at the fewest tokens, and which at the most."""
    first: dict[str, dict[str, Any]] = {}
    for row in sorted(lost, key=lambda row: -row["rows"]):
        if row["bits"] == GPU_BITS:
            first[row["shape"]] = row
    if not first:
        return ""
    never = layers - len(first)
    some = f"{never} of the {layers} layers never lose{'s' if never == 1 else ''}"
    text = f" At {GPU_BITS} bits {some if never else f'each of the {layers} layers loses somewhere'}; of "
    tokens = [row["rows"] for row in first.values()]
    text += f"those that do, {_layers_at(first, min(tokens))} the first, at M={min(tokens)}"
    last = f", {_layers_at(first, max(tokens))} the last, at M={max(tokens)}"
    return f"{text}{last if max(tokens) > min(tokens) else ''}."


def _layers_at(first: dict[str, dict[str, Any]], tokens: int) -> str:
    """The layers that first lose at so many tokens, the smallest first, and their verb."""
    rows = [row for row in first.values() if row["rows"] == tokens]
    rows.sort(key=lambda row: row["in_features"] * row["out_features"])
    *others, last = map(_layer, rows)
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


def models(files: Sequence[str] = MODEL_FILES) -> str:
    """Whole models on a GPU: weights, memory and tokens a second at 4 bits and in bfloat16."""
    results = [load(path.name) for pattern in files for path in sorted(RESULTS.glob(pattern))]
    if not results:
        return "Not measured yet: `kbit bench model` does."
    names = list(dict.fromkeys(result["model"] for result in results))
    # As it is by default first, then with a quantized head, then with torch.compile.
    results.sort(key=lambda result: (names.index(result["model"]), *_more_than_default(result["plan"])))
    batches = sorted({row["batch"] for r in results for arm in r["arms"] for row in arm["decode"]})
    best = _best_16_bit(results)
    body = []
    for result in results:
        for arm in result["arms"]:
            if arm["absent"]:
                continue
            speeds = _speeds(arm, batches)
            cells = [
                f"{speed:.0f}{_times(speed, best.get((result['model'], what)), arm)}" if speed else ""
                for what, speed in speeds.items()
            ]
            sizes = [f"{arm[key] / 1e9:.1f}" for key in ("weight_bytes", "run_peak_bytes")]
            body.append([f"{_run_name(result)}, {arm['name'].removeprefix('kbit ')}", *sizes, *cells])
    headers = ["model", "weights GB", "peak GB", *(f"batch {batch}" for batch in batches), "prefill"]
    text = (
        f"`kbit bench model`: tokens a second of greedy decoding {after_prompts(results)}, and of a prefill "
        f"of {_tokens(results, 'prefill')} tokens, all layers, random weights, CUDA graphs for both arms. "
        "In brackets: times as fast as the fastest bfloat16 of the same model that was measured at this "
        f"batch size{_of_compiled(best)}, with the faster of transformers' two implementations of experts. "
        f"{_peaks_of_all_ways(results)}NVIDIA {gpu_name(results[0])}."
    )
    return f"{text}\n\n{markdown(headers, body)}\n\n{_runs(results)}"


def _peaks_of_all_ways(results: list[dict[str, Any]]) -> str:
    """Where the peak of memory may be that of a slower way of running experts, whose speed is not shown."""
    names = [
        f"{_run_name(result)}, {arm['name']}"
        for result in results
        for arm in result["arms"]
        if len({row["arm"] for row in arm["decode"]}) > 1
        and not all("peak_bytes" in row for row in arm["decode"])
    ]
    listed = "; ".join(names)
    return f"Peak memory is of all ways of running experts that were tried ({listed}). " if names else ""


def after_prompts(results: Iterable[dict[str, Any]]) -> str:
    """What decoding followed in results of `kbit bench model`."""
    return f"after a prompt of {_tokens(results, 'prompt')} tokens"


def _tokens(results: Iterable[dict[str, Any]], key: str) -> str:
    """A number of tokens of the results' plans, or each that there is; 0 is what was not measured."""
    counts = sorted({result["plan"][key] for result in results} - {0})
    return " or ".join(map(str, counts))


def _of_compiled(best: dict[tuple[str, int | str], tuple[float, bool]]) -> str:
    """Where the fastest bfloat16 ran with torch.compile, which was not measured everywhere."""
    places: dict[str, list[str]] = {}
    for (model, what), (_, compiled) in best.items():
        if compiled:
            places.setdefault(model, []).append(what if isinstance(what, str) else f"batch {what}")
    where = "; ".join(f"at {' and '.join(columns)} of {model}" for model, columns in places.items())
    return f" (torch.compile's {where} only)" if where else ""


def too_large() -> str:
    """What decodes a model on one GPU that in 16 bits takes two, and what these decode."""
    result = load_if_there(TWO_GPUS_FILE)
    rows = [row for arm in result.get("arms", []) for row in arm["decode"] if row["batch"] == 1]
    half = [row for row in rows if row["arm"].startswith("bf16") and row["gpus"] == 2]
    ours = [row for row in rows if not row["arm"].startswith("bf16") and row["gpus"] == 1]
    if not half or not ours:
        return ""
    best, here = max(row["tokens_s"] for row in half), ours[0]["tokens_s"]
    weights = next(arm["weight_bytes"] for arm in result["arms"] if arm["name"] == "bf16, 2 GPUs")
    return (
        f" Two {gpu_name(result)}s hold {2 * weights / 1e9:.0f} GB of it, and decode {best:.0f} tokens a "
        f"second at batch 1. [In the same run](docs/parallel.md#speed) one decodes {here:.0f} at k="
        f"{ours[0]['arm'].rpartition('=')[2]}, {here / best:.1f} times as many."
    )


def generating() -> str:
    """Tokens a second of model.generate, and the first one: as it is, and from CUDA graphs."""
    results = [load(path.name) for path in sorted(RESULTS.glob(GENERATE_FILES))]
    body = []
    for result in results:
        by_arm: dict[str, list[dict[str, Any]]] = {}
        for row in result["rows"]:
            by_arm.setdefault(row["arm"].removeprefix("kbit "), []).append(row)
        for arm, rows in by_arm.items():
            speeds = [f"{row['tokens_s']:.0f}" for row in rows]
            waits = [f"{row['first_token_s'] * 1e3:.0f} ms ({row['first_call_s']:.0f})" for row in rows]
            cells = [f"{speed}, {wait}" for speed, wait in zip(speeds, waits, strict=True)]
            body.append([f"{result['model']}, {arm}", *cells])
    if not body:
        return "Not measured yet: `kbit bench generate` does."
    ways = [row["way"] for row in results[0]["rows"] if row["arm"] == results[0]["rows"][0]["arm"]]
    plan, commits = results[0]["plan"], dict.fromkeys(short(one["machine"]["commit"]) for one in results)
    text = (
        "`kbit bench generate`: tokens a second of `model.generate`, milliseconds until the first one comes, "
        f"one sequence, {plan['prompt']} tokens of prompt and {plan['new_tokens']} of answer, random "
        "weights; in brackets seconds of the whole first call, which loads kernels (kbit's own were compiled "
        "before), records and compiles. "
        f"NVIDIA {gpu_name(results[0])}, kbit at {' and '.join(commits)}."
    )
    return f"{text}\n\n{markdown(['model', *ways], body)}"


def _run_name(result: dict[str, Any]) -> str:
    """A model, and what ran it beside kbit."""
    plan = result["plan"]
    library = plan.get("linear_attention") or "PyTorch"
    with_library = "" if library in ("PyTorch", "kbit") else f" + {library.split()[0]}"
    compiled, head = _more_than_default(plan)
    of_head = f" + {head}-bit embeddings and head" if head else ""
    return result["model"] + with_library + of_head + (" + torch.compile" if compiled else "")


def _more_than_default(plan: dict[str, Any]) -> tuple[bool, int]:
    """Whether layers were compiled; the width of embeddings and head, 0 if they were not quantized."""
    return plan["compiled"], plan.get("embedding_bits") or 0


def _runs(results: list[dict[str, Any]]) -> str:
    """What was left out with torch.compile, and which commits ran."""
    commits: dict[str, list[str]] = {}
    left_out = ""
    for result in results:
        plan, name = result["plan"], _run_name(result)
        if plan["compiled"]:
            batches = " and ".join(str(batch) for batch in plan["batches"])
            left_out = (
                f"With torch.compile: batch {batches} only{'' if plan['prefill'] else ', no prefill'}. "
            )
        commits.setdefault(short(result["machine"]["commit"]), []).append(name)
    ran = "; ".join(f"at {commit}: {', '.join(names)}" for commit, names in commits.items())
    return f"{left_out}An empty cell was not measured. kbit {ran}."


def _fastest(arm: dict[str, Any], batch: int) -> dict[str, Any] | None:
    rows = [row for row in arm["decode"] if row["batch"] == batch]
    return max(rows, key=lambda row: row["tokens_s"]) if rows else None


def _speeds(arm: dict[str, Any], batches: Sequence[int]) -> dict[int | str, float | None]:
    """Tokens a second of an arm, by batch and in the prefill."""
    rows = {batch: _fastest(arm, batch) for batch in batches}
    decoded = {batch: row["tokens_s"] if row else None for batch, row in rows.items()}
    return {**decoded, "prefill": arm["prefill_tokens_s"]}


def _best_16_bit(results: list[dict[str, Any]]) -> dict[tuple[str, int | str], tuple[float, bool]]:
    """By model and what it does: most tokens a second of any bfloat16 arm, and whether it was compiled."""
    best: dict[tuple[str, int | str], tuple[float, bool]] = {}
    for result in results:
        for arm in result["arms"]:
            batches = {row["batch"] for row in arm["decode"]}
            if arm["absent"] or arm["name"].startswith("kbit"):
                continue
            for what, speed in _speeds(arm, sorted(batches)).items():
                if speed:
                    key, here = (result["model"], what), (speed, result["plan"]["compiled"])
                    best[key] = max(best.get(key, here), here)
    return best


def _times(speed: float, best: tuple[float, bool] | None, arm: dict[str, Any]) -> str:
    return f" ({speed / best[0]:.2f})" if best and arm["name"].startswith("kbit") else ""


def gpu_name(result: dict[str, Any]) -> str:
    """Of the GPU that a result was measured on, without its maker."""
    return result["machine"]["gpu"].removeprefix("NVIDIA ")


def quantizers() -> str:
    """Quantizing speed."""
    rows = {(row["isa"], row["bits"], row["search"]): row for row in load("cpu.json")["quantize"]}
    isas = list(dict.fromkeys(isa for isa, _, _ in rows))
    body = [
        [f"{isa}, {'search' if search else 'plain'}"]
        + [f"{rows[isa, bits, search]['million_weights_s']:.0f}" for bits in (2, 3, 4, 5)]
        for isa in isas
        for search in (False, True)
    ]
    return markdown(["million weights a second", "k=2", "k=3", "k=4", "k=5"], body)


def _quality_cells(row: dict[str, Any]) -> list[str]:
    """Squared error, perplexity and KL divergence of a row of `kbit eval`."""
    nmse = "" if row.get("nmse") is None else f"{row['nmse']:.5f}"
    divergence = "" if row["kl_divergence"] is None else f"{row['kl_divergence']:.4f}"
    return [nmse, f"{row['perplexity']:.3f}", divergence]


def quality() -> str:
    """What each width costs on a model that never was quantized."""
    result = load(QUALITY_FILE)
    rows = [row for row in result["rows"] if "peer" not in row and ", " not in row["method"]]
    body = [
        ["unquantized" if row["bits"] is None else f"k={row['bits']}, {row['method']}", *_quality_cells(row)]
        for row in rows
    ]
    caption = (
        f"A 41 M parameter mixture-of-experts model, attention and experts quantized, "
        f"{rows[0]['tokens']:,} held-out tokens in windows of {result['window']}."
    )
    return caption + "\n\n" + markdown(["", "squared error", "perplexity", "KL divergence"], body)


def quality_codebooks() -> str:
    """The same of the default codebook and others."""
    rows = [
        row
        for row in load(QUALITY_FILE)["rows"]
        if "peer" not in row and row["bits"] and not row["method"].startswith("plain")
    ]
    body = []
    for row in sorted(rows, key=lambda row: (row["bits"], row["method"].partition(",")[0] != "search")):
        method, _, codebook = row["method"].partition(", ")
        body.append([f"k={row['bits']}, {method}, {codebook or 'nf'}", *_quality_cells(row)])
    return markdown(["", "squared error", "perplexity", "KL divergence"], body)


def quality_peers() -> str:
    """The same of other libraries' formats, with kbit's of similar size between them."""
    result = load(QUALITY_FILE)
    rows = [
        row for row in result["rows"] if "peer" in row or row["method"].startswith(("search", "calibrated"))
    ]
    body = [
        [
            f"{row['peer']} {row['method']}"
            if "peer" in row
            else f"**kbit k={row['bits']}, {row['method']}**",
            f"{row['bits_per_weight']:.2f}",
            *_quality_cells(row),
        ]
        for row in by_size(rows)
    ]
    versions = ", ".join(f"{package} {version}" for package, version in result["peers"].items())
    caption = f"The same weights, text and windows as in the first table. {versions}."
    headers = ["", "bits/weight", "squared error", "perplexity", "KL divergence"]
    return caption + "\n\n" + markdown(headers, body)


def demo() -> str:
    """What `make demo` printed."""
    result = load("demo.json")
    body = [
        [
            row["model"],
            row["quantized"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['megabytes']:.0f}",
            f"{row['perplexity']:.2f}",
            "" if row["kl_divergence"] is None else f"{row['kl_divergence']:.3f}",
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in result["rows"]
    ]
    headers = ["model", "quantized", "bits/weight", "MB", "perplexity", "KL divergence", "tokens/s"]
    return markdown(headers, body)


SECTIONS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        model_claim,
        claim,
        gpu_claim,
        gpu,
        gpu_losses,
        gpu_peers,
        losses,
        models,
        too_large,
        generating,
        cpu,
        cpu_all,
        quantizers,
        quality,
        quality_codebooks,
        quality_peers,
        demo,
    )
}


def render(text: str, sections: dict[str, Callable[[], str]] = SECTIONS) -> str:
    """Text with every marked section filled."""
    for name, function in sections.items():
        pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.S)
        if pattern.search(text):
            content = function()
            block = f"\n{content}\n" if "\n" in content else content
            text = pattern.sub(lambda match, block=block: match[1] + block + match[2], text)
    return text


def main() -> int:
    """Write README.md, or compare with `--check`."""
    old = README.read_text()
    new = render(old)
    if "--check" in sys.argv:
        if new != old:
            print("README.md does not show the figures of benchmarks/results/. Run: make readme")
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
