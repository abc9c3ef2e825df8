"""report.html: its numbers, what is in it and what is not, and how it looks in a browser."""

import base64
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.browser import browser
from helpers.make_data import encoded
from helpers.ranks import run_ranks
from helpers.training_runs import MLP, ROOT, records, returned, train_run, words, working_in
from PIL import Image
from scipy.special import expit
from scipy.stats import binomtest
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    f1_score,
    recall_score,
    roc_auc_score,
)

import eval
import train
from extras.compare.__main__ import main
from extras.page.analysis import BINS, MATRIX, analyse, calibration, intervals
from extras.page.charts import charts, draw
from extras.page.page import read_run, write_page
from extras.page.report import write_report
from utils.data.selection import load_data
from utils.data.splits import Files, Split
from utils.settings.train import TrainConfig, to_yaml
from utils.tasks.classification import Classification
from utils.tasks.multilabel import Binary, MultiLabel
from utils.tasks.task import Predictions

NAMES = [f"class {number}" for number in range(1000)]
REPORT = [*MLP, "--report", "true"]


def predictions(classes: int, samples: int = 500) -> Predictions:
    """Predictions that are right about half of the time."""
    random, rows = np.random.default_rng(0), np.arange(samples)
    labels = random.integers(classes, size=samples)
    scores = random.normal(size=(samples, classes))
    scores[rows, labels] += 2
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    top = np.argsort(-chances, axis=1)[:, :5]
    hits = top == labels[:, None]
    values = np.stack([-np.log(chances[rows, labels]), hits[:, 0], hits.any(1)], 1)
    best = np.take_along_axis(chances, top, 1).astype(np.float32)
    return Predictions(rows * 3, labels, top, best, values)  # some samples could not be read


def task_of(classes: int, names: list[str] = NAMES) -> Classification:
    return Classification(TrainConfig(), names[:classes])


def outputs_of(kind: type[MultiLabel], labels: np.ndarray, logits: np.ndarray, **settings):
    """The predictions of a task with these logits, and the task."""
    task = kind(TrainConfig(**settings), NAMES[: max(2, logits.shape[1])])
    values = task.evaluate(torch.tensor(logits), torch.tensor(labels))[0].numpy()
    none = np.zeros((len(labels), 0), int)
    return Predictions(np.arange(len(labels)), labels, none, logits, values), task


def page_of(folders: list[Path], images: bool = True) -> str:
    write_page(folders, Path("page.html"), images)
    return Path("page.html").read_text()


def read(path: Path | str) -> dict:
    return json.loads(Path(path).read_text())


# -- the numbers


@pytest.mark.parametrize("classes", [12, MATRIX + 1])
def test_confusions_and_classes_are_those_of_scikit_learn(classes):
    found = predictions(classes, 3000)
    analysis, labels, top = analyse(found, task_of(classes)), found.labels, found.top[:, 0]
    expected = confusion_matrix(labels, top, labels=range(classes))
    assert analysis["matrix"] == (expected.tolist() if classes == 12 else [])
    scores = {row["name"]: row["score"] for row in analysis["classes"]}
    recalls = recall_score(labels, top, average=None)
    assert scores == pytest.approx(dict(zip(NAMES, recalls, strict=False)))
    assert list(scores.values()) == sorted(scores.values())
    totals = expected.sum(1)
    np.fill_diagonal(expected, 0)
    for row in analysis["classes"]:
        own = expected[NAMES.index(row["name"])]
        assert own[NAMES.index(row["mistaken_for"])] == own.max()
    most = analysis["confusions"]
    assert [row["count"] for row in most] == sorted(expected.ravel().tolist(), reverse=True)[:20]
    assert all(row["share"] == row["count"] / totals[NAMES.index(row["true"])] for row in most)
    wrong = np.flatnonzero(top != labels)
    rows = wrong[np.argsort(-found.scores[wrong, 0])][:24]
    expected = [(found.indices[row], NAMES[labels[row]]) for row in rows]
    assert [(error["index"], error["true"]) for error in analysis["errors"]] == expected


