"""Systems without parts of Linux: one line instead of a traceback, or a run on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--model", "mlp", "--max_steps", "2", "--threads", "1", "--run_name", "run"]
WINDOWS = "import sys; sys.modules['fcntl'] = None"
MACOS = """
import os, signal
del os.sched_getaffinity, signal.sigwaitinfo
"""
MPS = """
import functools, importlib.abc, sys
class SayThatMpsIsAvailable(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "accelerate":  # by then PyTorch is imported
            import torch
            torch.backends.mps.is_available = functools.cache(lambda: True)
sys.meta_path.insert(0, SayThatMpsIsAvailable())
"""


def run_script(script: str, flags: list[str], changes: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script whose interpreter first executes `changes`, as its sitecustomize module."""
    Path("site").mkdir(exist_ok=True)
    Path("site/sitecustomize.py").write_text(changes)
    environment = {**os.environ, "PYTHONPATH": str(Path("site").resolve()), "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, str(ROOT / script), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script", ["train.py", "eval.py", "doctor.py"])
def test_windows_is_refused_with_one_line_of_a_machine(script):
    outcome = run_script(script, [], WINDOWS)
    assert outcome.returncode == 2 and outcome.stdout == ""
    assert outcome.stderr == f"{script}: error: Lockstep needs Linux; on Windows use WSL 2\n"
    outcome = run_script(script, [], WINDOWS, LOCAL_RANK="1")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (2, "", "")


@pytest.mark.full
def test_a_system_without_core_masks_and_signal_senders_trains_on_the_cpu():
    outcome = run_script("train.py", TINY, MACOS)
    assert outcome.returncode == 0, outcome.stderr
    assert "Done" in outcome.stdout and Path("runs/run/checkpoints/latest").exists()


@pytest.mark.full
def test_a_run_on_a_mac_reports_that_its_gpu_is_not_used():
    outcome = run_script("train.py", TINY, MPS)
    assert outcome.returncode == 0, outcome.stderr
    (line,) = [line for line in outcome.stdout.splitlines() if "MPS" in line]
    assert line == "MPS, the GPU of this Mac, is not used: running on the CPU"
    assert "No GPU is visible" not in outcome.stdout
