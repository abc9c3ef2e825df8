"""utils/data/archives.py: images that are read in place from tar and zip archives."""

import gzip
import io
import os
import re
import resource
import shutil
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.loading import error_of, load, sizes
from helpers.make_data import encoded, image_folder, pictures
from helpers.pack import by_first, contents, pack_all, tar, zipped
from helpers.ranks import returned

from extras.images import find_images
from utils.config import parse_args
from utils.data.archive_index import read_index
from utils.data.archives import open_archives
from utils.data.check import check_images
from utils.data.members import Members, _opened
from utils.data.sources import SOURCES, absolute_data, check_source, has_columns, open_source
from utils.data.splits import Split
from utils.errors import UserError
from utils.settings.train import TrainConfig

KINDS = ["tar", "zip", "stored zip", "outer folder", "splits", "classes", "WebDataset"]
PETS = {"train/cat": 12, "train/dog": 9, "val/cat": 4, "val/dog": 3}


def png(seed: int = 0) -> bytes:
    return encoded(pictures(1, seed=seed)[0], "png")


def bytes_of(split: Split) -> list[bytes]:
    return [split.images[row] for row in split.image_index.tolist()]


def names_of(split: Split) -> list[str]:
    return [split.images.names[row] for row in split.image_index.tolist()]


def opened(path, **settings):
    return open_source(TrainConfig(data=str(path), cache_dir="cache", **settings))


# -- the forms of archives
# ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_has_the_samples_of_the_folder_in_its_order(kind):
    image_folder("folder", PETS)
    path = pack_all("folder", "packed", [kind])[kind]
    expected, found = load("folder"), load(path)
    assert sizes(found) == sizes(expected)
    for one, other in ((expected.train, found.train), (expected.evaluation, found.evaluation)):
        assert isinstance(other.images, Members) and other.images.form
        assert bytes_of(other) == bytes_of(one) and (other.labels == one.labels).all()
        assert other.content == one.content and not other.errors
        if kind != "WebDataset":
            assert names_of(other) == names_of(one)
            assert other.describe(0).startswith(str(path))
    if kind != "WebDataset":
        assert found.class_names == expected.class_names
    assert expected.fingerprint == found.fingerprint


def test_an_archive_of_a_split_may_have_the_split_in_its_names():
    image_folder("folder", PETS)
    for split, own in by_first(contents("folder"), 1).items():
        tar(f"plain/{split}.tar", own)
        tar(f"named/imagenet-{split}-000.tar", {f"{split}/{name}": own[name] for name in own})
    assert names_of(load("plain").train) == names_of(load("named").train)
    assert sizes(load("named")) == (21, "val", 7)


def test_archives_of_common_tools_are_read_as_the_folder():
    image_folder("photos", PETS)
    for name in ("train/emu", "train/cat/deeper"):
        Path("photos", name).mkdir()
    expected = load("photos").train
    shutil.make_archive("inside", "tar", "photos")
    shutil.make_archive("around", "zip", ".", "photos")
    for form in ("v7", "ustar", "gnu", "posix"):
        subprocess.run(["tar", f"--format={form}", "-cf", f"{form}.tar", "-C", "photos", "."])
    for path in ("inside.tar", "around.zip", "v7.tar", "ustar.tar", "gnu.tar", "posix.tar"):
        found = load(path).train
        assert names_of(found) == names_of(expected) and bytes_of(found) == bytes_of(expected)
        (line,) = (note for note in found.notes if "without readable" in note)
        assert line.endswith("train: class folders without readable images are left out: emu")


def test_a_single_archive_of_a_split_is_its_root():
    tar("train.tar", {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(10)})
    data = load("train.tar")
    assert sizes(data) == (18, "hold-out of train", 2)
    assert names_of(data.train)[0].startswith("cat/")


def test_only_members_next_to_an_image_of_the_same_key_make_a_web_dataset():
    files = {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(10)}
    tar("a.tar", files | {"labels.json": b"{}", "cat/notes.cls": b"1"})
    split = opened("a.tar").split("train")
    assert split.images.form == "folders in an archive" and names_of(split) == [*files]
    tar("b.tar", files | {"cat/3.cls": b"1"})
    assert opened("b.tar").split("train").images.form == "WebDataset"


# -- independent listings of random sets
# ----------------------------------------------------------------------


