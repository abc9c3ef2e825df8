"""Fill a settings class from --config FILE, then from the flags.

An error is reported on one line.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from utils.config.bounds import check_fields, kinds, require
from utils.config.other_names import fix_for_unknown
from utils.config.plugin import load_plugin
from utils.config.table import Table
from utils.config.yaml_text import load_yaml, read_yaml
from utils.errors import UserError, one_line
from utils.launch import exit_with_error, reports_for_machine, with_rank

FORMAT_FIX = "use the version of Lockstep that wrote it"
PATHS = "paths"  # the field for words of the command line that are not flags
_NUMBER = re.compile(r"[-+]?\.?(\d|inf|nan)")  # how the values of numbers begin


@dataclass(kw_only=True)
class Settings:
    """The settings of a script. Each is a field with its help text below it; its type says which
    values it takes.
    """

    groups: ClassVar[dict[str, list[str]]] = {}
    """The groups of --help; the first is shown last. Settings of this class that are in no group are
    shown as flags of the script; those of its base classes must be in a group."""
    file_format: ClassVar[int | None] = None
    """The format of --config files; None if the script reads none."""
    first_word: ClassVar[str] = "ckpt"
    """The setting that a word without a flag was probably meant for."""

    def __post_init__(self):
        check_fields(self)

    @classmethod
    def merge(cls, file: dict, flags: dict) -> dict:
        """The values of --config files and of flags together."""
        return file | flags


Config = TypeVar("Config", bound=Settings)


def parse_args(
    cls: type[Config], prog: str, argv: Sequence[str] | None = None, tables: Sequence[Table] = ()
) -> Config:
    """Fill `cls` from --config FILE, then from the flags. An error prints one line and exits with
    code 2.

    `tables` are those of settings whose value is a name. --help lists names and arguments,
    `Table.check` checks them.
    """
    return parse_given(cls, prog, argv, tables)[0]


def parse_given(
    cls: type[Config], prog: str, argv: Sequence[str] | None = None, tables: Sequence[Table] = ()
) -> tuple[Config, set[str]]:
    """As `parse_args`, and the names of the settings that are given, in the file or as flags.

    With --resume, tables are checked later: others come from a checkpoint, which may need a
    plug-in.
    """
    try:
        values = _read_words(cls, prog, list(sys.argv[1:] if argv is None else argv), tables)
        config = cls(**values)
        for table in [] if values.get("resume") else tables:
            table.check(config)
        return config, set(values)
    except (ValueError, OSError, argparse.ArgumentError) as error:
        exit_with_error(with_rank(error), prog, reports_for_machine())


def _read_words(cls: type[Settings], prog: str, argv: list[str], tables: Sequence[Table]) -> dict:
    """The settings that are given."""
    names = [setting.name for setting in fields(cls)]
    # the words after it are paths, also if they begin with -
    end = argv.index("--") if "--" in argv else len(argv)
    given = [word for word in argv[:end] if word not in ("-h", "--help")]
    found, words = _parser(cls, prog).parse_known_args(given)
    vars(found).pop("local_rank", None)
    values: dict = {}
    for path in vars(found).pop("config", []):
        values |= read_file(Path(path), cls)
    if (plugin := (values | vars(found)).get("plugin")) is not None:
        load_plugin(str(plugin))
    if len(given) < end:
        _parser(cls, prog, tables).parse_args(["--help"])  # with the names that the plug-in adds
    unknown = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("-"))
    answers = [
        f"unknown flag {flag}; {fix_for_unknown(flag.lstrip('-'), names, '--')}" for flag in unknown
    ]
    require(not answers, "; ".join(answers))
    flags = {name: _join(value) for name, value in vars(found).items()}
    values = cls.merge(values, flags)
    paths = words + argv[end + 1 :]
    if PATHS in names:
        values[PATHS] = paths
    elif paths:
        word = paths[0]
        is_setting = word.split("=")[0] in names
        meant = word.replace("=", " ") if is_setting else f"{cls.first_word} {word}"
        raise UserError(f"unexpected argument {word}", f"did you mean --{meant}?")
    required = [each.name for each in fields(cls) if each.default is each.default_factory]
    missing = [f"--{name}" for name in required if name not in values]
    require(not missing, f"missing {', '.join(missing)}", "see --help")
    return values


def _parser(
    cls: type[Settings], prog: str, tables: Sequence[Table] = ()
) -> argparse.ArgumentParser:
    """The parser of the flags. It also writes --help, with the names in the tables."""
    settings = {setting.name: setting for setting in fields(cls)}
    has_paths = settings.pop(PATHS, None) is not None
    parser = argparse.ArgumentParser(
        prog,
        "%(prog)s [flags]" + " PATH..." * has_paths,
        cls.__doc__,
        exit_on_error=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser._negative_number_matcher = _NUMBER  # argparse would take -1e-3 and -0.1,0.2 for flags
    # of torch.distributed.launch
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    if cls.file_format is not None:
        parser.add_argument(
            "--config", action="append", help="YAML file of settings, applied before all flags."
        )
    more = {name: text for table in tables for name, text in table.helps().items()}
    texts = _texts_of(cls)
    listed = {name for names in cls.groups.values() for name in names}
    own = [name for name in inspect.get_annotations(cls) if name in settings.keys() - listed]
    first, *others = (cls.groups | {f"flags of {prog}": own}).items()
    for title, names in [*others, first]:
        section = parser.add_argument_group(title)
        for name in names:
            text = texts[name].rstrip(".") + more[name] if name in more else texts[name]
            words = _words(settings[name], alone=has_paths)
            section.add_argument(f"--{name}", help=_help(text, settings[name]), **words)
    return parser


def _texts_of(cls: type) -> dict[str, str]:
    """The help texts of the settings; a script may describe one differently."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            texts |= _texts(base.__module__)[base.__name__]
    return texts


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """The help texts of the settings classes in a module, which stand below their fields."""
    return {
        group.name: {
            ast.unparse(field.target): " ".join(text.value.value.split())  # type: ignore[attr-defined]
            for field, text in pairwise(group.body)
            if isinstance(field, ast.AnnAssign)
        }
        for group in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(group, ast.ClassDef)
    }


