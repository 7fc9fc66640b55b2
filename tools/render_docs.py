"""Put into docs/*.md what is known elsewhere: measured figures, options of the command line, codebooks.

As tools/render_readme.py, whose sections are known here too. `<!-- options NAME -->` is filled with the
options of `kbit NAME`. `make readme` runs both; `--check` only says which pages are out of date.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from render_options import commands, options
from render_readme import (
    GPU_BITS,
    GPU_FILE,
    H100,
    MODEL_FILES,
    PEERS_FILE,
    QUALITY_FILE,
    RESULTS,
    ROOT,
    WIDTHS_FILE,
    after_prompts,
    gpu,
    gpu_name,
    load,
    load_if_there,
    markdown,
    models,
    named_layer,
    peer_ratios,
    short,
)
from render_readme import SECTIONS as README_SECTIONS
from render_readme import render as render_sections

from kbit.bench import check, kernel_rows, profile_plot, shapes
from kbit.bench.model import BASELINE
from kbit.bench.quantize import PROJECTED_WEIGHTS
from kbit.format import BLOCK_SIZE, CODEBOOKS, SUPPORTED_BITS
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.static_caches import MOST_TOKENS

PAGES = sorted((ROOT / "docs").glob("*.md"))
H100_FILES = {name: f"{H100}{name}.json" for name in ("kernels", "widths", "moe")}
H100_MODEL_FILES = [name.replace("h200-", H100) for name in MODEL_FILES]
SANITIZER_FILES, FUZZ_FILES, MOE_FILE = "*-sanitizer.json", "*-fuzz.json", "h200-moe.json"
ATTENTION_FILES = "*-attention.json"
NVFP4_FILE, LEVERS_FILE = "h200-nvfp4.json", "h200-nvfp4-levers.json"
HEAD_QUALITY_FILES = QUALITY_FILE, "quality-tiny-moe-head.json"
WORKLOAD_FILE, SERVE_FILE = "h200-workload.json", "h200-serve.json"
QUANTIZE_FILE, DEQUANT_FILE = "h200-quantize.json", "h200-dequant.json"
WIDTHS_TOKENS, WIDTHS_SHAPES = (1, 8, 64, 256), ("gateup", "l8b", "l70b")
CROSSOVER_TOKENS = (64, 128, 256, 512, 576, 1024, 2048, 4096, 8192)
CHAT_FILES, PROFILE_FILES = "h200-chat-*.json", "h200-profile-*.json"
PARALLEL_FILES, TRAIN_FILE = ("h100-*-parallel-*.json", "h200-parallel-*.json"), "h200-train.json"
# Column -> (key of a level, digits).
_SERVED = {"tokens/s": ("tokens_per_second", 0), "p50 s": ("p50_s", 2), "p95 s": ("p95_s", 2)}


# -- figures -----------------------------------------------------------------------------------------------


def about(*results: dict[str, Any]) -> str:
    """The machine and software of a GPU's result files, their commits, and what they note."""
    machine = results[0]["machine"]
    commits = " and ".join(dict.fromkeys(short(result["machine"]["commit"]) for result in results))
    notes = "".join(f" {result['note']}" for result in results if "note" in result)
    models = f"transformers {machine['transformers']}, " if machine.get("transformers") else ""
    return (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, "
        f"{models}kbit at {commits}.{notes}"
    )


def widths(file: str = WIDTHS_FILE) -> str:
    """Every width on a GPU, in one run: the product that kbit.linear chose."""
    result = load_if_there(file)
    if not result:
        return ""
    cells = {
        (row["shape"], row["bits"], row["rows"]): row
        for row in result["rows"]
        if row["kernel"] == "kbit" and row["dtype"] == "fp16"
    }
    body = []
    for shape in WIDTHS_SHAPES:
        for bits in SUPPORTED_BITS:
            rows = [cells[shape, bits, tokens] for tokens in WIDTHS_TOKENS]
            name = f"{rows[0]['in_features']} → {rows[0]['out_features']}, k={bits}"
            body.append([name, *(f"{row['us']:.1f} ({row['vs_fp16']:.2f})" for row in rows)])
    text = "Microseconds (in brackets: times as fast as float16 cuBLAS in the same run), float16. "
    header = ["layer, width", *(f"M={tokens}" for tokens in WIDTHS_TOKENS)]
    return f"{text}{about(result)}\n\n{markdown(header, body)}"


