"""Evaluate a checkpoint exactly, on any split and any topology: each sample is counted once.

    python eval.py --ckpt runs/NAME                                              the run's best checkpoint
    accelerate launch --config_file accelerate_configs/2gpu.yaml eval.py --ckpt runs/NAME --split test --json test.json

The numbers are the same on any number of processes. `python eval.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from utils.config.cli import parse_args
from utils.config.settings import EvalConfig, TrainConfig, absolute_data
from utils.console import Terminal, printable, table
from utils.data.batches import Batches
from utils.data.order import BlockSampler
from utils.data.pipeline import make_dataset, make_loader
from utils.data.selection import load_split
from utils.data.sources import check_source
from utils.data.spec import InputSpec
from utils.data.splits import fingerprint_of
from utils.data.workers import check_workers
from utils.files import expand, write_output
from utils.models.zoo import build_model, check_model
from utils.ranks.accelerator import check_precision, compile_model, make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session
from utils.runs.loading import load_model
from utils.runs.manifest import FOR_EVALUATION, find_checkpoint, verify
from utils.runs.metadata import read_classes, read_metadata, read_sample_record, read_settings
from utils.training.bad_images import found_by_all
from utils.training.evaluation import evaluate_split

OVERRIDES = (
    "data",
    "data_subset",
    "image_column",
    "label_column",
    "bad_images",
    "check_images",
    "eval_batch_size",
    "mixed_precision",
    "num_workers",
    "data_dir",
    "cache_dir",
)  # settings of the run that a flag of eval.py replaces


def main(argv: Sequence[str] | None = None) -> dict:
    """Evaluate as the arguments say; returns the numbers."""
    guard_output()
    asked = parse_args(EvalConfig, "eval.py", argv)
    with distributed_session("eval.py", asked) as ranks:
        find_checkpoint(expand(asked.ckpt))  # a mistake is said before the processes meet
        check_workers(asked.num_workers)
        if asked.json:
            check_output_file(expand(asked.json))
        ranks.join()
        # The main process chooses: a training run that goes on may move `best` between two looks.
        checkpoint = Path(ranks.broadcast_text(ranks.run_on_all(lambda: choose(asked, ranks), main_first=True)))
        config, own_data = ranks.run_on_all(lambda: settings_of(checkpoint, asked))
        ranks.run_on_all(lambda: (check_precision(config, ranks), check_model(config), check_source(config)))
        record, class_names = evaluate_checkpoint(checkpoint, config, asked.split, own_data, ranks)
        if ranks.is_main:
            try:
                if asked.json:
                    write_output(expand(asked.json), json.dumps(record, indent=1) + "\n")
            finally:
                show(record, class_names, checkpoint)
    return record


def choose(asked: EvalConfig, ranks: Ranks) -> str:
    """The verified checkpoint that --ckpt means, on the main process."""
    if not ranks.is_main:
        return ""
    checkpoint = find_checkpoint(expand(asked.ckpt))
    verify(checkpoint, FOR_EVALUATION)
    return str(checkpoint)


def settings_of(checkpoint: Path, asked: EvalConfig) -> tuple[TrainConfig, bool]:
    """The run's settings, with those asked for now in their place, and whether they name the run's own data."""
    config = read_settings(checkpoint)
    own_data = not asked.data or absolute_data(asked.data) == config.data
    given = {name: getattr(asked, name) for name in OVERRIDES if getattr(asked, name) is not None}
    if not own_data:  # how the run's data was split says nothing of other data
        given |= {"train_split": None, "eval_split": None, "eval_fraction": None}
    return replace(config, metrics=True, max_eval_samples=asked.max_eval_samples, **given), own_data


def check_output_file(path: Path) -> None:
    """Raise ValueError when no file can be written there."""
    path = path.resolve() if path.is_symlink() else path.absolute()
    folder = path.parent
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"--json {path}: is not a regular file; give another path")
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--json {path}: {'is a folder' if path.is_dir() else f'{folder} is no folder to write to'}")


def evaluate_checkpoint(checkpoint: Path, config: TrainConfig, split_name: str | None, own_data: bool, ranks: Ranks):
    """The numbers of one split, and the names of the classes; collective."""
    accelerator = make_accelerator(ranks, config)
    saved, class_names = ranks.run_on_all(lambda: (read_metadata(checkpoint), read_classes(checkpoint)))
    spec = InputSpec.from_dict(saved["input"])
    record = ranks.run_on_all(lambda: read_sample_record(checkpoint))
    terminal = Terminal(ranks.is_main)
    chosen = partial(load_split, config, split_name, class_names, own_data, record, terminal, spec.small)
    split = ranks.run_on_all(chosen, main_first=True, place="loading the data")
    ranks.check_same(
        fingerprint_of(split.label_fingerprint, split.content), f"different images in --data {config.data}"
    )
    for note in split.notes:
        terminal.print(printable(note))
    bar = terminal.progress("decoding")
    dataset = ranks.run_on_all(lambda: make_dataset(split, spec, config, False, bar), main_first=True)
    model = ranks.run_on_all(lambda: build_model(config, spec, len(class_names), load=False))
    ranks.run_on_all(lambda: load_model(checkpoint, model))
    blocks = BlockSampler(len(dataset), config.eval_batch_size)
    loader = make_loader(dataset, blocks, config, ranks.threads, ranks.device)
    loader = accelerator.prepare(loader)
    compile_model(accelerator, model)
    model.to(accelerator.device)  # bare: nothing is trained, so the ranks have nothing to say to each other
    batches = Batches(loader, spec, config, accelerator.device, training=False)
    result = evaluate_split(ranks, accelerator, model, batches, config, terminal.progress("evaluating"))
    for reason in list(found_by_all(ranks, batches).values())[:10]:
        terminal.print(f"{reason}; left out")
    state = saved["state"]
    step, epoch = state["step"], state["epoch"] + (state["position"] > 0)
    return {"kind": "eval", "step": step, "epoch": epoch, "split": split.name, **result}, class_names


def show(record: dict, class_names: list[str], checkpoint: Path) -> None:
    """Print the numbers as a table, and the classes from worst to best."""
    rows = [(name, f"{record[name]:.4f}") for name in ("accuracy", "top5", "loss", "macro_f1", "macro_precision")]
    rows += [("macro_recall", f"{record['macro_recall']:.4f}"), ("count", record["count"])]
    if "left_out" in record:
        rows += [("left out", f"{record['left_out']} images that cannot be read")]
    if record["classes_evaluated"] < len(class_names):
        rows += [("classes", f"{record['classes_evaluated']} of {len(class_names)} with samples")]
    rows += [("seconds", f"{record['seconds']:.2f}")]
    print(table(f"{checkpoint}, split {record['split']}", rows))
    accuracies = zip(class_names, record["per_class_accuracy"], strict=True)
    worst = sorted((accuracy, printable(name)) for name, accuracy in accuracies if accuracy is not None)[:10]
    print(table("Accuracy of the classes, worst first", [(name, f"{accuracy:.4f}") for accuracy, name in worst]))


if __name__ == "__main__":
    main()
