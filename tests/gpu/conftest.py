"""Checks of everything that needs a GPU; `run.py` runs them in parts. The table is written after
each check.

Without a GPU they are skipped. With LOCKSTEP_GPU_TESTS_ON_CPU=1, their parts that need no GPU run
on the CPU.
"""

import json
import os
from functools import cache

import pytest
from helpers.gpu_runs import (
    ON_CPU,
    REPORT,
    SHARED,
    ask,
    begin_check,
    end_started,
    gpu_count,
    pick,
    seconds_left,
)

from utils.files import write_file

LIMIT = 300  # seconds of a check that names no other


@pytest.fixture(scope="session")
def gpus() -> int:
    """The number of GPUs."""
    return 0 if ON_CPU else gpu_count()


@pytest.fixture(autouse=True)
def in_time_and_clean(gpus, request):
    """Skip a check that cannot run, and end one at its limit. A failed one leaves no process
    behind.
    """
    if not (gpus or ON_CPU):
        pytest.skip("no GPU is visible")
    named = request.node.get_closest_marker("limit")
    limit = named.args[0] if named else LIMIT
    begin_check(pick(limit, 1800))
    left = seconds_left()
    if left < 10 or left < pick(limit, 0) / 4:
        pytest.skip("the part has no time left")
    yield
    end_started()


@pytest.fixture(scope="session")
def backend(gpus) -> tuple[str, str]:
    """What two ranks use, and why. run.py has found out; without it, ranks that share a GPU use
    gloo.
    """
    one = (
        "gloo",
        "there is one GPU, and run.py has not tried whether NCCL lets two ranks share it",
    )
    chosen = os.environ.get("LOCKSTEP_GPU_BACKEND")
    reason = os.environ.get("LOCKSTEP_GPU_BACKEND_REASON", "")
    return (chosen, reason) if chosen else one if gpus == 1 else ("nccl", "")


@pytest.fixture
def pair(backend, record_property) -> str:
    """Flags for two ranks: none for NCCL, or those for gloo. The check's row names the backend."""
    name = "gloo" if ON_CPU else backend[0]
    record_property("backend", name)
    return "--backend gloo" if name == "gloo" else ""


@pytest.fixture
def over_nccl(backend, record_property) -> None:
    """Skip a check that is about NCCL if two ranks cannot use it."""
    name, reason = backend
    if name != "nccl" and not ON_CPU:
        pytest.skip(f"two ranks use gloo: {reason}")
    record_property("backend", "gloo" if ON_CPU else "nccl")


@pytest.fixture
def own_gpus() -> None:
    """Skip a measurement of two ranks that share a GPU: they take turns."""
    if SHARED:
        pytest.skip("two ranks share the GPU, so their speed means nothing")


IS_WORKER = bool(os.environ.get("PYTEST_XDIST_WORKER"))


def pytest_collection_modifyitems(config, items):
    """In the part `first`, what decides more comes first."""
    if "first" in (config.option.markexpr or "").split():
        items.sort(key=place_in_first)


def place_in_first(item) -> float:
    """The number of the mark `first`; a check without it comes last."""
    mark = item.get_closest_marker("first")
    return mark.args[0] if mark else float("inf")


def pytest_sessionstart():
    if not IS_WORKER:
        machine()  # takes seconds, which the part may not have at its end


def pytest_runtest_logreport(report):
    done = report.when == "call" or report.outcome != "passed"
    if done and "tests/gpu/" in report.nodeid and not IS_WORKER:
        name = report.nodeid.split("::")[1].removeprefix("test_").replace("_", " ")
        figures = dict(report.user_properties)
        if backend := figures.pop("backend", None):
            name += f" over {backend}"
        row = {
            "outcome": report.outcome,
            "seconds": report.duration,
            "figures": figures,
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
    known = os.environ.get("LOCKSTEP_GPU_MACHINE")
    return known or json.loads(ask("import about; print(about.as_json())"))["machine"]


def as_markdown(machine: str, rows: dict[str, dict]) -> str:
    """The table of the checks on a machine, in Markdown."""
    lines = ["| check | result | seconds | figures |", "| --- | --- | --- | --- |"]
    for name, row in rows.items():
        figures = [f"{key} {value}" for key, value in row["figures"].items()]
        text = ", ".join(filter(None, [*figures, row["reason"]])).replace("\n", " ")
        cells = name, row["outcome"], f"{row['seconds']:.0f}", text.replace("|", "/")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", machine])
