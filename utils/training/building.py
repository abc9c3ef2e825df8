"""Build a run: checks before the processes connect, the settings that follow from the data, and the model."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from utils.config.bounds import require
from utils.config.defaults import choose_images, choose_sizes, resolve_batch
from utils.config.recipe import BACKBONE
from utils.config.settings import OF_INPUT, TrainConfig
from utils.config.table import Table
from utils.console import Terminal, join_names
from utils.data.cache import make_dataset
from utils.data.datasets import ImageDataset
from utils.data.decode import peek
from utils.data.order import Plan
from utils.data.sampling import make_plan
from utils.data.sources import absolute_data, check_source
from utils.data.spec import SMALL, InputSpec, sides
from utils.data.splits import Data, Split
from utils.errors import UserError
from utils.models.checking import bad_tensors, check_batch_norm, has_batch_norm
from utils.models.features import accept_features, find_last_part
from utils.models.layers import checkpoint_blocks, freeze, keep_batch_stats
from utils.models.matching import copy_matching, fit_names, zero_heads
from utils.models.zoo import check_model, input_spec
from utils.ranks.accelerator import check_precision, check_sharding, compile_model
from utils.ranks.batchnorm import convert_batch_norm
from utils.ranks.ranks import Ranks
from utils.runs.checkpoint import check_run_folder
from utils.runs.metadata import SavedRun
from utils.runs.resume import choose_batch, keep_settings, restore_state, resume_lines
from utils.runs.source import InitialWeights, absolute_source
from utils.runs.state import TrainState
from utils.tasks.table import make_task
from utils.tasks.task import Task
from utils.training.elastic import check_elastic, check_elastic_sizes
from utils.training.schedule import total_updates


def check_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ValueError or OSError for settings that do not work on this machine; not collective."""
    check_precision(config, ranks)
    check_sharding(config, ranks)
    check_model(config)
    check_source(config)
    check_run_folder(config)
    check_elastic(config)
    if config.data_dir and config.resume is None and not config.data.startswith("torchvision/"):
        raise UserError("--data_dir is for --data torchvision/NAME only", "name a folder of your own with --data")
    if config.resume is None:
        resolve_batch(config, ranks.topology.world_size)


def fill_settings(
    config: TrainConfig, given: Set[str] | None, saved: SavedRun | None, ranks: Ranks, tables: Sequence[Table]
) -> TrainConfig:
    """The settings; those that are not `given` come from the checkpoint, if there is one; not collective.

    Raises ValueError or OSError, before the data is loaded, if they or the batch sizes do not work.
    """
    if saved is not None and given is not None:
        config = keep_settings(config, given, saved)
        check_settings(config, ranks)
    for table in tables:
        table.check(config)
    choose_batch(config, saved, ranks.topology.world_size)
    return config


@dataclass(kw_only=True)
class Resolved:
    """What follows from the flags, the data and, in a resumed run, the checkpoint."""

    config: TrainConfig  # does not change any more
    chosen: list[str]  # lines about the settings that follow from the data
    changed: list[str]  # lines about a checkpoint, and what has changed since it was saved
    resumed_from: Path | None  # the checkpoint
    source: InitialWeights | None
    data: Data
    plan: Plan
    updates: int  # of the whole run
    spec: InputSpec
    task: Task
    state: TrainState
    last_part: nn.Module | None = None  # of the model, if this part is trained on cached features
    sharding: str = ""  # with FSDP, the bytes before and after it


def resolve(
    config: TrainConfig,
    saved: SavedRun | None,
    folder: Path | None,
    data: Data,
    source: InitialWeights | None,
    accelerator: Accelerator,
) -> Resolved:
    """Choose the settings that follow from the data, and derive the plan, the input, the task and the state.

    `folder` is the run folder if it exists already. Raises ValueError if the checkpoint does not fit.
    """
    processes = accelerator.num_processes
    config, sizes = (config, []) if saved else choose_sizes(config, len(data.train), processes)
    _, grad_accum, global_batch_size = choose_batch(config, saved, processes)
    check_elastic_sizes(config, global_batch_size)
    plan = make_plan(config, data.train, global_batch_size, config.microbatches or grad_accum * processes)
    state = restore_state(saved, folder, config, plan, data)
    config, images, spec = resolve_input(config, saved, data.train)
    config, task = make_task(config, data.class_names, data.train.labels)
    resolved = replace(
        config,
        global_batch_size=plan.global_batch_size,
        batch_size=None,
        grad_accum=grad_accum if saved and not config.microbatches else config.grad_accum,
        data=absolute_data(config.data),
        mixed_precision=accelerator.mixed_precision,
        init_from=absolute_source(config.init_from),
    )
    return Resolved(
        config=resolved,
        chosen=sizes + images,
        changed=resume_lines(saved, config, resolved, plan, processes) if saved else [],
        resumed_from=saved.path if saved else None,
        source=source,
        data=data,
        plan=plan,
        updates=total_updates(config, plan),
        spec=spec,
        task=task,
        state=state,
    )


