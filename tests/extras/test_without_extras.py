"""Without extras/, a run has the same bits and says what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.training_runs import MLP, ROOT, same_tensors, weights, words

import train

FLAGS = [*MLP, "--report", "true", "--max_steps", "3", "--run_name"]
MISSING = "the folder extras/ is missing"


@pytest.fixture
def bare():
    """The scripts and utils/ alone."""
    shutil.copytree(ROOT / "utils", "bare/utils", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("train.py", "eval.py"):
        shutil.copy(ROOT / script, "bare")
    Path("bare/extras/__pycache__").mkdir(parents=True)  # git leaves it where it deletes a folder
    return Path("bare").absolute()


def run(script: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(script), *words]
    env = os.environ | {"PYTHONPATH": str(script.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_without_the_folder_a_run_has_the_same_bits_and_a_line_says_so(bare):
    for script, name in ((ROOT / "train.py", "whole"), (bare / "train.py", "bare")):
        code, said = run(script, *FLAGS, name)
        assert code == 0 and said.count(MISSING) == (name == "bare"), said
    assert same_tensors(weights("whole"), weights("bare"))
    whole, without = (Path(f"runs/{name}") for name in ("whole", "bare"))
    only = {path.name for path in whole.iterdir()} - {path.name for path in without.iterdir()}
    assert only >= {"report.html", "first_batch.png"}
    code, said = run(bare / "eval.py", "--ckpt", "runs/bare", "--json", "found.json")
    assert code == 0 and said.count(MISSING) == 1 and Path("found.json").exists(), said


@pytest.mark.full
def test_what_needs_the_folder_is_refused_before_anything_is_computed(bare):
    for flags in (["--dry_run"], ["--profile"]):
        code, said = run(bare / "train.py", *FLAGS, "one", *flags)
        assert code == 2 and "need the folder extras/; restore it" in said, said
    assert not Path("runs").exists()


def test_the_old_commands_name_the_new_ones():
    for old, new in (("utils.report", "extras.compare"), ("utils.folds", "extras.folds")):
        command = [sys.executable, "-m", old, "runs/x"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr == f"python -m {old} is now: python -m {new}\n"


LOADED = """
import sys, train
train.main(sys.argv[1:])
print("loaded:", *(name for name in sys.modules if name.split(".")[0] in ("extras", "utils")))
"""

# what a run on `digits` with one process does not use
LATER = words("""
utils.data.csv_file utils.data.hf_datasets utils.runs.foreign utils.runs.init_from
utils.runs.inference utils.models.matching utils.models.published utils.training.feature_cache
utils.training.sharding
utils.launch.rendezvous utils.tasks.multilabel utils.ranks.batchnorm utils.models.fastnet
utils.training.muon
""")


def test_the_parts_that_are_loaded_later_exist():
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in LATER)


@pytest.mark.full
def test_a_run_without_a_page_does_not_load_what_writes_pages():
    Path("script.py").write_text(LOADED)
    words = [*FLAGS, "plain", "--report", "false"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py", *words]
    said = subprocess.run(command, env=env, capture_output=True, text=True).stdout
    loaded = set(said.split("loaded:")[1].split())
    of_extras = {name for name in loaded if name.startswith("extras.")}
    assert of_extras == {"extras.copies", "extras.first_batch"}
    assert "utils.training.run" in loaded and not loaded & set(LATER)


def train_without(rank_without, flags):
    train.HAS_EXTRAS = os.environ["RANK"] != str(rank_without)
    train.main(flags)


def test_a_machine_that_lacks_the_folder_is_named_at_the_start():
    outcomes = run_ranks(2, train_without, 1, [*FLAGS, "run"])
    assert [outcome.code for outcome in outcomes] == [2, 2]
    said = "".join(outcome.err for outcome in outcomes)
    problem = "rank 1 has another folder extras/ than rank 0"
    assert said == f"train.py: error: {problem}; give all ranks the same files\n"
