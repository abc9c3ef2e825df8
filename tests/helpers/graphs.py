"""A trial: the forward and backward pass of small networks as one CUDA graph.

The host needs 5 to 40 us for each operation that it starts, and a small network has a hundred of
them, each of which a GPU computes in a few us. A graph starts all of them at once. Its results have
the same bits, because it has the same kernels. Clipping, the optimizer, the average and the sums of
the meter stay outside.

No GPU has run it yet, so it is not in utils/. tests/gpu/ measures it, and test_graphs.py compares it
with the usual updates on a CPU, where graph_recorder.py takes the place of CUDA's graphs.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

import train

Pass = Callable[[Any, Tensor, Tensor, float], tuple[Tensor, Any]]


class GraphedPass:
    """`compute` for the batches of one size. Others, such as the last of an epoch, are computed as
    usual.

    The first batch of a size is too, because its kernels are chosen then. A graph reads and writes
    the same memory each time: batches are copied into it, gradients are given to the optimizer
    again, and results are copied out of it.
    """

    def __init__(self, compute: Pass, parameters: Iterable[nn.Parameter]):
        self.compute = compute
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.key: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, run: Any, images: Tensor, labels: Tensor, scale: float
    ) -> tuple[Tensor, Any]:
        key = [(each.shape, each.stride(), each.dtype) for each in (images, labels)], scale
        if key != self.key:
            if self.graph is None:
                self.key = key
            return self.compute(run, images, labels, scale)
        if self.graph is None:
            self.capture(run, images, labels, scale)
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return recursively_apply(copied, self.results)

    def capture(self, run: Any, images: Tensor, labels: Tensor, scale: float) -> None:
        """Record the pass of a batch. This computes nothing."""
        self.images, self.labels = images.clone(), labels.clone()
        self.graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU, such as one that page-locks batches
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = self.compute(run, self.images, self.labels, scale)
        self.gradients = [parameter.grad for parameter in self.parameters]


def copied(result: Tensor) -> Tensor:
    """A copy, because the meter keeps results for a second and the next replay overwrites them."""
    return result.detach().clone()


USUAL = """\
            outputs = run.model(batch.images)
            loss = run.task.loss(outputs, batch.labels)
            run.accelerator.backward(loss * gradients.loss_scale(state.position))
"""
GRAPHED = """\
            scale = gradients.loss_scale(state.position)
            loss, outputs = run.compute(run, batch.images, batch.labels, scale)
"""


def compute(run: Any, images: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Any]:
    """Forward and backward pass of a microbatch: its summed loss and the model's outputs."""
    outputs = run.model(images)
    loss = run.task.loss(outputs, labels)
    run.accelerator.backward(loss * scale)
    return loss, outputs


def train_with_a_graph() -> None:
    """The updates of train.py in this process use a graph: one rank, one microbatch, no fp16."""
    source = inspect.getsource(train.train_update)
    assert USUAL in source, "train_update has changed: change USUAL and GRAPHED too"
    usual_train = train.train

    def graphed_train(run, profiler):
        run.compute = GraphedPass(compute, run.model.parameters())
        return usual_train(run, profiler)

    exec(source.replace(USUAL, GRAPHED), vars(train))
    train.train = graphed_train
