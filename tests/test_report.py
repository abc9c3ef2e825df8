"""report.html: its numbers, what is in it and what is not, and how it looks in a browser."""

import base64
import io
import itertools
import json
import math
import re
import shlex
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.browser import browser
from helpers.make_data import encoded
from helpers.training_runs import MLP, ROOT, records, returned, train_run, working_in
from PIL import Image
from scipy.special import expit
from sklearn.metrics import average_precision_score, confusion_matrix, f1_score, recall_score, roc_auc_score

import eval
import train
from utils.config.settings import TrainConfig, to_yaml
from utils.data.selection import load_data
from utils.data.splits import Files, Split
from utils.report.__main__ import main
from utils.report.analysis import BINS, MATRIX, _Curve, analyse, calibration, intervals
from utils.report.folder import read_run
from utils.report.page import Series, line_chart, settings_rows, write_page
from utils.report.pictures import thumbnail
from utils.report.writing import Evaluated, report_evaluation, write_report
from utils.tasks.classification import Classification
from utils.tasks.losses import LOSSES
from utils.tasks.multilabel import MultiLabel
from utils.tasks.task import Predictions

NAMES = [f"class {number}" for number in range(1000)]


def predictions(classes: int, samples: int = 500, seed: int = 0) -> Predictions:
    """Predictions that are right about half of the time."""
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=samples)
    scores = random.normal(size=(samples, classes))
    scores[np.arange(samples), labels] += 2
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    top = np.argsort(-probabilities, axis=1)[:, :5]
    losses = -np.log(probabilities[np.arange(samples), labels])
    indices = np.arange(samples) * 3  # some samples could not be read
    return Predictions(indices, labels, top, np.take_along_axis(probabilities, top, 1).astype(np.float32), losses)


# -- the numbers ------------------------------------------------------------------------------------------------------


def test_confusions_and_classes_are_those_of_scikit_learn():
    found = predictions(12)
    analysis = analyse(found, NAMES[:12], None, 0)
    expected = confusion_matrix(found.labels, found.top[:, 0], labels=range(12))
    assert analysis["matrix"] == expected.tolist() and analysis["count"] == 500
    recalls = dict(zip(NAMES, recall_score(found.labels, found.top[:, 0], average=None), strict=False))
    assert {row["name"]: row["score"] for row in analysis["classes"]} == pytest.approx(recalls)
    np.fill_diagonal(expected, 0)
    for row, after in itertools.pairwise(analysis["classes"]):
        own = expected[NAMES.index(row["name"])]
        assert row["score"] <= after["score"] and own[NAMES.index(row["mistaken_for"])] == own.max()


def test_with_many_classes_the_most_frequent_confusions_are_listed():
    classes = MATRIX + 1
    found = predictions(classes, 3000)
    analysis = analyse(found, NAMES[:classes], None, 0)
    wrong = confusion_matrix(found.labels, found.top[:, 0], labels=range(classes))
    totals = wrong.sum(1)
    np.fill_diagonal(wrong, 0)
    assert analysis["matrix"] is None
    assert [row["count"] for row in analysis["confusions"]] == sorted(wrong.ravel().tolist(), reverse=True)[:20]
    row = analysis["confusions"][0]
    true, predicted = NAMES.index(row["true"]), NAMES.index(row["predicted"])
    assert row["count"] == wrong[true, predicted] and row["share"] == row["count"] / totals[true]


def test_the_calibration_error_is_that_of_a_loop_over_bins():
    random = np.random.default_rng(0)
    confidence = np.append(random.random(700), [0.0, 1.0])
    correct = random.random(702) < confidence**2
    error = 0.0
    for low in np.arange(BINS) / BINS:
        inside = (confidence >= low) & ((confidence < low + 1 / BINS) | ((confidence == 1) & (low > 0.93)))
        error += abs(sum(correct[inside]) - sum(confidence[inside])) / 702
    found = calibration([(confidence[:300], correct[:300]), (confidence[300:], correct[300:])])
    assert found["error"] == pytest.approx(error, rel=1e-9) and error > 0.1
    assert sum(entry["count"] for entry in found["bins"]) == 702


