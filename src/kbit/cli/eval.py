"""`kbit eval`: perplexity and KL divergence against the unquantized model on a text."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kbit.bench.text_table import in_sections, text_table
from kbit.cli.consoles import Console, warn
from kbit.cli.hub import folder_of, model_name
from kbit.cli.model_folder import DTYPE_HELP, check_model_folder, known_dtype, load_model
from kbit.cli.options import widths
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show
from kbit.cli.texts import WINDOW, calibration_samples, check_ids, encode_windows, read_text
from kbit.format.words import counted
from kbit.integrations.devices import find_device

if TYPE_CHECKING:
    import torch

    from kbit.bench.quality_peers import Format
    from kbit.format import QuantizationPolicy

console = Console()


def evaluate(
    folder: Annotated[
        Path, typer.Argument(help="Model, quantized or not: a folder, or ORG/MODEL on the hub.")
    ],
    reference: Annotated[
        Path | None, typer.Option(help="The unquantized model, likewise, for the divergence from it.")
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Quantize FOLDER in memory to these widths, such as 2,3,4,5.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="With --bits: quantize without the search for scales, too.")
    ] = False,
    embedding_bits: Annotated[
        int | None, typer.Option(help="With --bits: quantize embeddings and head too.")
    ] = None,
    codebook: Annotated[
        list[str] | None,
        typer.Option(help="With --bits: levels of codes, as for `kbit quantize`; repeatable, to compare."),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="With --bits: quantize by what this other text feeds layers, too.")
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="With --bits: store the same weights as other libraries do, too.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to score; by default one that ships with kbit.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = WINDOW,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Score so many tokens of the text at most.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"What layers compute in: {DTYPE_HELP}.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Perplexity and KL divergence on a text. Teacher forced."""
    from kbit.bench import gpu_timing

    if bits is None and (plain or calibrate or peers or codebook or embedding_bits is not None):
        raise ValueError(
            "--plain, --calibrate, --codebook, --embedding-bits and --peers say how to quantize in memory. "
            "Add --bits, such as 4."
        )
    if bits is not None and reference is not None:
        raise ValueError("with --bits, FOLDER itself is the reference. Drop --reference, or --bits.")
    # What is wrong with an option is said before anything is fetched, loaded or encoded.
    find_device(device)
    load = functools.partial(load_model, dtype=known_dtype(dtype), device=device)
    methods = ["plain"] * plain + ["search"] + ["calibrated"] * (calibrate is not None)
    policies = [] if bits is None else _policies(widths(bits), methods, codebook or ["nf"], embedding_bits)
    passage, samples = read_text(text), None
    other = None if calibrate is None else _text_to_calibrate_by(calibrate, passage)
    formats = _peers() if peers else []
    folder, reference = folder_of(folder), reference and folder_of(reference)
    ids = encode_windows(folder, passage, window, max_tokens)
    if bits is None:
        rows = _saved(folder, reference, ids, load)
    else:
        if calibrate is not None and other is not None:
            samples = calibration_samples(folder, other, calibrate, window)
        rows = _in_memory(folder, policies, formats, ids, samples, load)
    settings = {"dtype": dtype, "device": device, "window": ids.shape[1], "embedding_bits": embedding_bits}
    settings["calibration_tokens"] = None if samples is None else samples.numel()
    settings["peers"] = {form.package: form.version for form in formats}
    # Before it is printed, to a reader that may be gone.
    about = {"machine": gpu_timing.describe(device), "model": model_name(folder)}
    write_json(json_file, about | settings | {"rows": rows})
    show(_table(rows, ids.shape[1]))
    if broken := [row["model"] for row in rows if math.isnan(row["perplexity"])]:
        warn(f"{broken[0]} computes NaN: weights hold NaN or Inf, or --dtype is too narrow for it.", console)


def _text_to_calibrate_by(file: Path, scored: str) -> str:
    """The text of --calibrate; warns if it is the one that is scored. Raises what `read_text` does."""
    other = read_text(file, "--calibrate")
    if other == scored:
        warn(f"{file} is what models are scored on, too: that flatters codes that were made by it.", console)
    return other


def _peers() -> list[Format]:
    """Formats of other libraries; what cannot be imported is named on stderr."""
    from kbit.bench import quality_peers

    found, absent = quality_peers.formats()
    for reason in absent:
        warn(reason)
    return found


def _policies(
    widths: list[int], methods: list[str], codebooks: list[str], embedding_bits: int | None
) -> list[tuple[str, QuantizationPolicy]]:
    """(method, policy) for each width, method and codebook; a method names any but the default codebook.

    Raises:
        OSError, ValueError: embeddings cannot have so many bits, or a codebook is none.
    """
    from kbit.cli.codebooks import parse_codebook
    from kbit.format import QuantizationPolicy

    stems = [Path(given).stem for given in codebooks]
    names = [stem if stems.count(stem) == 1 else given for given, stem in zip(codebooks, stems, strict=True)]
    named = {
        "" if given == "nf" else f", {name}": parse_codebook(given)
        for given, name in zip(codebooks, names, strict=True)
    }
    return [
        (
            method + name,
            QuantizationPolicy(width, levels, search=method != "plain", embedding_bits=embedding_bits),
        )
        for width, (name, levels), method in itertools.product(widths, named.items(), methods)
    ]


