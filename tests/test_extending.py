"""The diffs of docs/extending.md apply to a copy of the project, and all of them work together in
one run.

If a diff no longer applies: apply it by hand to a clone, and put the output of `git diff -U1` into
the page.
"""

import importlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.draws import plain_uniform
from helpers.make_data import pictures
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import (
    BIN,
    ROOT,
    await_save,
    hold,
    kept_in,
    records,
    restore,
    same_tensors,
    weights,
)
from helpers.waiting import until
from torch import Tensor
from torch.nn import functional as F

from utils.data.order import fold_in

PAGE = (ROOT / "docs/extending.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
FOUND = {
    name: re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S) for name, text in SECTIONS.items()
}
DIFFS = {name: "".join(diffs) for name, diffs in FOUND.items() if diffs}
COMMANDS = re.findall(r"^python train.py (.+)$", PAGE, re.M)
FLAGS = [word for command in COMMANDS for word in shlex.split(command)]
FLAGS += [
    "--global_batch_size",
    "12",
    "--epochs",
    "2",
    "--log_every",
    "1",
    "--save_every",
    "5",
    "--eval_every",
    "5",
]
FLAGS += ["--image_size", "16", "--eval_batch_size", "2", "--threads", "1"]
FLAGS += ["--lr", "0.02"]  # a higher one amplifies differences in rounding
CLASSES = ["0", "1", "2"]


def copy_project(folder: Path, *diffs: str) -> Path:
    """A copy of the scripts and of utils/ with these diffs."""
    folder.mkdir()
    for name in ("train.py", "eval.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "utils", folder / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in diffs:
        subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)
    return folder


