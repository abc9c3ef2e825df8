"""predict.py and eval.py --predictions: each image once, the same bytes on any topology."""

import base64
import csv
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.make_data import encoded, image_folder, pictures
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    ROOT,
    full,
    kill_myself,
    refused,
    train_run,
    weights,
    words,
    working_in,
)
from PIL import Image
from pyarrow import parquet
from torch.nn import functional as F

import eval
import predict
from extras.images import find_images
from extras.page.html import gallery
from extras.page.predictions import Row, encode
from utils.config.cli import parse_args
from utils.data.decode import LARGE
from utils.errors import UserError
from utils.runs.manifest import find_checkpoint
from utils.runs.metadata import read_checkpoint
from utils.settings.scripts import PredictConfig
from utils.settings.train import TrainConfig
from utils.tasks.table import make_task
from utils.tasks.task import Task

FLAGS = shlex.split("--model mlp --threads 1 --global_batch_size 12 --lr 0.1 --max_steps 3")
FLAGS += ["--model_args", "{hidden: 8}", *shlex.split("--eval_batch_size 4 --num_workers 0")]
QUICK = shlex.split("--threads 1 --num_workers 0")
CLASSES = ["=cat", "dög", "emu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs on small images, on photographs, and of the other tasks."""
    folder = tmp_path_factory.mktemp("predict")
    with working_in(folder):
        for split, each in (("train", 12), ("val", 11)):
            image_folder(f"small/{split}", dict.fromkeys(CLASSES, each), seed=each)
            classes = dict.fromkeys(["cat", "dog"], each)
            image_folder(f"photos/{split}", classes, (130, 160), "jpeg", seed=each)
        for number, path in enumerate(sorted(Path("small").rglob("*.png"))):
            names = "|".join(name for bit, name in enumerate("abc") if number >> bit & 1)
            for table, label in (("list", names), ("pairs", ["no", "yes"][number % 2])):
                with Path(f"{table}.csv").open("a") as file:
                    file.write("" if number else "path,label,split\n")
                    file.write(f"{path},{label},{'train' if number % 3 else 'test'}\n")
        train_run(1, "small", "--data", "small", *FLAGS)
        train_run(1, "photos", "--data", "photos", "--image_size", "100", *FLAGS)
        more = shlex.split("--task multilabel --threshold 0.45")
        train_run(1, "multilabel", "--data", "list.csv", *FLAGS, *more)
        train_run(1, "binary", "--data", "pairs.csv", *FLAGS, "--task", "binary")
    return folder


@pytest.fixture(autouse=True)
def work(trained):
    """A copy of the runs and of their data."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)


def logits_of(run: str, pixels: np.ndarray) -> torch.Tensor:
    """The outputs of a run's model in plain PyTorch, of uint8 [n, H, W, C]."""
    spec, w = read_checkpoint(find_checkpoint(Path("runs", run))).spec, weights(run)
    mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
    x = ((torch.tensor(pixels).float() / 255 - mean) / std).permute(0, 3, 1, 2).flatten(1)
    hidden = torch.relu(x @ w["hidden.weight"].T + w["hidden.bias"])
    return hidden @ w["output.weight"].T + w["output.bias"]


def read_csv(path: str) -> list[dict]:
    return list(csv.DictReader(io.StringIO(Path(path).read_text())))


def evaluated(processes: int, run: str, *flags: str) -> dict:
    return returned(processes, eval.main, ["--ckpt", f"runs/{run}", *QUICK, *flags])[0]


def predicted(processes: int, run: str, *flags: str) -> dict:
    return returned(processes, predict.main, ["--ckpt", f"runs/{run}", *QUICK, *flags])[0]


def test_predictions_of_a_split_are_those_of_plain_pytorch_in_its_order():
    record = evaluated(2, "small", "--predictions", "found.csv")
    rows, paths = read_csv("found.csv"), sorted(Path("small/val").rglob("*.png"))
    # A spreadsheet would run what begins with an equals sign.
    assert [row["path"] for row in rows] == [str(path.relative_to("small")) for path in paths]
    logits = logits_of("small", np.stack([np.asarray(Image.open(path)) for path in paths]))
    probabilities, order = logits.double().softmax(1).sort(descending=True)
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in paths])
    losses = F.cross_entropy(logits, labels, reduction="none")
    shown = ["'=cat", *CLASSES[1:]]
    for number, row in enumerate(rows):
        names = [shown[index] for index in order[number]]
        assert (row["label"], row["predicted"]) == (shown[labels[number]], names[0])
        assert [row[f"class_{place}"] for place in (1, 2, 3)] == names
        found = [float(row[f"probability_{place}"]) for place in (1, 2, 3)]
        assert found == pytest.approx(probabilities[number].tolist(), rel=2e-5)
        assert float(row["loss"]) == pytest.approx(losses[number].item(), rel=2e-5)
    assert np.mean([float(row["loss"]) for row in rows]) == pytest.approx(record["loss"], rel=1e-5)
    assert np.mean([row["label"] == row["predicted"] for row in rows]) == record["accuracy"]


