"""utils/replacing.py: no output replaces a file of the user; files have the rights of the umask."""

import json
import os
import random
import shutil
import stat
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import full, refused, train_run, words, working_in

import doctor
import eval as evaluation
import export
import predict
import replay
from extras.compare.__main__ import main as report
from extras.folds import main as join_folds
from utils.errors import UserError
from utils.files import write_file
from utils.replacing import HTML, RESULT, TABLE, check_output
from utils.settings.scripts import DoctorConfig, EvalConfig, PredictConfig, ReplayConfig

FLAGS = words("--model mlp --threads 1 --num_workers 0 --max_steps 2 --global_batch_size 8")
FLAGS += words("--eval_every 2 --log_every 1")
QUICK = words("--threads 1 --num_workers 0")

# What Lockstep writes: names of columns or keys, or the tag of a page.
CELLS = {"predicted": "a", "class_1": "a", "probability_1": 0.5, "class_2": "b"}
CELLS |= {"probability_2": 0.5}
COLUMNS = [
    {"path": "x"} | CELLS | {"error": None},
    {"path": "x", "label": "a"} | CELLS | {"loss": 0.5},
    {"index": 3, "label": "a"} | CELLS | {"loss": 0.5},
    {"index": 3, "label": "a", "predicted": "a", "fold": 1, "class_1": "a"}
    | {"probability_1": 1.0, "loss": 0.5},
]
RESULTS = [
    {"kind": "eval", "step": 3, "data": "mnist", "split": "test", "classes": 2, "loss": 0.5},
    {"kind": "eval", "model": "m", "data": "d", "split": "s", "classes": 2, "count": 3, "tta": ""},
    {"healthy": True, "findings": []},
    {"updates": [], "checkpoints": {}, "data": "", "settings": "", "versions": {}, "rounding": 1},
]
# Labels of extras.folds, as they are, after a spreadsheet with semicolons, and with a column.
REVIEWS = ["path,label,suggestion,was\na,b,,c\n", "\ufeffpath;label;suggestion;was\na;b;;c\n"]
REVIEWS.append("path,label,suggestion,was,checked by\na,b,,c,me\n")
ENDINGS = {"table": [".csv", ".json", ".parquet"], "page": [".html"], "result": [".json"]}


def put(path: Path, rows: list[dict]) -> None:
    """Write a table by pandas alone."""
    frame = pandas.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        frame.to_parquet(path, index=False)


def put_ours(path: Path, what: str, chance: random.Random) -> None:
    """A file as Lockstep writes it."""
    if what == "table":
        put(path, [chance.choice(COLUMNS)] * 2)
    elif what == "result":
        path.write_text(json.dumps(chance.choice(RESULTS), indent=chance.choice([None, 1, 4])))
    else:
        tag = '<meta name="generator" content="Lockstep">'
        path.write_text(
            f'<!doctype html>\n<html><head><meta charset="utf-8">\n{tag}\n</head></html>'
        )


def put_foreign(path: Path, what: str, chance: random.Random) -> None:
    """A file of somebody else, which may resemble one of ours."""
    near = dict(chance.choice(COLUMNS))
    del near[chance.choice([name for name in near if name not in ("label", "fold")])]
    more = chance.choice(COLUMNS) | {"reviewed": "yes"}
    almost = dict(chance.choice(RESULTS))
    needed = ("kind", "split", "classes", "healthy", "findings", "updates", "checkpoints")
    del almost[chance.choice([name for name in needed if name in almost])]
    page = chance.choice(["", '<meta name="generator" content="Hugo">', "Lockstep"])
    anything = [
        lambda: path.write_bytes(chance.randbytes(300)),
        lambda: path.write_text(""),
        lambda: path.write_text("path,label\na.png,cat\n"),
        lambda: path.write_text("[1, 2]"),
        lambda: path.write_text('{"kind": "Deployment", "data": 1}'),
        lambda: path.write_text(f"<html><head>{page}</head></html>"),
    ]
    if path.suffix != ".html":
        anything += [lambda: put(path, [near]), lambda: put(path, [more])]
    if what == "result":
        anything += [lambda: path.write_text(json.dumps(almost))] * 3
    chance.choice(anything)()


