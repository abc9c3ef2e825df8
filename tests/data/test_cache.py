"""utils/data/cache.py: small images decoded once, against the pixels that were encoded."""

import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, Value
from helpers.make_data import image_folder, pictures, table
from helpers.ranks import run_ranks, start_ranks
from helpers.waiting import lives, until
from PIL import Image

from utils.data import cache
from utils.data import decoded as decoding
from utils.data.decoded import decode_all
from utils.data.hold_out import hold_out
from utils.data.selection import load_data
from utils.data.shrunk import ShrunkImages
from utils.data.splits import Files, whole_split
from utils.ranks.session import distributed_session
from utils.settings.train import TrainConfig


def split_of(images, fingerprint="made"):
    return whole_split("train", images, np.zeros(len(images)), fingerprint)


def decoded(split, bar=iter):
    return decode_all(split, 8, 8, 3, "cache", bar)


class Counting:
    """In the place of a progress bar; counts how often something is decoded."""

    calls = 0

    def __call__(self, items):
        self.calls += 1
        return items


def folder_split(count=10):
    paths = image_folder("photos", {"a": count})
    return split_of(Files([str(path) for path in paths])), pictures(count)


def cached_files():
    folder = Path("cache/decoded")
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_decoded_data_are_the_images_and_a_second_opening_decodes_nothing():
    (split, expected), counting = folder_split(300), Counting()
    for _ in range(2):
        assert (decoded(split, counting) == expected).all()
    assert counting.calls == 1
    assert len(cached_files()) == 1


def test_a_changed_file_is_decoded_anew():
    split, expected = folder_split()
    decoded(split)
    Image.fromarray(255 - expected[3]).save(split.images.paths[3])
    again = decoded(split)
    assert (again[3] == 255 - expected[3]).all() and (again[4] == expected[4]).all()


@pytest.mark.parametrize("saved", [False, True])
def test_a_table_in_the_place_of_another_of_the_same_size_and_time_is_decoded_anew(saved):
    pixels, labels = pictures(40), np.arange(40) // 20
    for folder, start in (("tables", 0), ("others", 20)):  # the same rows, the other half first
        data = table(labels.tolist(), Value("int64"), list(np.roll(pixels, start, 0)))
        data.save_to_disk(folder)
        if not saved:
            shutil.rmtree(folder)
            Path(folder).mkdir()
            rows = data.data.table.cast(data.features.arrow_schema)
            # Not compressed, because compressed files of equally many rows can differ in size.
            options = {"compression": "none", "write_statistics": False}
            pq.write_table(rows, f"{folder}/train.parquet", **options)
    file, other = (next(Path(folder).glob("*.[pa]*r*")) for folder in ("tables", "others"))
    other.write_bytes(other.read_bytes().ljust(file.stat().st_size, b"\0"))
    config = TrainConfig(data="tables" if saved else str(file), cache_dir="cache")
    for expected in (pixels, np.roll(pixels, 20, 0)):
        split, status = load_data(config).train, file.stat()
        found = decoded(split)
        assert (found == expected[split.image_index]).all()
        shutil.copy(other, file)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size


def test_a_changed_image_to_which_a_table_refers_is_decoded_anew():
    for seed in (1, 2):
        paths = image_folder("photos", {"a": 15, "b": 15}, seed=seed)
        data = {"image": [str(path.resolve()) for path in paths], "label": [0] * 15 + [1] * 15}
        if seed == 1:
            Dataset.from_dict(data).to_parquet("table.parquet")
        config = TrainConfig(data="table.parquet", image_column="image", cache_dir="cache")
        split = load_data(config).train
        expected = pictures(30, seed=seed)[split.image_index]
        assert (decoded(split) == expected).all()


def test_a_subset_and_both_parts_of_a_hold_out_get_their_own_rows():
    split, expected = folder_split(50)
    parts = [*hold_out(split, 0.2, 7)]
    for images in (split.images, expected.transpose(0, 3, 1, 2)):
        whole = split_of(images)
        parts += [whole, *(whole.select(np.array(rows)) for rows in ([30, 2, 44], [2, 30, 44]))]
    for part in parts:
        assert (decoded(part) == expected[part.image_index]).all()
    grey = split_of(expected[..., 0])
    assert (decode_all(grey, 8, 8, 1, "cache", None)[..., 0] == grey.images).all()


def decode_with_little_space(split):
    """The disk gets full half-way."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    decoded(split)


def decode_on_each_rank(split, expected):
    """Both ranks of a launch, one after the other, as train.py lets them."""
    with distributed_session("train.py", TrainConfig(cpu=True)) as ranks:
        ranks.join()
        with ranks.local_main_first():
            pixels = decoded(split)
    return bool((pixels == expected).all())


def test_a_cache_that_cannot_be_written_is_named_with_the_reason_and_the_fix():
    line = r"cache/decoded: cannot be used as a cache \({}\); .*--cache_dir DIR"
    split, expected = folder_split(300)
    (outcome,) = run_ranks(1, decode_with_little_space, split)
    assert re.search(line.format("File too large"), outcome.err), outcome.err
    assert cached_files() == []
    shutil.rmtree("cache")
    Path("cache").write_text("a file")
    outcomes = run_ranks(2, decode_on_each_rank, split, expected)
    assert all(outcome.code for outcome in outcomes)
    errors = "".join(outcome.err for outcome in outcomes)
    assert len(re.findall(line.format("Not a directory"), errors)) == 1, errors


@pytest.fixture
def workers(monkeypatch):
    """Three processes that decode, and chunks of ten images, so that even small sets keep all of
    them busy.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr("utils.memory.CONTAINER", Path("none"))
    monkeypatch.setattr(decoding, "_LEAST", 10)
    monkeypatch.setattr(decoding, "_CHUNK", 10)


