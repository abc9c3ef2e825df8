"""Settings: files first, then flags; what is saved can be read back; batch sizes multiply to the global batch."""

from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from training_runs import train_run

from utils.batch import resolve_batch
from utils.cli import parse_args, read_config
from utils.config import TrainConfig, to_yaml

ROOT = Path(__file__).parent.parent


def parse(*flags):
    return parse_args(TrainConfig, "train.py", flags)


@pytest.mark.parametrize("order", ["before", "after", "with ="])
def test_a_flag_beats_the_config_file_wherever_either_stands(order):
    Path("recipe.yaml").write_text("lr: 0.5\nepochs: 7\n")
    flags = {
        "before": ("--config", "recipe.yaml", "--lr", "0.25"),
        "after": ("--lr", "0.25", "--config", "recipe.yaml"),
        "with =": ("--lr=0.25", "--config=recipe.yaml"),
    }[order]
    config = parse(*flags)
    assert (config.lr, config.epochs) == (0.25, 7)


def test_a_later_config_file_beats_an_earlier_one():
    Path("one.yaml").write_text("lr: 0.5\nepochs: 7\n")
    Path("two.yaml").write_text("lr: 0.25\n")
    config = parse("--config", "one.yaml", "--config", "two.yaml")
    assert (config.lr, config.epochs) == (0.25, 7)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--flip",), True),
        (("--flip", "--lr", "0.1"), True),
        (("--flip", "true"), True),
        (("--flip", "false"), False),
        (("--flip=false",), False),
    ],
)
def test_a_bare_boolean_flag_means_true(flags, expected):
    assert parse(*flags).flip is expected


def test_lists_and_dictionaries_are_written_as_yaml():
    config = parse("--mean", "[0.1, 0.2, 0.3]", "--model_args", "{hidden: 16, name: wide}", "--lr", "1e-3")
    assert (config.mean, config.model_args, config.lr) == ([0.1, 0.2, 0.3], {"hidden": 16, "name": "wide"}, 1e-3)


def test_settings_survive_saving_and_a_saved_file_is_a_config_file():
    config = parse("--model_args", "{a: 1}", "--std", "[0.5]", "--seed", "3", "--flip", "--data", "ä/b")
    Path("kept.yaml").write_text(to_yaml(config))
    assert read_config(Path("kept.yaml")) == config
    Path("saved.yaml").write_text(to_yaml(config))
    assert parse("--config", "saved.yaml") == config


def test_the_config_in_the_run_folder_repeats_the_run():
    flags = ("--model", "mlp", "--max_steps", "3", "--lr", "0.01", "--log_every", "1")
    first = train_run(1, "first", *flags)
    second = train_run(1, "second", "--config", "runs/first/config.yaml", "--run_name", "second")
    assert [r["loss"] for r in first if r["kind"] == "train"] == [r["loss"] for r in second if r["kind"] == "train"]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_leaves_the_topology_open(recipe):
    settings = yaml.safe_load(recipe.read_text())
    config = parse("--config", str(recipe))
    assert {name: getattr(config, name) for name in settings} == settings
    assert set(settings) <= {f.name for f in fields(TrainConfig)}
    assert not set(settings) & {"batch_size", "grad_accum", "num_workers", "threads", "output_dir", "run_name"}


@pytest.mark.parametrize(
    ("flags", "processes", "expected"),
    [
        ((), 1, (128, 1, 128)),
        ((), 4, (32, 1, 128)),
        (("--batch_size", "32"), 4, (32, 1, 128)),
        (("--batch_size", "32", "--grad_accum", "2"), 2, (32, 2, 128)),
        (("--global_batch_size", "96", "--grad_accum", "3"), 2, (16, 3, 96)),
        (("--global_batch_size", "96", "--batch_size", "16"), 2, (16, 3, 96)),
        (("--global_batch_size", "96", "--batch_size", "16", "--grad_accum", "2"), 3, (16, 2, 96)),
    ],
)
def test_batch_sizes_multiply_to_the_global_batch(flags, processes, expected):
    assert resolve_batch(parse(*flags), processes) == expected


@pytest.mark.parametrize(
    ("flags", "processes", "mend"),
    [
        (("--global_batch_size", "100"), 3, "99 or 102 would"),
        (("--global_batch_size", "2"), 3, "; 3 would"),
        (("--global_batch_size", "96", "--batch_size", "40"), 2, "leave out --batch_size"),
        (("--global_batch_size", "96", "--batch_size", "16", "--grad_accum", "2"), 2, "is 64, not"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused_with_numbers_that_work(flags, processes, mend):
    with pytest.raises(ValueError, match=mend):
        resolve_batch(parse(*flags), processes)


@pytest.mark.parametrize("place", ["model_args: {class_path: CLASS}", "model_args: {a: {class_path: CLASS}}",
                                   "model_args: {a: [{b: {class_path: CLASS}}]}", "data: {class_path: CLASS}",
                                   "mean: {class_path: CLASS}"])  # fmt: skip
def test_settings_from_a_stranger_import_and_execute_nothing(place, monkeypatch):
    """jsonargparse makes an object of a class_path wherever the type of a setting allows any."""
    Path("trap.py").write_text(
        "import os\nos.mkdir('imported')\nclass Trap:\n    def __init__(self): os.mkdir('made')\n"
    )
    monkeypatch.syspath_prepend(".")
    Path("recipe.yaml").write_text(place.replace("CLASS", "trap.Trap") + "\n")
    with suppress(ValueError):
        read_config(Path("recipe.yaml"))
    with suppress(SystemExit):
        parse_args(TrainConfig, "train.py", ["--config", "recipe.yaml"])
    flag, value = Path("recipe.yaml").read_text().strip().split(": ", 1)
    with suppress(SystemExit):
        parse_args(TrainConfig, "train.py", [f"--{flag}", value])
    assert not Path("imported").exists() and not Path("made").exists()
