"""Features: the outputs of the frozen layers of a model, if all trained parameters are in one part
after them.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, normalize

from utils.data import InputSpec
from utils.models.layers import restored_buffers


def find_last_part(
    model: nn.Module, spec: InputSpec, head: Sequence[str] = ()
) -> tuple[nn.Module | None, str]:
    """The module that has all trained parameters and computes the logits from features, or None and
    why there is none.

    If `head` is given, it has the names of the trained parameters, and all other layers are in
    evaluation mode.

    The input of the module is one tensor that is not random in training, and its output is that of
    the model. If the module is in an nn.Sequential, the whole nn.Sequential is used, which may also
    contain layers such as dropout.
    """
    named = model.named_parameters()
    names = head or [name for name, parameter in named if parameter.requires_grad]
    trained = [name.split(".")[:-1] for name in names]
    levels = takewhile(lambda level: len({*level}) == 1, zip(*trained, strict=False))
    name = _outermost_sequential(model, ".".join(level[0] for level in levels))
    if not name:
        return None, "the trained layers are in several modules"
    part = model.get_submodule(name)
    was_training = model.training
    inputs = list[tuple]()
    outputs = list[Tensor]()
    images = torch.rand(2, spec.channels, *spec.size, generator=torch.Generator().manual_seed(0))
    # layers may change it
    before = part.register_forward_pre_hook(lambda _, given: inputs.append(deepcopy(given)))
    after = part.register_forward_hook(lambda _, given, output: outputs.append(output))
    with before, after, torch.no_grad(), torch.random.fork_rng([]), restored_buffers(model):
        returned = []
        for training in (False, True):
            model.train(training and not head)
            part.train(training)
            returned.append(model(images))
    model.train(was_training)
    takes_one = all(len(given) == 1 and isinstance(given[0], Tensor) for given in inputs)
    is_output = len(outputs) == 2 and outputs[0] is returned[0] and outputs[1] is returned[1]
    if not takes_one or not is_output:
        return None, f"the output of the model is not that of {name}"
    if not torch.equal(*(features.nan_to_num() for (features,) in inputs)):
        return None, f"the input of {name} is random in training, as after dropout"
    return part, ""


def _outermost_sequential(model: nn.Module, name: str) -> str:
    """Go up from this module as long as its parent is an nn.Sequential; returns the name that is
    reached.
    """
    parent = name.rpartition(".")[0]
    if parent and isinstance(model.get_submodule(parent), nn.Sequential):
        return _outermost_sequential(model, parent)
    return name


class FrozenPart(nn.Module):
    """The layers before the last part of a model: from images [n, C, H, W] to features [n, ...].

    `thumbnails` are grey ones of the last images, float32 [n, 256], with mean 0 and length 1: the
    product of two is their correlation.
    """

    def __init__(self, model: nn.Module, part: nn.Module):
        super().__init__()
        self.model = model
        self.part = part

    def forward(self, images: Tensor) -> Tensor:
        found: list[Tensor] = []
        # so small that it is the same after an image was resized
        small = adaptive_avg_pool2d(images.mean(1), 16).flatten(1)
        self.thumbnails = normalize(small - small.mean(1, keepdim=True))
        # a copy, because layers may change it
        with self.part.register_forward_pre_hook(lambda _, given: found.append(given[0].clone())):
            self.model(images)
        return found[0]
