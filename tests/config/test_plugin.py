"""--plugin: the parts of docs/architecture.md work together, and runs with them are exact."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder, pictures
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    MLP,
    ROOT,
    kept_in,
    launch,
    records,
    refused,
    restore,
    rewrite_manifest,
    same_tensors,
    slow_train,
    start,
    weights,
)
from helpers.waiting import until
from torch import nn

import eval as eval_script
import export
import predict
import replay
import train
from extras.compare.__main__ import main as report
from utils.config.plugin import check_plugin, load_plugin

PAGE = (ROOT / "docs/architecture.md").read_text().split("\n## Edits of the loop")[0]
LAB = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S))
LAB += """
class TwoHeads(nn.Module):
    def __init__(self, spec, classes):
        super().__init__()
        layers = nn.Conv2d(spec.channels, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.1)
        self.first = nn.Sequential(*layers)
        self.early, self.last = nn.Linear(8, classes), nn.Linear(8, classes)

    def forward(self, images):
        features = self.first(images).square().mean((2, 3))
        return {"early": self.early(features), "logits": self.last(features), "features": features}


OWN_MODELS["two_heads"] = TwoHeads
"""
FLAGS = shlex.split(" ".join(re.findall(r"^python train.py (.+)$", PAGE, re.M)))
FLAGS += shlex.split(
    "--microbatches 4 --global_batch_size 12 --drop_last --image_size 16 --epochs 2"
)
FLAGS += shlex.split("--log_every 1 --save_every 3 --eval_every 4 --threads 1 --report false")
MINE, CKPT = ["--plugin", "lab.py"], ["--ckpt", "runs/two"]
ALONE = [word for word in FLAGS if word not in MINE]
SCRIPTS = [
    (eval_script.main, [*CKPT, "--predictions", "found.json", "--json", "metrics.json"]),
    (predict.main, [*CKPT, "photos", "--out", "photos.json"]),
    (export.main, [*CKPT, "--to", "torch", "--out", "exported"]),
    (replay.main, ["--run", "runs/two", "--update", "2"]),  # before the first checkpoint
    (replay.main, ["--run", "runs/two", "--update", "5"]),
    (report, ["runs/two"]),
    *((train.main, [*ALONE, "--run_name", run, "--resume", "auto"]) for run in ("two", "killed")),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run `two` on two processes and `one` on one, with all parts of the page."""
    with kept_in(folder := tmp_path_factory.mktemp("extending") / "runs"):
        Path("lab.py").write_text(LAB)
        Path("arrays").mkdir()
        labels, pixels = np.arange(60) * 5 % 7 % 3, pictures(60, (16, 16), seed=0)
        pixels[..., 0] = 40 * labels[:, None, None] + pixels[..., 0] // 3  # can be learnt
        split = {"x_train": pixels[:54], "y_train": labels[:54], "x_test": pixels[54:]}
        np.savez("arrays/pictures.npz", y_test=labels[54:], **split)
        for count, name in ((2, "two"), (1, "one")):
            returned(count, train.main, [*FLAGS, "--run_name", name])
        shutil.copytree("runs/two", "runs/killed", ignore=lambda *_: ["checkpoints"])
    return folder


@pytest.fixture
def runs(made, monkeypatch):
    """The runs as they were made, in the working directory."""
    monkeypatch.chdir(restore(made))


def same_run(one: str, other: str) -> bool:
    files = ("model.safetensors", "optimizer.bin")
    losses = [[r["loss"] for r in records(name) if "loss" in r] for name in (one, other)]
    return losses[0] == losses[1] and all(
        same_tensors(weights(one, file=file), weights(other, file=file)) for file in files
    )