class World:
    """Inputs of a user, and one output after another."""

    def __init__(self, chance: random.Random):
        self.chance = chance
        image_folder("photos", {"cat": 2, "dog": 2})
        image_folder("elsewhere/more", {"cat": 2})
        for folder in ("runs/run/checkpoints/step-00000002", "outputs", "photos/tables"):
            Path(folder).mkdir(parents=True)
        for name in ("config.yaml", "log.jsonl", "checkpoints/step-00000002/state.json"):
            Path("runs/run", name).write_text("{}")
        for name in ("plugin.py", "weights.pt", "labels.csv", "rows.parquet"):
            Path(name).write_text(f"the user's {name}")
        Path("linked").symlink_to("photos")
        self.number = 0
        self.kinds: dict[int, tuple[str, str]] = {}  # by inodes

    def flags(self, overwrite: bool) -> tuple[object, str, str, list[str], dict]:
        """A script's flags without outputs, an output flag, what it writes, the inputs, and paths
        that count as flags.
        """
        data = self.chance.choice(["photos", "linked", "labels.csv", "rows.parquet", "mnist"])
        run = self.chance.choice(["runs/run", "runs/run/checkpoints/step-00000002"])
        usual = {"overwrite": overwrite, "plugin": self.chance.choice([None, "plugin.py"])}
        if self.chance.random() < 0.3:
            weights = {"model": "mlp", "weights": "weights.pt", "data": data}
            given: object = EvalConfig(**usual, **weights)
            inputs = ["weights.pt", data]
        else:
            given, inputs = EvalConfig(**usual, ckpt=run), [run, data]  # the data of the run
        paths = [data, "elsewhere/more/cat/000.png", "elsewhere/more"]
        several = Namespace(**usual, runs=["runs/run", run], out=None, no_images=False)
        flags, name, what, inputs = self.chance.choice(
            [
                (given, "json", "result", inputs),
                (given, "predictions", "table", inputs),
                (PredictConfig(**usual, ckpt=run, paths=paths), "out", "table", [run, *paths]),
                (PredictConfig(**usual, ckpt=run, paths=paths), "html", "page", [run, *paths]),
                (ReplayConfig(**usual, run="runs/run"), "json", "result", ["runs/run"]),
                # the folders of these are for outputs
                (DoctorConfig(**usual), "json", "result", []),
                (several, "out", "page", []),
                (several, "out", "table", []),
            ]
        )
        if usual["plugin"]:
            inputs = [*inputs, "plugin.py"]
        return flags, name, what, inputs, {"data": data} if flags is given else {}

    def target(self, what: str, inputs: list[str]) -> tuple[Path, str]:
        """A path, and whether it is "new", "ours", "foreign" or a "review"."""
        chance = self.chance
        self.number += 1
        folder = chance.choice(
            words(
                "outputs outputs photos photos/tables runs/run elsewhere/more runs/run/checkpoints"
            )
        )
        ending = chance.choice([*ENDINGS[what], *ENDINGS[what], ".png", ".txt", ".HTML", ".Csv"])
        path = Path(folder, f"{self.number}{ending}")
        kind = chance.choice(["new", "ours", "foreign", "foreign", "review", "input"])
        if kind == "input":
            files = [path for each in inputs for path in [Path(each), *Path(each).rglob("*")]]
            path = chance.choice([each for each in files if each.is_file()] or [path])
            kind = "new"
            if path.exists():  # it may be an earlier output
                made, of = self.kinds.get(path.stat().st_ino, ("foreign", what))
                kind = "foreign" if made == "ours" and of != what else made
        elif kind == "review":
            path = path.with_suffix(".csv")
            path.write_text(chance.choice(REVIEWS), encoding="utf-8")
        elif kind == "ours" and ending in ENDINGS[what]:
            put_ours(path, what, chance)
        elif kind != "new":
            kind = "foreign"
            put_foreign(path.with_suffix(ending.lower()), what, chance)
            path.with_suffix(ending.lower()).rename(path)
        if path.exists():
            self.kinds[path.stat().st_ino] = kind, what
        return path, kind

    def spelling(self, path: Path) -> str:
        """Another name of the same file; it may have another ending."""
        chance, ending = self.chance, self.chance.choice([path.suffix, ".csv", ".json", ".html"])
        link = Path("outputs", f"link{self.number}{ending}")
        way = chance.choice(["plain", "dots", "whole", "variable", "link", "hard", "folder"])
        if way == "dots":
            return f"outputs/../{path}"
        if way == "whole":
            return str(path.absolute())
        if way == "variable":
            os.environ["PLACE"] = str(path.parent.absolute())
            return f"$PLACE/{path.name}"
        if way == "link":
            link.symlink_to(path.absolute())
            return str(link)
        if way == "hard" and path.exists():
            link.hardlink_to(path)
            return str(link)
        if way == "folder":
            Path(f"to{self.number}").symlink_to(path.parent.absolute())
            return f"to{self.number}/{path.name}"
        return str(path)


