"""Platforms: shared cores, systems without parts of Linux, commands that are printed for them."""

import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.training_runs import ROOT, start

from utils.launch import command


@pytest.mark.parametrize("given", [None, "active"])
def test_a_script_sets_the_policy_before_pytorch_is_imported_unless_the_user_has(given, tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os\nos.write(1, os.environ['OMP_WAIT_POLICY'].encode())\nos._exit(0)\n"
    )
    env = {"PYTHONPATH": str(tmp_path)} | ({"OMP_WAIT_POLICY": given} if given else {})
    assert start("python", ROOT / "train.py", **env)[1] == (given or "passive")


@pytest.mark.skipif(
    not (Path(torch.__file__).parent / "lib/libgomp.so.1").exists(), reason="another OpenMP"
)
def test_the_openmp_of_pytorch_then_does_not_spin_unless_the_user_wants_it():
    library = Path(torch.__file__).parent / "lib/libgomp.so.1"
    for imports, given, is_passive in (
        ("utils, ", {}, True),
        ("utils, ", {"GOMP_SPINCOUNT": "77"}, False),
        ("", {}, False),
    ):
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {imports}ctypes"
        code += f"; ctypes.CDLL({str(library)!r})"
        _, out, err = start("python", "-c", code, OMP_DISPLAY_ENV="verbose", **given)
        assert ("GOMP_SPINCOUNT = '0'" in out + err) == is_passive and "SPINCOUNT" in out + err


def _environment(folder: Path) -> Path:
    """A Python environment: links to this Python, as `venv` makes them, and a script."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(os.path.realpath(sys.executable))
    (folder / "bin/torchrun").write_text("#!/bin/sh\n")
    (folder / "bin/torchrun").chmod(0o755)
    return folder / "bin"


def test_a_printed_command_names_programs_that_the_shell_finds(tmp_path, monkeypatch):
    own, other = _environment(tmp_path / "my env/.venv"), _environment(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", str(own / "python3"))
    for path, python, launcher in [
        (f"{own}:{other}", "python3", "torchrun"),  # activated
        (f"{other}:{own}", str(own / "python3"), str(own / "torchrun")),
    ]:
        monkeypatch.setenv("PATH", path)
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", "--lr", "1"])
        assert command.script_command("eval.py", None) == [python, "scripts/eval.py"]
        assert command.typed_command() == [python, "scripts/train.py", "--lr", "1"]
        typed = [str(own / "python3"), str(own / "torchrun"), "--nproc_per_node", "2"]
        with monkeypatch.context() as launched:
            launched.setattr(command, "launcher_words", lambda typed=typed: typed)
            assert command.typed_command() == [launcher, "scripts/train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("/bin/python3 /home/me/bin/accelerate launch --cpu", "/home/me/bin/accelerate launch"),
        ("/home/me/bin/accelerate-launch --cpu", "/home/me/bin/accelerate-launch"),
        ("/opt/python -m accelerate.commands.launch", "/opt/python -m accelerate.commands.launch"),
        ("/opt/python -m torch.distributed.run --nnodes 2", "/opt/python -m torch.distributed.run"),
        ("/bin/mpirun -n 2 /bin/python3", sys.executable),
    ],
)
def test_a_printed_command_has_the_launcher_that_was_used(words, printed, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(command, "launcher_words", words.split)
    assert command.typed_command() == [*printed.split(), "train.py"]


WINDOWS = "import sys; sys.modules['fcntl'] = None"
MACOS = "import os, signal; del os.sched_getaffinity, signal.sigwaitinfo"


def run_script(
    script: str, flags: list[str], changes: str, **variables: str
) -> tuple[int, str, str]:
    """Run a script whose interpreter first executes `changes`, as its sitecustomize module."""
    Path("site").mkdir(exist_ok=True)
    Path("site/sitecustomize.py").write_text(changes)
    return start(
        "python", ROOT / script, *flags, PYTHONPATH=str(Path("site").resolve()), **variables
    )


def test_windows_is_refused_with_one_line_of_a_machine():
    line = "eval.py: error: Lockstep needs Linux; on Windows use WSL 2\n"
    assert run_script("eval.py", [], WINDOWS) == (2, "", line)
    assert run_script("eval.py", [], WINDOWS, LOCAL_RANK="1") == (2, "", "")


@pytest.mark.full
def test_a_system_without_core_masks_and_signal_senders_trains_on_the_cpu():
    code, out, err = run_script(
        "train.py", ["--model", "mlp", "--max_steps", "2", "--threads", "1"], MACOS
    )
    assert code == 0 and "Done" in out, err
