"""The learning rate and weight decay of each optimizer, if they are not given."""

from typing import NamedTuple


class Rates(NamedTuple):
    """The defaults of an optimizer.

    The learning rates of a new and of a pretrained model are those for 128 samples per update. For
    n samples, they are multiplied by (n / 128) ** power, but not increased.
    """

    new: float
    pretrained: float
    power: float
    weight_decay: float


# SGD's rule is that of Goyal et al., 2017, whose 0.1 for 256 samples is 0.05 for 128. The square
# root for Adam is that of Malladi et al., 2022. An optimizer without values of its own has those of
# adamw; muon's updates have the same size. The optimizers listed after adamw have a weight decay of
# 0, as in PyTorch. It is not decoupled (except in adafactor), so it would be divided by the size of
# the gradients. Their learning rates are PyTorch's, except that adamax and nadam have that of adam,
# and rmsprop has a lower one, because --momentum makes its steps up to 10 times as large.
RATES = {
    **dict.fromkeys(
        ("sgd", "asgd"), Rates(new=0.05, pretrained=0.01, power=1.0, weight_decay=5e-4)
    ),
    "adamw": Rates(new=1e-3, pretrained=1e-4, power=0.5, weight_decay=0.05),
    **dict.fromkeys(("adam", "adamax", "nadam", "radam"), Rates(1e-3, 1e-4, 0.5, 0.0)),
    "rmsprop": Rates(new=3e-4, pretrained=3e-5, power=0.5, weight_decay=0.0),
    "adadelta": Rates(new=1.0, pretrained=0.1, power=0.5, weight_decay=0.0),
    **dict.fromkeys(("adagrad", "adafactor"), Rates(1e-2, 1e-3, 0.5, 0.0)),
}