def test_errors_are_the_most_confident_ones_with_their_place_in_the_split():
    found = predictions(10)
    errors = analyse(found, NAMES[:10], None, 0)["errors"]
    wrong = found.top[:, 0] != found.labels
    confidences = sorted(found.scores[wrong, 0].tolist(), reverse=True)
    assert [error["text"].split()[-1] for error in errors] == [f"{value:.1%}" for value in confidences[:24]]
    for error in errors:
        row = found.indices.tolist().index(error["index"])
        assert wrong[row] and error["true"] == NAMES[found.labels[row]]


def test_a_bootstrap_interval_contains_the_true_value_as_often_as_it_says():
    random, truth, covered = np.random.default_rng(1), 0.7, 0
    for seed in range(200):
        values = random.random(80) < truth
        low, high = intervals(lambda counts, v=values: {"mean": v @ counts / 80}, 80, 4000, seed)["mean"]
        covered += low <= truth <= high
    assert 0.88 < covered / 200 < 0.99  # 0.93 to 0.95 is usual for 80 samples; the seeds are fixed


def test_intervals_are_the_same_each_time_and_hold_the_metrics():
    found = predictions(10)
    first, again, other = (analyse(found, NAMES[:10], None, seed)["intervals"] for seed in (0, 0, 1))
    assert first == again != other
    values = {
        "accuracy": (found.top[:, 0] == found.labels).mean(),
        "top5": (found.top == found.labels[:, None]).any(1).mean(),
        "macro_f1": f1_score(found.labels, found.top[:, 0], average="macro"),
        "loss": found.losses.mean(),
    }
    assert first.keys() == values.keys()
    assert all(first[name][0] < value < first[name][1] for name, value in values.items())


def test_ranking_metrics_are_those_of_scikit_learn_with_ties_and_weights():
    random = np.random.default_rng(0)
    scores, truth = random.integers(20, size=300) / 20, random.random(300) < 0.3
    for counts in (np.ones(300), random.integers(4, size=300).astype(float)):
        precision, area = _Curve(scores, truth).areas(counts)
        assert precision == pytest.approx(average_precision_score(truth, scores, sample_weight=counts))
        assert area == pytest.approx(roc_auc_score(truth, scores, sample_weight=counts))
    assert np.isnan(_Curve(scores, np.zeros(300, bool)).areas(np.ones(300))).all()


def test_multilabel_and_binary_have_scores_of_each_class_and_the_calibration_of_all_probabilities():
    random = np.random.default_rng(0)
    truth = (random.random((200, 4)) < 0.4).astype(np.uint8)
    # Of many of these logits the probability is 0 or 1 in float32.
    scores = (100 * (truth * 0.3 + random.random((200, 4)) * 0.7 - 0.5)).astype(np.float32)
    found = Predictions(np.arange(200), truth, np.zeros((200, 0), int), scores, scores.sum(1))
    analysis = analyse(found, NAMES[:4], -3.0, 0)
    for row in analysis["classes"]:
        own, values = truth[:, NAMES.index(row["name"])], scores[:, NAMES.index(row["name"])]
        assert row["score"] == pytest.approx(average_precision_score(own, values)) and row["count"] == own.sum()
        assert row["auc"] == pytest.approx(roc_auc_score(own, values))
    assert analysis["intervals"].keys() == {"mAP", "micro_f1", "exact_match", "loss"}
    low, high = analysis["intervals"]["micro_f1"]
    assert low < f1_score(truth, scores > -3, average="micro") < high
    chances = expit(scores.astype(float))
    error = calibration([(chances.ravel(), truth.ravel())])["error"]
    assert analysis["calibration"]["error"] == pytest.approx(error)
    most = (np.abs(chances - truth) * ((scores > -3) != truth)).max(1)
    assert most[analysis["errors"][0]["index"]] == most.max()
    binary = Predictions(np.arange(200), truth[:, 0].astype(int), found.top[:, :1], scores[:, :1], scores[:, 0])
    analysis = analyse(binary, ["no", "yes"], 0.0, 0)
    assert [row["name"] for row in analysis["classes"]] == ["yes"]
    assert analysis["intervals"].keys() == {"auc", "accuracy", "f1", "loss"}
    low, high = analysis["intervals"]["auc"]
    assert low < roc_auc_score(truth[:, 0], scores[:, 0]) < high


