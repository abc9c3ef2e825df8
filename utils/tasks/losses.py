"""Loss functions by name. Each returns a sum over samples; train.py divides by the global batch.

To add a loss, write a function with these arguments and add it to `LOSSES`:

* `logits` [n, classes], where n may be 0
* `targets`: class indices, int64 [n], or class probabilities, float [n, classes], as from Mixup
* `smoothing`: the fraction of the target to spread evenly over all classes
* `weight`: with --class_weights, the weight of each class, float32 [classes]
"""

from torch import Tensor
from torch.nn import functional as F

from utils.config.table import Table


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy of the softmax."""
    return F.cross_entropy(logits, targets, weight, reduction="sum", label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy of each class against the rest, averaged over the classes.

    As in "ResNet strikes back", Wightman et al., 2021. A sample has the weight of its class.
    """
    classes = logits.shape[1]
    if not targets.is_floating_point():
        targets = F.one_hot(targets, classes).to(logits.dtype)
    of_samples = None if weight is None else (targets @ weight)[:, None]
    targets = targets * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, targets, of_samples, reduction="sum") / classes


LOSSES = Table(
    "loss",
    {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy},
)