def test_classes_without_an_evaluation_image_are_counted():
    analysis = analyse(predictions(10), task_of(12))
    assert (analysis["without_images"], analysis["all_classes"]) == (2, 12)


def test_the_calibration_error_is_that_of_a_loop_over_bins():
    random = np.random.default_rng(0)
    confidence = np.append(random.random(700), [0.0, 1.0])
    correct = random.random(702) < confidence**2
    places = np.minimum(confidence * BINS, BINS - 1).astype(int)
    errors = [abs((correct[places == n] - confidence[places == n]).sum()) for n in range(BINS)]
    assert calibration(confidence, correct)["error"] == pytest.approx(sum(errors) / 702, rel=1e-9)


def test_intervals_are_the_same_each_time_and_those_of_the_normal_approximation():
    found, task = predictions(10), task_of(10)
    bounds = intervals(found, task)
    assert bounds == intervals(found, task) and bounds.keys() == {"loss", "accuracy", "top5"}
    means, half = found.values.mean(0), 1.96 * found.values.std(0) / np.sqrt(500)
    for name, mean, width in zip(("loss", "accuracy"), means, half, strict=False):
        assert bounds[name] == pytest.approx((mean - width, mean + width), abs=0.15 * width)


@pytest.mark.parametrize(("samples", "right"), [(60, 60), (400, 399)])
def test_the_interval_of_a_share_is_that_of_wilson_even_if_all_images_are_right(samples, right):
    found = predictions(10, samples)
    found.values[:, 1] = np.arange(samples) < right
    expected = binomtest(right, samples).proportion_ci(method="wilson")
    found_bounds = intervals(found, task_of(10))["accuracy"]
    assert found_bounds == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_multilabel_has_each_classs_precision_and_the_calibration_of_all():
    random = np.random.default_rng(0)
    truth = (random.random((200, 4)) < 0.4).astype(np.uint8)
    # Of many of these logits the probability is 0 or 1 in float32.
    scores = (100 * (truth * 0.3 + random.random((200, 4)) * 0.7 - 0.5)).astype(np.float32)
    found, task = outputs_of(MultiLabel, truth, scores, threshold=0.05)
    analysis, predicted = analyse(found, task), scores > task.cut
    precisions = average_precision_score(truth, scores, average=None)
    shown = {row["name"]: (row["score"], row["count"]) for row in analysis["classes"]}
    expected = zip(map(pytest.approx, precisions), truth.sum(0), strict=True)
    assert shown == dict(zip(NAMES, expected, strict=False))
    bounds = analysis["intervals"]
    assert bounds.keys() == {"mAP", "macro_f1", "micro_f1", "exact_match", "loss"}
    micro = f1_score(truth, predicted, average="micro")
    for name, value in (("mAP", precisions.mean()), ("micro_f1", micro)):
        assert bounds[name][0] < value < bounds[name][1]
    chances = expit(scores.astype(float))
    error = calibration(chances, truth)["error"]
    assert analysis["calibration"]["error"] == pytest.approx(error)
    errors = analysis["errors"]
    assert [error["index"] for error in errors] == np.argsort(-found.values[:, 0])[:24].tolist()
    largest = (np.abs(chances - truth) * (predicted != truth)).argmax(1)
    assert all(e["text"].startswith(f"{NAMES[largest[e['index']]]} ") for e in errors)


def test_binary_is_shown_as_two_classes_with_an_interval_of_its_auc():
    random = np.random.default_rng(0)
    truth = (random.random(200) < 0.4).astype(int)
    logits = (2 * truth + random.normal(size=200) - 1)[:, None].astype(np.float32)
    found, task = outputs_of(Binary, truth, logits, threshold=0.7)
    analysis, predicted = analyse(found, task), logits[:, 0] > task.cut
    assert analysis["matrix"] == confusion_matrix(truth, predicted).tolist()
    assert analysis["intervals"].keys() == {"auc", "accuracy", "f1", "loss"}
    low, high = analysis["intervals"]["auc"]
    assert low < roc_auc_score(truth, logits[:, 0]) < high


