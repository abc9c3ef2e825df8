"""notebooks/gpu.ipynb: in a clone and alone, it runs on two CPU processes, without a network."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.make_data import image_folder
from helpers.training_runs import ROOT, start
from helpers.waiting import PATIENCE

BOOK = ROOT / "notebooks/gpu.ipynb"
CELLS = [cell for cell in json.loads(BOOK.read_text())["cells"] if cell["cell_type"] == "code"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]
SMALL = "--data pictures --image_size 32 --model_args '{widths: [4, 8, 8]}' --global_batch_size 8"
SMALL += " --max_steps 4 --log_every 2 --eval_every 4 --save_every 4 --lr 0.01 --threads 1"
NO_ADDRESS = "this notebook is not in a clone of Lockstep: put the address of the repository into "
NO_ADDRESS += "URL in the first cell, or into LOCKSTEP_URL\n"


def run_cells(cells: list[str], **env: str) -> tuple[int, str, str]:
    """Run cells in the current folder, as they are plain Python, so no notebook server is needed.

    pip may neither ask an index nor change this environment.
    """
    env = {
        "PIP_NO_INDEX": "1",
        "PIP_DRY_RUN": "1",
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C.UTF-8",
    } | env
    return start(sys.executable, "-c", "\n\n".join(cells), seconds=6 * PATIENCE, **env)


def in_a_clone(monkeypatch) -> Path:
    """Stand in the folder of the notebook, in a copy of the project made of links."""
    Path("clone").mkdir()
    for path in ROOT.iterdir():
        if path.name != "notebooks":
            (Path("clone") / path.name).symlink_to(path)
    clone = Path("clone").resolve()
    (clone / "notebooks").mkdir()
    monkeypatch.chdir(clone / "notebooks")
    return clone


@pytest.fixture
def repository(tmp_path, monkeypatch) -> str:
    """A Git repository with the files as they are now; the current folder is an empty one."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    origin = str(tmp_path / "origin")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    git = ["git", *author, f"--git-dir={origin}", f"--work-tree={ROOT}"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], cwd=ROOT, check=True)
    (tmp_path / "upload").mkdir()
    monkeypatch.chdir(tmp_path / "upload")
    return origin


def test_the_notebook_holds_no_outputs():
    assert CELLS and not any(cell["outputs"] or cell["execution_count"] for cell in CELLS)


def test_in_a_clone_the_notebook_uses_it_without_an_address_and_takes_nothing_else(monkeypatch):
    clone = in_a_clone(monkeypatch)
    show = [*SOURCES[:2], "print(HERE)"]
    for folder in ("notebooks", "."):  # some editors start it in the root
        monkeypatch.chdir(clone / folder)
        for address in ("", "nowhere"):
            assert run_cells(show, LOCKSTEP_URL=address) == (0, f"{clone}\n", "")
        assert not Path("lockstep").exists()


@pytest.mark.parametrize("other", ["", "lockstep", ".."])
def test_alone_and_without_an_address_it_ends_in_one_line_that_says_what_to_put_where(
    other, monkeypatch
):
    Path("upload").mkdir()
    monkeypatch.chdir("upload")
    if other:  # somebody else's project
        Path(other).mkdir(exist_ok=True)
        Path(other, "train.py").touch()
    before = os.listdir()
    assert run_cells(SOURCES) == (1, "", NO_ADDRESS)
    assert os.listdir() == before


def test_alone_with_an_address_it_clones_once_and_replaces_no_package_that_is_right(repository):
    here = Path("lockstep").resolve()
    show = [*SOURCES[:2], "print((HERE / 'train.py').is_file())"]
    clone = f"$ git clone -q {repository} {here}\n"
    install = f"$ {sys.executable} -m pip install -q -r {here}/requirements-dev.txt\n"
    assert run_cells(show, LOCKSTEP_URL=repository) == (0, f"{clone}{install}True\n", "")
    # the cell runs again, for example after an interrupted installation
    assert run_cells(show) == (0, f"{install}True\n", "")


@pytest.mark.parametrize("taken", [False, True])
def test_if_cloning_fails_git_says_why_and_the_notebook_ends(taken, repository):
    if taken:  # by somebody else's folder
        Path("lockstep").mkdir()
        Path("lockstep/train.py").touch()
    code, out, err = run_cells(SOURCES, LOCKSTEP_URL=repository if taken else "nowhere")
    reason = "already exists and is not an empty directory" if taken else "'nowhere' does not exist"
    assert code == 1 and reason in out and "pip" not in out
    assert err == "Lockstep is not installed: the lines above say why\n"


def test_if_all_commands_fail_the_last_cell_still_prints_a_table(monkeypatch):
    in_a_clone(monkeypatch)
    names: dict = {}
    for cell in SOURCES[:2]:
        exec(cell, names)
    names["run"] = lambda command: False
    for cell in SOURCES[2:]:
        exec(cell, names)
    report = Path("report.md").read_text()
    assert "| mnist_fast | 1 | failed | | | |" in report and "processes: not compared" in report


@pytest.mark.full
def test_an_upload_runs_on_two_cpu_processes_and_the_table_has_its_digest(repository):
    image_folder("pictures", {"a": 30, "b": 30}, size=(32, 32))
    cells = [SOURCES[0].replace('URL = ""', f'URL = "{repository}"'), *SOURCES[1:]]
    code, out, err = run_cells(cells, LOCKSTEP_FLAGS=SMALL, LOCKSTEP_CHECKS="--list")
    assert code == 0, out + err
    assert out.startswith("$ git clone") and out.count("the same bits\n") == 10
    report = Path("report.md").read_text()
    text, digest = re.fullmatch(r"(.*)\ndigest (\w{16})\n", report, re.S).groups()
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest) and text in out
    rows = re.findall(r"^\| (\w+) \| (\d) \|", text, re.M)
    assert rows == [(recipe, n) for recipe in ("mnist_fast", "cifar10_fast") for n in "12"]
    assert "losses are the same bits on [1, 2] processes: True" in text
