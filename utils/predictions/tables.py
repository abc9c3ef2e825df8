"""Files of rows: CSV, JSON and Parquet. The same rows always make the same bytes."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import check_output_file

Columns = dict[str, list]
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


def check_table_file(flag: str, path: Path) -> None:
    """Raise UserError, which names the flag, if `path` has another ending or cannot be written."""
    if path.suffix.lower() not in _FORMS:
        raise UserError(f"{flag} {path}: must end in {', '.join(_FORMS)}", "for example predictions.csv")
    check_output_file(flag, path)


def encode(columns: Columns, path: Path) -> bytes:
    """The contents of the file `path` with these columns; its ending selects the format.

    A cell is a string, a number, None, or a list of strings. Characters that are not UTF-8 are escaped.
    """
    clean = {name: [_clean(cell) for cell in cells] for name, cells in columns.items()}
    return _FORMS[path.suffix.lower()](clean)


def _clean(cell: Any) -> Any:
    if isinstance(cell, list):
        return [_clean(text) for text in cell]
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


def _csv(columns: Columns) -> bytes:
    """Comma-separated, with a header. A list of texts is written as JSON.

    All texts are quoted. Otherwise, before Python 3.13, a carriage return in a text would end the row.
    """
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_csv_cell, row) for row in zip(*columns.values(), strict=True))
    return file.getvalue().encode()


def _csv_cell(cell: Any) -> Any:
    """The cell; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if isinstance(cell, list):
        return json.dumps(cell, ensure_ascii=False)
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    return f"'{cell}" if is_formula and not _NUMBER.fullmatch(cell) else cell


def _json(columns: Columns) -> bytes:
    """A list with an object for each row, one on each line."""
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _parquet(columns: Columns) -> bytes:
    import pyarrow
    from pyarrow import parquet

    def type_of(name: str, cells: list) -> Any:
        if name == "index":
            return pyarrow.int64()
        if name == "loss" or name.startswith("probability_"):
            return pyarrow.float64()
        is_list = any(isinstance(cell, list) for cell in cells)
        return pyarrow.list_(pyarrow.string()) if is_list else pyarrow.string()

    arrays = {name: pyarrow.array(cells, type_of(name, cells)) for name, cells in columns.items()}
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), file)
    return file.getvalue()


_FORMS = {".csv": _csv, ".json": _json, ".parquet": _parquet}
