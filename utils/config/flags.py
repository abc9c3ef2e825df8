"""A class of settings as flags: their parser, and --help."""

import argparse
import ast
import inspect
import re
import sys
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args, get_origin

from utils.config.bounds import check_fields, kinds
from utils.config.registry import Registries
from utils.config.yaml_text import load_yaml
from utils.errors import one_line

PATHS = "paths"  # the field for words of the command line that are not flags
_NUMBER = re.compile(r"[-+]?\.?(\d|inf|nan)")  # how the values of numbers begin


@dataclass(kw_only=True)
class Settings:
    """The settings of a script. Each is a field with its help text below it; its type says which
    values it takes.
    """

    groups: ClassVar[dict[str, list[str]]] = {}
    """The groups of --help; the first is shown last. Settings of this class that are in no group
    are shown as flags of the script; those of its base classes must be in a group."""
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


def make_parser(
    cls: type[Settings], prog: str, registries: Registries = ()
) -> argparse.ArgumentParser:
    """The parser of the flags. It also writes --help, with the names in the registries."""
    settings = {setting.name: setting for setting in fields(cls)}
    has_paths = settings.pop(PATHS, None) is not None
    parser = argparse.ArgumentParser(
        prog,
        "%(prog)s [flags] PATH..." if has_paths else "%(prog)s [flags]",
        cls.__doc__,
        exit_on_error=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser._negative_number_matcher = _NUMBER  # argparse would take -1e-3 and -0.1,0.2 for flags
    # torch.distributed.launch adds it
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    if cls.file_format is not None:
        parser.add_argument(
            "--config", action="append", help="YAML file of settings, applied before all flags."
        )
    more = {name: text for registry in registries for name, text in registry.helps().items()}
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
            ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
            for field, text in pairwise(group.body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
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
    if alone and bool in types:
        return {"action": "store_true"}
    is_text = str in types or list[str] in types
    options: dict = {"type": _text if is_text else _yaml}
    choices = [word for kind in types if get_origin(kind) is Literal for word in get_args(kind)]
    if any(get_origin(kind) is list for kind in types):
        options["nargs"] = "+"
        if is_text:  # names may be given one by one
            options["action"] = "extend"
    elif bool in types:
        options |= {"nargs": "?", "const": True}
    elif choices and int not in types:
        options["metavar"] = "{" + "|".join(choices) + "}"
    return options


def _yaml(word: str) -> Any:
    is_list = "," in word and _NUMBER.match(word)  # such as 11,5
    try:
        return load_yaml(f"[{word}]" if is_list else word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(one_line(error)) from None


def _text(word: str) -> Any:
    return _yaml(word) if word in ("null", "None") or word.startswith("[") else word
