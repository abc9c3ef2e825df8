"""Weights in files: --init_from FILE, and eval.py --model NAME --weights FILE."""

import argparse
import io
import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import refused, weights
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from torch import nn
from torch.nn import functional as F

import eval
import train
from utils.config.yaml_text import read_yaml
from utils.errors import UserError
from utils.models.matching import fit_names
from utils.models.published import CLASSES, names_of_outputs
from utils.models.weight_files import read_any

# its published weights are for 160x160 pixels, bilinear, mean and std 0.5
MODEL = "timm/test_resnet"
NAMES = ["cat", "dog", "emu"]


def model_of(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=outputs)
    for name, tensor in model.state_dict().items():  # other values than in a new layer
        if name.endswith(("running_mean", "running_var", "bn1.bias")):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def write(form: str, state: dict[str, torch.Tensor]) -> list[str]:
    """Write the tensors in this form; returns the flags that name the file."""
    if form == "safetensors":
        save_file(state, "W.safetensors")
        return ["--weights", "W.safetensors"]
    if form == "wrapper and prefix":
        own = {f"module.{name}": tensor for name, tensor in state.items()} | {
            "criterion.weight": torch.ones(3)
        }
        content = {
            "epoch": 3,
            "state_dict": {},
            "state_dict_ema": own,
            "args": argparse.Namespace(lr=0.1),
        }
    elif form == "a tutorial's checkpoint":
        rest = {"epoch": 3, "step": 40, "optimizer_state_dict": {"state": {}}, "loss": 0.25}
        own = {
            f"_orig_mod.module.{name}": each
            for name, each in state.items()
            if "num_batches" not in name
        }
        content = rest | {"ema": {"decay": 0.99}, "model_state_dict": own}
    elif form == "order":
        content = dict(enumerate_names(state))
    else:
        content = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }
    torch.save(content, "W.pth")
    return ["--weights", "W.pth", *(["--init_match", "order"] if form == "order" else [])]