@pytest.mark.full
def test_eval_py_writes_the_same_bytes_on_one_to_three_processes():
    for processes in (1, 3):
        evaluated(processes, "multilabel", "--predictions", f"{processes}.csv")
    assert Path("3.csv").read_bytes() == Path("1.csv").read_bytes()
    evaluated(2, "multilabel", "--predictions", "2.parquet")
    found, rows = parquet.read_table("2.parquet").to_pydict(), read_csv("1.csv")
    assert found["path"] == [row["path"] for row in rows]
    assert found["loss"] == [float(row["loss"]) for row in rows]
    assert found["predicted"] == [json.loads(row["predicted"]) for row in rows]


@pytest.mark.full
def test_a_subset_of_an_array_is_named_by_its_indices_in_the_whole_split():
    train_run(1, "digits", *FLAGS)
    for processes in (1, 2):
        files = ["--predictions", f"{processes}.parquet", "--max_eval_samples", "9"]
        evaluated(processes, "digits", *files)
    found = parquet.read_table("1.parquet").to_pydict()
    assert Path("1.parquet").read_bytes() == Path("2.parquet").read_bytes()
    assert len({*found["index"]}) == 9 and found["index"] == sorted(found["index"])
    assert found["index"][-1] > 9


@pytest.mark.full
def test_the_other_tasks_have_the_sets_and_probabilities_of_their_definition():
    for run, names, threshold in (("multilabel", "abc", 0.45), ("binary", ["no", "yes"], 0.5)):
        record = evaluated(2, run, "--predictions", f"{run}.json")
        shown = json.loads(Path(f"runs/{run}/report.json").read_text())  # what the page shows
        low, high = shown["intervals"]["loss"]
        assert low < record["loss"] < high
        rows = json.loads(Path(f"{run}.json").read_text())
        pixels = np.stack([np.asarray(Image.open(row["path"])) for row in rows])
        above = logits_of(run, pixels).double().sigmoid().numpy()
        every = np.concatenate([1 - above, above], 1) if run == "binary" else above
        for row, own in zip(rows, every, strict=True):
            order, places = np.argsort(-own), range(1, len(names) + 1)
            assert [row[f"class_{place}"] for place in places] == [names[index] for index in order]
            found = [row[f"probability_{place}"] for place in places]
            assert found == pytest.approx(own[order].tolist(), rel=2e-5)
            chosen = [name for name, p in zip(names, own, strict=True) if p > threshold]
            assert row["predicted"] == (chosen if run == "multilabel" else chosen[0])
            assert isinstance(row["label"], list) == (run == "multilabel")
        assert len({str(row["predicted"]) for row in rows}) > 1 or run == "binary"


@pytest.mark.full
@pytest.mark.parametrize("run", ["small", "photos"])
def test_predict_py_has_the_numbers_of_eval_py_for_the_same_images(run):
    # of another size, so that they are resized, and one large enough to be decoded at half its size
    if run == "small":
        shutil.rmtree("small/val")
        image_folder("small/val", dict.fromkeys(CLASSES, 5), (300, 333), "jpeg")
        large = Path("small/val/emu/005.jpeg")
        large.write_bytes(encoded(pictures(1, (900, 900))[0], "JPEG"))
        assert Path("small/val/emu/000.jpeg").stat().st_size < LARGE < large.stat().st_size
    data = str(Path(run).absolute())
    record = evaluated(1, run, "--data", data, "--predictions", "evaluated.csv")
    predicted(2, run, f"{run}/val", "--out", "predicted.csv")
    rows, expected = read_csv("predicted.csv"), read_csv("evaluated.csv")
    assert len(rows) == record["count"] and not any(row.pop("error") for row in rows)
    for row, own in zip(rows, expected, strict=True):
        assert row.pop("path") == f"{run}/{own.pop('path')}"
        assert row == {name: value for name, value in own.items() if name not in ("label", "loss")}


