"""Compute the features of each image and view once, and cache them for all ranks and later runs."""

import math
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import nn

from utils.config.bounds import require
from utils.config.recipe import AugmentationSettings
from utils.data.augment import make_augmentation
from utils.data.cache import VERSION, cached, open_cached
from utils.data.datasets import Features, ImageDataset
from utils.data.order import evaluation_blocks
from utils.data.spec import InputSpec
from utils.data.splits import Split, fingerprint_of
from utils.files import expand
from utils.launch.environment import local_rank_and_size
from utils.memory import bytes_text, free_memory
from utils.models.checking import hash_tensors
from utils.models.features import FrozenPart
from utils.ranks.ranks import Ranks
from utils.training.building import Setup
from utils.training.evaluation import Evaluator, make_eval_loader


def features_of(
    train_set: ImageDataset,
    eval_set: ImageDataset,
    model: nn.Module,
    last_part: nn.Module,
    setup: Setup,
    accelerator: Accelerator,
    ranks: Ranks,
) -> tuple[Features, Features]:
    """The features of the training and evaluation images, on which the `last_part` is trained;
    collective.

    The weights of its other layers must be final. Raises ValueError if an image cannot be read or
    memory is short.
    """
    config, data, spec = setup.config, setup.data, setup.spec
    frozen = FrozenPart(model.to(accelerator.device), last_part)
    cache = FeatureCache(setup, frozen, accelerator, ranks)
    views: list[list] = [[]]
    if config.feature_views:
        augmentation = [
            config.seed,
            *(getattr(config, field.name) for field in fields(AugmentationSettings)),
        ]
        views = [[epoch, *augmentation] for epoch in range(config.feature_views)]
    else:
        train_set = copy(train_set)
        train_set.augmentation = make_augmentation(config, spec, False)
    train_features = cache.load(train_set, data.train, spec, views)
    return train_features, cache.load(eval_set, data.evaluation, spec.for_evaluation(), [[]])


@dataclass
class FeatureCache:
    """Features in files of --cache_dir, one for each view of a split.

    The name of a file is a hash of all that its bits depend on: images, view, frozen weights,
    device and settings.
    """

    setup: Setup
    frozen: FrozenPart
    accelerator: Accelerator
    ranks: Ranks

    def load(
        self, images: ImageDataset, split: Split, spec: InputSpec, keys: Sequence[list]
    ) -> Features:
        """The features of a split, one view for each of the `keys`.

        Views that are not cached are computed.
        """
        start, computed, views, folder = (
            time.perf_counter(),
            0,
            [],
            expand(self.setup.config.cache_dir) / "features",
        )
        block_size = evaluation_blocks(len(images), self.setup.config.eval_batch_size).block_size
        how = [*self._key, block_size]
        for epoch, key in enumerate(keys):
            name = fingerprint_of(how, split.cache_key, spec, key)
            path = folder / f"v{VERSION}-{name}.npy"
            view: Any = open_cached(path, (len(images),), "<f4")
            if self.ranks.any_rank(view is None):
                array, computed = self._compute(images, spec, epoch), computed + 1
                with self.ranks.local_main_first("writing features"):
                    view = cached(path, array.shape, "<f4", [array])
            views.append(view)
        seconds = time.perf_counter() - start
        kind = f"{len(keys)} random view{'s' * (len(keys) > 1)}" if keys[0] else "centre"
        number = f"{computed} of them " * (computed < len(keys))
        origin = f"{number}computed in {seconds:.1f} s" if computed else f"found in {folder}"
        return Features(views, images, f"{kind}, {origin}")

    @cached_property
    def _key(self) -> Any:
        """What the features depend on besides the images.

        Rounding depends on device, threads and versions.
        """
        config, device = self.setup.config, self.accelerator.device
        of_part, of_model = (
            each.state_dict(keep_vars=True).values()
            for each in (self.frozen.part, self.frozen.model)
        )
        trained = {id(tensor) for tensor in of_part}
        frozen = [tensor for tensor in of_model if id(tensor) not in trained]
        if device.type == "cuda":
            place: Any = torch.cuda.get_device_name(device), config.tf32, config.deterministic
        else:
            place = torch.backends.cpu.get_cpu_capability(), self.ranks.threads
        versions = [
            getattr(sys.modules.get(name), "__version__", "")
            for name in ("torch", "torchvision", "timm")
        ]
        model = (
            config.model,
            getattr(self.frozen.model, "stem_change", ""),
            sorted(config.model_args.items()),
            hash_tensors(frozen),
        )
        return [*model, self.accelerator.mixed_precision, config.channels_last, *place, *versions]

    def _compute(self, images: ImageDataset, spec: InputSpec, epoch: int) -> np.ndarray:
        """The features of all images, float32 [N, ...], on every rank; collective."""
        config, ranks, accelerator, frozen = (
            self.setup.config,
            self.ranks,
            self.accelerator,
            self.frozen,
        )
        image = torch.zeros(1, spec.channels, *spec.size, device=accelerator.device)
        with torch.no_grad(), ranks.agree(), torch.compiler.set_stance("force_eager"):
            shape = frozen.eval()(image).shape[1:]
            size, free = (
                4 * len(images) * math.prod(shape),
                free_memory()[0] // local_rank_and_size()[1],
            )
            if image.is_cuda:
                free = min(free, torch.cuda.mem_get_info(image.device)[0])
            need = 3 * size  # the rows of this rank, those of all ranks, and these sorted
            problem = f"features need {bytes_text(need)} of memory in each process, but {bytes_text(free)} are free"
            require(
                need < free, problem, "use --feature_views 0, which computes them for each batch"
            )
        # `Accelerator.prepare` would keep the loader, and so its workers, as long as the run.
        loader = prepare_data_loader(
            make_eval_loader(images, config, ranks, epoch), even_batches=False
        )
        with torch.compiler.set_stance("force_eager"):
            evaluator = Evaluator(ranks, accelerator, frozen, loader, spec, self.setup.task, config)
            rows = evaluator.collect(lambda outputs, _: (outputs,), shape=shape, what="features")
        frozen.model.train()
        return evaluator.in_order(accelerator.gather(rows))[1]