def imported(copy: Path, script: str):
    """A script of the copy as a module, in a forked process that has imported the project itself."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("train", "eval", "doctor", "utils"):
            del sys.modules[name]
    sys.path.insert(0, str(copy))
    module = importlib.import_module(script)
    assert Path(str(module.__file__)).parent == copy
    return module


def in_copy(
    copy: Path, script: str, flags: list[str], hold_at: int | None = None, keep_first: bool = False
):
    """Run a script of the copy.

    Before update `hold_at` the ranks wait. With `keep_first`, each saves its initial weights, its
    first batch and the settings of its optimizer's groups.
    """
    module = imported(copy, script)
    if script == "train":
        update = module.train_update

        def watched(run, batches):
            if run.state.step == hold_at:
                await_save(run)
                hold(run)
            if run.state.step == 0 and keep_first:
                first = next(batches)
                tensors = first.images, first.labels, first.indices
                groups = [
                    {k: v for k, v in group.items() if k != "params"}
                    for group in run.optimizer.param_groups
                ]
                torch.save(
                    (run.module.state_dict(), tensors, groups),
                    f"first-{run.ranks.topology.rank}.pt",
                )
                batches = chain([first], batches)
            update(run, batches)

        module.train_update = watched
    return module.main(flags)


def summary_in_copy(copy: Path, logits: Tensor, labels: Tensor) -> dict:
    """The metrics of a classification whose samples are evaluated in three batches, one of them
    empty.
    """
    module = imported(copy, "eval")
    _, task = module.make_task(module.TrainConfig(), CLASSES, None)
    sums = [
        task.evaluate(logits[part], labels[part])[0].double().sum(0)
        for part in (slice(50), slice(0), slice(50, None))
    ]
    return task.summary(dict(zip(task.evaluation, sum(sums).tolist(), strict=True)), len(labels))


def write_arrays(name: str, train: int, test: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Write arrays/NAME.npz; returns the pixels [N, 16, 16, 3] and classes of both splits, first
    those to train on.
    """
    pixels, labels = (
        pictures(train + test, (16, 16), seed=seed),
        [n * 5 % 7 % 3 for n in range(train + test)],
    )
    # can be learnt
    pixels[:, :, :, 0] = 40 * np.array(labels)[:, None, None] + pixels[:, :, :, 0] // 3
    Path("arrays").mkdir(exist_ok=True)
    named = {
        "x_train": pixels[:train],
        "x_test": pixels[train:],
        "y_train": labels[:train],
        "y_test": labels[train:],
    }
    np.savez(f"arrays/{name}.npz", **named)
    return pixels, labels


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of the copy: on one and on two processes, on two with a kill and a resume, and
    evaluations.
    """
    root = tmp_path_factory.mktemp("extending")
    copy, folder = copy_project(root / "copy", *DIFFS.values()), root / "runs"
    with kept_in(folder):
        seen, other = write_arrays("pictures", 54, 6, 0), write_arrays("other", 3, 31, 1)
        two = run_ranks(2, in_copy, copy, "train", ["--run_name", "two", *FLAGS], None, True)
        one = run_ranks(1, in_copy, copy, "train", ["--run_name", "one", *FLAGS])
        assert not any(outcome.code for outcome in (*two, *one)), two[0].err + one[0].err
        again = ["--run_name", "killed", *FLAGS, "--resume", "auto"]
        launch = start_ranks(2, in_copy, copy, "train", again, 8)
        until(lambda: Path("held-0").exists() and Path("held-1").exists())
        launch.kill(signal.SIGKILL)
        launch.finish()
        logged = Path("runs/killed/train.csv").read_text()
        resumed = run_ranks(2, in_copy, copy, "train", again)
        flags = [
            "--ckpt",
            "runs/two/checkpoints/step-00000010",
            "--data",
            "arrays/other.npz",
            "--json",
            "found.json",
        ]
        evaluated = run_ranks(2, in_copy, copy, "eval", flags)
        assert not any(outcome.code for outcome in (*resumed, *evaluated)), (
            resumed[0].err + evaluated[0].err
        )
    out = {"two": two[0].out, "resumed": resumed[0].out, "eval": evaluated[0].out}
    return SimpleNamespace(copy=copy, folder=folder, seen=seen, other=other, logged=logged, out=out)


@pytest.fixture
def runs(made, monkeypatch):
    """The runs as they were made, in the working directory."""
    monkeypatch.chdir(restore(made.folder))
    return made


def logits_of(w: dict[str, Tensor], images: Tensor) -> Tensor:
    """The network of the page in plain operations, with its default depth and inputs of 16x16."""
    w = {name: value.double() for name, value in w.items()}
    x = F.conv2d(images.double(), w["0.weight"], w["0.bias"], padding=1)
    for i in range(1, 17, 4):
        x = F.conv2d(x, w[f"{i}.weight"], w[f"{i}.bias"], padding=1, groups=x.shape[1])
        x = (
            torch.einsum("nchw,dc->ndhw", x, w[f"{i + 1}.weight"][:, :, 0, 0])
            + w[f"{i + 1}.bias"][:, None, None]
        )
        x = (x - x.mean((1, 2, 3), True)) / (
            x.var((1, 2, 3), keepdim=True, correction=0) + 1e-5
        ).sqrt()
        x = x * w[f"{i + 2}.weight"][:, None, None] + w[f"{i + 2}.bias"][:, None, None]
        x = x * (1 + (x / math.sqrt(2)).erf()) / 2
    x = x.unflatten(3, (4, 4)).unflatten(2, (4, 4)).mean((3, 5))
    return x.flatten(1) @ w["19.weight"].T + w["19.bias"]


def poly_losses(logits: Tensor, labels: list[int]) -> list[float]:
    right = [row[label] for row, label in zip(logits.softmax(1).tolist(), labels, strict=True)]
    return [2 * (1 - p) - math.log(p) for p in right]


def calibration_error(logits: Tensor, labels: list[int]) -> float:
    """The mean over the samples of |accuracy - confidence| of their bins."""
    confidence, predicted = logits.double().softmax(1).max(1)
    right, error = predicted == torch.tensor(labels), 0.0
    for edge in np.linspace(0, 0.9, 10):
        inside = (confidence >= edge) & (confidence < edge + 0.1)
        if inside.any():
            gap = right[inside].double().mean() - confidence[inside].mean()
            error += abs(gap.item()) * inside.sum().item() / len(labels)
    return error


def normalised(pixels: np.ndarray) -> Tensor:
    """uint8 [..., H, W, 3] as the model's input, float32 [..., 3, H, W]."""
    return (torch.from_numpy(pixels).movedim(-1, -3) / 255 - 0.5) / 0.5


