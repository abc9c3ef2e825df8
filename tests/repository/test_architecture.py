"""docs/architecture.md: imports point one way, doors are used, and the code keeps its limits."""

import ast
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers.training_runs import ROOT

FORBIDDEN = {("data", "ranks"), ("models", "ranks")}  # both work without processes
MOST_PACKAGES = 9
MOVED = {"report.py", "folds.py"}  # only name the new commands
OLD_PLACES = {"utils.config.defaults"}  # for plug-ins
PACKAGES = {path.parent.name for path in (ROOT / "utils").glob("*/__init__.py")}
PAGE = (ROOT / "docs/architecture.md").read_text()


def shown_order(page: str) -> list[str]:
    """The parts in the page's code block with a line for each, which starts with `errors.py` or
    `launch/`.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)
    return max((re.findall(r"^\w+(?:\.py|/)(?=\s)", block, re.M) for block in blocks), key=len)


def modules() -> dict[str, Path]:
    """The modules of utils by their names, such as utils.data.spec; a package has the name of its
    folder.
    """
    names = {}
    for path in (ROOT / "utils").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path, known: Iterable[str]) -> set[str]:
    """What a module imports, anywhere in it: the names of modules in utils/, and what else it
    names.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            wholes = {f"{module}.{alias.name}" for alias in node.names}
            found |= {whole if whole in known else module for whole in wholes}
    return found - {name, "utils"}


GRAPH = {name: imports(name, path, modules()) for name, path in modules().items()}


def faults(parts: list[str]) -> list[str]:
    """What is wrong with the imports of utils, in words, where a part may import only itself and
    earlier ones.
    """
    order = [part.removesuffix(".py").removesuffix("/") for part in parts]
    scripts, wrong = {path.stem for path in ROOT.glob("*.py")}, []
    arrows = [(name, to) for name, targets in GRAPH.items() for to in targets]
    for name, target in (arrow for arrow in arrows if arrow[0] not in OLD_PLACES):
        top, _, rest = target.partition(".")
        if top in scripts:
            wrong.append(f"{name} imports the script {target}")
        elif top == "utils":
            arrow = name.split(".")[1], rest.split(".")[0]
            if not set(arrow) <= set(order):
                wrong.append(f"{name} imports {target}, and the order names only one of them")
            elif arrow in FORBIDDEN or order.index(arrow[0]) < order.index(arrow[1]):
                wrong.append(f"{name} imports {target}")
    return wrong


@pytest.fixture
def order():
    return shown_order(PAGE)


def test_imports_point_to_earlier_parts_of_the_page_and_make_no_circle(order):
    assert faults(order) == []
    # or CycleError
    TopologicalSorter({name: targets & GRAPH.keys() for name, targets in GRAPH.items()}).prepare()
    assert len(faults(order[::-1])) > 50  # such imports are seen


def test_the_page_shows_each_part_of_utils_once_and_there_are_few(order):
    utils = ROOT / "utils"
    files = {path.name for path in utils.glob("*.py")} - {"__init__.py", *MOVED}
    packages = {f"{path.parent.name}/" for path in utils.glob("*/*.py")}
    assert sorted(order) == sorted([*files, *packages]) and len(packages) <= MOST_PACKAGES
    assert not list(utils.glob("*/*/*.py"))


# Doors


def listed_doors() -> set[str]:
    """The files that architecture.md lists below `## Doors`, such as `data.csv_file`."""
    section = PAGE.split("## Doors")[1].split("\n## ")[0]
    named = re.findall(r"`(\w+)/(\w+)\.py`", section)
    return {f"{package}.{file}" for package, file in named}


def past_the_door(text: str, own: str = "") -> list[str]:
    """The modules of other packages of utils that a file imports without being doors."""
    wrong = []
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.Constant) and re.fullmatch(
            r"utils\.\w+\.\w+(:\w+)?", f"{node.value}"
        ):
            names = [f"{node.value}".partition(":")[0]]
        for name in names:
            top, package, *rest = [*name.split("."), "", ""]
            is_module = (ROOT / "utils" / package / f"{rest[0]}.py").is_file()
            is_module = is_module and top == "utils" and package not in ("", own, "settings")
            if is_module and f"{package}.{rest[0]}" not in listed_doors():
                wrong.append(f"{top}.{package}.{rest[0]}")
    return [*dict.fromkeys(wrong)]


def test_other_packages_are_entered_by_their_doors():
    files = [*ROOT.glob("*.py"), *ROOT.glob("extras/**/*.py"), *ROOT.glob("utils/**/*.py")]
    for path in files:
        parts = path.relative_to(ROOT).parts
        name = ".".join(parts).removesuffix(".py")
        if name not in OLD_PLACES:
            own = parts[1] if len(parts) > 2 and parts[0] == "utils" else ""
            assert past_the_door(path.read_text(), own) == [], path


def test_an_import_past_a_door_is_seen():
    assert past_the_door("from utils.data.order import Plan", "runs") == ["utils.data.order"]
    assert past_the_door("def f():\n    import utils.data.order") == ["utils.data.order"]
    assert past_the_door("from utils.data import order") == ["utils.data.order"]
    assert past_the_door("TABLE = {'x': 'utils.data.order:Plan'}") == ["utils.data.order"]
    assert past_the_door("from utils.data import Plan\nimport utils.data.csv_file") == []