def _evaluate_on_a_full_disk(flags: list[str]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1200, 1200))
    eval.main(flags)


def test_the_results_are_printed_even_if_the_predictions_cannot_be_written():
    files = shlex.split("--predictions x.csv --json x.json --report false")
    flags = ["--ckpt", "runs/photos", *QUICK, *files]
    (outcome,) = run_ranks(1, _evaluate_on_a_full_disk, flags)
    assert outcome.code == 2 and "x.csv: File too large" in outcome.err
    assert re.search(r"^accuracy +[01]\.\d{4}$", outcome.out, re.M) and Path("x.json").exists()


def test_predict_py_writes_the_same_bytes_on_one_to_three_processes():
    paths = sorted(Path("photos/val").rglob("*.jpeg"))
    paths[2].write_bytes(b"no image")
    paths[13].write_bytes(paths[13].read_bytes()[:500])  # it ends early
    for processes in (1, 2, 3):  # 22 images in blocks of 2: three processes have 4, 4 and 3 blocks
        flags = f"--eval_batch_size 2 --tta flip --out {processes}.csv --html {processes}.html"
        assert predicted(processes, "photos", "photos/val", *flags.split())["count"] == 22
        for kind in ("csv", "html"):
            assert Path(f"{processes}.{kind}").read_bytes() == Path(f"1.{kind}").read_bytes()
    rows = read_csv("1.csv")
    assert [number for number, row in enumerate(rows) if row["error"]] == [2, 13]
    assert all((row["predicted"] == "") == (row["error"] != "") for row in rows)


def test_all_kinds_of_images_are_predicted_and_others_have_a_row_with_the_reason():
    Path("odd/ünter").mkdir(parents=True)
    (colour,), (grey,) = pictures(1, seed=5), pictures(1, channels=1, seed=6)
    good = {
        "odd/=1+2.png": (encoded(colour, "PNG"), colour),
        "odd/a,b\"c'\nd.png": (encoded(grey, "PNG"), np.dstack([grey] * 3)),
        "odd/ünter/日本.webp": (encoded(colour, "WEBP", lossless=True), colour),
        # not listed in folders
        "odd/given <i>.gif": (encoded(grey, "GIF"), np.dstack([grey] * 3)),
        os.fsdecode(b"odd/\xff.png"): (encoded(colour, "PNG"), colour),
    }
    for name, (data, _) in good.items():
        Path(name).write_bytes(data)
    Path("odd/text  two.jpg").write_text("not an image")
    Path("odd/link.png").symlink_to("nowhere")
    os.mkfifo("odd/pipe.png")
    Path("odd/.hidden.png").touch()
    flags = ["--ckpt", "runs/small", *QUICK, "odd", "odd/given <i>.gif", "--out", "odd.json"]
    (outcome,) = run_ranks(1, predict.main, flags)
    assert outcome.code == 0, outcome.err
    assert "3 of 8 images" in outcome.out
    assert "unsupported types are left out: .gif (1)" in outcome.out
    rows = {row["path"]: row for row in json.loads(Path("odd.json").read_text())}
    errors = [row["error"] for row in rows.values() if row["error"]]
    # in their names' order
    reasons = "No such file or directory", "not a regular file", "cannot identify image file"
    assert all(map(str.startswith, errors, reasons))
    for path, (_, pixels) in good.items():
        row = rows[path.replace("\udcff", "\\udcff")]
        expected, best = logits_of("small", pixels[None]).softmax(1).max(1)
        assert row["predicted"] == CLASSES[best]
        assert row["probability_1"] == pytest.approx(expected.item(), rel=2e-5)


