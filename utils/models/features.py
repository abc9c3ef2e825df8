"""Features: the outputs of the frozen layers of a model, if all trained parameters are in one part
after them.
"""

import os
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from utils.data.spec import InputSpec
from utils.models.layers import restored_buffers


def find_last_part(model: nn.Module, spec: InputSpec) -> tuple[nn.Module | None, str]:
    """The module that has all trained parameters and computes the logits from features, or None and
    why there is none.

    Its input is one tensor that is not random in training, and its output is that of the model. If
    the module is in an nn.Sequential, the whole nn.Sequential is used, which may also contain
    layers such as dropout.
    """
    trained = [
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    name = os.path.commonpath([each.replace(".", "/") for each in trained]).replace("/", ".")
    while (
        isinstance(model.get_submodule(above := name.rpartition(".")[0]), nn.Sequential) and above
    ):
        name = above
    if not name:
        return None, "the trained layers are in several modules"
    part, was_training = model.get_submodule(name), model.training
    inputs, outputs = list[tuple](), list[Tensor]()
    images = torch.rand(2, spec.channels, *spec.size, generator=torch.Generator().manual_seed(0))
    # layers may change it
    before = part.register_forward_pre_hook(lambda _, given: inputs.append(deepcopy(given)))
    after = part.register_forward_hook(lambda _, given, output: outputs.append(output))
    with before, after, torch.no_grad(), torch.random.fork_rng(devices=[]), restored_buffers(model):
        returned = [model.train(training)(images) for training in (False, True)]
    model.train(was_training)
    takes_one = all(len(given) == 1 and isinstance(given[0], Tensor) for given in inputs)
    if not takes_one or [*map(id, outputs)] != [*map(id, returned)]:
        return None, f"the output of the model is not that of {name}"
    if not torch.equal(*(features.nan_to_num() for (features,) in inputs)):
        return None, f"the input of {name} is random in training, as after dropout"
    return part, ""


def accept_features(model: nn.Module, part: nn.Module, spec: InputSpec) -> None:
    """Let the model also accept features, the input of its last part, instead of images."""
    of_images = {(spec.channels, *each.size) for each in (spec, spec.for_evaluation())}
    model.forward = partial(_accepting, model.forward, part, of_images)


def _accepting(
    forward: Callable, part: nn.Module, of_images: Collection[tuple[int, ...]], inputs: Tensor
) -> Tensor:
    return forward(inputs) if tuple(inputs.shape[1:]) in of_images else part(inputs)


class FrozenPart(nn.Module):
    """The layers before the last part of a model: from images [n, C, H, W] to features [n, ...]."""

    def __init__(self, model: nn.Module, part: nn.Module):
        super().__init__()
        self.model, self.part = model, part

    def forward(self, images: Tensor) -> Tensor:
        found: list[Tensor] = []
        with self.part.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone())):
            self.model(images)
        return found[0]
