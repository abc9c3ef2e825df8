"""tests/gpu/run.py and its conftest.py: parts, limits, backends, rows. Nothing runs a part."""

import copy
import importlib
import importlib.util
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.training_runs import ROOT, start


@pytest.fixture
def run_py(monkeypatch):
    """The module, as on a machine with GPUs and 16 cores."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests/gpu"), *sys.path])
    made = importlib.import_module("run")
    monkeypatch.setattr(made, "ON_CPU", False)
    monkeypatch.setattr(made, "WORKERS", 8)
    return made


class Said(list):
    """A log that keeps lines."""

    say = list.append


NCCL = {
    "backend": "nccl",
    "reason": "they have communicated",
    "settings": {"NCCL_NVLS_ENABLE": "0"},
    "code": 0,
}
LIBRARY = {"LD_PRELOAD": "/libnccl.so.2"}


@pytest.fixture
def calls(run_py, monkeypatch):
    """The calls of pytest that would run: titles, marks, seconds and environment variables."""
    made = []

    def fake(call, until, env, log):
        made.append((call.title, call.marks, round(until - time.time()), env))
        return int(call.title == "updates")

    monkeypatch.setattr(run_py, "run_call", fake)
    return made


def test_the_list_names_each_part_and_the_two_calls_to_start_with(run_py, monkeypatch):
    listed = run_py.listed()
    parts, start_with = listed.split("\n\n")
    assert [line.split()[0] for line in parts.splitlines()] == list(run_py.PARTS)
    assert all("minutes (estimated); needs " in line for line in parts.splitlines())
    page, seconds = (ROOT / "docs/launching.md").read_text(), 0.0
    for command in start_with.splitlines()[1:]:
        assert f"\n{command}\n" in page
        words = command.replace("DIR", ".").replace("FILE", ".").split()
        monkeypatch.setattr(sys, "argv", words[1:])
        flags = run_py.read_flags()
        seconds += flags.seconds
    assert flags.parts == ["speed"] and seconds <= 0.8 * 15 * 60  # the rest is for starts


def test_two_ranks_over_nccl_get_the_library_and_the_settings_that_worked(run_py, calls):
    code = run_py.run_part(run_py.PARTS["first"], time.time() + 415, NCCL, LIBRARY, Said())
    assert code == 0
    (two, _, _, nccl), (again, marks, _, gloo), (images, _, _, other) = calls
    assert (two, again, images) == (
        "two ranks",
        "failed in the first GPU run",
        "photographs and cached features",
    )
    assert (
        nccl
        == other
        == LIBRARY
        | NCCL["settings"]
        | {
            "LOCKSTEP_GPU_BACKEND": "nccl",
            "LOCKSTEP_GPU_BACKEND_REASON": "they have communicated",
        }
    )
    assert marks == "gpu and rerun" and gloo == {
        "LOCKSTEP_GPU_BACKEND": "gloo",
        "LOCKSTEP_GPU_BACKEND_REASON": "this step tests gloo",
    }


def test_without_nccl_what_has_not_run_comes_first_and_nothing_runs_twice(run_py, calls):
    before = copy.deepcopy(run_py.PARTS)
    for _ in range(2):
        calls.clear()
        run_py.run_part(run_py.PARTS["first"], time.time() + 415, run_py.GLOO, LIBRARY, Said())
        assert [(title, marks) for title, marks, _, _ in calls] == [
            ("failed in the first GPU run", "gpu and rerun"),
            ("photographs and cached features", "gpu and first"),
            ("two ranks", "gpu and first and not rerun"),
        ]
        assert all(env["LOCKSTEP_GPU_BACKEND"] == "gloo" for _, _, _, env in calls)
        assert not any("LD_PRELOAD" in env for _, _, _, env in calls)
    assert before == run_py.PARTS


def test_limits_follow_from_the_seconds_of_the_part(run_py, calls, monkeypatch):
    found = []
    for seconds in (400, 800):
        calls.clear()
        run_py.run_part(run_py.PARTS["first"], time.time() + seconds, NCCL, {}, Said())
        found.append([limit for _, _, limit, _ in calls])
    assert found == [[208, 152, 160], [416, 304, 320]]
    assert run_py.run_part(run_py.PARTS["speed"], time.time() + 285, NCCL, {}, Said()) == 1
    assert calls[-1][2] == 285
    monkeypatch.setattr(run_py, "ON_CPU", True)  # a dry run has the whole hour
    run_py.run_part(run_py.PARTS["first"], time.time() + 3600, run_py.GLOO, {}, Said())
    assert {limit for _, _, limit, _ in calls[-3:]} == {3600}


@pytest.mark.parametrize("answers", [True, False])
def test_the_backend_is_decided_once_within_a_third_of_the_time(answers, run_py, monkeypatch):
    def fake(call, until, env, log):
        assert call.files == [run_py.SMOKE] and env["LD_PRELOAD"] == "/libnccl.so.2"
        assert until - time.time() < 140
        if answers:
            answer = {name: NCCL[name] for name in ("backend", "reason", "settings")}
            Path(env["LOCKSTEP_GPU_DECISION"]).write_text(json.dumps(answer))
        return 0

    monkeypatch.setattr(run_py, "run_call", fake)
    log = Said()
    decision = run_py.decide(time.time() + 415, LIBRARY, log, Path.cwd())
    expected = run_py.GLOO | {"reason": "the check of NCCL did not finish"}
    assert decision == (NCCL if answers else expected)
    assert log == [f"two ranks use {decision['backend']}: {decision['reason']}"]


class FakeProcess(nullcontext):
    """Stands for subprocess.Popen: keeps what it is given, answers by the words of the command."""

    started: list[tuple[list[str], dict]]
    answers: dict[str, tuple[int, str]]

    def __init__(self, words, env=None, **_):
        super().__init__(self)
        self.started.append((words, env or {}))
        text = " ".join(words)
        found = [answer for word, answer in self.answers.items() if word in text]
        self.returncode, out = found[0] if found else (0, "")
        self.stdout, self.pid = io.StringIO(out), 0

    def __enter__(self):
        return self

    def wait(self):
        return self.returncode

    def communicate(self):
        return self.stdout.read(), "a traceback"


@pytest.fixture
def processes(run_py, monkeypatch):
    FakeProcess.started, FakeProcess.answers = [], {}
    faked = SimpleNamespace(**vars(subprocess) | {"Popen": FakeProcess})
    monkeypatch.setattr(run_py, "subprocess", faked)
    return FakeProcess


@pytest.mark.parametrize(("cores", "asked", "used"), [(8, 5, "5"), (2, 5, "2"), (8, 1, None)])
def test_a_call_has_no_more_workers_than_cores_allow(
    cores, asked, used, run_py, processes, monkeypatch
):
    monkeypatch.setattr(run_py, "WORKERS", cores)
    call = run_py.PytestCall("title", ["files"], "gpu and first", workers=asked)
    until, log = time.time() + 100, Said()
    processes.answers["pytest"] = -9, "one\ntwo\n"
    assert run_py.run_call(call, until, LIBRARY, log) == 1
    ((words, env),) = processes.started
    assert (words[words.index("-n") + 1] if "-n" in words else None) == used
    assert words[3:5] == ["-m", "gpu and first"] and "files" in words
    assert env["LD_PRELOAD"] == "/libnccl.so.2" and float(env["LOCKSTEP_GPU_UNTIL"]) == until
    assert log[0].endswith("title, 100 s") and log[1:] == ["one", "two"]


LISTED = "tests/gpu/test_runs_on_gpus.py::test_unequal_shares[a_b]\n\n1 test collected\n"


def test_about_names_the_commands_of_one_machine_and_all_checks(run_py, processes, monkeypatch):
    args, file = Namespace(report=Path.cwd()), Path("about.json")
    processes.answers["collect-only"] = 0, LISTED
    for machine, part, expected in (
        ("code a", "first", ["first"]),
        ("code a", "speed", ["first", "speed"]),
        ("code a", "first", ["speed", "first"]),
        ("code b", "runs", ["runs"]),
    ):
        processes.started.clear()
        processes.answers["about.py"] = 0, json.dumps({"machine": machine, "gpus": 1})
        monkeypatch.setattr(sys, "argv", ["run.py", part])
        assert run_py.write_about(args, LIBRARY, Said()) == 1
        about = json.loads(file.read_text())
        assert about["command"] == "; ".join(f"python3 tests/gpu/run.py {p}" for p in expected)
        assert about["checks"] == ["unequal shares[a b]"] and about["dry_run"] is False
        envs = {
            "" if "--collect-only" in words else "about": env for words, env in processes.started
        }
        assert envs["about"]["LD_PRELOAD"] == "/libnccl.so.2"  # its version is written down
        assert os.environ["LOCKSTEP_GPU_SHARED"] == "1"
    processes.answers["collect-only"] = 2, "tests/gpu/test_a.py::test_a\nan error"
    run_py.write_about(args, LIBRARY, Said())
    assert json.loads(file.read_text())["checks"] == []
    processes.answers["about.py"] = 1, ""
    with pytest.raises(SystemExit, match="a traceback"):
        run_py.write_about(args, LIBRARY, Said())


def test_a_new_log_replaces_an_old_one_and_keeps_its_end(run_py):
    Path("gpu.log").write_text("old\n" * 3_000_000)
    run_py.Log(Path("gpu.log")).say("new")
    assert Path("gpu.log").read_text() == "new\n"


def test_only_packages_that_the_parts_need_are_missing(run_py, monkeypatch):
    log = Said()
    run_py.say_missing(log)
    assert log == []
    monkeypatch.setattr(run_py, "_has", lambda name: name not in ("datasets", "torchcodec", "onnx"))
    run_py.say_missing(log)
    (line,) = log
    assert line.startswith("missing: datasets; ") and "datasets==" in line
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{name}==" in pinned for name in run_py.PACKAGES)


@pytest.mark.full
def test_wheels_are_installed_for_one_call_and_nccl_is_unpacked(run_py, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    Path("wheels").mkdir()
    with zipfile.ZipFile("wheels/tiny_package-1.0-py3-none-any.whl", "w") as wheel:
        folder = "tiny_package-1.0.dist-info"
        wheel.writestr("tiny_package.py", "answer = 42\n")
        wheel.writestr(
            f"{folder}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{folder}/RECORD", "")
    run_py.install_wheels(Path("wheels"), Path("site").absolute())
    assert run_py._has("tiny-package")
    code, out, err = start("python", "-c", "import tiny_package; print(tiny_package.answer)")
    assert (code, out) == (0, "42\n"), err
    with pytest.raises(SystemExit, match=r"has no \.whl file"):
        run_py.install_wheels(Path("site"), Path("other"))
    Path("libnccl.so.2.xz").write_bytes(lzma.compress(b"a library"))
    unpacked = Path(run_py.unpack_nccl(Path("libnccl.so.2.xz"), Path("nccl").absolute()))
    assert unpacked.read_bytes() == b"a library" and unpacked.is_absolute()
    assert run_py.unpack_nccl(Path("other.so"), Path("nccl")) == str(Path("other.so").absolute())


# The check whether two ranks communicate over NCCL.


@pytest.fixture
def smoke(run_py, monkeypatch):
    made = importlib.import_module("test_smoke_on_gpus")
    for name, value in (("ON_CPU", False), ("REPORT", Path.cwd())):
        monkeypatch.setattr(made, name, value)
    monkeypatch.setenv("LOCKSTEP_GPU_DECISION", "decision.json")
    return made


def answering(smoke, monkeypatch, version, working):
    """NCCL has this version and works from this try on; returns the variables of each try."""
    tried = []

    def talk(settings, seconds):
        tried.append(settings)
        return ({"4 B": 0.1} if len(tried) >= working else None), f"try {len(tried)}"

    monkeypatch.setattr(smoke, "nccl_version", lambda: version)
    monkeypatch.setattr(smoke, "talk", talk)
    return tried


def test_the_settings_with_which_two_ranks_communicate_are_the_decision(smoke, monkeypatch):
    tried, rows = answering(smoke, monkeypatch, (2, 30, 7), working=2), {}
    smoke.test_two_ranks_communicate_over_nccl(1, rows.__setitem__)
    decision = json.loads(Path("decision.json").read_text())
    assert decision["backend"] == "nccl" and decision["settings"] == smoke.SETTINGS[1]
    assert [each["NCCL_DEBUG"] for each in tried] == ["INFO", "WARN"]
    assert [Path(f"nccl-{n}.txt").read_text() for n in (1, 2)] == ["try 1", "try 2"]
    assert rows == {
        "all_reduce of 4 B, ms": 0.1,
        "settings": "NCCL_NVLS_ENABLE=0 NCCL_P2P_DISABLE=1",
    }


def test_two_ranks_use_gloo_if_nccl_is_too_old_or_fails(smoke, monkeypatch):
    tried = answering(smoke, monkeypatch, (2, 28, 9), working=9)
    with pytest.raises(pytest.skip.Exception, match=r"NCCL 2\.28\.9 does not"):
        smoke.test_two_ranks_communicate_over_nccl(1, print)
    assert json.loads(Path("decision.json").read_text())["backend"] == "gloo" and not tried
    Path("decision.json").unlink()
    with pytest.raises(AssertionError, match="try 4"):  # with two GPUs, any version will do
        smoke.test_two_ranks_communicate_over_nccl(2, print)
    assert json.loads(Path("decision.json").read_text())["backend"] == "gloo" and len(tried) == 4


@pytest.mark.full  # a process imports PyTorch
def test_a_preloaded_nccl_has_its_own_version():
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    Path("stub.c").write_text("int ncclGetVersion(int *code) { *code = 29907; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "stub.so", "stub.c"], check=True)
    script = "from utils.launch.devices import nccl_version; print(nccl_version())"
    ended = start("python", "-c", script, PYTHONPATH=ROOT, LD_PRELOAD=Path("stub.so").absolute())
    assert ended[1] == "(2, 99, 7)\n", ended


# The table of the checks.


@pytest.fixture
def table(run_py, monkeypatch):
    """conftest.py of tests/gpu/, which writes into the current folder."""
    monkeypatch.setenv("LOCKSTEP_GPU_MACHINE", "a machine")
    spec = importlib.util.spec_from_file_location("gpu_conftest", ROOT / "tests/gpu/conftest.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "IS_WORKER", False)
    monkeypatch.setattr(made, "REPORT", Path.cwd())
    return made


NODE = "tests/gpu/test_runs_on_gpus.py::test_a_run[a_b]"


def report(outcome, stop=0.0, **more):
    """A report of pytest."""
    skipped = ("file", 1, "Skipped: no GPU") if outcome == "skipped" else None
    values = {"nodeid": NODE, "when": "call", "duration": 2.0, "user_properties": []}
    values |= {"longrepr": skipped, "failed": outcome == "failed", "skipped": bool(skipped)}
    return SimpleNamespace(**values | {"outcome": outcome, "stop": stop} | more)


def rows():
    return {
        name: row["outcome"]
        for name, row in json.loads(Path("gpu.json").read_text())["a machine"].items()
    }


def test_a_check_has_a_row_as_soon_as_it_starts(table):
    name = "a run[a b]"
    table.pytest_runtest_logstart(NODE)
    assert rows() == {name: "not finished"}
    table.pytest_runtest_logreport(report("passed", user_properties=[("backend", "nccl")]))
    assert rows() == {f"{name} over nccl": "passed"}
    for outcome, expected in (("failed", "failed"), ("skipped", "failed"), ("passed", "passed")):
        table.pytest_runtest_logstart(NODE)
        table.pytest_runtest_logreport(report(outcome))
        assert rows()[name] == expected
    assert "| a run[a b] | passed | 2 |  |" in Path("gpu.md").read_text()


def test_a_check_that_the_end_of_the_part_cuts_off_is_not_finished(table, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_GPU_UNTIL", "1000")
    found = [table.outcome_of(report("failed", stop)) for stop in (999, 1000.5)]
    assert found == ["failed", "not finished"]
    assert table.outcome_of(report("passed", 1000.5)) == "passed"


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_worker_begins_with_one_of_the_most_important_checks(workers, table):
    """pytest-xdist gives each worker two neighbours first."""
    items = table.for_workers(list(range(12)), workers)
    assert sorted(items) == list(range(12)) and items[2 * workers :] == list(range(2 * workers, 12))
    assert items[: 2 * workers : 2] == list(range(workers))
    assert table.for_workers([1, 2, 3], 2) == [1, 2, 3]
