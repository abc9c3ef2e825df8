"""Fine-tuning on few photographs: the head only, and all layers with and without a fitted head.

    python benchmarks/fine_tuning.py --data FOLDER --weights FILE --model tf_efficientnet_lite0
    python benchmarks/fine_tuning.py --data FOLDER --each 30 --rounds 3 --image_size 160 \\
        --weights FILE --model tf_efficientnet_lite0
    python benchmarks/fine_tuning.py --parquet FOLDER --each 30 --rounds 3 --image_size 128 \\
        --weights FILE --model tf_efficientnet_lite0

FOLDER of --data has train/CLASS/IMAGE and val/CLASS/IMAGE. With --each N, N photographs of each
class are drawn from both folders to train on, and the others are to evaluate on. FOLDER of
--parquet has the files train-*.parquet and test-*.parquet of a data set of small images, as on the
Hub: --each images of each class of the first, and --others of the second, are enlarged to 224
pixels. --classes selects labels. Every round is another draw, or, without --each, another seed.

Each cell is the number of evaluation images that the last weights misclassify. The sides are:

* head only: `train.py --config recipes/head.yaml`
* all layers, head from zero: `train.py --fit_head false`
* all layers: train.py with its defaults, which fit the head first
* each of --more: settings that are added to those of `all layers`

Training uses one process with one thread. No checkpoint is chosen on the evaluation images.
"""

import argparse
import io
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np
import pandas
from common import ROOT, flags, in_turns, parse_flags, read_log, report, run, temporary
from PIL import Image

HEAD, ZERO, ALL = "head only", "all layers, head from zero", "all layers"
SETTINGS = {
    HEAD: flags(config=ROOT / "recipes/head.yaml"),
    ZERO: flags(fit_head="false", eval_every=10**6),
    ALL: flags(eval_every=10**6),
}
SIDE = 224  # pixels of the enlarged images


def draw_photographs(source: Path, each: int, number: int, folder: Path) -> None:
    """Copy `each` photographs of each class to folder/train, and the others to folder/val."""
    shuffle = random.Random(number).shuffle
    for name in sorted({path.parent.name for path in source.glob("*/*/*")}):
        paths = sorted(source.glob(f"*/{name}/*"))
        shuffle(paths)
        for part, chosen in (("train", paths[:each]), ("val", paths[each:])):
            (folder / part / name).mkdir(parents=True)
            for path in chosen:
                copy = f"{path.parent.parent.name}-{path.name}"  # a name may be in both
                shutil.copy(path, folder / part / name / copy)


def draw_small(args: argparse.Namespace, number: int, folder: Path) -> None:
    """Write images of each class to folder/train and folder/val, enlarged."""
    choose = np.random.default_rng(number).permutation
    for split, part, count in (("train", "train", args.each), ("test", "val", args.others)):
        frame = pandas.read_parquet(next(args.parquet.rglob(f"{split}-*.parquet")))
        image, label = frame.columns
        for name in map(int, args.classes.split(",") if args.classes else sorted({*frame[label]})):
            own = frame[frame[label] == name]
            (folder / part / str(name)).mkdir(parents=True)
            for place in choose(len(own))[:count]:
                pixels = Image.open(io.BytesIO(own.iloc[place][image]["bytes"])).convert("RGB")
                large = pixels.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                large.save(folder / part / str(name) / f"{own.index[place]}.jpg", quality=95)


def count_wrong(args: argparse.Namespace, data: Path, settings: list[str], seed: int) -> dict:
    """Train; returns the number of misclassified images in the first and in the last evaluation,
    and of all evaluated images.
    """
    with temporary() as folder:
        command = [sys.executable, ROOT / "train.py"]
        command += flags(data=data, model=f"timm/{args.model}", init_from=args.weights, seed=seed)
        command += flags(init_match=args.init_match, image_size=args.image_size, threads=1)
        command += flags(num_workers=0, output_dir=folder, run_name="run", report="false")
        command += [*flags(cache_dir=args.cache), *settings]
        run(command, env={"CUDA_VISIBLE_DEVICES": ""})
        found = [record for record in read_log(folder / "run") if record["kind"] == "eval"]
    first, last = (round((1 - each["accuracy"]) * each["count"]) for each in (found[0], found[-1]))
    return {"first": first, "wrong": last, "count": found[-1]["count"]}


def table(results: dict[str, list[dict]]) -> tuple[list[str], list[list]]:
    """The header and the rows: wrong images of each round, and their mean."""
    rows = []
    for name, found in results.items():
        wrong = [each["wrong"] for each in found]
        share = 1 - sum(wrong) / sum(each["count"] for each in found)
        rows.append([name, *wrong, f"{mean(wrong):.1f}", f"{share:.1%}"])
    draws = [f"round {number}" for number in range(len(rows[0]) - 3)]
    return [f"Wrong of {found[0]['count']}", *draws, "mean", "accuracy"], rows


def main() -> None:
    args = parse_flags(
        __doc__,
        ["weights", "model"],
        3,
        data=(Path, "folder with photographs, in train/ and val/"),
        parquet=(Path, "in place of --data: parquet files as on the Hub"),
        each=(0, "photographs of each class to draw; 0 uses those of train/"),
        others=(100, "with --parquet: images of each class to evaluate on"),
        classes=("", "with --parquet: some of the labels, such as 3,5"),
        weights=(Path, "file with published weights"),
        model=(str, "timm's name of the model of these weights"),
        init_match=("order", "as for train.py; name if the file has timm's names"),
        image_size=(224, "side of the model's input in pixels"),
        more=("", "more sides, such as epochs=10 lr=1e-4; separated by semicolons"),
        first_draw=(0, "number of the first draw"),
    )
    if bool(args.data) == bool(args.parquet) or (args.parquet and not args.each):
        raise SystemExit("give either --data, or --parquet with --each")
    with temporary() as folder:
        args.cache = folder / "cache"
        places = []
        for number in range(args.first_draw, args.first_draw + args.rounds):
            places.append(folder / str(number) if args.each else args.data)
            if args.parquet:
                draw_small(args, number, places[-1])
            elif args.each:
                draw_photographs(args.data, args.each, number, places[-1])
        settings = dict(SETTINGS)
        for more in filter(None, args.more.split(";")):
            own = dict(pair.split("=") for pair in more.split())
            settings[f"all layers, {more.strip()}"] = [*SETTINGS[ALL], *flags(**own)]

        def side(own: list[str]) -> Callable[[], dict]:
            rounds = iter(range(args.rounds))

            def train() -> dict:
                number = next(rounds)
                return count_wrong(args, places[number], own, 0 if args.each else number)

            return train

        results = in_turns({name: side(own) for name, own in settings.items()}, args.rounds)
    report(args, *table(results), results)


if __name__ == "__main__":
    main()
