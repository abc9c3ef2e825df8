"""Our own small models mnist_cnn and mlp.

To add a model, write a class or a function with the same first two arguments and add it to
`OWN_MODELS` in zoo.py.
"""

import math

import torch
from torch import Tensor, nn

from utils.data import InputSpec


class MnistCNN(nn.Module):
    """The convolutional network of the MNIST tutorials: 32 and 64 3x3 filters, then 500 units, with
    dropout.
    """

    def __init__(self, spec: InputSpec, classes: int, dropout: float = 0.5):
        super().__init__()
        height, width = (((side - 2) // 2 - 2) // 2 for side in spec.size)
        self.conv1 = nn.Conv2d(spec.channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * height * width, 500)
        self.fc2 = nn.Linear(500, classes)
        self.drop_maps = nn.Dropout2d(dropout)
        self.drop_units = nn.Dropout(dropout)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]  # without the pixels that the poolings would drop
        x = _onednn(images[..., : height - (height + 2) % 4, : width - (width + 2) % 4])
        x = self.relu(self.pool(self.conv1(x)))
        x = self.pool(self.conv2(x))
        if x.is_mkldnn:  # oneDNN's pooling drops NaN, but NaN weights must make the loss NaN
            kernels = (*self.conv1.parameters(), *self.conv2.parameters())
            x = x.to_dense().add_(sum(0 * kernel.detach().sum() for kernel in kernels))
        x = self.relu(self.drop_maps(x))  # drops whole maps, so it can come after the pooling
        return self.fc2(self.drop_units(self.relu(self.fc1(x.flatten(1)))))


def _onednn(images: Tensor) -> Tensor:
    """On the CPU, convert the images to oneDNN's own layout. Its pooling is faster, so a step is a
    sixth faster.

    The layout is not used with autocast to bfloat16, which it does not support, or with
    torch.compile, which fuses poolings itself.
    """
    fits = images.device.type == "cpu" and images.dtype == torch.float32
    others = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    if fits and not others and torch.backends.mkldnn.is_available():
        return images.to_mkldnn()
    return images


class MLP(nn.Module):
    """Two linear layers, without dropout and batch statistics, so that runs on different topologies
    are comparable.
    """

    def __init__(self, spec: InputSpec, classes: int, hidden: int = 256):
        super().__init__()
        self.hidden = nn.Linear(spec.channels * math.prod(spec.size), hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(torch.relu(self.hidden(images.flatten(1))))