def test_a_door_imports_plainly_and_each_file_has_a_line_before_it():
    for door in (ROOT / "utils").glob("*/__init__.py"):
        text = door.read_text()
        kinds = {type(node) for node in ast.parse(text).body}
        assert kinds <= {ast.Expr, ast.ImportFrom}
        lines = text.splitlines()
        imports = [n for n, line in enumerate(lines) if line.startswith("from ")]
        assert all(lines[n - 1].startswith("# ") for n in imports), door
    listed = {f"utils/{name.replace('.', '/')}.py" for name in listed_doors()}
    assert len(listed) > 10 and all((ROOT / file).is_file() for file in listed)


# Settings


def settings_of(text: str) -> set[str]:
    """The files of settings/ that a file imports."""
    nodes = [*ast.walk(ast.parse(text))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    wanted = "utils.settings"
    return {name.removeprefix(f"{wanted}.") for name in names if name.startswith(wanted)}


def wrong_settings(package: str, text: str) -> set[str]:
    """The files of settings/ that a file imports, but may not."""
    more = {"runs": {"train", "scripts"}, "training": {"train"}}.get(package, set())
    return settings_of(text) - {package, "shared"} - more


def test_a_package_knows_only_its_own_settings():
    for package in PACKAGES - {"settings"}:
        for path in (ROOT / "utils" / package).glob("*.py"):
            assert not wrong_settings(package, path.read_text()), path
    assert wrong_settings("data", "from utils.settings.models import ModelSettings") == {"models"}
    assert wrong_settings("models", "from utils.settings.train import TrainConfig") == {"train"}
    assert wrong_settings("ranks", "import utils.settings.runs") == {"runs"}


def test_few_functions_take_all_settings_and_all_have_exact_types():
    count = 0
    for package in PACKAGES:
        for path in (ROOT / "utils" / package).glob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    assert not [a.name for a in node.names if a.name == "TrainConfig" and a.asname]
                if isinstance(node, ast.FunctionDef):
                    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    hints = {arg.arg: ast.unparse(arg.annotation or arg) for arg in every}
                    hints["return"] = ast.unparse(node.returns or node.args)
                    count += package != "settings" and "TrainConfig" in str(hints)
                    of_table = package == "config" or path.name == "trackers.py"  # any class
                    assert of_table or hints.get("config") != "Any", (path, node.name)
    assert count <= 40, count


# Extras


def names_of_extras(path: Path) -> list[str]:
    """The modules of extras/ that a file names, in a statement or in a string."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    named += [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    named += [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    return [name for name in named if re.fullmatch(r"extras([.:/]\w+)*", name)]


def test_utils_never_imports_extras_and_scripts_load_only_its_init():
    assert {path: names_of_extras(path) for path in (ROOT / "utils").rglob("*.py")} == {
        path: [] for path in (ROOT / "utils").rglob("*.py")
    }
    for script in ("train.py", "eval.py"):
        assert {*names_of_extras(ROOT / script)} == {"extras"}


def test_a_planted_import_of_extras_is_seen(tmp_path):
    planted = tmp_path / "planted.py"
    for text in ("import extras", "from extras.page import html", "load('extras.page.html')"):
        planted.write_text(text)
        assert names_of_extras(planted)


# The calls of Accelerate


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """The calls of methods of an accelerator in a file:

    `accelerator.prepare(...)` as ("prepare", its node).
    """
    owners = [f"{owner}accelerator" for owner in ("", "self.", "run.", "evaluator.")]
    return [
        (node.func.attr, node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in owners
    ]


def test_train_py_calls_accelerate_in_plain_sight():
    of_train = calls(ROOT / "train.py")
    (prepare,) = [node for name, node in of_train if name == "prepare"]
    loaders = ["model", "optimizer", "train_loader", "eval_loader"]
    assert [ast.unparse(each) for each in prepare.args] == loaders and not prepare.keywords
    names = [name for name, _ in of_train]
    assert all(names.count(name) == 1 for name in ("backward", "gather", "save_state", "log"))
    for script in ("eval.py", "predict.py"):
        names = [name for name, _ in calls(ROOT / script)]
        assert names.count("prepare") == names.count("gather") == 1


def test_only_the_doctor_prepares_besides_the_scripts():
    owners = {
        path.parent
        for top in ("utils", "extras")
        for path in (ROOT / top).rglob("*.py")
        for name, _ in calls(path)
        if name.startswith("prepare") or name in ("save_state", "load_state")
    }
    assert owners == {ROOT / "extras/doctor"}


def test_train_py_is_short_and_imports_from_few_modules():
    text = (ROOT / "train.py").read_text()
    tree = ast.parse(text)
    imports = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert sum(name.startswith("utils") for name in imports) <= 15
    lines = text.splitlines()
    assert len(lines) <= 276 and max(map(len, lines)) <= 100
    assert "Accelerator" in text and "lambda" not in text and "partial" not in text
    (build,) = [node for node in tree.body if getattr(node, "name", "") == "build"]
    bound = [node for node in ast.walk(build) if isinstance(node, ast.Name) and node.id == "config"]
    # completed by the checkpoint, then by the data
    assert sum(isinstance(node.ctx, ast.Store) for node in bound) <= 2