def _help(text: str, setting: Field) -> str:
    """The help text, with the default if there is one that the text does not describe."""
    default = setting.default
    if isinstance(default, int | float | str) and default != "" and "(default:" not in text:
        text += f" (default: {str(default).lower()})"
    return text.replace("%", "%%")


def _words(setting: Field, alone: bool) -> dict:
    """How many words the flag takes, and their type: text, or YAML.

    With `alone`, boolean flags take none.
    """
    types = kinds(setting.type)
    text = str in types or list[str] in types
    options = {"type": _text if text else _yaml}
    if any(get_origin(kind) is list for kind in types):
        # names may be given one by one
        return options | {"nargs": "+"} | ({"action": "extend"} if text else {})
    if bool in types:
        return {"action": "store_true"} if alone else options | {"nargs": "?", "const": True}
    words = [word for kind in types if get_origin(kind) is Literal for word in get_args(kind)]
    return options | ({"metavar": f"{{{'|'.join(words)}}}"} if words and int not in types else {})


def _join(value: Any) -> Any:
    """The value of a flag. A word of a list may have several values, such as 0.5, or 0.5,0.5."""
    if not isinstance(value, list):
        return value
    items = [item for part in value for item in (part if isinstance(part, list) else [part])]
    return items if len(items) != 1 else items[0]


def _yaml(word: str) -> Any:
    try:
        # such as 11,5
        return load_yaml(f"[{word}]" if "," in word and _NUMBER.match(word) else word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(one_line(error)) from None


def _text(word: str) -> Any:
    return _yaml(word) if word in ("null", "None") or word.startswith("[") else word


def read_file(path: Path, cls: type[Settings]) -> dict:
    """The settings in a --config file. Raises UserError if it is malformed, or has settings that
    `cls` lacks.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: is not a file of settings", "write one 'name: value' on each line"
        )
    if (found := values.pop("format", cls.file_format)) != cls.file_format:
        problem = (
            f"{path}: has format {str(found)[:40]}, but this version reads format {cls.file_format}"
        )
        raise UserError(problem, FORMAT_FIX)
    names = [setting.name for setting in fields(cls)]
    for name in values:
        if name not in names:
            raise UserError(f"{path}: unknown setting {name!r}", fix_for_unknown(str(name), names))
    return values