def _by_layer(cells: Iterable[tuple[dict[str, Any], float]], tokens: Sequence[int]) -> str:
    """A table of ratios: layers by numbers of tokens."""
    body: dict[str, dict[int, str]] = {}
    for row, ratio in cells:
        body.setdefault(named_layer(row), {})[row["rows"]] = f"{ratio:.2f}"
    table = [[layer, *(here.get(count, "") for count in tokens)] for layer, here in body.items()]
    return markdown(["layer", *(f"M={count}" for count in tokens)], table)


def crossover() -> str:
    """Every layer at 4 bits from where some layers lose to cuBLAS."""
    result = load_if_there(WIDTHS_FILE)
    cells = [
        (row, row["vs_fp16"])
        for row in result.get("rows", [])
        if (row["kernel"], row["bits"], row["dtype"]) == ("kbit", GPU_BITS, "fp16")
    ]
    if not cells:
        return ""
    text = f"Times as fast as float16 cuBLAS in the same run, k={GPU_BITS}, float16. {about(result)}"
    return f"{text}\n\n{_by_layer(cells, CROSSOVER_TOKENS)}"


def below_bounds() -> str:
    """What `kbit bench check` says of the results of a GPU."""
    found = []
    for name in (GPU_FILE, WIDTHS_FILE):
        if (RESULTS / name).exists():
            verdicts = check.verdicts(kernel_rows.load(RESULTS / name)[1])
            below = sum(not verdict.holds for verdict in verdicts)
            found.append((below, f"{below} of the {len(verdicts)} problems of `{name}`"))
    if not any(below for below, _ in found):
        return ""
    return f" On the results of an H200 it exits with 1: below are {' and '.join(text for _, text in found)}."


def peers() -> str:
    """Other people's kernels beside ours, one token."""
    result = load_if_there(PEERS_FILE)
    rows = result.get("rows", [])
    names = [
        f"kbit, k={GPU_BITS}",
        "cuBLAS",
        *dict.fromkeys(r["kernel"] for r in rows if r["kind"] == "peer"),
    ]
    body: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["dtype"] == "bf16" and row["rows"] == 1:
            name = {"kbit": names[0], "cublas": names[1]}.get(row["kernel"], row["kernel"])
            body.setdefault(named_layer(row), {})[name] = f"{row['us']:.1f}"
    table = [[layer, *(cells.get(name, "") for name in names)] for layer, cells in body.items()]
    caption = "Microseconds, one token, bfloat16 activations."
    return f"{caption} {about(result)}\n\n{markdown(['layer', *names], table)}" if rows else ""


def ahead_of_peers() -> str:
    """How much faster than each of other people's kernels, float16."""
    tables = []
    for peer, ratios in peer_ratios().items():
        run = about(load(PEERS_FILE))
        text = f"Times as fast as {peer} in the same run, k={GPU_BITS}, float16. {run}"
        tokens = sorted({row["rows"] for row, _ in ratios})
        tables.append(f"{text}\n\n{_by_layer(ratios, tokens)}")
    return "\n\n".join(tables)


