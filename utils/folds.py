"""Join the runs of all folds of a split: python -m utils.folds RUN [RUN ...] --out FILE.csv
[--no_images] [--plugin FILE]

For each image, FILE.csv has the prediction of the run that did not train on it.
"""

from utils.report.__main__ import main  # the first import, because it guards the output

# isort: split
from pathlib import Path

from utils.config.bounds import require
from utils.files import read_json, write_file
from utils.report.analysis import ERRORS, interval_of_share
from utils.report.html import gallery
from utils.report.tables import Row, check_table_file, encode, find_images
from utils.report.writing import FOLD


def join(folders: list[Path], out: Path, images: bool) -> None:
    """Write the predictions of these runs, and print the accuracy. For image files with one class
    each, also write review.csv, the least likely labels first, and a page of these images.

    Raises ValueError or OSError unless these are complete runs of all folds of a split, each once.
    """
    import pandas  # takes half a second

    check_table_file("--out", out)
    tables = [pandas.DataFrame(read_json(folder / FOLD)) for folder in folders]
    names = [each["split"][0] for each in tables]
    count = len(names)
    expected = {f"{k + 1}/{count} of {names[0].split()[-1]}" for k in range(count)}
    problem = f"not all folds of one split: {', '.join(map('{} is {}'.format, folders, names))}"
    require({*names} == expected, problem, "name one run of each, with equal data and settings")
    table = pandas.concat(tables, ignore_index=True)
    table.insert(3, "fold", table.pop("split").str.partition("/")[0].astype(int))
    right = table["predicted"] == table["label"]
    share = right.mean()
    # Wilson's interval, for as many single images as give the same variance as the groups (Korn
    # and Graubard, 1998); if all are right or wrong, for as many as there are groups.
    sums = (right - share).groupby(table.pop("group")).sum()
    squares = sums @ sums
    size = share * (1 - share) * len(right) ** 2 / squares if squares else len(sums)
    title = "accuracy {:.4f}, 95 % interval {:.4f} to {:.4f}, of {} images".format(
        share, *interval_of_share(share, size), len(right)
    )
    print(title)
    write_file(out, encode(table.to_dict("records"), out))
    if images and "path" in table and isinstance(table["label"][0], str):
        table = table.assign(
            was=table["label"], suggestion=table["predicted"].mask(right, "")
        ).sort_values("loss", ascending=False)
        review = out.with_name("review.csv")
        rows = table[["path", "label", "suggestion", "was"]].to_dict("records")
        write_file(review, encode(rows, review))
        shown = [
            Row(row.label, [(row.class_1, row.probability_1), (row.class_2, row.probability_2)])
            for row in table[:ERRORS].itertuples()
        ]
        split = find_images(table["path"][:ERRORS])
        write_file(out.with_suffix(".html"), gallery(title + "; labels in bold", shown, split))


if __name__ == "__main__":
    main(None, join, "folds")
