"""Fill a settings class from --config FILE, then from the flags.

An error is reported on one line.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from utils.config.bounds import require
from utils.config.flags import PATHS, Settings, make_parser
from utils.config.plugin import load_plugin
from utils.config.registry import Registries
from utils.config.suggestions import fix_for_unknown
from utils.config.yaml_text import read_yaml
from utils.errors import UserError
from utils.launch import exit_with_error, reports_for_machine, with_rank

FORMAT_FIX = "use the version of Lockstep that wrote it"

Config = TypeVar("Config", bound=Settings)


def parse_args(
    cls: type[Config], prog: str, argv: Sequence[str] | None = None, registries: Registries = ()
) -> Config:
    """Fill `cls` from --config FILE, then from the flags. An error prints one line and exits with
    code 2.

    `registries` are those of settings whose value is a name. --help lists names and arguments,
    and `Registry.check` checks them.
    """
    return parse_given(cls, prog, argv, registries)[0]


def parse_given(
    cls: type[Config], prog: str, argv: Sequence[str] | None = None, registries: Registries = ()
) -> tuple[Config, set[str]]:
    """As `parse_args`, and the names of the settings that are given, in the file or as flags.

    With --resume, registries are checked later: other settings come from a checkpoint, which may
    need a plug-in.
    """
    try:
        values = _read_words(cls, prog, list(sys.argv[1:] if argv is None else argv), registries)
        config = cls(**values)
        if not values.get("resume"):
            for registry in registries:
                registry.check(config)
        return config, set(values)
    except (ValueError, OSError, argparse.ArgumentError) as error:
        exit_with_error(with_rank(error), prog, reports_for_machine())


def _read_words(cls: type[Settings], prog: str, argv: list[str], registries: Registries) -> dict:
    """The settings that are given."""
    words, paths = _split_off_paths(argv)
    given = [word for word in words if word not in ("-h", "--help")]
    found, others = make_parser(cls, prog).parse_known_args(given)
    flags = vars(found)
    flags.pop("local_rank", None)
    file: dict = {}
    for path in flags.pop("config", []):
        file |= read_file(Path(path), cls)
    plugin = (file | flags).get("plugin")
    if plugin is not None:
        load_plugin(str(plugin))
    if given != words:
        # with the names that the plug-in adds
        make_parser(cls, prog, registries).parse_args(["--help"])
    _check_flags(others, cls)
    values = cls.merge(file, {name: _join(value) for name, value in flags.items()})
    values |= _read_paths(others + paths, cls)
    required = [each.name for each in fields(cls) if each.default is each.default_factory]
    missing = [f"--{name}" for name in required if name not in values]
    require(not missing, f"missing {', '.join(missing)}", "see --help")
    return values


def _split_off_paths(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after --. Those after it are paths, even if they begin with -."""
    if "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def _check_flags(words: list[str], cls: type[Settings]) -> None:
    """Raise UserError, with a fix for each, if any of the remaining words are flags."""
    unknown = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("-"))
    names = _names(cls)
    answers = [
        f"unknown flag {flag}; {fix_for_unknown(flag.lstrip('-'), names, '--')}" for flag in unknown
    ]
    require(not answers, "; ".join(answers))


def _read_paths(words: list[str], cls: type[Settings]) -> dict:
    """The words that are not flags, as a setting. Raises UserError if the script takes none."""
    names = _names(cls)
    if PATHS in names:
        return {PATHS: words}
    if not words:
        return {}
    word = words[0]
    is_setting = word.split("=")[0] in names
    meant = word.replace("=", " ") if is_setting else f"{cls.first_word} {word}"
    raise UserError(f"unexpected argument {word}", f"did you mean --{meant}?")


def _names(cls: type[Settings]) -> list[str]:
    return [setting.name for setting in fields(cls)]


def _join(value: Any) -> Any:
    """The value of a flag. A word of a list may have several values, such as 0.5, or 0.5,0.5."""
    if not isinstance(value, list):
        return value
    items: list = []
    for part in value:
        if isinstance(part, list):
            items += part
        else:
            items.append(part)
    return items[0] if len(items) == 1 else items


def read_file(path: Path, cls: type[Settings], older: Sequence[int] = ()) -> dict:
    """The settings in a --config file, of the format of `cls` or of `older` ones. Raises UserError
    if it is malformed, or has settings that `cls` lacks.
    """
    values = read_yaml(path)
    fix = "write one 'name: value' on each line"
    require(isinstance(values, dict), f"{path}: is not a file of settings", fix)
    problem = f"{path}: is a file for Accelerate's launcher"
    fix = "give it to that: accelerate launch --config_file FILE train.py"
    require("distributed_type" not in values, problem, fix)
    found = values.pop("format", cls.file_format)
    problem = f"{path}: has format {str(found)[:40]}, but this version reads"
    is_known = found in (cls.file_format, *older)
    require(is_known, f"{problem} format {cls.file_format}", FORMAT_FIX)
    names = _names(cls)
    for name in values:
        if name not in names:
            raise UserError(f"{path}: unknown setting {name!r}", fix_for_unknown(str(name), names))
    return values
