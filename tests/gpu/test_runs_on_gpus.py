"""Runs on GPUs: the numbers of the CPU, every precision, one and two ranks, stopped and resumed."""

import hashlib
import json
import math
from pathlib import Path

import pytest
from helpers.gpu_runs import ROOT, begin, command, end_started, finish, pick, run, stop, sys, train
from helpers.training_runs import MLP
from helpers.waiting import has_logged, until

pytestmark = pytest.mark.gpu

EXACT = ["--deterministic", "--mixed_precision", "no"]
RESNET = ["--model", "resnet18", "--global_batch_size", "64", "--lr", "0.01", "--log_every", "5"]
RESNET += ["--max_steps", str(pick(40, 5)), "--eval_every", "1000", "--max_eval_samples", "64"]


def losses(log):
    return [record["loss"] for record in log if record["kind"] == "train"]


def evaluation(log):
    return [record for record in log if record["kind"] == "eval"][-1]


def sha256(name):
    folder = Path("runs") / name / "checkpoints"
    file = folder / (folder / "latest").read_text().strip() / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("launcher", ["python", "torchrun", "two ranks"])
def test_the_doctor_finds_nothing_wrong(launcher, request):
    doctor = str(ROOT / "doctor.py")
    words = {"python": [sys.executable, doctor], "two ranks": command(2, "doctor.py")}
    words["torchrun"] = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", doctor]
    backend = request.getfixturevalue("pair") if launcher == "two ranks" else []
    ended = finish(begin([*words[launcher], *backend, "--json", "doctor.json"]), seconds=300)
    findings = json.loads(Path("doctor.json").read_text())["findings"]
    red = {found["name"] for found in findings if found["ok"] is False}
    assert red <= {"leftovers", "/dev/shm"}, ended.out  # of other users, or of the container


def test_a_gpu_learns_the_digits(record_property):
    flags = ["--config", f"{ROOT}/recipes/digits.yaml", "--epochs", str(pick(8, 2))]
    log = train(1, "run", *flags)
    record_property("accuracy", evaluation(log)["accuracy"])
    assert evaluation(log)["accuracy"] > pick(0.95, 0.5)
    assert log[0]["precision"] == pick("bf16", "no")  # `auto`, as nobody chose one


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exact_run_has_the_numbers_of_the_cpu(processes, pair, record_property):
    flags = [*MLP, *EXACT, "--max_steps", "40"]
    expected = train(1, "cpu", *flags, "--cpu")
    found = train(processes, "gpu", *flags, *(pair if processes == 2 else []))
    apart = max(abs(a - b) for a, b in zip(losses(expected), losses(found), strict=True))
    record_property("largest difference of a loss", f"{apart:.1e}")
    assert len(losses(found)) == 8 and apart < 2e-4
    assert abs(evaluation(found)["loss"] - evaluation(expected)["loss"]) < 2e-4
    assert evaluation(found)["accuracy"] == pytest.approx(evaluation(expected)["accuracy"], abs=0.006)  # one image


def test_every_precision_learns_the_same(record_property):
    found = {p: losses(train(1, p, *RESNET, "--mixed_precision", p)) for p in pick(("no", "bf16", "fp16"), ("no",))}
    for precision, values in found.items():
        record_property(f"loss, {precision}", f"{values[-1]:.4f}")
        apart = 0.1 if precision == "fp16" else 0.05  # fp16 skips the first updates, until its loss scale is low enough
        assert len(values) == pick(8, 1) and values[-1] == pytest.approx(found["no"][-1], rel=apart)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_weights(precision, processes, pair, record_property):
    flags = [*MLP, "--mixed_precision", pick(precision, "no"), "--deterministic", "--max_steps", str(pick(2000, 600))]
    flags += [*(pair if processes == 2 else []), "--save_every", "1000", "--eval_every", "1000"]
    train(processes, "whole", *flags)
    started = begin(command(processes, "train.py", "--run_name", "run", *flags))
    until(has_logged(20))
    stop(started)
    ended = finish(started)
    assert "Stopped after update" in ended.out and ended.code, ended.out
    train(processes, "run", *flags, "--resume", "auto")
    record_property("stopped", ended.out.split("Stopped after ")[1].split(" (")[0])
    assert sha256("run") == sha256("whole")


def test_a_rank_may_have_no_sample_in_an_update(pair):
    flags = ["--data", "synthetic/5x224x80", "--model", pick("vit_b_16", "mlp"), "--max_train_samples", "65"]
    log = train(2, "run", *flags, *pair, "--global_batch_size", "64", "--max_steps", "2", "--log_every", "1")
    assert len(losses(log)) == 2 and all(map(math.isfinite, losses(log)))


def test_synchronised_batch_statistics_are_those_of_one_rank(pair, record_property):
    flags = [*RESNET, *EXACT, "--sync_batchnorm", "--max_steps", "5", "--log_every", "1"]
    flags += ["--lr", "1e-4", "--lr_schedule", "constant"]  # a higher one amplifies differences in rounding
    one, two = (losses(train(n, f"on-{n}", *flags, *(pair if n == 2 else []))) for n in (1, 2))
    record_property("largest difference of a loss", f"{max(abs(a - b) for a, b in zip(one, two, strict=True)):.1e}")
    assert two == pytest.approx(one, rel=1e-3)


def test_an_evaluation_has_the_same_result_each_time():
    train(1, "run", *RESNET)
    results = []
    for number in range(pick(5, 2)):
        run(command(1, "eval.py", "--ckpt", "runs/run", "--json", f"{number}.json"))
        results.append({k: v for k, v in json.loads(Path(f"{number}.json").read_text()).items() if k != "seconds"})
        end_started()
    assert all(result == results[0] for result in results) and results[0]["count"] > 100
