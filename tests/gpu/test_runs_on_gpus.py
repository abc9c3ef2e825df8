"""Runs on GPUs: the numbers of the CPU, every precision, one and two ranks, the same bits."""

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
    in_start_table,
    largest_difference,
    losses,
    pick,
    run,
    stop,
    traced,
    train,
    trained,
)
from helpers.training_runs import MLP
from helpers.waiting import error_lines

pytestmark = pytest.mark.gpu

DIGITS = shlex.join(MLP)
EXACT = "--deterministic --mixed_precision no"
COMPILED = f"--dynamo_backend {pick('inductor', 'aot_eager')}"
RESNET = "--model resnet18 --global_batch_size 64 --lr 0.01 --log_every 5 --eval_every 1000"
RESNET += f" --max_steps {pick(40, 5)} --max_eval_samples 64"


def evaluation(log):
    return [record for record in log if record["kind"] == "eval"][-1]


def newest(name):
    folder = Path("runs") / name / "checkpoints"
    return folder / (folder / "latest").read_text().strip()


def bits(name):
    """A hash of each safetensors file in the newest checkpoint: the weights and their average."""
    files = newest(name).glob("*.safetensors")
    return {file.stem: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def evaluated(processes, ckpt, flags=""):
    """What eval.py reports, without its time."""
    run(command(processes, "eval.py", f"--ckpt {ckpt} --json eval.json {flags}"))
    end_started()
    return json.loads(Path("eval.json").read_text()) | {"seconds": None}


ON_ONE = [sys.executable, *shlex.split("-m torch.distributed.run --nproc_per_node 1")]


@pytest.mark.parametrize("launcher", ["python", "torchrun", "two ranks"])
def test_the_doctor_finds_nothing_wrong(launcher, request):
    backend = request.getfixturevalue("pair") if launcher == "two ranks" else ""
    one = f"{ROOT}/doctor.py --json doctor.json"
    words = {
        "python": [sys.executable, *one.split()],
        "torchrun": [*ON_ONE, *one.split()],
        "two ranks": command(2, "doctor.py", f"{backend} --json doctor.json"),
    }
    ended = finish(begin(words[launcher]), seconds=300)
    findings = json.loads(Path("doctor.json").read_text())["findings"]
    red = {found["name"] for found in findings if found["ok"] is False}
    assert red <= {"leftovers", "/dev/shm"}, ended.out  # of other users, or of the container


def test_a_gpu_learns_the_digits(record_property):
    flags = f"--config {ROOT}/recipes/digits.yaml --epochs {pick(8, 2)} --profile"
    log = train(1, "run", flags)
    record_property("accuracy", evaluation(log)["accuracy"])
    assert evaluation(log)["accuracy"] > pick(0.95, 0.5)
    assert log[0]["precision"] == pick("bf16", "no")  # `auto`, as nobody chose one
    assert ("gpu_memory" in trained(log)[-1]) == (not ON_CPU)
    with gzip.open("runs/run/trace-rank0.json.gz") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "cpu_op" in kinds and ("kernel" in kinds) == (not ON_CPU)


# Where the updates up to 20 and up to 40 are computed; "two" are ranks.
RERUN = pytest.mark.rerun
PLACES = [("two", "gpu"), pytest.param(("compiled two", "compiled two"), marks=RERUN)]
PLACES += pick([("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")], [])


@pytest.mark.limit(140)  # one case compiles twice
@pytest.mark.parametrize("places", PLACES, ids=", ".join)
def test_an_exact_run_has_the_numbers_of_the_cpu(places, request, record_property):
    """Also if it is resumed, and evaluated, on the other kind of device."""
    pair = request.getfixturevalue("pair") if "two" in "".join(places) else ""
    flags = f"{DIGITS} {EXACT} --lr_schedule constant"
    expected = train(1, "cpu", f"{flags} --max_steps 40 --cpu")
    for place, steps in zip(places, (20, 40), strict=True):
        more = {"cpu": "--cpu", "gpu": ""}.get(place, pair)
        processes = 2 if "two" in place else 1
        compiled = COMPILED if "compiled" in place else ""
        resumed = f"{flags} --max_steps {steps} --resume auto {more}"
        found = train(processes, "gpu", resumed, launcher=compiled)
        assert (", compiled" in in_start_table("backend")) == bool(compiled)
    apart = largest_difference(losses(expected), losses(found))
    record_property("largest difference of a loss", f"{apart:.1e}")
    assert len(losses(found)) == 8 and apart < 2e-4
    elsewhere = "" if place == "cpu" else "--cpu"
    # eval.py uses TF32 on a GPU.
    for result, near in (evaluation(found), 2e-4), (evaluated(1, newest("gpu"), elsewhere), 2e-3):
        assert abs(result["loss"] - evaluation(expected)["loss"]) < near
        # one image
        assert result["accuracy"] == pytest.approx(evaluation(expected)["accuracy"], abs=0.006)


def test_every_precision_learns_the_same(record_property):
    precisions = pick(("no", "bf16", "fp16"), ("no",))
    logs = {p: train(1, p, f"{RESNET} --mixed_precision {p}") for p in precisions}
    found = {precision: losses(log) for precision, log in logs.items()}
    for precision, values in found.items():
        record_property(f"loss, {precision}", f"{values[-1]:.4f}")
        skipped = sum(record.get("skipped", 0) for record in trained(logs[precision]))
        record_property(f"skipped updates, {precision}", skipped)
        # fp16 skips the first updates, until its loss scale is low enough
        apart = 0.1 if precision == "fp16" else 0.05
        assert len(values) == pick(8, 1) and values[-1] == pytest.approx(found["no"][-1], rel=apart)


# a model with hidden matrices
MUON = "--optimizer muon --model mnist_cnn --image_size 12"
EMA = f"--mixed_precision {pick('fp16', 'no')} --ema_decay 0.999"
STOPPED = {"one rank": "--mixed_precision no", "two ranks, fp16, Muon, EMA": f"{EMA} {MUON}"}
if not ON_CPU:
    STOPPED["two ranks"] = "--mixed_precision no"
    STOPPED["one rank, fp16, AdamW, EMA"] = f"{EMA} --optimizer adamw"


# this kind is in the part `first`, the others only in `runs`
STOPPED_FIRST = "two ranks, fp16, Muon, EMA" if ON_CPU else "two ranks"
KINDS = [pytest.param(STOPPED_FIRST, marks=pytest.mark.first(5))]
KINDS += [kind for kind in STOPPED if kind != STOPPED_FIRST]


@pytest.mark.limit(150)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_weights(
    kind, request, record_property
):
    processes, pair = (2, request.getfixturevalue("pair")) if "two" in kind else (1, "")
    steps = pick(2000, 600, 400)
    flags = f"{DIGITS} {STOPPED[kind]} --deterministic --max_steps {steps}"
    flags += f" {pair} --save_every 1000 --eval_every 1000"
    log = train(processes, "whole", flags)
    assert losses(log)[-1] < pick(0.5, 0.5, 0.9) * losses(log)[0]
    started = begin(command(processes, "train.py", f"--run_name run {flags}"))
    await_update(started, steps // 3)  # the average forgets what was long before its end
    stop(started)
    ended = finish(started)
    assert "Stopped after update" in ended.out and ended.code, ended.out
    train(processes, "run", f"{flags} --resume auto")
    record_property("stopped", ended.out.split("Stopped after ")[1].split(" (")[0])
    saved = bits("run")
    assert saved == bits("whole") and "model" in saved
    assert ("ema" in saved) == ("--ema_decay" in flags)
    assert (newest("run") / "scaler.pt").exists() == ("fp16" in flags)


EXACT_SUMS = [pytest.param(pick("mnist_cnn", "mlp"), "no", marks=pytest.mark.first(1))]
if not ON_CPU:
    EXACT_SUMS += [pytest.param("resnet18", "bf16", marks=[pytest.mark.first(10), RERUN])]


@pytest.mark.limit(140)  # five launches
@pytest.mark.parametrize(("model", "precision"), EXACT_SUMS)
def test_microbatches_give_the_same_bits_on_two_ranks_and_then_on_one(model, precision, pair):
    flags = f"--model {model} --mixed_precision {precision} --microbatches 4 --resume auto"
    flags += " --global_batch_size 64 --lr 0.01 --log_every 1 --lr_schedule constant"
    for steps, processes in pick(((20, 2), (40, 1)), ((20, 2), (40, 1)), ((10, 2), (20, 1))):
        own = f"{flags} --max_steps {steps}"
        one = train(1, "one", own)
        two = train(processes, "two", f"{own} {pair}" if processes == 2 else own)
        assert losses(two) == losses(one) and bits("two") == bits("one")
    update = pick(15, 15, 5)
    replayed = run(command(1, "replay.py", f"--run runs/two --update {update}"))
    assert f"update {update}: loss {losses(two)[update - 1]}\n" in replayed.out, replayed.out


@pytest.mark.first(3)
@pytest.mark.limit(120)
def test_unequal_shares_give_the_same_bits(pair):
    """Unequal shares use all_to_all; two equal shares may use all_reduce."""
    flags = "--data digits --model mnist_cnn --image_size 12 --microbatches 8 --report false"
    # --profile records the updates from the eleventh on
    flags += f" --global_batch_size 64 --max_steps {pick(20, 11)} --lr 0.01 --mixed_precision no"
    train(1, "one", flags)
    train(2, "two", f"{flags} {pair}")
    train(2, "5-3", f"{flags} {pair} --shares 5,3 --profile")
    assert bits("one") == bits("two") == bits("5-3")
    assert traced("5-3")["c10d::alltoall_base_"]


# More than the memory of any GPU for the outputs of the first layer. A block of an evaluation has
# 3,750 images.
HUGE = "--data synthetic/10x2x600000 --model mlp --model_args '{hidden: 10000000}'"
HUGE += " --mixed_precision no --global_batch_size"
EVALUATION = "; lower --eval_batch_size"
OTHER_FAULTS = {
    "deterministic implementation; use": "--model vgg11 --image_size 32 --deterministic",
    "; raise --grad_accum": f"{HUGE} 60000",
}
FAULTS = OTHER_FAULTS | {EVALUATION: f"{HUGE} 8 --eval_batch_size 60000"}


@pytest.mark.skipif(ON_CPU, reason="a CPU has these kernels, and the host's memory would be filled")
@pytest.mark.limit(90)
@pytest.mark.parametrize("fix", [*OTHER_FAULTS, pytest.param(EVALUATION, marks=pytest.mark.rerun)])
def test_a_fault_of_the_gpu_is_one_line_with_the_fix(fix):
    ended = finish(begin(command(1, "train.py", f"--max_steps 1 {FAULTS[fix]}")))
    (line,) = error_lines(ended.out)
    assert ended.code and fix in line, ended.out
    assert ("out of memory" in line) == ("--data" in FAULTS[fix]), ended.out


@pytest.mark.first(8)
@pytest.mark.rerun
@pytest.mark.limit(90)
def test_a_rank_may_have_no_sample_in_an_update(pair):
    flags = f"--data synthetic/5x224x80 --model {pick('vit_b_16', 'mlp')} --max_train_samples 65"
    log = train(2, "run", f"{flags} {pair} --global_batch_size 64 --max_steps 2 --log_every 1")
    assert len(losses(log)) == 2 and all(map(math.isfinite, losses(log)))


@pytest.mark.first(12)
@pytest.mark.limit(90)
def test_a_rank_without_samples_takes_part_in_synchronised_batch_statistics(pair):
    # mixing cuts updates into pairs, so the second rank has none of the last two samples
    flags = f"{RESNET} --sync_batchnorm --mixup 0.2 --max_train_samples 66 --lr 1e-4"
    flags += " --global_batch_size 64 --max_steps 2 --log_every 1"
    log = train(2, "run", f"{flags} {pair}")
    assert len(losses(log)) == 2 and all(map(math.isfinite, losses(log)))


@pytest.mark.rerun
@pytest.mark.limit(60)
def test_a_run_with_loader_processes_exits_at_once():
    """Older versions of PyTorch would wait 5 s for each of them."""
    train(1, "run", "--data synthetic/5x224x80 --model mlp --max_steps 2 --num_workers 4")
    assert time.time() - Path("runs/run/log.jsonl").stat().st_mtime < pick(6, 120)


@pytest.mark.first(6)
@pytest.mark.limit(90)
def test_synchronised_batch_statistics_are_those_of_one_rank(pair, record_property):
    """Judged by the first update, because rounding errors grow in later ones."""
    flags = f"{RESNET} {EXACT} --sync_batchnorm --max_steps 2 --log_every 1 --lr_schedule constant"
    flags += " --clip_norm 1e9"  # it changes no gradient, but then the log has their norm
    one, two = trained(train(1, "one", flags)), trained(train(2, "two", f"{flags} {pair}"))
    for name, rounding in ("loss", 1e-4), ("grad_norm", 1e-3):
        apart = abs(two[0][name] / one[0][name] - 1)
        record_property(f"{name}, relative difference", f"{apart:.1e}")
        assert apart < rounding
    # this loss follows from all gradients
    assert two[1]["loss"] == pytest.approx(one[1]["loss"], rel=1e-3)


@pytest.mark.first(9)
@pytest.mark.rerun
@pytest.mark.limit(120)
def test_an_evaluation_has_the_same_result_each_time_and_on_two_ranks(pair):
    train(1, "run", RESNET)
    ways = pick((1, 1, 1, 2, 2), (1, 2), (1, 1, 2))
    results = [evaluated(n, "runs/run", pair if n == 2 else "") for n in ways]
    assert all(result == results[0] for result in results) and results[0]["count"] > 100
