"""Steps of building a run: the checks before the processes connect, the number of updates, and the gradients."""

import shlex

import torch
from accelerate import Accelerator
from torch import nn

from utils.config.batch import resolve_batch
from utils.config.settings import TrainConfig
from utils.data.order import Plan
from utils.data.sources import check_source
from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.models.batch_norm import check_batch_norm, has_batch_norm
from utils.models.zoo import check_model
from utils.ranks.accelerator import check_precision, prepare_buckets
from utils.ranks.ranks import Ranks
from utils.runs.folder import check_run_folder
from utils.training.gradients import Gradients, make_gradients
from utils.training.schedule import total_updates


def check_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Raise ValueError or OSError for settings that do not work on this machine; not collective."""
    check_precision(config, ranks)
    check_model(config)
    check_source(config)
    check_run_folder(config)
    if config.data_dir and config.resume is None and not config.data.startswith("torchvision/"):
        problem = "--data_dir is for --data torchvision/NAME only"
        raise UserError(problem, f"for a folder of your own use --data {shlex.quote(config.data_dir)}")
    if config.resume is None:
        resolve_batch(config, ranks.topology.world_size)


def count_updates(config: TrainConfig, plan: Plan, module: nn.Module, ranks: Ranks) -> int:
    """The updates of the whole run. Raises ValueError if a batch is too small for batch statistics; collective."""
    with ranks.agree():
        updates = total_updates(config, plan)
        if has_batch_norm(module):
            check_batch_norm(plan, updates, ranks.topology.world_size if config.sync_batchnorm else 1)
    return updates


def prepare_gradients(
    config: TrainConfig, spec: InputSpec, plan: Plan, model: nn.Module, module: nn.Module, accelerator: Accelerator
) -> Gradients:
    """How the gradients of `model`, which wraps `module` for training, are added up; collective."""
    gradients = make_gradients(model, module, accelerator, plan, bool(config.microbatches))
    no_images = torch.empty(0, spec.channels, spec.height, spec.width, device=accelerator.device)
    prepare_buckets(model, module, no_images)  # otherwise a resumed run sums gradients differently
    return gradients
