"""FSDP2: losses, evaluations and checkpoints of DDP and of one process, over gloo."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    ROOT,
    launch,
    records,
    refused,
    same_tensors,
    steps,
    train_run,
    weights,
    words,
)
from torch import nn
from torch.distributed.tensor import DTensor

import doctor
import eval
import train
from utils.errors import UserError
from utils.launch.environment import Topology
from utils.ranks.accelerator import check_sharding
from utils.ranks.ranks import Ranks
from utils.runs.manifest import sha256_of
from utils.settings.ranks import LaunchConfig
from utils.settings.train import TrainConfig
from utils.training.optim import OPTIMIZERS

BOTH = words("--data digits --image_size 32 --threads 1 --max_train_samples 100 --log_every 1")
BOTH += words("--max_eval_samples 30 --eval_batch_size 8 --report false --eval_every 7 --keep 9")
# per epoch: four updates of 24 samples and one of 4
VIT = [*BOTH, *words("--model timm/test_vit --optimizer adamw --lr 0.002 --global_batch_size 24")]
VIT += ["--model_args", "{img_size: 32}"]
# 42, 42 and 16 samples. With FSDP2, convolution weights cannot be channels_last. Contiguous weights
# use other kernels, which round differently, so DDP does not use channels_last here either. With
# --lr 0.02, rounding errors of 1e-7 would become 0.05 within 20 updates.
STATISTICS = [*BOTH, *words("--model timm/test_resnet --lr 0.002 --global_batch_size 42")]
STATISTICS += ["--channels_last", "false"]
LENGTH = ["--max_steps", "20"]
# Another number of processes sums batch statistics in another order. On some processors, a
# rounding error of 1e-7 then moves a value across a ReLU's zero, after about this many updates.
STEADY = 6
FULL = pytest.mark.full


def sharded(flags: list[str]) -> dict | None:
    """Train with FSDP, as with the variables that accelerate_configs/fsdp.yaml sets."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    return train.main(flags)


def losses(name: str) -> torch.Tensor:
    """The losses of all updates and evaluations of a run."""
    return torch.tensor(
        [record["loss"] for record in records(name) if record["kind"] in ("train", "eval")]
    )


def run_both(processes: int, flags: list[str]) -> None:
    """The run `ddp` and the run `fsdp` on that many processes."""
    train_run(processes, "ddp", *flags)
    returned(processes, sharded, ["--run_name", "fsdp", *flags])


# Settings with which FSDP must give the losses of DDP: name -> flags
CASES = {
    "transformer": [*VIT, *words("--grad_accum 2 --clip_norm 0.5 --ema_decay 0.9")],
    "batch statistics": [
        *STATISTICS,
        *words("--global_batch_size 36 --grad_accum 2 --clip_norm 0.5"),
    ],
    "frozen layers": [
        *VIT,
        *words("--freeze blocks.0 --weight_decay 0.1 --clip_value 0.01 --layer_decay 0.8"),
    ],
    "checkpointed blocks": [*VIT, *words("--grad_checkpointing --drop_path 0.2")],
    "bfloat16": [*VIT, *words("--mixed_precision bf16 --ema_decay 0.9")],
    "shared statistics": [*STATISTICS, "--sync_batchnorm", "--ema_decay", "0.9"],
}
# whose losses are also those of one process
ON_ONE = ("transformer", "frozen layers", "shared statistics")


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "processes"),
    [("transformer", 2), *(pytest.param(c, n, marks=FULL) for c in CASES for n in (2, 3))],
)
def test_losses_are_those_of_ddp_and_of_one_process(case, processes):
    flags = [*CASES[case], *LENGTH]
    run_both(processes, flags)
    # a sum in another order changes how weights are rounded
    rounding = 5e-3 if case == "bfloat16" else 1e-5
    torch.testing.assert_close(losses("fsdp"), losses("ddp"), rtol=0, atol=rounding)
    if case in ON_ONE:
        train_run(1, "one", *flags)
        same = slice(STEADY if case == "shared statistics" else None)
        torch.testing.assert_close(losses("fsdp")[same], losses("one")[same], rtol=0, atol=1e-5)
    # with the same microbatches; evaluations use running statistics of one process
    if case == "batch statistics":
        train_run(1, "one", *flags, "--grad_accum", str(2 * processes))
        found, expected = (
            torch.tensor([r["loss"] for r in records(name, "train")]) for name in ("fsdp", "one")
        )
        torch.testing.assert_close(found[:STEADY], expected[:STEADY], rtol=0, atol=1e-5)