def test_several_processes_decode_the_same_pixels_and_draw_nothing_at_random(workers):
    (split, expected), state = folder_split(95), torch.get_rng_state()
    assert (decoded(split) == expected).all()
    assert (torch.get_rng_state() == state).all()


def test_a_bad_image_is_named_whichever_process_finds_it(workers):
    split, _ = folder_split(95)
    Path(split.images.paths[64]).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"photos/a/064\.png: not a readable image \("):
        decoded(split.select(np.arange(95)[::-1]))
    assert cached_files() == []


def decode_and_signal_itself(split, number):
    def half_way(chunks):
        for count, pixels in enumerate(chunks):
            yield pixels
            if count == 8:
                os.kill(os.getpid(), number)

    return decoded(split, half_way).sum(dtype=int)


def test_a_cache_is_right_after_a_kill_and_with_two_writers_at_once(monkeypatch):
    monkeypatch.setattr(decoding, "_CHUNK", 10)
    split, expected = folder_split(95)
    start_ranks(1, decode_and_signal_itself, split, signal.SIGKILL).finish()
    (left,) = cached_files()
    stopped = start_ranks(1, decode_and_signal_itself, split, signal.SIGSTOP)
    os.waitpid(stopped.pids[0], os.WUNTRACED)
    (writing,) = {*cached_files()} - {left}
    assert left.endswith(".partial") and writing.endswith(".partial")
    # the file that the stopped one is writing
    assert (decoded(split) == expected).all()
    assert len(cached_files()) == 3 and {writing, left} < set(cached_files())
    stopped.kill(signal.SIGCONT)
    assert stopped.finish()[0].value == expected.sum(dtype=int)
    assert sorted(Path(name).suffix for name in cached_files()) == [".npy", ".partial"]
    assert (decoded(split, None) == expected).all()


def decode_and_name_the_decoders(split):
    def half_way(chunks):
        next(chunks)
        children = psutil.Process().children()
        Path("decoders").write_text(" ".join(str(child.pid) for child in children))
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    decoded(split, lambda chunks: half_way(iter(chunks)))


@pytest.mark.full
def test_the_decoders_of_a_killed_process_end(workers):
    split, _ = folder_split(95)
    start_ranks(1, decode_and_name_the_decoders, split).finish()
    decoders = [int(pid) for pid in Path("decoders").read_text().split()]
    assert len(decoders) == 3
    until(lambda: not any(lives(pid) for pid in decoders))


DAMAGED = {
    "empty": lambda raw: b"",
    "header": lambda raw: raw[:6] + b"\xff" * 60 + raw[66:],
    "shape": lambda raw: raw.replace(b"(10,", b"(20,"),
    "short": lambda raw: raw[:-1],
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_of_the_cache_is_rebuilt(kind):
    (split, expected), counting = folder_split(), Counting()
    decoded(split, counting)
    path = Path("cache/decoded", cached_files()[0])
    good = path.read_bytes()
    path.write_bytes(DAMAGED[kind](good))
    if kind == "short":
        outcomes = run_ranks(2, decode_on_each_rank, split, expected)
        assert [outcome.value for outcome in outcomes] == [True, True], outcomes
        assert sum(outcome.out.count("is not usable") for outcome in outcomes) == 1
    for _ in range(2):
        assert (decoded(split, counting) == expected).all()
    assert counting.calls == 2 - (kind == "short") and path.read_bytes() == good


def flips(good: bytes, chance: random.Random) -> Iterator[bytes]:
    """A file with one bit changed, in each byte of the header, the last ones and others, or with
    several bytes changed.
    """
    places = [*range(128), *range(len(good) - 8, len(good)), *chance.sample(range(len(good)), 60)]
    for place in places:
        changed = bytearray(good)
        changed[place] ^= 1 << chance.randrange(8)
        yield bytes(changed)
    for _ in range(40):
        changed = bytearray(good)
        for place in chance.sample(range(len(good)), chance.randint(2, 20)):
            changed[place] = (changed[place] + chance.randrange(1, 256)) % 256
        yield bytes(changed)


@pytest.mark.parametrize("kind", ["decoded", "shrunk", "features"])
def test_no_flipped_byte_of_a_cache_is_used(kind, capsys):
    split, _ = folder_split(6)
    expect: tuple = (), "|u1"  # a shrunk image may have any size
    if kind == "decoded":
        expect = (6, 8, 8, 3), "|u1"
        read = partial(decoded, split)
    elif kind == "shrunk":
        image_folder("photos", {"a": 1}, (30, 40))
        split = split_of(Files(["photos/a/000.png"]))
        read = partial(ShrunkImages(split, 3, 20, "cache/shrunk").many, [0])
    else:
        views = pictures(3).astype(np.float32)
        expect = views.shape, "<f4"
        read = partial(cache.cached, Path("cache/features/f.npy"), *expect, [views])
    first = np.asarray(read()[0]).tobytes()
    (path,) = Path("cache").rglob("*.npy")
    good = path.read_bytes()
    assert np.asarray(read()[0]).tobytes() == first and not capsys.readouterr().out
    for changed in flips(good, random.Random(kind)):
        path.write_bytes(changed)
        assert cache.open_cached(path, *expect) is None
        assert capsys.readouterr().out == f"{path}: is not usable, and is computed again\n"
    for place in (3, 90, 128, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        assert np.asarray(read()[0]).tobytes() == first and path.read_bytes() == good
        assert capsys.readouterr().out.count("is not usable") == 1
