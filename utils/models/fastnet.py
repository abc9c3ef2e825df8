"""fastnet: a small network for small images, whose first layer is computed from training images."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from utils.config import require
from utils.data import ArrayDataset, ImageDataset, InputSpec

_IMAGES = 1000  # the first layer is computed from at most this many training images
_EPS = 5e-4  # added to the variances of patches, as in the paper, so that noise is not amplified


class FastNet(nn.Module):
    """A whitening layer, then blocks of two 3x3 convolutions, each of which halves height and
    width.

    `widths` has the channels of each block. The logits are multiplied by `scaling`. Raises
    UserError for images larger than 96 pixels.
    """

    def __init__(
        self,
        spec: InputSpec,
        classes: int,
        widths: Sequence[int] = (64, 256, 256),
        scaling: float = 1 / 9,
    ):
        super().__init__()
        problem = f"fastnet takes images of up to 96 pixels, got {spec.height}x{spec.width}"
        require(spec.small, problem, "try --image_size 32, or --model resnet18")
        self.spec = spec
        self.scaling = scaling
        self.whiten = nn.Conv2d(spec.channels, 8 * spec.channels, 2)
        self.whiten.requires_grad_(False)  # then its activation, the largest, needs no gradients
        ends = [self.whiten.out_channels, *widths]
        self.blocks = nn.Sequential(*(_block(*pair) for pair in zip(ends, widths, strict=False)))
        self.head = nn.Linear(ends[-1], classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(nn.functional.gelu(self.whiten(images)))
        return self.head(x.amax((2, 3))) * self.scaling

    def initialise(self, images: ImageDataset) -> None:
        """Compute the first layer from the training images."""
        self.whiten_patches(some_images(images))

    def whiten_patches(self, pixels: np.ndarray) -> None:
        """Make the first layer whiten the 2x2 patches of these images, uint8 [n, H, W, C], n >= 1.

        Each principal component of the normalised patches becomes two channels, the component
        divided by its standard deviation and the negative of that, so that no information is lost
        in the activation. Sums of integers are exact in float64, so the weights do not depend on
        the number of threads.
        """
        std, mean = (np.repeat(values, 4) for values in (self.spec.std, self.spec.mean))
        count = 0
        total = np.zeros(len(std))
        products = np.zeros((len(std), len(std)))
        for part in np.array_split(pixels, -(-len(pixels) // 100)):
            # [n, H - 1, W - 1, C, 2, 2]
            windows = np.lib.stride_tricks.sliding_window_view(part, (2, 2), axis=(1, 2))
            patches = windows.reshape(-1, len(std)).astype(np.float64)
            count += len(patches)
            total += patches.sum(0)
            products += patches.T @ patches
        average = total / count
        center = (average / 255 - mean) / std
        covariance = products / count - np.outer(average, average)
        covariance /= np.outer(255 * std, 255 * std)
        variances, components = np.linalg.eigh(covariance)
        # LAPACK chooses the signs
        components *= np.sign(components[np.abs(components).argmax(0), np.arange(len(std))])
        kernels = (components / np.sqrt(np.maximum(variances, 0) + _EPS)).T
        kernels = np.concatenate([kernels, -kernels])
        assert self.whiten.bias is not None
        with torch.no_grad():
            self.whiten.weight.copy_(torch.from_numpy(kernels).view(self.whiten.weight.shape))
            self.whiten.bias.copy_(torch.from_numpy(-kernels @ center))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution, pooling, convolution.

    At first, output channel i of a convolution is a copy of input channel i.
    """
    convs = [nn.Conv2d(n, outputs, 3, padding="same", bias=False) for n in (inputs, outputs)]
    norms = [nn.BatchNorm2d(outputs, momentum=0.2) for _ in convs]  # runs are short
    for conv, norm in zip(convs, norms, strict=True):
        # channels without such an input stay random
        nn.init.dirac_(conv.weight[: conv.in_channels])
        norm.weight.requires_grad = False  # the next layer can learn the scale
    return nn.Sequential(
        convs[0], nn.MaxPool2d(2), norms[0], nn.GELU(), convs[1], norms[1], nn.GELU()
    )


def some_images(dataset: ImageDataset) -> np.ndarray:
    """Evenly spaced training images to initialise the network with, uint8 [n, H, W, C]; the same on
    every rank.
    """
    assert isinstance(dataset, ArrayDataset)  # the network takes small images only
    return dataset.rows[np.arange(0, len(dataset), -(-len(dataset) // _IMAGES))]
