"""Tables: optimizers, schedules, losses and sources by name, with their arguments."""

import inspect
import math
from pathlib import Path

import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, refused, train_run
from safetensors.torch import load_file

import eval
import train
from utils.config import parse_args
from utils.data.sources import SOURCES, absolute_data, has_columns
from utils.settings.train import TrainConfig, read_config
from utils.tasks.classification import LOSSES
from utils.training.optim import OPTIMIZERS
from utils.training.schedule import SCHEDULES, after_warmup

FLAGS = ["--model", "mlp", "--lr", "0.01", "--log_every", "1", "--threads", "1"]
FLAGS += ["--max_train_samples", "256"]


def refusal(capsys, *flags):
    """The error with which parsing these flags ends."""
    with pytest.raises(SystemExit) as end:
        parse_args(TrainConfig, "train.py", flags, train.REGISTRIES)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    return line.removeprefix("train.py: error: ").strip()


@pytest.mark.parametrize(
    ("setting", "name", "error"),
    [
        ("optimizer", "adamm", "no such optimizer; did you mean adam?"),
        ("optimizer", "lbfgs", "no such optimizer; use sgd, muon"),
        ("lr_schedule", "cosin", "no such lr schedule; did you mean cosine?"),
        ("loss", "hinge", "no such loss; use cross_entropy, binary_cross_entropy"),
    ],
)
def test_a_name_that_is_not_in_the_table_is_refused_in_flags_and_files(
    setting, name, error, capsys
):
    Path("recipe.yaml").write_text(f"{setting}: {name}\n")
    for flags in ((f"--{setting}", name), ("--config", "recipe.yaml")):
        assert refusal(capsys, *flags).startswith(f"--{setting} {name}: {error}")


def test_help_lists_every_name_with_the_first_line_of_its_function():
    (outcome,) = run_ranks(1, train.main, ["--help"])
    text = "".join(outcome.out.split())
    for table in (OPTIMIZERS, SCHEDULES, LOSSES, SOURCES):
        helps = {name: inspect.getdoc(table[name]).partition("\n\n")[0] for name in table}
        entries = [f"{name} ({own[:-1]})" for name, own in helps.items()]
        assert "".join(f"{', '.join(entries)}".split()) in text
    assert "(sgd:nesterov;muon:adamw_lr" in text and "adam:betas,eps,amsgrad" in text


