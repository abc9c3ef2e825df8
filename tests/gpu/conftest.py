"""Checks of everything that needs a GPU: `make gpu`. Their table is written to build/gpu.md and build/gpu.json.

Without a GPU they are skipped. With LOCKSTEP_GPU_TESTS_ON_CPU=1, their parts that need no GPU run on the CPU.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.gpu_runs import ON_CPU, command, end_started, environment, finish, gpu_count
from helpers.gpu_runs import begin as begin_command
from helpers.training_runs import ROOT

# A folder for the table
REPORT = Path(os.environ.get("LOCKSTEP_GPU_REPORT", ROOT / "build")).absolute()
_RESULTS: list[dict] = []


@pytest.fixture(scope="session")
def gpus() -> int:
    """The number of GPUs."""
    return 0 if ON_CPU else gpu_count()


@pytest.fixture(autouse=True)
def nothing_left():
    """A failed test leaves no process behind."""
    yield
    end_started()


@pytest.fixture(scope="session")
def pair(gpus, tmp_path_factory) -> list[str]:
    """Flags for two ranks: none for NCCL, or those for gloo if NCCL does not let them share the only GPU."""
    if gpus != 1:
        return []
    folder = tmp_path_factory.mktemp("pair")
    flags = ["--model", "mlp", "--max_steps", "1", "--output_dir", str(folder / "runs")]
    words = command(2, "train.py", *flags, "--cache_dir", str(folder), "--timeout", "30")
    out = str(folder / "out.txt")
    with suppress(AssertionError):  # NCCL may also hang
        if finish(begin_command(words, out), out, 120).code == 0:
            return []
    print(f"two ranks cannot share the GPU over NCCL:\n{Path(out).read_text()[-2000:]}")
    return ["--backend", "gloo"]


@pytest.fixture
def over_nccl(pair, gpus) -> None:
    """Skip a check that is about NCCL if two ranks cannot use it."""
    if pair and not ON_CPU:
        pytest.skip("NCCL does not accept two ranks on one GPU, and there is only one")


@pytest.hookimpl(trylast=True)  # after `-m` has selected
def pytest_collection_modifyitems(items):
    """Without a GPU, one check is skipped for all of them, so that one line says so."""
    chosen = [item for item in items if "tests/gpu/" in item.nodeid]
    if chosen and not ON_CPU and not gpu_count():
        reason = f"no GPU is visible, so none of the {len(chosen)} checks ran"
        chosen[0].add_marker(pytest.mark.skip(reason=reason))
        items[:] = [item for item in items if item not in chosen[1:]]


def pytest_runtest_logreport(report):
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        name = report.nodeid.split("::")[1].removeprefix("test_").replace("_", " ")
        figures = dict(report.user_properties)
        _RESULTS.append({"check": name, "outcome": report.outcome, "seconds": report.duration, "figures": figures})


def pytest_sessionfinish():
    if any(result["outcome"] != "skipped" for result in _RESULTS):
        REPORT.mkdir(parents=True, exist_ok=True)
        (REPORT / "gpu.json").write_text(json.dumps({"machine": machine(), "checks": _RESULTS}, indent=1) + "\n")
        (REPORT / "gpu.md").write_text(as_markdown(machine(), _RESULTS))


def machine() -> dict:
    """The GPUs, the driver and the libraries."""
    script = "import sys; sys.path[:0] = ['benchmarks']; import common, json; print(json.dumps(common.machine()))"
    words = [sys.executable, "-c", script]
    answer = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=ROOT, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def as_markdown(machine: dict, results: list[dict]) -> str:
    """The table of the checks, in Markdown."""
    lines = ["| check | result | seconds | figures |", "| --- | --- | --- | --- |"]
    for result in results:
        figures = ", ".join(f"{name} {value}" for name, value in result["figures"].items())
        cells = result["check"], result["outcome"], f"{result['seconds']:.0f}", figures
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ", ".join(f"{name} {value}" for name, value in machine.items()), ""])
