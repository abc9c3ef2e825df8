"""Small data sets decoded to the cache, against the pixels that were encoded."""

import os
import resource
import shutil
import signal
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from make_data import encoded, image_folder, pictures, table
from PIL import Image
from ranks import returned, start_ranks

from utils.data import cache
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


@pytest.fixture
def workers(monkeypatch):
    """Three processes that decode, and chunks of ten images, so that even small sets keep all of them busy."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(cache, "_LEAST", 10)
    monkeypatch.setattr(cache, "_CHUNK", 10)


def test_several_processes_decode_the_same_pixels_and_draw_nothing_at_random(workers):
    (split, expected), state = folder_split("photos", 95), torch.get_rng_state()
    assert (decode_all(split, 8, 8, 3, "cache", iter) == expected).all()
    assert (torch.get_rng_state() == state).all()


def test_of_several_bad_images_in_several_processes_the_first_is_named(workers):
    split, _ = folder_split("photos", 95)
    for number in (41, 52, 63):
        Path(split.images.paths[number]).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^photos/a/041\.png: not a readable image"):
        decode_all(split, 8, 8, 3, "cache", iter)
    assert cached_files() == []


def decode_on_a_disk_of(size):
    split, _ = folder_split("photos", 95)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(OSError, match=r"cache/decoded/v\d+-\w+-8x8x3\.npy"):
        decode_all(split, 8, 8, 3, "cache", iter)
    return cached_files()


def test_a_disk_that_is_full_half_way_is_an_error_that_names_the_file(workers):
    assert returned(1, decode_on_a_disk_of, 10_000) == [[]]


def decode_and_signal_itself(split, number):
    def half_way(chunks):
        for count, pixels in enumerate(chunks):
            yield pixels
            if count == 8:
                os.kill(os.getpid(), number)

    return decode_all(split, 8, 8, 3, "cache", half_way).sum(dtype=int)


def test_what_a_killed_process_was_writing_goes_at_the_next_decoding_and_what_a_live_one_writes_stays(monkeypatch):
    monkeypatch.setattr(cache, "_CHUNK", 10)
    split, expected = folder_split("photos", 95)
    start_ranks(1, decode_and_signal_itself, split, signal.SIGKILL).finish()
    (left,) = cached_files()
    stopped = start_ranks(1, decode_and_signal_itself, split, signal.SIGSTOP)
    os.waitpid(stopped.pids[0], os.WUNTRACED)
    (writing,) = cached_files()
    assert left != writing and left.endswith(".partial") and writing.endswith(".partial")
    decode_all(split, 8, 8, 1, "cache", iter)
    assert len(cached_files()) == 2 and writing in cached_files()
    stopped.kill(signal.SIGCONT)
    assert stopped.finish()[0].value == expected.sum(dtype=int)
    assert all(name.endswith(".npy") for name in cached_files())


def decode_and_tell_of_the_decoders(split):
    def half_way(chunks):
        for count, pixels in enumerate(chunks):
            yield pixels
            if count == 1:
                children = [child.pid for child in psutil.Process().children()]
                Path("decoders").write_text(" ".join(map(str, children)))
                os.kill(os.getpid(), signal.SIGKILL)

    decode_all(split, 8, 8, 3, "cache", half_way)


def test_the_decoders_of_a_killed_process_end(workers):
    split, _ = folder_split("photos", 95)
    start_ranks(1, decode_and_tell_of_the_decoders, split).finish()
    decoders = [int(pid) for pid in Path("decoders").read_text().split()]
    assert len(decoders) == 3
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in decoders) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in decoders)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_damaged_file_of_the_cache_is_named_with_the_mend():
    split, _ = folder_split("photos")
    decode_all(split, 8, 8, 3, "cache", iter)
    path = Path("cache/decoded", cached_files()[0])
    for content in (b"", b"nothing", path.read_bytes()[:1000]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"8x8x3\.npy.*delete it"):
            decode_all(split, 8, 8, 3, "cache", iter)
