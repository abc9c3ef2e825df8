"""utils/output.py: output that nobody reads, or that cannot be written, neither ends a run nor
loses results or the exit code.
"""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import ROOT, refused, rewrite_manifest, train_run, words, working_in

import eval
from utils.console import say
from utils.output import guard_output
from utils.runs.manifest import find_checkpoint
from utils.runs.metadata import read_checkpoint

FLAGS = [
    *words("--model mlp --max_steps 3 --threads 1 --log_every 1"),
    "--model_args",
    "{hidden: 4}",
]
CLASSES = ["café", "кот", "犬"]


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


@pytest.mark.parametrize("redirection", [">/dev/full", "2>/dev/full", ">&-", "2>&-"])
def test_the_exit_code_is_kept_if_the_output_cannot_be_written(redirection):
    ending = "import sys; from utils import output; output.guard_output(); output.hard_exit(75)"
    for stream in ("stdout", "stderr"):
        ending += f"; sys.{stream} and sys.{stream}.write('x')"
    done = shell(f'PYTHONPATH="$root" "$python" -c "{ending}" {redirection}')
    assert done.returncode == 75 and b"x" in (done.stdout, done.stderr)


def test_a_line_without_an_output_is_dropped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    say("a line")


@pytest.mark.full
def test_characters_that_the_output_lacks_are_printed_as_escapes():
    image_folder("photos", dict.fromkeys(CLASSES, 12))
    flags = shlex.join(["--data", "photos", "--run_name", "rün 1", *FLAGS])
    done = shell(f'PYTHONIOENCODING=ascii "$python" "$root/train.py" {flags}')
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode("ascii")
    assert "Lockstep  runs/r\\xfcn 1\n" in out and "\nDone\n" in out
    assert shlex.split(out.splitlines()[-1])[-2:] == ["--ckpt", "runs/r\\xfcn 1"]
    assert read_checkpoint(find_checkpoint(Path("runs/rün 1"))).class_names == CLASSES


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
