"""--init_from: the weights of a run, a file or the Hub that a new run starts from."""

import os
from dataclasses import replace
from functools import partial

from torch import nn

from utils.config import require
from utils.console import join_names, say
from utils.files import expand
from utils.models import bad_tensors
from utils.models.matching import Match, copy_matching, count_outputs, fit_names, zero_heads
from utils.models.published import published_input
from utils.ranks import Ranks
from utils.runs.foreign import (
    HUB,
    OF_MODEL,
    TAKEN,
    InitialWeights,
    classes_of_outputs,
    fill_input,
    read_foreign,
)
from utils.runs.inference import Inference, find_saved
from utils.runs.manifest import MANIFEST_FILE, WEIGHTS_FILE, is_checkpoint_name
from utils.runs.metadata import Checkpoint
from utils.settings.train import TrainConfig


def load_initial_weights(
    config: TrainConfig, saved: Checkpoint | None, ranks: Ranks
) -> tuple[TrainConfig, InitialWeights | None]:
    """The settings with those that follow from --init_from, and its weights; collective.

    A run that resumes from the checkpoint `saved` needs no source. It keeps these settings as they
    were.
    """
    if saved:
        kept = saved.config.init_from
        if config.init_from and absolute_source(config.init_from) != kept:
            say("--init_from has no effect: a resumed run has the weights of its checkpoint")
        return replace(config, init_from=kept), None
    if config.init_from is None:
        return config, None
    if ranks.from_main(partial(_is_run, config.init_from)):
        source = _of_run(find_saved(config.init_from, None, ranks))
    else:
        source = read_foreign("--init_from", config.init_from, config.model, ranks)
    with ranks.agree():
        filled = fill_input(config, source.settings)
    ranks.check_same(source.weights, f"different weights in --init_from {config.init_from}")
    source.taken = [name for name in TAKEN if getattr(filled, name) != getattr(config, name)]
    return replace(filled, init_from=absolute_source(config.init_from)), source


def _is_run(where: str) -> bool:
    """Whether --init_from names a run or a checkpoint."""
    path = expand(where)
    is_checkpoint = (path / MANIFEST_FILE).exists() or is_checkpoint_name(path.name)
    return path.is_dir() and (is_checkpoint or not (path / WEIGHTS_FILE).is_file())


def _of_run(saved: Inference) -> InitialWeights:
    """The weights of a run, with those of its settings that a run can take."""
    config = saved.config
    spec = saved.spec
    values = vars(spec) | {name: vars(config)[name] for name in (*OF_MODEL, "eval_crop")}
    values["image_size"] = list(spec.size)
    if config.pretrained:
        values["stem"] = "standard"
        values["eval_crop"] = config.eval_crop or published_input(config.model)["eval_crop"]
    return InitialWeights(os.path.abspath(saved.path), saved.tensors(), saved.class_names, values)


def absolute_source(where: str | None) -> str | None:
    """--init_from with an absolute path, unless it is on the Hub."""
    return where if where is None or where.startswith(HUB) else str(expand(where).absolute())


def copy_source(
    module: nn.Module, source: InitialWeights, class_names: list[str], config: TrainConfig
) -> Match:
    """Copy the weights that fit into the model; returns which they are, and notes it in `source`.

    Raises UserError if no parameter fits, or if a copied tensor is NaN or infinite.
    """
    tensors = source.tensors
    source.tensors = {}  # they are not needed again
    where = f"--init_from {source.name}"
    by_order = config.init_match == "order"
    tensors, left_out = fit_names(tensors, module, where, config.model, by_order)
    zero_heads(module)
    if not source.class_names and count_outputs(tensors, module) == len(class_names):
        source.class_names = classes_of_outputs(len(class_names), class_names)
        names = join_names(source.class_names, 6)
        source.taken.append(f"outputs for classes, in order: {names}")
    match = copy_matching(module, tensors, source.class_names, class_names)
    match.unused += left_out
    source.match = match
    bad = join_names(bad_tensors(module.state_dict()), 3)
    require(not bad, f"{where}: {bad} is NaN or infinite", "use other weights")
    theirs = join_names(tensors, 3)
    own = join_names(module.state_dict(), 3)
    problem = f"{where}: none of its tensors ({theirs}) fits {config.model}, which has {own}"
    use = "set --model to the model of these weights, use other weights"
    copied = {key for key, _ in module.named_parameters()} & {*match.kept}
    require(copied, problem, f"{use}, or try --init_match order")
    return match
