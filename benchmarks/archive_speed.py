"""Images per second from a tar and a zip archive beside those from the folder, in paired rounds,
with loader processes.

    python benchmarks/archive_speed.py --photos FOLDER    with CLASS/IMAGE
    python benchmarks/archive_speed.py                    generated photographs

A random crop of 8 to 100 % of the area, resized to 224x224, half of them flipped, in batches of 32.
The files have been read before: no side waits for a disk. A ratio is that of an archive divided by
the folder's in the same round. A cell is the median of the rounds, with their range.
"""

import tarfile
import zipfile
from pathlib import Path

from common import in_turns, numbers, over, parse_flags, report, spread, temporary
from input_pipeline import MEAN, STD, make_photographs, ours, split_of

from utils.data import InputSpec, PhotoDataset, Split, make_augmentation, whole_split
from utils.data.archive_index import read_index
from utils.settings.train import TrainConfig


def split_in(archive: Path, folder: Path) -> Split:
    """All images of an archive, with cached results in `folder`."""
    members, _, _ = read_index([str(archive)], str(folder))
    return whole_split("train", members, [0] * len(members), "made")


def pack(photos: Path, made: Path) -> list[Path]:
    """A tar and a zip archive of the photographs."""
    paths = sorted(path for path in photos.rglob("*") if path.is_file())
    with tarfile.open(made / "photos.tar", "w") as tar:
        for path in paths:
            tar.add(path, path.relative_to(photos))
    with zipfile.ZipFile(made / "photos.zip", "w") as archive:  # stored, as JPEG files usually are
        for path in paths:
            archive.write(path, path.relative_to(photos))
    return [made / "photos.tar", made / "photos.zip"]


def main() -> None:
    photos = (Path, "an image folder; else it is generated")
    workers = ("0,2,16", "numbers of loader processes")
    args = parse_flags(__doc__, rounds=7, photos=photos, workers=workers)
    spec = InputSpec(224, 224, 3, MEAN, STD)
    rows, results = [], {}
    with temporary() as made:
        folder = args.photos or make_photographs(made / "photographs", 500, 375, 12, count=512)
        splits = {"folder": split_of(folder)}
        splits |= {path.suffix[1:]: split_in(path, made) for path in pack(folder, made)}
        for count in numbers(args.workers):
            config = TrainConfig(num_workers=count, flip=True)
            augmentation = make_augmentation(config, spec, training=True)
            sides = {
                name: ours(PhotoDataset(split, spec, augmentation), spec, 32, config)
                for name, split in splits.items()
            }
            for side in sides.values():
                side()  # warms up
            found = in_turns(sides, args.rounds)
            for name, rates in found.items():
                compared = "" if name == "folder" else over(rates, found["folder"])
                rows.append([count, name, spread(rates), compared])
            results[count] = found
        report(args, ["Workers", "Images in", "Images/s", "Of the folder's"], rows, results)


if __name__ == "__main__":
    main()
