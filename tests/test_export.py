"""Exported folders load without this repository, with the code on their cards, and predict what the
checkpoint does.
"""

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
from helpers.ranks import ALONE, returned, run_ranks
from helpers.training_runs import ROOT, refused, train_run, working_in
from helpers.waiting import records_so_far
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.special import expit, softmax
from utils.export.forms import Code
from utils.export.loaded import Loaded, compare, load

import export
from utils.config.settings import TrainConfig
from utils.data.decode import center
from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.export import forms
from utils.export.card import card, preprocessing
from utils.files import new_folder
from utils.models.zoo import build_model
from utils.runs.inference import Inference
from utils.runs.manifest import find_checkpoint, write_manifest
from utils.runs.metadata import Checkpoint, read_checkpoint
from utils.tasks.classification import Classification
from utils.tasks.table import TASKS, make_task

SHORT = (
    "--threads",
    "1",
    "--max_steps",
    "2",
    "--batch_size",
    "4",
    "--num_workers",
    "0",
    "--eval_fraction",
    "0.2",
)
EVALUATION = ["--eval_size", "128", "--eval_crop", "0.9", "--mean", "0.4"]
# The run's name, its flags, and the forms to export it to.
RUNS = {
    "grey": (
        ["--data", "digits", "--model", "mnist_cnn", "--max_train_samples", "64"],
        ["torch", "onnx"],
    ),
    "colour": (["--data", "small", "--model", "resnet18", "--stem", "standard"], ["torch"]),
    "photos": (
        ["--data", "photos", "--model", "resnet18", "--image_size", "112", *EVALUATION],
        ["timm"],
    ),
    "several": (
        ["--data", "several.csv", "--model", "timm/test_resnet", "--std", "0.2"],
        ["torch"],
    ),
    "two": (
        [
            "--data",
            "two",
            "--model",
            "mlp",
            "--task",
            "binary",
            "--ema_decay",
            "0.5",
            "--lr",
            "0.5",
        ],
        ["torch"],
    ),
}
FOLDERS = [(run, form) for run, (_, kinds) in RUNS.items() for form in kinds]

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
    """The folders small, photos and two, and several.csv."""
    image_folder("small", dict.fromkeys("abc", 13), (32, 32))
    image_folder("photos", dict.fromkeys("abc", 13), (150, 260), "jpg")
    image_folder("two", dict.fromkeys("ab", 20), (28, 20))
    paths = image_folder("several", {".": 40}, (40, 40))
    rows = [f"{path},{['a', 'a|b', 'b|c', 'c'][number % 4]}" for number, path in enumerate(paths)]
    Path("several.csv").write_text("\n".join(["path,label", *rows]))


def reference(saved: Checkpoint, pixels: np.ndarray, raw: bool = False) -> np.ndarray:
    """The checkpoint's probabilities, by its own model and float64 outside it."""
    spec, config = saved.spec.for_evaluation(), saved.config
    outputs = 1 if config.task == "binary" else len(saved.class_names)
    model = build_model(config, saved.spec, outputs, saved.weight_bytes).eval()
    average = saved.path / "ema.safetensors"
    chosen = average if average.exists() and not raw else saved.path / "model.safetensors"
    model.load_state_dict(load_file(chosen))
    values = (pixels.astype(np.float64) / 255 - spec.mean) / spec.std
    with torch.no_grad():
        logits = model(torch.from_numpy(values.transpose(0, 3, 1, 2)).float()).double().numpy()
    return softmax(logits, 1) if config.task == "classification" else expit(logits)


