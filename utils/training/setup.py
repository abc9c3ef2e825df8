"""The settings of a run: checks before the processes connect, and what follows from the checkpoint
and from the data.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate import Accelerator

from utils.data import (
    AUTO_AUGMENTS,
    SMALL,
    SOURCES,
    Data,
    InputSpec,
    Plan,
    Split,
    absolute_data,
    check_source,
    load_data,
    make_plan,
    sides,
)
from utils.models import (
    OWN_MODELS,
    check_model,
    input_spec,
)
from utils.ranks import Ranks, check_precision, check_sharding
from utils.runs import (
    TRACKERS,
    Checkpoint,
    TrainState,
    check_run_folder,
    choose_batch,
    keep_settings,
    resolve_batch,
    restore_state,
    resume_lines,
)
from utils.settings.train import OF_INPUT, TrainConfig
from utils.tasks import LOSSES, TASKS, Task, make_task
from utils.training.defaults import choose_images, choose_sizes
from utils.training.optim import OPTIMIZERS
from utils.training.schedule import SCHEDULES, total_updates

if TYPE_CHECKING:
    from utils.runs.init_from import InitialWeights

REGISTRIES = SOURCES, AUTO_AUGMENTS, OWN_MODELS, TASKS, LOSSES, OPTIMIZERS, SCHEDULES, TRACKERS
"""The registries of names that are values of settings. --help lists the names."""

SAME_START = "use the same kind of processor, the same versions and the same files on all machines"


def check_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ValueError or OSError for settings that do not work on this machine; not collective."""
    check_precision(config, ranks)
    check_sharding(config, ranks, optimizer=config.optimizer, fixed_order=config.fixed_order)
    check_run_folder(config)
    if config.resume is None:  # otherwise later: the checkpoint may need a plug-in
        check_model(config)
        check_source(config)
        resolve_batch(config, ranks.topology.world_size)


def fill_settings(
    config: TrainConfig,
    given: Set[str] | None,
    saved: Checkpoint | None,
    begun: TrainConfig | None,
    ranks: Ranks,
) -> tuple[TrainConfig, "InitialWeights | None"]:
    """The settings of this start, and for a new run the weights of --init_from, if given;
    collective.

    Settings that are not `given` are those with which the run has `begun`, or of the checkpoint, or
    follow from the weights. With None, all are given. Raises ValueError or OSError, before the data
    is loaded, if they or the batch sizes do not work.
    """
    with ranks.agree():
        before = begun or (saved and saved.config)
        if before and given is not None:
            config = keep_settings(config, given, before, begun is not None)
            check_settings(config, ranks)
        # train.py has checked those of a launch without --resume, which a dry run may drop
        if before or config.resume or config.dry_run or given is None:
            for names in REGISTRIES:
                names.check(config)
            check_model(config)
            check_source(config)
            choose_batch(config, saved, ranks.topology.world_size)
    if config.init_from is None and not (saved and saved.config.init_from):
        return config, None
    from utils.runs.init_from import load_initial_weights

    return load_initial_weights(config, saved, ranks)


def load_splits(config: TrainConfig, saved: Checkpoint | None, ranks: Ranks) -> Data:
    """Load and check the data; collective. A resumed run keeps its original samples."""
    with ranks.local_main_first("loading the data"):
        data = load_data(config, saved.table if saved else None)
    ranks.check_same(data.fingerprint, f"different images in --data {config.data}")
    return data


@dataclass(kw_only=True, eq=False)
class Setup:
    """What follows from the processes, the flags, the data and, in a resumed run, the checkpoint.

    No attribute is replaced, but `state` changes, and `notes`, `changed` and `head` get more
    entries.
    """

    ranks: Ranks
    accelerator: Accelerator
    config: TrainConfig
    notes: list[str]  # lines for the start table, about settings that follow from the data or model
    changed: list[str]  # lines about a checkpoint, and what has changed since it was saved
    resumed_from: Path | None  # the checkpoint
    source: "InitialWeights | None"
    data: Data
    plan: Plan
    updates: int  # of the whole run
    spec: InputSpec
    task: Task
    state: TrainState
    # the record of the fit of a new head, if there was one
    head: dict = field(default_factory=dict)


