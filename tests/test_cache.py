"""Small data sets decoded to the cache, against the pixels that were encoded."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from make_data import encoded, image_folder, pictures, table
from PIL import Image

from utils.data.cache import Shared, decode_all
from utils.data.splits import Files, hold_out, whole_split


def split_of(images, fingerprint="made"):
    return whole_split("train", images, np.zeros(len(images)), fingerprint)


class Counting:
    """In the place of a progress bar; counts how often something is decoded."""

    calls = 0

    def __call__(self, items):
        self.calls += 1
        return items


def folder_split(folder, count=10, seed=0):
    paths = image_folder(folder, {"a": count}, seed=seed)
    return split_of(Files([str(path) for path in paths])), pictures(count, seed=seed)


def cached_files():
    folder = Path("cache/decoded")
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_decoded_data_are_the_images_and_a_second_opening_decodes_nothing():
    (split, expected), counting = folder_split("photos", 300), Counting()
    for _ in range(2):
        assert (np.asarray(decode_all(split, 8, 8, 3, "cache", counting)) == expected).all()
    assert counting.calls == 1
    assert len(cached_files()) == 1


def test_other_shapes_are_decoded_besides():
    split, expected = folder_split("photos")
    assert decode_all(split, 8, 8, 3, "cache", iter).shape == (10, 8, 8, 3)
    grey = decode_all(split, 8, 8, 1, "cache", iter)
    assert np.abs(grey[..., 0] - expected @ [0.299, 0.587, 0.114]).max() <= 1
    assert decode_all(split, 16, 12, 3, "cache", iter).shape == (10, 16, 12, 3)
    assert len(cached_files()) == 3


def test_an_error_half_way_leaves_no_file():
    split, _ = folder_split("photos", 300)
    Path(split.images.paths[290]).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"290\.png: not a readable image"):
        decode_all(split, 8, 8, 3, "cache", iter)
    assert cached_files() == []


def test_the_file_appears_only_when_it_is_whole():
    split, _ = folder_split("photos", 300)

    def watching(items):
        for item in items:
            assert not [name for name in cached_files() if name.endswith(".npy")]
            yield item

    decode_all(split, 8, 8, 3, "cache", watching)
    assert len(cached_files()) == 1 and cached_files()[0].endswith(".npy")


def test_a_changed_file_is_decoded_anew():
    split, expected = folder_split("photos")
    decode_all(split, 8, 8, 3, "cache", iter)
    Image.fromarray(255 - expected[3]).save(split.images.paths[3])
    again = decode_all(split, 8, 8, 3, "cache", iter)
    assert (again[3] == 255 - expected[3]).all() and (again[4] == expected[4]).all()


def test_a_changed_table_is_decoded_anew():
    from datasets import Value

    from utils.config import TrainConfig
    from utils.data.sources import load_data

    for seed in (1, 2):
        shutil.rmtree("tables", ignore_errors=True)
        table([0] * 9 + [1] * 9, Value("int64"), list(pictures(18, seed=seed))).save_to_disk("tables")
        split = load_data(TrainConfig(data="tables")).train
        assert (decode_all(split, 8, 8, 3, "cache", iter) == pictures(18, seed=seed)[split.rows]).all()


def test_a_subset_and_both_parts_of_a_hold_out_get_their_own_rows():
    split, expected = folder_split("photos", 50)
    rest, held = hold_out(split, 0.2, 7)
    for part in (rest, held, split.select(np.array([30, 2, 44]))):
        assert (decode_all(part, 8, 8, 3, "cache", iter) == expected[part.rows]).all()
    encodings = split_of([encoded(image, "PNG") for image in expected])
    for part in (encodings, encodings.select(np.array([30, 2, 44])), encodings.select(np.array([2, 30, 44]))):
        assert (decode_all(part, 8, 8, 3, "cache", iter) == expected[part.rows]).all()
    arrays = split_of(expected.transpose(0, 3, 1, 2))
    for part in (arrays, arrays.select(np.array([30, 2, 44])), arrays.select(np.arange(50)[::-1])):
        assert (decode_all(part, 8, 8, 3, "cache", None) == expected[part.rows]).all()
    assert (decode_all(split_of(expected[..., 0]), 8, 8, 1, "cache", None)[..., 0] == expected[..., 0]).all()


def test_samples_that_share_images_are_decoded_once():
    expected, counting = pictures(5), Counting()
    rows = np.random.default_rng(0).integers(0, 5, 10**6)
    split = split_of([encoded(image, "PNG") for image in expected]).select(rows)
    pixels = decode_all(split, 8, 8, 3, "cache", counting)
    assert isinstance(pixels, Shared) and counting.calls == 1
    positions = np.array([999_998, 1, 0, 1234])
    assert (pixels[positions] == expected[rows[positions]]).all()
    assert pixels[np.array([], np.int64)].shape == (0, 8, 8, 3)


def test_a_cache_without_room_is_an_error_before_anything_is_written(monkeypatch):
    split, _ = folder_split("photos")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 100))
    with pytest.raises(OSError, match=r"--cache_dir"):
        decode_all(split, 8, 8, 3, "cache", iter)
    assert cached_files() == []