def contents() -> dict[str, bytes]:
    """All files here and below, by their names without links."""
    files = [path for path in Path().rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path): path.read_bytes() for path in files}


def states() -> dict[str, tuple]:
    """As `contents`, but what changes when a file is replaced or written to."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
    stats = {path: os.stat(path) for path in found if not os.path.islink(path)}
    return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in stats.items()}


def expected(
    text: str, path: Path, kind: str, what: str, inputs: list[str], overwrite: bool
) -> set[str]:
    """The parts of lines that may refuse `text`, a name of the file `path`; none if it may be
    written.
    """
    made, path, wrong = path, Path(os.path.expandvars(text)), set()
    real = os.path.realpath(path)
    if path.suffix.lower() not in ENDINGS[what]:
        wrong.add("must end in")
    known = kind == "ours" and Path(real).suffix.lower() == made.suffix.lower()
    for each in inputs:
        same = os.path.realpath(each) == real
        if os.path.exists(each) and os.path.exists(real):
            same = same or os.path.samefile(each, real)
        inside = os.path.commonpath([os.path.realpath(each), real]) == os.path.realpath(each)
        if same or (inside and kind != "new" and not known):
            wrong.add("is part of")
    # by a hard link, the list itself stays
    if kind == "review" and Path(real).suffix == ".csv":
        wrong.add("is a list of labels to correct")
    if kind != "new" and not known and not overwrite:
        wrong.add("has not written it")
    return wrong


def test_only_what_lockstep_has_written_is_replaced_and_no_input_by_any_name():
    chance = random.Random(0)
    world, kinds = World(chance), {"table": TABLE, "page": HTML, "result": RESULT}
    seen = {"": 0}
    for _ in range(300):
        overwrite = chance.random() < 0.5
        flags, name, what, inputs, more = world.flags(overwrite)
        path, kind = world.target(what, inputs)
        text = world.spelling(path)
        reasons = expected(text, path, kind, what, inputs, overwrite)
        setattr(flags, name, text)
        case = f"{name} {text} ({kind} {path}), overwrite {overwrite}, inputs {inputs}"
        try:
            check_output(flags, name, kinds[what], **more)
        except UserError as error:
            reason = next((each for each in reasons if each in error.problem), None)
            assert reason, f"{case}: refused: {error}"
            assert error.problem.startswith(f"--{name} ")
            assert ("--overwrite" in error.fix) == (reasons == {"has not written it"}), case
        else:
            assert not reasons, f"{case}: not refused: {reasons}"
            before = states()
            written = Path(os.path.expandvars(text))
            write_file(written, f"output {world.number}")
            world.kinds[written.stat().st_ino] = "foreign", what
            after = states()
            changed = {path for path, state in after.items() if before.get(path) != state}
            assert len(changed) == 1 and before.keys() <= after.keys(), case
            assert not changed & before.keys() or overwrite or kind == "ours", case
            reason = ""
        seen[reason] = seen.get(reason, 0) + 1
    assert len(seen) == 5 and min(seen.values()) > 5, seen


def test_an_output_must_be_a_regular_file_in_a_folder_that_can_be_written():
    os.mkfifo("pipe.json")
    Path("folder.json").mkdir()
    for name in ("pipe.json", "folder.json"):
        with pytest.raises(UserError, match="is not a regular file"):
            check_output(DoctorConfig(json=name), "json", RESULT)
    with pytest.raises(UserError, match="gone does not exist"):
        check_output(DoctorConfig(json="gone/x.json"), "json", RESULT)
    with pytest.raises(UserError, match=r"is part of --predictions \./x\.json"):
        flags = EvalConfig(ckpt="runs/run", json="x.json", predictions="./x.json")
        check_output(flags, "json", RESULT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs on a label file: one, and both folds."""
    folder = tmp_path_factory.mktemp("replacing")
    with working_in(folder):
        paths = image_folder("images", {"cat": 12, "dog": 12})
        labels = {"path": map(str, paths), "label": [path.parent.name for path in paths]}
        pandas.DataFrame(labels).to_csv("labels.csv", index=False)
        for name, more in (("run", "--microbatches 2"), ("f1", "--fold 1/2"), ("f2", "--fold 2/2")):
            train_run(1, name, "--data", "labels.csv", *FLAGS, *more.split())
    return folder


