"""Gradient checkpointing: blocks compute their activations again in the backward pass instead of keeping them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from utils.errors import UserError


def checkpoint_blocks(model: Any, name: str) -> None:
    """Let the model's blocks compute their activations twice; the results are the same, bit for bit.

    timm's models choose their blocks. In others, a block is a layer in an nn.Sequential that has layers of its own.
    Raises UserError for a model without blocks.
    """
    if hasattr(model, "set_grad_checkpointing"):
        try:
            model.set_grad_checkpointing(True)
            blocks, model.switch_checkpointing = [model], model.set_grad_checkpointing
        except AssertionError:  # the model does not support it
            blocks = []
    else:
        blocks, switch = _blocks(model), SimpleNamespace(on=True)
        for block in blocks:
            block.forward = partial(_run, switch, block.forward)
        model.switch_checkpointing = partial(setattr, switch, "on")
    if not blocks:
        fix = "use a model with blocks, such as resnet50, convnext_tiny or timm/vit_small_patch16_224"
        raise UserError(f"--grad_checkpointing: {name} does not support it", fix)
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(_use_copies)
            layer.register_forward_hook(_use_own, always_call=True)  # PyTorch ends the second pass by an exception


@contextmanager
def keep_activations(model: Any) -> Iterator[None]:
    """Let the blocks of `checkpoint_blocks`, if any, keep their activations for a forward pass."""
    switch = getattr(model, "switch_checkpointing", lambda on: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _run(switch: SimpleNamespace, forward: Callable, *inputs: Any) -> Any:
    # The second pass has the same dropout masks. Without gradients, there is no second pass.
    return checkpoint(forward, *inputs, use_reentrant=False) if switch.on else forward(*inputs)


def _blocks(module: nn.Module) -> list[nn.Module]:
    found = []
    for child in module.children():
        is_block = isinstance(module, nn.Sequential | nn.ModuleList) and any(child.children())
        if is_block and not isinstance(child, nn.Sequential | nn.ModuleList):
            found.append(child)
        else:
            found += _blocks(child)
    return found


def _use_copies(layer: _BatchNorm, inputs: Any) -> None:
    """In the second pass, which is part of the backward pass, update copies of the running statistics."""
    if torch._C._current_graph_task_id() != -1:
        layer.__dict__["own_buffers"] = dict(layer._buffers)
        copies = {name: buffer.clone() for name, buffer in layer._buffers.items() if buffer is not None}
        layer._buffers.update(copies)


def _use_own(layer: _BatchNorm, inputs: Any, outputs: Any) -> None:
    layer._buffers.update(layer.__dict__.pop("own_buffers", {}))
