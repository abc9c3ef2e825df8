"""Many small generated data sets: each label matches its image, or one line says why not.

Each image shows its class as a brightness, so the truth is read from the pixels that a split
decodes to.
"""

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, DatasetDict, Value
from datasets import Image as ImageFeature
from helpers.loading import error_of, load
from helpers.make_data import encoded, table

from utils.data.decode import decode_image
from utils.data.decoded import decode_all
from utils.data.selection import load_split
from utils.models.published import names_as_in
from utils.settings.train import TrainConfig

WORDS = ("ant", "Café", "dog", "Übung", "9", "10", "007", "ñandú", "emu")


def picture_of(number: int) -> np.ndarray:
    return np.full((8, 8, 3), 20 * number + 10, np.uint8)


def shown(split) -> list[int]:
    """The number that each image shows."""
    return [int(decode_image(split, position, 3)[0, 0, 0]) // 20 for position in range(len(split))]


def write_set(form: str, samples: dict[str, list[tuple[int, str]]], draw: random.Random) -> str:
    """Write samples, (number shown, name of the class), by split; returns the value of --data."""
    rows = []
    for split, own in samples.items():
        for place, (number, name) in enumerate(own):
            path = Path(
                f"set/{split}/{name}/{place}.png" if form == "folder" else f"set/{split}{place}.png"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            if form in ("folder", "csv"):
                path.write_bytes(encoded(picture_of(number), "PNG"))
            rows.append(f"{path.name},{name},{split}")
    if form == "folder":
        return "set"
    if form == "csv":
        Path("set/list.csv").write_text(
            "\n".join(["path,label,split", *draw.sample(rows, len(rows))]) + "\n"
        )
        return "set/list.csv"
    tables = {}
    for split, own in samples.items():
        names = draw.sample(sorted({name for _, name in own}), len({name for _, name in own}))
        named = draw.random() < 0.7
        labels = [names.index(name) if named else name for _, name in own]
        feature = ClassLabel(names=names) if named else Value("string")
        tables[split] = table(labels, feature, [picture_of(number) for number, _ in own])
    if form == "saved":
        DatasetDict(tables).save_to_disk("set")
    else:
        for split, dataset in tables.items():
            dataset.to_parquet(f"set/{split}.parquet")
    return "set"


@pytest.mark.full
@pytest.mark.parametrize("form", ["folder", "csv", "parquet", "saved"])
@pytest.mark.parametrize("seed", range(6))
def test_names_decide_in_any_order_and_form_or_a_line_has_both_splits_classes(form, seed):
    draw = random.Random(f"{form} {seed}")
    classes = draw.sample(WORDS, draw.randint(2, 5))
    in_train = draw.sample(classes, len(classes) if draw.random() < 0.7 else len(classes) - 1)
    in_test = draw.sample(classes, draw.randint(1, len(classes)))

    def samples_of(names):
        forms = draw.choice((["NFC"], ["NFD"], ["NFC", "NFD"]))
        chosen = [name for name in names for _ in range(3)]
        draw.shuffle(chosen)
        return [
            (classes.index(name), unicodedata.normalize(draw.choice(forms), name))
            for name in chosen
        ]

    samples = {"train": samples_of(in_train), "test": samples_of(in_test)}
    data = write_set(form, samples, draw)
    missing = set(in_test) - set(in_train)
    if missing or len(in_train) < 2:
        text = unicodedata.normalize("NFC", error_of(data))
        assert any(name in text for name in missing) or len(in_train) < 2
        assert all(name in text for name in in_train)
        if missing and len(in_train) > 1:
            assert all(name in text.partition("(split 'test': ")[2] for name in in_test)
        return
    found = load(data)
    class_names = [unicodedata.normalize("NFC", name) for name in found.class_names]
    assert sorted(class_names) == sorted(in_train)
    for split in (found.train, found.evaluation):
        numbers = [classes.index(class_names[label]) for label in split.labels]
        assert numbers == shown(split)
        assert not split.notes


@pytest.mark.parametrize("form", ["folder", "csv"])
@pytest.mark.parametrize("seed", range(4))
def test_classes_of_outputs_can_follow_from_those_of_the_data(form, seed):
    draw = random.Random(f"{form} {seed}")
    numbers = sorted(draw.sample(range(12), draw.randint(3, 12))) if seed else list(range(12))
    samples = {"train": [(number, str(number)) for number in numbers for _ in range(2)]}
    data = write_set(form, samples, draw)
    split, outputs = load_split(TrainConfig(data=data), None, lambda names: names[::-1])
    own = load(data, eval_fraction=0.5).class_names
    assert own == (sorted(outputs) if form == "folder" else sorted(outputs, key=int))
    assert outputs == own[::-1]
    assert [int(outputs[label]) for label in split.labels] == shown(split)


@pytest.mark.parametrize(
    ("form", "split"),
    [
        ("flat folder", "train"),
        ("folder", "val"),
        ("folder", "train"),
        ("csv", "val"),
        ("flat csv", "train"),
        ("parquet", "train"),
        ("folder", "fold2"),
    ],
)
def test_data_without_a_split_to_choose_are_evaluated_whole(form, split):
    samples = [(number, name) for number, name in enumerate(["n01440764", "n02123045"])] * 10
    data = write_set(form.removeprefix("flat "), {split: samples}, random.Random(0))
    if form == "flat folder":
        data = f"set/{split}"
    if form == "flat csv":
        Path(data).write_text(Path(data).read_text().replace(",train", "").replace(",split", ""))
    found, _ = load_split(TrainConfig(data=data, cache_dir="cache"), None, names_as_in)
    assert len(found) == 20 and (np.bincount(found.labels) > 0).sum() == 2


def test_columns_share_a_cache_and_each_gives_its_own_pixels():
    shown_by = {"a": list(range(12)) * 2, "b": list(range(11, -1, -1)) * 2}
    columns = {name: list(map(picture_of, numbers)) for name, numbers in shown_by.items()}
    other = (columns["b"], ImageFeature())
    table([0, 1] * 12, ClassLabel(names=["x", "y"]), columns["a"], "a", b=other).save_to_disk("set")
    for name in ("a", "b", "a"):
        train = load("set", image_column=name).train
        pixels = decode_all(train, 8, 8, 3, "cache", iter)
        assert (pixels == np.stack(columns[name])[train.image_index]).all()
