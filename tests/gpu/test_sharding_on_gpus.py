"""FSDP2 on GPUs: losses of DDP, checkpoints that move to one GPU, CPU offload, memory, speed."""

import re

import pytest
from helpers.gpu_runs import (
    command,
    in_start_table,
    largest_difference,
    losses,
    pick,
    run,
    train,
    trained,
)
from helpers.training_runs import records

pytestmark = [pytest.mark.gpu, pytest.mark.limit(150)]

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
VIT = "--data digits --image_size 32 --model timm/test_vit --model_args '{img_size: 32}'"
VIT += " --optimizer adamw --lr 0.001 --lr_schedule constant --global_batch_size 64 --log_every 1"
VIT += " --report false --save_every 5 --eval_every 1000"
LARGE = "--data synthetic/10x224x512 --model vit_b_16 --optimizer adamw --lr 1e-4"
LARGE += " --mixed_precision bf16 --global_batch_size 128 --log_every 10 --max_steps 40"
LARGE += " --report false --eval_every 1000 --max_eval_samples 64"


@pytest.fixture(autouse=True)
def nccl(over_nccl) -> None:
    """FSDP on GPUs needs NCCL."""


PRECISIONS = [
    pytest.param("--mixed_precision no --deterministic", 1e-5, marks=pytest.mark.first(2), id="no"),
    pytest.param("--mixed_precision bf16", 1e-2, marks=pytest.mark.first(11), id="bf16"),
]


@pytest.mark.parametrize(("precision", "rounding"), PRECISIONS)
def test_a_sharded_run_has_the_losses_of_ddp(precision, rounding, record_property):
    flags = f"{VIT} {precision} --max_steps 10"
    found = [losses(train(2, name, flags, **env)) for name, env in (("ddp", {}), ("fsdp", FSDP))]
    record_property("largest difference of a loss", f"{largest_difference(*found):.1e}")
    assert in_start_table("sharding") and largest_difference(*found) < rounding


@pytest.mark.first(7)
def test_a_run_moves_from_fsdp_to_one_gpu_and_back(record_property):
    flags = f"{VIT} --mixed_precision no --deterministic --ema_decay 0.9 --clip_norm 1"
    whole = losses(train(1, "whole", f"{flags} --max_steps 15"))
    for processes, steps in ((2, 5), (1, 10), (2, 15)):
        log = train(processes, "run", f"{flags} --resume auto --max_steps {steps}", **FSDP)
        assert processes == 1 or in_start_table("sharding")
    record_property("largest difference of a loss", f"{largest_difference(whole, losses(log)):.1e}")
    assert largest_difference(whole, losses(log)) < 1e-4


@pytest.mark.first(15)
def test_offloaded_parameters_train_clip_save_and_resume():
    flags = f"{VIT} --mixed_precision no --clip_norm 1 --resume auto --ema_decay 0.9"
    offload = FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}
    for steps in (2, 4):
        log = train(2, "offload", f"{flags} --max_steps {steps}", **offload)
        assert in_start_table("sharding")
    expected = losses(train(2, "ddp", f"{flags} --max_steps 4"))
    assert largest_difference(losses(log), expected) < 1e-4


WAYS = {
    "DDP": ({}, ""),
    "FSDP": (FSDP, ""),
    "FSDP, not resharded": (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, ""),
    "FSDP, checkpointed blocks": (FSDP, "--grad_checkpointing"),
}


@pytest.mark.parametrize("way", pick(WAYS, ["FSDP"]))
def test_memory_and_speed_of_a_vision_transformer(way, own_gpus, record_property):
    env, more = WAYS[way]
    flags = pick(f"{LARGE} {more}", f"{VIT} --max_steps 4")
    run(command(2, "train.py", f"--run_name run {flags}"), **env)
    last = trained(records("run"))[-1]
    record_property("images/s", f"{last['images_per_second']:.0f}")
    record_property("GPU memory", f"{last.get('gpu_memory', 0) / 1e9:.2f} GB")
    if env:
        row = in_start_table("sharding")
        record_property("sharding", row)
        numbers = re.search(r"parameters (\S+) MB, on each rank at most (\S+) MB", row)
        whole, on_each = map(float, numbers.groups())
        assert on_each == pytest.approx(whole / 2, rel=0.1)
