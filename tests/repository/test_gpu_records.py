"""benchmarks/gpu_records.py: records of what tests/gpu/run.py wrote, and the page of them."""

import importlib
import json
from pathlib import Path

import pytest
from helpers.training_runs import ROOT

PASSED = {"outcome": "passed", "seconds": 12.5, "figures": {"images/s": 3711}, "reason": ""}
PLAIN = PASSED | {"figures": {}}
FAILED = PLAIN | {"outcome": "failed", "reason": "assert 1 == 2 |"}
SKIPPED = PLAIN | {"outcome": "skipped", "reason": "needs two GPUs"}
CHECKS = {
    "a graph is bitwise equal to eager updates[mnist cnn]": PASSED,
    "an evaluation has the same result each time and on two ranks over nccl": PLAIN,
    "unequal shares give the same bits over nccl": FAILED,
    "a lost rank ends the run[killed-NCCL] over gloo": PLAIN,
    "a lost rank ends the run[stopped-NCCL] over nccl": PLAIN | {"outcome": "not finished"},
    "train py is as fast as its step and as timm[all GPUs]": SKIPPED,
}
ABOUT = {
    "command": "python3 tests/gpu/run.py first",
    "date": "2026-12-01",
    "commit": None,
    "dry_run": False,
    "checks": [
        "a graph is bitwise equal to eager updates[mnist cnn]",
        "a graph is bitwise equal to eager updates[fastnet, MNIST]",
        "an evaluation has the same result each time and on two ranks",
        "unequal shares give the same bits",
        "a lost rank ends the run[killed-NCCL]",
        "a lost rank ends the run[stopped-NCCL]",
        "train py is as fast as its step and as timm[all GPUs]",
    ],
    "machine": "16 x Xeon, code abc",
    "processor": "16 x Xeon",
    "gpus": 1,
    "card": "NVIDIA H100",
    "driver": "580.1",
    "versions": {"torch": "2.15.0", "NCCL": None},
    "code": "abc",
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("gpu_records")
    monkeypatch.setattr(made, "ROOT", Path.cwd())
    return made


def write_call(folder: Path, about: dict = ABOUT, checks: dict = CHECKS) -> None:
    folder.mkdir(parents=True)
    (folder / "about.json").write_text(json.dumps(about))
    tables = {"another machine": {"older": PLAIN}, about["machine"]: checks}
    (folder / "gpu.json").write_text(json.dumps(tables))


RAW = Path("raw/2026-12-01-0123abcd")


def test_the_page_is_what_the_command_writes_from_the_records(script):
    page = script.PAGE.read_text()
    now = script.as_page(script.all_records(), script.code_hash())
    assert script.written(page, now) == page, "run python benchmarks/gpu_records.py"
    assert "| Command | Commit | Result |" in now and "\n| not run with this code |  | " in now


def test_a_record_has_what_run_py_wrote_and_null_for_what_it_did_not(script):
    write_call(RAW / "first")
    write_call(RAW / "speed", ABOUT | {"command": "python3 tests/gpu/run.py speed"}, {})
    record = script.make_record(RAW.absolute())
    assert (record["date"], record["commit"], record["code"]) == ("2026-12-01", "0123abcd", "abc")
    assert (record["raw"], record["driver"]) == (str(RAW), "580.1")
    assert [call["checks"] for call in record["calls"]] == [CHECKS, {}]
    older = json.loads((script.RECORDS / "2026-11-26-gpu.json").read_text())
    assert older.keys() == record.keys() and older["commit"] is None


def test_a_table_has_figures_and_failures_first_and_what_has_not_run_last(script):
    write_call(RAW)
    record = script.make_record(RAW.absolute())
    results = list(script.results_of(CHECKS))
    assert results[0] == "a graph is bitwise equal to eager updates (mnist cnn): images/s 3711"
    assert results[1].startswith("**failed**: unequal") and results[1].endswith("assert 1 == 2 /")
    assert results[2].startswith("**not finished**: a lost rank ends the run (stopped")
    assert results[3].startswith("passed: an evaluation has the same result")
    assert results[4].startswith("not run: train py is") and "(needs two GPUs)" in results[4]
    page = script.as_page([record], "abc")
    assert page.startswith("2026-12-01: 1 x NVIDIA H100, 16 x Xeon; torch 2.15.0, driver 580.1.")
    assert "| `python3 tests/gpu/run.py first` | 0123abcd | a graph is" in page


def test_what_has_not_run_is_found_by_whole_names_and_backends(script):
    write_call(RAW)
    record = script.make_record(RAW.absolute())
    assert script.not_run([record], "abc").split("; ") == [
        "a graph is bitwise equal to eager updates (fastnet, MNIST)",
        "a lost rank ends the run (stopped-NCCL)",
        "train py is as fast as its step and as timm (all GPUs)",
        "over NCCL: a lost rank ends the run (killed-NCCL)",
        "more than one GPU",
        *script.NOT_COVERED,
    ]
    assert "more than one GPU" in script.not_run([record, record | {"code": "b", "gpus": 8}], "abc")
    many = script.not_run([record, record | {"gpus": 8, "calls": []}], "abc")
    assert "more than one GPU" not in many
    assert script.not_run([record], "another").startswith("everything")
    assert script.not_run([record | {"all_checks": []}], "abc").startswith("unknown: ")


def test_a_folder_that_is_no_record_is_refused(script):
    for folder, changes, text in (
        (Path("raw/today"), {}, "is not DATE-COMMIT"),
        (RAW, {"code": "other"}, "differ in their code"),
        (Path(f"{RAW}-a"), {"machine": "16 x Xeon, driver 1"}, "differ in their machine"),
        (Path(f"{RAW}-b"), {"dry_run": True}, "is not a record"),
        (Path(f"{RAW}-c"), {"gpus": 0}, "is not a record"),
    ):
        write_call(folder / "a")
        write_call(folder / "b", ABOUT | changes)
        with pytest.raises(SystemExit, match=text):
            script.make_record(folder.absolute())
    with pytest.raises(SystemExit, match=r"no about\.json"):
        Path("raw/2026-12-02-0123abcd").mkdir()
        script.make_record(Path("raw/2026-12-02-0123abcd").absolute())