def experts(file: str = MOE_FILE) -> str:
    """Products with many experts, against the fastest 16-bit path."""
    result = load_if_there(file)
    ours = [row for row in result.get("rows", []) if row["kernel"] == "kbit" and row["vs_best_16_bit"]]
    if not ours:
        return "Not measured yet: `kbit bench moe` does."
    tokens = sorted({row["rows"] for row in ours})
    cells = {(r["problem"] + (f", k={r['bits']}" if r["bits"] else ""), r["rows"]): r for r in ours}
    body = []
    for name in dict.fromkeys(name for name, _ in cells):
        here = [cells.get((name, count)) for count in tokens]
        body.append(
            [name, *(f"{row['us']:.1f} ({row['vs_best_16_bit']:.2f})" if row else "" for row in here)]
        )
    text = (
        "Microseconds (in brackets: times as fast as the fastest 16-bit path in the same run); M rows of "
        "each expert, or M tokens of a whole layer or a router. "
    )
    return f"{text}{about(result)}\n\n{markdown(['problem', *(f'M={count}' for count in tokens)], body)}"


def attention() -> str:
    """A step of attention layers on every GPU where it was measured, against PyTorch's attention."""
    tables = []
    for file in sorted(RESULTS.glob(ATTENTION_FILES)):
        result = load(file.name)
        ours = [row for row in result["rows"] if row["arm"] == "kbit"]
        problems = {(row["batch"], row["tokens"] + 1): None for row in ours}
        cells = {(row["model"], row["batch"], row["tokens"] + 1): row for row in ours}
        body = []
        for model in dict.fromkeys(row["model"] for row in ours):
            here = [cells.get((model, *problem)) for problem in problems]
            body.append([model, *(f"{row['us']:.1f} ({row['vs_torch']:.2f})" if row else "" for row in here)])
        header = ["layer of", *(f"{batch} x {tokens}" for batch, tokens in problems)]
        text = (
            "Microseconds (in brackets: times as fast as PyTorch's attention), by sequences x tokens of each."
        )
        tables.append(f"{text} {about(result)}\n\n{markdown(header, body)}")
    return "\n\n".join(tables) or "Not measured yet: `kbit bench attention` does."


def workload() -> str:
    """Speed-up of every model's linear layers against the number of users."""
    result = load_if_there(WORKLOAD_FILE)
    if not result:
        return "Not measured yet: `kbit bench workload` does."
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for model in result["workload"]:
        for found in model["scenarios"]:
            here = cells.setdefault((model["model"], found["bits"]), {})
            here[found["users"]] = f"{found['speedup']:.2f}"
    users = sorted({count for here in cells.values() for count in here})
    body = [[model, str(bits), *(here.get(n, "") for n in users)] for (model, bits), here in cells.items()]
    text = "Times as fast as float16 cuBLAS, the linear layers of a block, by users served at once."
    table = markdown(["model", "k", *(str(n) for n in users)], body)
    return f"{text} {about(result)}\n\n{table}\n\n{_counted(result)}"


def _counted(result: dict[str, Any]) -> str:
    """Which layers a model's rows of the workload are made of, and what was left out of them."""
    lines = []
    for model in result["workload"]:
        counted = shapes.DENSE if model["notes"] else shapes.SHAPES  # experts, unless a note says not
        uses = ", ".join(shape.use for shape in counted if shape.model == model["model"])
        lines.append("; ".join([f"* {model['model']}: {uses}", *model["notes"]]) + ".")
    return "\n".join(["Layers of a block that are counted:", "", *lines])


def parallel() -> str:
    """Decoding on several GPUs against one; a table for each kind of GPU."""
    found = [[load(path.name) for path in sorted(RESULTS.glob(files))] for files in PARALLEL_FILES]
    tables = [_parallel(results) for results in found if results]
    if not tables:
        return "Not measured yet: `kbit bench model --gpus 1,2` does."
    text = (
        f"Tokens a second of decoding {after_prompts(itertools.chain(*found))} (in brackets: times as fast "
        "as one GPU), all layers, random weights."
    )
    return "\n\n".join([text, *tables])


