"""What stands for a CUDA graph on a CPU: recorded operators; a replay runs them alone, without Python."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig

import kbit
from kbit.integrations.transformers import cuda_graphs

_SYNCHRONIZING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
REFUSED = "operation not permitted when stream is capturing"


class Tape(TorchDispatchMode):
    """The operators that run meanwhile. What they wrote can be undone, since a capture does not execute."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = []
        self.written = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _SYNCHRONIZING:
            raise RuntimeError(f"{REFUSED}\nand more")
        for described, value in zip(func._schema.arguments, args, strict=False):
            writes = described.alias_info is not None and described.alias_info.is_write
            for tensor in tree_leaves(value) if writes else ():
                self.written.setdefault(id(tensor), (tensor, tensor.clone()))
        result = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        for tensor, before in reversed(self.written.values()):
            tensor.copy_(before)

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, result in self.operators:
            again = func(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(result), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class Recorder:
    """In place of `record_cuda_graph`; counts."""

    def __init__(self) -> None:
        self.recorded, self.replayed = 0, 0

    def __call__(self, run, device):
        tape = Tape()
        try:
            with tape:
                outputs = run()
        finally:
            tape.undo()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            tape.play()

        return replay, outputs


def enable_on_cpu(model, record_prompt=None):
    """`enable_cuda_graphs` with tapes; returns what records steps."""
    kbit.enable_cuda_graphs(model)
    recorder = Recorder()
    steps = cuda_graphs.Steps(model, record=recorder, record_prompt=record_prompt or Recorder())
    model.get_compiled_call.__func__._steps[model] = steps
    compile_on_cpu(model)
    return recorder


def compile_on_cpu(model):
    """Have `generate` ask for compiled steps on a CPU, too."""
    anywhere = CompileConfig()
    anywhere._compile_all_devices = True
    model.generation_config.compile_config = anywhere
