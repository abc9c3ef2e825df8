"""Dockerfile and .dockerignore: what they say, and their steps in a fresh environment, without a
container.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from helpers.training_runs import ROOT, start
from helpers.waiting import PATIENCE
from packaging.requirements import Requirement
from packaging.version import Version

LINES = (ROOT / "Dockerfile").read_text().splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]
IGNORED = [
    line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
]


def step(name: str) -> list[str]:
    """The arguments of the steps with this name, in order."""
    return [arguments for found, arguments in STEPS if found == name]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps this path of the project out of the container.

    A pattern is a path from the root, or `**/` and a name that may be anywhere.
    """
    name = Path(path).name
    return any(
        fnmatch(name, pattern[3:]) if pattern.startswith("**/") else fnmatch(path, pattern)
        for pattern in IGNORED
    )


def copy_context(source: Path, target: Path) -> None:
    """Copy what .dockerignore lets through."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        beside = Path(folder).relative_to(source)
        return [name for name in names if is_ignored(str(beside / name))]

    shutil.copytree(source, target, ignore=ignored)


def python_of(version: str) -> str:
    """This version of Python if the machine has it, else the one that runs the tests."""
    name = f"python{version}"
    try:
        subprocess.run([name, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):  # a shim of pyenv may start nothing
        return sys.executable
    return name


def test_the_dockerfile_has_at_most_15_lines_and_copies_files_that_exist():
    assert len(LINES) <= 15
    for arguments in step("COPY"):
        for source in arguments.split()[:-1]:
            assert (ROOT / source).exists() and not is_ignored(source), source
    command = json.loads(step("CMD")[-1])
    for file in command[command.index("--config_file") + 1 :]:
        assert (ROOT / file).is_file() and not is_ignored(file), file


def test_the_container_has_the_tested_versions_and_builds_without_cuda():
    """CONTRIBUTING.md has the tested Python; all other versions are those of constraints.txt."""
    row = re.search(r"^\| tested \| (\d+\.\d+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert step("FROM") == [f"python:{row[1]}-slim"]
    installs = [words for words in step("RUN") if words.startswith("pip install")]
    assert installs and "==" not in "".join(LINES)
    for words in installs:
        assert "-r requirements.txt" in words and "-c constraints.txt" in words
    # pip chooses the highest version that is allowed; the CPU index has builds such as 2.15.0+cpu
    assert any("PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in e for e in step("ENV"))
    pinned = re.findall(r"^(torch\w*==[\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(pinned) == 3
    for pin in pinned:
        (one,) = Requirement(pin).specifier
        build = f"{one.version}+cpu"
        assert one.contains(build) and Version(build) > Version(one.version)


def test_the_container_starts_any_command_and_not_as_root():
    assert step("USER")[-1] not in ("root", "0") and not step("ENTRYPOINT")
    assert STEPS[-1][0] == "CMD" and step("WORKDIR") == ["/lockstep"]


def test_what_git_ignores_and_its_folder_stay_outside(tmp_path):
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")  # a slash at the start means the root
        assert (name if line.startswith("/") else f"**/{name}") in IGNORED
    for name in ("train.py", "utils/runs/log.py", ".git/HEAD", ".venv/bin/pip", "runs/a/log.jsonl"):
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).touch()
    copy_context(tmp_path / "from", tmp_path / "to")
    copied = [path for path in (tmp_path / "to").rglob("*") if path.is_file()]
    assert {path.name for path in copied} == {"train.py", "log.py"}


@pytest.fixture
def environment(tmp_path) -> Iterator[Path]:
    """The folder of a new environment, which takes several GB, so it is not kept."""
    yield tmp_path / "venv"
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)


@pytest.mark.slow  # installs PyTorch
def test_its_steps_end_in_a_trained_and_evaluated_model(environment, tmp_path, monkeypatch):
    """Without the index of CPU builds, which not every machine reaches, and as this user."""
    copy_context(ROOT, tmp_path / "lockstep")
    monkeypatch.chdir(tmp_path / "lockstep")
    monkeypatch.setenv("PATH", f"{environment}/bin:{os.environ['PATH']}")
    python = python_of(re.search(r"\d+\.\d+", step("FROM")[0])[0])
    subprocess.run([python, "-m", "venv", environment], check=True)
    for command in step("RUN"):
        if command.startswith("pip "):  # the others make a user and a folder
            subprocess.run(command, shell=True, check=True, timeout=12 * PATIENCE)
    name, *flags = json.loads(step("CMD")[-1])
    code, out, err = start(environment / "bin" / name, *flags)
    assert code == 0 and "\nDone\n" in out, out + err
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-") and (folder / "report.html").is_file()
    # another command, as in `docker run ... lockstep python eval.py --ckpt runs/NAME`
    code, out, err = start(environment / "bin/python", "eval.py", "--ckpt", folder)
    assert code == 0, out + err