def test_one_and_two_processes_train_the_parts_of_a_plug_in_with_equal_bits(runs):
    assert same_run("one", "two") and len(weights("two", file="optimizer.bin")) == 6
    log = records("two", "train")
    rates = [log[0]["lr"] / (1 - math.tanh(-4)) * (1 - math.tanh(-4 + 7 * n / 8)) for n in range(8)]
    assert [record["lr"] for record in log] == pytest.approx(rates)
    assert "grad_norm" not in log[0]  # only known with --clip_norm
    (state,) = Path("runs/two/checkpoints").glob("*8/state.json")
    assert json.loads(state.read_text())["versions"]["lab.py"] == sha256(LAB.encode()).hexdigest()


OLD_PATHS = {
    "utils.models.zoo": "OWN_MODELS",
    "utils.tasks.classification": "LOSSES Classification",
    "utils.tasks.table": "TASKS",
    "utils.training.optim": "OPTIMIZERS",
    "utils.training.schedule": "SCHEDULES after_warmup",
    "utils.data.sources": "SOURCES",
    "utils.data.splits": "Source fingerprint_of whole_split",
    "utils.data.augment": "AUGMENTATIONS Transform",
}


def test_the_paths_that_earlier_versions_named_lead_to_the_same_objects():
    for path, names in OLD_PATHS.items():
        door = import_module(path.rpartition(".")[0])
        for name in names.split():
            assert getattr(import_module(path), name) is getattr(door, name)
            assert name in LAB
    assert import_module("utils.config.defaults").RATES is import_module("utils.training").RATES


@pytest.mark.full
def test_a_plug_in_with_the_old_paths_trains_the_same_bits(runs):
    text = LAB
    for path, names in OLD_PATHS.items():
        for name in names.split():
            text = f"from {path} import {name}\n{text}"
    text, count = re.subn(r"^from utils\.\w+ import .*\n", "", text, flags=re.M)
    assert count >= 7
    Path("old").mkdir()
    Path("old/lab.py").write_text(text)
    flags = [*FLAGS, "--run_name", "old"]
    flags[flags.index("lab.py")] = "old/lab.py"
    returned(1, train.main, flags)
    assert same_run("old", "one")


@pytest.mark.parametrize(("main", "flags"), SCRIPTS)
def test_every_script_refuses_a_run_without_its_plug_in_and_names_it(runs, main, flags):
    assert refused(main, *flags).endswith(": was made with the plug-in lab.py; add --plugin lab.py")


@pytest.mark.parametrize(
    ("main", "flags"),
    [SCRIPTS[0], *(pytest.param(*s, marks=pytest.mark.full) for s in SCRIPTS[1:])],
)
def test_a_changed_plug_in_is_reported_and_used(runs, main, flags):
    image_folder("photos", {"a": 2})
    Path("lab.py").write_text(LAB + "CHANGED = 1\n")
    (outcome,) = run_ranks(1, main, [*flags, *MINE])
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("was not made with this version of --plugin lab.py\n") == 1


def plain_loss(run):
    """The evaluation loss of the logits of two_heads, without Lockstep's loop."""
    load_plugin("lab.py")
    from lab import TwoHeads

    model = TwoHeads(SimpleNamespace(channels=3), 3).eval()
    model.load_state_dict(weights(run))
    arrays = np.load("arrays/pictures.npz")
    images = torch.from_numpy(arrays["x_test"]).permute(0, 3, 1, 2) / 127.5 - 1
    labels = torch.from_numpy(arrays["y_test"])
    losses = nn.functional.cross_entropy(model(images)["logits"], labels, reduction="none")
    return (losses + 0.5 * (1 - torch.exp(-losses))).mean().item()


@pytest.mark.full
def test_a_task_trains_all_outputs_and_its_logits_are_evaluated_and_exported(runs):
    flags = [*FLAGS, *shlex.split("--model two_heads --task supervised")]
    for count in (1, 2):
        returned(count, train.main, [*flags, "--run_name", f"heads{count}"])
    assert same_run("heads1", "heads2")
    last = [*MINE, "--ckpt", "runs/heads2/checkpoints/step-00000008"]
    loss = returned(1, eval_script.main, last)[0]["loss"]
    assert loss == records("heads1", "eval")[-1]["loss"]
    assert loss == pytest.approx(returned(1, plain_loss, "heads1")[0])
    exported = returned(1, export.main, [*last, "--to", "torch", "--out", "heads"])
    assert exported[0]["difference"] < 1e-6
    line = refused(train.main, *flags, "--task", "classification")
    assert "--task has no loss for a model that returns more than scores of classes; use" in line


