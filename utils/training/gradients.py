"""How the gradients of an update's microbatches are added up: by DDP, or in one fixed order with --microbatches.

To add another way, write a subclass of `Gradients` and choose it in `make_gradients`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.config.settings import TrainConfig
from utils.data.datasets import Batch
from utils.data.order import Plan, fold_in
from utils.models.zoo import seed_layers
from utils.ranks.accelerator import prepare_buckets
from utils.ranks.ranks import Ranks
from utils.training.building import Resolved
from utils.training.tree_sum import Exchange, TreeSum


class Gradients:
    """Sums by DDP: a rank accumulates, and DDP averages over the ranks during the last backward pass."""

    def __init__(self, model: nn.Module, accelerator: Accelerator, plan: Plan):
        self.model, self.accelerator, self.plan = model, accelerator, plan
        self.steps = -(-plan.microbatches // accelerator.num_processes)
        """Forward and backward passes of this rank in an update; the last may have no microbatch."""
        self._step = 0  # forward and backward passes of the update so far

    def loss_scale(self, position: int) -> float:
        """The factor of the summed loss of each microbatch of the update at `position`.

        With it, the result is the gradient of the mean loss over the global batch, even if microbatches differ in size.
        """
        return self.accelerator.num_processes / self.plan.update_size(position)  # DDP divides by this number

    def seed(self, batch: Batch) -> None:
        """Seed random layers, such as dropout, for a microbatch: the same on any number of processes."""
        seed_layers(self.accelerator.device, fold_in(self.plan.seed, "layers", batch.update, batch.number))

    def microbatch(self, batch: Batch) -> AbstractContextManager[None]:
        """The context of the forward and backward pass of a microbatch."""
        self.seed(batch)
        self._step += 1
        return nullcontext() if self._step == self.steps else self.accelerator.no_sync(self.model)

    def reduce(self) -> None:
        """Complete the gradients of an update; collective."""
        self._step = 0


class TreeGradients(Gradients):
    """Sums in the order of a binary tree over the microbatches: the same bits on any number of processes.

    Each microbatch starts from the buffers that the update started with. Their changes are averaged in the same tree,
    over the microbatches that have samples. A parameter that is not used has a gradient of zeros. With one microbatch
    per rank, DDP exchanges gradients during the backward pass. Otherwise `model` is the module itself, and gradients
    are exchanged after the last backward pass.
    """

    def __init__(self, model: nn.Module, module: nn.Module, accelerator: Accelerator, plan: Plan):
        super().__init__(model, accelerator, plan)
        processes = accelerator.num_processes
        self.tree = TreeSum(plan.microbatches, processes, accelerator.process_index)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        buffers = list(module.buffers())
        # Buffers of one type are joined to one vector: a network has hundreds of them, and each kernel takes time.
        self.buffers = [[b for b in buffers if b.dtype == dtype] for dtype in {b.dtype: None for b in buffers}]
        self.start: list[Tensor] = []  # the buffers of each type at the start of the update
        self.is_empty = False
        self.running: list[tuple[Tensor, Exchange]] = []
        self.overlaps = isinstance(model, DistributedDataParallel)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._exchange_bucket)

    def loss_scale(self, position: int) -> float:
        return 1 / self.plan.update_size(position)  # no factor may depend on the number of processes

    @contextmanager
    def microbatch(self, batch: Batch) -> Iterator[None]:
        self.seed(batch)
        if not self.start:
            self.start = [_joined(buffers) for buffers in self.buffers]
        else:
            self._set_buffers(self.start)
        self.is_empty = not len(batch.images)
        self.running = []  # `prepare_buckets` has begun some
        yield
        changes = [_change(_joined(now), before) for now, before in zip(self.buffers, self.start, strict=True)]
        tensors = [*changes, torch.ones((), device=self.accelerator.device)]
        if not self.overlaps:
            tensors = [*(_gradient(parameter) for parameter in self.parameters), *tensors]
            for parameter in self.parameters:
                parameter.grad = None
        if self.is_empty:  # its batch statistics are NaN
            tensors = [torch.zeros_like(tensor) for tensor in tensors]
        self.tree.add(batch.number, tensors)

    def _exchange_bucket(self, state: None, bucket) -> torch.futures.Future[Tensor]:
        """Begin the exchange of some gradients; DDP waits for the first part of it at the end of the backward pass."""
        buffer = bucket.buffer()
        if self.is_empty:
            buffer.zero_()
        exchange = self.tree.exchange([buffer])
        self.running.append((buffer, exchange))
        return exchange.work.get_future().then(lambda _: buffer)

    def reduce(self) -> None:
        for buffer, exchange in self.running:
            total = exchange.finish()
            if total is not buffer:
                buffer.copy_(total)
        self.running = []
        sums = self.tree.total()
        gradients = sums[: len(self.parameters)]
        if self.overlaps:
            # DDP's gradients are parts of a bucket. On a GPU, the bits of a norm depend on where its tensor begins.
            parts = [_gradient(parameter) for parameter in self.parameters]
            gradients = [torch.empty_like(part) for part in parts]
            torch._foreach_copy_(gradients, parts)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        *changes, count = sums[-1 - len(self.buffers) :]
        means = [change / count.clamp(min=1) for change in changes]
        self._set_buffers([_changed(*pair) for pair in zip(self.start, means, strict=True)])
        self.start = []

    @torch.no_grad()
    def _set_buffers(self, joined: Sequence[Tensor]) -> None:
        for buffers, values in zip(self.buffers, joined, strict=True):
            parts = values.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(to) for part, to in zip(parts, buffers, strict=True)])


def _joined(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _change(now: Tensor, before: Tensor) -> Tensor:
    """The change of buffers. For integers, such as a count of batches, and bools, it is a float."""
    return now - before if now.is_floating_point() else (now.long() - before.long()).float()


def _changed(before: Tensor, mean: Tensor) -> Tensor:
    """A buffer after the mean change of the microbatches, which is rounded for integers and bools."""
    if before.is_floating_point():
        return before + mean.to(before.dtype)
    return (before.long() + mean.round().long()).to(before.dtype)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def clip_gradients(accelerator: Accelerator, model: nn.Module, config: TrainConfig) -> None:
    """Apply --clip_value, then --clip_norm, to the summed gradients of an update; all ranks have the same ones."""
    if config.clip_value is None and config.clip_norm is None:
        return
    accelerator.unscale_gradients()  # only once in an update: fp16 refuses a second call
    parameters = list(model.parameters())
    if config.clip_value is not None:
        nn.utils.clip_grad_value_(parameters, config.clip_value)
    if config.clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)


def make_gradients(
    resolved: Resolved, model: nn.Module, module: nn.Module, accelerator: Accelerator, ranks: Ranks
) -> Gradients:
    """How the gradients of `model`, which wraps `module` for training, are added up; collective."""
    plan, spec = resolved.plan, resolved.spec
    gradients = Gradients(model, accelerator, plan)
    if resolved.config.microbatches:
        gradients = TreeGradients(model, module, accelerator, plan)
        check_same_weights(module, ranks)
    no_images = torch.empty(0, spec.channels, spec.height, spec.width, device=accelerator.device)
    prepare_buckets(model, module, no_images)  # otherwise a resumed run sums gradients differently
    return gradients


def check_same_weights(module: nn.Module, ranks: Ranks) -> None:
    """Raise UserError if ranks start with different weights. Without DDP, nothing makes them equal. Collective."""
    if ranks.topology.world_size == 1:
        return
    digest = hashlib.sha256()
    for tensor in (*module.parameters(), *module.buffers()):
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    fix = "use the same kind of processor, the same versions and the same files on all machines"
    ranks.check_same(digest.hexdigest(), "different weights at the start", fix)
