"""With --microbatches, a run is the same bits on any number of processes: weights, buffers, optimizer and records."""

import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import records, refused, same_tensors, slow_train, train_run, weights
from helpers.waiting import until

import replay
import train
from utils.data.order import fold_in
from utils.runs.manifest import checkpoints_of, sha256_of
from utils.training import tree_sum

# 4 updates an epoch, the last of 50 samples, which 8 microbatches do not divide evenly.
SIZES = ["--data", "digits", "--image_size", "16", "--max_train_samples", "350", "--max_eval_samples", "70"]
SIZES += ["--global_batch_size", "100", "--eval_batch_size", "16", "--microbatches", "8", "--max_steps", "9"]
SIZES += ["--log_every", "2", "--eval_every", "5", "--save_every", "3", "--keep", "9", "--crop_padding", "2", "--flip"]
SIZES += ["--mixup", "0.4", "--cutmix", "1", "--random_erasing", "0.3", "--label_smoothing", "0.1"]
SMALL_VIT = "{img_size: 16, patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2, drop_rate: 0.1}"
MODELS = {
    "mnist_cnn": ["--model", "mnist_cnn", "--clip_norm", "0.5"],  # dropout
    "resnet": ["--model", "timm/test_resnet", "--lr", "0.02"],  # batch statistics
    "vit": ["--model", "timm/vit_tiny_patch16_224", "--optimizer", "adamw", "--model_args", SMALL_VIT],
    "resnet18": ["--model", "resnet18", "--max_steps", "5"],
}


def assert_same_run(name: str, other: str) -> None:
    """Two runs ended with the same bits in each weight, buffer and optimizer state, and logged the same numbers."""
    ends = [checkpoints_of(Path("runs") / run / "checkpoints")[-1] for run in (name, other)]
    assert len({end.name for end in ends}) == len({sha256_of(end / "model.safetensors") for end in ends}) == 1
    first, second = (torch.load(end / "optimizer.bin", weights_only=True)["state"] for end in ends)
    assert first.keys() == second.keys() and first
    for place, state in first.items():
        assert same_tensors(state, second[place])
    assert numbers(name) == numbers(other)


def numbers(name: str) -> list[dict]:
    """What a run logged, without times."""
    times = {"seconds", "images_per_second", "data_wait", "time"}
    chosen = [record for record in records(name) if record["kind"] in ("train", "eval")]
    return [{key: value for key, value in record.items() if key not in times} for record in chosen]


@pytest.mark.parametrize(
    "model,topologies",
    [
        ("mnist_cnn", (2, 3)),
        pytest.param("resnet", (3, 8), marks=pytest.mark.full),
        pytest.param("mnist_cnn", (4, 8), marks=pytest.mark.full),
        pytest.param("resnet", (2, 4), marks=pytest.mark.full),
        pytest.param("vit", (2, 3, 4, 8), marks=pytest.mark.full),
        pytest.param("resnet18", (2, 3, 4, 8), marks=pytest.mark.full),
    ],
)
def test_any_number_of_processes_trains_to_the_same_bits(model, topologies):
    train_run(1, "one", *SIZES, *MODELS[model])
    for processes in topologies:
        train_run(processes, f"on-{processes}", *SIZES, *MODELS[model])
        assert_same_run("one", f"on-{processes}")


def test_a_killed_run_that_moves_to_other_numbers_of_processes_ends_with_the_same_bits():
    flags = [*SIZES, *MODELS["resnet"]]
    train_run(1, "whole", *flags)
    for processes in (8, 2):
        launch = start_ranks(processes, slow_train, [*flags, "--resume", "auto"], 0.2)
        saved = 3 if processes == 8 else 6
        until(lambda saved=saved: (Path("runs/run/checkpoints") / f"step-{saved:08d}").is_dir())
        launch.kill(signal.SIGKILL)
        launch.finish()
    train_run(3, "run", *flags, "--resume", "auto")
    assert_same_run("whole", "run")


def in_the_order_of_all_reduce(flags: list[str]) -> None:
    """Train with the exchange swapped for an all-reduce, and everything else as it is."""

    class Swapped(tree_sum.Exchange):
        def __init__(self, tree, flat):
            self.received, self.flat = None, flat
            self.work = dist.all_reduce(flat[0], async_op=True)

    tree_sum.Exchange = Swapped
    train.main(flags)


