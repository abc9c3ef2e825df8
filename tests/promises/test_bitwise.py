"""--microbatches: the same bits on any number of processes, of weights, buffers and records."""

import math
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    records,
    refused,
    same_tensors,
    slow_train,
    train_run,
    weights,
    words,
)
from helpers.waiting import SOON, until
from torch import nn

import replay
import train
from utils.data.order import fold_in
from utils.models.small import MLP
from utils.models.zoo import OWN_MODELS
from utils.runs.manifest import checkpoints_of, sha256_of
from utils.training.gradients import ExchangeTimer
from utils.training.sync_points import times_of_ranks

# 4 updates an epoch, the last of 50 samples, which 8 microbatches do not divide evenly.
SIZES = words("--data digits --image_size 16 --max_train_samples 350 --max_eval_samples 70")
SIZES += words("--global_batch_size 100 --eval_batch_size 16 --microbatches 8 --max_steps 9")
SIZES += words("--log_every 2 --eval_every 5 --save_every 3 --keep 9 --crop_padding 2 --flip")
SIZES += words("--mixup 0.4 --cutmix 1 --random_erasing 0.3 --label_smoothing 0.1")
FULL = pytest.mark.full
SMALL_VIT = "{img_size: 16, patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2, drop_rate: 0.1}"
MODELS = {
    "mnist_cnn": words("--model mnist_cnn --clip_norm 0.5"),  # dropout
    "resnet": words("--model timm/test_resnet --lr 0.02"),  # batch statistics
    "vit": ["--model_args", SMALL_VIT, *words("--model timm/vit_tiny_patch16_224")],
}
MODELS["vit"] += words("--optimizer adamw --mixed_precision bf16")


def assert_same_run(name: str, other: str) -> None:
    """Two runs ended with the same bits in each weight, buffer and optimizer state, and logged the
    same numbers.
    """
    ends = [checkpoints_of(Path("runs") / run / "checkpoints")[-1] for run in (name, other)]
    assert ends[0].name == ends[1].name
    for file in ("model.safetensors", "optimizer.bin"):
        assert sha256_of(ends[0] / file) == sha256_of(ends[1] / file), file
    assert numbers(name) == numbers(other)


def numbers(name: str) -> list[dict]:
    """What a run logged, without times."""
    times = {"seconds", "images_per_second", "data_wait", "time", "computing", "waiting"}
    chosen = [record for record in records(name) if record["kind"] in ("train", "eval")]
    return [{key: value for key, value in record.items() if key not in times} for record in chosen]


@pytest.mark.parametrize(
    "model,topologies",
    [
        ("mnist_cnn", (2, 3)),
        pytest.param("resnet", (2, 3, 8), marks=FULL),
        pytest.param("vit", (2, 3, 4, 8), marks=FULL),
    ],
)
def test_any_number_of_processes_trains_to_the_same_bits(model, topologies):
    train_run(1, "one", *SIZES, *MODELS[model])
    for processes in topologies:
        train_run(processes, f"on-{processes}", *SIZES, *MODELS[model])
        assert_same_run("one", f"on-{processes}")


class Unusual(nn.Module):
    """Parameters of three types, frozen, shared and unused ones, and buffers of five types, set by
    the first batch.
    """

    def __init__(self, spec, classes):
        super().__init__()
        self.first = nn.Linear(spec.channels * spec.height * spec.width, 8)
        self.shared, self.unused, self.frozen = (
            self.first,
            nn.Linear(8, 8),
            nn.Linear(8, 8).requires_grad_(False),
        )
        self.last = nn.Linear(8, classes)
        self.scale64 = nn.Parameter(torch.ones(classes, dtype=torch.float64))
        self.scale16 = nn.Parameter(torch.ones(classes, dtype=torch.bfloat16))
        for name, value in {
            "count": 2**40,
            "byte": torch.tensor(200, dtype=torch.uint8),
            "ready": False,
        }.items():
            self.register_buffer(name, torch.as_tensor(value))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("fine", torch.zeros((), dtype=torch.float64))

    def forward(self, images):
        if self.training and len(images):
            self.mean.lerp_(images.mean(), 0.1 if self.ready else 1.0)
            self.fine.add_(images.double().mean())
            self.ready.fill_(True)
            self.count += 3
            self.byte -= 1
        hidden = self.frozen(self.first(images.flatten(1)).relu())
        return (self.last(hidden) * self.scale64 * self.scale16).float()