def export_all() -> None:
    """Export all FOLDERS; in one process, because it takes seconds to import the exporters."""
    for run, form in FOLDERS:
        export.main(["--ckpt", f"runs/{run}", "--to", form, "--out", f"{run}-{form}"])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the data and the run `two`, whose model is small."""
    home = tmp_path_factory.mktemp("export") / "work"
    with working_in(home):
        write_data()
        train_run(1, "two", *RUNS["two"][0], *SHORT)
    return home


@pytest.fixture(scope="module")
def exported(home):
    """A folder with the runs of RUNS in runs/, and their exports in RUN-FORM, each used once
    outside the repository.
    """
    with working_in(home):
        for run in RUNS.keys() - {"two"}:
            train_run(1, run, *RUNS[run][0], *SHORT)
        returned(1, export_all)
        for run, form in FOLDERS:
            spec, random = of(home, run).spec.for_evaluation(), np.random.default_rng(1)
            images = {f"n{n}": (n, spec.height, spec.width, spec.channels) for n in (1, 7)}
            images = {
                name: random.integers(0, 256, shape, np.uint8) for name, shape in images.items()
            }
            np.savez(f"{run}-{form}/inputs.npz", **images)
            shutil.copy("photos/a/000.jpg", f"{run}-{form}/photo.jpg")
        folders = [str(home / f"{run}-{form}") for run, form in FOLDERS]
        command = [sys.executable, "-I", "-c", OUTSIDE, *folders]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return home


@cache
def of(home: Path, run: str) -> Checkpoint:
    return read_checkpoint(find_checkpoint(home / "runs" / run))


@pytest.mark.full
@pytest.mark.parametrize(("run", "form"), FOLDERS)
def test_the_lines_on_the_card_predict_what_the_checkpoint_does_for_any_number_of_images(
    exported, run, form
):
    out, saved = exported / f"{run}-{form}", of(exported, run)
    inputs, found = np.load(out / "inputs.npz"), np.load(out / "found.npz")
    for name in inputs.files:
        expected = reference(saved, inputs[name])
        assert found[name].shape == expected.shape and found[name].dtype == np.float32
        assert np.abs(found[name] - expected).max() <= 1e-5
    # the images make a difference
    assert np.ptp(reference(saved, inputs["n7"]), axis=0).max() > 1e-3


@pytest.mark.full
def test_the_code_in_the_documentation_is_that_of_a_card(exported):
    pattern = re.compile(r"```python\n(.*?)```", re.S)
    card = (exported / "grey-onnx/README.md").read_text()
    assert pattern.findall((ROOT / "docs/export.md").read_text()) == pattern.findall(card)


@pytest.mark.full
def test_the_lines_of_the_readme_print_the_predicted_classes(exported, tmp_path):
    _, lines = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "model").symlink_to(exported / "grey-onnx")
    inputs = exported / "grey-onnx/inputs.npz"
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import numpy\nimages = numpy.load({str(inputs)!r})['n7']\n{lines}",
    ]
    printed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    expected = reference(of(exported, "grey"), np.load(inputs)["n7"]).argmax(1)
    assert printed.strip() == str([of(exported, "grey").class_names[best] for best in expected])


@pytest.mark.full
def test_the_card_prints_the_answer_for_a_photograph(exported):
    for run, form in FOLDERS:
        out, labels = exported / f"{run}-{form}", of(exported, run).class_names
        found, lines = (
            np.load(out / "found.npz")["photo"],
            (out / "printed.txt").read_text().splitlines(),
        )
        if run in ("two", "several"):
            pairs = zip(found, ["b"] if run == "two" else labels, strict=True)
            assert lines == [
                f"{p:.4f}  {name}{'  (predicted)' * bool(p > 0.5)}" for p, name in pairs
            ]
        else:
            assert lines == [
                f"{found[index]:.4f}  {labels[index]}" for index in found.argsort()[::-1][:5]
            ]


@pytest.mark.full
def test_config_and_card_have_the_classes_the_input_and_the_numbers_of_the_evaluation(exported):
    for run, form in FOLDERS:
        saved, out = of(exported, run), exported / f"{run}-{form}"
        config, text = (
            json.loads((out / "config.json").read_text()),
            (out / "README.md").read_text(),
        )
        spec = saved.spec.for_evaluation()
        assert (
            config["labels"] == saved.class_names
            and config["architecture"] == saved.config.model.split("/")[-1]
        )
        names = ("height", "width", "channels", "mean", "std")
        assert [config["input"][name] for name in names] == [getattr(spec, name) for name in names]
        log = records_so_far(exported / "runs" / run / "log.jsonl")
        found = [r for r in log if r["kind"] == "eval" and r["step"] == saved.state.step][-1]
        assert (
            config["weights"] == found.get("weights", "raw") == ("ema" if run == "two" else "raw")
        )
        metric = saved.config.best_metric
        assert (
            f"| {metric} | {found[metric]:.4f} |" in text
            and f"| loss | {found['loss']:.4f} |" in text
        )
        assert f"split `{found['split']}`, {found['count']} images" in text
        assert str(exported) not in text + json.dumps(config)  # no path of this machine


def test_a_card_has_no_numbers_of_other_weights():
    one, no_code = loaded("mlp", SMALL_GREY), Code("", "", "", "", lambda images: images)
    text = card(one, no_code, 0.0)
    assert "The checkpoint has no evaluation of these weights." in text and "0.5000" not in text
    one.saved.config.mixed_precision = "bf16"
    result = {"loss": 1.0, "accuracy": 0.5, "count": 4}
    saved = replace(one.saved, evaluation=result)
    text = card(replace(one, saved=saved), no_code, 0.0)
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


ODD = [
    "it's",
    'a "b"',
    "pipe|",
    "new\nline",
    "<b>",
    "```",
    "back\\slash",
    "日本",
    "{x}",
    "\x1b[31m",
    "__",
    "a, b",
]


def test_odd_class_names_are_kept_and_break_neither_the_code_nor_the_table(tmp_path, monkeypatch):
    one, out = loaded("squeezenet1_1", PHOTO, classes=len(ODD)), tmp_path / "out"
    one.saved.class_names[:] = ODD
    export.write(one, "torch", out)
    text, names = (
        (out / "README.md").read_text(encoding="utf-8"),
        functions_of_card(out, monkeypatch),
    )
    assert names["labels"] == ODD
    assert yaml.safe_load(text.split("---\n")[1])["pipeline_tag"] == "image-classification"
    (row,) = [line for line in text.splitlines() if line.startswith("| Classes |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3 and "<" not in row and row.isprintable()
    assert row.startswith("| Classes | 12: it's, ") and row.endswith(", __, 'a, b' |")


def test_outputs_of_an_unknown_task_are_not_exported(monkeypatch):
    class Rated(Classification):
        activation = ""

    monkeypatch.setitem(TASKS, "rated", Rated)
    saved = loaded("mlp", SMALL_GREY).saved
    with pytest.raises(UserError, match="do not support Rated"):
        load(replace(saved, config=replace(saved.config, task="rated")), ALONE)


@pytest.mark.full
def test_timm_resizes_photographs_to_the_same_size(exported):
    import timm

    config = json.loads((exported / "photos-timm/config.json").read_text())["pretrained_cfg"]
    data = timm.data.resolve_data_config(pretrained_cfg=config)
    steps = timm.data.create_transform(**data).transforms
    spec = of(exported, "photos").spec.for_evaluation()
    assert (steps[0].size, list(steps[1].size)) == (spec.resize, [128, 128])
    assert (list(data["mean"]), list(data["std"])) == (spec.mean, spec.std)


SPECS = [
    InputSpec(28, 28, 1, [0.5], [0.5]),
    InputSpec(112, 112, 3, [0.5] * 3, [0.5] * 3, resize=128),
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
        pixels = torch.from_numpy(np.rot90(pixels, -1 if number == 1 else 0).copy())
        cut = center(pixels, spec)
        found = names["preprocess"](path)
        assert found.dtype == np.uint8 and found.shape == cut.shape
        worst = np.abs(found.astype(int) - cut.numpy().astype(int)).max()
        assert worst <= (2 if spec.interpolation == "bicubic" else 1)


def loaded(model: str, spec: InputSpec, classes: int = 3, **settings) -> Loaded:
    """A checkpoint with random weights that is not on disk."""
    names = [str(number) for number in range(classes)]
    config = TrainConfig(model=model, task="classification", **settings)
    config, task = make_task(config, names, None)
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
FAMILIES = [("squeezenet1_1", "torch"), ("timm/test_efficientnet", "timm")]
FULL = [("densenet121", "torch"), ("vit_b_16", "torch")]
FULL += [("convnext_tiny", "onnx"), ("swin_t", "torch"), ("resnext50_32x4d", "timm")]


@pytest.mark.parametrize(
    ("model", "form"),
    [*FAMILIES, *(pytest.param(*family, marks=pytest.mark.full) for family in FULL)],
)
def test_other_architectures_load_by_their_lines(tmp_path, model, form, monkeypatch):
    one = loaded(model, PHOTO)
    export.write(one, form, tmp_path / "out")
    names = functions_of_card(tmp_path / "out", monkeypatch)
    assert compare(one, form, names["predict"]) <= 1e-5


def test_a_model_that_a_form_cannot_hold_is_refused_with_the_forms_that_can(tmp_path):
    small = InputSpec(32, 32, 3, [0.5] * 3, [0.5] * 3)
    for model, form, fix in (
        ("mlp", "timm", "use --to torch or onnx"),
        ("resnet18", "timm", "use --to torch or onnx, or train"),  # its stem is not timm's
    ):
        with pytest.raises(
            UserError, match=f"{model.split('/')[-1]} does not have the layers of"
        ) as caught:
            forms.FORMS[form](loaded(model, small), tmp_path)
        assert fix in caught.value.fix


@pytest.fixture
def run(home, tmp_path):
    """A copy of the checkpoint of the run `two`."""
    checkpoint = of(home, "two").path
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


def export_to(out: str, checkpoint: Path, form: str = "torch", *more: str) -> str:
    return refused(export.main, "--ckpt", str(checkpoint), "--to", form, "--out", out, *more)


def test_a_damaged_or_missing_checkpoint_or_a_folder_that_exists_is_one_line(run):
    assert export_to("out", Path("nowhere")).endswith(
        "nowhere: no such checkpoint or run folder; correct the path"
    )
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert f"{weights}: damaged" in export_to("out", run)
    Path("full").mkdir()
    assert (
        export_to("full", run)
        == "export.py: error: --out full: exists; give another path, or delete it"
    )
    assert not Path("out").exists() and list(Path("full").iterdir()) == []


def test_weights_that_are_not_finite_are_refused_and_no_folder_appears(run):
    weights = load_file(run / "model.safetensors")
    save_file(
        {name: tensor * float("nan") for name, tensor in weights.items()}, run / "ema.safetensors"
    )
    (run / "manifest.json").unlink()
    write_manifest(run)
    line = export_to("out/deep", run)
    assert (
        f"{run}: weights are NaN or infinite (hidden.bias, " in line
        and "use another checkpoint" in line
    )
    assert not Path("out").exists()


def test_an_export_that_fails_or_differs_from_the_checkpoint_is_refused_and_no_folder_appears(
    run, monkeypatch
):
    write = forms.FORMS["torch"]

    def unwritable(one, folder):
        raise RuntimeError("unsupported\noperator")

    def unloadable(one, folder):
        def fail(_images):
            raise RuntimeError("no such kernel")

        return replace(write(one, folder), predict=fail)

    def other(one, folder):
        code = write(one, folder)
        one.model.output.bias.add_(1e-3)
        return code

    for failing, reason in (
        (unwritable, "cannot be exported (unsupported operator); use another format"),
        (unloadable, "cannot be exported (no such kernel); use another format"),
        (other, "has probabilities that differ by"),
    ):
        monkeypatch.setitem(forms.FORMS, "torch", failing)
        assert f"--to torch: mlp {reason}" in export_to("out", run)
        assert not Path("out").exists() and not list(Path().glob(".out*"))
    # PyTorch's error of a full disk does not say that it is full.
    monkeypatch.setitem(forms.FORMS, "torch", unwritable)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    line = export_to("out", run)
    assert line.endswith(
        "mlp cannot be written (unsupported operator): 0.0 MB are free on the disk; free space"
    )


@pytest.mark.full
def test_the_raw_weights_of_a_run_with_an_average_are_exported_without_its_numbers(run, home):
    returned(
        1, export.main, ["--ckpt", str(run), "--to", "torch", "--out", "out", "--weights", "raw"]
    )
    config, text = (
        json.loads(Path("out/config.json").read_text()),
        Path("out/README.md").read_text(),
    )
    assert (
        config["weights"] == "raw" and "The checkpoint has no evaluation of these weights." in text
    )
    images = np.random.default_rng(2).integers(0, 256, (5, 28, 20, 3), np.uint8)
    found = torch.export.load("out/model.pt2").module()(torch.from_numpy(images)).numpy()
    assert np.abs(found - reference(of(home, "two"), images, raw=True)).max() <= 1e-5


def killed_in_the_middle(arguments: list[str]) -> None:
    def killed(one, folder):
        (folder / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    forms.FORMS["torch"] = killed
    export.main(arguments)


def test_an_export_that_is_killed_leaves_no_folder_and_can_be_repeated(run):
    arguments = ["--ckpt", str(run), "--to", "torch", "--out", "out"]
    (outcome,) = run_ranks(1, killed_in_the_middle, arguments)
    assert (
        outcome.code == -signal.SIGKILL
        and not Path("out").exists()
        and len(list(Path().glob("*out*/half"))) == 1
    )
    returned(1, export.main, arguments)
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "README.md",
        "config.json",
        "model.pt2",
    ]


def test_two_processes_do_not_write_the_same_folder(tmp_path):
    def write_too():
        with new_folder(tmp_path / "out"):
            pass

    with pytest.raises(FileExistsError), new_folder(tmp_path / "out"):
        returned(1, write_too)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_missing_package_is_named_with_its_command(run, monkeypatch):
    monkeypatch.setattr(forms.importlib.util, "find_spec", lambda name: None)
    line = export_to("out", run, "onnx")
    assert line.endswith(
        "--to onnx: onnx is not installed; pip install -c constraints.txt onnx onnxscript onnxruntime"
    )
