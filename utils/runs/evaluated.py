"""The checkpoint that eval.py and predict.py use, the same on all ranks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from utils.config.scripts import EvalConfig, PredictConfig
from utils.config.settings import LaunchConfig, TrainConfig
from utils.data.spec import InputSpec
from utils.files import expand
from utils.ranks.ranks import Ranks
from utils.runs.manifest import FOR_EVALUATION, verify
from utils.runs.metadata import SavedRun, read_checkpoint
from utils.runs.weights import choose_weights, find_checkpoints


def find_saved(ckpt: str, average: int | None, kind: str | None, ranks: Ranks, tries: int = 10) -> SavedRun:
    """The verified checkpoint of --ckpt, with the weights that --average and --weights `kind` name; collective.

    Everything is read here. If a training run deletes the checkpoint meanwhile, the search begins anew.
    """

    def find() -> str:
        return json.dumps([str(checkpoint) for checkpoint in find_checkpoints(expand(ckpt), average)])

    # Only the main process searches: a training run could move `best` between two searches.
    paths = [Path(path) for path in json.loads(ranks.broadcast_text(ranks.run_on_main(find) or ""))]
    try:
        for path in paths:
            ranks.run_on_main(partial(verify, path, FOR_EVALUATION), main_first=True)
        return ranks.run_on_all(lambda: replace(read_checkpoint(paths[-1]), weights=choose_weights(paths, kind)))
    except (ValueError, OSError):
        if tries == 1 or not ranks.any_rank(not all(path.is_dir() for path in paths)):
            raise
    return find_saved(ckpt, average, kind, ranks, tries - 1)


def evaluated_at(saved: SavedRun, spec: InputSpec) -> SavedRun:
    """The run with this input in evaluation."""
    return replace(saved, spec=replace(saved.spec, evaluation=None if spec == saved.spec else spec))


def given_settings(flags: LaunchConfig) -> dict[str, Any]:
    """The settings of a training run that these flags replace: those that both have, except where it is launched."""
    names = set(type(flags).__annotations__) & set(TrainConfig.__annotations__) - {"model", "pretrained"}
    given = {name: getattr(flags, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def remarks(flags: EvalConfig | PredictConfig, config: TrainConfig, spec: InputSpec) -> list[str]:
    """Lines about given settings that have no effect or do not suit the run; `spec` is that of the evaluation."""
    lines, published = [], isinstance(flags, EvalConfig) and flags.model is not None
    if flags.threshold is not None and config.task == "classification":
        lines.append("--threshold has no effect: only multilabel and binary have it")
    if isinstance(flags, EvalConfig) and config.eval_crop is not None and spec.small:
        lines.append("--eval_crop has no effect: small images are evaluated whole")
    if "flip" in (flags.tta or "") and not (config.flip or published):
        lines.append("--tta flip: this run was trained without --flip, so mirror images are new to it")
    return lines