def expected(model: nn.Module, paths: list[Path]) -> torch.Tensor:
    """Logits of timm's model for images that need no resizing."""
    cfg = timm.get_pretrained_cfg("test_resnet")
    pixels = (
        torch.from_numpy(np.stack([np.asarray(Image.open(path)) for path in paths])).permute(
            0, 3, 1, 2
        )
        / 255
    )
    images = (pixels - torch.tensor(cfg.mean).view(3, 1, 1)) / torch.tensor(cfg.std).view(3, 1, 1)
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize(
    "form",
    [
        *("safetensors", "wrapper and prefix", "order"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("a tutorial's checkpoint", "half precision")
        ),
    ],
)
def test_weights_of_a_file_give_the_results_of_plain_timm(form):
    model = model_of()
    flags = write(form, model.state_dict())
    if form == "half precision":
        model = model.half().float()
    paths = image_folder("data/val", dict.fromkeys(NAMES, 3), size=(160, 160))
    logits, labels = expected(model, paths), torch.arange(3).repeat_interleave(3)
    words = ["--model", MODEL, *flags, "--data", "data", "--eval_crop", "1", "--num_workers", "0"]
    for processes in (1, 2):
        record = returned(processes, eval.main, [*words, "--predictions", "out.json"])[0]
        assert (record["count"], record["classes"], record["model"]) == (9, 3, MODEL)
        assert record["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        rows = json.loads(Path("out.json").read_text())
        for row, probabilities in zip(rows, logits.softmax(1), strict=True):
            found = {row[f"class_{place}"]: row[f"probability_{place}"] for place in (1, 2, 3)}
            assert [found[name] for name in NAMES] == pytest.approx(
                probabilities.tolist(), abs=1e-5
            )


def enumerate_names(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors under other names, in the same order."""
    return [(f"layer{number}", tensor) for number, tensor in enumerate(state.values())]


def settings_of(*flags: str, source: str = "W.pth") -> dict:
    """config.yaml of a run of one update from these weights."""
    image_folder("photos/train", dict.fromkeys(NAMES, 4), size=(110, 120), kind="jpg")
    words = [
        "--data",
        "photos",
        "--init_from",
        source,
        "--max_steps",
        "1",
        "--global_batch_size",
        "4",
    ]
    returned(
        1,
        train.main,
        [*words, "--run_name", "run", "--num_workers", "0", "--report", "false", *flags],
    )
    return read_yaml(Path("runs/run/config.yaml"))


def test_a_run_from_a_file_has_the_input_of_the_published_weights_and_says_so():
    model = timm.create_model("resnet10t", num_classes=7)
    torch.save(dict(enumerate_names(model.state_dict())), "W.pth")
    found, cfg = (
        settings_of("--model", "timm/resnet10t", "--init_match", "order"),
        timm.get_pretrained_cfg("resnet10t"),
    )
    assert (found["mean"], found["std"]) == ([*cfg.mean], [*cfg.std]) and cfg.mean[0] == 0.485
    assert (found["image_size"], found["eval_crop"]) == ([176, 176], cfg.crop_pct)
    assert (found["interpolation"], found["channels"]) == ("bicubic", 3)
    assert (
        weights("run").keys() == model.state_dict().keys()
        and weights("run")["fc.weight"].shape[0] == 3
    )
    text = Path("runs/run/init_from.txt").read_text()
    assert (
        "kept conv1.0.weight" in text
        and "new fc.weight: shape [3, 512], in the source [7, 512]" in text
    )


def test_config_json_beside_the_weights_takes_precedence_over_the_published_input():
    """timm's weights of another tag have another crop."""
    Path("hub").mkdir()
    save_file(model_of().state_dict(), "hub/model.safetensors")
    cfg = {"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3, "input_size": [3, 64, 96], "crop_pct": 0.75}
    cfg |= {"interpolation": "bicubic", "crop_mode": "squash"}
    about = {"architecture": "test_resnet", "label_names": NAMES, "pretrained_cfg": cfg}
    Path("hub/config.json").write_text(json.dumps(about))
    found = settings_of(source="hub")
    assert (found["model"], found["image_size"], found["mean"]) == (
        MODEL,
        [64, 96],
        [0.1, 0.2, 0.3],
    )
    assert (found["eval_crop"], found["interpolation"], found["squash"]) == (0.75, "bicubic", True)


@pytest.mark.full
def test_flags_and_a_recipe_take_precedence_over_the_published_input():
    write(
        "grey",
        {
            name: t[:, :1] if t.shape[1:2] == (3,) else t
            for name, t in model_of().state_dict().items()
        },
    )
    Path("recipe.yaml").write_text(f"model: {MODEL}\npretrained: true\nmin_scale: 0.5\n")
    found = settings_of(
        "--config",
        "recipe.yaml",
        "--image_size",
        "64",
        "--interpolation",
        "bilinear",
        "--mean",
        "0.4",
    )
    assert (found["image_size"], found["interpolation"], found["mean"]) == (64, "bilinear", [0.4])
    assert (found["channels"], found["pretrained"], found["min_scale"], len(found["std"])) == (
        1,
        False,
        0.5,
        1,
    )


def prefixed(
    prefix: str, state: dict[str, torch.Tensor], scale: int = 1
) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor * scale for name, tensor in state.items()}


FOREIGN = {  # what files of other trainers hold, and the names that are left out, if these are few
    "lightning": lambda s: (
        {"state_dict": {**prefixed("model.", s), "criterion.weight": torch.ones(3)}},
        1,
    ),
    "moco": lambda s: (
        {**prefixed("module.encoder_q.", s), **prefixed("module.encoder_k.", s, 0)},
        len(s),
    ),
    "net": lambda s: (
        {"net": s, "acc": 91.5, "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}}},
        0,
    ),
    "dino": lambda s: (
        {"student": prefixed("module.", s, 0), "teacher": prefixed("backbone.", s)},
        0,
    ),
    "dino's head": lambda s: (
        {"teacher": {**prefixed("backbone.", s), "head.mlp.weight": torch.ones(3)}},
        1,
    ),
}


@pytest.mark.parametrize("form", FOREIGN)
def test_the_model_is_found_among_other_tensors_of_a_file_and_these_are_named(form):
    state = {
        name: tensor
        for name, tensor in model_of().state_dict().items()
        if not name.startswith("fc.")
    }
    content, others = FOREIGN[form](state)
    torch.save(content, "W.pth")
    tensors, _ = read_any(Path("W.pth"))
    found, left_out = fit_names(tensors, model_of(), "W.pth", MODEL)
    assert found.keys() == state.keys() and all(
        torch.equal(found[name], state[name]) for name in state
    )
    assert len(left_out) == others and not state.keys() & {*left_out}
    if form == "lightning":
        settings_of("--model", MODEL)
        assert (
            "not used: criterion.weight" in Path("runs/run/init_from.txt").read_text().splitlines()
        )


def timm_swin() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "img_size": 64,
        "patch_size": 4,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (1, 2),
    }
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes)


def test_names_of_the_authors_of_swin_are_converted_by_timm():
    """In their code, a stage ends with its downsampling; in timm, the next one begins with it."""
    own, theirs = timm_swin().state_dict(), {}
    for name, tensor in own.items():
        name = name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head")
        theirs[name] = tensor
    theirs["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(
        16, 16, dtype=torch.int64
    )
    found, _ = fit_names(theirs, timm_swin(), "W.pth", "timm/swin")
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_names_that_do_not_fit_are_shown_and_order_is_suggested_but_not_used():
    state = model_of().state_dict()
    write("order", state)
    image_folder("data/val", dict.fromkeys(NAMES, 1), size=(160, 160))
    words = ["--model", MODEL, "--weights", "W.pth", "--data", "data"]
    line = refused(eval.main, *words)
    assert (
        "all shapes are those of timm/test_resnet in the same order (layer0 for conv1.0.weight, layer1 for"
        in line
    )
    assert line.endswith("add --init_match order")
    torch.save(dict(reversed(state.items())), "W.pth")
    line = refused(eval.main, *words, "--init_match", "order")
    assert "its tensors do not have the shapes of timm/test_resnet in the same order" in line


@pytest.mark.parametrize(
    ("script", "flags", "text"),
    [
        (train, ["--pretrained", "x.pth"], "--pretrained takes no file: .*; use --init_from x.pth"),
        (
            eval,
            ["--model", "resnet18", "--pretrained", "x.pth"],
            "--pretrained takes no file: .*; use --weights x.pth",
        ),
        (train, ["--weights", "x.pth"], "unknown flag --weights; use --init_from"),
        (
            train,
            ["--init_from", "x.pth"],
            "--init_from x.pth: no such file or folder; give a run, a checkpoint, a file",
        ),
        (eval, ["--weights", "x.pth"], "--weights x.pth needs --model: .*; add --model NAME$"),
        (eval, ["--ckpt", "run", "--mean", "0.5"], "--ckpt and --mean cannot be used together"),
        (
            eval,
            ["--model", "resnet18", "--weights", "ema", "--data", "d"],
            "--model needs weights: .*--weights FILE",
        ),
    ],
)
def test_each_wrong_flag_for_a_file_ends_in_an_error_that_names_the_right_one(script, flags, text):
    assert re.search(text, refused(script.main, *flags))


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def bomb() -> bytes:
    """A file of torch.save with a compressed tensor of zeros."""
    made, packed = io.BytesIO(), io.BytesIO()
    torch.save({"fc.weight": torch.zeros(2_000_000)}, made)
    with (
        zipfile.ZipFile(made) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    return packed.getvalue()


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def contains_itself() -> dict:
    inside: dict = {}
    inside["model"] = inside
    return inside


STATE = {"fc.weight": torch.ones(2, 3)}
HOSTILE = {
    "code": (
        pickle.dumps({"fc.weight": Harmful()}, 2),
        "loading getattr in it would execute code; if you trust the file",
    ),
    "code in an archive": (saved({"state_dict": STATE, "hook": Harmful()}), "would execute code"),
    "zip bomb": (bomb(), r"it is larger when unpacked \(8,0\d\d,\d{3} bytes\)"),
    "truncated": (saved(STATE)[:-200], "cannot be read"),
    "truncated safetensors": (b"\x50" + bytes(7) + b'{"fc.weight":', "is not a safetensors file"),
    "huge header": (b"\xff" * 7 + b"\x7f{", "is not a safetensors file"),
    "not a state dict": (saved([1, 2]), "has no state dict with tensors"),
    "contains itself": (saved(contains_itself()), "has no state dict with tensors"),
    "sparse": (
        saved({"fc.weight": torch.eye(3).to_sparse()}),
        "fc.weight is not a plain dense tensor",
    ),
    "a view that is larger than its storage": (
        saved({"a": torch.ones(1).expand(10**6)}),
        "a is not a plain dense",
    ),
    "empty": (b"", "cannot be read"),
    "page": (b"<!DOCTYPE html>" * 10, "is not a file of torch.save; give another file"),
    "pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "is not a file of torch.save",
    ),
    "without memory": (
        saved({"a": torch.zeros(3, device="meta")}),
        "a is not a plain dense tensor",
    ),
    "negated when read": (
        saved({"a": torch.ones(2, dtype=torch.complex64).conj().imag}),
        "a is not a plain dense",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malicious_or_malformed_file_ends_with_one_line_and_executes_nothing(name):
    content, text = HOSTILE[name]
    Path("W.pth").write_bytes(content)
    with pytest.raises(UserError, match=text) as caught:
        read_any(Path("W.pth"))
    assert "\n" not in str(caught.value) and not Path("executed").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("fc.weight"), "has no head for timm/test_resnet"),
        (
            lambda state: state.update({"layer9.weight": torch.ones(2)}),
            r"different model \(layer9.weight: shape",
        ),
        (
            lambda state: state.pop("conv1.0.weight"),
            r"holds a different model \(conv1.0.weight: nothing in",
        ),
        (
            lambda state: state.update({"fc.bias": torch.zeros(3).long()}),
            r"fc.bias: shape \[3\] of integers in",
        ),
        (
            lambda state: state["fc.bias"].fill_(float("nan")),
            r"weights are NaN or infinite \(fc.bias\)",
        ),
        (
            lambda state: state.update(dict.fromkeys(["fc.weight"], torch.ones(4, 96))),
            "have 4 classes, and --data",
        ),
    ],
    ids=["no head", "more", "missing", "wrong type", "NaN", "another head"],
)
def test_weights_that_do_not_fit_are_not_evaluated(change, text):
    state = model_of().state_dict()
    change(state)
    torch.save(state, "W.pth")
    image_folder("data/val", dict.fromkeys(NAMES, 1), size=(160, 160))
    line = refused(eval.main, "--model", MODEL, "--weights", "W.pth", "--data", "data")
    assert re.search(text, line), line


