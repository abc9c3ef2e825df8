"""Read and write settings as YAML, without aliases and duplicate keys.

`no` and `on` are strings. Executes nothing.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from utils.errors import UserError, one_line
from utils.files import read_text

_MAX_BYTES = 2**17  # a settings file usually has two or three thousand


def read_yaml(path: Path) -> Any:
    """The value in a settings file.

    Raises UserError, which names the file, if it is not valid or too large.
    """
    text = read_text(path, _MAX_BYTES)
    try:
        return load_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML ({error})") from None


def load_yaml(text: str) -> Any:
    """The value of a YAML text. Raises ValueError if the text is not valid."""
    try:
        return yaml.load(text, Loader=_Loader)
    # The others are raised for `!!bool x`, `!!timestamp x`, a number that is too long, and too deep
    # nesting.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def dump_yaml(values: dict) -> str:
    """The YAML text that `load_yaml` reads as `values`."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  as in PyYAML's classes; filled below

    def compose_node(self, parent, index):
        """Reject aliases, which can expand to more values than fit in memory."""
        if self.check_event(yaml.AliasEvent):
            raise _error("aliases (*) are not allowed; write the value out", self.peek_event())
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        """Reject duplicate keys, of which PyYAML would use the last value."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise _error(f"{key.value} is given twice; delete one", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _error(text: str, where: Any) -> yaml.YAMLError:
    """An error with the line of a yaml.Event or a yaml.Node."""
    return yaml.YAMLError(f"line {where.start_mark.line + 1}: {text}")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type; writes no aliases."""

    def ignore_aliases(self, data):
        return True


# As in YAML 1.2. PyYAML follows YAML 1.1, where `no` is false, `1e-3` is a string and 1:30 is 90.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|"
              r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+0123456789.")),
):  # fmt: skip
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first
        )
