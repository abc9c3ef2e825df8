"""utils/data/table.py: a run keeps its samples, and changes are reported in words."""

import json
import os
import re
import shutil
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
from datasets import ClassLabel
from helpers.loading import RUN, evaluated, invert, load
from helpers.make_data import encoded, image_folder, pictures, table
from helpers.make_data import parquet as write_parquet
from helpers.pack import tar
from helpers.ranks import run_ranks
from helpers.training_runs import (
    kept_in,
    records,
    refused,
    restore,
    same_tensors,
    train_run,
    weights,
    words,
)
from pyarrow import parquet

import eval
import train
import utils.data.sources as sources
from utils.data.selection import load_data
from utils.data.splits import stamp_of
from utils.data.table import TABLE_FILE, read_table
from utils.runs.manifest import checkpoints_of, damage_of, sha256_of, write_manifest
from utils.settings.train import TrainConfig

FLAGS = ["--data", "data", *RUN, "--max_steps"]
MORE = [*FLAGS, *words("9 --run_name run --resume auto")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on a folder of 60 BMP files, whose size says nothing of their content."""
    folder = tmp_path_factory.mktemp("trained") / "work"
    with kept_in(folder):
        # the other Unicode form of Café is in another place in the order of text
        paths = image_folder("data", {"Cafz": 30, "Café": 30}, kind="bmp")
        paths[1] = paths[1].rename("data/Cafz/é.bmp")
        train_run(1, "run", *FLAGS, "6")
        train_run(1, "whole", *FLAGS, "9")
    return folder, paths


@pytest.fixture
def trained(own_folders, finished, monkeypatch):
    """The run `run`, which may go on for three updates, the run `whole`, which has them, and their
    data.
    """
    folder, paths = finished
    monkeypatch.chdir(restore(folder))
    return paths


def keep_time(path, change):
    """Change a file and restore its times, as a copy or an archive does."""
    status = path.stat()
    change(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def checkpoint():
    return Path("runs/run/checkpoints/step-00000006")


def numbers(record):
    return {name: record[name] for name in ("accuracy", "loss", "count", "per_class_accuracy")}


@pytest.mark.full
def test_files_and_classes_renamed_to_another_unicode_form_are_the_same(trained):
    before, known = evaluated()[0], evaluated("--split", "train")[0]
    for path in ("data/Café", "data/Cafz/é.bmp"):
        Path(path).rename(unicodedata.normalize("NFD", path))
    after, out = evaluated()
    assert numbers(after) == numbers(before)
    assert numbers(evaluated("--split", "train")[0]) == numbers(known)
    assert not any(line in out for line in ("changed", "no longer in", "new files"))
    train_run(1, "run", *MORE)
    assert_whole()


def test_new_files_do_not_move_samples_from_training_to_evaluation(trained):
    before, _ = evaluated()
    for number in range(200):
        shutil.copy(trained[0], f"data/Cafz/0000{number}.bmp")  # sorts before all others
    after, _ = evaluated()
    assert numbers(after) == numbers(before) and after["count"] == 6
    assert evaluated("--split", "train")[0]["count"] == 54
    train_run(1, "run", *MORE)
    assert_whole()


def assert_whole():
    run, whole = ([r["loss"] for r in records(name, "train")] for name in ("run", "whole"))
    assert run == whole
    assert same_tensors(weights("run"), weights("whole"))


CHANGES = {
    "1 of 60 images changed: Cafz/007.bmp": lambda paths: keep_time(paths[7], invert),
    "are missing: Café/010.bmp": lambda paths: paths[40].unlink(),
    "30 of 60 images are missing: Cafz/": lambda paths: shutil.rmtree("data/Cafz"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_reports_in_words_what_changed_in_the_data(trained, change):
    CHANGES[change](trained)
    assert change in refused(train.main, *MORE)


def test_an_evaluation_reports_changed_images_and_goes_on(trained):
    for path in trained:
        keep_time(path, invert)
    record, out = evaluated()
    assert record["count"] == 6 and "6 of 6 images changed: " in out


def test_an_evaluation_reports_missing_files_and_leaves_them_out_only_on_request(trained):
    gone = Path("data", read_table(checkpoint() / TABLE_FILE).evaluation.names[2])
    gone.unlink()
    line = refused(eval.main, "--ckpt", "runs/run")
    assert "1 of 6 images of split 'hold-out of train' cannot be read" in line
    assert f"{gone} (no longer in the data set)" in line
    record, out = evaluated("--bad_images", "skip")
    assert record["count"] == 5 and "1 of 6 images" in out


def test_a_data_set_that_moved_is_still_the_run_s_own(trained):
    before, _ = evaluated()
    os.rename("data", "elsewhere")
    assert numbers(evaluated("--data", "elsewhere")[0]) == numbers(before)
    train_run(1, "run", "--data", "elsewhere", *MORE[2:])
    assert_whole()


def test_images_to_evaluate_on_that_the_run_trained_on_are_counted(trained):
    os.rename("data", "elsewhere")
    held = read_table(checkpoint() / TABLE_FILE).evaluation.names
    Path("elsewhere", held[0]).unlink()
    record, out = evaluated("--data", "elsewhere")
    assert record["count"] == 59
    assert "the run trained on 54 of the 59 images of split 'train'" in out


def test_a_file_that_is_gone_from_a_nested_folder_is_the_only_one_that_is_missing(own_folders):
    image_folder("data/photos/cat", {"cat": 30, "dog": 30}, kind="bmp")
    train_run(1, "run", *FLAGS, "6")
    (first, *_) = read_table(checkpoint() / TABLE_FILE).train.names
    Path("data/photos/cat", first).unlink()
    assert f"1 of 60 images are missing: {first}; " in refused(train.main, *MORE)
    train_run(1, "run", *MORE, "--bad_images", "skip")


@pytest.mark.parametrize("other", ["data/notes/a.txt", "data/more/emu/1.png"])
def test_another_folder_beside_a_nested_data_set_changes_nothing(own_folders, other):
    image_folder("data/photos", {"cat": 30, "dog": 30}, kind="bmp")
    if other.endswith(".txt"):
        Path(other).parent.mkdir()
        Path(other).touch()
    train_run(1, "run", *FLAGS, "6")
    if not Path(other).exists():
        Path(other).parent.mkdir(parents=True)
        Path(other).write_bytes(encoded(pictures(1)[0], "PNG"))
    train_run(1, "run", *MORE)
    assert [record["step"] for record in records("run", "train")] == [*range(1, 10)]


def test_a_run_has_its_table_once_and_checkpoints_have_links_to_it(trained, monkeypatch):
    def inodes():
        return [path.stat().st_ino for path in Path("runs/linked").rglob("samples*.parquet")]

    train_run(1, "linked", *FLAGS, "6")
    (kept,) = Path("runs/linked").glob("samples-*.parquet")
    assert kept.name == f"samples-{sha256_of(kept)}.parquet"
    assert len(inodes()) > 2 and len({*inodes()}) == 1
    train_run(1, "linked", *FLAGS, "9", "--resume", "auto")
    assert len({*inodes()}) == 1
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError))  # as on some network file systems
    train_run(1, "copies", *FLAGS, "6")
    (kept,) = Path("runs/copies").glob("samples-*.parquet")
    copies = [*Path("runs/copies").rglob(TABLE_FILE)]
    assert copies and all(path.read_bytes() == kept.read_bytes() for path in copies)


def test_the_start_table_says_how_many_samples_there_are_and_when_they_were_listed(trained):
    (outcome,) = run_ranks(1, train.main, MORE)
    listed = read_table(checkpoint() / TABLE_FILE).listed
    assert re.search(rf"^samples +60, listed on {listed}$", outcome.out, re.M)


def test_a_copied_checkpoint_without_its_table_is_evaluated_and_not_resumed(trained):
    own = evaluated()[0]
    of_training = evaluated("--split", "train")[0]
    (checkpoint() / TABLE_FILE).unlink()
    assert numbers(evaluated()[0]) == numbers(own)  # by the table in the run folder
    shutil.copytree(checkpoint(), "copy")
    record, out = evaluated("--ckpt", "copy")
    assert "they are chosen again from --data" in out and numbers(record) == numbers(own)
    record, _ = evaluated("--ckpt", "copy", "--split", "train")
    assert numbers(record) == numbers(of_training)
    (checkpoint().parent / "latest").unlink()
    for path in (*Path("runs/run").glob("samples-*"), *Path("runs/run").rglob(TABLE_FILE)):
        path.unlink()
    assert "has no table of its samples; copy samples.parquet too" in refused(train.main, *MORE)


def test_links_to_the_files_of_a_checkpoint_and_a_damaged_table_of_the_run_make_good_ones(trained):
    for folder in ("blobs", "snapshot"):  # as in the cache of the Hub
        Path(folder).mkdir()
    for file in checkpoint().iterdir():
        shutil.copy(file, "blobs")
        Path("snapshot", file.name).symlink_to(f"../blobs/{file.name}")
    train_run(1, "other", *FLAGS, "9", "--resume", "snapshot")
    shutil.copytree("runs/run", "runs/third")  # without hard links
    (kept,) = Path("runs/third").glob("samples-*.parquet")
    kept.write_bytes(kept.read_bytes()[:-100])
    train_run(1, "third", *FLAGS, "9", "--resume", "auto")
    for run in ("other", "third"):
        saved = checkpoints_of(Path("runs", run, "checkpoints"))
        assert [damage_of(path) for path in saved] == [None] * len(saved)
        assert same_tensors(weights(run), weights("whole"))
        assert not any(path.is_symlink() for path in Path("runs", run).rglob("*.parquet"))


def test_images_that_are_skipped_later_are_in_a_table_of_their_own_and_older_ones_stay(trained):
    names = read_table(checkpoint() / TABLE_FILE).train.names
    Path("data", names[5]).unlink()
    Path("data", names[7]).write_bytes(Path("data", names[8]).read_bytes())
    before = (checkpoint() / TABLE_FILE).read_bytes()
    train_run(1, "run", *MORE, "--bad_images", "skip", "--keep", "all")
    train_run(1, "run", *MORE, "--max_steps", "12", "--bad_images", "skip", "--keep", "all")
    assert (checkpoint() / TABLE_FILE).read_bytes() == before
    table = read_table(checkpoint().with_name("step-00000012") / TABLE_FILE)
    assert table.train.names == names and len([*Path("runs/run").glob("samples-*.parquet")]) == 2
    assert {names[row]: reason for row, reason in errors_of(table.train).items()} == {
        names[5]: "no longer in the data set",
        names[7]: "changed since the run started",
    }


def errors_of(part):
    errors = part.split.errors
    index = part.split.image_index.tolist()
    return {place: errors[row] for place, row in enumerate(index) if row in errors}


def test_files_with_new_times_are_read_once_and_then_known(trained):
    for path in trained:
        os.utime(path)
    train_run(1, "run", *MORE)
    kept = read_table(checkpoint().with_name("step-00000009") / TABLE_FILE)
    for part in kept.parts:
        stamps = part.split.stamps[part.split.image_index]
        assert [[*stamp_of(Path("data", name))] for name in part.names] == stamps.tolist()


def test_an_image_that_can_only_be_found_by_decoding_is_replaced_on_request(own_folders):
    paths = image_folder("data", {"cat": 12, "dog": 12}, (128, 128), "png")
    data = paths[20].read_bytes()
    middle = len(data) // 2
    paths[20].write_bytes(data[:middle] + bytes(400) + data[middle + 400 :])
    flags = [*FLAGS[:-1], "--num_workers", "0", "--save_every", "1", "--max_steps"]
    line = refused(train.main, *flags, "6", "--run_name", "run")
    assert "--bad_images skip" in line
    train_run(1, "run", *flags, "6", "--resume", "auto", "--bad_images", "skip")


def test_other_settings_for_the_splits_are_refused_with_the_changes(trained):
    line = refused(train.main, *MORE, "--eval_fraction", "0.5")
    assert "was trained with --eval_fraction None, not 0.5" in line


NAMED = ClassLabel(names=["cat", "dog"])


def write_table(images, labels):
    shutil.rmtree("data", ignore_errors=True)
    write_parquet("data", train=table(labels, NAMED, list(images)))


TABLES = {
    "split 'train' had 60 samples and now has 57": (pictures(60)[:-3], [0, 1] * 28 + [0]),
    "the images of split 'train' changed": (255 - pictures(60), [0, 1] * 30),
    "the labels of split 'train' changed": (pictures(60), [1, 0] * 30),
}


@pytest.mark.full
def test_a_table_that_changed_is_refused_by_resume_and_by_evaluation_of_its_hold_out():
    write_table(pictures(60), [0, 1] * 30)
    train_run(1, "run", *FLAGS, "6")
    write_table(pictures(60), [0, 1] * 30)  # the same rows in a new file
    assert evaluated()[0]["accuracy"] == records("run", "eval")[-1]["accuracy"]
    for text, changed in TABLES.items():
        write_table(*changed)
        assert text in refused(train.main, *MORE)
        line = refused(eval.main, "--ckpt", "runs/run")
        assert text in line and "--split train" in line


def test_a_table_with_a_new_class_is_evaluated_by_the_names_of_its_classes():
    write_parquet("data", train=table([0, 1] * 30, NAMED), test=table([0, 1] * 10, NAMED))
    train_run(1, "run", *FLAGS, "6")
    before = evaluated()[0]
    new = ClassLabel(names=["ant", *NAMED.names])
    write_parquet("data", train=table([1, 2] * 30, new), test=table([1, 2] * 10, new))
    assert numbers(evaluated()[0]) == numbers(before)
    write_parquet("data", train=table([0, 1] * 30, new), test=table([0, 1] * 10, new))
    assert "ant" in refused(eval.main, "--ckpt", "runs/run")
    assert "the labels of split 'train' changed" in refused(train.main, *MORE)


def test_a_stranger_s_table_with_rows_outside_the_split_is_refused():
    train_run(1, "run", "--data", "digits", *FLAGS[2:], "6")
    for row in (10**9, -5):
        change_table(lambda path, row=row: changed(path, "row", lambda rows: [*rows[:-1], row]))
        line = refused(eval.main, "--ckpt", "runs/run")
        assert "the table of samples has rows outside the split" in line


@pytest.mark.full
def test_a_table_to_evaluate_on_that_changed_is_refused_by_a_resume():
    write_parquet("data", train=table([0, 1] * 30, NAMED), test=table([0, 1] * 10, NAMED))
    train_run(1, "run", *FLAGS, "6")
    write_parquet("data", test=table([0, 1] * 9, NAMED))
    assert "split 'test' had 20 samples and now has 18" in refused(train.main, *MORE)
    assert "split 'test' had 20 samples and now has 18" in evaluated()[1]


@pytest.mark.full
def test_a_split_that_appears_later_does_not_change_the_samples_of_a_run():
    write_parquet("data", train=table([0, 1] * 30, NAMED))
    train_run(1, "run", *FLAGS, "6")
    for name in ("test", "validation"):
        write_parquet("data", **{name: table([0, 1] * 20, NAMED)})
    train_run(1, "run", *MORE)
    assert {each["count"] for each in records("run", "eval")} == {6}
    assert evaluated()[0]["count"] == 6
    assert evaluated("--split", "train")[0]["count"] == 54


def test_a_run_that_evaluates_on_its_training_split_is_evaluated_on_it():
    write_parquet("data", train=table([0, 1] * 30, NAMED))
    train_run(1, "run", "--eval_split", "train", *FLAGS, "2")
    assert evaluated()[0]["count"] == 60


def test_arrays_in_memory_are_known_by_their_content():
    """A data set of torchvision may hold its images as one array."""
    train_run(1, "run", "--data", "digits", *FLAGS[2:], "6")
    assert "the images of split 'train' changed" in refused(
        _train_on_dimmed_digits, "--data", "digits", *MORE[2:]
    )


def _train_on_dimmed_digits(flags):
    digits = sources.SOURCES["digits"]

    def dimmed(*given):
        source = digits(*given)
        source.split("train").images[17] //= 2
        return source

    sources.SOURCES["digits"] = dimmed
    train.main(flags)


def test_ranks_that_see_different_images_are_refused():
    for name in ("one", "two"):
        image_folder(f"{name}/data", {"cat": 30, "dog": 30}, seed=len(name), kind="bmp")
    Path("two/data/dog/000.bmp").write_bytes(Path("two/data/dog/001.bmp").read_bytes())
    flags = words(f"6 --output_dir {os.path.abspath('runs')}")
    line = refused(_train_in_a_folder_of_its_own, *FLAGS, *flags, processes=2)
    assert "rank 1 has different images in --data data than rank 0" in line


def _train_in_a_folder_of_its_own(flags):
    os.chdir("one" if os.environ["RANK"] == "0" else "two")
    train.main(flags)


def random_source(kind, random):
    """--data of a random small set, and its samples by an independent listing: whether each is for
    training, its name or row, its class, and a function that reads its bytes.
    """
    classes = ["b", "a a", "ç"][: random.integers(2, 4)]
    samples = []
    for split in ("train", "val"):
        for name in classes:
            for number in range(random.integers(1, 5)):
                samples.append((split, f"{split}/{name}/{number}.bmp", name))
    contents = {
        name: encoded(pictures(1, seed=n)[0], "BMP") for n, (_, name, _) in enumerate(samples)
    }
    for _, name, _ in samples:
        path = Path("random", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name])
    if kind == "folder":
        return "random", sorted(samples, key=lambda sample: sample[1].split("/"))
    if kind == "tar":
        order = random.permutation(len(samples)).tolist()
        tar("random.tar", {samples[row][1]: contents[samples[row][1]] for row in order})
        return "random.tar", sorted(samples, key=lambda sample: sample[1].split("/"))
    order = [samples[row] for row in random.permutation(len(samples))]
    if kind == "list":
        rows = [f"random/{name},{label},{split}" for split, name, label in order]
        Path("list.csv").write_text("\n".join(["path,label,split", *rows]))
        return "list.csv", [(split, f"random/{name}", label) for split, name, label in order]
    feature = ClassLabel(names=sorted(classes))
    found = []
    for split in ("train", "val"):
        own = [sample for sample in order if sample[0] == split]
        images = [{"bytes": contents[name], "path": None} for _, name, _ in own]
        labels = [feature.str2int(label) for _, _, label in own]
        write_parquet("tables", **{split: table(labels, feature, images)})
        found += [(split, row, label) for row, (_, _, label) in enumerate(own)]
    return "tables", found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["folder", "tar", "list", "tables"])
def test_the_table_of_a_random_source_is_an_independent_listing(kind, seed):
    data, samples = random_source(kind, np.random.default_rng(seed))
    expected = [sample for part in ("train", "val") for sample in samples if sample[0] == part]
    loaded = load(data)
    loaded.table.keep_in(Path())
    rows = parquet.read_table(loaded.table.file).to_pylist()
    names = loaded.table.class_names
    key = "row" if kind == "tables" else "name"
    found = [(row["split"], row[key], names[row["label"]]) for row in rows]
    kinds = {"train": "train", "val": "evaluation"}
    assert found == [(kinds[split], name, label) for split, name, label in expected]
    read = read_table(loaded.table.file)
    for one, other in zip(read.parts, loaded.table.parts, strict=True):
        assert (one.split.labels == other.split.labels).all()
        assert (one.source, one.count, one.content) == (other.source, other.count, other.content)
    again = load_data(TrainConfig(data=data, cache_dir="cache"), read)
    assert again.fingerprint == loaded.fingerprint and again.table is read


HOSTILE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no parquet": lambda path: path.write_bytes(b"PAR1" * 99),
    "a label": lambda path: changed(path, "label", lambda labels: [9, *labels[1:]]),
    "names": lambda path: changed(path, "name", lambda names: [*range(len(names))]),
    "classes": lambda path: described(path, lambda values: values["classes"].append(5)),
    "one part": lambda path: changed(path, "split", lambda names: ["train"] * len(names)),
    "count": lambda path: described(path, lambda values: values["train"].pop("count")),
    "no checksums": lambda path: without(path, "checksum"),
    "no times": lambda path: without(path, "changed"),
}


def without(path, name):
    parquet.write_table(parquet.read_table(path).drop_columns([name]), path)


def changed(path, name, change):
    """Change a column of the table in a file."""
    table = parquet.read_table(path)
    place = table.column_names.index(name)
    column = pyarrow.array(change(table[name].to_pylist()))
    parquet.write_table(table.set_column(place, name, column), path)


def described(path, change):
    """Change what the table in a file says about itself."""
    table = parquet.read_table(path)
    values = json.loads(table.schema.metadata[b"lockstep"])
    change(values)
    table = table.replace_schema_metadata({"lockstep": json.dumps(values)})
    parquet.write_table(table, path)


def change_table(change):
    path = checkpoint() / TABLE_FILE
    contents = path.read_bytes()
    path.unlink()  # not the file of the run, which has another name for it
    path.write_bytes(contents)
    change(path)
    (checkpoint() / "manifest.json").unlink()
    write_manifest(checkpoint())


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_a_stranger_s_table_is_refused_in_one_line(trained, name):
    change_table(HOSTILE[name])
    assert f"{TABLE_FILE}: damaged" in refused(eval.main, "--ckpt", "runs/run")


@pytest.mark.full
@pytest.mark.parametrize("name", ["../secret.bmp", "{}/secret.bmp"])
def test_names_in_a_stranger_s_table_open_no_file_outside_the_data(trained, name):
    Path("secret.bmp").write_bytes(trained[0].read_bytes())
    name = name.format(os.getcwd())
    change_table(lambda path: changed(path, "name", lambda names: [*names[:54], name, *names[55:]]))
    assert f"{name} (no longer in the data set)" in refused(eval.main, "--ckpt", "runs/run")
    assert evaluated("--bad_images", "skip")[0]["count"] == 5
