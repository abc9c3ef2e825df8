"""Test-time augmentation: a model's prediction from several views of each image."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Views(nn.Module):
    """The weighted mean of a model's logits over views of each image, [n, C, H, W] to float32 [n, outputs].

    The views of `flip` are the image and its mirror image. Those of `shift` are the image, with weight 1/2, and the
    image shifted by one pixel to the lower right and to the upper left, with weight 1/4 each; the edges are reflected.
    `flip,shift` has the views of `shift` and their mirror images, as `infer_mirror_translate` of airbench (Jordan,
    2024, https://arxiv.org/abs/2404.00498), which averages logits too. After a softmax or a sigmoid, this is the
    normalised geometric mean of the probabilities. Shifts need images of at least 2x2 pixels.
    """

    def __init__(self, model: nn.Module, views: str):
        super().__init__()
        self.model, self.views = model, views.split(",")

    def forward(self, images: Tensor) -> Tensor:
        views = [(1.0, images)]
        if "shift" in self.views:
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            views = [(0.5, images), (0.25, padded[..., :-2, :-2]), (0.25, padded[..., 2:, 2:])]
        if "flip" in self.views:
            views += [(weight, view.flip(-1)) for weight, view in views]
        total = sum(weight for weight, _ in views)
        return torch.stack([weight / total * self.model(view).float() for weight, view in views]).sum(0)
