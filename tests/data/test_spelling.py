"""utils/data/spelling.py: classes and groups in several spellings, several labels in a cell."""

import random
import unicodedata

import numpy as np
import pytest
from datasets import Value
from helpers.loading import error_of, load
from helpers.make_data import image_folder, table
from torchvision.models import get_model_weights

from utils.data.hold_out import hold_out
from utils.data.spelling import alike, doubts
from utils.data.splits import whole_split

WORDS = ["ant", "bee", "Café", "Übung", "emu", "ice_cream", "ñandú", "straße"]
SAME, LISTS = "classes that may be the same", "classes that look like several labels"


def spellings(word: str, draw: random.Random) -> set[str]:
    """The word in up to three spellings that a person reads alike."""
    if word.isdecimal():
        forms = [word, f"0{word}", f"00{word}", f"{word}.0", f"{word}.", chr(0xFF10 + int(word[0]))]
        forms[5] += word[1:]
    else:
        text = word.replace("_", " ")
        forms = [text, text.upper(), text.title(), text.replace(" ", "  "), f"{text} "]
        forms += [unicodedata.normalize("NFD", text), text.replace(" ", "\u00a0")]
    return {*draw.sample(forms, draw.randint(1, 3))}


def said(notes, line: str) -> str:
    """What a line of the notes names; empty if there is none."""
    return next((note.rpartition(": ")[2] for note in notes if line in note), "")


@pytest.mark.parametrize("seed", range(200))
def test_names_are_alike_if_they_are_spellings_of_one_word(seed):
    draw = random.Random(seed)
    words = draw.sample([*WORDS, *map(str, range(1, 60))], 12)
    written = {word: spellings(word, draw) for word in words}
    names = [name for own in written.values() for name in own]
    draw.shuffle(names)
    first = {word: next(name for name in names if name in own) for word, own in written.items()}
    expected = {
        name: first[word] for word, own in written.items() for name in own if name != first[word]
    }
    assert alike(names) == expected


@pytest.mark.parametrize("seed", range(300))
def test_lists_of_labels_are_named_whatever_separates_them(seed):
    draw = random.Random(seed)
    join = draw.choice([", ".join, ",".join, ";".join, "; ".join, str, " ".join])
    words = ["ant", "bee", "cow", "dog", "emu", "fox"] if join == " ".join else WORDS
    labels = [word.replace("_", " ") for word in draw.sample(words, draw.randint(3, 6))]
    alone = draw.sample(labels, draw.randint(0, len(labels)))
    lists = [draw.sample(labels, draw.randint(2, 3)) for _ in range(draw.randint(0, 9))]
    lists = [*{tuple(sorted(own)): own for own in lists}.values()]
    names = [join([label]) if join is str else label for label in alone] + [*map(join, lists)]
    parts = {label for own in lists for label in own}
    # labels recur, so there are more classes than labels
    recur = join != " ".join and len(parts | {*alone}) < len(names)
    expected = [join(own) for own in lists if recur or {*own} <= {*alone}]
    if 2 * len(expected) <= len(lists):  # then most names with several parts are not lists
        expected = []
    found = str(next(text for line, text in doubts(names).items() if LISTS in line))
    assert bool(found) == bool(expected)
    assert all(name in found or len(expected) > 12 for name in expected)
    assert sum(name in found.replace("\\", "") for name in names if name not in alone) >= min(
        len(expected), 12
    )