@pytest.mark.full
def test_evaluations_predictions_exports_and_replays_have_the_bits_of_the_run(runs):
    image_folder("photos", {"a": 20})
    seen = []
    for count in (1, 2):
        for main, flags in SCRIPTS[:2]:
            returned(count, main, [*flags, *MINE])
        seen.append([Path(f"{name}.json").read_text() for name in ("found", "photos")])
    assert seen[0] == seen[1]
    (main, flags), (again, update) = SCRIPTS[2], SCRIPTS[4]
    assert returned(1, main, [*flags, *MINE])[0]["difference"] < 1e-6
    replayed = run_ranks(1, again, [*update, *MINE])[0].out
    logged = {record["step"]: record["loss"] for record in records("two", "train")}
    assert f"update 5: loss {logged[5]}\n" in replayed


def test_an_evaluation_computes_the_loss_and_the_metric_of_the_plug_in(runs):
    returned(1, eval_script.main, [*SCRIPTS[0][1], *MINE])
    rows, found = (json.loads(Path(f"{name}.json").read_text()) for name in ("found", "metrics"))
    losses, gaps = [], [0.0] * 10
    for row in rows:
        p = {row[f"class_{k}"]: row[f"probability_{k}"] for k in (1, 2, 3)}[row["label"]]
        losses.append(0.5 * (1 - p) - math.log(p))
        top = row["probability_1"]
        gaps[min(9, int(10 * top))] += top - (row["predicted"] == row["label"])
    assert found["loss"] == pytest.approx(math.fsum(losses) / len(rows), rel=1e-4)
    assert found["ece"] == pytest.approx(sum(map(abs, gaps)) / len(rows), rel=1e-4)


@pytest.mark.full
def test_a_killed_run_resumes_to_the_same_bits(runs):
    started = start_ranks(2, slow_train, FLAGS, 0, 5)
    until(lambda: Path("held-0").exists() and Path("held-1").exists())
    started.kill()
    started.finish()
    returned(2, train.main, [*FLAGS, "--run_name", "run", "--resume", "auto"])
    assert same_run("run", "two") and records("run", "start")[1]["step"] == 4  # the best


@pytest.mark.full
def test_launched_runs_and_a_script_that_calls_main_have_the_same_bits(runs):
    code, out, err = launch("2cpu", "train.py", *FLAGS, "--run_name", "launched")
    assert code == 0 and "augmented by loader processes" in out, err
    Path("own.py").write_text(
        f"{LAB}\nif __name__ == '__main__':\n    import train\n    train.main()"
    )
    assert start("python", "own.py", *ALONE, "--run_name", "own", PYTHONPATH=str(ROOT))[0] == 0
    assert same_run("launched", "two") and same_run("own", "two")
    command = shlex.split(out.split("evaluate it: ")[1])
    assert subprocess.run(command, capture_output=True).returncode == 0


def spawned() -> str:
    load_plugin("lab.py")
    from lab import Solarize

    with get_context("spawn").Pool(1) as pool:
        return pool.apply(type, (Solarize(),)).__name__


@pytest.mark.full
def test_loader_processes_that_are_spawned_import_the_plug_in(runs):
    assert returned(1, spawned) == ["Solarize"]