@pytest.mark.filterwarnings("error")
def test_nan_infinite_losses_and_undefined_metrics_make_an_analysis_in_json():
    found = predictions(10)
    found.scores[7], found.losses[8], found.losses[9] = np.nan, np.inf, np.nan
    analysis = analyse(found, NAMES[:10], None, 0)
    assert analysis["intervals"].keys() == {"accuracy", "top5", "macro_f1"}
    assert sum(entry["count"] for entry in analysis["calibration"]["bins"]) == 499
    always = np.array([[1, 0], [1, 1], [1, 0]], np.uint8)  # no image is without the first class
    logits = np.array([[0.5, np.nan], [-0.5, np.inf], [0.1, -np.inf]], np.float32)
    others = analyse(Predictions(np.arange(3), always, np.zeros((3, 0), int), logits, np.ones(3)), ["a", "b"], 0.0, 0)
    assert {row["name"]: row["auc"] for row in others["classes"]} == {"a": None, "b": 1.0}
    json.dumps([analysis, others], allow_nan=False)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_predictions_have_the_loss_and_the_most_likely_classes_of_each_sample(loss):
    task = Classification(TrainConfig(loss=loss), NAMES[:7])
    outputs, labels = torch.randn(9, 7, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 7
    expected, order = outputs.double().softmax(1).sort(descending=True)
    top, probabilities = task.most_likely(outputs, 5)
    assert torch.equal(top, order[:, :5])
    assert probabilities.tolist() == [pytest.approx(row, rel=1e-5) for row in expected[:, :5].tolist()]
    each = [LOSSES[loss](outputs[n : n + 1], labels[n : n + 1], 0.0, None).item() for n in range(9)]
    assert task.losses(outputs, labels).tolist() == pytest.approx(each, rel=1e-5)
    assert [len(part) for part in (*task.most_likely(outputs[:0], 5), task.losses(outputs[:0], labels[:0]))] == [0] * 3


def test_a_loss_that_cannot_be_vectorised_is_computed_row_by_row():
    class Branching(MultiLabel):
        def evaluate(self, outputs, labels):
            return torch.stack([outputs.sum() if outputs.sum() > 0 else -outputs.sum()]), outputs

    outputs = torch.tensor([[1.0, 2.0], [-1.0, -3.0]])
    assert Branching(TrainConfig(task="multilabel"), ["a", "b"]).losses(outputs, outputs).tolist() == [3, 4]


def test_a_chart_has_each_point_at_its_place_and_leaves_infinite_ones_out():
    chart = line_chart("accuracy", [Series("a", "c0 eval", [(0, 0.0), (50, float("inf")), (100, 1.0)])], [50])
    assert chart["lines"][0]["path"] == "M52.0 224.0L468.0 10.0"
    assert chart["marks"] == [(260.0, 50)] and chart["lines"][0]["last"] == "1"
    assert [text for _, text in chart["rows"]] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert line_chart("loss", [Series("a", "c0", [])]) == {}
    many = line_chart("loss", [Series("a", "c0", [(x, x) for x in range(25_000)])])["lines"][0]
    assert many["path"].count("L") <= 1001 and many["last"] == "24,999"
    for last, title in ((0.1, "loss"), (0.01, "loss (logarithmic)")):
        assert line_chart("loss", [Series("a", "c0 eval", [(0, 1.0), (1, last)])])["title"] == title
    for title, lowest in (("images/s", "0"), ("accuracy", "0.8")):  # rates start at 0
        assert line_chart(title, [Series("a", "c0", [(0, 0.8), (1, 0.9)])])["rows"][0][1] == lowest


# -- the page of a run ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that was continued, evaluations of it on one and on two processes, and one without a page."""
    folder = tmp_path_factory.mktemp("report") / "secret-place"
    with working_in(folder):
        flags = [*MLP, "--report", "true", "--eval_batch_size", "50"]
        train_run(2, "run", *flags, "--max_steps", "8", "--flip", "true")
        Path("first.json").write_bytes(Path("runs/run/report.json").read_bytes())
        train_run(1, "run", *flags, "--max_steps", "12", "--resume", "auto")
        Path("last.json").write_bytes(Path("runs/run/report.json").read_bytes())
        for processes in (1, 2):
            returned(processes, eval.main, ["--ckpt", "runs/run", "--json", f"eval{processes}.json"])
            Path(f"report{processes}.json").write_bytes(Path("runs/run/report.json").read_bytes())
        train_run(1, "none", *MLP, "--max_steps", "2")
        returned(1, eval.main, ["--ckpt", "runs/none"])
    return folder


@pytest.fixture
def inside(runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setenv("HOME", str(runs / "home"))
    return Path("runs/run")


def test_the_page_has_the_last_evaluation_of_the_log_with_intervals(inside):
    for file, step in (("first.json", 8), ("last.json", 12)):
        analysis = json.loads(Path(file).read_text())
        last = [record for record in records("run", "eval") if record["step"] == step][-1]
        names = ("accuracy", "top5", "loss", "count", "step")
        assert [analysis["record"][name] for name in names] == [last[name] for name in names]
        for name in ("accuracy", "loss"):
            assert analysis["intervals"][name][0] <= last[name] <= analysis["intervals"][name][1]
        matrix = np.array(analysis["matrix"])
        assert matrix.sum() == 180 and matrix.trace() / 180 == pytest.approx(last["accuracy"])


def test_an_evaluation_writes_the_page_again_with_the_same_numbers_on_two_processes(inside):
    one, two = (json.loads(Path(f"report{processes}.json").read_text()) for processes in (1, 2))
    result = json.loads(Path("eval1.json").read_text())
    assert one["matrix"] == two["matrix"] and one["record"]["accuracy"] == result["accuracy"]
    scores = {row["name"]: row["score"] for row in one["classes"]}
    assert [scores[str(number)] for number in range(10)] == pytest.approx(result["per_class_accuracy"])
    for name, bounds in one["intervals"].items():
        assert two["intervals"][name] == pytest.approx(bounds, rel=1e-5)
    assert one["calibration"]["error"] == pytest.approx(two["calibration"]["error"], abs=1e-5)
    page = (inside / "report.html").read_text()
    assert f"{result['accuracy']:.4f}" in page and f"{result['macro_f1']:.4f}" in page


def test_each_error_in_the_gallery_is_an_image_of_the_split_that_the_weights_get_wrong(inside):
    analysis = json.loads(Path("last.json").read_text())
    split = load_data(TrainConfig(max_train_samples=480, cache_dir="cache")).evaluation
    assert analysis["errors"]
    for error in analysis["errors"]:
        uri = error["image"].removeprefix("data:image/png;base64,")
        image = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))[..., 0]
        assert np.array_equal(image, split.images[int(split.rows[error["index"]])])
        assert error["true"] == str(split.labels[error["index"]]) != error["text"].split()[0]


