"""`generate`, its decoding steps replayed from CUDA graphs.

    kbit.enable_cuda_graphs(model)
    model.generate(ids, cache_implementation="static", max_new_tokens=64)

A step launches a thousand kernels, most of which take less time than launching them; a graph launches them
all at once. transformers asks a model for what runs its steps where the cache's tensors stay in their places
(`get_compiled_call`), by default torch.compile of the whole model. Here it is `Steps`. Prompts (`_prefill`)
are recorded, too: see `Prompts`. What recordings rest on is in `recordings`.

A graph writes to the cache that it was recorded with. `generate` makes a new one at every call; it is given
the last one again where that has the right size and nobody else has kept it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from kbit.integrations.transformers import next_steps
from kbit.integrations.transformers.attention import with_additive_masks
from kbit.integrations.transformers.attention_steps import forget_tried
from kbit.integrations.transformers.cache_argument import cache_in, with_cache, without_cache
from kbit.integrations.transformers.compiled_layers import compiled_layers, decoder_layers
from kbit.integrations.transformers.last_caches import LONGEST, LastCaches
from kbit.integrations.transformers.late_masks import MASKS, late_masks, with_late_mask, with_masks
from kbit.integrations.transformers.latent_attention import forget_decoded, renew_decoded
from kbit.integrations.transformers.own_methods import generating, is_ours, put, take_away
from kbit.integrations.transformers.preconditions import handed_on, stranger_in
from kbit.integrations.transformers.prompts import Prompts
from kbit.integrations.transformers.recordings import Record, Recordings, SharedPool, record_cuda_graph
from kbit.integrations.transformers.static_caches import require_room, why_not_recorded
from kbit.integrations.transformers.step_kernels import step_kernels
from kbit.nn.tied import renew_tiles

WARM_STEPS = 2


class CUDAGraphWarning(UserWarning):
    """A model's decoding steps or prompts run as they would without CUDA graphs, or without hooks' Python."""


def enable_cuda_graphs(model: Any, *, compile_layers: bool = False) -> None:
    """Have `model.generate` replay prompts and decoding steps from CUDA graphs; for 16-bit models, too.

    It does so on a GPU with a cache of fixed size, `generate(cache_implementation="static")`, instead of
    transformers' torch.compile of the whole model. The first steps with a cache run kernel by kernel, then
    one is recorded, with kernels of its own around the layers (`step_kernels`). Prompts of up to 2048 tokens
    are padded to one of 24 lengths, and from the second of a length on replayed. The last call's cache stays,
    unless you hold it, and with it the graph, until a call has another batch size or needs more tokens, or
    the model's weights lie elsewhere, or its modules have other numbers, classes, hooks or adapters of peft.
    After other changes enable it again, which forgets all graphs. A replay does what a hook did on the GPU
    when it was recorded, and calls no hook. Prompts of models with hooks of yours, or forwards that you set,
    run as the model runs them: a hook would see padding. A warning names the first of these.

    Args:
        model: a causal language model of transformers, or one of peft or of torch.compile around it.
        compile_layers: torch.compile each decoder layer for these steps, too, which makes few kernels of many
            and takes a minute or so, once for each batch size. See `overlap_kernels`.

    Raises:
        TypeError: the model has no `generate` of transformers, or, to be compiled, no decoder with layers; or
            peft's prompt tuning puts tokens in front.

    >>> kbit.enable_cuda_graphs(model)
    """
    tuned, model = getattr(model, "active_peft_config", None), generating(model)
    if not (hasattr(model, "get_compiled_call") and hasattr(model, "generate")):  # a body has only the first
        raise TypeError(
            f"enable_cuda_graphs needs a model with transformers' generate(), got {type(model).__name__}. "
            "For a loop of your own there is torch.cuda.CUDAGraph."
        )
    if getattr(tuned, "is_prompt_learning", False):
        raise TypeError(
            f"enable_cuda_graphs: {type(tuned).__name__} puts tokens in front of a prompt, for which a cache "
            "of fixed size has no room. Use an adapter of another kind, such as LoRA."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        told = (
            f"{type(model).__name__} runs without CUDA graphs: it has an encoder, and steps of another form."
        )
        warnings.warn(told, CUDAGraphWarning, stacklevel=2)
        return
    if compile_layers:
        decoder_layers(model)
    forget_tried(model)
    renew_tiles(model, written=True)
    steps = _StepsOfModels(compile_layers)
    of_loops = next_steps.methods(model, lambda model: steps.of(model).loops)
    put(model, "enable_cuda_graphs", steps, _PromptsOfModels(steps), LastCaches(), *of_loops)
    vars(model).update(late_masks(model))


def disable_cuda_graphs(model: Any) -> None:
    """Undo `enable_cuda_graphs`, and free its graphs, its cache, and what its steps decoded.

    Args:
        model: any module; nothing happens where it was not enabled.
    """
    model = generating(model)
    own = getattr(model, "__dict__", {})
    if is_ours(own.get(_StepsOfModels.name)):
        for name in (MASKS, LONGEST):
            own.pop(name, None)
    names = _StepsOfModels.name, _PromptsOfModels.name, LastCaches.name, *next_steps.NAMES
    take_away(model, *names)
    forget_decoded(model)


class _StepsOfModels:
    """What runs the steps of a model, and of copies that are made of it."""

    name = "get_compiled_call"

    def __init__(self, compile_layers: bool) -> None:
        self.compile_layers = compile_layers
        self.__name__ = self.name  # by which a pickled model finds its class's method again
        self._steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()

    def __call__(self, model: Any, compile_config: Any = None) -> Steps:
        steps = self.of(model)
        steps.prepare()
        return steps

    def of(self, model: Any) -> Steps:
        """A model's."""
        if model not in self._steps:
            self._steps[model] = Steps(model, self.compile_layers)
        return self._steps[model]

    def forget(self, model: Any) -> None:
        """Drop a model's."""
        self._steps.pop(model, None)


