"""Imports between the parts of utils/ point one way, in the order that docs/architecture.md shows."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.training_runs import ROOT

FORBIDDEN = {("data", "ranks"), ("models", "ranks")}  # both work without processes
MOST_PACKAGES = 12


def shown_order(page: str) -> list[str]:
    """The parts in the page's code block with a line for each, which starts with `errors.py` or `launch/`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)
    return max((re.findall(r"^\w+(?:\.py|/)(?=\s)", block, re.M) for block in blocks), key=len)


def modules(root: Path) -> dict[str, Path]:
    """The modules of root/utils by their names, such as utils.data.spec; a package has the name of its folder."""
    names = {}
    for path in sorted((root / "utils").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """What a module imports, anywhere in it: the names of modules in utils/, and what else it names."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                found.add(whole if whole in known else module)
    return found - {name, "utils"}


def faults(root: Path, parts: list[str]) -> list[str]:
    """What is wrong with the imports of root/utils, in words, where a part may import only itself and earlier ones."""
    paths, scripts = modules(root), {path.stem for path in root.glob("*.py")}
    graph = {name: imports(name, path, set(paths)) for name, path in paths.items()}
    order, wrong = [part.removesuffix(".py").removesuffix("/") for part in parts], []
    for name, targets in graph.items():
        for target in sorted(targets):
            top, _, rest = target.partition(".")
            if top in scripts:
                wrong.append(f"{name} imports the script {target}")
            elif top == "utils":
                arrow = name.split(".")[1], rest.split(".")[0]
                if not set(arrow) <= set(order):
                    wrong.append(f"{name} imports {target}, and the order names only one of them")
                elif arrow in FORBIDDEN or order.index(arrow[0]) < order.index(arrow[1]):
                    wrong.append(f"{name} imports {target}")
    try:
        TopologicalSorter({name: targets & set(paths) for name, targets in graph.items()}).prepare()
    except CycleError as error:
        wrong.append(f"circle: {' imports '.join(reversed(error.args[1]))}")
    return wrong


@pytest.fixture
def order():
    return shown_order((ROOT / "docs/architecture.md").read_text())


def test_imports_point_to_earlier_parts_of_the_page_and_make_no_circle(order):
    assert faults(ROOT, order) == []


def test_the_page_shows_each_part_of_utils_once_and_there_are_few(order):
    utils = ROOT / "utils"
    files = [path.name for path in utils.glob("*.py") if path.name != "__init__.py"]
    packages = {f"{path.parent.name}/" for path in utils.glob("*/*.py")}
    assert sorted(order) == sorted([*files, *packages]) and len(packages) <= MOST_PACKAGES
    assert not list(utils.glob("*/*/*.py"))


PAGE = """
```bash
make test
```
```
errors.py   lines
ranks/      processes
data/       images
runs/       folders
```
"""
GOOD = {
    "train.py": "from utils.runs.log import Log",
    "utils/__init__.py": "",
    "utils/errors.py": "import re",
    "utils/ranks/__init__.py": "",
    "utils/ranks/session.py": "from utils.errors import UserError",
    "utils/data/__init__.py": "",
    "utils/data/order.py": "from utils import errors",
    "utils/data/spec.py": "from .order import Plan",
    "utils/runs/__init__.py": "",
    "utils/runs/log.py": "import utils.ranks.session as session\nfrom utils.data import spec",
}


TURNED_AROUND = [
    ("utils/errors.py", "import utils.data.spec", "utils.errors imports utils.data.spec"),
    ("utils/ranks/session.py", "def f():\n    from ..runs import log", "utils.ranks.session imports utils.runs.log"),
    ("utils/ranks/__init__.py", "from .. import runs", "utils.ranks imports utils.runs"),
    ("utils/data/order.py", "from utils.ranks import session", "utils.data.order imports utils.ranks.session"),
    ("utils/data/order.py", "import train as t", "utils.data.order imports the script train"),
    ("utils/data/order.py", "from . import spec", "circle: utils.data.order imports utils.data.spec imports"),
    ("utils/data/order.py", "from utils.report import page", "the order names only one of them"),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(("module", "text", "fault"), TURNED_AROUND)
def test_an_import_that_is_turned_around_is_found(tmp_path, module, text, fault):
    write_tree(tmp_path, GOOD)
    assert faults(tmp_path, shown_order(PAGE)) == []
    write_tree(tmp_path, {module: text})
    assert any(fault in found for found in faults(tmp_path, shown_order(PAGE)))