def test_the_page_shows_settings_starts_versions_and_marks_the_resume(inside):
    page, run = (inside / "report.html").read_text(), read_run(inside)
    assert run["settings"]["flip"] == "true" and not run["settings"].keys() & {"seed", "output_dir", "cache_dir"}
    assert [start["step"] for start in run["start"]] == [0, 8]
    assert page.count("<title>resumed from update 8</title>") == page.count('<svg viewBox="0 0 480')
    assert f"torch {torch.__version__}" in page
    assert "processes 2, batch 60 x 2 x 1 = 120, cpu, threads 1, precision no" in page
    assert page.count("data:image/") == len(run["errors"]) + 1


def test_the_page_names_no_host_and_no_absolute_path(inside):
    for file in (inside / "report.html", inside / "report.json"):
        text = file.read_text()
        assert socket.gethostname() not in re.sub(r"base64,[\w+/=]+", "", text)
        assert "secret-place" not in text and "/tmp" not in text and str(Path.home()) not in text
    assert not list(Path("runs/none").glob("report.*"))  # --report false, in training and evaluation


def test_an_error_of_the_page_is_a_warning_and_the_run_ends_well(inside, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr("utils.report.writing.write_page", fail)
    returned(1, train.main, ["--run_name", "unlucky", *MLP, "--report", "true", "--max_steps", "2"])
    assert not Path("runs/unlucky/report.html").exists() and Path("runs/unlucky/checkpoints/latest").exists()


# -- pages of made-up runs ------------------------------------------------------------------------------------------


PIXEL = "data:image/png;base64," + base64.b64encode(encoded(np.zeros((12, 20, 3), np.uint8), "PNG")).decode()


def made_up(folder: Path, classes: int = 10, names: list[str] | None = None, samples: int = 500, **settings) -> Path:
    """A run folder with a log, an analysis and a first batch."""
    folder.mkdir(parents=True)
    config = TrainConfig(data="/home/someone/flowers", lr=0.1, **settings)
    (folder / "config.yaml").write_text(to_yaml(config))
    start = {"kind": "start", "step": 0, "processes": 2, "batch_size": 64, "grad_accum": 1, "global_batch_size": 128}
    start |= {"threads": 1, "precision": "no", "device": "cpu", "input": "mean 0.5", "time": 0}
    start |= {"versions": {"torch": "2.0", "commit": "abcdef" * 7}}
    log = [start, start | {"step": 40}]
    for step in range(10, 110, 10):
        own = {"step": step, "epoch": 1, "loss": 100 / step**2, "seconds": step}
        log.append(own | {"kind": "train", "accuracy": 0.6, "lr": 0.1, "images_per_second": 9.0, "data_wait": 0.01})
        for weights, accuracy in (("raw", 0.5), ("ema", 0.75)):
            log.append(own | {"kind": "eval", "weights": weights, "accuracy": accuracy, "split": "test", "count": 5})
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log) + '{"kind": "tra')
    analysis = analyse(predictions(classes, samples), names or NAMES[:classes], None, 0)
    for error in analysis["errors"]:
        error |= {"image": PIXEL, "small": True, "file": "a/b.png"}
    (folder / "report.json").write_text(json.dumps({"record": {"accuracy": 0.5, "loss": 1.0, "step": 100}, **analysis}))
    Image.new("RGB", (1500, 400), "blue").save(folder / "first_batch.png")
    return folder


