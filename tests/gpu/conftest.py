"""Checks of everything that needs a GPU; `run.py` runs them in parts.

The table is written after each check. Without a GPU they are skipped. With
LOCKSTEP_GPU_TESTS_ON_CPU=1, their parts that need no GPU run on the CPU.
"""

import json
import os
from functools import cache
from typing import Any

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
from run import row_name

from utils.files import write_file

LIMIT = 300  # default limit of a check, seconds
UNFINISHED = "not finished"


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
        pytest.skip("not enough time left")
    yield
    end_started()


@pytest.fixture(scope="session")
def backend(gpus) -> tuple[str, str]:
    """The backend of two ranks, and why. run.py chooses it; without run.py, ranks sharing a GPU use
    gloo.
    """
    fallback = (
        "gloo",
        "there is one GPU, and run.py has not tried whether NCCL lets two ranks share it",
    )
    chosen = os.environ.get("LOCKSTEP_GPU_BACKEND")
    reason = os.environ.get("LOCKSTEP_GPU_BACKEND_REASON", "")
    return (chosen, reason) if chosen else fallback if gpus == 1 else ("nccl", "")


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
        pytest.skip("two ranks share the GPU, so speed is not meaningful")


IS_WORKER = bool(os.environ.get("PYTEST_XDIST_WORKER"))


@pytest.hookimpl(trylast=True)  # after the marks have chosen
def pytest_collection_modifyitems(config, items):
    """In the part `first`, start the most important checks first."""
    if "first" in (config.option.markexpr or "").split():
        items.sort(key=order_in_first)
        items[:] = for_workers(items, getattr(config, "workerinput", {}).get("workercount", 1))


def order_in_first(item) -> float:
    """Return the number of the mark `first`; a check without it comes last."""
    mark = item.get_closest_marker("first")
    return mark.args[0] if mark else float("inf")


def for_workers(items: list, workers: int) -> list:
    """Order checks for pytest-xdist, which gives each worker two neighbours, then the next ones.

    Fewer than two for each worker are dealt in turn, which keeps their order.
    """
    some = 2 * workers
    if len(items) < some:
        return items
    pairs = zip(items[:workers], items[workers:some], strict=True)
    return [item for pair in pairs for item in pair] + items[some:]


def pytest_sessionstart(session):
    if not IS_WORKER and not session.config.option.collectonly:
        machine()  # takes seconds, which the part may not have at its end


EARLIER: dict[str, dict | None] = {}  # rows that those of running checks replace


def pytest_runtest_logstart(nodeid):
    """Write a row that stays if the check is killed with pytest."""
    if "tests/gpu/" in nodeid and not IS_WORKER:
        name = row_name(nodeid)
        row = {"outcome": UNFINISHED, "seconds": 0, "figures": {}, "reason": "it did not end"}
        tables = read_tables()
        EARLIER[name] = tables.get(machine(), {}).get(name)
        tables.setdefault(machine(), {})[name] = row
        write_tables(tables)


def pytest_runtest_logreport(report):
    done = report.when == "call" or report.outcome != "passed"
    if done and "tests/gpu/" in report.nodeid and not IS_WORKER:
        started = name = row_name(report.nodeid)
        figures = dict(report.user_properties)
        if backend := figures.pop("backend", None):
            name += f" over {backend}"
        row = {
            "outcome": outcome_of(report),
            "seconds": report.duration,
            "figures": figures,
        }
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if report.skipped else crash.message[-200:] if crash else ""
        row["reason"] = reason.removeprefix("Skipped: ")
        add_row(started, name, row)


def outcome_of(report) -> str:
    """Return the outcome of a check; that of one that the end of its part cut off is its own."""
    end = float(os.environ.get("LOCKSTEP_GPU_UNTIL", "inf"))
    return UNFINISHED if report.failed and report.stop >= end else report.outcome


def add_row(started: str, name: str, row: dict) -> None:
    """Replace the row of a started check by its result, which stays if the check is skipped later.

    The table may have rows of other parts.
    """
    tables = read_tables()
    rows = tables.setdefault(machine(), {})
    rows.pop(started, None)
    if (earlier := EARLIER.pop(started, None)) is not None:
        rows[started] = earlier
    rows[name] = rows.get(name, row) if row["outcome"] == "skipped" else row
    write_tables(tables)


Tables = dict[str, dict[str, dict[str, Any]]]  # rows by machine, then by check


def read_tables() -> Tables:
    """Return the rows that were written before."""
    path = REPORT / "gpu.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_tables(tables: Tables) -> None:
    """Write the table for programs and for people."""
    REPORT.mkdir(parents=True, exist_ok=True)
    write_file(REPORT / "gpu.json", json.dumps(tables, indent=1) + "\n")
    write_file(REPORT / "gpu.md", "\n\n".join(as_markdown(*each) for each in tables.items()) + "\n")


@cache
def machine() -> str:
    """The processor, the GPUs, the driver, the libraries and the code, in one line."""
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
