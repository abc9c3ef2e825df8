"""benchmarks/: their helpers compute what they say, and each script says how it is used."""

import importlib
import json
import sys
from pathlib import Path

import pandas
import pytest
from helpers.make_data import image_folder
from helpers.waiting import SOON, lives, until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "common")


@pytest.fixture
def benchmark(monkeypatch):
    """Import a script of benchmarks/ as `python benchmarks/NAME.py` would find it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def common(benchmark):
    return benchmark("common")


def test_a_ratio_compares_the_two_sides_of_a_round(common):
    assert common.ratios([3, 8], [2, 16]) == [1.5, 0.5]
    with pytest.raises(ValueError):
        common.ratios([1, 2], [1])
    rates = {"start": 9, "train": 1, "later": 7}
    log = [{"kind": kind, "images_per_second": rate} for kind, rate in rates.items()]
    log[2]["kind"] = "train"
    assert common.rates([*log, {"kind": "eval"}]) == [7]  # without the first record


def test_the_report_writes_every_number_down(common, tmp_path, capsys, monkeypatch):
    assert common.spread([3000, 1000, 1200]) == "1,200 (1,000 to 3,000)"
    assert common.spread([0.914], ".0%") == "91%"
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", "2", "--json", str(tmp_path / "out.json")])
    args = common.parse_flags("doc", size=(3, "of it"), folder=(Path, "of all"))
    assert (args.size, args.folder) == (3, None)
    common.report(args, ["", "s"], [["ours", 1]], {("ours", 2): [1.5, 2.5]})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["results"] == {"ours, 2": [1.5, 2.5]} and written["settings"]["rounds"] == "2"
    assert "|  | s |\n| --- | --- |\n| ours | 1 |" in capsys.readouterr().out


WAITING = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
FAILING = "for i in range(99): print('line', i)\nraise SystemExit(3)"


def test_a_command_is_timed_to_the_line_that_is_waited_for_and_leaves_no_process(common):
    waiting = [sys.executable, "-c", WAITING]
    lines, seconds = common.run(waiting, until=lambda line: line.strip().isdigit())
    assert seconds < SOON
    until(lambda: not lives(int(lines[-1][1])))
    with pytest.raises(TimeoutError):
        common.run(waiting, seconds=1)
    with pytest.raises(SystemExit, match="code 3") as caught:
        common.run([sys.executable, "-c", FAILING])
    assert "line 98" in str(caught.value) and "line 10\n" not in str(caught.value)


def test_scaling_compares_speed_ups_and_says_what_the_exchange_costs(benchmark):
    scaling = benchmark("scaling")
    results = {(scaling.TRAIN, 1): [100], (scaling.TRAIN, 2): [180], (scaling.DDP, 2): [150]}
    results |= {(scaling.ALONE, 1): [100], (scaling.ALONE, 2): [200]}
    table = {(row[0], row[1]): row[2:] for row in scaling.rows(results)}
    assert table[scaling.TRAIN, 2] == ["180", "333.3", "1.80", "90%", ""]
    assert table[scaling.DDP, 2] == ["150", "400.0", "1.50", "75%", "25.0%"]


def test_photos_compares_the_wrong_images_of_each_side(benchmark):
    wrong = {"forty lines": (7, 7), "head only": (8, 10)}
    results = {name: [{"wrong": one} for one in each] for name, each in wrong.items()}
    header, rows = benchmark("photos").accuracy_table(results, 100)
    assert rows == [
        ["forty lines", 7, 7, "7.0", "93.0%", "+0.0"],
        ["head only", 8, 10, "9.0", "91.0%", "+2.0"],
    ]
    assert len(header) == len(rows[0])


def test_fine_tuning_trains_on_a_draw_and_evaluates_on_the_other_photographs(benchmark, tmp_path):
    fine_tuning = benchmark("fine_tuning")
    image_folder(tmp_path / "all/train", {"a": 5, "b": 7})
    image_folder(tmp_path / "all/val", {"a": 4, "b": 4})
    chosen = []
    for number in range(2):
        folder = tmp_path / f"draw-{number}"
        fine_tuning.draw_photographs(tmp_path / "all", 3, number, folder)
        for name, count in (("a", 9), ("b", 11)):
            drawn = {path.name for path in (folder / "train" / name).iterdir()}
            others = {path.name for path in (folder / "val" / name).iterdir()}
            assert len(drawn) == 3 and len(drawn | others) == count
            chosen.append(drawn)
    assert chosen[0] != chosen[2]
    found = [{"wrong": wrong, "count": 10} for wrong in (1, 3)]
    header, rows = fine_tuning.table({"head only": found})
    assert rows == [["head only", 1, 3, "2.0", "80.0%"]] and len(header) == len(rows[0])


def test_photos_writes_the_same_number_of_images_of_each_class(benchmark, tmp_path):
    for split in ("train", "test"):
        stored = [{"bytes": b"%d" % index, "path": None} for index in range(400)]
        frame = pandas.DataFrame({"img": stored, "label": [index % 3 for index in range(400)]})
        frame.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    benchmark("photos").write_cifar10(tmp_path, tmp_path / "folder")
    for part, count in (("train", 50), ("val", 100)):
        assert len(list((tmp_path / "folder" / part / "2").glob("*.png"))) == count
    assert (tmp_path / "folder/val/2/5.png").read_bytes() == b"5"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_used(name, benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        benchmark(name).main()
    assert not ended.value.code and f"benchmarks/{name}.py" in capsys.readouterr().out