@pytest.fixture
def work(trained):
    """A copy of them."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)


def folds(flags: list[str]) -> None:
    join_folds(flags)


def run_once(main: Callable, flags: list[str]) -> None:
    """Run a command; the doctor may find that a busy machine is too slow."""
    (outcome,) = run_ranks(1, main, flags)
    assert outcome.code in (0, int(main is doctor.main)), outcome.err


CKPT = ["--ckpt", "runs/run", *QUICK]
COMMANDS: list[tuple[Callable, list[str], str]] = [  # the last word is an output
    (evaluation.main, [*CKPT, "--json"], "found.json"),
    (evaluation.main, [*CKPT, "--predictions"], "found.csv"),
    (evaluation.main, [*CKPT, "--predictions"], "found.parquet"),
    (evaluation.main, [*CKPT, "--predictions"], "found.json"),
    (predict.main, [*CKPT, "images", "--out"], "found.csv"),
    (predict.main, [*CKPT, "images", "--out"], "found.json"),
    (predict.main, [*CKPT, "images", "--html"], "found.html"),
    (report, ["runs/run", "--out"], "found.html"),
    (folds, ["runs/f1", "runs/f2", "--out"], "found.csv"),
    (replay.main, [*words("--run runs/run --verify all"), *QUICK, "--json"], "found.json"),
    (doctor.main, ["--threads", "1", "--json"], "found.json"),
]


@pytest.mark.full
@pytest.mark.parametrize("command", [0, *map(full, range(1, len(COMMANDS)))])
def test_each_command_replaces_its_own_file_and_another_only_with_overwrite(work, command):
    main, flags, name = COMMANDS[command]
    path = Path(name)
    path.write_text("notes of the user")
    line = refused(main, *flags, name)
    assert f"{name}: exists, and Lockstep has not written it; add --overwrite" in line
    assert path.read_text() == "notes of the user"
    run_once(main, [*flags, name, "--overwrite"])
    first = path.read_bytes()
    assert first != b"notes of the user"
    run_once(main, [*flags, name])
    assert len(path.read_bytes()) > len(first) / 2


@pytest.mark.full
def test_forgotten_names_and_inputs_are_refused_before_anything_is_computed(work, trained):
    photos = sorted(map(str, Path("images/cat").glob("*")))
    of_run = ["--predictions", f"{trained}/labels.csv", "--overwrite"]
    before = contents()
    for processes, main, flags, text in (
        (1, predict.main, ["--html", *photos], "images/cat/000.png: must end in .html"),
        (1, predict.main, ["--out", *photos], "images/cat/000.png: must end in .csv, .json"),
        (1, predict.main, words("labels.csv --out labels.csv"), "is part of --paths labels.csv"),
        (
            2,
            evaluation.main,
            words("--data labels.csv --predictions labels.csv"),
            "is part of --data",
        ),
        (1, evaluation.main, of_run, "is part of --data"),
        (1, evaluation.main, words("--json runs/run/report.json --overwrite"), "is part of --ckpt"),
    ):
        assert text in refused(main, *CKPT, *flags, processes=processes)
    assert contents() == before


@pytest.mark.full
def test_a_corrected_review_is_never_replaced_and_a_new_one_has_the_next_number(work):
    command = words("runs/f1 runs/f2 --no_images --out out/folds.csv")
    Path("out").mkdir()
    for number in (1, 2, 3):
        (outcome,) = run_ranks(1, folds, command)
        review = Path("out", f"review-{number}.csv" if number > 1 else "review.csv")
        assert outcome.code == 0 and f"labels to check: {review}" in outcome.out
        table = pandas.read_csv(review, keep_default_na=False)
        assert [*table.columns] == ["path", "label", "suggestion", "was"] and len(table) == 24
        review.write_text(review.read_text() + f"# corrected, {number}\n")
    for number, name in enumerate(["review.csv", "review-2.csv", "review-3.csv"], 1):
        assert Path("out", name).read_text().endswith(f"# corrected, {number}\n")
    shutil.copy("out/review.csv", "out/corrected.csv")
    for name in ("review.csv", "corrected.csv"):
        line = refused(folds, *words(f"runs/f1 runs/f2 --out out/{name} --overwrite"))
        assert f"out/{name}: is a list of labels to correct" in line
    Path("out/folds.html").write_text("my page")
    line = refused(folds, *words("runs/f1 runs/f2 --out out/folds.csv"))
    assert "--out out/folds.html: exists, and Lockstep has not written it" in line


@pytest.mark.full
@pytest.mark.parametrize(
    ("umask", "formats"), [(0o022, ["timm"]), full(0o077, ["timm"]), full(0o022, ["torch", "onnx"])]
)
def test_all_outputs_have_the_rights_that_the_umask_gives(work, umask, formats):
    Path("images").rename("photos")
    given, before = set(contents()), os.umask(umask)
    try:
        flags = words("--data photos --image_size 16 --ema_decay 0.9 --model timm/test_resnet")
        if "timm" not in formats:
            flags += words("--profile true --microbatches 2 --report_to tensorboard")
        train_run(1, "new", *FLAGS, *flags)
        ckpt = ["--ckpt", "runs/new", *QUICK]
        returned(1, evaluation.main, [*ckpt, *words("--json a.json --predictions b.parquet")])
        returned(1, predict.main, [*ckpt, *words("photos --out c.csv --html d.html")])
        returned(1, report, words("runs/new runs/run --out e.html"))
        run_once(doctor.main, words("--threads 1 --json f.json"))
        for name in formats:
            returned(1, export.main, [*ckpt[:2], "--to", name, "--out", f"models/{name}"])
    finally:
        os.umask(before)
    # ONNX Runtime keeps files of its own
    files = [Path(name) for name in contents().keys() - given if "Microsoft" not in name]
    assert len(files) > 20 and {Path(f"{n}") for n in words("a.json c.csv f.json")} < {*files}
    wrong = [path for path in files if stat.S_IMODE(path.stat().st_mode) != 0o666 & ~umask]
    assert wrong == []
    folders = [path for path in Path().rglob("*") if path.is_dir() and path.parts[1:2] == ("new",)]
    folders.append(Path("models", formats[0]))
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o777 & ~umask}
