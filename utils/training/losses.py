"""Loss functions. Each returns a sum over samples, which train.py divides by the size of the global batch.

To add a loss, such as a focal loss, write a function like those below and add it to `LOSSES`.
"""

from torch import Tensor
from torch.nn import functional as F

from utils.config.settings import TrainConfig
from utils.config.table import Table


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of the softmax."""
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Binary cross-entropy of each class against the rest, averaged over the classes.

    As in "ResNet strikes back", Wightman et al., 2021.
    """
    classes = logits.shape[1]
    targets = F.one_hot(labels, classes).to(logits.dtype) * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / classes


LOSSES = Table("loss", {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy})


def loss_sum(config: TrainConfig, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss of `logits` [n, classes] with `labels` [n] int64, summed over the samples; n may be 0.

    `smoothing` is the fraction of the target that is spread evenly over all classes.
    """
    return LOSSES.choose(config.loss)(logits, labels, smoothing)