def _parallel(results: list[dict[str, Any]]) -> str:
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        for row in (row for arm in result["arms"] for row in arm["decode"]):
            ratio = "" if row["gpus"] == 1 or row["vs_one_gpu"] is None else f" ({row['vs_one_gpu']:.2f})"
            here = cells.setdefault(f"{result['model']}, batch {row['batch']}", {})
            here[row["arm"].removeprefix("kbit ")] = f"{row['tokens_s']:.0f}{ratio}"
    arms = list(dict.fromkeys(arm for here in cells.values() for arm in here))
    body = [[name, *(here.get(arm, "") for arm in arms)] for name, here in cells.items()]
    return f"{about(*results)}\n\n{markdown(['model', *arms], body)}"


def training() -> str:
    """A LoRA step on packed weights against one on bfloat16."""
    result = load_if_there(TRAIN_FILE)
    if not result:
        return "Not measured yet: `kbit bench train` does."
    base = next(arm["spread"] for arm in result["arms"] if arm["name"] == BASELINE)
    about_equal = {
        arm["name"]: abs(arm["time_vs_bf16"] - 1) < max(arm["spread"], base)
        for arm in result["arms"]
        if arm["name"] != BASELINE
    }
    body = [
        [
            f"{result['model']}, {arm['name']}",
            f"{arm['weight_bytes'] / 1e9:.1f}",
            f"{arm['peak_bytes'] / 1e9:.1f}",
            f"{arm['ms']:.0f} ({'~' if about_equal.get(arm['name']) else ''}{arm['time_vs_bf16']:.2f})",
            f"{100 * arm['spread']:.0f}%",
            f"{arm['first_loss']:.2f} to {arm['last_loss']:.2f}",
        ]
        for arm in result["arms"]
    ]
    plan = result["plan"]
    text = (
        f"A LoRA step of {plan['sequences'] * plan['tokens']} tokens, all layers, checkpointing, random "
        f"weights and tokens; medians of {plan['repeats']} steps, and the spread from least to most."
    )
    if any(about_equal.values()):
        text += " ~: no further from 1 than the larger spread."
    header = ["base", "weights GB", "peak GB", "ms (times bf16's)", "spread", "loss"]
    return f"{text} {about(result)}\n\n{markdown(header, body)}"


def serving() -> str:
    """Load on a server of a quantized model, and of the same in bfloat16."""
    result = load_if_there(SERVE_FILE)
    if not result:
        return "Not measured yet: `kbit bench serve` does."
    body = []
    for levels in zip(*result["models"].values(), strict=True):
        for name, level in zip(result["models"], levels, strict=True):
            figures = [f"{level[key]:.{digits}f}" for key, digits in _SERVED.values()]
            memory = [f"{level[key] / 1e9:.2f}" for key in ("resident_bytes", "device_bytes")]
            body.append([name, str(level["clients"]), str(len(level["errors"])), *figures, *memory])
    text = (
        "Llama-3-8B's shape, random weights, answers of 64 tokens, `--cuda-graphs --continuous-batching`; "
        "the paged cache takes what memory is free."
    )
    if not result["plan"].get("warm_up"):
        text += " The first requests of each level, which record graphs, are included."
    header = ["model", "clients", "errors", *_SERVED, "resident GB", "GPU GB"]
    return f"{text} {about(result)}\n\n{markdown(header, body)}"


def chats() -> str:
    """How long turns of a chat wait for their first token, with and without prefix caching."""
    results = [load(path.name) for path in sorted(RESULTS.glob(CHAT_FILES))]
    if not results:
        return "Not measured yet: `kbit bench chat` does."
    plan, body = results[0]["plan"], []
    for result in results:
        waits: dict[tuple[str, str], list[str]] = {}
        for row in result["rows"]:
            waits.setdefault((row["arm"], row["way"]), []).append(f"{row['first_token_s'] * 1e3:.0f}")
        for (arm, way), of_turns in waits.items():
            body.append([f"{result['model']}, {arm.removeprefix('kbit ')}", way, *of_turns])
    prompts = dict.fromkeys(row["prompt"] for row in results[0]["rows"])
    text = (
        "`kbit bench chat`: milliseconds until the first token, random weights, messages of "
        f"{plan['message']} tokens and answers of {plan['new_tokens']}. Prompts, or what no cache holds of "
        f"them, of up to {MOST_TOKENS} tokens come from CUDA graphs; longer ones run kernel by kernel."
    )
    header = ["model", "", *(f"{tokens} tokens" for tokens in prompts)]
    return f"{text} {about(*results)}\n\n{markdown(header, body)}"


