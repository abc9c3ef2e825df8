"""Systems without parts of Linux: one line instead of a traceback, or a run on the CPU."""

import os
import signal
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

CTRL_C = """
import importlib.abc, os, signal, sys
class PressCtrlC(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, PressCtrlC())
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


@pytest.mark.parametrize("script", ["train.py", "eval.py", "predict.py"])
def test_ctrl_c_during_the_imports_ends_a_script_silently(script):
    outcome = run_script(script, [], CTRL_C)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (-signal.SIGINT, "", "")  # 130 in a shell
