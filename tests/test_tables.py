"""Optimizers, schedules, losses and sources are chosen by name from tables, and arguments are passed to them."""

import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, refused, train_run, weights

import eval
import train
from utils.config.cli import parse_args, read_config
from utils.config.settings import TrainConfig
from utils.data.sources import SOURCES, absolute_data, check_source, has_columns
from utils.data.splits import Files, Source, fingerprint_of, whole_split
from utils.runs.manifest import find_checkpoint
from utils.runs.metadata import read_settings
from utils.tasks.losses import LOSSES
from utils.training.optim import OPTIMIZERS
from utils.training.schedule import SCHEDULES, after_warmup

FLAGS = ("--model", "mlp", "--lr", "0.01", "--log_every", "1", "--threads", "1", "--max_train_samples", "256")


def refusal(capsys, *flags):
    """The error with which parsing these flags ends."""
    with pytest.raises(SystemExit) as end:
        parse_args(TrainConfig, "train.py", flags, train.TABLES)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    return line.removeprefix("train.py: error: ").strip()


@pytest.mark.parametrize(
    ("setting", "name", "error"),
    [
        ("optimizer", "adamm", "no such optimizer; did you mean adam, radam or nadam?"),
        ("optimizer", "lion", "no such optimizer; use sgd, muon, adafactor, adadelta"),
        ("optimizer", "lbfgs", "no such optimizer; use sgd, muon"),
        ("lr_schedule", "cosin", "no such lr schedule; did you mean cosine?"),
        (
            "lr_schedule",
            "square_root",
            "no such lr schedule; use constant, linear, cosine, onecycle",
        ),
        ("loss", "hinge", "no such loss; use cross_entropy, binary_cross_entropy"),
    ],
)
def test_a_name_that_is_not_in_the_table_is_refused_in_flags_and_files(setting, name, error, capsys):
    assert refusal(capsys, f"--{setting}", name).startswith(f"--{setting} {name}: {error}")
    Path("recipe.yaml").write_text(f"{setting}: {name}\n")
    assert refusal(capsys, "--config", "recipe.yaml").startswith(f"--{setting} {name}: {error}")
    assert error in refused(train.main, "--config", "recipe.yaml", processes=2)


def test_help_lists_every_name_with_the_first_line_of_its_function():
    (outcome,) = run_ranks(1, train.main, ["--help"])
    text = "".join(outcome.out.split())
    for table in (OPTIMIZERS, SCHEDULES, LOSSES, SOURCES):
        entries = [f"{name} ({inspect.getdoc(function).splitlines()[0][:-1]})" for name, function in table.items()]
        assert "".join(f"{', '.join(entries)}".split()) in text
    assert (
        "(sgd:nesterov;muon:adamw_lr" in text
        and "adam:betas,eps,amsgrad" in text
        and "onecycle:div_factor,final_div_factor" in text
    )


@pytest.mark.parametrize(
    ("flags", "arguments", "error"),
    [
        ("--optimizer sgd", "{lr: 1}", "lr is set by --lr; leave it out here"),
        ("--optimizer sgd", "{momentum: 0.5}", "momentum is set by --momentum; leave it out here"),
        ("--optimizer adamw", "{weight_decay: 0}", "weight_decay is set by --weight_decay; leave it out here"),
        ("--optimizer adamw", "{beta: [0.9, 0.99]}", "unknown argument beta; did you mean betas?"),
        ("--optimizer adamw", "{fused: false}", "unknown argument fused; use betas, eps, amsgrad"),
        ("--optimizer rmsprop", "{momentum: 0.5}", "momentum is set by --momentum; leave it out here"),
        ("--optimizer rmsprop", "{alfa: 0.5}", "unknown argument alfa; did you mean alpha?"),
        ("--optimizer muon", "{adjust_lr_fn: rms}", "Adjust learning rate function rms is not supported"),
        ("--optimizer nadam", "{betas: [0.9]}", "betas must have 2 values, got [0.9]; change"),
        ("--optimizer muon", "{betas: [0.9]}", "not enough values to unpack (expected 2, got 1); change"),
        ("--optimizer adagrad", "{maximize: true}", "unknown argument maximize; use lr_decay"),
        ("--optimizer adamw", "{betas: 0.9}", "betas must be a value such as (0.9, 0.999), got 0.9"),
        ("--optimizer adamw", "{betas: [0.9, 0.95, 0.99]}", "betas must have 2 values, got [0.9, 0.95, 0.99]; change"),
        ("--optimizer adamw", "{betas: [0.9, 1]}", "Invalid beta parameter at index 1"),
        ("--optimizer adamw", "{eps: true}", "eps must be a value such as 1e-08, got True"),
        ("--optimizer adamw", "{eps: .nan}", "eps must be a value such as 1e-08, got nan"),
        ("--optimizer sgd", "{nesterov: 1}", "nesterov must be a value such as True, got 1"),
        ("--lr_schedule constant", "{end: 1}", "unknown argument end; remove it, this function takes no arguments"),
        ("--lr_schedule cosine", "{end: -1}", "the learning rate would be -1 times --lr"),
        ("--lr_schedule step", "{step_size: 0.0}", "step_size must be above 0, got 0.0; change or remove"),
        ("--lr_schedule step", "{gamma: -0.5}", "the learning rate would be -0.125 times --lr"),
        ("--lr_schedule multistep", "{milestones: [a]}", "change or remove these arguments"),
        ("--lr_schedule multistep", "{milestones: 3}", "milestones must be a value such as (0.5, 0.75), got 3"),
        ("--lr_schedule exponential", "{end: 0.0}", "end must be above 0, got 0.0; change or remove"),
        ("--lr_schedule onecycle", "{div_factor: 0}", "division by zero; change or remove these arguments"),
        ("--lr_schedule onecycle", "{warmup_steps: 3}", "warmup_steps is set by --warmup_steps"),
    ],
)
def test_arguments_that_are_wrong_are_refused_with_their_flag(flags, arguments, error, capsys):
    flag, name = flags.split()
    line = refusal(capsys, flag, name, f"{flag}_args", arguments)
    assert line.startswith(f"{flag}_args for {name}: ") and error in line
    Path("recipe.yaml").write_text(f"{flag[2:]}: {name}\n{flag[2:]}_args: {arguments}\n")
    assert refusal(capsys, "--config", "recipe.yaml") == line