def profiles() -> str:
    """What decode steps of whole models are made of."""
    results = [load(path.name) for path in sorted(RESULTS.glob(PROFILE_FILES))]
    if not results:
        return "Not measured yet: `kbit profile` does."
    shown = [one for result in results for one in profile_plot.fastest(result["profiles"])]
    purposes, body = profile_plot.parts(shown), []
    for i, one in enumerate(shown):
        name = f"{one['model']}, {one['arm'].removeprefix('kbit ')}, batch {one['batch']}"
        times = [f"{us[i]:.0f}" if us[i] >= 0.5 else "" for us in purposes.values()]
        body.append([name, f"{one['step_us']:.0f}", *times])
    context = shown[0]["context"]
    text = f"`kbit profile`: microseconds of a step with {context} tokens in the cache, random weights."
    return f"{text} {about(*results)}\n\n{markdown(['model', 'step', *purposes], body)}"


def quantizing() -> str:
    """Quantizing a checkpoint from disk to disk."""
    result = load_if_there(QUANTIZE_FILE)
    if not result:
        return "Not measured yet: `kbit bench quantize` does."
    policy, body = QuantizationPolicy.from_dict(result["policy"]), []
    for run in result["runs"]:
        speed = _quantized_weights(run, policy) / run["seconds"]
        body.append([str(run["jobs"]), f"{speed / 1e6:.0f}", f"{PROJECTED_WEIGHTS / speed:.0f}"])
    first = result["runs"][0]
    count = _quantized_weights(first, policy)
    text = (
        f"{result['layers']} layers of {result['model']}'s shape, from disk to disk on one GPU, scale search "
        f"included: {count / 1e9:.1f} billion weights that are quantized, which alone are counted, and "
        f"{(first['weights'] - count) / 1e9:.1f} billion that are only copied."
    )
    header = ["jobs", "million weights a second", "seconds for 80 billion"]
    return f"{text} {about(result)}\n\n{markdown(header, body)}"


def _quantized_weights(run: dict[str, Any], policy: QuantizationPolicy) -> float:
    """Of the weights of a run, those that were not only copied.

    Files that do not tell tell it by their bytes: what is copied keeps its own, what is quantized has a scale
    of a byte for each block beside its codes.
    """
    if "quantized_weights" in run:
        return run["quantized_weights"]
    before, after = run["bytes_in"] / run["weights"], policy.bits / 8 + 1 / BLOCK_SIZE
    return (run["bytes_in"] - run["bytes_out"]) / (before - after)


def dequantizing() -> str:
    """What decoding before a 16-bit product costs."""
    result = load_if_there(DEQUANT_FILE)
    if not result:
        return "Not measured yet: `kbit bench dequant` does."
    chosen = [r for r in result["rows"] if r["shape"] == "l8b" and r["dtype"] == "fp16"]
    body = [
        [
            f"k={row['bits']}, M={row['rows']}",
            *(f"{row[key]:.1f}" for key in ("fp16_us", "dequantize_us", "total_us")),
            f"{row['ratio']:.2f}",
        ]
        for row in sorted(chosen, key=lambda row: (row["rows"], row["bits"]))
    ]
    text = "Microseconds, 4096 → 14336, float16; the ratio is float16's time to that of both together."
    return (
        f"{text} {about(result)}\n\n{markdown(['', 'float16', 'decode', 'decode + cuBLAS', 'ratio'], body)}"
    )


