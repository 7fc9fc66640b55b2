"""Serving a quantized model: `transformers serve`, in a process that knows kbit's checkpoints.

`transformers serve` by itself does not import kbit, and would load such a checkpoint with random projections.
This imports it first and hands over everything else unchanged, but for requests that it answers better.

    kbit serve MODEL [options of transformers serve]
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kbit.cli.hub import is_hub_name
from kbit.cli.model_folder import bars_on_terminals_only, check_loadable, load_tokenizer
from kbit.cli.serve_options import check_options, wrong_usage
from kbit.format.model_files import no_model

# What transformers' server imports; kbit's extra "serve" brings them. requests is imported by its
# command line and not named by its extra.
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "requests")
# More than a step of any model takes.
_STOP_SECONDS = 10


def check_packages() -> None:
    """Raises ImportError where a package that the server needs is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"serving needs {', '.join(missing)}, which kbit's extra has: pip install '.[serve]' in a clone."
        )


def serve(arguments: Sequence[str], cuda_graphs: bool = False, prefix_caches: int = 0) -> None:
    """Run `transformers serve ARGUMENTS` until it is stopped.

    Args:
        arguments: the model, then options.
        cuda_graphs: decode from CUDA graphs.
        prefix_caches: how many conversations are kept, of each model; see `enable_prefix_caching`.

    Raises:
        ImportError: a package that the server needs is missing.
        RuntimeError: there is no GPU for CUDA graphs.
        ValueError: the model cannot be loaded, or lacks weights.
    """
    check_packages()
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import main

    import kbit  # noqa: F401  (registers the checkpoints)
    from kbit.cli import serve_batching, serve_graphs
    from kbit.cli.compile_ahead import compile_ahead
    from kbit.cli.serve_gone import stop_for_clients_that_have_gone
    from kbit.cli.serve_loading import load_as_other_commands, when_loaded
    from kbit.cli.serve_requests import refuse_malformed
    from kbit.cli.serve_signals import end_by_signals

    load_as_other_commands()
    when_loaded(compile_ahead)
    if cuda_graphs:
        serve_graphs.use_cuda_graphs()
        arguments = serve_graphs.options(arguments)
    if serve_graphs.is_batched(arguments):
        serve_batching.speed_up()
    elif prefix_caches:
        when_loaded(lambda model: _keep_conversations(model, prefix_caches))
    # transformers lists what is in the hub's cache, none of which this server takes requests for, and answers
    # with status 500 where there is no cache.
    served = {"id": arguments[0], "object": "model", "created": int(time.time()), "owned_by": ""}
    for name in ("list_models", "get_gen_models"):  # the second before transformers 5.24
        setattr(ModelManager, name, staticmethod(lambda *_: [served]))
    refuse_malformed()
    stop_for_clients_that_have_gone()
    bars_on_terminals_only()
    end_by_signals()
    sys.argv = [sys.argv[0], "serve", *arguments]  # what usage errors name, too
    with _batching_ends():
        main()


def _keep_conversations(model: Any, most: int) -> None:
    from kbit.integrations.transformers.prefix_caching import enable_prefix_caching

    if hasattr(model, "_prepare_cache_for_generation"):  # others classify, say
        enable_prefix_caching(model, most)


@contextmanager
def _batching_ends() -> Iterator[None]:
    """Stop the threads of continuous batching at the end, which transformers leaves running.

    Python waits for them when it exits, so that the process would be there until somebody kills it.
    """
    from transformers.cli.serving.utils import CBGenerateManager

    started: list[Any] = []
    init_cb = CBGenerateManager.init_cb

    @functools.wraps(init_cb)
    def recorded(self: Any, *arguments: Any) -> None:
        init_cb(self, *arguments)
        if self._cb not in started:
            started.append(self._cb)

    CBGenerateManager.init_cb = recorded
    try:
        yield
    finally:
        for batching in started:
            # Whoever waited for an answer is gone.
            batching.stop(timeout=_STOP_SECONDS, hard_stop=True)


def command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Model: a folder, or ORG/MODEL on the hub; before the options.")
    ],
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="On a GPU, decode from CUDA graphs: several times as fast.")
    ] = False,
    prefix_caches: Annotated[
        int,
        typer.Option(
            min=0,
            help="Conversations that are kept, whose next turn computes only what is new; not with "
            "--continuous-batching. 0: none.",
        ),
    ] = 2,
) -> None:
    """Serve a model by an OpenAI-compatible API.

    All other options are those of `transformers serve`, whose --help lists them; most used: --port 8000,
    --host 127.0.0.1, --device cuda, --continuous-batching.
    """
    _check_model(model)
    check_options(context.args)
    check_packages()
    if wrong := wrong_usage([model, *context.args]):
        context.fail(f"{wrong}\n`transformers serve --help` lists all options.")
    serve([model, *context.args], cuda_graphs, prefix_caches)


def _check_model(name: str) -> None:
    """Raises OSError or ValueError for no name on a hub, which has one slash, and no folder of a model."""
    if name.startswith("-"):
        raise ValueError(f"MODEL comes before the options, got {name}: kbit serve MODEL {name} ...")
    folder = Path(name)
    if folder.exists():
        load_tokenizer(folder)
        check_loadable(folder)
        if "@" in name or (":" in name and name.endswith(".gguf")):
            raise ValueError(
                f"transformers takes what follows @ or : in {name} for a revision or a file on a hub, not "
                f"for part of a path. Rename the folder, or serve it through a link of another name."
            )
    elif not is_hub_name(name):
        raise FileNotFoundError(no_model(folder))
