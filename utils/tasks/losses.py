"""Loss functions by name. Each returns a sum over samples; train.py divides by the global batch.

To add a loss, write a function with these arguments and add it to `LOSSES`:

* `logits` [n, classes], where n may be 0
* `targets`: classes, int64 [n], or a share for each class, float [n, classes], as from Mixup
* `smoothing`: the fraction of the target to spread evenly over all classes
"""

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy."""
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """A sigmoid per class, averaged over the classes (Wightman et al., "ResNet strikes back", 2021)."""
    classes = logits.shape[1]
    if not targets.is_floating_point():
        targets = F.one_hot(targets, classes).to(logits.dtype)
    targets = targets * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / classes


LOSSES = {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy}