def test_with_an_all_reduce_instead_the_bits_differ():
    flags = [*SIZES, "--model", "mlp", "--microbatches", "4", "--run_name"]
    train_run(1, "one", *flags[:-1])
    returned(4, in_the_order_of_all_reduce, [*flags, "all-reduce"])
    one, other = weights("one"), weights("all-reduce")
    assert not same_tensors(one, other)
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


@pytest.mark.parametrize(
    "flags,line",
    [
        (["--microbatches", "6"], "--microbatches must be a power of two, got 6"),
        (["--microbatches", "8", "--grad_accum", "2"], "--grad_accum does not go with --microbatches"),
        (["--microbatches", "8", "--sync_batchnorm"], "--sync_batchnorm does not go with --microbatches"),
        (["--microbatches", "8", "--comm_hook", "bf16"], "--comm_hook does not go with --microbatches"),
        (["--microbatches", "8", "--global_batch_size", "4"], "cannot be divided into 8 microbatches"),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(flags, line):
    assert line in refused(train.main, *flags)


def test_more_processes_than_microbatches_are_refused():
    assert "--microbatches 1 is less than the 2 processes" in refused(train.main, "--microbatches", "1", processes=2)


def test_a_resume_keeps_the_threads_and_the_microbatches():
    flags = [*SIZES, "--model", "mlp", "--run_name", "run"]
    train_run(1, "run", *flags[:-2], "--max_steps", "3")
    again = [*flags, "--resume", "auto"]
    assert "keeps its 1 threads per process, not 2" in refused(train.main, *again, "--threads", "2")
    assert "--microbatches of 8, not 4" in refused(train.main, *again, "--microbatches", "4")


@pytest.mark.parametrize("more", [["--microbatches", "4"], []])
def test_a_replay_computes_the_logged_losses_again(more):
    flags = ["--data", "digits", "--model", "mnist_cnn", "--max_train_samples", "350", "--threads", "1"]
    flags += ["--global_batch_size", "128"]
    train_run(2, "run", *flags, "--max_steps", "7", "--log_every", "1", "--save_every", "3", "--keep", "9", *more)
    logged = {record["step"]: record["loss"] for record in records("run", "train")}
    for update, samples, again in ((2, 128, 1), (6, 350 - 2 * 128, 2)):
        (outcome,) = run_ranks(1, replay.main, ["--run", "runs/run", "--cpu", "--update", str(update)])
        assert outcome.code == 0, outcome.err
        assert sum(outcome.value["losses"]) / samples == logged[update]
        assert f"{again} recomputed loss(es) of the log, all equal to the last bit" in outcome.out
        assert f"update {update}: loss {logged[update]}, as in the log to the last bit" in outcome.out


def broken(function, flags: list[str]) -> dict:
    """Run a script with a layer whose output is NaN in update 7."""
    build, seed = train.build_model, fold_in(0, "layers", 6, 0) % 2**32

    def built(*arguments):
        module = build(*arguments)
        module.fc2.register_forward_hook(lambda layer, inputs, outputs: outputs * spoiled(seed))
        return module

    train.build_model = built
    return function(flags)


def spoiled(seed: int) -> float:
    return float("nan") if torch.initial_seed() == seed else 1.0


def test_a_nan_is_found_at_its_layer_with_the_printed_command():
    flags = ["--model", "mnist_cnn", "--threads", "1", "--max_steps", "9", "--log_every", "1", "--save_every", "4"]
    (outcome,) = run_ranks(1, broken, train.main, [*flags, "--run_name", "run", "--eval_every", "9"])
    assert outcome.code == 2
    command = re.search(r"python\S* \S*replay.py (.*)", outcome.err)[1].split()
    assert command == ["--run", "runs/run", "--update", "7", "--microbatch", "0"]
    (outcome,) = run_ranks(1, broken, replay.main, [*command, "--cpu"])
    assert outcome.value["first_bad_layer"].startswith("the output of layer fc2 is the first with NaN")
