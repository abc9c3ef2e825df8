"""export.py: folders load without this repository and predict what the checkpoint does."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.make_data import image_folder, smooth
from helpers.ranks import returned, run_ranks
from helpers.training_runs import refused, train_run, words, working_in
from helpers.waiting import records_so_far
from PIL import Image
from safetensors.torch import load_file
from scipy.special import expit, softmax

import export
from extras.export.card import card, preprocessing
from extras.export.formats import FORMATS, Code, Loaded
from utils.data.decode import center
from utils.data.spec import InputSpec
from utils.models.zoo import build_model
from utils.runs.inference import Inference
from utils.runs.manifest import find_checkpoint
from utils.runs.metadata import Checkpoint, read_checkpoint
from utils.settings.train import TrainConfig
from utils.tasks.table import make_task

SHORT = words("--threads 1 --max_steps 2 --batch_size 4 --num_workers 0 --eval_fraction 0.2")
# The run's name, its flags, and the formats to export it to.
RUNS = {
    "grey": ("digits --model mnist_cnn --max_train_samples 64", ["torch", "onnx"]),
    "photos": (
        "photos --model resnet18 --image_size 112 --eval_size 128 --eval_crop 0.9 --mean 0.4",
        ["timm"],
    ),
    "two": ("two --model mlp --task binary --ema_decay 0.5 --lr 0.5", ["torch"]),
}
FOLDERS = [(run, name) for run, (_, formats) in RUNS.items() for name in formats]

# Runs in a process of its own: the code of each card, then its `predict` and `preprocess` on what
# the test has saved.
OUTSIDE = """
import contextlib, importlib.util, io, os, re, sys
import numpy as np
assert not any(importlib.util.find_spec(name) for name in ("utils", "train", "eval", "export"))
for folder in sys.argv[1:]:
    os.chdir(folder)
    code = re.search(r"```python\\n(.*?)```", open("README.md").read(), re.S)[1]
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    inputs = np.load("inputs.npz")
    found = {name: names["predict"](inputs[name]) for name in inputs.files}
    np.savez("found.npz", photo=names["probabilities"], **found)
    open("printed.txt", "w").write(printed.getvalue())
"""


def write_data() -> None:
    """The folders photos and two."""
    image_folder("photos", dict.fromkeys("abc", 13), (150, 260), "jpg")
    image_folder("two", dict.fromkeys("ab", 20), (28, 20))


def reference(saved: Checkpoint, pixels: np.ndarray) -> np.ndarray:
    """The checkpoint's probabilities, by its own model and float64 outside it."""
    spec, config = saved.spec.for_evaluation(), saved.config
    outputs = 1 if config.task == "binary" else len(saved.class_names)
    model = build_model(config, saved.spec, outputs, saved.weight_bytes).eval()
    average = saved.path / "ema.safetensors"
    chosen = average if average.exists() else saved.path / "model.safetensors"
    model.load_state_dict(load_file(chosen))
    values = (pixels.astype(np.float64) / 255 - spec.mean) / spec.std
    with torch.no_grad():
        logits = model(torch.from_numpy(values.transpose(0, 3, 1, 2)).float()).double().numpy()
    return softmax(logits, 1) if config.task == "classification" else expit(logits)


def train_one(run: str) -> None:
    train_run(1, run, "--data", *RUNS[run][0].split(), *SHORT)


