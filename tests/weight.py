"""How many tokens the code has, and how it is cut.

    python tests/weight.py             of this project
    python tests/weight.py FOLDER      of another copy

Tokens are the names, numbers, operators and strings that Python 3.12's `tokenize` gives. An
f-string is not one token: its literal parts and the tokens of its expressions count. On Python
3.11, whose `tokenize` does not look into f-strings, the numbers are the same. Comments are free.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("utils", "extras", "tests", "benchmarks")
CODE = ("scripts", "utils", "extras")  # what a ceiling is for
CORE = ("train.py", "eval.py", "utils")
MOST_LINES, MOST_COLUMNS, MOST_OF_FUNCTION = 250, 100, 50
LINES = f"lines above {MOST_COLUMNS} columns"
FUNCTIONS = f"functions above {MOST_OF_FUNCTION} lines"
CONDITIONS = "conditions in f-strings"
FILES = f"files above {MOST_LINES} lines"

_COUNTED = ("NAME", "NUMBER", "OP", "STRING", "FSTRING_MIDDLE")
_STRING = re.compile(r"([a-z]*)('''|\"\"\"|'|\")(.*)\2", re.I | re.S)


def weight(text: str) -> int:
    """The tokens of Python code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(_weight_of(tokenize.tok_name[token.type], token.string) for token in tokens)


def _weight_of(kind: str, text: str) -> int:
    if kind == "STRING" and (found := _STRING.fullmatch(text)) and "f" in found[1].lower():
        return _literals(found[3], 0, "r" in found[1].lower())[0]  # only before Python 3.12
    return int(kind in _COUNTED)


def _literals(body: str, at: int, raw: bool, in_format: bool = False) -> tuple[int, int]:
    """The tokens of an f-string without its quotes, or of the format in a field, from place `at`,
    and the place after them.
    """
    total = 0
    literal = False  # whether a literal part has begun
    while at < len(body):
        if not in_format and body[at : at + 2] in ("{{", "}}"):  # ends a literal part
            total += 1
            literal = False
            at += 2
        elif body[at] == "{":
            count, at = _field(body, at + 1, raw)
            total += literal + count
            literal = False
        elif body[at] == "}":  # the end of a format, which has a last part even if it is empty
            return total + 1, at
        else:
            literal = True
            is_name = not raw and body.startswith(r"\N{", at)  # such as \N{DASH}
            at = body.index("}", at) + 1 if is_name else at + 1
    return total + literal, at


def _field(body: str, at: int, raw: bool) -> tuple[int, int]:
    """The tokens of a field in an f-string, whose expression begins at `at`, and the place after
    it.
    """
    start = at
    depth = 0
    while depth or body[at] not in "}:!" or body.startswith("!=", at):
        if body[at] in "'\"":
            at = body.index(body[at], at + 1)
        depth += (body[at] in "([{") - (body[at] in ")]}")
        at += 1
    total = weight(f"({body[start:at]})")  # these brackets stand for the field's own
    if body[at] == "!":
        total += 2
        at += 2
    if body[at] == ":":
        count, at = _literals(body, at + 1, raw, in_format=True)
        total += 1 + count
    return total, at + 1


def conditions(tree: ast.AST) -> int:
    """The number of conditions in f-strings."""
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    kinds = (ast.IfExp, ast.BoolOp, ast.Compare)
    return len({part for each in strings for part in ast.walk(each) if isinstance(part, kinds)})


def takes_all_settings(tree: ast.AST) -> int:
    """The number of functions with a parameter that is a TrainConfig."""
    return sum("TrainConfig" in ast.unparse(each.args) for each in functions(tree))


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """The functions and methods of a file."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def excess(root: Path) -> dict[str, list[str]]:
    """The places in scripts, utils and extras that have too much of something, by what it is."""
    found: dict[str, list[str]] = {LINES: [], FUNCTIONS: [], CONDITIONS: [], FILES: []}
    for part, path in files(root):
        if part.split("/")[0] not in CODE:
            continue
        name, text = str(path.relative_to(root)), path.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        if len(lines) > MOST_LINES:
            found[FILES].append(path.name)
        for number, line in enumerate(lines, 1):
            if len(line) > MOST_COLUMNS:
                found[LINES].append(f"{name}:{number}")
        for each in functions(tree):
            if (each.end_lineno or 0) - each.lineno >= MOST_OF_FUNCTION:
                found[FUNCTIONS].append(f"{name}:{each.lineno} {each.name}")
        found[CONDITIONS] += [name] * conditions(tree)
    return found


def files(root: Path) -> Iterator[tuple[str, Path]]:
    """The Python files of the project, each with its part, such as scripts, tests or utils/data."""
    for path in root.glob("*.py"):
        yield "scripts", path
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            below = path.relative_to(root / folder).parts
            is_package = len(below) > 1 and (folder in CODE or below[0] == "gpu")
            yield f"{folder}/{below[0]}" if is_package else folder, path


def main(root: Path) -> None:
    """Print the tokens of each part of the project, and what its code has too much of."""
    weights: Counter[str] = Counter()
    core = settings = 0
    for part, path in files(root):
        text = path.read_text()
        weights[part] += weight(text)
        if path.relative_to(root).parts[0] in CORE:
            core += weight(text)
        if part.startswith("utils"):
            settings += takes_all_settings(ast.parse(text))
    for part, count in weights.most_common():
        print(f"{count:8,}  {part}")
    code = sum(count for part, count in weights.items() if part.split("/")[0] in CODE)
    print(f"{code:8,}  scripts, utils and extras; core (utils, train.py, eval.py) {core:,}")
    print(f"functions of utils that take all settings: {settings}")
    for what, places in excess(root).items():
        print(f"{what}: {len(places)}", *sorted(set(places))[:8])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
