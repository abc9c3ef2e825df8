"""How the gradients of an update's microbatches are added up: by DDP, or in one fixed order with
--microbatches.

To add another way, write a subclass of `Gradients` and choose it in `make_gradients`.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.parallel import DistributedDataParallel

from utils.data import Batch, DeviceLoader, Plan, fold_in
from utils.models import is_sharded, restored_buffers, sum_words
from utils.settings.training import TrainingSettings
from utils.training.setup import Setup
from utils.training.tree_sum import TreeSum, joined, set_parts

_OF_SIZE_1 = (
    r"Grad strides do not match bucket view strides[\s\S]*\bgrad\.sizes\(\) = \[(\d+, )*1[,\]]"
)


class ExchangeTimer:
    """The time of the exchanges of gradients. The host does not wait for the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = 0.0
        self.is_first = True
        self.marks: list[Any] = []  # the begin and the end of each exchange

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_up(self) -> None:
        """Add the seconds of the exchanges since the last call. A GPU must have completed them."""
        on_gpu = self.device.type == "cuda"
        marks = self.marks
        for begin, end in zip(marks[::2], marks[1::2], strict=True):
            self.seconds += begin.elapsed_time(end) / 1e3 if on_gpu else end - begin
        marks.clear()


class Gradients:
    """Gradients summed by DDP or FSDP2.

    With DDP, a rank accumulates, and the last backward pass averages over the ranks. FSDP2 averages
    in each backward pass.
    """

    searches = False  # whether cuDNN searches for its fastest kernels

    def __init__(self, model: nn.Module, accelerator: Accelerator, plan: Plan):
        self.model = model
        self.accelerator = accelerator
        self.plan = plan
        self.steps = max(map(len, plan.ranges(accelerator.num_processes)))
        """Forward and backward passes of this rank in an update; the last may have no
        microbatch."""
        self.exchange = ExchangeTimer(accelerator.device)
        self.digests: list[Tensor] = []  # of the updates since the ranks have synchronised
        self._step = 0  # forward and backward passes of the update so far

    def loss_scale(self, position: int) -> float:
        """The factor of the summed loss of each microbatch of the update at `position`.

        With it, the result is the gradient of the mean loss over the global batch, even if
        microbatches differ in size.
        """
        # DDP and FSDP2 divide by this number
        return self.accelerator.num_processes / self.plan.update_size(position)

    def seed(self, batch: Batch) -> None:
        """Seed random layers, such as dropout, for a microbatch: the same on any number of
        processes.
        """
        # all that a CPU's generator uses
        seed = fold_in(self.plan.seed, "layers", batch.update, batch.number) % 2**32
        # torch.manual_seed does the same as these lines, in 100 us
        if self.accelerator.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        torch.default_generator.manual_seed(seed)

    def microbatch(self, batch: Batch) -> AbstractContextManager[None]:
        """The context of the forward and backward pass of a microbatch."""
        self.seed(batch)
        self._step += 1
        if self.searches:  # but not again for the smaller last batch of an epoch
            size = self.plan.update_size(self.plan.at(batch.update)[1])
            cudnn.benchmark = size == self.plan.global_batch_size
        # FSDP2 reduces the gradients of each microbatch, so that no rank holds the full gradient.
        adds_up = self._step == self.steps or is_sharded(self.model)
        return nullcontext() if adds_up else self.accelerator.no_sync(self.model)

    def reduce(self) -> None:
        """Complete the gradients of an update; collective."""
        self._step = 0

    def add_digest(self) -> None:
        """Add the digest of an update after its step, with --microbatches; does not wait."""


