"""Join the runs of all folds of a split: python -m extras.folds RUN [RUN ...] --out FILE.csv
[--no_images] [--plugin FILE]

For each image, FILE.csv has the prediction of the run that did not train on it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extras.compare.command import check_runs, parse_runs
from extras.images import find_images
from extras.page.analysis import ERRORS, interval_of_share
from extras.page.html import gallery
from extras.page.predictions import Row, encode
from extras.page.report import FOLD
from utils.config import require
from utils.files import expand, read_json, write_file
from utils.output import guard_output
from utils.replacing import HTML, TABLE, check_output
from utils.runs import read_log

_ABOUT = "Join the predictions of the runs of all folds of a split."
_OUT = "table to write, such as folds.csv; required"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the predictions of these runs, and print where they are."""
    guard_output()
    with parse_runs("folds", argv, _ABOUT, _OUT) as flags:
        require(flags.out, "--out is missing", "name the CSV file, such as folds.csv")
        out = expand(flags.out)
        check_output(flags, "out", TABLE)
        if not flags.no_images:  # the page beside it
            check_output(flags, "out", HTML, out=f"{out.with_suffix('.html')}")
        check_runs(flags)
        join(flags.folders, out, images=not flags.no_images)
    print(out)


def join(folders: list[Path], out: Path, images: bool) -> None:
    """Write the predictions of these runs, and print the accuracy. For image files with one class
    each, also write review.csv, the least likely labels first, and a page of these images. If
    review.csv exists, the list is review-2.csv, and so on.

    Raises ValueError or OSError unless these are complete runs of all folds of a split, each once.
    """
    table = read_folds(folders)
    right = table["predicted"] == table["label"]
    share = right.mean()
    # Wilson's interval, for as many single images as give the same variance as the groups (Korn
    # and Graubard, 1998), but not for more; if all are right or wrong, for as many as there are
    # groups.
    sums = (right - share).groupby(table.pop("group")).sum()
    size = len(sums)
    if 0 < share < 1:
        size = min(len(right), share * (1 - share) * len(right) ** 2 / max(sums @ sums, 1e-9))
    title = "accuracy {:.4f}, 95 % interval {:.4f} to {:.4f}, of {} images".format(
        share, *interval_of_share(share, size), len(right)
    )
    print(title)
    write_file(out, encode(table.to_dict("records"), out))
    if "path" in table and isinstance(table["label"][0], str):
        table = table.assign(
            was=table["label"], suggestion=table["predicted"].mask(right, "")
        ).sort_values("loss", ascending=False)
        rows = table[["path", "label", "suggestion", "was"]].to_dict("records")
        number, review = 1, out.with_name("review.csv")
        while review.exists():  # somebody may have corrected it
            number += 1
            review = out.with_name(f"review-{number}.csv")
        write_file(review, encode(rows, review))
        print(f"labels to check: {review}")
        if not images:
            return
        shown = [
            Row(row.label, [(row.class_1, row.probability_1), (row.class_2, row.probability_2)])
            for row in table[:ERRORS].itertuples()
        ]
        split = find_images(table["path"][:ERRORS])
        write_file(out.with_suffix(".html"), gallery(title + "; labels in bold", shown, split))


def read_folds(folders: list[Path]) -> Any:
    """The predictions of these runs, as a table with the columns `fold` and `group`.

    Raises UserError unless the runs are complete, and are all folds of a split.
    """
    import pandas  # takes half a second

    tables = []
    for folder in folders:
        rows = read_json(folder / FOLD, 2**30) if (folder / FOLD).is_file() else [{"step": -1}]
        complete = rows[0]["step"] == read_log(folder)[-1]["step"]
        fix = "train it to its end, without --report false and --max_eval_samples"
        require(complete, f"{folder}: not a complete run with --fold", fix)
        tables.append(pandas.DataFrame(rows).drop(columns="step"))
    names = [each["split"][0] for each in tables]
    count = len(names)
    expected = {f"{k + 1}/{count} of {names[0].split()[-1]}" for k in range(count)}
    problem = f"not all folds of one split: {', '.join(map('{} is {}'.format, folders, names))}"
    require({*names} == expected, problem, "name one run of each, with equal data and settings")
    table = pandas.concat(tables, ignore_index=True)
    table.insert(3, "fold", table.pop("split").str.partition("/")[0].astype(int))
    return table


if __name__ == "__main__":
    main()