def test_predictions_without_a_readable_image_are_written_and_end_with_a_line():
    Path("bad").mkdir()
    for number in range(5):
        Path(f"bad/{number}.png").write_text("not an image")
    flags = ["--ckpt", "runs/small", *QUICK, *shlex.split("--eval_batch_size 2 bad --out bad.csv")]
    line = refused(predict.main, *flags, processes=2)
    assert line.startswith("predict.py: error: none of the 5 images can be read (")
    assert sum(bool(row["error"]) for row in read_csv("bad.csv")) == 5


def test_files_folders_and_patterns_are_found_in_their_order_and_each_once():
    names = ["small/val/emu/004.png", "small/val/dög"]
    given = [*names, "small/val/*/00[12].png", "small/val/emu/004.png"]
    emu, *rest = find_images(given).images.paths
    assert emu == names[0] and rest[:11] == [f"small/val/dög/{n:03}.png" for n in range(11)]
    assert rest[11:] == [f"small/val/{name}/{n:03}.png" for name in ("=cat", "emu") for n in (1, 2)]
    assert len(find_images(["**/val/**/00*.png"])) == 30
    Path("a[1].png").touch()
    assert find_images(["a[1].png"]).images.paths == ["a[1].png"]  # a name, not a pattern
    Path("none").mkdir()
    Path("phone").mkdir()
    Path("phone/one.GIF").touch()
    for given, text in (
        ("gone.png", "no such file"),
        ("none", "no images"),
        ("none/*", "no such file"),
        ("phone", "no images; phone: files of unsupported types are left out: .gif (1)"),
    ):
        with pytest.raises(UserError, match=re.escape(f"{given}: {text}")):
            find_images([given])


def test_words_that_are_no_flags_are_paths():
    for given, paths in (
        ("a --cpu b --top 3 c", ["a", "b", "c"]),
        ("a --out=x.csv null 1 [a] k:v", ["a", "null", "1", "[a]", "k:v"]),
        ("--threads 1 -- -a --top", ["-a", "--top"]),
    ):
        flags = ["--ckpt", "runs/small", *given.split()]
        assert parse_args(PredictConfig, "predict.py", flags).paths == paths


def test_wrong_commands_of_predict_py_and_predictions_are_one_line():
    for main, flags, text in (
        (predict.main, "", "PATH is missing"),
        (predict.main, "small --out x.txt", "--out x.txt: must end in .csv, .json, .parquet"),
        (predict.main, "small --out x.csv --html y.csv", "--html y.csv: must end in .html"),
        (eval.main, "--json x.json --predictions x.json", "is part of --predictions x.json"),
        (eval.main, "--predictions gone/x.csv", "gone does not exist"),
    ):
        assert text in refused(main, "--ckpt", "runs/small", *flags.split())


def test_the_table_on_the_terminal_shows_the_first_images_and_counts_all():
    flags = "--ckpt runs/small --threads 1 --top 2 --threshold 0.9 small/val"
    (outcome,) = run_ranks(1, predict.main, flags.split())
    assert "--threshold has no effect" in outcome.out
    lines = [line for line in outcome.out.splitlines() if line.startswith("small/val/")]
    assert len(lines) == 20 and all(line.count(",") == 1 for line in lines)
    assert any(line.split() == ["...", "13", "more"] for line in outcome.out.splitlines())


def test_cells_that_a_spreadsheet_would_run_are_texts_and_numbers_stay_numbers():
    quoted = ["=1+2", "+cmd", "-x.png", "@a", "\tb", "\n=c"]
    cells = [*quoted, "-1", "+2.5e3", "a=b", 'q"q', "x,y", "ü\nz", "a\r=b", None]
    given = [{"path": cell, "probability_1": 0.5, "error": None} for cell in cells]
    rows = list(csv.DictReader(io.StringIO(encode(given, Path("x.csv")).decode(), newline="")))
    shown = [*(f"'{cell}" for cell in quoted), *cells[len(quoted) : -1], ""]
    assert [row["path"] for row in rows] == shown
    assert json.loads(encode(given, Path("x.json"))) == given
    table = parquet.read_table(io.BytesIO(encode(given, Path("x.parquet"))))
    assert table.to_pylist() == given
    assert str(table.schema.types[1]) == "double"