def train_unusual(flags: list[str]) -> None:
    OWN_MODELS["unusual"] = Unusual
    train.main(flags)


@pytest.mark.full
@pytest.mark.parametrize("microbatches", [2, pytest.param(4, marks=FULL)])
def test_unused_and_shared_parameters_and_buffers_of_any_type_give_the_same_bits(microbatches):
    flags = [*SIZES, *words("--model unusual --max_steps 4 --microbatches"), str(microbatches)]
    # the third update has one sample: the other microbatches are empty
    flags += ["--max_train_samples", "201"]
    for processes in (1, microbatches):
        name = ["--find_unused_parameters", "--run_name", f"on-{processes}"]
        returned(processes, train_unusual, [*flags, *name])
    assert_same_run("on-1", f"on-{microbatches}")
    found = weights("on-1")
    assert (found["count"], found["byte"], found["ready"]) == (2**40 + 4 * 3, 200 - 4, True)


@pytest.mark.full
def test_the_norm_of_the_summed_gradient_is_clipped():
    """Plain gradient descent: a step is as long as the learning rate times the clipped norm."""
    flags = words("--model mlp --lr 0.5 --lr_schedule constant --momentum 0 --save_every 1")
    flags += words("--clip_norm 0.01 --warmup_steps 0 --weight_decay 0 --max_steps 2")
    train_run(2, "run", *SIZES, *flags, "--microbatches", "4")
    before, after = weights("run", file="../step-00000001/model.safetensors"), weights("run")
    step = torch.cat([(after[name] - before[name]).flatten() for name in after])
    assert step.double().norm().item() == pytest.approx(0.5 * 0.01, rel=1e-4)


def collectives(flags: list[str]) -> int:
    """Train, and return how many collectives this rank has entered, according to its watch."""
    closing, entered = train.log_end, []

    def close(run, *given):
        entered.append(run.ranks.watch.entered)
        return closing(run, *given)

    train.log_end = close
    train.main(flags)
    return entered[0]


@pytest.mark.full
def test_a_rank_with_fewer_microbatches_enters_as_many_collectives():
    """Otherwise, ranks that wait for a rank that hangs would name a different one."""
    assert len(set(returned(3, collectives, [*SIZES, *words("--model mlp --microbatches 4")]))) == 1


def failing(flags: list[str]) -> None:
    """Rank 1 fails in the second forward pass of update 3."""
    update, passes = train.train_update, []

    def fail(*given):
        passes.append(given)
        if len(passes) == 2:
            raise ZeroDivisionError

    def fails(run, batches):
        if run.state.step == 2 and run.ranks.topology.rank == 1:
            run.module.register_forward_pre_hook(fail)
        update(run, batches)

    train.train_update = fails
    train.main(flags)


@pytest.mark.full
def test_an_error_between_two_microbatches_of_a_rank_ends_the_others_within_seconds():
    begun = time.monotonic()
    first, second = run_ranks(
        2, failing, [*SIZES, *words("--model mlp --microbatches 4 --timeout 300")]
    )
    assert time.monotonic() - begun < SOON
    assert first.code == 2 and "another process of this run exited" in first.err
    assert second.code == 1 and "ZeroDivisionError" in second.err


@FULL
def test_a_killed_run_that_moves_to_other_processes_ends_with_the_same_bits():
    flags = [*SIZES, *MODELS["resnet"]]
    train_run(1, "whole", *flags)
    for processes, saved, shares in ((8, 3, []), (3, 6, ["--shares", "5,1,2"])):
        launch = start_ranks(processes, slow_train, [*flags, *shares, "--resume", "auto"], 0.2)
        until(lambda saved=saved: (Path("runs/run/checkpoints") / f"step-{saved:08d}").is_dir())
        launch.kill(signal.SIGKILL)
        launch.finish()
    train_run(2, "run", *flags, *words("--resume auto --shares 3,5"))
    assert_same_run("whole", "run")


