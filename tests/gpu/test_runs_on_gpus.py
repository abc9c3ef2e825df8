"""Runs on GPUs: the numbers of the CPU, every precision, one and two ranks, the same bits, stopped
and resumed.
"""

import gzip
import hashlib
import json
import math
import shlex
import sys
import time
from pathlib import Path

import pytest
from helpers.gpu_runs import (
    ON_CPU,
    ROOT,
    await_update,
    begin,
    command,
    end_started,
    finish,
    pick,
    run,
    stop,
    train,
)
from helpers.training_runs import MLP
from helpers.waiting import error_lines

pytestmark = pytest.mark.gpu

EXACT = ["--deterministic", "--mixed_precision", "no"]
RESNET = shlex.split("--model resnet18 --global_batch_size 64 --lr 0.01 --log_every 5")
RESNET += ["--max_steps", str(pick(40, 5)), *shlex.split("--eval_every 1000 --max_eval_samples 64")]


def trained(log):
    return [record for record in log if record["kind"] == "train"]


def losses(log):
    return [record["loss"] for record in trained(log)]


def evaluation(log):
    return [record for record in log if record["kind"] == "eval"][-1]


def newest(name):
    folder = Path("runs") / name / "checkpoints"
    return folder / (folder / "latest").read_text().strip()


def bits(name):
    """A hash of each file of tensors in the newest checkpoint: the weights, their average, the loss
    scale.
    """
    return {
        file.stem: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in newest(name).glob("*.safetensors")
    }


def evaluated(processes, ckpt, *flags):
    """What eval.py reports, without its time."""
    run(command(processes, "eval.py", "--ckpt", ckpt, "--json", "eval.json", *flags))
    end_started()
    return json.loads(Path("eval.json").read_text()) | {"seconds": None}


@pytest.mark.parametrize("launcher", ["python", "torchrun", "two ranks"])
def test_the_doctor_finds_nothing_wrong(launcher, request):
    doctor = str(ROOT / "doctor.py")
    words = {"python": [sys.executable, doctor], "two ranks": command(2, "doctor.py")}
    words["torchrun"] = [
        sys.executable,
        *shlex.split("-m torch.distributed.run --nproc_per_node 1"),
        doctor,
    ]
    backend = request.getfixturevalue("pair") if launcher == "two ranks" else []
    ended = finish(begin([*words[launcher], *backend, "--json", "doctor.json"]), seconds=300)
    findings = json.loads(Path("doctor.json").read_text())["findings"]
    red = {found["name"] for found in findings if found["ok"] is False}
    assert red <= {"leftovers", "/dev/shm"}, ended.out  # of other users, or of the container


def test_a_gpu_learns_the_digits(record_property):
    flags = ["--config", f"{ROOT}/recipes/digits.yaml", "--epochs", str(pick(8, 2))]
    log = train(1, "run", *flags, "--profile")
    record_property("accuracy", evaluation(log)["accuracy"])
    assert evaluation(log)["accuracy"] > pick(0.95, 0.5)
    assert log[0]["precision"] == pick("bf16", "no")  # `auto`, as nobody chose one
    assert ("gpu_memory" in trained(log)[-1]) == (not ON_CPU)
    with gzip.open("runs/run/trace-rank0.json.gz") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "cpu_op" in kinds and ("kernel" in kinds) == (not ON_CPU)


# Where the updates up to 20 and up to 40 are computed; "two" are ranks.
PLACES = [("two", "gpu"), ("compiled two", "compiled two")]
PLACES += pick([("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")], [])


@pytest.mark.parametrize("places", PLACES, ids=", ".join)
def test_an_exact_run_has_the_numbers_of_the_cpu(places, request, record_property):
    """Also if it is resumed, and evaluated, on the other kind of device."""
    pair = request.getfixturevalue("pair") if "two" in "".join(places) else []
    flags = [*MLP, *EXACT, "--lr_schedule", "constant"]
    expected = train(1, "cpu", *flags, "--max_steps", "40", "--cpu")
    for place, steps in zip(places, ("20", "40"), strict=True):
        more = {"cpu": ["--cpu"], "gpu": []}.get(place, pair)
        launcher = (
            ("--dynamo_backend", pick("inductor", "aot_eager")) if "compiled" in place else ()
        )
        resumed = ["--max_steps", steps, "--resume", "auto", *more]
        found = train(1 + ("two" in place), "gpu", *flags, *resumed, launcher=launcher)
    apart = max(abs(a - b) for a, b in zip(losses(expected), losses(found), strict=True))
    record_property("largest difference of a loss", f"{apart:.1e}")
    assert len(losses(found)) == 8 and apart < 2e-4
    elsewhere = [] if place == "cpu" else ["--cpu"]
    # eval.py uses TF32 on a GPU.
    for result, near in (evaluation(found), 2e-4), (evaluated(1, newest("gpu"), *elsewhere), 2e-3):
        assert abs(result["loss"] - evaluation(expected)["loss"]) < near
        # one image
        assert result["accuracy"] == pytest.approx(evaluation(expected)["accuracy"], abs=0.006)


def test_every_precision_learns_the_same(record_property):
    logs = {
        p: train(1, p, *RESNET, "--mixed_precision", p)
        for p in pick(("no", "bf16", "fp16"), ("no",))
    }
    found = {precision: losses(log) for precision, log in logs.items()}
    for precision, values in found.items():
        record_property(f"loss, {precision}", f"{values[-1]:.4f}")
        record_property(
            f"skipped updates, {precision}",
            sum(r.get("skipped", 0) for r in trained(logs[precision])),
        )
        # fp16 skips the first updates, until its loss scale is low enough
        apart = 0.1 if precision == "fp16" else 0.05
        assert len(values) == pick(8, 1) and values[-1] == pytest.approx(found["no"][-1], rel=apart)