def resolve(
    config: TrainConfig,
    saved: Checkpoint | None,
    folder: Path | None,
    data: Data,
    source: "InitialWeights | None",
    accelerator: Accelerator,
    ranks: Ranks,
) -> Setup:
    """Choose the settings that follow from the data, and derive the plan, the input, the task and
    the state.

    `folder` is the run folder if it exists already. Raises ValueError if the checkpoint does not
    fit.
    """
    processes, train = accelerator.num_processes, data.train
    config, sizes = (config, []) if saved else choose_sizes(config, len(train), processes)
    _, grad_accum, batch = choose_batch(config, saved, processes)
    microbatches = config.microbatches or grad_accum * processes
    plan = make_plan(config, train.labels, batch, microbatches)
    state = restore_state(saved, folder, config, plan, data)
    updates = total_updates(config, plan, state.step)
    config, images, spec = resolve_input(config, saved, train)
    name, task = make_task(config, data.class_names, train.labels, config.sampler == "balanced")
    task.to(accelerator.device)
    final = replace(
        config,
        task=name,
        best_metric=task.metric,
        global_batch_size=batch,
        batch_size=None,
        grad_accum=grad_accum if saved and not config.microbatches else config.grad_accum,
        data=absolute_data(config.data),
        mixed_precision=accelerator.mixed_precision,
    )
    return Setup(
        ranks=ranks,
        accelerator=accelerator,
        config=final,
        notes=sizes + images,
        changed=resume_lines(saved, config, final, plan, processes) if saved else [],
        resumed_from=saved.path if saved else None,
        source=source,
        data=data,
        plan=plan,
        updates=updates,
        spec=spec,
        task=task,
        state=state,
    )


def resolve_input(
    config: TrainConfig, saved: Checkpoint | None, train: Split
) -> tuple[TrainConfig, list[str], InputSpec]:
    """The settings with those chosen from the images, lines about these, and the model's input.

    The input is the checkpoint's if the settings that it depends on are unchanged. It is not
    derived again, because some of the images may no longer exist.
    """
    if saved and all(vars(saved.config)[name] == vars(config)[name] for name in OF_INPUT):
        return config, [], saved.spec
    heights, widths, largest, coloured, *_ = train.looks[train.image_index].T
    sizes = {*zip(heights.tolist(), widths.tolist(), strict=True)}
    size = sizes.pop() if len(sizes) == 1 else None
    small = size is not None and max(size) <= SMALL
    # mnist_cnn takes images of one size.
    small_input = max(sides(config.image_size or 0)) <= SMALL and config.eval_size is None
    config, lines = choose_images(config, small, small_input, saved is None)
    colours = coloured.sum()
    if 0 < colours < len(train) / 2:
        lines.append(
            f"{colours:,} of {len(train):,} images are in colour: 3 channels; "
            "--channels 1 reads all as grey"
        )
    most = int(largest.max())
    if np.median(largest) and most < 2**7:  # most images were decoded
        used = config.image_bits - 8 + most.bit_length()
        fix = f"if grey images use fewer than 16 bits, set --image_bits {used}; scale colours first"
        lines.append(f"scaled to 8 bits, the largest pixel is {most}; {fix}")
    spec = input_spec(config, 3 if colours else 1, size)
    ratio = np.median(heights / widths)
    share = spec.for_evaluation().visible_share(ratio)
    if share < 0.99:
        shape = f"a typical image, whose height is {ratio:.2f} times its width"
        lines.append(f"evaluation uses {share:.0%} of {shape}")
    return config, lines, spec
