"""Loss functions by name. Each returns the loss of each sample, [n].

To add a loss of classification, write a function with these arguments and add it to `LOSSES`. Those
with a default are what --loss_args may set.

* `logits` [n, classes], where n may be 0
* `targets`: class indices, int64 [n], or class probabilities, float [n, classes], as from Mixup
* `smoothing`: the fraction of the target to spread evenly over all classes
* `weight`: with --class_weights, the weight of each class, float32 [classes], else None

Losses are linear in the targets: the loss of mixed targets is the mixture of the losses.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from utils.config.table import Table


def cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor | None
) -> Tensor:
    """Cross-entropy of the softmax; in multilabel and binary, of the sigmoid."""
    return F.cross_entropy(logits, targets, weight, reduction="none", label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor | None
) -> Tensor:
    """Binary cross-entropy of each class against the rest, averaged over the classes.

    As in "ResNet strikes back", Wightman et al., 2021. A sample has the weight of its class.
    """
    of_samples = None if weight is None else (_soft(logits, targets, 0.0) @ weight)[:, None]
    targets = _soft(logits, targets, smoothing)
    return F.binary_cross_entropy_with_logits(logits, targets, of_samples, reduction="none").mean(1)


def focal(
    logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor | None, gamma: float = 2.0
) -> Tensor:
    """Focal loss: cross-entropy with less weight on easy samples (Lin et al., 2017).

    The term of a class of probability p has the factor (1 - p) ** gamma. Multilabel and binary use
    `sigmoid_focal`.
    """
    _check_gamma(gamma)
    log_p = logits.log_softmax(1)
    # Above 0, because the power has an infinite gradient at 0 if gamma is below 1.
    factors = (1 - log_p.exp()).clamp(min=torch.finfo(logits.dtype).tiny) ** gamma
    terms = -_soft(logits, targets, smoothing) * factors * log_p
    return (terms if weight is None else terms * weight).sum(1)


def _soft(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The targets as smoothed class probabilities, float [n, classes]."""
    if not targets.is_floating_point():
        targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    return targets * (1 - smoothing) + smoothing / logits.shape[1]


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor, pos_weight: Tensor | None) -> Tensor:
    """Binary cross-entropy of each class, averaged over the classes.

    `targets` are multi-hot or a mixture of such rows, float [n, classes]. `pos_weight`, a number or
    [classes], is the weight of the terms of positive targets.
    """
    return F.binary_cross_entropy_with_logits(
        logits, targets, reduction="none", pos_weight=pos_weight
    ).mean(1)


def sigmoid_focal(
    logits: Tensor, targets: Tensor, pos_weight: Tensor | None, gamma: float = 2.0
) -> Tensor:
    """The focal loss of each class, averaged over the classes; arguments as above.

    With `pos_weight` alpha / (1 - alpha), it is the loss of Lin et al. divided by 1 - alpha.
    """
    _check_gamma(gamma)
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)  # of the class and of its absence
    positive = targets * (gamma * log_q).exp() * log_p
    negative = (1 - targets) * (gamma * log_p).exp() * log_q
    positive = positive if pos_weight is None else positive * pos_weight
    return -(positive + negative).mean(1)


def _check_gamma(gamma: float) -> None:
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")


LOSSES = Table(
    "loss",
    {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy, "focal": focal},
)
# The losses of the same names for multilabel and binary, with the same --loss_args.
SIGMOID_LOSSES = Table(
    "loss",
    {
        "cross_entropy": sigmoid_cross_entropy,
        "binary_cross_entropy": sigmoid_cross_entropy,
        "focal": sigmoid_focal,
    },
)