def unfused(kind: type[torch.optim.Optimizer], **more: bool) -> Callable:
    """An optimizer function whose optimizer has the same kernels for sharded and full tensors."""
    return lambda groups, config: kind(groups, lr=config.lr, fused=False, **more)


# Those of Lockstep are fused, and fused kernels round the last values of a tensor in another way.
OPTIMIZER = {"nadam": OPTIMIZERS["nadam"], "adamw": unfused(torch.optim.AdamW)}
OPTIMIZER["sgd"] = unfused(torch.optim.SGD, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("flags", "optimizer"),
    [
        (STATISTICS, "sgd"),
        *(pytest.param(each, name, marks=FULL) for each in (VIT, STATISTICS) for name in OPTIMIZER),
    ],
)
def test_two_processes_are_bit_for_bit_those_of_ddp(flags, optimizer, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, optimizer, OPTIMIZER[optimizer])
    flags = [*flags, "--optimizer", optimizer, *words("--lr 0.002 --ema_decay 0.9")]
    run_both(2, [*flags, "--max_steps", "6"])
    assert losses("fsdp").equal(losses("ddp"))
    for file in ("model.safetensors", "optimizer.bin", "ema.safetensors"):
        assert same_tensors(weights("ddp", file=file), weights("fsdp", file=file)), file


def die_after(step: int, flags: list[str], with_fsdp: bool = True) -> None:
    """Train, and kill this process at the start of the update after `step`, when the last save is
    complete.
    """
    update = train.train_update

    def dying(run, batches):
        if run.state.step == step:
            run.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        update(run, batches)

    train.train_update = dying
    (sharded if with_fsdp else train.main)(flags)


def check_evaluation(name: str) -> None:
    """eval.py gives the numbers that the run logged for its newest checkpoint, on one process."""
    latest = Path(f"runs/{name}/checkpoints/latest").read_text().strip()
    flags = words(f"--ckpt runs/{name}/checkpoints/{latest} --weights raw --max_eval_samples 30")
    (found,) = returned(1, eval.main, flags)
    evaluations = [r for r in records(name, "eval") if r["weights"] == "raw"]
    (logged,) = [r for r in evaluations if r["step"] == found["step"]]
    assert found["count"] == logged["count"]
    assert found["accuracy"] == logged["accuracy"]
    assert found["loss"] == pytest.approx(logged["loss"], abs=1e-5)


MOVED = [*VIT, *words("--ema_decay 0.9 --eval_every 3 --save_every 3"), *LENGTH]


@FULL
def test_a_run_moves_between_fsdp_ddp_and_one_process():
    train_run(1, "whole", *MOVED)
    flags, resumed = ["--run_name", "run", *MOVED], ["--resume", "auto"]
    for processes, step, with_fsdp, more in (
        (3, 4, True, []),
        (2, 8, False, resumed),
        (1, 13, False, resumed),
    ):
        outcomes = run_ranks(processes, die_after, step, [*flags, *more], with_fsdp)
        assert all(outcome.code == -signal.SIGKILL for outcome in outcomes)
        assert records("run")[-1]["step"] >= step // 3 * 3
        check_evaluation("run")
    returned(2, sharded, [*flags, *resumed])
    check_evaluation("run")
    starts = [(record["processes"], record["step"]) for record in records("run", "start")]
    assert starts == [(3, 0), (2, 3), (1, 6), (2, 12)]
    assert steps("run", "train") == [*range(1, 21)]
    torch.testing.assert_close(losses("run"), losses("whole"), rtol=0, atol=1e-5)


@pytest.mark.full
def test_a_killed_run_ends_with_the_bits_of_a_whole_one():
    flags = [*VIT, *words("--ema_decay 0.9 --save_every 2 --max_steps 5")]
    returned(2, sharded, ["--run_name", "whole", *flags])
    run_ranks(2, die_after, 3, ["--run_name", "run", *flags])
    returned(2, sharded, [*words("--run_name run --resume auto"), *flags])
    for file in ("model.safetensors", "optimizer.bin", "ema.safetensors"):
        ends = [Path(f"runs/{name}/checkpoints/step-00000005") / file for name in ("run", "whole")]
        assert sha256_of(ends[0]) == sha256_of(ends[1]), file


@FULL
def test_a_resume_has_the_bits_of_the_checkpoint_and_of_a_whole_run():
    """With Adagrad, whose state exists before FSDP2 replaces the parameters."""
    flags = [*VIT, *words("--optimizer adagrad --lr 0.001 --lr_schedule constant --save_every 2")]
    run = [*flags, *words("--run_name run --resume auto --max_steps")]
    returned(2, sharded, [*flags, *words("--run_name whole --max_steps 4")])
    returned(2, sharded, [*run, "2"])
    returned(2, sharded_and_compared, [*run, "4"])
    for file in ("model.safetensors", "optimizer.bin"):
        assert same_tensors(weights("run", file=file), weights("whole", file=file)), file