def test_help_and_recipes_know_the_plug_in(runs):
    Path("recipe.yaml").write_text("plugin: lab.py\nmodel: tiny_cnn\n")
    (outcome,) = run_ranks(1, train.main, ["--help", "--config", "recipe.yaml"])
    assert {"(One", "poly", "beta2)"} <= set(outcome.out.split())
    assert "did you mean poly?" in refused(train.main, "--config", "recipe.yaml", "--loss", "pol")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("absent.py", None, ": no such file"),
        ("mine.py", "a = 1\na / 0", ", line 2: ZeroDivisionError: division by zero"),
        ("mine.py", "a = (", ": SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("", None, ": no such file"),
        ("lab", "", ": is not a name for a Python module; rename the file"),
        ("lab.v2.py", "", ": is not a name for a Python module; rename the file"),
        ("json.py", "", ": ImportError: another Python module has this name"),
    ],
)
def test_an_error_of_a_plug_in_is_one_line_with_its_place(name, text, problem):
    if text is not None:
        Path(name).write_text(text)
    line = refused(train.main, "--plugin", name, processes=2)
    assert line.startswith(f"train.py: error: --plugin {name}{problem}")


ENDINGS = {
    "raise SystemExit": ", line 1: SystemExit",
    "import sys\nsys.exit(3)": ", line 2: SystemExit: 3",
    "raise KeyboardInterrupt": ", line 1: KeyboardInterrupt",
    "raise GeneratorExit": ", line 1: GeneratorExit",
    "class Odd(BaseException): pass\nraise Odd('why')": ", line 2: Odd: why",
    # Ctrl-C while it is imported
    "import signal\nsignal.signal(2, signal.default_int_handler)\n"
    "signal.raise_signal(2)": ", line ",
}


@pytest.mark.parametrize("text", ENDINGS)
def test_a_plug_in_that_ends_python_is_one_line_with_the_fix_and_exit_code_2(text):
    Path("mine.py").write_text(text)
    line = refused(train.main, "--plugin", "mine.py", processes=2)
    assert line.startswith(f"train.py: error: --plugin mine.py{ENDINGS[text]}")
    assert line.endswith('below if __name__ == "__main__":')


def with_own_file(flags: list[str]) -> None:
    folder = Path(os.environ["RANK"])
    folder.mkdir()
    (folder / "mine.py").write_text(f"RANK = {folder}")
    train.main([*flags, "--plugin", f"{folder}/mine.py"])


def test_ranks_with_different_plug_ins_are_refused():
    assert "rank 1 has another --plugin file than rank 0" in refused(with_own_file, processes=2)


def notebook(flags: list[str]) -> None:
    for name, more in (("plain", []), ("mine", ["--plugin", "mine.py"])):
        train.main([*MLP, "--max_steps", "1", "--run_name", name, *more])
    Path("mine.py").write_text("changed = 1")
    train.main([*MLP, "--plugin", "mine.py"])


@pytest.mark.full
def test_one_process_saves_the_plug_in_of_a_second_run_and_refuses_a_changed_one():
    Path("mine.py").write_text("")
    line = refused(notebook)
    assert line.endswith("--plugin mine.py: has changed since it was imported; restart Python")
    versions = [records(name, "start")[0]["versions"] for name in ("plain", "mine")]
    assert versions[1] == versions[0] | {"mine.py": sha256(b"").hexdigest()}


@pytest.mark.full
def test_nothing_in_a_checkpoint_names_a_file_that_is_run(runs):
    Path("evil.py").write_text("open('ran', 'w')")
    for config in Path("runs/two").rglob("config.yaml"):
        config.write_text(config.read_text().replace("plugin: null", "plugin: evil.py"))
        if config.parent.parent.name == "checkpoints":
            rewrite_manifest(config.parent)
    for main, flags in (SCRIPTS[0], SCRIPTS[3]):
        returned(1, main, [*flags, *MINE])
    assert not Path("ran").exists() and "evil.py" in config.read_text()
    with pytest.raises(ValueError, match=r"^runs: was made with the plug-in evil.py; add "):
        check_plugin(Path("runs"), {"/tmp/evil.py": ""})


def test_the_diff_of_the_page_applies():
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)
    subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=diff, text=True, check=True)
