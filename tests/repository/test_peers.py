"""benchmarks/peers: scripts as others would write them train what Lockstep trains."""

import importlib
import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import load_dataset
from helpers.ranks import returned
from helpers.training_runs import ROOT, start, train_run
from safetensors.torch import load_file
from torchvision.datasets import MNIST

from utils.data import InputSpec
from utils.models.small import MnistCNN

BENCHMARKS = ROOT / "benchmarks"
COUNTS = {"train": 300, "test": 40}


@pytest.fixture
def modules(monkeypatch):
    """Import a script of benchmarks/ or benchmarks/peers."""
    for folder in (BENCHMARKS, BENCHMARKS / "peers"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


@pytest.fixture
def small_mnist(modules, tmp_path):
    """A folder like build/mnist, with few images, and these by split."""
    random = np.random.default_rng(0)
    images = {
        split: (random.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n) % 10)
        for split, n in COUNTS.items()
    }
    splits = ((split, *arrays) for split, arrays in images.items())
    modules("mnist").write(tmp_path / "mnist", splits, "a few images")
    return tmp_path / "mnist", images


def test_mnist_has_the_same_images_as_idx_files_and_as_png_files(small_mnist, modules):
    folder, images = small_mnist
    again = {split: rest for split, *rest in modules("mnist").from_parquet(folder)}
    for split, (pixels, labels) in images.items():
        idx = MNIST(folder, train=split == "train")
        assert np.array_equal(idx.data, pixels) and np.array_equal(idx.targets, labels)
        png = load_dataset("parquet", data_files={split: f"{folder}/{split}-*.parquet"})[split]
        assert np.array_equal(np.stack([*map(np.asarray, png["image"])]), pixels)
        assert list(png["label"]) == labels.tolist()
        assert np.array_equal(again[split][0], pixels)


def test_without_a_network_images_are_generated_and_the_output_says_so(
    modules, tmp_path, monkeypatch, capsys
):
    mnist = modules("mnist")

    def no_network(_folder):
        raise RuntimeError("no network")

    monkeypatch.setattr(mnist, "downloaded", no_network)
    monkeypatch.setattr(mnist, "generated", partial(mnist.generated, 50))
    folder = tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["mnist.py", str(folder)])
    mnist.main()
    assert len(MNIST(folder)) == 50 and MNIST(folder).data.float().std() > 30
    assert mnist.ready(tmp_path / "new") == "generated images in place of MNIST"
    assert "no network" in capsys.readouterr().err
    assert mnist.ready(tmp_path / "new").startswith("generated")  # not made again


def test_the_network_of_the_peers_is_mnist_cnn(modules):
    torch.manual_seed(0)
    theirs = modules("parts").TutorialNet().eval()
    ours = MnistCNN(InputSpec(28, 28, 1, [0.5], [0.5]), classes=10).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_the_recipe_of_the_peers_is_that_of_train_py(small_mnist, modules, monkeypatch):
    """Network, optimizer and learning rates of recipes/mnist_fast.yaml."""
    folder, images = small_mnist
    recipe = ["--config", str(ROOT / "recipes/mnist_fast.yaml"), "--max_steps", "5"]
    data = ["--data", "torchvision/MNIST", "--data_dir", str(folder)]
    log = train_run(1, "run", *recipe, *data, "--log_every", "1", "--threads", "1")
    words = ["peer", "--data", str(folder), "--recipe", "lockstep", "--updates", "5"]
    monkeypatch.setattr(sys, "argv", words)
    args = modules("parts").read_flags("")
    model, optimizer, scheduler = modules("parts").make_work(args, torch.tensor(images["train"][0]))
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([one["lr"] for one in log if one["kind"] == "train"], rel=1e-5)
    settings = yaml.safe_load(Path("runs/run/config.yaml").read_text())
    (groups,) = {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups}
    assert groups == (settings["momentum"], True) and settings["optimizer"] == "sgd"
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert max(decays) == settings["weight_decay"]
    saved = load_file(next(Path("runs/run/checkpoints").glob("step-*/model.safetensors")))
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in saved.items()}
    assert settings["label_smoothing"] == 0 and settings["lr_schedule"] == "onecycle"
    assert modules("parts").batch_size(args) * args.processes == settings["global_batch_size"]


@pytest.mark.full
def test_a_peer_prints_its_line_at_the_end_of_the_epoch(small_mnist, modules, monkeypatch):
    """The time to an accuracy would else be that of all epochs."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    folder, _ = small_mnist
    command = modules("against_peers").peer("tutorial", 2, "--data", folder, "--epochs", "100000")
    lines, _ = modules("common").run(command, until=lambda line: line.startswith("{"), seconds=300)
    assert json.loads(lines[-1][1])["epoch"] == 1


# timm leaves out an incomplete batch, and Accelerate repeats images to fill it.
EPOCH = {"timm": 256, "hugging_face": 512, "hugging_face_decoded": 512}
PEERS = ["tutorial", "hugging_face", "hugging_face_decoded", "timm", "lightning"]


@pytest.mark.full
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_trains_either_work_on_two_processes_and_prints_its_line(name, small_mnist, modules):
    if name == "lightning" and not find_spec("lightning"):
        pytest.skip("lightning is not installed")
    folder, _ = small_mnist
    for more in ((), ("--recipe", "lockstep", "--updates", "2")):
        command = modules("against_peers").peer(name, 2, "--data", str(folder), *more)
        code, out, err = start(*map(str, command), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        assert code == 0, err
        (line,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert line["epoch"] == 1 and line["images_per_second"] > 0
        assert round(line["accuracy"] * COUNTS["test"], 6).is_integer()
        images = round(line["images_per_second"] * line["train_s"])
        assert images == (256 if more else EPOCH.get(name, 300))


@pytest.mark.full
def test_the_comparison_writes_a_record_with_command_commit_and_all_rounds(small_mnist):
    folder, _ = small_mnist
    flags = ["--sides", "tutorial,bare_step", "--rounds", "2", "--json", "record.json"]
    script = BENCHMARKS / "against_peers.py"
    code, _, err = start(sys.executable, str(script), "--mnist", str(folder), *flags)
    assert code == 0, err
    record = json.loads(Path("record.json").read_text())
    assert record["command"].endswith("--sides tutorial,bare_step --rounds 2 --json record.json")
    assert {"date", "commit", "versions", "machine"} <= record.keys()
    assert record["settings"]["images"] == "a few images"
    sides = ["epoch, ours, 2", "epoch, tutorial, 2", "pair, ours, 2", "pair, bare_step, 2"]
    assert sorted(record["results"]) == sorted(sides)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in record["results"].values())


@pytest.mark.full
def test_the_time_to_an_accuracy_is_that_of_the_line_that_reaches_it(modules):
    timed = modules("time_to_accuracy")
    program = "import time; print('a 0.5', flush=True); time.sleep(1); print('a 0.95', flush=True)"
    program += "; time.sleep(600)"
    command = [sys.executable, "-c", program]

    def accuracy_of(line):
        return float(line.split()[1])

    found = returned(1, timed.reach, command, accuracy_of, 0.9, 60.0)[0]
    assert 1 < found["reached"] < 60 and found["accuracy"] == 0.95 and found["evaluations"] == 2
