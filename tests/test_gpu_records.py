"""What GPUs have run: records made from what tests/gpu/run.py wrote, and the page made from records."""

import importlib
import json
import lzma
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.training_runs import ROOT, start

PASSED = {"outcome": "passed", "seconds": 12.5, "figures": {"images/s": 3711}, "reason": ""}
PLAIN = PASSED | {"figures": {}}
FAILED = PLAIN | {"outcome": "failed", "reason": "assert 1 == 2 |"}
SKIPPED = PLAIN | {"outcome": "skipped", "reason": "needs two GPUs"}
CHECKS = {
    "a graph has the bits of eager updates[mnist_cnn]": PASSED,
    "an evaluation has the same result each time and on two ranks over nccl": PLAIN,
    "unequal shares give the same bits over nccl": FAILED,
    "train py is as fast as its step and as timm[all GPUs]": SKIPPED,
}
ABOUT = {
    "command": "python3 tests/gpu/run.py first",
    "date": "2026-12-01",
    "commit": None,
    "machine": "16 x Xeon",
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
    assert "| Command | Commit | Result |" in now and "\n| not run at HEAD |  | " in now


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
    assert results[0] == "a graph has the bits of eager updates (mnist_cnn): images/s 3711"
    assert results[1].startswith("**failed**: unequal") and results[1].endswith("assert 1 == 2 /")
    assert results[2].startswith("passed: an evaluation has the same result")
    assert results[3].startswith("not run: train py is") and "(needs two GPUs)" in results[3]
    page = script.as_page([record], "abc")
    assert "| `python3 tests/gpu/run.py first` | 0123abcd | a graph has" in page
    missing = script.not_run([record], "abc")
    assert "unequal shares" not in missing and "train py is as fast" in missing
    assert script.not_run([record], "another").startswith("everything")
    assert set(script.titles()) >= {"unequal shares give the same bits", "two ranks talk over nccl"}


def test_a_folder_that_is_no_record_is_refused(script):
    for folder, changes, text in (
        (Path("raw/today"), {}, "is not DATE-COMMIT"),
        (RAW, {"code": "other"}, "different code"),
    ):
        write_call(folder / "a")
        write_call(folder / "b", ABOUT | changes)
        with pytest.raises(SystemExit, match=text):
            script.make_record(folder.absolute())
    with pytest.raises(SystemExit, match=r"no about\.json"):
        Path("raw/2026-12-02-0123abcd").mkdir()
        script.make_record(Path("raw/2026-12-02-0123abcd").absolute())


# What tests/gpu/run.py does before it runs checks.


@pytest.fixture
def run_py(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return importlib.import_module("run")


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


def test_the_list_names_each_part_with_what_it_needs_and_takes(run_py):
    lines = run_py.listed().splitlines()
    assert [line.split()[0] for line in lines] == list(run_py.PARTS)
    assert all("minutes; needs one GPU" in line or "two GPUs" in line for line in lines)