@pytest.mark.full
def test_unequal_shares_give_the_same_bits():
    flags = [*SIZES, *MODELS["mnist_cnn"], "--ema_decay", "0.9"]
    train_run(1, "one", *flags)
    train_run(2, "two", *flags, "--shares", "7,1")
    assert_same_run("one", "two")
    assert same_tensors(*(weights(name, file="ema.safetensors") for name in ("one", "two")))
    with_ranks = [record for record in records("two") if "computing" in record]
    assert len(with_ranks) == 4  # of the five records of 2 updates, all but the first
    for record in with_ranks:
        assert all(seconds > 0 for seconds in record["computing"]) and min(record["waiting"]) == 0
        assert len(record["computing"]) == len(record["waiting"]) == 2


def test_records_have_the_seconds_that_each_rank_computed_and_waited():
    exchange = ExchangeTimer(torch.device("cpu"))

    def recorded():
        """The fields of a record of two ranks. This process is the second one."""
        exchange.marks += [100.0, 100.5]
        exchange.add_up()
        run = SimpleNamespace(
            gradients=SimpleNamespace(exchange=exchange),
            meter=SimpleNamespace(totals={"wait": 0.5}),
            ranks=SimpleNamespace(gather=lambda own: [(5.5, 0.5), own]),
        )
        return times_of_ranks(run, 8)

    assert recorded() == {}  # the first record has other work in it
    for _ in range(2):
        assert recorded() == {"computing": [2.0, 7.0], "waiting": [5.0, 0.0]}


EXCLUDED = ("grad_accum 2", "batch_size 2", "sync_batchnorm", "comm_hook bf16")


