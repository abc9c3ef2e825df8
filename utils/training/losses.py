"""Losses, each the sum over the samples, so that they can be divided by the true global batch."""

from torch import Tensor
from torch.nn import functional as F

from utils.config.settings import TrainConfig


def loss_sum(config: TrainConfig, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum over the samples of the loss of `logits` [n, classes] against `labels` [n] int64; n may be 0.

    Cross-entropy, or the binary cross-entropy of each class against the rest averaged over the classes (as in
    "ResNet strikes back", Wightman et al., 2021). Label smoothing spreads that share of the target over all classes.
    """
    if config.loss == "cross_entropy":
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    classes = logits.shape[1]
    targets = F.one_hot(labels, classes).to(logits.dtype) * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / classes
