"""--plugin FILE: a Python file of the user that adds entries to the registries.

Only a flag or a --config file names a file to import. Checkpoints and logs store its name and its
SHA-256, which are only compared.
"""

import os
import sys
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from traceback import extract_tb

from utils.config.bounds import require
from utils.console import say
from utils.errors import UserError, one_line
from utils.files import expand

PLUGIN_HASHES: dict[str, str] = {}
"""{file name: SHA-256} of the plug-in of this process, if it has one; `versions` includes it."""


def load_plugin(file: str) -> None:
    """Import the file. Raises UserError, with the line of the file, if this fails."""
    path = expand(file).resolve()
    require(path.is_file(), f"--plugin {file}: no such file", "give the path of a Python file")
    is_module = path.suffix == ".py" and path.stem.isidentifier()
    require(is_module, f"--plugin {file}: is not a name for a Python module", "rename the file")
    content = sha256(path.read_bytes()).hexdigest()
    problem = f"--plugin {file}: has changed since it was imported"
    require(PLUGIN_HASHES.get(path.name, content) == content, problem, "restart Python")
    sys.path.append(str(path.parent))  # also for loader processes that import it by its name
    try:
        module = import_module(path.stem)
        if not path.samefile(str(module.__file__)):
            raise ImportError("another Python module has this name")
    except BaseException as error:  # also the exit of a file that was written to be run
        calls = extract_tb(error.__traceback__)
        lines = [f", line {call.lineno}" for call in calls if call.filename == str(path)]
        problem = f"--plugin {file}{''.join(lines[-1:])}: {type(error).__name__}: {one_line(error)}"
        ends = 'put code that ends the program below if __name__ == "__main__":'
        fix = "correct it" if isinstance(error, Exception) else ends
        raise UserError(problem, fix) from error
    PLUGIN_HASHES[path.name] = content


def check_plugin(path: Path, versions: Mapping[str, str]) -> None:
    """Raise UserError if the run or checkpoint at `path`, made with these `versions`, needs another
    plug-in.

    The main process prints a line if the file has changed.
    """
    for name in map(os.path.basename, versions):  # a checkpoint may suggest no folder
        fits = not name.endswith(".py") or name in PLUGIN_HASHES
        require(fits, f"{path}: was made with the plug-in {name}", f"add --plugin {name}")
    for name, content in PLUGIN_HASHES.items():
        if versions.get(name, content) != content:
            say(f"{path}: was not made with this version of --plugin {name}")
