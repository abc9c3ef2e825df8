"""Experimental: the forward and backward pass of small networks as one CUDA graph.

The host takes 5 to 40 us to launch an operation; a small network has 47 to 76, each a few us on the
GPU. A graph launches all of them at once. Its results are bitwise identical: it has the same
kernels. Clipping, the optimizer, EMA and the meter's sums stay outside.

No GPU has run it yet, so it is not in utils/. tests/gpu/ measures it, and test_cuda_graphs.py
compares it with the usual updates on a CPU, where graph_recorder.py takes the place of CUDA's
graphs.
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
    """Runs `compute` as a CUDA graph for batches of one shape. Others, such as an epoch's last, run
    eagerly.

    So does the first batch, which chooses kernels. A graph reads and writes the same memory each
    time: batches are copied into it, `.grad` is set after each replay, and results are copied out
    of it.
    """

    def __init__(self, compute: Pass, parameters: Iterable[nn.Parameter]):
        self.compute = compute
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.key: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.replays = 0  # for checks

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
        self.replays += 1
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return recursively_apply(copied, self.results)

    def capture(self, run: Any, images: Tensor, labels: Tensor, scale: float) -> None:
        """Record the pass of a batch. This computes nothing."""
        self.images, self.labels = images.clone(), labels.clone()
        self.graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU, such as one that pins batches
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
