"""A machine whose cores other programs use: threads wait without spinning, and a line at the start reports it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training_runs import ROOT, same_tensors, start, weights

import doctor
from utils import memory
from utils.ranks import cores

SYNTHETIC = ["--data", "synthetic/10x28x2000", "--log_every", "1"]


def python(code: str, **env: str) -> str:
    """The output of Python code in a new process, without this process's settings of threads."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("given", [None, "active"])
def test_every_script_sets_the_policy_before_pytorch_is_imported_unless_the_user_has(given, tmp_path):
    (tmp_path / "torch.py").write_text("import os\nos.write(1, os.environ['OMP_WAIT_POLICY'].encode())\nos._exit(0)\n")
    env = {"PYTHONPATH": str(tmp_path)} | ({"OMP_WAIT_POLICY": given} if given else {})
    for script in ("train.py", "eval.py", "doctor.py"):
        assert start("python", ROOT / script, **env)[1] == (given or "passive")


@pytest.mark.skipif(not (Path(torch.__file__).parent / "lib/libgomp.so.1").exists(), reason="another OpenMP")
def test_the_openmp_of_pytorch_then_does_not_spin_unless_the_user_wants_it():
    library = Path(torch.__file__).parent / "lib/libgomp.so.1"
    load = f"import utils, ctypes; ctypes.CDLL({str(library)!r})"
    assert "GOMP_SPINCOUNT = '0'" in python(load, OMP_DISPLAY_ENV="verbose")
    assert "GOMP_SPINCOUNT = '77'" in python(load, OMP_DISPLAY_ENV="verbose", GOMP_SPINCOUNT="77")
    assert "GOMP_SPINCOUNT = '0'" not in python(load.replace("utils, ", ""), OMP_DISPLAY_ENV="verbose")


@pytest.mark.full
def test_the_weights_are_the_same_bits_with_spinning_threads():
    for policy in ("passive", "active"):
        flags = [*SYNTHETIC, "--model", "mnist_cnn", "--max_steps", "8", "--threads", "2", "--run_name", policy]
        assert start("python", ROOT / "train.py", *flags, OMP_WAIT_POLICY=policy)[0] == 0
    assert same_tensors(weights("passive"), weights("active"))


@pytest.mark.full
def test_a_run_beside_busy_programs_says_so_and_the_command_that_it_prints_works_when_pasted():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        flags = [*SYNTHETIC, "--model", "mlp", "--max_steps", "2", "--run_name", "a run"]
        code, out, err = start("python", ROOT / "train.py", *flags)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("other programs use ")]
    assert f"of the {len(busy)} processor cores, which slows this run down; stop them" in line
    command = out.splitlines()[-1].removeprefix("evaluate it: ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "macro_f1" in done.stdout, done.stderr


def test_what_a_process_and_its_children_use_is_not_taken_for_other_programs():
    everyone, own, expected, forked = json.loads(
        python("""
        import json, os, resource, subprocess, sys, time
        from utils.memory import used_cores
        began, burn = time.monotonic(), "import time\\nwhile time.process_time() < 0.4: pass"
        before = time.process_time()
        exec(burn)
        subprocess.run([sys.executable, "-c", burn])
        everyone, own = used_cores()
        child = resource.getrusage(resource.RUSAGE_CHILDREN)
        mine = time.process_time() - before + child.ru_utime + child.ru_stime
        expected = mine / (time.monotonic() - began)
        reading, writing = os.pipe()
        if not os.fork():
            os.write(writing, json.dumps(used_cores()).encode())
            os._exit(0)
        print(json.dumps([everyone, own, expected, json.loads(os.read(reading, 100))]))
        """)
    )
    assert own == pytest.approx(expected, rel=0.2) and everyone > 0.8 * own
    assert forked == [0.0, 0.0]  # a fork does not know what it has used


class _Gathered:
    """Ranks with these measurements: (host, threads, cores, used by all, used by the rank)."""

    threads = 1

    def __init__(self, *measured):
        self.measured = measured

    def gather_text(self, _text):
        return [json.dumps(values) for values in self.measured]


TWO = [0, 1]
TAKEN = [
    ([("a", 2, TWO, 1.9, 0.9)], ["1.0 of the 2"], "stop them, use --threads 1, or use another machine"),
    ([("a", 1, TWO, 1.9, 0.4), ("a", 1, TWO, 1.9, 0.4)], ["1.1 of the 2"], "stop them or use another machine"),
    ([("a", 1, [0], 0.9, 0.5), ("a", 1, [1], 0.9, 0.5)], ["0.8 of the 2"], "stop them or use another machine"),
    ([("a", 2, TWO, 1.9, 1.9), ("b", 2, TWO, 1.9, 0.1)], ["b: other programs use 1.8 of the 2"], "--threads 1"),
    ([("a", 2, TWO, 1.9, 1.5)], [], ""),  # hardly anything
    ([("a", 64, list(range(64)), 9.0, 1.0)], [], ""),  # 8 of 64
    ([("a", 64, list(range(64)), 33.0, 1.0)], ["32.0 of the 64"], "use --threads 32"),
    ([("a", 2, TWO, 1.9, 1.0), ("a", 2, TWO, 1.9, 1.0)], [], ""),  # all of it is ours
]


@pytest.mark.parametrize(("measured", "shown", "fix"), TAKEN)
def test_cores_are_taken_if_others_use_a_quarter_of_them(measured, shown, fix):
    lines = cores.taken_cores(_Gathered(*measured))
    assert len(lines) == len(shown) and all(
        text in line and fix in line for text, line in zip(shown, lines, strict=True)
    )


def test_the_doctor_reports_taken_cores_without_judging_them(monkeypatch):
    monkeypatch.setattr(cores, "used_cores", lambda: (64.0, 0.0))
    (outcome,) = run_ranks(1, doctor.main, [])
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("cores")]
    assert outcome.code == 0 and "other programs use" in line and "✗" not in line


def test_a_machine_that_does_not_say_how_busy_it_is_reports_nothing(monkeypatch):
    def refuse(percpu):
        raise PermissionError(13, "Permission denied", "/proc/stat")

    monkeypatch.setattr(memory.psutil, "cpu_times", refuse)
    assert memory.used_cores() == (0.0, 0.0)


def _environment(folder: Path) -> Path:
    """A Python environment: links to this Python, as `venv` makes them, and a script."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(os.path.realpath(sys.executable))
    (folder / "bin/torchrun").write_text("#!/bin/sh\n")
    (folder / "bin/torchrun").chmod(0o755)
    return folder / "bin"


def test_a_printed_command_names_programs_that_the_shell_finds(tmp_path, monkeypatch):
    from utils.launch import command

    own, other = _environment(tmp_path / "my env/.venv"), _environment(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", str(own / "python3"))
    for path, folder, python, launcher in [
        (f"{own}:{other}", ".", "python", "torchrun"),  # activated
        (f"{other}:{own}", "my env", ".venv/bin/python3", ".venv/bin/torchrun"),
        ("/nowhere", own, "./python3", "./torchrun"),
        (str(other), other, str(own / "python3"), str(own / "torchrun")),
    ]:
        monkeypatch.setenv("PATH", path)
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", "--lr", "1"])
        assert command.script_command("eval.py") == [python, "scripts/eval.py"]
        assert command.typed_command()[:2] == [python, "scripts/train.py"]
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for typed in ([str(own / "python3"), str(own / "torchrun")], [str(own / "torchrun")]):
            monkeypatch.setattr(command, "_command_of", lambda pid, typed=typed: [*typed, "scripts/train.py"])
            assert command.typed_command() == [launcher, "scripts/train.py"]
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
