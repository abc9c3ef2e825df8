"""Checks of everything that needs a GPU; `run.py` runs them in parts. The table is written after
each check.

Without a GPU they are skipped. With LOCKSTEP_GPU_TESTS_ON_CPU=1, their parts that need no GPU run
on the CPU.
"""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from helpers.gpu_runs import ON_CPU, ask, command, end_started, finish, gpu_count, seconds_left
from helpers.gpu_runs import begin as begin_command
from helpers.training_runs import ROOT

from utils.files import write_file

# A folder for the table
REPORT = Path(os.environ.get("LOCKSTEP_GPU_REPORT", ROOT / "build")).absolute()


@pytest.fixture(scope="session")
def gpus() -> int:
    """The number of GPUs."""
    return 0 if ON_CPU else gpu_count()


@pytest.fixture(autouse=True)
def in_time_and_clean(gpus):
    """Skip a check that cannot run. A failed one leaves no process behind."""
    if not (gpus or ON_CPU):
        pytest.skip("no GPU is visible")
    if seconds_left() < 10:
        pytest.skip("the part has no time left")
    yield
    end_started()


@pytest.fixture(scope="session")
def shared_gpu(gpus, tmp_path_factory) -> bool:
    """Whether two ranks have to use gloo, because there is one GPU, which NCCL does not let them
    share.
    """
    if gpus != 1 or ask("print(torch.cuda.nccl.version() < (2, 30))") == "True":
        return gpus == 1
    folder = tmp_path_factory.mktemp("pair")
    flags = f"--model mlp --max_steps 1 --output_dir {folder}/runs --cache_dir {folder}"
    words = command(2, "train.py", f"{flags} --timeout 30")
    out = str(folder / "out.txt")
    with suppress(AssertionError):  # NCCL may also hang
        return finish(begin_command(words, out), out, 60).code != 0
    return True


@pytest.fixture
def pair(shared_gpu, record_property) -> str:
    """Flags for two ranks: none for NCCL, or those for gloo.

    The table says which of them is used.
    """
    record_property("backend", "gloo" if shared_gpu or ON_CPU else "nccl")
    return "--backend gloo" * shared_gpu


@pytest.fixture
def over_nccl(shared_gpu) -> None:
    """Skip a check that is about NCCL if two ranks cannot use it."""
    if shared_gpu:
        pytest.skip("NCCL does not accept two ranks on one GPU, and there is only one")


IS_WORKER = bool(os.environ.get("PYTEST_XDIST_WORKER"))


def pytest_sessionstart():
    if not IS_WORKER:
        machine()  # takes seconds, which the part may not have at its end


def pytest_runtest_logreport(report):
    done = report.when == "call" or report.outcome != "passed"
    if done and "tests/gpu/" in report.nodeid and not IS_WORKER:
        name = report.nodeid.split("::")[1].removeprefix("test_").replace("_", " ")
        row = {
            "outcome": report.outcome,
            "seconds": report.duration,
            "figures": dict(report.user_properties),
        }
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if report.skipped else crash.message[-200:] if crash else ""
        row["reason"] = reason.removeprefix("Skipped: ")
        add_row(name, row)


def add_row(name: str, row: dict) -> None:
    """Add a check to the table, which may have rows of other parts; a check that ran again replaces
    its row.
    """
    path = REPORT / "gpu.json"
    tables = json.loads(path.read_text()) if path.exists() else {}  # by machine, then by check
    rows = tables.setdefault(machine(), {})
    rows[name] = rows.get(name, row) if row["outcome"] == "skipped" else row
    REPORT.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(tables, indent=1) + "\n")
    write_file(REPORT / "gpu.md", "\n\n".join(as_markdown(*each) for each in tables.items()) + "\n")


@cache
def machine() -> str:
    """The processor, the GPUs, the driver and the libraries, in one line."""
    script = "from utils.launch.devices import nvidia_smi; cuda = torch.version.cuda; print(common.machine_line(), "
    script += "f'CUDA {cuda}, NCCL {cuda and torch.cuda.nccl.version()}, driver', "
    return ask(script + "*nvidia_smi('--query-gpu=driver_version'), sep=', ')")


def as_markdown(machine: str, rows: dict[str, dict]) -> str:
    """The table of the checks on a machine, in Markdown."""
    lines = ["| check | result | seconds | figures |", "| --- | --- | --- | --- |"]
    for name, row in rows.items():
        figures = [f"{key} {value}" for key, value in row["figures"].items()]
        text = ", ".join(filter(None, [*figures, row["reason"]])).replace("\n", " ")
        cells = name, row["outcome"], f"{row['seconds']:.0f}", text.replace("|", "/")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", machine])