@pytest.mark.filterwarnings("error")
def test_nan_infinite_losses_and_undefined_metrics_make_an_analysis_in_json():
    found = predictions(10)
    found.scores[7], found.values[:, 0] = np.nan, np.inf
    analysis = analyse(found, task_of(10))
    assert analysis["intervals"].keys() == {"accuracy", "top5"}
    assert sum(entry["count"] for entry in analysis["calibration"]["bins"]) == 499
    logits = np.array([[0.5, np.nan], [-0.5, np.inf], [0.1, -np.inf]], np.float32)
    labels = np.array([[1, 0], [1, 1], [1, 0]], np.uint8)
    others = analyse(*outputs_of(MultiLabel, labels, logits))
    assert others["classes"] == [] and "mAP" not in others["intervals"]
    only = analyse(*outputs_of(Binary, np.ones(3, int), logits[:, :1]))
    assert "auc" not in only["intervals"]
    json.dumps([analysis, others, only], allow_nan=False)


def chart(name, *points):
    """The axes of a chart with one line."""
    evaluations = [{"kind": "eval", "step": step, name: value} for step, value in points]
    return draw([{"train": [], "eval": evaluations}], name, 1, "").axes[0]


def test_a_chart_has_each_point_at_its_place_and_leaves_infinite_ones_out():
    (line,) = chart("accuracy", (0, 0.0), (50, math.inf), (100, 1.0)).lines
    assert line.get_xydata().tolist() == [[0, 0], [100, 1]] and not chart("loss").lines
    assert chart("loss", (0, 1.0), (1, 0.1)).get_yscale() == "linear"
    assert chart("loss", (0, 1.0), (1, 0.01)).get_yscale() == "log"
    (many,) = chart("loss", *((x, x) for x in range(25_000))).lines
    points = many.get_xydata().tolist()
    assert len(points) <= 1001 and points[-1] == [24_999, 24_999]
    for name, lowest in (("images_per_second", 0), ("accuracy", 0.8)):  # rates start at 0
        assert chart(name, (0, 0.8), (1, 0.9)).get_ylim()[0] == pytest.approx(lowest, abs=0.01)


def test_charts_are_equal_for_equal_values_and_have_texts_and_no_background():
    losses = [{"kind": "train", "step": step, "loss": 1 / (9 + step)} for step in range(999)]
    run = {"start": [{"step": 0}, {"step": 7}], "train": losses, "eval": []}
    (one,), (same,) = (charts([run], {}) for _ in range(2))
    assert one["svg"] == same["svg"] and (one["title"], one["resumed"]) == (
        "loss (logarithmic)",
        "7",
    )
    assert one["svg"].startswith("<svg") and ">800</text>" in one["svg"]
    assert not re.search("fill: ?#(fff|000)", one["svg"])  # for light and dark pages


