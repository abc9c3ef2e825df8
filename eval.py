"""Evaluate a checkpoint or published weights exactly, on any topology: each sample is counted once.

    python eval.py --ckpt runs/NAME                                     the run's best checkpoint
    python eval.py --ckpt runs/NAME --split test --json test.json       another split
    python eval.py --model resnet50 --pretrained --data path/to/imagenet        published weights
    accelerate launch --config_file accelerate_configs/2gpu.yaml eval.py --ckpt runs/NAME

The metrics are the same on any number of processes. `python eval.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from utils.config.cli import parse_args
from utils.config.scripts import EvalConfig
from utils.config.settings import TrainConfig
from utils.console import Terminal, printable
from utils.data.cache import make_dataset
from utils.data.selection import load_split
from utils.data.sources import absolute_data, check_source
from utils.data.spec import InputSpec, sides
from utils.data.splits import Split, fingerprint_of
from utils.files import check_output_file, expand, write_output
from utils.models.published import resize_input, version_of
from utils.models.zoo import check_model
from utils.predictions.tables import check_table_file, encode, rows_of_split
from utils.ranks.accelerator import check_precision, make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.report.writing import Evaluated, report_evaluation
from utils.runs.inference import (
    given_settings,
    load_for_inference,
    place_model,
    set_evaluation_input,
    warn_about_flags,
)
from utils.runs.manifest import find_checkpoint
from utils.runs.metadata import SavedRun
from utils.runs.source import Names, find_run
from utils.tasks.table import make_task
from utils.tasks.task import Predictions, Task
from utils.training.evaluation import Evaluator, check_outputs, make_eval_loader, model_rate


def main(argv: Sequence[str] | None = None) -> dict:
    """Evaluate with these arguments and return the metrics."""
    guard_output()
    flags = parse_args(EvalConfig, "eval.py", argv)
    with distributed_session("eval.py", flags) as ranks:
        # Errors that one process can detect alone are reported before the processes connect.
        if flags.ckpt:
            find_checkpoint(expand(flags.ckpt))
        if flags.json:
            check_output_file("--json", expand(flags.json))
        if flags.predictions:
            check_table_file("--predictions", expand(flags.predictions))
        ranks.join()
        saved, names = find_run(flags, ranks)
        with ranks.agree():
            config, own_data = settings_of(saved, flags)
            check_precision(config, ranks)
            check_model(config)
            check_source(config)
        # Use the checkpoint's image size, even if the run derived it from its images.
        spec = spec_of(saved, config)
        for line in warn_about_flags(flags, config, spec):
            Terminal(ranks.is_main).print(line)
        known = replace(config, image_size=[spec.height, spec.width], eval_size=None)
        split, found_names = load_eval_split(saved, known, flags, own_data, names, ranks)
        saved = replace(saved, class_names=found_names)
        with ranks.agree():
            config, task = make_task(config, saved.class_names, None)
            if flags.predictions:
                task.check_predictions()
        record, found = evaluate(
            set_evaluation_input(saved, spec), config, flags, task, split, ranks
        )
        if ranks.is_main:
            more = [
                ("input", spec.describe_pixels()),
                *([("views", flags.tta)] if flags.tta else []),
                *(
                    [("model alone", f"{record['model_images_per_second']:,.1f} images/s")]
                    if flags.throughput
                    else []
                ),
            ]
            try:
                write_files(flags, record, found, task, split)
            finally:
                print(task.report(record, f"Evaluation of {saved.path}", more))
    return record


def settings_of(saved: SavedRun, flags: EvalConfig) -> tuple[TrainConfig, bool]:
    """The run's settings, overridden by the flags, and whether the data is that of the run."""
    own_data = bool(flags.ckpt) and (
        not flags.data or absolute_data(flags.data) == saved.settings.data
    )
    given = given_settings(flags)
    if not own_data:  # other data has other splits
        given |= {"train_split": None, "eval_split": None, "eval_fraction": None}
    given |= {"metrics": True, "max_eval_samples": flags.max_eval_samples}
    return replace(saved.settings, **given), own_data