def export_all() -> None:
    """Export all FOLDERS; in one process, because it takes seconds to import the exporters."""
    for run, name in FOLDERS:
        export.main(["--ckpt", f"runs/{run}", "--to", name, "--out", f"{run}-{name}"])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the data and the run `two`, whose model is small."""
    home = tmp_path_factory.mktemp("export") / "work"
    with working_in(home):
        write_data()
        train_one("two")
    return home


@pytest.fixture(scope="module")
def exported(home):
    """A folder with the runs of RUNS in runs/, and their exports in RUN-FORM, each used once
    outside the repository.
    """
    with working_in(home):
        for run in RUNS.keys() - {"two"}:
            train_one(run)
        returned(1, export_all)
        for run, name in FOLDERS:
            spec, random = of(home, run).spec.for_evaluation(), np.random.default_rng(1)
            images = random.integers(0, 256, (7, *spec.size, spec.channels), np.uint8)
            np.savez(f"{run}-{name}/inputs.npz", one=images[:1], seven=images)
            shutil.copy("photos/a/000.jpg", f"{run}-{name}/photo.jpg")
        folders = [str(home / f"{run}-{name}") for run, name in FOLDERS]
        command = [sys.executable, "-I", "-c", OUTSIDE, *folders]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return home


@cache
def of(home: Path, run: str) -> Checkpoint:
    return read_checkpoint(find_checkpoint(home / "runs" / run))


@pytest.mark.full
@pytest.mark.parametrize(("run", "name"), FOLDERS)
def test_the_lines_on_the_card_predict_what_the_checkpoint_does(exported, run, name):
    out, saved = exported / f"{run}-{name}", of(exported, run)
    inputs, found = np.load(out / "inputs.npz"), np.load(out / "found.npz")
    for key in inputs.files:
        expected = reference(saved, inputs[key])
        assert found[key].shape == expected.shape and found[key].dtype == np.float32
        assert np.abs(found[key] - expected).max() <= 1e-5
    # the images make a difference
    assert np.ptp(reference(saved, inputs["seven"]), axis=0).max() > 1e-3
    labels, photo = saved.class_names, found["photo"]
    lines = (out / "printed.txt").read_text().splitlines()
    if run == "two":
        assert lines == [f"{photo[0]:.4f}  b{'  (predicted)' * bool(photo[0] > 0.5)}"]
    else:
        best = photo.argsort()[::-1][:5]
        assert lines == [f"{photo[index]:.4f}  {labels[index]}" for index in best]


@pytest.mark.full
def test_config_and_card_have_the_classes_the_input_and_the_numbers(exported):
    for run, name in FOLDERS:
        saved, out = of(exported, run), exported / f"{run}-{name}"
        config = json.loads((out / "config.json").read_text())
        text, spec = (out / "README.md").read_text(), saved.spec.for_evaluation()
        assert config["labels"] == saved.class_names
        assert config["architecture"] == saved.config.model.split("/")[-1]
        for key in ("height", "width", "channels", "mean", "std"):
            assert config["input"][key] == getattr(spec, key)
        log = records_so_far(exported / "runs" / run / "log.jsonl")
        found = [r for r in log if r["kind"] == "eval" and r["step"] == saved.state.step][-1]
        weights = "ema" if run == "two" else "raw"
        assert config["weights"] == found.get("weights", "raw") == weights
        for key in (saved.config.best_metric, "loss"):
            assert f"| {key} | {found[key]:.4f} |" in text
        assert f"split `{found['split']}`, {found['count']} images" in text
        assert str(exported) not in text + json.dumps(config)  # no path of this machine


def test_a_card_has_no_numbers_of_other_weights():
    one, no_code = loaded("mlp", SMALL_GREY), Code("", "", "", "")
    text = card(one, no_code, 0.0)
    assert "The checkpoint has no evaluation of these weights." in text and "0.5000" not in text
    one.saved.config.mixed_precision = "bf16"
    result = {"loss": 1.0, "accuracy": 0.5, "count": 4}
    text = card(replace(one, saved=replace(one.saved, evaluation=result)), no_code, 0.0)
    assert "| accuracy | 0.5000 |" in text and "4 images, each counted once, in bf16:" in text


def functions_of_card(out: Path, monkeypatch) -> dict[str, Any]:
    """Run the code of the card, without the lines about a photograph, in its folder; returns what
    it defines.
    """
    monkeypatch.chdir(out)
    (code,) = re.findall(
        r"```python\n(.*?)```", (out / "README.md").read_text(encoding="utf-8"), re.S
    )
    names = dict[str, Any]()
    exec(code.partition("\nprobabilities = ")[0], names)
    return names


ODD = ["it's", 'a "b"', "pipe|", "new\nline", "<b>", "```", "back\\slash", "日本", "{x}", "a, b"]


@pytest.mark.full
def test_odd_class_names_are_kept_and_break_neither_the_code_nor_the_table(tmp_path, monkeypatch):
    one, out = loaded("squeezenet1_1", PHOTO, classes=len(ODD)), tmp_path / 'o"u\\t'
    one.saved.class_names[:] = ODD
    export.write(one, "torch", out)
    names = functions_of_card(out, monkeypatch)
    assert names["labels"] == ODD
    text = (out / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(text.split("---\n")[1])["pipeline_tag"] == "image-classification"
    (row,) = [line for line in text.splitlines() if line.startswith("| Classes |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3 and "<" not in row and row.isprintable()
    assert row.startswith("| Classes | 10: it's, ") and row.endswith(", 'a, b' |")


@pytest.mark.full
def test_timm_resizes_photographs_to_the_same_size(exported):
    from timm.data import create_transform, resolve_data_config

    config = json.loads((exported / "photos-timm/config.json").read_text())["pretrained_cfg"]
    data = resolve_data_config(pretrained_cfg=config)
    resize, crop, *_ = create_transform(**data).transforms
    spec = of(exported, "photos").spec.for_evaluation()
    assert (resize.size, list(crop.size)) == (spec.resize, [128, 128])
    assert (list(data["mean"]), list(data["std"])) == (spec.mean, spec.std)


SPECS = [
    InputSpec(28, 28, 1, [0.5], [0.5]),
    InputSpec(112, 160, 3, [0.5] * 3, [0.5] * 3, resize=123, interpolation="bicubic"),
    InputSpec(112, 160, 1, [0.5], [0.5], resize=118, squash=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_printed_preprocessing_has_the_pixels_of_evaluation(tmp_path, spec):
    names: dict = {}
    exec(f"import numpy as np\nfrom PIL import Image, ImageOps\n{preprocessing(spec)}", names)
    for number, size in enumerate([(150, 260), (333, 200), (28, 28), (129, 127)]):
        path, image, exif = tmp_path / f"{number}.png", Image.fromarray(smooth(*size)), Image.Exif()
        exif[0x0112] = 6 if number == 1 else 1  # to be turned by 90 degrees
        image.save(path, exif=exif)
        pixels = np.array(image.convert("L" if spec.channels == 1 else "RGB")).reshape(*size, -1)
        pixels = torch.from_numpy(np.rot90(pixels, -(number == 1)).copy())
        cut = center(pixels, spec)
        found = names["preprocess"](path)
        assert found.dtype == np.uint8 and found.shape == cut.shape
        worst = np.abs(found.astype(int) - cut.numpy().astype(int)).max()
        assert worst <= (2 if spec.interpolation == "bicubic" else 1)


def loaded(model: str, spec: InputSpec, classes: int = 3, **settings) -> Loaded:
    """A checkpoint with random weights that is not on disk."""
    names = [str(number) for number in range(classes)]
    config = TrainConfig(model=model, task="classification", **settings)
    _, task = make_task(config, names)
    torch.manual_seed(0)
    module = build_model(config, spec, classes).eval().requires_grad_(False)
    module.to(memory_format=torch.contiguous_format)
    for name, buffer in module.named_buffers():  # as after training
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    split = SimpleNamespace(name="test")
    saved = Inference(
        Path("none"),
        config,
        spec,
        names,
        dict,
        {"step": 3, "epoch": 1},
        SimpleNamespace(evaluation=split),
    )
    return Loaded(saved, task, spec, module)


PHOTO = InputSpec(128, 128, 3, [0.5] * 3, [0.5] * 3, resize=146)
SMALL_GREY = InputSpec(32, 32, 1, [0.5], [0.5])
FULL = [("vit_b_16", "torch"), ("convnext_tiny", "onnx"), ("resnext50_32x4d", "timm")]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("timm/test_efficientnet", "timm"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in FULL),
    ],
)
def test_other_architectures_load_by_their_lines(tmp_path, model, name):
    # it compares the code of the card with the checkpoint
    assert export.write(loaded(model, PHOTO), name, tmp_path / "out") <= 1e-5


@pytest.fixture
def run(home, tmp_path):
    """A copy of the checkpoint of the run `two`."""
    checkpoint = of(home, "two").path
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


def export_to(out: str, checkpoint: Path, name: str = "torch", *more: str) -> str:
    return refused(export.main, "--ckpt", str(checkpoint), "--to", name, "--out", out, *more)


def test_what_cannot_be_exported_is_one_line_and_no_folder_appears(run):
    line = export_to("out", Path("nowhere"))
    assert "nowhere: no such checkpoint or run folder" in line
    assert "--to timm: mlp cannot be exported (Unknown model" in export_to("out", run, "timm")
    Path("full").mkdir()
    assert "--out full: exists" in export_to("full", run)
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert f"{weights}: damaged" in export_to("out", run)
    assert not Path("out").exists() and list(Path("full").iterdir()) == []


@pytest.mark.full
def test_an_export_that_fails_or_differs_is_refused_and_leaves_no_folder(run, monkeypatch):
    write = FORMATS["torch"]

    def unwritable(one, folder):
        raise RuntimeError("unsupported\noperator")

    def unloadable(one, folder):
        return replace(write(one, folder), predicting="raise RuntimeError('no such kernel')")

    def missing(one, folder):
        raise ModuleNotFoundError("No module named 'onnx'")

    def other(one, folder):
        code = write(one, folder)
        one.model.output.bias.add_(1e-3)
        return code

    for failing, reason in (
        (unwritable, "unsupported operator); use another --to"),
        (unloadable, "no such kernel); use another --to"),
        (missing, "No module named 'onnx'); pip install -c constraints.txt timm onnx "),
        (other, "its probabilities differ by"),
    ):
        monkeypatch.setitem(FORMATS, "torch", failing)
        assert f"--to torch: mlp cannot be exported ({reason}" in export_to("out", run)
        assert not Path("out").exists() and not list(Path().glob(".out*"))


def killed_in_the_middle(arguments: list[str]) -> None:
    def killed(one, folder):
        (folder / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    FORMATS["torch"] = killed
    export.main(arguments)


def test_an_export_that_is_killed_leaves_no_folder_and_can_be_repeated(run):
    arguments = ["--ckpt", str(run), "--to", "torch", "--out", "out"]
    (outcome,) = run_ranks(1, killed_in_the_middle, arguments)
    assert outcome.code == -signal.SIGKILL and not Path("out").exists()
    assert len(list(Path().glob("*out*/half"))) == 1
    returned(1, export.main, arguments)
    names = {path.name for path in Path("out").iterdir()}
    assert names == {"README.md", "config.json", "model.pt2"}
