"""The page of predict.py --html: images and their predictions, in a single file that loads nothing else."""

from collections.abc import Sequence

from utils.data.splits import Split
from utils.predictions.tables import Row
from utils.report.page import render
from utils.report.pictures import thumbnail

MOST = 1000  # images on the page; the thumbnail of each has about 5 kB


def page(title: str, rows: Sequence[Row], split: Split) -> str:
    """The page of the first `MOST` images of a split with their rows, in HTML."""
    figures = [
        (row, split.describe(place), thumbnail(split, place)["image"] if row.error is None else "")
        for place, row in enumerate(rows[:MOST])
    ]
    unreadable = sum(row.error is not None for row in rows)
    return render("gallery.html", title=title, count=len(rows), unreadable=unreadable, figures=figures)
