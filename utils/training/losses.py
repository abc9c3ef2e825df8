"""Loss functions. Each returns a sum over samples, which train.py divides by the size of the global batch.

To add a loss, such as a focal loss, add its name to `loss` in config/settings.py and its sum to `loss_sum`.
"""

from torch import Tensor
from torch.nn import functional as F

from utils.config.settings import TrainConfig


def loss_sum(config: TrainConfig, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss of `logits` [n, classes] with `labels` [n] int64, summed over the samples; n may be 0.

    It is the cross-entropy, or the mean over classes of the binary cross-entropy of each class against the rest (as in
    "ResNet strikes back", Wightman et al., 2021). `label_smoothing` is the fraction of the target that is spread evenly
    over all classes.
    """
    if config.loss == "cross_entropy":
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    classes = logits.shape[1]
    targets = F.one_hot(labels, classes).to(logits.dtype) * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / classes