@pytest.mark.parametrize("name", DIFFS)
def test_each_diff_adds_at_most_fifteen_lines_to_at_most_two_files_and_works_alone(name, tmp_path):
    changed = re.findall(r"^\+\+\+ b/(.+)$", DIFFS[name], re.M)
    added = re.findall(r"^\+(?!\+\+ b/)(.*)$", DIFFS[name], re.M)
    assert 1 <= len(changed) <= 2 and 1 <= len(added) <= 15 and max(map(len, added)) <= 100
    copy = copy_project(tmp_path / "copy", DIFFS[name])
    for command in (["check"], ["format", "--check"]):  # finds names that only another diff defines
        result = subprocess.run(
            [BIN / "ruff", *command, *changed], cwd=copy, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout


def test_each_kind_of_part_has_a_diff_and_a_command():
    kinds = ["model", "augmentation", "optimizer", "schedule", "loss", "source", "metric", "sink"]
    assert [name.split()[-1] for name in DIFFS] == kinds
    assert all(re.search(r"^```bash\n\S.*\n```$", SECTIONS[name], re.M) for name in DIFFS)


@pytest.mark.full
def test_two_processes_train_with_all_parts_at_once(runs):
    assert f"{Path('arrays/pictures.npz').resolve()}: 54 training, 6 test" in runs.out["two"]
    files = [torch.load(f"first-{rank}.pt") for rank in (0, 1)]
    initial = files[0][0]
    assert initial["1.weight"].shape == (32, 1, 3, 3) and initial["2.weight"].shape == (
        32,
        32,
        1,
        1,
    )
    images, labels, indices = (
        torch.cat(parts) for parts in zip(*(tensors for _, tensors, _ in files), strict=True)
    )
    plain, solarized = (
        normalised(p) for p in (runs.seen[0], np.minimum(runs.seen[0], 255 - runs.seen[0]))
    )
    changed = 0
    for image, label, index in zip(images, labels, indices, strict=True):
        draw = plain_uniform(0, 0, int(index), fold_in("stream", "solarize"))
        expected = solarized if draw < 0.5 else plain
        (sample,) = [n for n in range(54) if torch.allclose(image, expected[n], atol=1e-6)]
        assert label == runs.seen[1][sample]
        changed += draw < 0.5
    assert 0 < changed < len(images) == 12
    log = records("two", "train")
    losses = poly_losses(logits_of(initial, images), labels.tolist())
    assert log[0]["loss"] == pytest.approx(math.fsum(losses) / 12, rel=1e-5)
    rates = [0.02 * (1 - math.tanh(-4 + 7 * n / 10)) / 2 for n in range(10)]
    assert [record["lr"] for record in log] == pytest.approx(rates)
    momenta = weights("two", file="optimizer.bin")
    assert momenta.keys() == {f"{name}/momentum_buffer" for name in weights("two")}
    assert all([group["trust"] for group in groups] == [0.5, 0.5] for *_, groups in files)
    rows = [
        [float(value) for value in line.split(",")]
        for line in Path("runs/two/train.csv").read_text().split()
    ]
    assert (
        rows == [[record["step"], record["lr"], record["loss"]] for record in log]
        and len(rows) == 10
    )


@pytest.mark.full
def test_the_evaluation_has_the_loss_and_the_metric_of_the_weights(runs):
    found, (pixels, labels) = (
        json.loads(Path("found.json").read_text()),
        [part[3:] for part in runs.other],
    )
    logits = logits_of(weights("two"), normalised(pixels))
    right = logits.argmax(1) == torch.tensor(labels)
    assert found["count"] == 31 and found["accuracy"] == pytest.approx(right.double().mean().item())
    assert found["loss"] == pytest.approx(math.fsum(poly_losses(logits, labels)) / 31, rel=1e-4)
    assert (
        found["ece"] == pytest.approx(calibration_error(logits, labels), rel=1e-4)
        and found["ece"] > 0.01
    )
    assert re.search(rf"^ece +{found['ece']:.4f}$", runs.out["eval"], re.M)
    assert f"ECE {records('two', 'eval')[-1]['ece']:.4f}" in runs.out["two"]
    assert not any("ece" in record for record in records("two", "train"))


@pytest.mark.full
def test_the_metric_is_right_for_confidences_in_all_bins(made):
    logits = 3 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    logits[:2] = torch.tensor([[100.0, 0, 0], [0.1, 0, 0]])  # confidences of 1 and 0.36
    confidence, predicted = logits.softmax(1).max(1)
    bins = (10 * confidence).int().clamp(max=9)
    assert set(bins.tolist()) == set(range(3, 10)) and confidence.max() == 1
    # right in every other bin, so that merged bins have another error
    labels = (predicted + bins % 2) % 3
    (outcome,) = run_ranks(1, summary_in_copy, made.copy, logits, labels)
    clamped = logits.clone()
    clamped[0] = torch.tensor([20.0, 0, 0])  # in the last bin of the independent computation too
    assert outcome.value["ece"] == pytest.approx(
        calibration_error(clamped, labels.tolist()), rel=1e-4
    )


@pytest.mark.full
def test_a_killed_run_with_all_parts_resumes_to_the_same_bits(runs):
    assert len(runs.logged.splitlines()) == 8 and "10 in all, from 5" in runs.out["resumed"]
    assert same_tensors(weights("killed"), weights("two"))
    momenta = [weights(name, file="optimizer.bin") for name in ("killed", "two")]
    assert len(momenta[0]) == len(weights("two")) and same_tensors(*momenta)
    assert Path("runs/killed/train.csv").read_text() == Path("runs/two/train.csv").read_text()
    found = [[record["ece"] for record in records(name, "eval")] for name in ("killed", "two")]
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.full
def test_one_and_two_processes_agree_to_rounding(runs):
    for kind, names in (
        ("train", ("loss", "accuracy", "lr")),
        ("eval", ("loss", "accuracy", "ece")),
    ):
        one, two = records("one", kind), records("two", kind)
        for name in names:
            assert [record[name] for record in one] == pytest.approx(
                [record[name] for record in two], rel=1e-3
            )
    one, two = weights("one"), weights("two")
    assert one.keys() == two.keys()
    vectors = [torch.cat([w[name].flatten() for name in two]) for w in (one, two)]
    assert (vectors[0] - vectors[1]).norm() < 1e-3 * vectors[1].norm()


@pytest.mark.full
def test_help_lists_the_new_names_and_errors_suggest_them(made):
    (outcome,) = run_ranks(1, in_copy, made.copy, "train", ["--help"])
    text = " ".join(outcome.out.split())
    for entry in (
        "separable_cnn (Depthwise",
        "--solarize",
        "lars (SGD whose",
        "tanh (Decay",
        "focal (Focal",
        ".npz (A file of the arrays",
        "separable_cnn: width, depth",
        "lars: trust; adafactor",
        "tanh: lower, upper)",
    ):
        assert entry in text
    wrong = {"model": "separable_cn", "optimizer": "lar", "lr_schedule": "tan", "loss": "foca"}
    for flag, name in wrong.items():
        (outcome,) = run_ranks(1, in_copy, made.copy, "train", [f"--{flag}", name])
        assert outcome.code == 2 and re.search(f"; did you mean {name}.*\n", outcome.err), (
            outcome.err
        )