# a model with hidden matrices
MUON = shlex.split("--optimizer muon --model mnist_cnn --image_size 12")
EMA = ["--mixed_precision", pick("fp16", "no"), "--ema_decay", "0.9"]
STOPPED = {
    "one rank": ["--mixed_precision", "no"],
    "two ranks, fp16, Muon, EMA": [*EMA, *MUON],
}
if not ON_CPU:
    STOPPED["two ranks"] = ["--mixed_precision", "no"]
    STOPPED["one rank, fp16, AdamW, EMA"] = [*EMA, "--optimizer", "adamw"]


@pytest.mark.parametrize("kind", STOPPED)
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_weights(
    kind, request, record_property
):
    processes, pair = (2, request.getfixturevalue("pair")) if "two" in kind else (1, [])
    flags = [*MLP, *STOPPED[kind], "--deterministic", "--max_steps", str(pick(2000, 600))]
    flags += [*pair, *shlex.split("--save_every 1000 --eval_every 1000")]
    log = train(processes, "whole", *flags)
    assert losses(log)[-1] < 0.5 * losses(log)[0]
    started = begin(command(processes, "train.py", "--run_name", "run", *flags))
    await_update(started, 20)
    stop(started)
    ended = finish(started)
    assert "Stopped after update" in ended.out and ended.code, ended.out
    train(processes, "run", *flags, "--resume", "auto")
    record_property("stopped", ended.out.split("Stopped after ")[1].split(" (")[0])
    saved = bits("run")
    assert saved == bits("whole") and "model" in saved
    assert ("ema" in saved) == ("--ema_decay" in flags) and ("loss_scale" in saved) == (
        "fp16" in flags
    )


@pytest.mark.parametrize(
    ("model", "precision"), pick([("mnist_cnn", "no"), ("resnet18", "bf16")], [("mlp", "no")])
)
def test_microbatches_give_the_same_bits_on_two_ranks_and_then_on_one(model, precision, pair):
    flags = [
        "--model",
        model,
        *shlex.split("--microbatches 4 --global_batch_size 64 --lr 0.01 --log_every 1"),
    ]
    flags += ["--mixed_precision", precision, *shlex.split("--lr_schedule constant --resume auto")]
    for steps in ("20", "40"):
        one = train(1, "one", *flags, "--max_steps", steps)
        two = train(
            *((2, "two", *pair) if steps == "20" else (1, "two")), *flags, "--max_steps", steps
        )
        assert losses(two) == losses(one) and bits("two") == bits("one")
    replayed = run(command(1, "replay.py", "--run", "runs/two", "--update", "15"))
    assert "all bit-identical" in replayed.out, replayed.out


# More than the memory of any GPU for the outputs of the first layer. A block of an evaluation has
# 3,750 images.
HUGE = [
    *shlex.split("--data synthetic/10x2x600000 --model mlp"),
    "--model_args",
    "{hidden: 10000000}",
]
HUGE += ["--mixed_precision", "no"]
FAULTS = {
    "deterministic implementation; use another model": shlex.split(
        "--model vgg11 --image_size 32 --deterministic"
    ),
    "; raise --grad_accum": [*HUGE, "--global_batch_size", "60000"],
    "; lower --eval_batch_size": [
        *HUGE,
        *shlex.split("--global_batch_size 8 --eval_batch_size 60000"),
    ],
}


@pytest.mark.skipif(ON_CPU, reason="a CPU has these kernels, and the host's memory would be filled")
@pytest.mark.parametrize("fix", FAULTS)
def test_a_fault_of_the_gpu_is_one_line_with_the_fix(fix):
    ended = finish(begin(command(1, "train.py", "--max_steps", "1", *FAULTS[fix])))
    (line,) = error_lines(ended.out)
    assert ended.code and fix in line and ("out of memory" in line) == ("--data" in FAULTS[fix]), (
        ended.out
    )


def test_a_rank_may_have_no_sample_in_an_update(pair):
    flags = [
        "--data",
        "synthetic/5x224x80",
        "--model",
        pick("vit_b_16", "mlp"),
        "--max_train_samples",
        "65",
    ]
    log = train(
        2, "run", *flags, *pair, "--global_batch_size", "64", "--max_steps", "2", "--log_every", "1"
    )
    assert len(losses(log)) == 2 and all(map(math.isfinite, losses(log)))


def test_a_run_with_loader_processes_exits_at_once():
    """Older versions of PyTorch would wait 5 s for each of them."""
    flags = shlex.split("--data synthetic/5x224x80 --model mlp --max_steps 2 --num_workers 4")
    train(1, "run", *flags)
    assert time.time() - Path("runs/run/log.jsonl").stat().st_mtime < pick(6, 20)


def test_synchronised_batch_statistics_are_those_of_one_rank(pair, record_property):
    flags = [*RESNET, *EXACT, *shlex.split("--sync_batchnorm --max_steps 5 --log_every 1")]
    # a higher one amplifies differences in rounding
    flags += shlex.split("--lr 1e-4 --lr_schedule constant")
    one, two = (losses(train(n, f"on-{n}", *flags, *(pair if n == 2 else []))) for n in (1, 2))
    record_property(
        "largest difference of a loss",
        f"{max(abs(a - b) for a, b in zip(one, two, strict=True)):.1e}",
    )
    assert two == pytest.approx(one, rel=1e-3)


def test_an_evaluation_has_the_same_result_each_time_and_on_two_ranks(pair):
    train(1, "run", *RESNET)
    results = [
        evaluated(n, "runs/run", *(pair if n == 2 else [])) for n in pick((1, 1, 1, 2, 2), (1, 2))
    ]
    assert all(result == results[0] for result in results) and results[0]["count"] > 100
