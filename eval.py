"""Evaluate a checkpoint or published weights exactly, on any topology: each sample is counted once.

    python eval.py --ckpt runs/NAME                                     the run's best checkpoint
    python eval.py --ckpt runs/NAME --split test --json test.json       another split
    python eval.py --model resnet50 --pretrained --data path/to/imagenet        published weights
    accelerate launch --config_file accelerate_configs/2gpu.yaml eval.py --ckpt runs/NAME

The metrics are the same on any number of processes. `python eval.py --help` lists the settings.
"""

from utils.entry import guard_output  # must be the first import: see utils/entry.py

import json
from collections.abc import Sequence

from utils.config import parse_args, require
from utils.console import printable, progress, say
from utils.data import Split, absolute_data, check_source, fingerprint_of, load_split, make_dataset
from utils.files import expand, write_file
from utils.ranks import Ranks, Stopping, distributed_session, make_accelerator
from utils.replacing import RESULT, TABLE, check_output
from utils.runs import find_checkpoint
from utils.runs.inference import Inference, load_model, open_inference, place_model
from utils.settings.scripts import EvalConfig
from utils.tasks import Predictions, Task, make_task
from utils.training import Evaluator, check_finite, make_eval_loader, model_rate
from utils.version import has_package

HAS_EXTRAS = has_package("extras")
if HAS_EXTRAS:
    import extras


def main(argv: Sequence[str] | None = None) -> dict:
    """Evaluate with these arguments and return the metrics."""
    guard_output()
    flags = parse_args(EvalConfig, "eval.py", argv)
    with distributed_session("eval.py", flags) as ranks, Stopping(ranks) as stopping:
        # Errors that one process can detect alone are reported before the processes connect.
        if not HAS_EXTRAS:
            say("the folder extras/ is missing: no page")
            require(not flags.predictions, "--predictions needs the folder extras/", "restore it")
        if flags.ckpt:
            find_checkpoint(expand(flags.ckpt))
        ranks.join()
        found = open_inference(flags, ranks)
        with ranks.agree():
            check_source(found.config)
            if ranks.is_main:
                check_output(flags, "json", RESULT, data=found.config.data)
                check_output(flags, "predictions", TABLE, data=found.config.data)
        split, class_names = load_eval_split(found, flags, ranks)
        with ranks.agree():
            _, task = make_task(found.config, class_names)
            if flags.predictions:
                task.check_predictions()
        record, predictions = evaluate(found, flags, task, split, ranks)
        stopping.defer_signals()  # what is finished is written
        if ranks.is_main:
            more = [("input", found.spec.describe_pixels())]
            if flags.tta:
                more.append(("views", flags.tta))
            if flags.throughput:
                rate = record["model_images_per_second"]
                more.append(("model alone", f"{rate:,.1f} images/s"))
            try:
                write_files(flags, found, record, predictions, task, split)
            finally:
                print(task.report(record, f"Evaluation of {found.path}", more))
    return record


def load_eval_split(found: Inference, flags: EvalConfig, ranks: Ranks) -> tuple[Split, list[str]]:
    """The split to evaluate, and the names of its labels, the same on all ranks; collective."""
    config = found.config
    names = found.class_names or found.name_outputs
    with ranks.local_main_first("loading the data"):
        split, class_names = load_split(config, flags.split, names, found.table(), found.own_data)
    fingerprint = fingerprint_of(split.label_fingerprint, split.content)
    ranks.check_same(fingerprint, f"different images in --data {config.data}")
    for note in split.notes:
        say(printable(note))
    return split, class_names


def evaluate(
    found: Inference, flags: EvalConfig, task: Task, split: Split, ranks: Ranks
) -> tuple[dict, Predictions | None]:
    """The metrics of one split, and its predictions for --predictions and the page; collective."""
    config = found.config
    spec = found.spec.for_evaluation()
    with ranks.local_main_first("decoding images"):
        dataset = make_dataset(split, spec, config, False, progress("decoding"))
    accelerator = make_accelerator(ranks, config, fixed_order=config.fixed_order)
    model = place_model(load_model(found, task, ranks), flags.tta, accelerator)
    loader = make_eval_loader(dataset, config, ranks)
    # Not the model: ranks may have different numbers of batches, which DDP does not allow.
    loader = accelerator.prepare(loader)
    evaluator = Evaluator(ranks, accelerator, model, loader, spec, task, config)
    keep = HAS_EXTRAS and (config.report or flags.predictions is not None)
    if keep:
        extras.load_page()
    rows = evaluator.rows(keep=keep)
    result = evaluator.metrics(accelerator.gather(rows))
    check_finite(result["loss"], found.path)
    if flags.tta:
        result["tta"] = flags.tta
    if flags.throughput:
        result["model_images_per_second"] = model_rate(evaluator)
    record = {
        "kind": "eval",
        **found.origin,
        "data": absolute_data(config.data),
        "split": split.name,
        "classes": len(task.class_names),
        **result,
    }
    return record, evaluator.predictions


def write_files(
    flags: EvalConfig,
    found: Inference,
    record: dict,
    predictions: Predictions | None,
    task: Task,
    split: Split,
) -> None:
    """Write the page, and the files of --json and --predictions, and print the paths of these."""
    if HAS_EXTRAS and found.config.report and predictions:
        written = extras.report_evaluation(found.path, task, split, predictions, record)
        if flags.report and not written:
            say(f"--report has no effect: {found.path} is not in a run folder")
    if flags.json:
        write_file(expand(flags.json), json.dumps(record, indent=1) + "\n")
        print(f"written: {flags.json}")
    if flags.predictions:
        assert predictions is not None
        extras.write_predictions(expand(flags.predictions), task, split, predictions)
        print(f"written: {flags.predictions}")


if __name__ == "__main__":
    main()
