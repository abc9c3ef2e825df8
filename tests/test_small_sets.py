"""Properties of data over many small generated sets: each label matches its image, or one line says
why not.

Each image shows its class as a brightness, so the truth is read from the pixels that a split
decodes to.
"""

import random
import unicodedata
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from helpers.make_data import encoded, table

import eval
from utils.config.settings import TrainConfig
from utils.data.cache import decode_all
from utils.data.decode import decode
from utils.data.selection import load_data, load_split
from utils.data.spec import InputSpec
from utils.models.published import names_of_outputs

WORDS = ("ant", "Café", "dog", "Übung", "9", "10", "007", "ñandú", "emu")


def picture_of(number: int) -> np.ndarray:
    return np.full((8, 8, 3), 20 * number + 10, np.uint8)


def shown(split) -> list[int]:
    """The number that each image shows."""
    return [int(decode(split, position, 3)[0, 0, 0]) // 20 for position in range(len(split))]


def config(data: str, **settings) -> TrainConfig:
    return TrainConfig(data=data, cache_dir="cache", **settings)


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


@pytest.mark.parametrize("form", ["folder", "csv", "parquet", "saved"])
@pytest.mark.parametrize("seed", range(6))
def test_names_decide_in_any_order_and_unicode_form_or_one_line_names_the_classes_of_both_splits(
    form, seed
):
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
        with pytest.raises(ValueError) as caught:
            load_data(config(data))
        text = unicodedata.normalize("NFC", str(caught.value))
        assert "\n" not in text and (any(name in text for name in missing) or len(in_train) < 2)
        assert all(name in text for name in in_train)
        if missing and len(in_train) > 1:
            assert all(name in text.partition("(split 'test': ")[2] for name in in_test)
        return
    found = load_data(config(data))
    assert sorted(unicodedata.normalize("NFC", name) for name in found.class_names) == sorted(
        in_train
    )
    for split in (found.train, found.evaluation):
        names = [unicodedata.normalize("NFC", found.class_names[label]) for label in split.labels]
        assert names == [classes[number] for number in shown(split)]
    written = {split: {name for _, name in own} for split, own in samples.items()}
    for split in (found.train, found.evaluation):
        says = any("another Unicode form" in note for note in split.notes)
        assert says == bool(
            written["train" if split is found.train else "test"] - set(found.class_names)
        )


def test_shards_of_one_split_with_other_names_are_refused_with_both_lists():
    Path("set").mkdir()
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        shard = table([0, 1], ClassLabel(names=names), [picture_of(0), picture_of(1)])
        shard.to_parquet(f"set/train-0000{number}-of-00002.parquet")
    with pytest.raises(
        ValueError,
        match=r"00001-of-00002.parquet: label has the classes dog, cat, but in .* cat, dog;",
    ):
        load_data(config("set"))


@pytest.mark.parametrize("form", ["folder", "csv"])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_without_names_are_the_classes_in_numeric_order_if_all_are_numbers(
    form, seed, capsys
):
    draw = random.Random(f"{form} {seed}")
    numbers = sorted(draw.sample(range(12), draw.randint(3, 12))) if seed else list(range(12))
    samples = {"train": [(number, str(number)) for number in numbers for _ in range(2)]}
    data = write_set(form, samples, draw)
    split, outputs = load_split(
        config(data), None, partial(names_of_outputs, len(numbers), False), own_data=False
    )
    assert outputs == list(map(str, numbers)) and [
        numbers[label] for label in split.labels
    ] == shown(split)
    own = load_data(config(data, eval_fraction=0.5)).class_names
    assert own == (sorted(outputs) if form == "folder" else outputs)  # a run keeps its order


LAYOUTS = ("flat folder", "only val", "only train", "csv", "csv of val", "parquet", "another name")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_without_a_split_to_choose_are_evaluated_whole_by_weights_that_nothing_was_trained_with(
    layout,
):
    names = ["n01440764", "n02123045"]
    samples = [(number, name) for number, name in enumerate(names) for _ in range(10)]
    split = {"only val": "val", "csv of val": "val", "another name": "fold2"}.get(layout, "train")
    data = write_set(
        layout.split()[0] if layout[:3] in ("csv", "par") else "folder",
        {split: samples},
        random.Random(0),
    )
    if layout in ("flat folder", "another name"):
        data = f"set/{split}" if layout == "flat folder" else data
    if layout == "csv":
        Path(data).write_text(Path(data).read_text().replace(",train", "").replace(",split", ""))
    flags = eval.parse_args(
        eval.EvalConfig, "eval.py", ["--model", "resnet18", "--pretrained", "--data", data]
    )
    values = TrainConfig(
        model="resnet18", pretrained=True, data=eval.absolute_data(data), cache_dir="cache"
    )
    spec = InputSpec(224, 224, 3, [0.5] * 3, [0.5] * 3)
    names = partial(names_of_outputs, 1000, True)
    weights = eval.Inference(Path("resnet18"), values, spec, names, dict, {})
    weights, own_data = eval.apply_flags(weights, flags)
    found, _ = load_split(weights.config, None, weights.class_names, own_data)
    assert len(found) == 20 and (np.bincount(found.labels) > 0).sum() == 2


def test_several_splits_without_a_usual_name_are_refused_with_the_flag_of_eval():
    rows = [(0, "cat"), (1, "dog")] * 3
    data = write_set("saved", {"one": rows, "two": rows}, random.Random(0))
    with pytest.raises(ValueError, match="--split train: no such split; use one of one, two"):
        load_split(config(data), None, ["cat", "dog"], own_data=False)


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize("seed", range(4))
def test_columns_in_any_order_share_a_cache_and_each_gives_its_own_pixels(form, seed):
    draw, count = random.Random(seed), 24
    columns = {
        name: [picture_of((row + shift) % 12) for row in range(count)]
        for name, shift in (("a", 0), ("b", 5))
    }
    texts = [f"no-{row}.png" for row in range(count)]
    kinds = {
        "a": ImageFeature(),
        "b": ImageFeature(),
        "note": Value("string"),
        "label": ClassLabel(names=["x", "y"]),
    }
    values = {**columns, "note": texts, "label": [row % 2 for row in range(count)]}
    splits = {"train": Dataset.from_dict(values, features=Features(kinds))}
    if form == "saved":
        DatasetDict(splits).save_to_disk("set")
    else:
        Path("set").mkdir()
        splits["train"].to_parquet("set/train.parquet")
    for name in [*draw.choices(["a", "b", "note"], k=6), "note", "a", "b"]:
        if name == "note":
            with pytest.raises(ValueError, match="images of split 'train' cannot be read"):
                load_data(config("set", image_column=name))
            continue
        train = load_data(config("set", image_column=name)).train
        pixels = decode_all(train, 8, 8, 3, "cache", iter)
        assert (pixels == np.stack(columns[name])[train.image_index]).all()


def test_a_listed_file_is_found_in_another_unicode_form_and_the_line_says_so():
    Path(unicodedata.normalize("NFD", "set/Übungen")).mkdir(parents=True)
    for number in range(20):
        name = unicodedata.normalize("NFD" if number % 2 else "NFC", f"set/Übungen/é{number}.png")
        if number % 2 == 0:
            name = (
                unicodedata.normalize("NFD", "set/Übungen")
                + "/"
                + unicodedata.normalize("NFC", f"é{number}.png")
            )
        Path(name).write_bytes(encoded(picture_of(number % 2), "PNG"))
    rows = [f"Übungen/é{number}.png,{'ab'[number % 2]}" for number in range(20)]
    Path("set/list.csv").write_text(unicodedata.normalize("NFC", "\n".join(["path,label", *rows])))
    found = load_data(config("set/list.csv"))
    for split in (found.train, found.evaluation):
        assert split.labels.tolist() == shown(split)
    assert "files found under another Unicode form of the name: " in found.train.notes[0]
    Path("set/list.csv").write_text(
        Path("set/list.csv").read_text() + unicodedata.normalize("NFD", "\nÜbungen/é1.png,a")
    )
    with pytest.raises(ValueError, match=r"row 22: .* is also in row 3"):
        load_data(config("set/list.csv"))
