"""Find what --data names, and open it as the source of its splits.

To add a source, such as a CSV file, write a function that returns a `Source` (splits.py). Call it in `open_source`, and
accept its name in `check_source`.
"""

from pathlib import Path

from utils.config.settings import TrainConfig, absolute_data
from utils.console import printable
from utils.data.builtin import open_digits, open_synthetic
from utils.data.folders import image_folder
from utils.data.splits import Source
from utils.data.table_files import has_tables, read_table_files
from utils.data.tables import load_hub, table_source
from utils.data.vision import open_torchvision, torchvision_class
from utils.errors import UserError
from utils.files import expand


def check_source(config: TrainConfig) -> None:
    """Raise ValueError if what --data names does not exist. Does not open it."""
    _check_names(config)
    name, (kind, _, rest) = config.data, config.data.partition("/")
    path = expand(name)
    if kind == "torchvision":
        torchvision_class(rest)
    elif name == "digits" or kind == "synthetic":
        return
    elif not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):  # else it may be a Hub id
        raise UserError(f"--data {name}: no such file, folder or data set", "--help lists the valid values")
    elif not path.is_dir() or has_tables(path):
        import datasets  # noqa: F401  takes half a second; load_data would import it on one rank after the other


def _check_names(config: TrainConfig) -> None:
    """Raise ValueError for a name that config.yaml cannot store, because the run could not be resumed."""
    for name, value in (vars(config) | {"data": absolute_data(config.data)}).items():
        if isinstance(value, str) and not value.isascii() and value.encode("utf-8", "replace").decode() != value:
            raise UserError(f"--{name} {printable(value)}: this name is not UTF-8", "rename it")


def open_source(config: TrainConfig) -> Source:
    """The data set that --data names. Raises ValueError or OSError if it cannot be read."""
    name = config.data
    kind, _, rest = name.partition("/")
    if name == "digits":
        return open_digits()
    if kind == "synthetic":
        return open_synthetic(rest)
    if kind == "torchvision":
        return open_torchvision(rest, config)
    path = expand(name)
    return _local(path, config) if path.exists() else load_hub(config)


def _local(path: Path, config: TrainConfig) -> Source:
    if path.is_file() or has_tables(path):
        return table_source(read_table_files(path), config)
    return image_folder(path, config)