def resolve_input(
    config: TrainConfig, saved: SavedRun | None, train: Split
) -> tuple[TrainConfig, list[str], InputSpec]:
    """The settings with those chosen from the images, lines about these, and the model's input.

    The input is the checkpoint's if the settings that it depends on are unchanged. It is not derived again, because
    some of the images may no longer exist.
    """
    if saved is not None and all(getattr(saved.settings, name) == getattr(config, name) for name in OF_INPUT):
        return config, [], saved.spec
    channels, size = peek(train)
    small = size is not None and max(size) <= SMALL
    # mnist_cnn takes images of one size.
    small_input = max(sides(config.image_size or 0)) <= SMALL and config.eval_size is None
    config, lines = choose_images(config, small, small_input, saved is None)
    return config, lines, input_spec(config, channels, size)


def make_datasets(data: Data, spec: InputSpec, config: TrainConfig, ranks: Ranks) -> list[ImageDataset]:
    """The data sets of training and evaluation; collective. The first rank of a machine decodes small images."""
    bar = Terminal(ranks.is_main).progress("decoding")
    with ranks.local_main_first("decoding images"):
        return [
            make_dataset(data.train, spec, config, True, bar),
            make_dataset(data.evaluation, spec.for_evaluation(), config, False, bar),
        ]


def change_layers(module: nn.Module, resolved: Resolved, accelerator: Accelerator, ranks: Ranks) -> nn.Module:
    """The model with the weights of --init_from, compiled if the accelerate config says so; collective.

    --freeze, --grad_checkpointing and --sync_batchnorm change its layers. Raises ValueError if a batch is too small for
    batch statistics.
    """
    config, source = resolved.config, resolved.source
    with ranks.agree():
        if source is not None:
            load_source(module, source, resolved.data.class_names, config)
        new = source.match.new if source and source.match else {}
        if config.freeze:
            freeze(module, config.freeze, new)
        if config.keep_batch_stats:
            keep_batch_stats(module, new)
        if config.freeze or config.feature_views:
            sharded = accelerator.is_fsdp2
            resolved.last_part, reason = choose_last_part(module, config, resolved.spec, sharded)
            resolved.chosen += [f"features are not cached: {reason}"] * (BACKBONE in config.freeze and reason != "")
        if config.grad_checkpointing:
            checkpoint_blocks(module, config.model)
        if has_batch_norm(module):
            sharing = ranks.topology.world_size if config.sync_batchnorm else 1
            check_batch_norm(resolved.plan, resolved.updates, sharing)
        module = convert_batch_norm(module) if config.sync_batchnorm else module
        compile_model(accelerator, module)
    return module


def choose_last_part(
    module: nn.Module, config: TrainConfig, spec: InputSpec, sharded: bool = False
) -> tuple[nn.Module | None, str]:
    """The last part of the model, to train it on cached features; or None, to train on images, and the reason.

    Raises UserError for settings that need images, and if --feature_views is given but features cannot be cached.
    """
    if config.feature_views == 0:
        return None, ""
    part, reason = (None, "the model is sharded") if sharded else find_last_part(module, spec)
    if part is None:
        problem = f"--feature_views {config.feature_views}: features cannot be cached, because {reason}"
        require(not config.feature_views, problem, "leave it out, or try --freeze backbone")
        return None, reason
    fix = "leave it out, or use --feature_views 0, which computes the frozen layers in each epoch"
    for name in ("mixup", "cutmix"):
        problem = f"--{name} mixes images, but with --freeze the last part is trained on cached features"
        require(not getattr(config, name), problem, fix)
    accept_features(module, part, spec)
    return part, ""


def load_source(module: nn.Module, source: InitialWeights, class_names: list[str], config: TrainConfig) -> None:
    """Copy the weights that fit into the model, and note in `source` which they are.

    Raises UserError if no parameter fits, or if a copied tensor is NaN or infinite.
    """
    tensors, source.tensors = source.tensors, {}  # they are not needed again
    where = f"--init_from {source.name}"
    tensors = fit_names(tensors, module, where, config.model, config.init_match == "order")
    zero_heads(module)
    source.match = copy_matching(module, tensors, source.class_names, class_names)
    if bad := bad_tensors(module.state_dict()):
        raise UserError(f"{where}: {join_names(bad, 3)} is NaN or infinite", "use other weights")
    if not {key for key, _ in module.named_parameters()} & set(source.match.kept):
        theirs, own = join_names(tensors, 3), join_names(module.state_dict(), 3)
        problem = f"{where}: none of its tensors ({theirs}) fits {config.model}, which has {own}"
        raise UserError(problem, "set --model to the model of these weights, or use others")
