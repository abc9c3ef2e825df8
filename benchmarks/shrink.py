"""Images per second of one core on photographs of 12 megapixels, with and without --shrink.

    python benchmarks/shrink.py --photos FOLDER --json FILE
    python benchmarks/shrink.py                                generated photographs

Of the images in FOLDER, 32 are enlarged to 4000x3000. Random crops of 35 to 100 % of the area,
resized to 224x224, in batches of 32, in this process with one thread. In the first epoch, --shrink
stores each photograph, and in later epochs it reads what it has stored. A cell is the median of the
rounds, with their range.
"""

from functools import partial
from pathlib import Path
from shutil import rmtree

from input_pipeline import MEAN, STD, ours, run_forms, split_of
from PIL import Image

from utils.data import InputSpec, make_dataset
from utils.settings.train import TrainConfig


def make_sides(photos: Path, folder: Path) -> dict:
    """A pass over 32 photographs in later epochs, without --shrink, and in the first epoch."""
    for number, path in enumerate(split_of(photos).images.paths[:32]):
        (folder / "large/0").mkdir(parents=True, exist_ok=True)
        large = Image.open(path).convert("RGB").resize((4000, 3000))
        large.save(f"{folder}/large/0/{number}.jpg", quality=95)
    spec, split = InputSpec(224, 224, 3, MEAN, STD), split_of(folder / "large")

    def read(cache: str, **settings):
        config = TrainConfig(
            num_workers=0, min_scale=0.35, cache_dir=f"{folder}/{cache}", **settings
        )
        return ours(make_dataset(split, spec, config, True, iter), spec, 32, config)

    first = read("emptied", shrink=336)
    return {
        "--shrink 336": read("kept", shrink=336),
        "without": read(""),
        "--shrink 336, first epoch": lambda: rmtree(folder / "emptied", True) or first(),
    }


main = partial(
    run_forms,
    __doc__,
    lambda made, photos: {"4000x3000": lambda: make_sides(photos, made)},
    "--shrink 336 over it",
    False,
)

if __name__ == "__main__":
    main()