def sharded_and_compared(flags: list[str]) -> None:
    """Train with FSDP; before the first update, the weights are those of the newest checkpoint."""
    loop = train.train

    def compared(run, profiler):
        own = {key: value.full_tensor() for key, value in run.model.named_parameters()}
        saved = weights("run")
        assert all(torch.equal(own[key], saved[key]) for key in own)
        return loop(run, profiler)

    train.train = compared
    sharded(flags)


NOT_FOR_FSDP = {
    "--microbatches adds gradients in a fixed order": {"microbatches": 4},
    "--optimizer muon needs full matrices": {"optimizer": "muon"},
    "--optimizer adafactor needs full matrices": {"optimizer": "adafactor"},
    "--find_unused_parameters is a setting of DDP": {"find_unused_parameters": True},
    "--comm_hook bf16 is a setting of DDP": {"comm_hook": "bf16"},
    "mixed precision fp16 is not supported with FSDP": {"mixed_precision": "fp16"},
    "set fsdp_version: 2": {"FSDP_VERSION": "1"},
    "use --grad_checkpointing": {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
    "fsdp_ignored_modules is not supported": {"FSDP_IGNORED_MODULES": "head"},
}


@pytest.mark.parametrize("text", NOT_FOR_FSDP)
def test_settings_that_do_not_work_are_refused(text, monkeypatch):
    given, ranks = NOT_FOR_FSDP[text], Ranks(Topology(0, 2, 0, 2, "127.0.0.1", 1), LaunchConfig())
    for name, value in ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} | given).items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    config = TrainConfig(**{name: value for name, value in given.items() if not name.isupper()})
    more = {"optimizer": config.optimizer, "fixed_order": config.microbatches is not None}
    with pytest.raises(UserError, match=re.escape(text)):
        check_sharding(config, ranks, **more)
    ranks.topology = Topology()
    check_sharding(config, ranks, **more)  # one process does not shard


@FULL
def test_different_weights_at_the_start_are_refused():
    def differing(flags: list[str]) -> None:
        build = train.build_model

        def build_another(*given):
            model = build(*given)
            with torch.no_grad():
                next(model.parameters()).add_(int(os.environ["RANK"]))
            return model

        train.build_model = build_another
        sharded(flags)

    flags = ["--run_name", "run", *VIT, "--max_steps", "4"]
    assert "rank 1 has different weights at the start than rank 0" in refused(
        differing, *flags, processes=2
    )
    returned(2, sharded, [*flags[:-1], "2"])
    returned(2, differing, [*flags, "--resume", "auto"])  # the checkpoint replaces them


@FULL
def test_microbatches_of_a_sharded_model_are_added_up_at_once(monkeypatch):
    monkeypatch.setattr(Accelerator, "no_sync", None)  # a rank would keep the full gradient
    returned(2, sharded, ["--run_name", "run", *VIT, *words("--grad_accum 2 --max_steps 2")])


@pytest.mark.full
def test_a_dry_run_computes_an_update_and_the_start_table_has_units_and_bytes():
    alone, outcome = (run_ranks(n, sharded, [*VIT, "--dry_run"])[0].out for n in (1, 2))
    assert "FSDP has no effect" in alone and "sharding " not in alone
    (row,) = [line for line in outcome.splitlines() if line.startswith("sharding")]
    numbers = "parameters 1.1 MB, on each rank at most 0.5 MB"
    assert row.endswith(f"FSDP2, 8 units; {numbers}")  # six blocks, the normalisation, and the rest
    assert "nothing was saved" in outcome


BY_CLASS = {
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Mlp,Attention",
}


def test_the_doctor_checks_a_sharded_step():
    def check() -> None:
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
        doctor.main(["--slow", "0"])

    outcome = run_ranks(2, check)[0]
    assert "gradients   ✓ equal those of one process" in outcome.out