# Parts of a table that say nothing new: layers between the others, the routing that is less uniform.
_NVFP4_LEFT_OUT = {"gemm": ("down", "l70b"), "kernels": ("zipf, tc", "zipf, exact")}
# Part of `kbit bench nvfp4`: what a table of it is called, and what its M is.
_NVFP4_PARTS = {
    "quantize": "Quantizer, 2048 columns, by rows",
    "gemm": "Products (in brackets: times as fast as bf16 cuBLAS in the same run), by tokens M",
    "layer": "A layer of experts, end to end, by tokens T",
    "kernels": "Its kernels, by tokens T",
}


def nvfp4() -> str:
    """NVFP4's quantizer, products and layer of experts."""
    result = load_if_there(NVFP4_FILE)
    if not result:
        return "Not measured yet: `kbit bench nvfp4` does."
    parts = [f"Microseconds, medians of {result['repeats']}. {about(result)}"]
    for part, title in _NVFP4_PARTS.items():
        left_out = _NVFP4_LEFT_OUT.get(part, ())
        rows = [row for row in result["rows"] if row["part"] == part and row["problem"] not in left_out]
        if not rows:
            continue
        counts = sorted({row["rows"] for row in rows})
        cells: dict[tuple[str, str], dict[int, str]] = {}
        for row in rows:
            ratio = f" ({row['vs_bf16']:.2f})" if row["vs_bf16"] else ""
            cells.setdefault((row["problem"], row["arm"]), {})[row["rows"]] = f"{row['us']:.1f}{ratio}"
        body = [[*names, *(here.get(count, "") for count in counts)] for names, here in cells.items()]
        header = ["problem", "arm", *(str(count) for count in counts)]
        parts.append(f"{title}:\n\n{markdown(header, body)}")
    return "\n\n".join(parts)


def levers() -> str:
    """What calls of NVFP4 take, and with every lever of blocks that changes no bit forced to its best."""
    result = load_if_there(LEVERS_FILE)
    if not result:
        return "Not measured yet: `kbit bench nvfp4 --part levers` does."
    rows = result["rows"]
    counts = sorted({row["rows"] for row in rows})
    body = []
    for part, problem in dict.fromkeys((row["part"], row["problem"]) for row in rows):
        cells = []
        for count in counts:
            key = (part, problem, count)
            us = {row["arm"]: row["us"] for row in rows if (row["part"], row["problem"], row["rows"]) == key}
            chosen = us.pop("chosen", None)
            best = min(us, key=lambda arm: us[arm], default="")
            cells.append(f"{chosen:.1f}, {us[best]:.1f} ({best})" if us else "")
        body.append([part, problem, *cells])
    text = "Microseconds of what is chosen, and of the best choice forced (which that was), by rows."
    table = markdown(["lever", "problem", *(str(count) for count in counts)], body)
    return f"{text} {about(result)}\n\n{table}"


def sanitizer() -> str:
    """What compute-sanitizer found, on every GPU where it ran."""
    found = []
    for file in sorted(RESULTS.glob(SANITIZER_FILES)):
        result = load(file.name)
        runs = [f"{run['tool']}: {'; '.join(run['summary'])}" for run in result["runs"]]
        found.append("\n".join([about(result), "", *(f"* {run}" for run in runs)]))
    return "\n\n".join(found)


def fuzz() -> str:
    """How many random problems each kernel and op had, on every GPU where there were some."""
    found = []
    for file in sorted(RESULTS.glob(FUZZ_FILES)):
        result = load(file.name)
        done, wrong = result["done"], len(result["wrong"])
        parts = ", ".join(f"{name} {count}" for name, count in sorted(done.items()))
        counts = [f"{sum(done.values())} problems, {wrong} of them wrong", f"by kernel or op: {parts}"]
        found.append("\n".join([about(result), "", *(f"* {each}" for each in counts)]))
    return "\n\n".join(found)


