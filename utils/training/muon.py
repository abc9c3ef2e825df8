"""Muon, for the hidden matrices and kernels of a model, with AdamW for its other parameters."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from utils.config import require
from utils.models import head_prefixes
from utils.settings.training import TrainingSettings
from utils.training.optim import Groups, names_without_decay


class Muon(Optimizer):
    """Muon for hidden matrices and kernels, and AdamW, whose learning rate is `adamw_lr` times
    --lr, for the rest.

    By default, the updates of both have the same size (Liu et al., 2025), so that they share a
    learning rate. Groups with `hidden` are updated by torch's Muon, the others by its AdamW. Muon
    treats a convolution kernel as the matrix [out, in * height * width] (Jordan et al., 2024). Both
    work on the groups and the state of this optimizer, so it is saved, restored and scheduled like
    any other.
    """

    def __init__(
        self,
        groups: Groups,
        config: TrainingSettings,
        adamw_lr: float = 1.0,
        betas: Sequence[float] = (0.9, 0.999),
        adjust_lr_fn: str = "match_rms_adamw",
    ):
        problem = "--optimizer muon: this model has no hidden matrices to train"
        require(any(group["hidden"] for group in groups), problem, "use adamw")
        for group in groups:
            group["lr_scale"] *= 1.0 if group["hidden"] else adamw_lr
        beta1, beta2 = betas
        lr, momentum = config.lr, config.momentum
        placeholder = [torch.zeros(1, 1)]  # the groups are given before each step
        self._muon = optim.Muon(placeholder, lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)
        self._adamw = optim.AdamW(placeholder, lr, (beta1, beta2), fused=True)
        own = {True: self._muon.defaults, False: self._adamw.defaults}
        super().__init__([own[group["hidden"]] | group for group in groups], {"lr": lr})

    @staticmethod
    def groups(model: nn.Module) -> dict[str, dict]:
        """For the name of each parameter, `hidden`: whether Muon updates it."""
        hidden = hidden_matrices(model) - names_without_decay(model)
        return {name: {"hidden": name in hidden} for name, _ in model.named_parameters()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of both optimizers."""
        self._muon.param_groups, self._muon.state = [], defaultdict(dict)
        self._adamw.param_groups, self._adamw.state = [], self.state
        for group in self.param_groups:
            if group["hidden"]:
                used = [kernel for kernel in group["params"] if kernel.grad is not None]
                group = group | {"params": [*map(self._as_matrix, used)]}
            (self._muon if group["hidden"] else self._adamw).param_groups.append(group)
        self._muon.step()
        self._adamw.step()

    def _as_matrix(self, kernel: Tensor) -> Tensor:
        """The kernel as a matrix in the same memory, with its gradient and its momentum."""
        # output first, then the others as in memory, so that a view is possible
        order = [0, *sorted(range(1, kernel.ndim), key=kernel.stride, reverse=True)]
        state = self.state[kernel]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(kernel)
        matrix, momentum = (
            each.permute(order).view(len(kernel), -1) for each in (kernel, state["momentum_buffer"])
        )
        assert kernel.grad is not None
        matrix.grad = kernel.grad.permute(order).reshape(matrix.shape)  # may have another layout
        self._muon.state[matrix] = {"momentum_buffer": momentum}
        return matrix


def hidden_matrices(model: nn.Module) -> set[str]:
    """The weights of linear layers and convolutions, except the first one, which reads the images,
    and the head.

    Kernels of grouped convolutions are not one matrix.
    """
    names = []
    for path, module in model.named_modules():
        is_grouped = isinstance(module, nn.Conv2d) and module.groups > 1
        if isinstance(module, nn.Linear | nn.Conv2d | nn.MultiheadAttention) and not is_grouped:
            own = module.named_parameters(path, recurse=False)
            names += [name for name, parameter in own if parameter.ndim > 1]
    heads = head_prefixes(model)
    return {name for name in names[1:] if not name.startswith(heads)}