def random_files(random: np.random.Generator) -> dict[str, bytes]:
    """Files of two splits and some classes, and others that are left out."""
    files = {}
    for split in ("train", "test"):
        for name in ("ant", "Bee", "ça va", "10"):
            for number in random.integers(0, 99, random.integers(2, 6)).tolist():
                ending = ("png", "PNG", "jpeg")[number % 3]
                deeper = ("", "", "deep/er/")[number // 3 % 3]
                files[f"{split}/{name}/{deeper}{number}.{ending}"] = png(number)
    extra = ["train/ant/.h.png", "__MACOSX/ant/._1.png", "train/@eaDir/9.png", "train/README.txt"]
    extra += [
        "train/Bee/notes.TXT",
        "train/loose.png",
        "test/gnu/x.gif",
        ".git/config",
        "more/1.png",
    ]
    for name in extra:
        if random.random() < 0.5:
            files[name] = png(1)
    return files


def listed(files: dict[str, bytes], split: str) -> list[str]:
    """The names of a split's images by the rules in docs/data.md, written anew."""
    found = []
    for name in files:
        parts = name.split("/")
        is_hidden = any(part.startswith(".") or part in ("__MACOSX", "@eaDir") for part in parts)
        is_image = name.lower().endswith((".png", ".jpeg"))
        if parts[0] == split and len(parts) > 2 and is_image and not is_hidden:
            found.append(parts)
    return ["/".join(parts) for parts in sorted(found)]


@pytest.mark.parametrize("seed", range(6))
def test_a_random_set_has_the_samples_of_an_independent_listing(seed):
    random = np.random.default_rng(seed)
    files = random_files(random)
    for name, data in files.items():
        Path("folder", name).parent.mkdir(parents=True, exist_ok=True)
        Path("folder", name).write_bytes(data)
    order = random.permutation([*files])
    shuffled = {f"./{name}" if seed % 2 else name: files[name] for name in order.tolist()}
    paths = {"folder": "folder", "tar": tar("x.tar", shuffled, (0, 1, 2)[seed % 3])}
    paths["zip"] = zipped("x.zip", shuffled, deflated=seed % 2 == 0)
    notes = {}
    for kind, path in paths.items():
        source = opened(path)
        assert source.class_names == ["10", "Bee", "ant", "ça va"]
        for name in ("train", "test"):
            split = source.split(name)
            expected = listed(files, name)
            assert names_of(split) == expected
            assert bytes_of(split) == [files[own] for own in expected]
            classes = [source.class_names[label] for label in split.labels]
            assert classes == [own.split("/")[1] for own in expected]
            assert [os.path.join(path, own) for own in expected] == split.images.paths
        notes[kind] = {line.replace(str(path), "", 1) for line in source.split("train").notes}
    assert notes["tar"] == notes["zip"] == notes["folder"]


# -- WebDataset
# ----------------------------------------------------------------------


def shards(folder: str, labels: list, split: str = "train", kind: str = "cls", start: int = 0):
    members: dict[str, bytes] = {}
    for number, label in enumerate(labels, start):
        members[f"{number:04}.png"] = png(number)
        text = str(label) if kind == "cls" else f'{{"label": {label}}}'
        members[f"{number:04}.{kind}"] = text.encode()
    return tar(f"{folder}/{split}-{start:04}.tar", members)


def test_a_web_dataset_keeps_the_order_of_shards_and_members():
    shards("web", [2, 0, 2], start=3)
    shards("web", [1, 0, 10])
    shards("web", [0, 1], "val")
    source = opened("web")
    assert source.class_names == ["0", "1", "2", "10"]
    train = source.split("train")
    assert train.labels.tolist() == [1, 0, 3, 2, 0, 2]
    assert names_of(train)[2:4] == ["train-0000.tar/0002.png", "train-0003.tar/0003.png"]
    assert train.describe(3) == "web/train-0003.tar/0003.png"
    assert bytes_of(train) == [png(number) for number in range(6)]
    assert source.split("val").labels.tolist() == [0, 1]


def test_the_classes_of_a_web_dataset_have_the_names_beside_it_or_in_it():
    shards("json", ['"emu"', '"cat"', 7], "birds-train", "json")
    assert opened("json").class_names == ["7", "cat", "emu"]
    shards("numbers", [1, 0, 1, "emu"])
    Path("numbers/classnames.txt").write_text("cat\ndog\nemu\n")
    source = opened("numbers")
    assert source.class_names == ["cat", "dog", "emu"]
    assert source.split("train").labels.tolist() == [1, 0, 1, 2]
    Path("numbers/classnames.txt").rename("numbers/_info.json")
    Path("numbers/_info.json").write_text('{"class_names": ["a", "b", "emu"]}')
    assert opened("numbers").class_names == ["a", "b", "emu"]
    shards("numbers", [5], "val")
    with pytest.raises(UserError, match=r"val-0000.tar/0000.png: the training split has no class"):
        opened("numbers").split("val")


def test_folders_of_shards_without_a_split_in_their_names_are_splits():
    shards("web/train", [0, 1, 1], "shard")
    shards("web/val", [1, 0], "shard")
    source = opened("web")
    assert {name: len(source.split(name)) for name in source.openers} == {"train": 3, "val": 2}


def test_a_label_that_is_a_number_is_the_index_of_a_class_even_if_names_are_numbers():
    shards("web", [1, 0, 2])
    Path("web/classnames.txt").write_text("1\n10\n2\n")
    source = opened("web")
    labels = source.split("train").labels
    assert [source.class_names[label] for label in labels] == ["10", "1", "2"]
    Path("web/classnames.txt").write_text("crane\ndog\ncrane\n")
    assert "web: two classes have the same name" in error_of("web")


def test_labels_are_whole_texts_of_a_limited_size():
    files = {"1.png": png(1), "1.cls": b"c\0a", "2.png": png(2), "2.cls": b"dog"}
    tar("web/00.tar", files | {"3.PNG": png(3), "3.CLS": b"\xef\xbb\xbfdog\n"})
    source = opened("web")
    labels = source.split("train").labels
    assert [source.class_names[label] for label in labels] == ["c\0a", "dog", "dog"]
    zipped("large/00.zip", {"1.png": png(1), "1.cls": b"1" * 2**21})
    assert "large/00.zip: 1.cls: too large for a label; " in error_of("large")


def test_a_second_image_of_a_key_such_as_a_mask_is_no_sample():
    tar("web/00.tar", {"1.png": png(1), "1.mask.png": png(2), "1.cls": b"0"})
    split = opened("web").split("train")
    assert names_of(split) == ["00.tar/1.png"]
    assert split.notes == ("web: images without a label are left out: 1",)


def test_archives_beside_the_folders_of_images_are_named():
    image_folder("pets", {"train/cat": 3, "train/dog": 3})
    tar("pets/val.tar", {"cat/1.png": png()})
    assert "archives beside folders of images are not read: val.tar" in str(opened("pets").notes)


def test_images_without_a_label_and_other_members_are_counted():
    files = {"1.png": png(1), "1.cls": b"0", "2.png": png(2), "2.txt": b"", "3.png": png(3)}
    tar("web/00.tar", files | {"3.json": b'{"label": "1"}', "__key__": b""})
    split = opened("web").split("train")
    assert names_of(split) == ["00.tar/1.png", "00.tar/3.png"]
    assert split.notes == (
        "web: files of unsupported types are left out: .txt (1), no extension (1)",
        "web: images without a label are left out: 1",
    )
    tar("none/00.tar", {"1.png": png(1), "1.json": b'{"caption": "a cat"}'})
    assert error_of("none").startswith("none: no image has a label; write the class of KEY.jpg")
    tar("bad/00.tar", {"1.png": png(1), "1.json": b"{"})
    assert re.search(r"bad/00.tar: 1.json: .*; write a label", error_of("bad"))


# -- what is refused or left out
# ----------------------------------------------------------------------


def test_nothing_outside_an_archive_is_named_and_nothing_is_written():
    good = {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(5)}
    tar("x.tar", good | {"/etc/a.png": png(), "cat/../../b.png": png(), "../c.png": png()})
    with tarfile.open("x.tar", "a") as archive:
        kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
        for number, kind in enumerate(kinds):
            member = tarfile.TarInfo(f"cat/link{number}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    zipped("x.zip", good | {"/etc/a.png": png(), "cat/../../b.png": png(), "../c.png": png()})
    with zipfile.ZipFile("x.zip", "a") as archive:
        for number, kind in enumerate((stat.S_IFLNK, stat.S_IFIFO)):
            info = zipfile.ZipInfo(f"cat/link{number}.png")
            info.external_attr = (kind | 0o777) << 16
            archive.writestr(info, "/etc/passwd")
        archive.writestr("cat/lzma.png", png(), zipfile.ZIP_LZMA)
        archive.writestr("cat/locked.png", png())
    data = Path("x.zip").read_bytes()
    at = data.rindex(b"PK\1\2")  # the header in the list at the end, of the encrypted member
    Path("x.zip").write_bytes(data[: at + 8] + b"\1" + data[at + 9 :])
    before = {*os.listdir("."), "cache"}
    for path, count in (("x.tar", 7), ("x.zip", 7)):
        split = opened(path).split("train")
        assert names_of(split) == sorted(good)
        assert split.notes[0].startswith(f"{path}: links, special and encrypted members")
        assert split.notes[0].endswith(f"left out: {count}")
    assert {*os.listdir("."), "cache"} == before


def sparse_tar(path: str) -> None:
    """GNU tar's old format of a file with holes."""
    header = tarfile.TarInfo("cat/holes.png")
    header.type, header.size = tarfile.GNUTYPE_SPARSE, 512
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[386:398], block[398:410] = b"00000000000\0", b"00000001000\0"
    block[483:495] = b"00000100000\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    rest = Path(path).read_bytes()
    Path(path).write_bytes(bytes(block) + b"x" * 512 + rest)


def test_a_sparse_member_is_left_out():
    tar("x.tar", {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(5)})
    sparse_tar("x.tar")
    split = opened("x.tar").split("train")
    assert len(split) == 10 and split.notes[0].endswith(": 1")


REFUSED = {
    "x.tar.gz: is compressed, so images cannot be read in place; decompress it first (gunzip x.t": (
        lambda: Path("x.tar.gz").write_bytes(gzip.compress(b"0" * 2000))
    ),
    "x.tgz: is compressed, ": lambda: Path("x.tgz").write_bytes(gzip.compress(b"0" * 2000)),
    "x.tar: is compressed, ": lambda: Path("x.tar").write_bytes(gzip.compress(b"0" * 2000)),
    "x.tar: is damaged or not complete (": lambda: Path("x.tar").write_bytes(b"x" * 5000),
    "x.tar: is damaged or not complete (empty": lambda: Path("x.tar").write_bytes(b""),
    "x.zip: is damaged or not complete (": lambda: Path("x.zip").write_bytes(b"x" * 5000),
    "x.tar: holds archives (n01.tar, n02.tar), and no images; unpack it into a folder": (
        lambda: tar("x.tar", {"n01.tar": b"1", "n02.tar": b"2"})
    ),
    "x.tar: no images in it; an image folder holds CLASS/IMAGE.jpg": lambda: tar("x.tar", {}),
    "x.tar: no images of a supported type, only .gif (1)": (lambda: tar("x.tar", {"a/1.gif": b""})),
    "cat/1.png is in x.tar and again in x.tar; remove one of the two": lambda: twice("x.tar"),
    "x.tar: has images but no class folders (1 found)": lambda: tar("x.tar", {"1.png": png()}),
}


def twice(path: str) -> Path:
    tar(path, {"cat/1.png": png(1), "dog/1.png": png(2)})
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("cat/1.png"))
    return Path(path)


@pytest.mark.parametrize("line", REFUSED)
def test_an_archive_that_cannot_be_read_is_refused_in_one_line(line):
    REFUSED[line]()
    (path,) = (name for name in os.listdir(".") if name.startswith("x."))
    assert error_of(path).replace(f"{os.getcwd()}/", "").startswith(line)


def test_two_archives_with_the_same_name_are_both_named():
    for number in (0, 1):
        tar(f"data/part-{number}.tar", {f"cat/{number}.png": png(), "dog/1.png": png()})
    here = os.path.abspath("data")
    line = (
        f"dog/1.png is in {here}/part-0.tar and again in {here}/part-1.tar; remove one of the two"
    )
    assert error_of("data") == line


def test_a_table_of_files_names_the_archive_that_they_are_in():
    tar("data/pets.tar", {f"{name}/1.png": png() for name in ("cat", "dog")})
    for path in ("pets.tar/cat/1.png", "cat/1.png"):
        Path("data/review.csv").write_text(f"path,label\n{path},cat\n")
        assert re.search(
            "row 2: .* is in an archive .*; unpack the images", error_of("data/review.csv")
        )


# -- faults
# ----------------------------------------------------------------------


def flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def outcome(path: Path):
    """What the images of an archive are, or the line with which it is refused."""
    try:
        source = opened(path)
        split = source.split("train")
        checked = check_images(split, False, "cache")
        if checked.errors:
            return "unreadable"
        return names_of(split), bytes_of(split), split.notes
    except (UserError, OSError) as error:
        text = str(error)
        assert "\n" not in text and path.name in text, text
        return "refused"


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_no_random_fault_of_an_archive_is_silent(kind):
    random = np.random.default_rng(3)
    files = {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(4)}
    path = Path(f"x.{kind}")
    pack = tar if kind == "tar" else zipped
    pack(path, files)
    whole = path.read_bytes()
    expected = outcome(path)
    headers = header_bytes(whole, kind)
    results = []
    for _ in range(100):
        fault = random.choice(["cut", "flip", "flip", "flip", "remove", "grow"])
        if fault == "cut":
            path.write_bytes(whole[: random.integers(0, len(whole) - 9000 * (kind == "tar"))])
        elif fault == "flip":
            at = int(random.choice(headers))
            path.write_bytes(flip(whole, at, int(random.integers(8))))
        elif fault == "remove":
            gone = str(random.choice([*files]))
            pack(path, {name: data for name, data in files.items() if name != gone})
        else:
            path.write_bytes(whole + bytes(random.integers(1, 255, 700, np.uint8)))
        found = outcome(path)
        # a flipped bit of a time in a zip archive changes nothing; a tar archive has sums
        assert found != expected or (fault == "flip" and kind == "zip"), fault
        results.append((fault, found == "refused"))
    assert sum(is_refused for _, is_refused in results) > 40


def header_bytes(data: bytes, kind: str) -> list[int]:
    """The places of the bytes in headers, but in those of a tar archive not the byte after the
    checksum, which has no meaning.
    """
    if kind == "tar":
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            starts = [member.offset for member in archive]
        own = [place for place in range(512) if place != 155]
        return [start + place for start in starts for place in own]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        starts = [info.header_offset for info in archive.infolist()]
        own = [start + place for start in starts for place in range(30)]
        return [*own, *range(archive.start_dir, len(data))]


def test_an_archive_that_changes_after_it_was_listed_is_named_when_it_is_read():
    files = {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(4)}
    for change in ("replaced", "shorter", "gone", "overwritten"):
        tar("x.tar", files)
        split = opened("x.tar").split("train")
        _opened.cache_clear()
        if change == "replaced":
            tar("y.tar", files).replace("x.tar")
        elif change == "shorter":
            bytes_of(split)  # it stays open
            os.truncate("x.tar", 1024)
        elif change == "gone":
            os.remove("x.tar")
        else:
            bytes_of(split)
            tar("x.tar", files)
        with pytest.raises(OSError, match=r"x.tar"):
            bytes_of(split)
        with pytest.raises(OSError, match=r"x.tar"):  # an image's header
            split.images.open(0)


def test_a_member_that_cannot_be_inflated_to_its_size_is_an_unreadable_image():
    files = {f"{name}/{n}.png": bytes(4000) for name in ("cat", "dog") for n in range(2)}
    zipped("x.zip", files)
    members, _, _ = read_index([os.path.abspath("x.zip")], "cache")
    assert members[1] == bytes(4000)
    for column, change in ((3, -1), (3, 1), (2, -1)):
        members.places[1, column] += change
        with pytest.raises(ValueError, match="its compressed data are damaged"):
            members[1]
        members.places[1, column] -= change
    line = error_of("x.zip")
    assert line.startswith("4 of 4 images of split 'train' cannot be read: x.zip/cat/0.png (")


# -- reading
# ----------------------------------------------------------------------


@pytest.mark.full
def test_at_most_64_of_400_archives_are_open_with_a_low_limit_and_in_forked_readers():
    names = [f"{n:03}" for n in range(400)]
    for number, name in enumerate(names):
        tar(f"classes/{name}.tar", {"1.png": png(number), "2.png": png(number + 400)})
    returned(1, read_with_few_descriptors, names)


def read_with_few_descriptors(names: list[str]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    before = len(os.listdir("/proc/self/fd"))
    data = load("classes", eval_fraction=0.5)
    assert data.class_names == names
    both = [*names_of(data.train), *names_of(data.evaluation)]
    assert len(both) == 800 and len({*both}) == 800
    for split in (data.train, data.evaluation):
        for name, own in zip(names_of(split), bytes_of(split), strict=True):
            folder, file = name.split("/")
            assert own == png(int(folder) + 400 * (file == "2.png"))
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    child = os.fork()  # descriptors are shared: reading has no position
    if not child:
        os._exit(int(bytes_of(data.train)[::7] != bytes_of(data.train)[::7]))
    assert bytes_of(data.train)
    assert os.waitpid(child, 0)[1] == 0


def test_the_index_is_kept_until_an_archive_changes_and_made_again_if_it_is_damaged():
    files = {f"{name}/{n}.png": png(n) for name in ("cat", "dog") for n in range(4)}
    tar("x.tar", files)
    names = read_index(["x.tar"], "cache")[0].names
    (index,) = Path("cache/indexed").iterdir()
    stamp = index.stat().st_mtime_ns
    assert read_index(["x.tar"], "cache")[0].names == names
    assert index.stat().st_mtime_ns == stamp
    data = index.read_bytes()
    for damaged in (data[:-100], flip(data, data.index(b"cat/1"), 1), b"", b"\x80\4."):
        index.write_bytes(damaged)
        assert read_index(["x.tar"], "cache")[0].names == names
        assert index.read_bytes() == data
    tar("x.tar", files | {"dog/9.png": png(9)})
    assert len(read_index(["x.tar"], "cache")[0]) == 9
    assert len([*Path("cache/indexed").iterdir()]) == 2


def test_predictions_are_for_the_images_of_archives_in_order_by_name():
    tar("x.tar", {f"{name}.png": png(n) for n, name in enumerate(("c", "a", ".h", "b"))})
    Path("d.png").write_bytes(png(9))
    zipped("y.zip", {"e/1.png": png(7)})
    images = find_images(["y.zip", "*.tar", "x.tar", "x.tar/a.png"]).images
    assert images.paths == ["y.zip/e/1.png", "x.tar/a.png", "x.tar/b.png", "x.tar/c.png"]
    assert [images[row] for row in range(4)] == [png(7), png(1), png(3), png(0)]
    assert images.stamp(0)[0] == len(png(7))
    assert find_images(["x.tar/b.png"]).images.paths == ["x.tar/b.png"]
    with pytest.raises(UserError, match=r"x.tar/gone.png: no such image in x.tar"):
        find_images(["x.tar/a.png", "x.tar/gone.png"])
    with pytest.raises(UserError, match=r"x.tar: archives and other images cannot be predicted"):
        find_images(["x.tar", "d.png"])


# -- --data
# ----------------------------------------------------------------------


def test_archives_are_sources_without_columns_and_those_of_plug_ins_may_have_some(monkeypatch):
    tar("a b.TAR", {"cat/1.png": png()})
    tar("folder/cat.tar", {"1.png": png()})
    for name in ("a b.TAR", "folder"):
        check_source(TrainConfig(data=name))
        assert absolute_data(name) == os.path.abspath(name)
        assert not has_columns(name)
    monkeypatch.setitem(SOURCES, "lab/", open_archives)
    assert has_columns("lab/anything") and not has_columns("digits")
    monkeypatch.setitem(SOURCES, ".npz", open_archives)
    Path("x.npz").touch()
    assert has_columns("x.npz")
    assert parse_args(TrainConfig, "train.py", ["--data", "folder"]).data == "folder"


def test_a_folder_with_images_beside_archives_is_an_image_folder():
    image_folder("folder", {"cat": 10, "dog": 10})
    tar("folder/backup.tar", {"emu/1.png": png()})
    assert load("folder").class_names == ["cat", "dog"]


def test_groups_of_folders_and_patterns_are_those_of_the_folder():
    files = {f"{name}/{day}/{n}.png": png(n + 10 * day) for name in ("cat", "dog")
             for day in range(4) for n in range(3)}  # fmt: skip
    tar("x.tar", files)
    for name, data in files.items():
        Path("folder", name).parent.mkdir(parents=True, exist_ok=True)
        Path("folder", name).write_bytes(data)
    for by in ("folder", r"^(\d)"):
        settings = {"group_by": by, "eval_fraction": 0.3}
        one, other = (load(path, **settings) for path in ("folder", "x.tar"))
        assert names_of(one.evaluation) == names_of(other.evaluation)
        assert one.evaluation.name == other.evaluation.name