@pytest.mark.parametrize(
    "flags,line",
    [
        ("--microbatches 6", "--microbatches must be a power of two, got 6"),
        *((f"--microbatches 8 --{more}", "cannot be used together") for more in EXCLUDED),
        ("--microbatches 8 --global_batch_size 4", "cannot be divided into 8 microbatches"),
        ("--microbatches 8 --shares 5 3", "--shares 5,3 is for 2 processes and --microbatches 8"),
        ("--shares 1", "--shares 1 is for 1 processes and --microbatches 1"),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(flags, line):
    assert line in refused(train.main, *words(flags))


def test_more_processes_than_microbatches_are_refused():
    line = refused(train.main, "--microbatches", "1", processes=2)
    assert "--microbatches 1 is less than the number of processes, 2; use fewer processes" in line


class DrawnByRank(MLP):
    """Its weights differ between ranks in the last bits, as if drawn on different processors."""

    def __init__(self, spec, classes):
        super().__init__(spec, classes)
        next(self.parameters()).data.mul_(1 + int(os.environ["RANK"]) * 2**-23)


class BufferByRank(MLP):
    """A buffer that is not saved differs between ranks; DDP does not copy it."""

    def __init__(self, spec, classes):
        super().__init__(spec, classes)
        self.register_buffer("rank", torch.tensor(int(os.environ["RANK"])), persistent=False)


def train_drawn_by_rank(flags: list[str], model: type = DrawnByRank) -> None:
    OWN_MODELS["drawn"] = model
    train.main([*flags, *words("--model drawn --max_steps 2")])


@pytest.mark.full
def test_ranks_that_draw_different_weights_are_refused():
    for model in (DrawnByRank, BufferByRank):
        line = refused(
            lambda flags, model=model: train_drawn_by_rank(flags, model), *SIZES, processes=2
        )
        assert "rank 1 has different weights at the start than rank 0" in line
    ordinary = [flag for flag in SIZES if flag not in ("--microbatches", "8")]
    returned(2, train_drawn_by_rank, ordinary)  # DDP copies the weights of rank 0
    # for which that is too late
    features = words("--max_train_samples 100 --threads 1 --freeze backbone")
    line = refused(train_drawn_by_rank, *features, processes=2)
    assert "rank 1 has different weights at the start than rank 0" in line


@pytest.mark.full
def test_a_resume_keeps_the_threads_and_the_microbatches():
    flags = [*SIZES, *words("--model mlp --run_name run")]
    train_run(1, "run", *flags[:-2], "--max_steps", "3")
    again = [*flags, "--resume", "auto"]
    assert "--microbatches needs the same threads per process: 1, not 2" in refused(
        train.main, *again, "--threads", "2"
    )
    assert "--microbatches 8, not 4" in refused(train.main, *again, "--microbatches", "4")


@pytest.mark.full
@pytest.mark.parametrize("more", [pytest.param(["--microbatches", "4"], marks=FULL), []])
def test_a_replay_computes_the_logged_losses_again(more):
    flags = words("--data digits --model mnist_cnn --max_train_samples 350 --threads 1")
    flags += words("--global_batch_size 128 --cache_dir decoded")
    flags += words("--max_steps 7 --log_every 1 --save_every 3 --keep 9")
    train_run(2, "run", *flags, *more)
    logged = {record["step"]: record["loss"] for record in records("run", "train")}
    for update, samples in ((2, 128), (6, 350 - 2 * 128)):
        (outcome,) = run_ranks(
            1, replay.main, [*words("--run runs/run --cpu --update"), str(update)]
        )
        assert outcome.code == 0, outcome.err
        assert sum(outcome.value["losses"]) / samples == logged[update]
        assert f"update {update}: loss {logged[update]}\n" in outcome.out
        assert "dropout masks" not in outcome.out  # a replay computes the microbatches of the run
    assert not list(Path("home").rglob("*.npy"))  # the run's folder of decoded images is used
    log = Path("runs/run/log.jsonl")
    log.write_text(log.read_text() + "half\n")
    line = refused(replay.main, *words("--run runs/run --cpu --update 6"))
    assert "runs/run/log.jsonl: line " in line and line.endswith(" is damaged; delete this line")


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run, without what replays have written."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes() for name, path in files.items() if not name.startswith("replay")
    }


def slow_replay(flags: list[str]) -> None:
    """Replay; when the third of the earlier updates begins, write a file and wait to be killed."""
    update = train.train_update

    def stuck(run, batches):
        if run.state.step == 2:
            Path("begun").touch()
            signal.pause()
        update(run, batches)

    train.train_update = stuck
    replay.main(flags)


@pytest.mark.full
def test_a_replay_changes_nothing_in_the_run_even_if_it_is_killed():
    train_run(1, "run", *words("--model mlp --threads 1 --max_steps 5 --save_every 5 --keep 2"))
    before, flags = contents(Path("runs/run")), words("--run runs/run --cpu --update")
    launch = start_ranks(1, slow_replay, [*flags, "4"])
    until(Path("begun").exists)
    launch.kill(signal.SIGKILL)
    launch.finish()
    assert contents(Path("runs/run")) == before
    returned(1, replay.main, [*flags, "1"])
    assert contents(Path("runs/run")) == before
    assert [file.name for file in Path("runs/run/replay").iterdir()] == [
        "microbatch-0-of-update-1.png"
    ]
    assert "--update 9: the last one" in refused(replay.main, *flags, "9")
    assert "--microbatch 1: the last" in refused(replay.main, *flags, "1", "--microbatch", "1")


def broken(function, flags: list[str]) -> dict:
    """Run a script with a layer whose output is NaN in microbatch 1 of update 7."""
    build, seed = train.build_model, fold_in(0, "layers", 6, 1) % 2**32

    def built(*arguments):
        module = build(*arguments)
        module.fc2.register_forward_hook(lambda layer, inputs, outputs: outputs * spoiled(seed))
        return module

    train.build_model = built
    return function(flags)


def spoiled(seed: int) -> float:
    return float("nan") if torch.initial_seed() == seed else 1.0


@pytest.mark.full
def test_a_nan_is_found_in_its_microbatch_with_the_printed_command():
    flags = words("--model mnist_cnn --threads 1 --max_steps 9 --log_every 1 --save_every 4")
    flags += words("--global_batch_size 96 --grad_accum 3")
    (outcome,) = run_ranks(
        1, broken, train.main, [*flags, *words("--run_name run --eval_every 9 --cpu")]
    )
    assert outcome.code == 2
    command = re.search(r"python\S* \S*replay.py (.*)", outcome.err)[1].split()
    assert command == words("--run runs/run --update 7 --microbatch 1 --cpu")
    for flags in (command, words("--run runs/run --update 7 --cpu")):  # the first bad one is found
        (outcome,) = run_ranks(1, broken, replay.main, flags)
        assert [*map(math.isnan, outcome.value["losses"])] == [False, True, False]
        assert "microbatch 1 of update 7: sum of losses nan;" in outcome.out
