"""Settings of data, augmentation and the order of samples."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from utils.config import (
    Arguments,
    Bound,
    Chosen,
    Fixed,
    Fraction,
    FractionBelow1,
    Machine,
    NonNegativeFloat,
    NonNegativeInt,
    OneStart,
    PositiveInt,
    Probability,
    at_least,
    at_most,
)
from utils.settings.shared import FROM_DATA, SharedSettings

BadImages = Literal["error", "skip"]
CheckImages = Literal["quick", "full"]


@dataclass(kw_only=True)
class AugmentationSettings:
    """Augmentation of training images; random views of features depend on all of it."""

    crop_padding: Annotated[NonNegativeInt, at_most(1024)] = 0
    """Shift training images at random by up to this many pixels, and fill the border with black."""
    flip: Chosen[bool | Literal["alternate"]] = FROM_DATA
    """Mirror training images left to right: true mirrors a random half, alternate each image in
    every other epoch (default: true for photographs)."""
    min_scale: Fraction | None = None
    """Smallest area of a random training crop, as a fraction of the image. With 1 there are no
    random crops, and photographs are cropped to their centre (default: 1 for images up to 96
    pixels, 0.35 to fine-tune more than the head, else 0.08)."""
    auto_augment: str | None = None
    """Change colours and shapes of training images by a policy."""
    auto_augment_args: Arguments = field(default_factory=dict)
    """Keyword arguments of the policy, such as '{magnitude: 7}'."""
    color_jitter: Annotated[NonNegativeFloat, at_most(100)] = 0.0
    """Multiply brightness, contrast and saturation of training images by random factors within this
    number of 1."""
    random_erasing: Probability = 0.0
    """Probability of filling a random box, 2 to 33 percent of a training image, with the mean
    colour."""
    cutout: Annotated[NonNegativeInt, at_most(2**16 - 1)] = 0
    """Side in pixels of a square to fill with the mean colour, at a random place of each training
    image."""
    mixup: Annotated[NonNegativeFloat, at_most(1000)] = 0.0
    """Average the images of each pair of neighbouring training samples, and their targets, with a
    weight drawn from Beta(A, A), where A is this number, usually 0.1 to 1; 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, at_most(1000)] = 0.0
    """Swap a random box between the images of each pair, and mix their targets by its share of the
    area, drawn from Beta(A, A), where A is this number, usually 1; 0 turns it off. With --mixup,
    each pair gets one of the two."""
    mix_prob: Probability = 1.0
    """Fraction of the pairs that --mixup and --cutmix mix."""
    mix_off_epoch: NonNegativeInt | None = None
    """First epoch, counted from 0, in which nothing is mixed (default: none)."""

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(kw_only=True)
class DataSettings(AugmentationSettings, SharedSettings):
    """What `utils.data` reads."""

    data_subset: str | None = None
    """Configuration of a Hub data set that has several."""
    train_split: Fixed[str | None] = None
    """Split to train on (default: train, or the only one)."""
    eval_split: Fixed[str | None] = None
    """Split to evaluate on (default: validation, else test, else a hold-out of the training
    split)."""
    eval_fraction: Fixed[FractionBelow1 | None] = None
    """Evaluate on a hold-out of this fraction of the training split, stratified by class, instead
    of on a split."""
    fold: Fixed[
        Annotated[str, Bound("K/N, such as 1/5", re.compile(r"[1-9]\d{0,3}/[1-9]\d{0,3}$").match)]
        | None
    ] = None
    """Evaluate on fold K of N of the training split, such as 1/5, stratified by class, instead of
    on a split."""
    group_by: Fixed[str | None] = None
    """Keep images of the same group together in a fold or hold-out. Their group is the value in
    this column, with folder the folder below that of their class, else what this regular expression
    finds in the names of their files."""
    image_column: str | None = None
    """Column with the images (default: found by its type, or named path in a CSV file)."""
    label_column: str | None = None
    """Column with the labels (default: found by its type, or named label in a CSV file)."""
    image_bits: Fixed[Annotated[int, at_least(8), at_most(16)]] = 16
    """Bits that grey images of 16 bits use: with 12, 4095 is white."""
    max_train_samples: PositiveInt | None = None
    """Train on a random subset of this many samples, for debugging."""
    max_eval_samples: PositiveInt | None = None
    """Evaluate on a random subset of this many samples, for debugging."""
    bad_images: BadImages = "error"
    """What to do about unreadable images: error lists them and ends the run, skip continues without
    them."""
    check_images: CheckImages = "quick"
    """How to check images before training: quick reads both ends of each image, full decodes it."""
    shrink: Fixed[PositiveInt | None] = None
    """Shorter side in pixels to which photographs are reduced when they are first read. The reduced
    pixels are stored in --cache_dir, so that large photographs are read many times as fast from the
    second epoch on. Smaller photographs keep their size."""
    data_dir: Machine[str | None] = None
    """Folder of torchvision data sets, where missing ones are downloaded (default:
    CACHE_DIR/torchvision)."""
    cache_dir: Machine[str] = "~/.cache/lockstep"
    """Folder for decoded small images, shrunk photographs, cached features and the results of image
    checks."""
    num_workers: Machine[NonNegativeInt | None] = None
    """Loader processes per rank that decode photographs (default: the threads per process, at most
    8, or up to 16 if there are that many physical cores)."""
    data_on_device: Machine[Literal["auto", "yes", "no"]] = "auto"
    """Keep decoded small images and cached features in the memory of the device, and draw batches
    there; auto does so on a GPU if they take at most a quarter of its free memory. The images are
    the same either way."""
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """How the samples of an epoch are drawn: shuffle draws each one once; balanced draws with
    replacement, all classes equally often. An epoch always has as many draws as samples."""
    repeats: PositiveInt = 1
    """Copies of each sample in an update, each augmented differently (repeated augmentation)."""
    drop_last: Chosen[Fixed[bool]] = FROM_DATA
    """Leave out the last samples of an epoch if they do not fill a global batch (default: true if
    the global batch is the default, below 128, and the last one less than half full)."""
    shares: OneStart[list[PositiveInt] | None] = None
    """With --microbatches: the number of microbatches that each rank computes, such as 11,5 if rank
    0 has the faster device (default: equal numbers). The trained weights are the same, bit for
    bit."""
