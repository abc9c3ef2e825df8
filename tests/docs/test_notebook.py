"""notebooks/gpu.ipynb: its cells run on two CPU processes, without a network."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
from helpers.make_data import image_folder
from helpers.training_runs import ROOT, start
from helpers.waiting import PATIENCE

BOOK = ROOT / "notebooks/gpu.ipynb"
CELLS = [cell for cell in json.loads(BOOK.read_text())["cells"] if cell["cell_type"] == "code"]
SMALL = "--data pictures --image_size 32 --model_args '{widths: [4, 8, 8]}' --global_batch_size 8"
SMALL += " --max_steps 4 --log_every 2 --eval_every 4 --save_every 4 --lr 0.01 --threads 1"


def test_the_notebook_holds_no_outputs():
    assert CELLS and not any(cell["outputs"] or cell["execution_count"] for cell in CELLS)


def test_if_all_commands_fail_the_last_cell_still_prints_a_table(monkeypatch):
    monkeypatch.setenv("LOCKSTEP", str(ROOT))
    names: dict = {}
    first, *others = ["".join(cell["source"]) for cell in CELLS]
    exec(first, names)
    names["run"] = lambda command: False
    for cell in others:
        exec(cell, names)
    report = Path("report.md").read_text()
    assert "| mnist_fast | 1 | failed | | | |" in report and "processes: not compared" in report


@pytest.mark.full
def test_the_cells_run_on_two_cpu_processes_and_the_table_has_its_digest():
    """The cells are plain Python, so no notebook server is needed."""
    image_folder("pictures", {"a": 30, "b": 30}, size=(32, 32))
    Path("cells.py").write_text("\n\n".join("".join(cell["source"]) for cell in CELLS))
    env = {"LOCKSTEP": str(ROOT), "LOCKSTEP_FLAGS": SMALL, "LOCKSTEP_CHECKS": "--list"}
    python = Path(sys.executable).name
    code, out, err = start(python, "cells.py", seconds=6 * PATIENCE, HF_HUB_OFFLINE="1", **env)
    assert code == 0, out + err
    assert "git clone" not in out and out.count("the same bits\n") == 10
    report = Path("report.md").read_text()
    text, digest = re.fullmatch(r"(.*)\ndigest (\w{16})\n", report, re.S).groups()
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest) and text in out
    rows = re.findall(r"^\| (\w+) \| (\d) \|", text, re.M)
    assert rows == [(recipe, n) for recipe in ("mnist_fast", "cifar10_fast") for n in "12"]
    assert "losses are the same bits on [1, 2] processes: True" in text