class _PromptsOfModels:
    """What runs the prompts of a model, and of copies that are made of it."""

    name = "_prefill"

    def __init__(self, steps: _StepsOfModels) -> None:
        self.__name__ = self.name
        self._steps = steps

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        generation_config: Any,
        model_kwargs: Any,
        is_first_iteration: bool = True,
    ) -> Any:
        steps = self._steps.of(model)
        is_prepared, steps.is_prepared = steps.is_prepared, False
        whole = is_first_iteration and generation_config.prefill_chunk_size is None
        # Beams are put in another order, which gives a cache other tensors: no recording would last.
        whole = whole and (generation_config.num_beams or 1) == 1
        if whole and model._valid_auto_compile_criteria(model_kwargs, generation_config):
            if not is_prepared:  # as it is for prompts with steps behind them
                steps.prepare()
            if (
                _why_not_here(model) is None
                and (output := steps.prompts(input_ids, model_kwargs)) is not None
            ):
                return output
        return type(model)._prefill(model, input_ids, generation_config, model_kwargs, is_first_iteration)


class Steps:
    """Decoding steps of a model: run a few times, then recorded, then replayed.

    Args:
        model: see `enable_cuda_graphs`; not kept alive.
        compile_layers: see there.
        record, record_prompt: see `record_cuda_graph`.
    """

    def __init__(
        self,
        model: Any,
        compile_layers: bool = False,
        record: Record = record_cuda_graph,
        record_prompt: Record | None = None,
    ) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._compile_layers = compile_layers
        self._recordings = Recordings(self._run, record, self._warn, WARM_STEPS)
        self.prompts = Prompts(
            self._model, record_prompt or SharedPool(), lambda reason: self._warn(reason, "prompts")
        )
        self._compiled: dict[torch.nn.Module, Any] = {}
        self._rests_on: Hashable = None
        self.is_prepared = False
        self.loops = next_steps.Loops()
        self._told: set[str] = set()

    def prepare(self) -> None:
        """Before a call of `generate`: forget recordings that do not hold any more."""
        self.is_prepared = True
        self.loops.loop = None
        rests_on = handed_on(self._model())
        if rests_on != self._rests_on:
            self._rests_on = rests_on
            self._recordings.clear()
            self.prompts.clear()
            self._look_for_hooks()
        renew_decoded(self._model())
        renew_tiles(self._model())

    def _look_for_hooks(self) -> None:
        """Of padded prompts hooks would see other hidden states; steps do what they did, and call none."""
        if (stranger := stranger_in(self._model())) is not None:
            self.prompts.leave_to_model()
            self._tell(
                f"{stranger} "
                f"Prompts run without CUDA graphs. Steps replay what it did on the GPU, do not call it, and "
                f"overwrite tensors that it kept. If it has to be called, disable_cuda_graphs(model)."
            )

    def __call__(self, **inputs: Any) -> Any:
        """A step of the model: what `model(**inputs)` returns.

        Raises:
            ValueError: the cache has no room for it, as far as the length of a mask of tokens tells.
        """
        cache, inputs = cache_in(inputs), without_cache(inputs)
        if (loop := self.loops.loop) is not None and next_steps.NEXT in inputs:
            return loop.step(inputs[next_steps.NEXT])
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            require_room(cache, mask.shape[1])
        if not _is_of_one_token(inputs):  # a part of a prompt
            return self._run(cache, inputs)
        inputs = with_late_mask(self._model(), cache, inputs)
        if cache is None or cache not in self._recordings:
            reason = why_not_recorded(cache) or _why_not_here(self._model())
            if reason is not None:
                self._warn(reason)
                return self._run(cache, inputs)
        outputs = self._recordings(cache, inputs, self._model().device)
        self.loops.begin(self._recordings, cache, inputs, outputs)
        return outputs

    def _run(self, cache: Any, inputs: dict[str, Any]) -> Any:
        model = self._model()
        compiled = (
            compiled_layers(model, self._compiled) if self._compile_layers else contextlib.nullcontext()
        )
        with step_kernels(model), compiled:
            inputs = with_additive_masks(model, with_masks(model, cache, inputs))
            return model(**with_cache(cache, inputs))

    def _warn(self, reason: str, what: str = "decoding steps") -> None:
        self._tell(f"{what} of {type(self._model()).__name__} run without CUDA graphs: {reason}.")

    def _tell(self, told: str) -> None:
        if told not in self._told:
            self._told.add(told)
            warnings.warn(told, CUDAGraphWarning, stacklevel=4)


def _is_of_one_token(inputs: dict[str, Any]) -> bool:
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    return given is not None and given.shape[1] == 1


def _why_not_here(model: Any) -> str | None:
    devices = set(getattr(model, "hf_device_map", {}).values())
    return f"it is on {len(devices)} devices" if len(devices) > 1 else None