PLACES = ["New York, NY", "Boston, MA", "Portland, ME", "Portland, OR", "Paris, Texas", "Austin"]
SOUND = {
    "numbers": [str(n) for n in range(1, 101)],
    "letters": [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"],
    "two": ["a", "b"],
    "words": ["ice cream", "hot dog", "dog", "cream cake", "cat"],
    "places": PLACES,
    "signs": ["A+", "A", "B+", "B", "AB+", "AB", "0-", "0", "-1", "1", "1.5", "15", "1.05"],
    "parts": ["good bolt", "bad bolt", "good nut", "bad nut", "good screw", "bad screw"],
    "folders": ["n01440764", "n01443537", "class_1", "class_10", "class 2"],
    "pictures of two": ["ski mask", "ski", "mask", "oil lamp", "fish tank"],
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_names_raise_no_doubt(kind):
    assert not any(doubts(SOUND[kind]).values())


def test_the_words_of_imagenet_are_no_lists_and_two_of_them_differ_in_case():
    """In torchvision's short form; a line is said, because case alone cannot tell."""
    same, lists = doubts(get_model_weights("resnet18")["DEFAULT"].meta["categories"]).values()
    assert (same, lists) == ("cardigan and Cardigan", "")
    timm_data = pytest.importorskip("timm.data")
    info = timm_data.ImageNetInfo()
    words = [info.index_to_description(number, detailed=False) for number in range(1000)]
    assert words[0] == "tench, Tinca tinca" and not any(doubts(words).values())


def write(rows, head="path,label,split"):
    with open("labels.csv", "w", encoding="utf-8") as file:
        file.write("\n".join([head, *rows]) + "\n")
    return "labels.csv"


@pytest.mark.parametrize("source", ["folder", "labels.csv", "table"])
def test_every_source_names_classes_that_differ_only_in_case(source):
    names = ["cat", "Cat", "owl"]
    image_folder("folder", dict.fromkeys(names, 4))
    write([f"folder/{name}/00{n}.png,{name},train" for name in names for n in range(4)])
    table(names * 4, Value("string")).save_to_disk("table")
    data = load(source, eval_fraction=0.3)
    assert data.class_names == ["Cat", "cat", "owl"]
    for split in (data.train, data.evaluation):
        assert said(split.notes, SAME) == "cat and Cat"


def test_a_cell_with_several_labels_is_said_to_be_one_class_and_a_bar_is_the_form():
    image_folder("x", {"i": 8})
    cells = ["a", "b", "a, b", "a", "b", "a, b", "a", "b"]
    rows = [f'x/i/00{n}.png,"{cell}",train' for n, cell in enumerate(cells)]
    assert said(load(write(rows), eval_fraction=0.3).train.notes, LISTS) == "'a, b'"
    rows = [row.replace(", ", "|") for row in rows]
    data = load(write(rows), eval_fraction=0.3)
    assert data.class_names == ["a", "b"] and not data.train.notes


@pytest.mark.parametrize(
    "cell", ["#N/A", "#REF!", "#DIV/0!", "#NAME?", "#NV", "nan", "NaN", "NULL"]
)
def test_the_error_or_gap_of_a_spreadsheet_is_no_class(cell):
    for label in ("b", "b|c"):
        rows = ["1.png,a,train", f"2.png,{label},train", f"3.png,{cell},train"]
        line = f"row 4: the label is '{cell}'; fill it in, or remove the row"
        assert error_of(write(rows)).endswith(line)


@pytest.mark.parametrize("seed", range(8))
def test_a_patient_in_several_spellings_is_on_one_side_of_a_split(seed, capsys):
    draw = random.Random(seed)
    patients = draw.sample([*WORDS, *map(str, range(10, 90))], 10)
    image_folder("x", {"i": 60}, seed=seed)
    whose = [patients[n % 10] for n in range(60)]
    written = {patient: sorted(spellings(patient, draw)) for patient in patients}
    cells = [draw.choice(written[patient]) for patient in whose]
    rows = [f'x/i/{n:03}.png,{"ab"[n // 30]},train,"{cell}"' for n, cell in enumerate(cells)]
    write(rows, "path,label,split,patient")
    data = load("labels.csv", group_by="patient", fold="1/3")
    train, held = ({whose[row] for row in s.image_index} for s in (data.train, data.evaluation))
    assert not train & held and len(train | held) == 10
    assert "10 groups of up to 6" in data.evaluation.name
    several = {
        p
        for p in patients
        if len({c.strip() for c, w in zip(cells, whose, strict=True) if w == p}) > 1
    }
    assert ("groups that may be the same are joined: " in capsys.readouterr().out) == bool(several)


def test_groups_without_other_spellings_are_divided_as_before():
    """The names of groups are kept, because folds depend on their order."""
    image_folder("x", {"i": 24, "j": 24})
    cells = ["Zoe", "adam", "É", "b 1", "10", "9"]
    paths = [f"x/{'ij'[n // 24]}/{n % 24:03}.png,{'ij'[n // 24]},train" for n in range(48)]
    rows = [f"{path},{cells[n % 6]}" for n, path in enumerate(paths)]
    write(rows, "path,label,split,who")
    held = load("labels.csv", group_by="who", fold="1/3").evaluation.image_index
    whole = whole_split("train", np.zeros((48, 1, 1)), np.arange(48) // 24, "made")
    expected = hold_out(whole, 0.1, 0, "1/3", [cells[n % 6] for n in range(48)])[1]
    assert held.tolist() == expected.image_index.tolist()