def test_names_are_escaped(tmp_path):
    names = ["<script>alert(1)</script>", "d\udcffg", *NAMES[:8]]
    folders = [made_up(tmp_path / name, names=names) for name in ("<i>run", "<b>")]
    for chosen in (folders[:1], folders):
        write_page(chosen, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert "<script" not in page and "<i>run" not in page
        assert "&lt;script&gt;alert(1)" in page and "<td>d\\udcffg</td>" in page


def test_the_analysis_of_a_training_that_went_on_is_not_shown_and_that_of_eval_py_is(tmp_path):
    folder = made_up(tmp_path / "run")
    analysis = json.loads((folder / "report.json").read_text())
    assert read_run(folder)["analysis"] == analysis
    for record, shown in (({"step": 40}, False), ({"step": 40, "checkpoint": "step-40"}, True)):
        (folder / "report.json").write_text(json.dumps({**analysis, "record": record}))
        run = read_run(folder)
        assert bool(run["analysis"]) == shown and run["evaluation"]["step"] == (40 if shown else 100)


def test_the_page_says_which_weights_and_views_were_evaluated_and_shows_a_dash_for_an_infinite_loss(tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "report.json").unlink()
    record = {"step": 100, "accuracy": 0.5, "loss": math.inf, "averaged": [80, 100], "tta": "flip"}
    split = Split("val", np.zeros((507, 4, 4), np.uint8), predictions(10).labels, np.arange(500) + 7, "")
    found = predictions(10)._replace(indices=np.arange(500))
    task = Classification(TrainConfig(), NAMES[:10])
    said = []
    write_report(folder, Evaluated(task, split, found, record, 0), said.append)
    page, analysis = (folder / "report.html").read_text(), json.loads((folder / "report.json").read_text())
    assert not said and "update 100, mean of 2 checkpoints, views flip</td>" in page
    assert '<th>loss</th><td class="number">–</td>' in page
    assert all(error["file"] == f"image {error['index'] + 7} of split 'val'" for error in analysis["errors"])


def test_an_image_that_is_gone_costs_only_its_picture(tmp_path):
    folder = made_up(tmp_path / "run")
    split = Split("val", Files([str(tmp_path / "gone.png")], str(tmp_path)), np.zeros(1), np.zeros(1, int), "")
    analysis = json.loads((folder / "report.json").read_text())
    analysis["errors"][0] |= thumbnail(split, 0)
    (folder / "report.json").write_text(json.dumps(analysis))
    write_page([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    assert page.count("<img") == len(analysis["errors"]) and "gone.png" in page  # one is the first batch


def test_report_true_says_so_if_the_checkpoint_is_in_no_run_folder(tmp_path):
    said = []
    for asked in (False, True):
        report_evaluation(tmp_path / "step-3", None, asked, said.append)
    assert said == [f"--report has no effect: {tmp_path / 'step-3'} is not in a run folder"]


def test_raw_and_averaged_weights_have_lines_of_their_own(tmp_path):
    write_page([made_up(tmp_path / "run")], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("</i>evaluation raw <b>") == page.count("</i>evaluation ema <b>") == 2  # loss and accuracy
    line = r'<i class="(c\d \w+)"></i>evaluation (\w+) <b>([\d.]+)'
    (raw, *first), (ema, *second) = re.findall(line, page[page.index("accuracy over") :])
    assert (first, second) == (["raw", "0.5"], ["ema", "0.75"]) and raw != ema and raw.endswith(" raw")
    assert "flowers" in page and "someone" not in page


def test_several_runs_are_compared_on_one_page(tmp_path, capsys):
    folders = [made_up(tmp_path / "a/run"), made_up(tmp_path / "b/run", optimizer="adamw")]
    main([*map(str, folders), "--out", str(tmp_path / "page.html"), "--no_images"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<td>default</td><td>adamw</td>" in page and "<th>lr</th>" not in page
    assert all(f"</i>run ({number}), training <b>" in page for number in (1, 2))  # of the same name
    assert "<img" not in page and "data:image" not in page
    main([str(folders[0])])
    assert "<img" in (folders[0] / "report.html").read_text()


def test_a_saved_value_that_means_the_same_as_the_default_is_no_difference(tmp_path):
    settings = {"grad_accum": 1}, {}, {"task": "classification"}, {"grad_accum": 2}
    runs = [read_run(made_up(tmp_path / str(number), **own)) for number, own in enumerate(settings)]
    assert settings_rows(runs[:3]) == []
    assert settings_rows(runs) == [("grad_accum", [*["default"] * 3, "2"])]


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    block = re.search(r"```bash\n(.*?)```", (ROOT / "docs/report.md").read_text(), re.S)[1]
    monkeypatch.chdir(tmp_path)
    for name in ("NAME", "OTHER"):
        made_up(Path("runs") / name)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:3] == ["python", "-m", "utils.report"]
        main(words[3:])
    assert all(Path(name).exists() for name in ("runs/NAME/report.html", "compare.html", "share.html"))


def test_a_run_without_an_analysis_has_a_page_with_curves(tmp_path):
    folder = made_up(tmp_path / "run")
    (folder / "report.json").unlink()
    (folder / "first_batch.png").unlink()
    write_page([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<path" in page and "eval.py adds" in page and "<img" not in page


def test_a_thousand_classes_make_a_small_page(tmp_path):
    write_page([made_up(tmp_path / "run", classes=1000, samples=10_000)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 1_000_000 and "980 more classes" in page


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere: is not a run folder"),
        (["a", "a"], "--out is missing"),
        (["a", "--out", "no/page.html"], "/no does not exist"),
        (["old"], r"unknown contents \(UndefinedError: .*'threads'\)"),
    ],
)
def test_mistakes_in_the_command_are_one_line(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made_up(Path("a"))
    log = made_up(Path("old")) / "log.jsonl"
    log.write_text(log.read_text().replace("threads", "workers"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.search(f"^python -m utils.report: error: .*{error}", lines[-1])


@pytest.mark.browser
def test_pages_work_in_a_browser_on_a_phone_and_on_a_screen_in_light_and_dark(inside, tmp_path):
    made = made_up(tmp_path / "made", classes=25, names=[f"a long name of class {n}" for n in range(25)])
    many, both = made_up(tmp_path / "many", classes=1000, samples=5000), tmp_path / "both.html"
    pages = [inside / "report.html", made / "report.html", many / "report.html", both]
    write_page([made], pages[1])
    write_page([many], pages[2])
    write_page([made, many], both)
    with browser(tmp_path / "profile") as window:
        backgrounds = set()
        for page, width, scheme in itertools.product(pages, (390, 1400), ("light", "dark")):
            window.open(page, width, scheme)
            assert window.value("document.querySelectorAll('svg').length") >= 5
            assert window.value("document.scrollingElement.scrollWidth <= innerWidth"), (page, width)
            assert window.value("innerWidth") == width
            loaded = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
            assert window.value("document.images.length") and window.value(loaded)
            requests = [event["request"]["url"] for event in window.named("Network.requestWillBeSent")]
            assert [url for url in requests if not url.startswith("data:")] == [page.absolute().as_uri()]
            reported = "Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"
            assert not [event for name in reported for event in window.named(name)]
            backgrounds.add(window.value("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2
        window.open(inside / "report.html", 1400)
        style = "getComputedStyle(document.querySelector('.legend i.mark'))"
        assert window.value(f"{style}.borderTopStyle + {style}.borderTopWidth") == "dashed2px"  # of the resume
