"""utils/output.py: output that nobody reads any more neither ends a run nor loses results."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.ranks import run_ranks
from helpers.training_runs import ROOT, refused, rewrite_manifest, train_run, words, working_in

import eval
from utils.output import guard_output
from utils.runs.manifest import find_checkpoint

FLAGS = [
    *words("--model mlp --max_steps 3 --threads 1 --log_every 1"),
    "--model_args",
    "{hidden: 4}",
]


def shell(command: str) -> subprocess.CompletedProcess:
    """Run a line of bash in which $python and $root are set; its output is returned as bytes."""
    environment = os.environ | {"python": sys.executable, "root": str(ROOT)}
    command = f"set -o pipefail; export CUDA_VISIBLE_DEVICES=; {command}"
    return subprocess.run(["bash", "-c", command], env=environment, input=b"", capture_output=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The path of a trained run."""
    folder = tmp_path_factory.mktemp("trained")
    with working_in(folder):
        train_run(1, "run", *FLAGS)
    return folder / "runs" / "run"


def test_text_that_nobody_reads_any_more_is_dropped():
    printing = (
        "from utils.output import guard_output; guard_output(); print('x' * 10**6); print('y')"
    )
    reader = "| head -c 1 >/dev/null"
    done = shell(f'PYTHONPATH="$root" "$python" -c "{printing}; open(\'end\', \'w\')" {reader}')
    assert (done.returncode, done.stderr) == (0, b"") and Path("end").exists()


@pytest.mark.full
def test_an_evaluation_that_nobody_reads_writes_its_numbers(trained):
    command = f'"$python" "$root/eval.py" --ckpt "{trained}" --json numbers.json'
    done = shell(f"{command} | head -c 1 >/dev/null")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert json.loads(Path("numbers.json").read_text())["count"] == 180


def test_numbers_that_cannot_be_written_are_still_printed(trained):
    flags = ["--ckpt", str(trained), "--json"]
    Path("null.json").symlink_to("/dev/null")
    assert "null.json: is not a regular file" in refused(eval.main, *flags, "null.json")
    assert Path("/dev/null").is_char_device()
    (outcome,) = run_ranks(1, _evaluate_on_a_full_disk, [*flags, "numbers.json"])
    assert outcome.code == 2 and "numbers.json" in outcome.err and "macro_f1" in outcome.out


def _evaluate_on_a_full_disk(flags):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    eval.write_file = full
    eval.main(flags)


@pytest.mark.full
def test_escape_codes_in_a_checkpoint_do_not_reach_the_terminal(tmp_path):
    train_run(1, "run", *FLAGS)
    checkpoint, red = find_checkpoint(Path("runs/run")), "\x1b[31m\x9b31mred"
    settings = checkpoint / "config.yaml"
    values = yaml.safe_load(settings.read_text())
    settings.write_text(yaml.safe_dump(values | {"data": f"{red} data"}))
    rewrite_manifest(checkpoint)
    resume = words(f"--resume {checkpoint} --cpu --threads 1 --max_steps 4")
    done = shell(f'"$python" "$root/train.py" {" ".join(resume)} --data digits')
    assert (
        done.returncode == 0
        and b"?[31m" in done.stdout
        and not {*done.stdout.decode()} & {*"\x1b\x9b"}
    ), done.stderr


def test_streams_of_notebooks_and_tests_stay_as_they_are(monkeypatch):
    for stream in (io.StringIO(), io.TextIOWrapper(io.BytesIO()), SimpleNamespace(write=len)):
        monkeypatch.setattr(sys, "stdout", stream)
        guard_output()
        assert sys.stdout is stream