# -- the page of a run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that was continued, evaluations of it on one and on two processes, and
    one without a page.
    """
    folder = tmp_path_factory.mktemp("report") / "secret-place"
    with working_in(folder):
        flags = [*REPORT, "--eval_batch_size", "50"]
        train_run(2, "run", *flags, *words("--max_steps 8 --flip"))
        train_run(1, "run", *flags, *words("--max_steps 12 --resume auto"))
        shutil.copy("runs/run/report.json", "last.json")
        for processes in (1, 2):
            returned(processes, eval.main, words(f"--ckpt runs/run --json eval{processes}.json"))
            shutil.copy("runs/run/report.json", f"report{processes}.json")
        train_run(1, "none", *MLP, "--max_steps", "2")
        returned(1, eval.main, ["--ckpt", "runs/none"])
    return folder


@pytest.fixture
def inside(runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setenv("HOME", str(runs / "home"))
    return Path("runs/run")


def test_an_evaluation_writes_the_page_again_with_the_same_numbers_on_two_processes(inside):
    one, two = read("report1.json"), read("report2.json")
    result, page = read("eval1.json"), (inside / "report.html").read_text()
    assert one["matrix"] == two["matrix"] and one["record"]["accuracy"] == result["accuracy"]
    scores = {row["name"]: row["score"] for row in one["classes"]}
    accuracies = [scores[str(number)] for number in range(10)]
    assert accuracies == pytest.approx(result["per_class_accuracy"])
    for name, (low, high) in one["intervals"].items():
        assert two["intervals"][name] == pytest.approx((low, high), rel=1e-5)
        assert low <= result[name] <= high
    assert f"{result['accuracy']:.4f}" in page and f"{result['macro_f1']:.4f}" in page


def test_each_image_in_the_gallery_is_one_that_the_weights_get_wrong(inside):
    errors = read("last.json")["errors"]
    split = load_data(TrainConfig(max_train_samples=480, cache_dir="cache")).evaluation
    assert errors
    for error in errors:
        uri = error["image"].removeprefix("data:image/png;base64,")
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))[..., 0]
        assert np.array_equal(image, split.images[split.image_index[error["index"]]])
        assert error["true"] == str(split.labels[error["index"]]) != error["text"].split()[0]


def _train_to_a_constant_answer(flags: list[str], die_at: int | None = None) -> None:
    """Train; from update 5 on, the weights are 0.

    Before update `die_at`, counted from 0, the process is killed.
    """
    update = train.train_update

    def damaged(run, batches):
        if run.state.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        update(run, batches)
        for weight in run.module.parameters():
            weight.data *= run.state.step < 5

    train.train_update = damaged
    train.main(["--run_name", "worse", *flags])


@pytest.mark.full
def test_the_page_shows_the_best_checkpoint_after_a_kill_and_an_eval_py(inside):
    flags = [*REPORT, *words("--max_steps 12 --lr 0.05 --eval_every 4 --save_every 4")]
    (killed,) = run_ranks(1, _train_to_a_constant_answer, flags, 9)
    assert killed.code == -signal.SIGKILL
    (outcome,) = run_ranks(1, _train_to_a_constant_answer, [*flags, "--resume", "auto"])
    folder = Path("runs/worse")
    trained, page = read(folder / "report.json"), (folder / "report.html").read_text()
    returned(1, eval.main, ["--ckpt", "runs/worse"])
    evaluated, again = read(folder / "report.json"), (folder / "report.html").read_text()
    best, *_, last = records("worse", "eval")
    assert (best["step"], last["step"]) == (4, 12) and best["accuracy"] > last["accuracy"]
    for found in (trained, evaluated):
        assert found["record"]["step"] == 4
        assert found["record"]["loss"] == pytest.approx(best["loss"])
        assert np.trace(found["matrix"]) / 180 == found["record"]["accuracy"] == best["accuracy"]
    for name in ("matrix", "classes", "always", "errors", "confusions"):
        assert trained[name] == evaluated[name], name
    said = f"{best['accuracy']:.4f} (best, update 4)", f"{last['accuracy']:.4f}"
    for name, number in zip(("accuracy", "last accuracy"), said, strict=True):
        assert re.search(rf"^{name} +{re.escape(number)}$", outcome.out, re.M)
    place = "<td>update 4, the best by accuracy</td>"
    assert place in page and place in again and not (folder / "best_predictions.npz").exists()
    data = load_data(TrainConfig(max_train_samples=480, cache_dir="cache"))
    common = int(np.bincount(data.train.labels).argmax())
    share = float((data.evaluation.labels == common).mean())
    assert trained["always"] == {"class": str(common), "accuracy": pytest.approx(share)}
    assert re.search(rf"^always predicting {common} +{share:.4f}$", outcome.out, re.M)
    assert f'{share:.4f} <span class="dim">class {common}</span>' in again
    assert f"; always predicting class {common}: {share:.4f}" in again


def test_the_page_shows_settings_starts_versions_and_marks_the_resume(inside):
    page, run = (inside / "report.html").read_text(), read_run(inside)
    assert run["settings"]["flip"] == "true"
    assert not run["settings"].keys() & {"seed", "output_dir", "cache_dir", "task"}
    assert [start["step"] for start in run["start"]] == [0, 8]
    assert page.count("</i>resumed from update 8</span>") == page.count('<figure class="chart">')
    assert f"torch {torch.__version__}" in page
    assert "processes 2, batch 60 x 2 x 1 = 120, cpu, threads 1, precision no" in page
    assert page.count("data:image/") == len(run["errors"]) + 1


def test_the_page_names_no_host_and_no_absolute_path(inside):
    for file in (inside / "report.html", inside / "report.json"):
        text = file.read_text()
        assert socket.gethostname() not in re.sub(r"base64,[\w+/=]+", "", text)
        assert "secret-place" not in text and "/tmp" not in text and str(Path.home()) not in text
    # --report false, in training and evaluation
    assert not list(Path("runs/none").glob("report.*"))


def test_an_error_of_the_page_is_a_warning_and_the_run_ends_well():
    Path("runs/unlucky/report.html").mkdir(parents=True)
    flags = [*REPORT, *words("--run_name unlucky --max_steps 2 --resume auto")]
    (outcome,) = run_ranks(1, train.main, flags)
    assert outcome.code == 0 and "report.html could not be written (" in outcome.out
    assert Path("runs/unlucky/checkpoints/latest").exists()


# -- pages of made-up runs


PIXEL = "data:image/png;base64,"
PIXEL += base64.b64encode(encoded(np.zeros((12, 20, 3), np.uint8), "PNG")).decode()
START = {"kind": "start", "step": 0, "processes": 2, "batch_size": 64, "grad_accum": 1}
START |= {"global_batch_size": 128, "threads": 1, "precision": "no", "device": "cpu", "time": 0}
START |= {"input": "mean 0.5", "versions": {"torch": "2.0", "commit": "abcdef" * 7}}


def made_up(
    folder: Path, classes: int = 10, names: list[str] | None = None, samples: int = 500, **settings
) -> Path:
    """A run folder with a log, an analysis and a first batch."""
    folder.mkdir(parents=True)
    settings = {"data": "/home/someone/flowers", "lr": 0.1, "task": "classification"} | settings
    (folder / "config.yaml").write_text(to_yaml(TrainConfig(**settings)))
    log = [START, START | {"step": 40}]
    for step in range(10, 110, 10):
        own = {"step": step, "epoch": 1, "loss": 100 / step**2, "seconds": step}
        rates = {"lr": 0.1, "images_per_second": 9.0, "data_wait": 0.01, "gpu_memory": 8 * 10**9}
        log.append({"kind": "train", "accuracy": 0.6, "skipped": 0.0} | own | rates)
        for weights, accuracy in (("raw", 0.5), ("ema", 0.75)):
            result = {"kind": "eval", "weights": weights, "accuracy": accuracy}
            log.append(own | result | {"split": "test", "count": 5})
    lines = "".join(json.dumps(record) + "\n" for record in log)
    (folder / "log.jsonl").write_text(lines + '{"kind": "tra')
    analysis = analyse(predictions(classes, samples), task_of(classes, names or NAMES))
    for error in analysis["errors"]:
        error |= {"image": PIXEL, "small": True, "file": "a/b.png"}
    analysis["record"] = {"accuracy": 0.5, "loss": 1.0, "step": 100}
    (folder / "report.json").write_text(json.dumps(analysis))
    Image.new("RGB", (1500, 400), "blue").save(folder / "first_batch.png")
    return folder


def test_names_are_escaped(tmp_path):
    names = ["<script>alert(1)</script>", "d\udcffg", *NAMES[:8]]
    folders = [made_up(tmp_path / name, names=names) for name in ("<i>run", "<b>")]
    for chosen in (folders[:1], folders):
        page = page_of(chosen)
        assert "<script" not in page and "<i>run" not in page
        assert "&lt;script&gt;alert(1)" in page and "<td>d\\udcffg</td>" in page


def test_the_analysis_of_a_training_that_went_on_is_not_shown_and_that_of_eval_py_is(tmp_path):
    folder = made_up(tmp_path / "run")
    analysis = read(folder / "report.json")
    assert read_run(folder)["analysis"] == analysis
    for record, shown in (({"step": 40}, False), ({"step": 40, "checkpoint": "step-40"}, True)):
        (folder / "report.json").write_text(json.dumps({**analysis, "record": record}))
        run = read_run(folder)
        assert bool(run["analysis"]) == shown
        assert run["evaluation"]["step"] == (40 if shown else 100)


def test_the_page_names_the_views_and_shows_a_dash_for_an_infinite_loss(tmp_path):
    folder, found = made_up(tmp_path / "run"), predictions(10)._replace(indices=np.arange(500))
    record = {"step": 100, "accuracy": 0.5, "loss": math.inf, "tta": "flip"}
    images = Files([str(tmp_path / f"{n}.png") for n in range(507)], str(tmp_path))  # they are gone
    split = Split("val", images, found.labels, np.arange(500) + 7, "")
    write_report(folder, task_of(10), split, found, record)
    page, analysis = (folder / "report.html").read_text(), read(folder / "report.json")
    assert "update 100, the last evaluated, views flip</td>" in page
    # of the first batch
    assert '<th>loss</th><td class="number">–</td>' in page and page.count("<img") == 1
    assert all(error["file"] == f"{error['index'] + 7}.png" for error in analysis["errors"])


def test_the_time_waiting_for_data_is_drawn_in_percent():
    run = {"name": "run", "eval": [], "train": [{"kind": "train", "step": 4, "data_wait": 0.5}]}
    (axes,) = draw([run], "data_wait", 100, "%").axes
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[4, 50]]


def test_raw_and_averaged_weights_have_lines_of_their_own(tmp_path):
    page = page_of([made_up(tmp_path / "run")])
    # loss and accuracy
    assert page.count("</i>evaluation raw <b>") == page.count("</i>evaluation ema <b>") == 2
    line = r'<i style="border-top: 3px (\w+ #\w+)"></i>evaluation (\w+) <b>([\d.]+)'
    (raw, *first), (ema, *second) = re.findall(line, page[page.index("accuracy over") :])
    assert (first, second) == (["raw", "0.5"], ["ema", "0.75"])
    assert raw.startswith("dashed ") and ema.startswith("solid ") and raw[-7:] != ema[-7:]
    assert "flowers" in page and "someone" not in page


@pytest.mark.full
def test_several_runs_are_compared_on_one_page(tmp_path, capsys):
    folders = [made_up(tmp_path / "a/run"), made_up(tmp_path / "b/run", optimizer="adamw")]
    main([*map(str, folders), "--out", "page.html", "--no_images"])
    *lines, written = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not compared: ") and (len(lines), written) == (1, "page.html")
    page = Path("page.html").read_text()
    assert page.count("<h2>Confusions</h2>") == 1 and page.count('class="matrix"') == 2
    assert "<td>default</td><td>adamw</td>" in page and "<th>lr</th>" not in page
    assert all(f"</i>run ({number}), training <b>" in page for number in (1, 2))  # of the same name
    assert "<img" not in page and "data:image" not in page
    main([str(folders[0])])
    assert "<img" in (folders[0] / "report.html").read_text()


@pytest.mark.full
def test_runs_are_sorted_by_their_best_values_and_their_inputs_compared(tmp_path):
    folders = []
    for name, accuracy in (("low", 0.6), ("high", 0.8), ("none", None)):
        folders.append(made_up(tmp_path / name, best_metric="accuracy"))
        log, best = folders[-1] / "log.jsonl", json.dumps(accuracy)
        text = log.read_text().replace('"accuracy": 0.75', f'"accuracy": {best}')
        log.write_text(text.replace("mean 0.5", f"mean of {name}"))
    page = page_of(folders)
    assert "<th></th><th>high</th><th>low</th><th>none</th>" in page
    values = "<td>accuracy 0.8000, update 10</td><td>accuracy 0.6000, update 10</td><td>–</td>"
    assert values in page
    assert "<th>input</th><td>mean of high</td><td>mean of low</td><td>mean of none</td>" in page


@pytest.mark.full
def test_the_page_of_few_images_says_which_differences_may_be_chance(tmp_path):
    for samples in (150, 250):
        folder = made_up(tmp_path / str(samples), samples=samples)
        low, high = read(folder / "report.json")["intervals"]["accuracy"]
        text = f"differences in accuracy below {50 * (high - low):.0f} points"
        assert (text in page_of([folder])) == (samples == 150)


@pytest.mark.full
def test_the_commands_of_the_page_run():
    page = (ROOT / "docs/evaluating.md").read_text()
    block = re.search(r"```bash\n(python -m extras\.compare.*?)```", page, re.S)[1]
    for name in ("NAME", "OTHER"):
        made_up(Path("runs") / name)
    for line in block.splitlines():
        command = shlex.split(line, comments=True)
        assert command[:3] == ["python", "-m", "extras.compare"]
        main(command[3:])
    for name in ("runs/NAME/report.html", "compare.html", "share.html"):
        assert Path(name).exists()


def test_a_run_without_an_analysis_has_a_page_with_curves(tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "report.json").unlink()
    (folder / "first_batch.png").unlink()
    page = page_of([folder])
    assert "<path" in page and "eval.py adds" in page and "<img" not in page


def test_a_thousand_classes_make_a_small_page(tmp_path):
    page = page_of([made_up(tmp_path / "run", classes=1000, samples=2000)])
    assert len(page) < 1_000_000 and re.search(r"\d{3} more classes", page)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("nowhere", "nowhere: has no log.jsonl"),
        ("cut", "cut/log.jsonl: line 3 is damaged"),
        ("list", "list/report.json: damaged"),
        ("odd", "a file of the run has unknown contents: KeyError('mine'); use the version"),
        ("a a", "--out is missing"),
    ],
)
def test_mistakes_in_the_command_are_one_line(command, error, capsys):
    made_up(Path("a")), made_up(Path("odd"), task="mine")
    lines = (made_up(Path("cut")) / "log.jsonl").read_text().splitlines(True)
    Path("cut/log.jsonl").write_text("".join([*lines[:2], "5\n", *lines[2:]]))
    (made_up(Path("list")) / "report.json").write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        main(words(command))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m extras.compare: error: {error}")


@pytest.mark.browser
def test_pages_work_in_a_browser_on_a_phone_and_on_a_screen_in_light_and_dark(inside, tmp_path):
    names = [f"a long name of class {n}" for n in range(25)]
    made = made_up(tmp_path / "made", classes=25, names=names)
    many, both = made_up(tmp_path / "many", classes=1000, samples=5000), tmp_path / "both.html"
    pages = [inside / "report.html", made / "report.html", many / "report.html", both]
    for folders, page in zip(([made], [many], [made, many]), pages[1:], strict=True):
        write_page(folders, page)
    with browser(tmp_path / "profile") as window:
        backgrounds = set()
        for page, width, scheme in itertools.product(pages, (390, 1400), ("light", "dark")):
            window.open(page, width, scheme)
            assert window.value("document.querySelectorAll('svg').length") >= 5
            fits = window.value("document.scrollingElement.scrollWidth <= innerWidth")
            assert fits and window.value("innerWidth") == width, (page, width)
            loaded = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
            assert window.value("document.images.length") and window.value(loaded)
            sent = window.named("Network.requestWillBeSent")
            urls = [event["request"]["url"] for event in sent]
            loaded = [url for url in urls if not url.startswith("data:")]
            assert loaded == [page.absolute().as_uri()]
            reported = "Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"
            assert not [event for name in reported for event in window.named(name)]
            backgrounds.add(window.value("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2
        window.open(inside / "report.html", 1400)
        style = "getComputedStyle(document.querySelector('.legend i.mark'))"
        # of the resume
        assert window.value(f"{style}.borderTopStyle + {style}.borderTopWidth") == "dashed2px"