def _saved(
    folder: Path, reference: Path | None, ids: torch.Tensor, load: Callable[[Path], Any]
) -> list[dict[str, Any]]:
    """Rows for a model as it is on disk, and for its reference where one is given."""
    from kbit.bench.quality import sizes_of

    models: dict[str, Any] = {}
    base = None
    if reference is not None:
        remedy = "Give --reference the folder of the unquantized model, or leave it out."
        base = models[f"{model_name(reference)} (reference)"] = _load_unquantized(reference, remedy, load)
    models[model_name(folder)] = load(folder)
    sizes = {each.config.get_text_config().vocab_size for each in models.values()}
    if len(sizes) > 1:
        raise ValueError(f"{reference} and {folder} have vocabularies of {sizes}. Are they one model?")
    check_ids(folder, ids, models[model_name(folder)])
    rows = {name: {"bits": None, "method": "saved"} | sizes_of(model, base) for name, model in models.items()}
    return _score(models, rows, ids, base)


def _in_memory(
    folder: Path,
    policies: list[tuple[str, QuantizationPolicy]],
    peers: list[Format],
    ids: torch.Tensor,
    samples: torch.Tensor | None,
    load: Callable[[Path], Any],
) -> list[dict[str, Any]]:
    """Rows for the unquantized model, for each method and policy, "calibrated" ones being by the samples, and
    for each format of others, in which the same weights are stored.
    """
    from kbit import quantize_model
    from kbit.bench.quality import quantized_weights, sharing_copy, sizes_of

    base = _load_unquantized(folder, "Give the unquantized model, or drop --bits.", load)
    check_ids(folder, ids, base)
    own = model_name(folder)
    models = {own: base}
    rows: dict[str, dict[str, Any]] = {own: {"bits": None, "method": "unquantized"}}
    for method, policy in policies:
        calibration = None
        if samples is not None and method.startswith("calibrated"):
            calibration = samples.to(base.device).split(1)
        name = f"{own} k={policy.bits} {method}"
        with console.status(name):
            model = models[name] = quantize_model(sharing_copy(base), policy, calibration=calibration)
        rows[name] = {"bits": policy.bits, "method": method} | sizes_of(model, base)
    scored, places = _score(models, rows, ids, base), quantized_weights(model)
    models.clear()  # whose memory the others need
    return scored + _peer_rows(own, base, places, ids, peers if places else [])


def _peer_rows(
    own: str, base: Any, places: list[tuple[str, str]], ids: torch.Tensor, peers: list[Format]
) -> list[dict[str, Any]]:
    """A row for each format of others; one that refuses a weight is named on stderr."""
    from kbit.bench import quality_peers

    rows = []
    for form in peers:
        try:
            with _progress(len(ids), form.name) as done:
                row = quality_peers.score(base, places, ids, form, done)
        except ValueError as refusal:
            warn(str(refusal))
        else:
            rows.append({"model": f"{own} {form.name}"} | row)
    return rows


def _load_unquantized(folder: Path, remedy: str, load: Callable[[Path], Any]) -> Any:
    """Raises ValueError, before it loads anything, if the folder's config says that kbit quantized it."""
    from kbit.format.policy import QUANT_METHOD
    from kbit.nvfp4.readers.stored import KBIT

    section = check_model_folder(folder).get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method in (QUANT_METHOD, KBIT):
        raise ValueError(f"{folder} is quantized. {remedy}")
    return load(folder)


def _score(
    models: dict[str, Any], rows: dict[str, dict[str, Any]], ids: torch.Tensor, base: Any
) -> list[dict[str, Any]]:
    """The rows with perplexity and divergence; the unquantized model has no divergence."""
    from kbit.bench.quality import compare_each

    with _progress(len(ids), "scoring") as done:
        results = compare_each(models, ids, base, done)
    for name, result in results.items():
        rows[name] |= vars(result)
        if models[name] is base:
            rows[name]["kl_divergence"] = None
    return [{"model": name, **row} for name, row in rows.items()]


@contextlib.contextmanager
def _progress(windows: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, and what to call with the number of windows done."""
    bars = Console(stderr=True)
    # Elsewhere each would leave an empty line behind.
    with Progress(console=bars, transient=True, disable=not bars.is_terminal) as progress:
        task = progress.add_task(what, total=windows)
        yield lambda done: progress.update(task, completed=done)


def _table(rows: list[dict[str, Any]], window: int) -> Table:
    """With others' formats, by size, and a line between whole numbers of bits; else as they were made."""
    title = f"{counted(rows[0]['tokens'], 'token')} in windows of {window}"
    headers = ("model", "bits/weight", "squared error", "perplexity", "KL divergence")
    table = text_table(title, headers, left=("model",))
    formats = {"bits_per_weight": ".2f", "nmse": ".5f", "perplexity": ".3f", "kl_divergence": ".4f"}
    ordered: Iterable[Mapping[str, Any]] = rows
    if any("peer" in row for row in rows):
        from kbit.bench.quality_peers import by_size

        ordered = in_sections(table, by_size(rows), lambda row: int(row.get("bits_per_weight", 0)))
    for row in ordered:
        values = [(row.get(key), spec) for key, spec in formats.items()]
        table.add_row(
            escape(row["model"]), *("" if value is None else format(value, spec) for value, spec in values)
        )
    return table