def provenance() -> str:
    """Every result file: machine, commit, date."""
    body = []
    for file in sorted(RESULTS.glob("*.json")):
        machine = load(file.name).get("machine", {})
        hardware = str(machine.get("gpu") or machine.get("cpu", ""))
        rest = (machine.get("torch", ""), short(machine.get("commit", "")), machine.get("date", ""))
        body.append([f"`{file.name}`", hardware, *rest])
    return markdown(["file", "machine", "torch", "commit", "date"], body)


def head() -> str:
    """What quantized embeddings and head gain and cost."""
    results = [load(path.name) for pattern in H100_MODEL_FILES for path in sorted(RESULTS.glob(pattern))]
    results = [result for result in results if not result["plan"]["compiled"]]
    as_it_is = {one["model"]: one for one in results if not one["plan"]["embedding_bits"]}
    gains = []
    for result in (one for one in results if one["plan"]["embedding_bits"]):
        plain = as_it_is[result["model"]]
        speeds = [one["arms"][0]["decode"][0]["tokens_s"] for one in (plain, result)]
        weights = [one["arms"][0]["weight_bytes"] / 1e9 for one in (plain, result)]
        gains.append(
            f"{result['model']} decodes {speeds[1]:.0f} tokens a second instead of {speeds[0]:.0f}, of "
            f"{weights[1]:.1f} GB instead of {weights[0]:.1f}"
        )
    whole, with_head = map(load, HEAD_QUALITY_FILES)
    (row,) = (row for row in with_head["rows"] if row["bits"])
    same = (row["bits"], row["method"])
    before = next(one for one in whole["rows"] if (one["bits"], one["method"]) == same)
    gpu = gpu_name(results[0]).split()[0]
    return (
        f"With {with_head['embedding_bits']} bits for embeddings and head and {row['bits']} for the rest, "
        f"on an {gpu}: {'; '.join(gains)}. The divergence of the table's model goes from "
        f"{before['kl_divergence']:.4f} to {row['kl_divergence']:.4f}."
    )


# -- the format --------------------------------------------------------------------------------------------


def codebooks() -> str:
    """The positive half of every named codebook: its float32 numbers, in decimal where they are short."""
    body = []
    for name, bits in itertools.product(CODEBOOKS, SUPPORTED_BITS):
        upper = CODEBOOKS[name](bits)[2 ** (bits - 1) :]
        decimal = [f"{level:.4f}" for level in upper.tolist()]
        exact = torch.equal(torch.tensor(list(map(float, decimal))), upper)
        levels = decimal if exact else [level.hex() for level in upper.tolist()]
        body.append([name, str(bits), ", ".join(f"`{level}`" for level in levels)])
    return markdown(["name", "bits", "positive levels as float32, ascending"], body)


SECTIONS: dict[str, Callable[[], str]] = {
    **README_SECTIONS,
    "gpu_h100": lambda: gpu(H100_FILES["kernels"]),
    "widths_h100": lambda: widths(H100_FILES["widths"]),
    "experts_h100": lambda: experts(H100_FILES["moe"]),
    "models_h100": lambda: models(H100_MODEL_FILES),
    **{f.__name__: f for f in (widths, crossover, below_bounds, peers, ahead_of_peers, experts)},
    **{f.__name__: f for f in (workload, attention, parallel, training)},
    **{f.__name__: f for f in (nvfp4, levers, sanitizer, fuzz, provenance, codebooks, head)},
    **{f.__name__: f for f in (serving, chats, profiles, quantizing, dequantizing)},
    **{f"options {name}": lambda command=command: options(command) for name, command in commands().items()},
}


def main() -> int:
    """Write the pages, or compare with `--check`."""
    old = {page: page.read_text() for page in PAGES}
    stale = {page: new for page, text in old.items() if (new := render_sections(text, SECTIONS)) != text}
    if "--check" in sys.argv:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is out of date. Run: make readme")
        return int(bool(stale))
    for page, text in stale.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
