"""What eval.py evaluates: a checkpoint, published weights, or weights in a file."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from utils.config.bounds import require
from utils.config.scripts import EvalConfig
from utils.config.settings import TrainConfig
from utils.models.matching import count_outputs, fit_names
from utils.models.published import names_of_outputs, published_outputs
from utils.models.zoo import build_model, check_model, input_spec
from utils.ranks.ranks import Ranks
from utils.runs.inference import find_saved, given_settings
from utils.runs.loading import Weights
from utils.runs.metadata import SavedRun, SavedState
from utils.runs.source import fill_input, read_source
from utils.runs.state import TrainState

Names = list[str] | Callable[[list[str]], list[str]]  # class names, or a function of those of the data


def find_run(flags: EvalConfig, ranks: Ranks) -> tuple[SavedRun, Names]:
    """The verified checkpoint of --ckpt, or the values that a checkpoint of --model would have; collective.

    Also returns the class names, in the form that `load_split` takes.
    """
    if flags.ckpt:
        saved = find_saved(flags.ckpt, flags.weights, ranks)
        return saved, saved.class_names
    assert flags.model
    config = TrainConfig(model=flags.model, pretrained=flags.pretrained, task="classification", report=False)
    config = replace(config, **given_settings(flags))
    with ranks.agree():
        check_model(config)
        if flags.pretrained:
            values = SavedState(state=TrainState(), input=input_spec(config, 3, None))
            outputs = published_outputs(config.model)
            return SavedRun(Path(config.model), config, values, [], None), partial(names_of_outputs, outputs, True)
    return run_of_file(config, f"{flags.weights}", ranks)


def run_of_file(config: TrainConfig, file: str, ranks: Ranks) -> tuple[SavedRun, Names]:
    """Like `find_run`, for weights in a file; collective."""
    where = f"--weights {file}"
    source = read_source("--weights", file, config.model, ranks)
    ranks.check_same(source.weights, f"different weights in {where}")
    with ranks.agree("building the model"):
        config = fill_input(config, source.settings)
        spec = input_spec(config, 3, None)
        model = build_model(config, spec, classes=1, load=False)  # for the names of its tensors
        tensors = fit_names(source.tensors, model, where, config.model, config.init_match == "order")
        outputs = count_outputs(tensors, model)
        require(outputs > 0, f"{where}: has no head for {config.model}", "set --model to the model of these weights")
    weights = Weights(Path(source.name), "model", False, tensors)
    values = SavedState(state=TrainState(), input=spec)
    saved = SavedRun(weights.checkpoint, config, values, [], None, weights)
    return saved, source.class_names or partial(names_of_outputs, outputs, False)
