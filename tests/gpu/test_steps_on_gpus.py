"""Speed of updates on one GPU, the most important first.

A CUDA graph for small networks, a search for kernels, compiled models, timm; and CIFAR-10 as a
whole. Measurements write figures and assert nothing.
"""

import io
import json
import os
import select
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
from helpers.gpu_runs import REPORT, ROOT, environment, losses, pick, seconds_left, train, trained
from PIL import Image
from pyarrow.parquet import ParquetFile

pytestmark = pytest.mark.gpu

SMALL = {"widths": pick([32, 64, 128], [8, 8, 8])}
NETWORKS = {
    "mnist_cnn": {"model": "mnist_cnn", "side": 28, "channels": 1, "batch": 128},
    "fastnet, MNIST": {"model": "fastnet", "side": 28, "channels": 1, "batch": 128, "args": SMALL},
    "fastnet, CIFAR-10": {
        "model": "fastnet",
        "side": 32,
        "batch": 1024,
        "args": {"widths": pick([64, 256, 256], [8, 8, 8])},
    },
    "ResNet-50": {"model": pick("resnet50", "resnet18"), "side": pick(224, 32), "batch": 128},
    "ViT-S": {
        "model": pick("timm/vit_small_patch16_224", "timm/test_vit"),
        "side": pick(224, 160),
        "batch": 256,
    },
}
USUAL = {"args": {}, "channels": 3, "library": "Lockstep", "mode": "eager", "search": False}


class CaseRunner:
    """Runs cases in a subprocess, restarted after an error or a timeout."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.process: subprocess.Popen | None = None

    def ask(self, what: str, network: str, **changes) -> dict:
        """Run a case and return the answer."""
        case = USUAL | {"what": what, "precision": "no", "seconds": pick(2.5, 0.2)}
        case |= NETWORKS[network] | changes
        case["batch"] = pick(case["batch"], min(case["batch"], 8))
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.start()
        try:
            return self.answer(case)
        except BaseException:  # it may still answer this case when the next one is asked
            self.end()
            raise

    def answer(self, case: dict) -> dict:
        """Send a case and wait for one line."""
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], max(0, seconds_left()))[0]:
            raise AssertionError("no answer within the limit")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError((self.folder / "errors.txt").read_text()[-3000:])
        return json.loads(line)

    def start(self) -> None:
        words = [sys.executable, f"{ROOT}/tests/gpu/steps.py"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (self.folder / "errors.txt").open("w") as errors:
            env = environment(CUBLAS_WORKSPACE_CONFIG=":4096:8")  # for equal bits
            self.process = subprocess.Popen(words, env=env, stderr=errors, cwd=self.folder, **pipes)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            with suppress(BrokenPipeError):  # of a case that was not read
                self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """Ends its process after the last case."""
    made = CaseRunner(tmp_path_factory.mktemp("steps"))
    yield made
    made.end()


@pytest.fixture
def measure(runner, record_property):
    """Measure a case and write its figures down; returns its images/s."""

    def measured(name: str, network: str, **changes) -> float:
        found = runner.ask("measure", network, **changes)
        for figure, value in found.items():
            record_property(f"{name} {figure}".strip(), value)
        return found["images/s"]

    return measured


HALF = {"precision": pick("bf16", "no")}  # a CPU is slow in bf16
PRECISIONS = {"mnist_cnn": {}, "fastnet, MNIST": HALF, "fastnet, CIFAR-10": HALF}


@pytest.mark.limit(60)  # the first one also waits for the libraries
@pytest.mark.parametrize("network", ["mnist_cnn", "fastnet, MNIST"])
def test_a_graph_has_the_bits_of_eager_updates(network, runner):
    more = PRECISIONS[network] | {"updates": pick(20, 5)}
    found = {mode: runner.ask("digest", network, mode=mode, **more) for mode in ("eager", "graph")}
    assert found["graph"]["bits"] == found["eager"]["bits"]
    # the first update chooses kernels
    assert found["graph"]["replays"] == more["updates"] - 1 and found["eager"]["replays"] == 0


@pytest.mark.limit(60)
@pytest.mark.parametrize("network", PRECISIONS)
def test_small_networks_eager_and_as_a_graph(network, measure, record_property):
    """A measurement."""
    more = PRECISIONS[network]
    eager = measure("eager", network, **more)
    measure("eager, search", network, search=True, **more)
    graph = measure("graph", network, mode="graph", **more)
    record_property("graph / eager", f"{graph / eager:.2f}")


RESNET_CASES = {  # seconds that it may take; what differs
    "without search": (45, {}),
    "with search": (75, {"search": True}),
    "timm, with search": (75, {"search": True, "library": "timm"}),
}
COMPILED = {
    "compiled": (120, {"search": True, "mode": "compiled"}),
    "timm, compiled": (120, {"search": True, "mode": "compiled", "library": "timm"}),
}


def cases(*tables):
    """Make a pytest case of each, with its limit."""
    return [
        pytest.param(name, marks=pytest.mark.limit(seconds))
        for table in tables
        for name, (seconds, _) in table.items()
    ]


@pytest.mark.parametrize("case", cases(RESNET_CASES))
def test_updates_of_a_resnet_50(case, measure):
    """A measurement."""
    measure("", "ResNet-50", **HALF, **RESNET_CASES[case][1])


FLAGS = "--report false --eval_every 100000 --save_every 100000"


@pytest.mark.limit(75)
def test_train_py_trains_a_resnet_50(record_property):
    """The full loop, to compare with the step above."""
    flags = f"{FLAGS} --data synthetic/10x{pick(224, 32)}x{pick(512, 64)} --max_eval_samples 64"
    flags += f" --model {pick('resnet50', 'resnet18')} --global_batch_size {pick(128, 8)} --lr 0.01"
    flags += f" --max_steps {pick(60, 6)} --log_every {pick(10, 2)}"
    records = trained(train(1, "run", flags))
    keep_log("run", "resnet50.jsonl")
    record_property("images/s", round(median(each["images_per_second"] for each in records[1:])))
    record_property("images/s of the first record", round(records[0]["images_per_second"]))
    wait = median(record["data_wait"] for record in records[1:])
    record_property("data_wait", f"{wait:.1%}")
    assert wait < pick(0.1, 1)


def keep_log(name: str, file: str) -> None:
    """Keep a run's log beside the table."""
    REPORT.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(f"runs/{name}/log.jsonl", REPORT / file)