def test_the_classes_follow_from_the_number_of_outputs_and_the_names_of_the_data():
    larger = ImageNetInfo("imagenet-22k").label_names()
    assert (
        len(larger) == 21841 and names_of_outputs(21841, True, ["n02123045", "n01440764"]) == larger
    )
    assert names_of_outputs(1000, True, ["tench", "tabby"]) == CLASSES
    own = [f"class {number}" for number in range(1000)]
    assert names_of_outputs(3, False, NAMES) == NAMES and names_of_outputs(1000, False, own) == own
    for count, names in ((3, NAMES), (1000, own)):  # published weights have other classes
        with pytest.raises(UserError):
            names_of_outputs(count, True, names)
    with pytest.raises(UserError, match="the weights have 21,841 classes, and --data has 3"):
        names_of_outputs(21841, False, NAMES)


def test_the_rate_of_the_model_alone_is_that_of_all_ranks():
    write("plain", model_of().state_dict())
    image_folder("data/val", dict.fromkeys(NAMES, 1), size=(160, 160))
    words = [
        "--model",
        MODEL,
        "--weights",
        "W.pth",
        "--data",
        "data",
        "--throughput",
        "--eval_batch_size",
        "4",
    ]
    outcomes = run_ranks(2, eval.main, words)
    rate = outcomes[0].value["model_images_per_second"]
    assert rate == outcomes[1].value["model_images_per_second"] > 0
    assert (
        re.search(rf"model alone +{rate:,.1f} images/s", outcomes[0].out)
        and "CUDA" not in outcomes[0].err
    )