def test_the_most_likely_class_is_that_of_the_outputs_where_probabilities_are_equal():
    larger = float(np.nextafter(np.float32(0.1), np.float32(1)))
    outputs = torch.tensor([[0.1, larger, -90.0], [larger, 0.1, -90.0]])
    task = task_of("classification")
    top, probabilities = task.most_likely(outputs, 5)
    assert probabilities[0, 0] == probabilities[0, 1]
    assert top[:, 0].tolist() == task.evaluate(outputs, torch.tensor([0, 0]))[1].tolist() == [1, 0]


def task_of(name: str, **settings) -> Task:
    return make_task(TrainConfig(task=name, **settings), ["a", "b", "c"])[1]


def test_the_command_of_the_page_predicts_on_two_processes():
    page = (ROOT / "docs/evaluating.md").read_text()
    (command,) = re.findall(r"^accelerate launch .* (predict\.py .*)$", page, re.M)
    shutil.copytree("runs/photos", "runs/NAME")
    returned(2, predict.main, command.split()[1:])
    assert len(read_csv("predictions.csv")) == 22


def test_the_page_holds_its_images_loads_nothing_and_shows_names_as_text():
    image_folder("odd", {"<script>x": 2}, (300, 500), "jpeg")
    rows = [Row("<b>&", [("<b>&", 0.75), ("c", 0.25)]), Row(None, [], "it <is> broken")]
    html = gallery("A <title>", rows, find_images(["odd"]))
    (image,) = re.findall('<img[^>]*src="data:image/jpeg;base64,([^"]*)"', html)
    assert Image.open(io.BytesIO(base64.b64decode(image))).size == (192, 115)
    words = set(re.split(r"\s*<[^>]*>\s*", html))
    assert {"&lt;b&gt;&amp;", "0.7500", "0.2500", "it &lt;is&gt; broken"} <= words
    assert "2 images, 1 of them cannot be read" in words and "&lt;script&gt;x/000.jpeg" in html
    assert not re.search("<(script|b|is)", html.replace("<body", ""))
    assert "http" not in html.replace("http-equiv", "") and "prefers-color-scheme: dark" in html


def _stop_at(main, place: str, number: int, flags: list[str]) -> None:
    """Run a script that gets a signal when it calls this function, on each rank that calls it."""
    script = {predict.main: predict, eval.main: eval}[main]
    function = getattr(script, place)

    def stopped(*given, **named):
        kill_myself(number)
        return function(*given, **named)

    setattr(script, place, stopped)
    main(flags)


STOPS = [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
PLACES = [(predict.main, "load_images"), (predict.main, "check_finite")]
PLACES += [(eval.main, "make_eval_loader"), (eval.main, "check_finite")]


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), STOPS)
@pytest.mark.parametrize(("main", "place"), [PLACES[1], *(full(*each) for each in PLACES[::2])])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_that_is_stopped_says_so_on_one_line_and_writes_nothing(
    processes, main, place, number, code
):
    page = Path("runs/photos/report.html").stat()
    files = ["photos/val", "--out", "x.csv", "--html", "x.html", "--num_workers", "2"]
    files = files if main is predict.main else words("--json x.json --predictions x.csv")
    flags = ["--ckpt", "runs/photos", "--threads", "1", *files]
    outcomes = run_ranks(processes, _stop_at, main, place, number, flags)
    assert [each.code for each in outcomes] == [code] * processes, [e.err for e in outcomes]
    (line,) = "".join(each.err for each in outcomes).splitlines()
    name = "predict.py" if main is predict.main else "eval.py"
    assert line == f"{name}: stopped by {number.name} before results were written"
    assert not [*Path().glob("x.*"), *Path().glob(".x.*")]
    assert Path("runs/photos/report.html").stat() == page


@pytest.mark.parametrize(("number", "code"), STOPS)
@pytest.mark.parametrize("main", [predict.main, full(eval.main)])
def test_a_script_that_is_stopped_while_it_writes_finishes_its_files(main, number, code):
    place = "write" if main is predict.main else "write_files"
    files = ["photos/val", "--out", "x.csv", "--html", "x.html"]
    files = files if main is predict.main else words("--json x.json --predictions x.csv")
    flags = ["--ckpt", "runs/photos", *QUICK, *files]
    outcomes = run_ranks(2, _stop_at, main, place, number, flags)
    assert [each.code for each in outcomes] == [0, 0] and not outcomes[0].err
    assert len(read_csv("x.csv")) == 22 and len([*Path().glob("x.*")]) == 2