def spec_of(saved: SavedRun, config: TrainConfig) -> InputSpec:
    """The model's input in this evaluation."""
    if config.eval_size is not None and config.eval_size != saved.settings.eval_size:
        return resize_input(saved.spec, config, sides(config.eval_size))
    return saved.spec.for_evaluation().cropped(config.eval_crop)


def load_eval_split(
    saved: SavedRun,
    config: TrainConfig,
    flags: EvalConfig,
    own_data: bool,
    names: Names,
    ranks: Ranks,
) -> tuple[Split, list[str]]:
    """The split to evaluate, and the names of its labels, the same on all ranks; collective."""
    terminal = Terminal(ranks.is_main)
    with ranks.local_main_first("loading the data"):
        split, found = load_split(config, flags.split, names, saved.samples, own_data, terminal)
    fingerprint = fingerprint_of(split.label_fingerprint, split.content)
    ranks.check_same(fingerprint, f"different images in --data {config.data}")
    for note in split.notes:
        terminal.print(printable(note))
    return split, found


def evaluate(
    saved: SavedRun, config: TrainConfig, flags: EvalConfig, task: Task, split: Split, ranks: Ranks
) -> tuple[dict, Predictions | None]:
    """The metrics of one split, and its predictions for --predictions and the page; collective."""
    terminal, spec = Terminal(ranks.is_main), saved.spec.for_evaluation()
    with ranks.local_main_first("decoding images"):
        dataset = make_dataset(split, spec, config, False, terminal.progress("decoding"))
    accelerator = make_accelerator(ranks, config)
    model = place_model(load_for_inference(saved, config, task, ranks), flags.tta, accelerator)
    loader = make_eval_loader(dataset, config, ranks)
    # Not the model: ranks may have different numbers of batches, which DDP does not allow.
    loader = accelerator.prepare(loader)
    evaluator = Evaluator(ranks, accelerator, model, loader, spec, task, config)
    rows = evaluator.rows(keep=config.report or flags.predictions is not None)
    result = evaluator.metrics(accelerator.gather(rows))
    check_outputs(result["loss"], saved.path)
    if flags.tta:
        result["tta"] = flags.tta
    if flags.throughput:
        result["model_images_per_second"] = model_rate(evaluator)
    record = {
        "kind": "eval",
        **origin(saved, config, flags),
        "data": absolute_data(config.data),
        "split": split.name,
        "classes": len(saved.class_names),
        **result,
    }
    if config.report and evaluator.predictions and ranks.is_main:
        evaluated = Evaluated(task, split, evaluator.predictions, record, config.seed)
        report_evaluation(saved.path, evaluated, bool(flags.report), terminal.print)
    return record, evaluator.predictions


def write_files(
    flags: EvalConfig, record: dict, found: Predictions | None, task: Task, split: Split
) -> None:
    """Write the files of --json and --predictions, and print their paths."""
    if flags.json:
        write_output(expand(flags.json), json.dumps(record, indent=1) + "\n")
        print(f"written: {flags.json}")
    if flags.predictions:
        assert found is not None
        path = expand(flags.predictions)
        write_output(path, encode(rows_of_split(task, split, found), path))
        print(f"written: {flags.predictions}")


def origin(saved: SavedRun, config: TrainConfig, flags: EvalConfig) -> dict[str, Any]:
    """The fields of the record that identify the weights."""
    weights = saved.weights
    if weights is None:
        return {"model": flags.model, "pretrained": version_of(config)}
    if flags.model:
        return {"model": flags.model, "weights": flags.weights}
    place = {
        "checkpoint": str(saved.path.absolute()),
        "step": saved.state.step,
        "epoch": saved.state.epochs_begun,
    }
    return place | weights.describe()


if __name__ == "__main__":
    main()