def test_a_head_without_names_goes_to_classes_named_by_numbers_in_numeric_order():
    torch.save(state := model_of(12).state_dict(), "W.pth")
    numbers = [str(number) for number in range(1, 13)]
    image_folder("photos/train", dict.fromkeys(numbers, 2), size=(110, 120), kind="jpg")
    words = [
        "--data",
        "photos",
        "--init_from",
        "W.pth",
        "--model",
        MODEL,
        "--max_steps",
        "1",
        "--lr",
        "1e-9",
    ]
    words += [
        "--global_batch_size",
        "4",
        "--run_name",
        "run",
        "--num_workers",
        "0",
        "--report",
        "false",
    ]
    (outcome,) = run_ranks(1, train.main, words)
    assert outcome.code == 0, outcome.err
    assert "outputs for classes, in order: 1, 2, 3, 4, 5, 6, ... (12 in all)" in outcome.out
    order = [int(name) - 1 for name in sorted(numbers)]  # the run's own classes are sorted as text
    assert torch.allclose(weights("run")["fc.bias"], state["fc.bias"][order], atol=1e-6)
    Path("photos/list.csv").write_text(
        "path,label\n"
        + "\n".join(f"train/{name}/{place:03}.jpg,{name}" for name in numbers for place in (0, 1))
    )
    words = ["--model", MODEL, "--weights", "W.pth", "--num_workers", "0", "--data"]
    found = [run_ranks(1, eval.main, [*words, data])[0] for data in ("photos", "photos/list.csv")]
    assert found[0].value["loss"] == pytest.approx(found[1].value["loss"], rel=1e-6)
    assert all("classes of the outputs, in order: 1, 2, 3" in each.out for each in found)