@pytest.mark.parametrize(
    ("flags", "arguments", "error"),
    [
        ("--optimizer sgd", "{lr: 1}", "got an unexpected keyword argument 'lr'"),
        ("--optimizer adamw", "{beta: [0.9, 0.99]}", "got an unexpected keyword argument 'beta'"),
        ("--optimizer adamw", "{fused: false}", "got an unexpected keyword argument 'fused'"),
        ("--lr_schedule constant", "{end: 1}", "got an unexpected keyword argument 'end'"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_its_flag(flags, arguments, error, capsys):
    flag, name = flags.split()
    line = refusal(capsys, flag, name, f"{flag}_args", arguments)
    assert line == f"{flag}_args for {name}: {error}; change or remove these arguments"


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("sgd", "nesterov", "no"), ("sgd", "nesterov", "0"), ("adam", "amsgrad", "off")],
)
def test_an_argument_that_is_true_or_false_takes_no_other_value(name, argument, value, capsys):
    flags = "--optimizer", name, "--optimizer_args"
    line = refusal(capsys, *flags, f"{{{argument}: {value}}}")
    assert line == f"--optimizer_args for {name}: {argument} must be true or false, got {value}"
    config = parse_args(TrainConfig, "train.py", [*flags, f"{{{argument}: false}}"], [OPTIMIZERS])
    assert config.optimizer_args == {argument: False}


@pytest.mark.parametrize(
    ("flags", "arguments", "error"),
    [
        ("--optimizer adamw", "{betas: 0.9}", "has no len()"),
        ("--optimizer adamw", "{betas: [0.9]}", "betas must have 2 values, got [0.9]"),
        ("--optimizer adamw", "{eps: .nan}", "Invalid epsilon value: nan"),
        ("--lr_schedule cosine", "{end: -1}", "the learning rate would be -"),
        ("--lr_schedule multistep", "{milestones: [a]}", "change or remove these arguments"),
        ("--lr_schedule onecycle", "{div_factor: 0}", "division by zero"),
        ("--loss focal", "{gamma: .nan}", "gamma must be at least 0 and finite, got nan"),
        ("--loss focal", "{gamma: .inf}", "gamma must be at least 0 and finite, got inf"),
        ("--auto_augment randaugment", "{magnitude: 9.5}", "both integers, got 9.5 and 2"),
        ("--auto_augment randaugment", "{num_ops: 2.0}", "both integers, got 9 and 2.0"),
        ("--auto_augment randaugment", "{magnitude: 31}", "must be between 0 and 30"),
    ],
)
def test_a_wrong_value_of_an_argument_ends_the_run_before_its_first_update(flags, arguments, error):
    flag, name = flags.split()
    line = refused(train.main, *FLAGS, flag, name, f"{flag}_args", arguments)
    assert line.startswith(f"train.py: error: {flag}_args for {name}: ") and error in line
    assert not Path("runs").exists()


@pytest.mark.full
def test_a_resumed_run_shows_the_arguments_that_changed():
    flags = (*FLAGS, "--optimizer", "adamw", "--lr_schedule", "cosine", "--max_steps", "2")
    train_run(1, "run", *flags, "--optimizer_args", "{eps: 0.001}")
    more = ["--run_name", "run", *flags, "--resume", "auto", "--lr_schedule_args", "{end: 0.5}"]
    (outcome,) = run_ranks(1, train.main, more)
    assert "optimizer_args was" not in outcome.out  # it is not given, so the run keeps it
    assert "lr_schedule_args was {} in the checkpoint, now {'end': 0.5}\n" in outcome.out


def _sign(groups, config, scale: float = 1.0):
    """Steps in the direction of the sign of the gradient."""

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


@pytest.mark.full
def test_custom_entries_are_used_with_their_arguments_and_evaluation_needs_no_table():
    flags = [*FLAGS, "--run_name", "run", "--optimizer", "sign", "--save_every", "1"]
    flags += ["--optimizer_args", "{scale: 0.5}", "--warmup_steps", "2"]
    flags += ["--lr_schedule", "restarts", "--lr_schedule_args", "{cycles: 2}"]
    returned(2, _train_with_own_entries, [*flags, "--max_steps", "6"])
    rates = [record["lr"] for record in records("run", "train")]
    assert rates == pytest.approx([0.005, 0.01, *[0.01, 0.005] * 2])
    one, two = (
        load_file(f"runs/run/checkpoints/step-0000000{step}/model.safetensors") for step in (5, 6)
    )
    steps = torch.cat([(two[name] - one[name]).flatten() for name in one]).abs()
    moved = steps[steps > 0]
    assert torch.allclose(moved, torch.tensor(0.005 * 0.5), rtol=1e-3)
    assert len(moved) > 0.2 * len(steps)
    (result,) = returned(1, eval.main, ["--ckpt", "runs/run"])
    assert result["accuracy"] == records("run", "eval")[-1]["accuracy"]
    line = refused(train.main, *FLAGS, "--run_name", "run", "--resume", "auto", "--max_steps", "7")
    assert "--optimizer sign: no such optimizer" in line


def test_a_name_with_a_slash_is_a_path_unless_a_prefix_of_the_table_matches():
    for name in ("digits/mine", "synthetic/3x8x30", "photos"):
        Path(name).mkdir(parents=True)
    assert absolute_data("digits/mine") == str(Path("digits/mine").resolve())
    assert (
        absolute_data("synthetic/3x8x30") == "synthetic/3x8x30"
        and absolute_data("digits") == "digits"
    )
    assert not any(
        has_columns(name) for name in ("digits", "synthetic/3x8x30", "torchvision/MNIST", "photos")
    )
    assert has_columns("someone/something")
    Path("photos/train.parquet").touch()
    assert has_columns("photos")


def test_column_flags_without_a_table_are_reported_as_without_effect():
    image_folder("photos", {"cat": 20, "dog": 20})
    flags = ["--data", "photos", "--model", "mlp", "--max_steps", "1", "--label_column", "kind"]
    (outcome,) = run_ranks(1, train.main, flags)
    assert (
        f"--label_column has no effect: {Path('photos').resolve()} has no columns\n" in outcome.out
    )


def test_settings_that_a_table_does_not_have_can_still_be_read():
    Path("saved.yaml").write_text(
        "optimizer: muon\nlr_schedule: wsd\nloss: focal\noptimizer_args: {ns_steps: 5}\n"
    )
    config = read_config(Path("saved.yaml"))
    assert (config.optimizer, config.lr_schedule, config.loss) == ("muon", "wsd", "focal")
    assert config.optimizer_args == {"ns_steps": 5}