class TreeGradients(Gradients):
    """Sums in the order of a binary tree over the microbatches: the same bits on any number of
    processes.

    DDP adds up nothing: all passes are in `no_sync`, and gradients are exchanged after the last one
    of an update. Each microbatch starts from the buffers that the update started with. Their
    changes are averaged in the same tree, over the microbatches that have samples. A parameter that
    is not used has a gradient of zeros.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, plan: Plan):
        super().__init__(model, accelerator, plan)
        self.tree = TreeSum(plan.ranges(accelerator.num_processes), accelerator.process_index)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Buffers of one type are joined to one vector: a network has hundreds of them, and each
        # kernel takes time.
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self.buffers = list(by_type.values())
        self.start: list[Tensor] = []  # the buffers of each type at the start of the update

    def loss_scale(self, position: int) -> float:
        # no factor may depend on the number of processes
        return 1 / self.plan.update_size(position)

    @contextmanager
    def microbatch(self, batch: Batch) -> Iterator[None]:
        self.seed(batch)
        if self.start:
            self._set_buffers(self.start)
        else:
            self.start = [*map(joined, self.buffers)]
        # `Accelerator.no_sync` does nothing in a single process, whose model has DDP if it has a
        # launcher.
        with getattr(self.model, "no_sync", nullcontext)():
            yield
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        changes = [*map(_change, map(joined, self.buffers), self.start)]
        tensors = [*gradients, *changes, torch.ones((), device=self.accelerator.device)]
        if not len(batch.images):  # its batch statistics are NaN
            tensors = [torch.zeros_like(tensor) for tensor in tensors]
        self.model.zero_grad()
        self.tree.add(batch.number, tensors)

    def reduce(self) -> None:
        begin = self.exchange.mark()
        sums = self.tree.total()
        self.exchange.marks += [begin, self.exchange.mark()]
        for parameter, gradient in zip(self.parameters, sums, strict=False):
            parameter.grad = gradient
        *changes, count = sums[len(self.parameters) :]
        means = [change / count.clamp(min=1) for change in changes]
        self._set_buffers([*map(_add_change, self.start, means)])
        self.start = []

    def add_digest(self) -> None:
        # With the weights, so that a wrong step shows in its own update. All ranks have the same
        # bits. One copy of all, because kernels for each tensor would take longer.
        both: Any = [each for p in self.parameters for each in (p.grad, p.detach())]
        self.digests.append(sum_words(joined(both)))

    def _set_buffers(self, values: Sequence[Tensor]) -> None:
        for buffers, vector in zip(self.buffers, values, strict=True):
            set_parts(buffers, vector)


def _change(now: Tensor, before: Tensor) -> Tensor:
    """The change of buffers. For integers, such as a count of batches, and bools, it is a float."""
    return now - before if now.is_floating_point() else (now.long() - before.long()).float()


def _add_change(before: Tensor, mean: Tensor) -> Tensor:
    """A buffer after the mean change of the microbatches, rounded for integers and bools."""
    if before.is_floating_point():
        return before + mean.to(before.dtype)
    return (before.long() + mean.round().long()).to(before.dtype)


def clip_gradients(
    accelerator: Accelerator, model: nn.Module, config: TrainingSettings
) -> Tensor | None:
    """Apply --clip_value, then --clip_norm, to the summed gradients of an update; all ranks have
    the same ones. Returns their norm before --clip_norm, if that is set.
    """
    if config.clip_value or config.clip_norm:
        # Accelerate's own functions would call it twice, which fp16 refuses
        accelerator.unscale_gradients()
    if config.clip_value:
        nn.utils.clip_grad_value_(model.parameters(), config.clip_value)
    if config.clip_norm:
        return nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    return None


def make_gradients(setup: Setup, model: nn.Module, batches: DeviceLoader) -> Gradients:
    """How the gradients of `model`, as Accelerate wraps it, are added up; collective.

    Without --microbatches, one backward pass on an empty batch lets DDP rebuild its gradient
    buckets now. It would rebuild them after its first backward pass. With three or more ranks,
    gradients are then added in a different order, so a resumed run would differ from an
    uninterrupted one.
    """
    if setup.config.microbatches:
        return TreeGradients(model, setup.accelerator, setup.plan)
    if isinstance(model, DistributedDataParallel):
        # By default, DDP waits for the GPU in the first 10 updates, which cannot be changed, and in
        # each 100th update.
        model._set_ddp_runtime_logging_sample_rate(10**9)
        # DDP warns if a gradient and its parameter have different layouts. For kernels of grey
        # images and kernels of one pixel this warning is wrong, because the stride of a dimension
        # of size 1 has no meaning.
        warnings.filterwarnings("ignore", message=_OF_SIZE_1)
        # do not compile for an empty batch
        with torch.compiler.set_stance("force_eager"), restored_buffers(model):
            setup.task.loss(model(batches.no_images), batches.no_labels).backward()
        model.zero_grad()
    return Gradients(model, setup.accelerator, setup.plan)
