"""Compute the features of each image and view once, and cache them for all ranks and later runs."""

import math
import sys
import time
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn

from utils.config import PLUGIN_HASHES, require
from utils.data import (
    ArrayDataset,
    ImageDataset,
    InputSpec,
    Split,
    cached,
    evaluation_blocks,
    fingerprint_of,
    make_augmentation,
    make_dataset,
    open_cached,
    pixels_key,
)
from utils.files import expand
from utils.launch import local_rank_and_size
from utils.memory import bytes_text, free_memory
from utils.models import hash_tensors
from utils.models.last_part import FrozenPart
from utils.settings.train import OF_AUGMENTATION
from utils.training.evaluation import Evaluator, make_eval_loader
from utils.training.setup import Setup


def features_of(
    train_set: ImageDataset,
    eval_set: ImageDataset,
    model: nn.Module,
    last_part: nn.Module,
    setup: Setup,
) -> tuple[ArrayDataset, ArrayDataset]:
    """The features of the training and evaluation images; collective. From now on, the model takes
    features, the input of its `last_part`, instead of images.

    The weights of its other layers must be final. Raises ValueError if an image cannot be read or
    memory is short.
    """
    config = setup.config
    data = setup.data
    spec = setup.spec
    cache = FeatureCache(setup, FrozenPart(model.to(setup.accelerator.device), last_part))
    augmented: list = []  # what random views depend on
    if config.feature_views:
        augmented = [config.seed, *(vars(config)[name] for name in OF_AUGMENTATION)]
    else:
        train_set = copy(train_set)
        train_set.augmentation = make_augmentation(config, spec, False)
    sets = (
        cache.load(train_set, data.train, spec, config.feature_views or 1, augmented),
        cache.load(eval_set, data.evaluation, spec.for_evaluation(), 1, []),
    )
    model.forward = partial(_call, last_part)
    return sets


def _call(part: nn.Module, features: Tensor) -> Tensor:
    """A function: PyTorch does not compile a partial of a module, and a lambda would still call the
    part of the original in a copy of the model.
    """
    return part(features)


@dataclass
class FeatureCache:
    """Features of a split in a file of --cache_dir.

    Its name is a hash of all that its bits depend on: images, views, frozen weights, device and
    settings.
    """

    setup: Setup
    frozen: FrozenPart
    # what to do if memory is short
    fix: str = "use --feature_views 0, which computes them for each batch"

    def load(
        self, images: ImageDataset, split: Split, spec: InputSpec, views: int, augmented: list
    ) -> ArrayDataset:
        """The features of a split, which are computed if they are not cached; collective."""
        config = self.setup.config
        ranks = self.setup.ranks
        data = self.setup.data
        index = np.union1d(data.train.image_index, data.evaluation.image_index)
        if config.fold and (split is data.train or split is data.evaluation):
            # All folds of a split share its features.
            whole = replace(split, image_index=index, labels=index)
            with ranks.local_main_first("decoding images"):
                dataset = make_dataset(whole, spec, config, bool(augmented), iter)
            dataset.augmentation = images.augmentation
            shared = self.load(dataset, whole, spec, views, augmented)
            rows = np.searchsorted(index, split.image_index)
            of_views = np.arange(views)[:, None] * len(index) + rows
            return replace(
                shared,
                rows=shared.rows[of_views.reshape(-1)],
                labels=images.labels,
                source_rows=rows,
                thumbnails=shared.thumbnails[rows],
            )
        start = time.perf_counter()
        folder = expand(config.cache_dir) / "features"
        block_size = evaluation_blocks(len(images), config.eval_batch_size).block_size
        key = [*self._key, block_size, spec, views, *augmented]
        path = folder / f"{fingerprint_of(pixels_key(split), key)}.npy"
        array = open_cached(path, (views, len(images)), "<f4")
        small_path = folder.with_name("thumbnails") / path.name
        small = open_cached(small_path, (len(images),), "<f4")
        origin = f"found in {folder}"
        if ranks.any_rank(array is None or small is None):
            found, seen = self._compute(images, spec, views)
            with ranks.local_main_first("writing features"):
                array = cached(path, found.shape, "<f4", [found])
                small = cached(small_path, seen.shape, "<f4", [seen])
            origin = f"computed in {time.perf_counter() - start:.1f} s"
        assert array is not None
        view = f"augmented views: {views}" if augmented else "centre"
        numbers = " x ".join(map(str, array.shape[2:]))
        origin = f"{view}, {origin}, {numbers} features of each view"
        rows = array.reshape(-1, *array.shape[2:])
        return ArrayDataset(rows, images.labels, origin=origin, source=images, thumbnails=small)

    @cached_property
    def _key(self) -> list[Any]:
        """What the features depend on besides the images.

        Rounding depends on device, threads and versions.
        """
        config = self.setup.config
        frozen = self.frozen
        trained = set(map(id, frozen.part.state_dict(keep_vars=True).values()))
        tensors = frozen.model.state_dict(keep_vars=True).values()
        weights = hash_tensors(tensor for tensor in tensors if id(tensor) not in trained)
        model = config.model, getattr(frozen.model, "stem_change", ""), weights
        arguments = sorted(config.model_args.items())
        how = config.channels_last, config.tf32, config.deterministic, config.shrink
        place = self.setup.accelerator.mixed_precision, self.setup.ranks.rounding
        modules = [sys.modules.get(name) for name in ("torchvision", "timm")]
        return [
            *model,
            arguments,
            *PLUGIN_HASHES.values(),
            *how,
            *place,
            *(getattr(m, "__version__", "") for m in modules),
        ]

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the features of one view."""
        spec = self.setup.spec
        image = torch.zeros(1, spec.channels, *spec.size, device=self.setup.accelerator.device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return self.frozen.eval()(image).shape[1:]

    def _compute(self, images: ImageDataset, spec: InputSpec, views: int) -> list[np.ndarray]:
        """The features of all images, float32 [views, N, ...], and thumbnails of the last view,
        [N, D], on every rank; collective.
        """
        setup = self.setup
        frozen = self.frozen
        config = setup.config
        ranks = setup.ranks
        accelerator = setup.accelerator
        with ranks.agree():
            shape = self.shape
            size = 4 * len(images) * math.prod(shape)
            free = free_memory()[0] // local_rank_and_size()[1]
            need = (views + 3) * size  # also the rows of this rank, those of all, and these sorted
            needed = f"features need {bytes_text(need)} of memory in each process"
            problem = f"{needed}, but {bytes_text(free)} are free"
            require(need < free, problem, self.fix)
        found = np.empty((views, len(images), *shape), np.float32)
        for view in range(views):
            # `Accelerator.prepare` would keep the loader, and so its workers, as long as the run.
            loader = make_eval_loader(images, config, ranks, view)
            loader = prepare_data_loader(loader, even_batches=False)
            evaluator = Evaluator(
                ranks, accelerator, frozen, loader, spec, setup.task, config, output_shape=shape
            )
            with torch.compiler.set_stance("force_eager"):
                columns = evaluator.collect(
                    lambda outputs, _: {
                        "features": outputs,
                        "thumbnails": frozen.thumbnails[: len(outputs)],
                    }
                )
            ordered = evaluator.in_order(accelerator.gather(columns))
            found[view] = ordered["features"]
        frozen.model.train()
        return [found, ordered["thumbnails"]]
