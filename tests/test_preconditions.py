"""What recorded steps and prompts rest on: own forwards of modules, hooks of every module, norms' numbers."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.preconditions import preconditions
from kbit.nn import quantize_model
from kbit.nvfp4.layers.parts import NVFP4Settings
from kbit.nvfp4.layers.replace import replace_layers
from tiny_models import build


def quantized():
    return quantize_model(build("llama", torch.float32), QuantizationPolicy())


def test_what_a_forward_of_ones_own_does_is_told_by_itself():
    """Not by where it lies: the next one may lie there, as in a `with` that puts back what it changed."""
    mlp = (model := quantized()).model.layers[0].mlp
    own, seen = type(mlp).forward, []
    for scale in range(20):
        mlp.forward = types.MethodType(lambda self, x, scale=scale: own(self, x) * scale, mlp)
        seen.append(preconditions(model))
        assert preconditions(model) == seen[-1]
        del mlp.forward
    assert all(one != other for one, other in itertools.combinations(seen, 2))


@pytest.mark.parametrize("inference", [False, True])
def test_factors_that_launches_take_by_value_count(inference):
    """Of NVFP4's matrices: what is loaded lies where the old one lay."""
    with torch.inference_mode(inference):
        model, other = (build("llama", torch.float32) for _ in range(2))
        for one, scale in ((model, 1), (other, 8)):
            one.model.layers[0].mlp.down_proj.weight.data *= scale
            replace_layers(one, NVFP4Settings(activations="16bit"), lambda name: "proj" in name)
        before = preconditions(model)
        assert preconditions(model) == before
        model.load_state_dict(other.state_dict())
        assert preconditions(model) != before


def test_norms_and_hooks_of_every_module_count(request):
    model = quantized()
    before = preconditions(model)
    model.model.norm.variance_epsilon *= 2
    assert preconditions(model) != before
    before = preconditions(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    request.addfinalizer(hook.remove)
    assert preconditions(model) != before
