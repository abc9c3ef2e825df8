"""Fit the new head of a model with given weights, before all layers are trained.

While a head is wrong, its gradients move the other layers away from their weights (Kumar et al.,
2022, https://arxiv.org/abs/2202.10054). The fit is short, because after a long one little loss is
left, and the other layers hardly change. docs/photos.md has measurements.
"""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.config import require
from utils.console import say
from utils.data import (
    ArrayDataset,
    Plan,
    UpdateSampler,
    fold_in,
    make_dataset,
    make_plan,
    random_subset,
)
from utils.models import hash_tensors, head_prefixes
from utils.models.last_part import FrozenPart, find_last_part
from utils.settings.shared import BACKBONE
from utils.settings.train import GROUPS, OF_AUGMENTATION, TrainConfig
from utils.training.defaults import choose_sizes
from utils.training.feature_cache import FeatureCache
from utils.training.optim import build_optimizer, set_learning_rate
from utils.training.schedule import learning_rate
from utils.training.setup import SAME_START, Setup

EPOCHS = 4
MOST_IMAGES = 20_000
MOST_NUMBERS = 2**26  # in the features: 256 MiB
_GROUPS = ("length and batch size", "optimizer, schedule and regularisation")
_RESET = ["global_batch_size", "lr", "repeats", *OF_AUGMENTATION]
_RESET += [name for group in _GROUPS for name in GROUPS[group]]


def fit_head(model: nn.Module, setup: Setup) -> None:
    """Fit the head if it is new, or its new rows, on the features of the training images;
    collective.

    Each rank fits the whole head by itself, in the same batches on any number of ranks, and then
    takes the result of rank 0. Raises UserError if the losses are NaN or infinite, or if results
    differ although --microbatches is set.
    """
    ranks = setup.ranks
    start = time.perf_counter()
    with ranks.agree("fitting the head"), torch.compiler.set_stance("force_eager"):
        part, reason = _part_to_fit(model, setup)
    if part is not None and setup.config.dry_run:
        part, reason = None, "this is a dry run"
    if part is not None and ranks.any_rank(not _has_room(model, setup)):
        part, reason = None, "the model needs more than half of the free memory of the GPU"
    if part is None:
        setup.notes.append(f"the head is not fitted first: {reason}")
        return
    place = next(model.parameters()).device
    features, fit = _features(FrozenPart(model, part), setup)
    plan = make_plan(fit, features.labels, fit.global_batch_size, 1)
    heads = head_prefixes(model)
    head = [each for name, each in model.named_parameters() if name.startswith(heads)]
    with ranks.agree("fitting the head"):
        losses = fit_on(features, plan, part, head, fit, setup)
        problem = f"the head cannot be fitted: its losses are {losses}"
        require(math.isfinite(sum(losses)), problem, "use --fit_head false, or other weights")
    if setup.config.microbatches:
        ranks.check_same(hash_tensors(head), "a different head after its fit", SAME_START)
    ranks.broadcast(head)
    if setup.accelerator.is_fsdp2:
        model.to(place)
    setup.state.owes_evaluation = True  # of the head alone
    updates = EPOCHS * plan.updates_per_epoch
    seconds = time.perf_counter() - start
    setup.head.update(images=len(features), updates=updates, seconds=seconds, losses=losses)
    setup.notes.append(
        f"head fitted on the features of {len(features)} images: {updates} updates, {seconds:.1f} s"
    )


def _features(frozen: FrozenPart, setup: Setup) -> tuple[ArrayDataset, TrainConfig]:
    """The features of the training images, or of a sample of them, and the settings of the fit;
    collective.
    """
    config = setup.config
    cache = FeatureCache(setup, frozen, "use --fit_head false")
    with setup.ranks.agree("computing features"):
        frozen.to(setup.accelerator.device)
        numbers = cache.shape.numel()
    views = 2 if config.flip else 1
    most = min(MOST_IMAGES, MOST_NUMBERS // (views * numbers))
    split = random_subset(setup.data.train, most, config.seed)
    fit = settings_of_fit(config, len(split))
    with setup.ranks.local_main_first("decoding images"):
        images = make_dataset(split, setup.spec, fit, True, iter)
    say(f"fitting the head: computing the features of {len(split)} images")
    augmented = [fit.seed, *(vars(fit)[name] for name in OF_AUGMENTATION)]
    return cache.load(images, split, setup.spec, views, augmented), fit


def _part_to_fit(model: nn.Module, setup: Setup) -> tuple[nn.Module | None, str]:
    """The last part of the model, if its head is new and its other weights are not; or None, and
    why there is no fit.
    """
    heads = head_prefixes(model)
    match = setup.source and setup.source.match
    new = match.new if match else heads
    if not new or hasattr(model, "head_change"):
        return None, "the weights have it already"
    for name in new:
        if not name.startswith(heads):
            return None, f"the weights have no {name}"
    names = [name for name, _ in model.named_parameters() if name.startswith(heads)]
    return find_last_part(model, setup.spec, names)


def _has_room(model: nn.Module, setup: Setup) -> bool:
    """Whether a model that FSDP2 will shard fits into half of the free memory of its GPU."""
    device = setup.accelerator.device
    if device.type != "cuda" or not setup.accelerator.is_fsdp2:
        return True
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    return size < torch.cuda.mem_get_info(device)[0] / 2


def settings_of_fit(config: TrainConfig, images: int) -> TrainConfig:
    """The settings of the fit: those of the run, but batches, optimizer and augmentation are those
    of recipes/head.yaml.
    """
    usual = vars(TrainConfig())
    fit = replace(
        config,
        **{name: usual[name] for name in _RESET}
        | {"freeze": [BACKBONE], "optimizer": "sgd", "epochs": EPOCHS, "min_scale": 1.0}
        | {"flip": "alternate" if config.flip else False},
    )
    return choose_sizes(fit, images, 1)[0]


def fit_on(
    features: ArrayDataset,
    plan: Plan,
    part: nn.Module,
    head: Sequence[nn.Parameter],
    fit: TrainConfig,
    setup: Setup,
) -> list[float]:
    """Fit the parameters `head` of the last part of the model, except for the rows that the given
    weights have. Returns the mean loss of each epoch.
    """
    match = setup.source and setup.source.match
    known = match.known if match else []
    fitted = deepcopy(part).requires_grad_(False)
    numbers = {id(each) for each in head}
    pairs = [
        (own, new.requires_grad_())
        for own, new in zip(part.parameters(), fitted.parameters(), strict=True)
        if id(own) in numbers
    ]
    for layer in fitted.modules():  # dropout is as in training
        layer.training = not isinstance(layer, _BatchNorm)
    optimizer = build_optimizer(fit, fitted)
    updates = EPOCHS * plan.updates_per_epoch
    losses = torch.zeros(EPOCHS, dtype=torch.float64, device=setup.accelerator.device)
    for microbatch in UpdateSampler(plan, 1, updates):
        batch = features.__getitems__(microbatch)
        labels = batch.labels.to(losses.device)
        labels = labels.float() if labels.ndim == 2 else labels
        torch.manual_seed(fold_in(fit.seed, "head", microbatch.update))
        set_learning_rate(optimizer, learning_rate(fit, microbatch.update, updates))
        loss = setup.task.loss(fitted(batch.images.to(losses.device)), labels) / len(labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[microbatch.epoch] += loss.detach() / plan.updates_per_epoch
        with torch.no_grad():
            for own, new in pairs:
                new[known] = own[known]
    with torch.no_grad():
        for own, new in pairs:
            own.copy_(new)
    return losses.tolist()