def test_a_resumed_run_shows_the_arguments_that_changed():
    flags = (*FLAGS, "--optimizer", "adamw", "--lr_schedule", "cosine")
    train_run(1, "run", *flags, "--max_steps", "2", "--optimizer_args", "{eps: 0.001}")
    more = ["--run_name", "run", *flags, "--max_steps", "4", "--resume", "auto", "--lr_schedule_args", "{end: 0.5}"]
    (outcome,) = run_ranks(1, train.main, more)
    assert "optimizer_args was {'eps': 0.001} in the checkpoint, now {}\n" in outcome.out
    assert "lr_schedule_args was {} in the checkpoint, now {'end': 0.5}\n" in outcome.out


def _sign(groups, config, scale: float = 1.0, **others):
    """Steps in the direction of the sign of the gradient."""
    if others:
        raise TypeError(f"takes no {', '.join(others)}")

    class Sign(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * scale * parameter.grad.sign()

    return Sign(groups, {"lr": config.lr, "weight_decay": 0.0})


@after_warmup
def _restarts(done, cycles: int = 1):
    """Cosine decay with restarts."""
    return (1 + math.cos(math.pi * (done * cycles % 1))) / 2


def _train_with_own_entries(flags):
    OPTIMIZERS["sign"] = _sign
    SCHEDULES["restarts"] = _restarts
    train.main(flags)


OWN = (*FLAGS, "--optimizer", "sign", "--optimizer_args", "{scale: 0.5}", "--lr_schedule", "restarts")


def test_custom_entries_are_used_with_their_arguments_and_evaluation_needs_no_table():
    flags = [*OWN, "--run_name", "run", "--lr_schedule_args", "{cycles: 2}", "--warmup_steps", "2", "--max_steps", "12"]
    returned(2, _train_with_own_entries, flags)
    cycle = [0.01 * math.cos(math.pi * u / 10) ** 2 for u in range(5)]
    rates = [0.005, 0.01, *cycle, *cycle]
    assert [record["lr"] for record in records("run", "train")] == pytest.approx(rates)

    (result,) = returned(1, eval.main, ["--ckpt", "runs/run"])
    assert result["accuracy"] == records("run", "eval")[-1]["accuracy"]
    refusal = refused(train.main, *FLAGS, "--run_name", "run", "--resume", "auto", "--max_steps", "13")
    assert "was trained with a --optimizer of sign, not sgd" in refusal

    returned(1, _train_with_own_entries, [*flags, "--run_name", "one", "--max_steps", "1", "--warmup_steps", "0"])
    returned(1, _train_with_own_entries, [*flags, "--run_name", "two", "--max_steps", "2", "--warmup_steps", "0"])
    one, two = weights("one"), weights("two")  # two updates of two cycles: the second starts the second cycle
    steps = torch.cat([(two[name] - one[name]).flatten() for name in one]).abs()
    assert torch.allclose(steps[steps > 0], torch.tensor(0.01 * 0.5), rtol=1e-3) and (steps > 0).float().mean() > 0.2


def test_wrong_names_and_arguments_of_custom_entries_are_refused_too():
    for flags, error in (
        (("--lr_schedule_args", "{cycle: 2}"), "restarts: unknown argument cycle; did you mean cycles?"),
        (("--lr_schedule_args", "{cycles: 1.5}"), "restarts: cycles must be a value such as 1, got 1.5"),
        (("--lr_schedule", "restart"), "--lr_schedule restart: no such lr schedule; did you mean restarts?"),
        (("--optimizer_args", "{other: 1}"), "--optimizer_args for sign: takes no other; change or remove"),
    ):
        assert error in refused(_train_with_own_entries, *OWN, *flags)


def _listed_images(path: str, _config: TrainConfig) -> Source:
    """A file with PATH,CLASS on each line."""
    lines = [line.split(",") for line in Path(path).read_text().split()]
    names = sorted({name for _, name in lines})
    images = Files([str(Path(path).parent / image) for image, _ in lines], str(Path(path).parent))
    split = whole_split("train", images, [names.index(name) for _, name in lines], fingerprint_of(path))
    return Source({"train": lambda: split}, names)


def _grey_images(rest: str, _config: TrainConfig) -> Source:
    """A number of images."""
    pixels = np.arange(int(rest), dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    split = whole_split("train", pixels, np.arange(int(rest)) % 2, fingerprint_of(rest))
    return Source({"train": lambda: split}, ["even", "odd"])


def _train_with_own_sources(flags):
    SOURCES.update({".list": _listed_images, "grey/": _grey_images})
    train.main(flags)


@pytest.mark.full
def test_a_custom_suffix_and_a_custom_prefix_are_data_sets():
    image_folder("photos", {"cat": 20, "dog": 20})
    Path("photos/all.list").write_text("".join(f"{c}/{n:03}.png,{c}\n" for c in ("cat", "dog") for n in range(20)))
    Path("grey/40").mkdir(parents=True)  # a path, which the prefix hides
    flags = ["--model", "mlp", "--global_batch_size", "12", "--threads", "1", "--max_steps", "2"]
    for name, data, saved in (
        ("listed", "photos/all.list", str(Path("photos/all.list").resolve())),
        ("grey", "grey/40", "grey/40"),
    ):
        outcomes = run_ranks(2, _train_with_own_sources, [*flags, "--run_name", name, "--data", data])
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
        assert f"{data}: 36 training, 4 hold-out" in outcomes[0].out
        assert read_settings(find_checkpoint(Path("runs", name))).data == saved
    line = refused(_train_with_own_sources, "--data", "./nope.list")
    assert "; use digits, synthetic/..., torchvision/..., a .csv file, " in line
    assert "a .list file, grey/..., a Hub id such as " in line
    assert "did you mean grey/?" in refused(_train_with_own_sources, "--data", "gray")


def test_a_name_with_a_slash_is_a_path_unless_a_prefix_of_the_table_matches():
    for name in ("digits/mine", "synthetic/3x8x30", "photos"):
        Path(name).mkdir(parents=True)
    assert absolute_data("digits/mine") == str(Path("digits/mine").resolve())
    assert absolute_data("synthetic/3x8x30") == "synthetic/3x8x30" and absolute_data("digits") == "digits"
    assert not any(has_columns(name) for name in ("digits", "synthetic/3x8x30", "torchvision/MNIST", "photos"))
    assert has_columns("someone/something")
    Path("photos/train.parquet").touch()
    assert has_columns("photos")


def test_data_with_a_misspelt_name_are_refused_with_the_names_of_the_table():
    names = "use digits, synthetic/..., torchvision/..., a .csv file"
    for name, fix in (("digit", "did you mean digits?"), ("nothing", names)):
        with pytest.raises(ValueError, match=f"^--data {name}: no such file, folder or data set; ") as error:
            check_source(TrainConfig(data=name))
        assert fix in str(error.value)


def test_column_flags_without_a_table_are_reported_as_without_effect():
    image_folder("photos", {"cat": 20, "dog": 20})
    flags = ["--data", "photos", "--model", "mlp", "--max_steps", "1", "--label_column", "kind"]
    (outcome,) = run_ranks(1, train.main, flags)
    assert f"--label_column has no effect: {Path('photos').resolve()} has no columns\n" in outcome.out


def test_settings_that_a_table_does_not_have_can_still_be_read():
    Path("saved.yaml").write_text("optimizer: muon\nlr_schedule: wsd\nloss: focal\noptimizer_args: {ns_steps: 5}\n")
    config = read_config(Path("saved.yaml"))
    assert (config.optimizer, config.lr_schedule, config.loss) == ("muon", "wsd", "focal")
    assert config.optimizer_args == {"ns_steps": 5}
