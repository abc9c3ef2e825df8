"""The data sets of a run, and its model with its final weights and layers."""

from collections.abc import Mapping

from torch import nn

from utils.config import require
from utils.console import progress
from utils.data import (
    ImageDataset,
    make_dataset,
)
from utils.models import (
    check_batch_norm,
    checkpoint_blocks,
    freeze,
    has_batch_norm,
    hash_tensors,
    keep_batch_stats,
    read_weights,
)
from utils.ranks import compile_model
from utils.runs import (
    WEIGHTS_FILE,
    Checkpoint,
    load_weights,
)
from utils.settings.shared import BACKBONE
from utils.training.setup import SAME_START, Setup


def make_datasets(setup: Setup) -> tuple[ImageDataset, ImageDataset]:
    """The data sets of training and evaluation; collective.

    The first rank of a machine decodes small images.
    """
    config = setup.config
    data = setup.data
    spec = setup.spec
    ranks = setup.ranks
    bar = progress("decoding")
    with ranks.local_main_first("decoding images"):
        train_set = make_dataset(data.train, spec, config, True, bar)
        return train_set, make_dataset(data.evaluation, spec.for_evaluation(), config, False, bar)


def adapt_model(
    model: nn.Module, setup: Setup, saved: Checkpoint | None
) -> tuple[nn.Module, nn.Module | None]:
    """Load the weights of the checkpoint or of --init_from into the bare model, and change its
    layers; collective.

    --freeze, --grad_checkpointing and --sync_batchnorm change layers, and the accelerate config may
    compile the model. Returns the model, and its last part if only this is trained, on features.
    Raises ValueError if weights do not fit, or if a batch is too small for batch statistics.
    """
    config = setup.config
    ranks = setup.ranks
    accelerator = setup.accelerator
    with ranks.agree("loading the weights"):
        new: Mapping[str, str] = {}
        if saved is not None:
            load_weights(saved.path, read_weights(saved.path / WEIGHTS_FILE), model)
        elif setup.source is not None:
            from utils.runs.init_from import copy_source

            new = copy_source(model, setup.source, setup.data.class_names, config).new
        if config.freeze:
            freeze(model, config.freeze, new)
        if config.keep_batch_stats:
            keep_batch_stats(model, new)
        last_part = choose_last_part(model, setup)
        if config.grad_checkpointing:
            checkpoint_blocks(model, config.model)
        if has_batch_norm(model):
            sharing = ranks.topology.world_size if config.sync_batchnorm else 1
            check_batch_norm(setup.plan, setup.updates, sharing)
        if config.sync_batchnorm:
            # Only mixing with accumulation can leave a microbatch without samples on all ranks.
            from utils.ranks.batchnorm import convert_batch_norm

            may_be_empty = config.mixes and setup.plan.microbatches > ranks.topology.world_size
            model = convert_batch_norm(model, ranks.device.type == "cuda" and not may_be_empty)
        compile_model(accelerator, model)
    features = config.fits_head or last_part is not None
    copies = not (config.microbatches or features or accelerator.is_fsdp2)
    if saved is None and ranks.topology.world_size > 1 and not copies:
        # DDP copies the parameters of rank 0, but too late for features, and no buffers; FSDP2
        # copies nothing.
        weights = hash_tensors([*model.parameters(), *model.buffers()])
        ranks.check_same(weights, "different weights at the start", SAME_START)
    if saved is None and config.fits_head and last_part is None:
        from utils.training.head_fit import fit_head

        fit_head(model, setup)
    return model, last_part


def choose_last_part(model: nn.Module, setup: Setup) -> nn.Module | None:
    """The last part of the model, to train it on cached features; or None, to train on images.

    Raises UserError for settings that need images, and if --feature_views is given but features
    cannot be cached.
    """
    config = setup.config
    views = setup.config.feature_views
    if views == 0 or not (views or config.freeze):
        return None
    part = None
    reason = "the model is sharded"
    if not setup.accelerator.is_fsdp2:
        from utils.models.last_part import find_last_part

        part, reason = find_last_part(model, setup.spec)
    if part is None:
        problem = f"--feature_views {views}: features cannot be cached, because {reason}"
        require(views is None, problem, "use --feature_views 0, or try --freeze backbone")
        if BACKBONE in config.freeze:
            setup.notes.append(f"features are not cached: {reason}")
        return None
    fix = "leave it out, or use --feature_views 0, which computes the frozen layers in each epoch"
    problem = "--mixup and --cutmix mix images, but the last part is trained on cached features"
    require(not config.mixes, problem, fix)
    problem = f"--repeats {config.repeats}: copies of an image would have equal cached features"
    require(config.repeats <= (views or 1), problem, fix)
    if config.dry_run:  # the features of all images would take too long
        faster = "a real run caches the outputs of the frozen layers, so its updates are faster"
        setup.notes.append(faster)
        return None
    return part