CIFAR10 = os.environ.get("LOCKSTEP_GPU_CIFAR10")  # a folder


def kind_of_images(folder: str) -> str:
    """How the first image is compressed: PNG, or JPEG, which loses something."""
    file = next(Path(folder).glob("*.parquet"))
    (first,) = next(ParquetFile(file).iter_batches(1, columns=["img"])).to_pylist()
    return Image.open(io.BytesIO(first["img"]["bytes"])).format


@pytest.mark.limit(90)
def test_cifar_10_is_learned_in_seconds(record_property):
    """The recipe with the paper's widths, from a folder of CIFAR-10's parquet files."""
    if not (CIFAR10 or pick(False, True)):
        pytest.skip("needs CIFAR-10: --cifar10 FOLDER, with its parquet files")
    data = CIFAR10 or "synthetic/2x32x120"  # for the dry run
    if CIFAR10:
        record_property("images", kind_of_images(data))
    flags = f"--config {ROOT}/recipes/cifar10_fast.yaml --data {data} {FLAGS}"
    flags += f" --global_batch_size {pick(1024, 32)} --lr {pick(1, 0.1)} --weight_decay 1.3e-3"
    flags += f" --log_every {pick(50, 2)} --epochs {pick(10, 8)}"
    flags += f" --max_train_samples {pick(50000, 96)} --max_eval_samples {pick(10000, 32)}"
    widths = pick("[64, 256, 256]", "[8, 8, 8]")
    log = train(1, "run", f"{flags} --model_args '{{widths: {widths}}}'")
    keep_log("run", "cifar10.jsonl")
    (result,) = [record for record in log if record["kind"] == "eval"]
    record_property("accuracy", f"{result['accuracy']:.2%}")
    record_property("seconds of training", trained(log)[-1]["seconds"])
    record_property("images/s at the end", round(trained(log)[-1]["images_per_second"]))
    assert losses(log)[-1] < losses(log)[0]
    assert result["accuracy"] > pick(0.85, 0)


@pytest.mark.parametrize("case", cases(COMPILED))
def test_compiled_updates_of_a_resnet_50(case, measure):
    """A measurement."""
    measure("", "ResNet-50", **HALF, **COMPILED[case][1])


VIT = {
    "eager": (45, {"search": True}),
    "compiled": (120, {"search": True, "mode": "compiled"}),
}


@pytest.mark.parametrize("case", cases(VIT))
def test_updates_of_a_vit_s(case, measure):
    """A measurement."""
    measure("", "ViT-S", **HALF, **VIT[case][1])
