"""eval.py --model NAME --pretrained: published weights on data with classes of ImageNet."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from helpers.make_data import image_folder
from helpers.published import publish, use_own_caches
from helpers.ranks import returned
from helpers.training_runs import refused, words
from PIL import Image
from timm.data import ImageNetInfo
from torch.nn import functional as F

import eval
from utils.errors import UserError
from utils.models.published import CLASSES, names_as_in

SYNSETS = {"n01440764": "tench", "n02123045": "tabby", "n15075141": "toilet tissue"}
PLACES = [0, 281, 999]  # of these classes among the outputs


@pytest.fixture(autouse=True)
def caches(monkeypatch):
    use_own_caches(monkeypatch)


def pictures_of(classes, size) -> tuple[list[Path], torch.Tensor]:
    """Write a folder `val` of 4, 5 and 3 images; returns their paths and their places among
    ImageNet's classes.
    """
    counts = dict(zip(classes, (4, 5, 3), strict=True))
    places = dict(zip(classes, PLACES, strict=True))
    labels = [places[name] for name in sorted(classes) for _ in range(counts[name])]
    return image_folder("data/val", counts, size=size), torch.tensor(labels)


def evaluations(*flags: str, processes=(1, 2)) -> list[dict]:
    flags = (*words("--pretrained --data data --num_workers 0"), *flags)
    return [returned(number, eval.main, [*flags])[0] for number in processes]


def normalised(paths: list[Path]) -> torch.Tensor:
    """Images as the weights take them, float32 [n, 3, H, W]."""
    mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths]).astype(np.float32) / 255
    return torch.from_numpy(((pixels - mean) / std).transpose(0, 3, 1, 2))


def check(found: list[dict], logits: torch.Tensor, labels: torch.Tensor) -> None:
    right = logits.argsort(dim=1, descending=True) == labels[:, None]
    for record in found:
        assert (record["count"], record["classes"]) == (12, 1000) and "checkpoint" not in record
        assert record["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
        assert record["accuracy"] == right[:, 0].sum().item() / 12
        assert record["top5"] == right[:, :5].sum().item() / 12


@pytest.mark.full
def test_weights_of_torchvision_have_its_results_on_folders_named_by_synset():
    published = publish("resnet18")
    # the size that the weights' own transform resizes to
    paths, labels = pictures_of(SYNSETS, size=(256, 256))
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    with torch.no_grad():
        logits = published(torch.stack([transform(Image.open(path)) for path in paths]))
    found = evaluations("--model", "resnet18")
    check(found, logits, labels)
    assert (found[0]["model"], found[0]["pretrained"]) == ("resnet18", "IMAGENET1K_V1")
    accuracies = found[0]["per_class_accuracy"]
    assert [place for place, value in enumerate(accuracies) if value is not None] == PLACES


@pytest.mark.full
def test_weights_of_timm_are_evaluated_on_folders_with_torchvisions_names():
    published = publish("timm/resnet10t")
    paths, labels = pictures_of(SYNSETS.values(), size=(201, 201))  # 176 / 0.875
    images = normalised(paths)[..., 12:188, 12:188]
    with torch.no_grad():
        logits = (published(images) + published(images.flip(-1))) / 2
    found = evaluations("--model", "timm/resnet10t", "--tta", "flip")
    check(found, logits, labels)
    assert (found[0]["model"], found[0]["pretrained"]) == ("timm/resnet10t", "c3_in1k")


@pytest.mark.full
def test_size_and_crop_of_the_evaluation_can_be_changed():
    published = publish("resnet18")
    paths, labels = pictures_of(SYNSETS, size=(96, 128))
    with torch.no_grad():
        logits = published(normalised(paths))
    flags = ("--model", "resnet18", "--eval_size", "[96, 128]", "--eval_crop", "1")
    check(evaluations(*flags, processes=[1]), logits, labels)


def test_classes_are_found_by_their_names_by_their_synsets_or_by_the_order_of_all():
    info = ImageNetInfo("imagenet-1k")
    synsets, lists = info.label_names(), info.label_descriptions()
    assert [CLASSES[place] for place in PLACES] == list(SYNSETS.values())
    for names in (["tench", "tabby"], ["n01440764", "n02123045"], [lists[0], lists[281]]):
        found = names_as_in(names)
        assert [found.index(name) for name in names] == [0, 281]
    assert names_as_in(synsets[::-1]) == synsets
    assert names_as_in(lists) == lists and lists[0] == "tench, Tinca tinca"  # as on the Hub


def test_synsets_are_known_without_timm_if_all_are_there(monkeypatch):
    synsets = ImageNetInfo("imagenet-1k").label_names()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert names_as_in(synsets[::-1]) == synsets
    with pytest.raises(UserError, match="is not a class of ImageNet"):
        names_as_in(["n01440764", "n02123045"])
    # their order cannot be checked without timm
    lists = [f"{name}, with more words" for name in CLASSES]
    assert names_as_in(lists) == lists
    with pytest.raises(UserError, match="is not a class of ImageNet"):
        names_as_in(lists[::-1])


def test_other_classes_are_refused():
    synsets = ImageNetInfo("imagenet-1k").label_names()
    for names in (
        ["cat", "tench"],
        ["n00000001", "n01440764"],
        ["n01440765", *synsets[1:-1], "n15075142"],  # 1,000, but others
        ["crane", "tench, Tinca tinca"],  # two classes have these words
    ):
        with pytest.raises(UserError, match="is not a class of ImageNet"):
            names_as_in(names)


def test_published_weights_with_other_classes_are_refused_even_if_the_data_has_as_many():
    image_folder("data/val", {f"class {number}": 1 for number in range(384)}, size=(8, 8))
    flags = "--model timm/vitamin_small_224.datacomp1b_clip --pretrained --data data"
    line = refused(eval.main, *words(flags))
    assert line.startswith("eval.py: error: the weights have 384 classes, not the 1,000 of")


def test_what_cannot_be_evaluated_is_refused_in_one_line():
    pictures_of(["cat", "dog", "emu"], size=(120, 120))
    for flags, text in (
        ("", "--ckpt is missing"),
        ("--ckpt runs/a --model resnet18", "--model and --ckpt cannot be used together"),
        ("--model resnet18 --data data", "--model needs weights"),
        ("--model resnet18 --pretrained", "--model needs --data"),
        (
            "--model resnet18 --pretrained --data data",
            "the class 'cat' of --data is not a class of",
        ),
        (
            "--model timm/vit_base_patch16_224.augreg_in21k --pretrained --data data",
            "the weights have 21,843 classes, not the 1,000 of ImageNet",
        ),
    ):
        assert refused(eval.main, *words(flags)).startswith(f"eval.py: error: {text}")