def fail(flags: list[str], step: int, on_rank: int, how: str, where: str) -> None:
    """Train with FSDP; rank `on_rank` fails as `how` says, in the function `where` of train.py,
    after update `step`.
    """
    function = getattr(train, where)

    def failing(run, *more):
        if run.state.step == step and run.ranks.topology.rank == on_rank:
            if how == "exit":
                os._exit(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return function(run, *more)

    setattr(train, where, failing)
    sharded(flags)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "where", "step"),
    [
        ("exit", "train_update", 4),
        pytest.param("exit", "evaluate", 7, marks=FULL),
        pytest.param("exit", "save", 20, marks=FULL),
        pytest.param("terminate", "train_update", 5, marks=FULL),
    ],
)
def test_faults_of_a_rank_end_all_as_under_ddp(how, where, step):
    flags = ["--run_name", "run", *VIT, *LENGTH]
    outcomes = run_ranks(2, fail, flags, step, 1, how, where)
    codes = [outcome.code for outcome in outcomes]
    if how == "exit":
        assert codes == [2, 1]
        (line,) = outcomes[0].err.splitlines()
        assert "another process of this run exited or stopped answering" in line
        assert not Path(f"runs/run/checkpoints/step-{step:08}").exists(), "half a checkpoint"
        return
    assert codes == [75, 75]
    assert Path(f"runs/run/checkpoints/step-{steps('run', 'train')[-1]:08}").is_dir()
    returned(2, sharded, [*flags, "--resume", "auto"])
    assert steps("run", "train") == [*range(1, 21)]


@FULL
def test_a_compiled_model_has_the_losses_of_ddp():
    def compiled(flags: list[str]) -> None:
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = "AOT_EAGER"
        sharded(flags)

    train_run(2, "ddp", *VIT, "--max_steps", "4")
    returned(2, compiled, ["--run_name", "fsdp", *VIT, "--max_steps", "4"])
    torch.testing.assert_close(losses("fsdp"), losses("ddp"), rtol=0, atol=1e-5)


@FULL
@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {"muon", "adafactor"}))
def test_every_other_optimizer_is_that_of_ddp(optimizer):
    flags = [*VIT, "--optimizer", optimizer, *words("--max_steps 4 --save_every 2")]
    run_both(2, flags)
    torch.testing.assert_close(losses("fsdp"), losses("ddp"), rtol=0, atol=1e-5)
    step = words("--resume runs/fsdp/checkpoints/step-00000002 --run_name resumed")
    returned(1, train.main, [*flags, *step])
    torch.testing.assert_close(losses("resumed")[-2:], losses("ddp")[-2:], rtol=0, atol=1e-5)


# It is about checkpoints of Accelerate, so no line says that it is ignored.
ANY = {"FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}
# Variables of the accelerate config -> the number of units, and whether blocks are sharded again
# after the forward pass
SETTINGS = {
    "none": ({}, 8, True),
    "not resharded": ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, 8, False),
    "by class": (BY_CLASS, 14, True),
    "ignored": ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_OFFLOAD_PARAMS": "true"} | ANY, 8, True),
}


@FULL
def test_settings_of_the_accelerate_config_are_taken_or_ignored_aloud():
    def look(name: str, variables: dict[str, str]) -> list[bool]:
        found = []

        def after(module: nn.Module, images: tuple, _) -> None:
            # not the two images of zeros that a new model computes
            if "VisionTransformer" in type(module).__name__ and len(images[0]) > 2:
                found.append(isinstance(module.blocks[0].mlp.fc1.weight, DTensor))

        nn.modules.module.register_module_forward_hook(after)
        os.environ.update(variables)
        sharded(["--run_name", name, *VIT, "--max_steps", "2"])
        return found

    for name, (variables, units, resharded) in SETTINGS.items():
        outcomes = run_ranks(2, look, name, variables)
        assert outcomes[0].code == 0, outcomes[0].err
        (row,) = [line for line in outcomes[0].out.splitlines() if line.startswith("sharding")]
        assert f"FSDP2, {units} units" in row, name
        assert {*outcomes[0].value} == {resharded}, name
        assert losses(name).equal(losses("none")), name
        said = "".join(outcome.out for outcome in outcomes).count(" is ignored")
        assert said == 2 * (name == "ignored")


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "flags", "text"),
    [
        ({"FSDP_AUTO_WRAP_POLICY": "LAYERS"}, "", "Invalid auto wrap policy: LAYERS"),
        (BY_CLASS | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Other"}, "", "class Other in the model"),
        ({}, "--freeze backbone --feature_views 1", "because the model is sharded"),
    ],
)
def test_what_cannot_be_sharded_is_one_line_of_one_rank(variables, flags, text, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert text in refused(sharded, *VIT, *words(flags), processes=2)


@FULL
def test_accelerate_launch_shards():
    flags = [*VIT, *words("--max_steps 2 --report true")]
    code, out, err = launch("fsdp", ROOT / "train.py", "--run_name", "run", *flags)
    assert code == 0, err
    assert "FSDP2, 8 units" in out
    assert Path("runs/run/report.html").exists()
