"""From the command line to a settings dataclass: --config FILE first, then the flags; a mistake is one line."""

import difflib
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import yaml

from utils.config import Launch, TrainConfig
from utils.errors import leave, one_line, placed, speaks_for_machine

Config = TypeVar("Config")


def parse_args(cls: type[Config], prog: str, argv: Sequence[str] | None = None) -> Config:
    """Fill `cls` from --config FILE, then from the flags; a mistake ends the process with one line and code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = [word for word in argv if not re.fullmatch(r"--local[-_]rank=\d+", word)]  # of torch.distributed.launch
    try:
        files, flags = _split_config_files(argv)
        return _fill(cls, prog, files, _normalise_flags(flags, [f.name for f in fields(cls)], cls))
    except Exception as error:  # jsonargparse raises many kinds; each of them means a bad setting
        leave(placed(ValueError(_plain(one_line(error)))), prog, speaks_for_machine())


def read_config(path: Path) -> TrainConfig:
    """The settings in a file that --config reads; ValueError when it is none."""
    try:
        return _fill(TrainConfig, "train.py", [str(path)], [])
    except Exception as error:
        text = _plain(one_line(error))
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def _fill(cls: type[Config], prog: str, files: list[str], flags: list[str]) -> Config:
    names = [f.name for f in fields(cls)]
    parser, arguments = _parser(cls, prog), []
    for path in files:
        _check_config_file(path, names)
        arguments += ["--config", path]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = parser.parse_args(arguments + flags).as_dict()
    return cls(**{name: values[name] for name in names})


def _parser(cls: type, prog: str):
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=prog, description=cls.__doc__, exit_on_error=False, allow_abbrev=False)
    if cls is TrainConfig:
        parser.add_argument("--config", action="config", help="YAML file of settings, applied before all flags.")
    own = set(cls.__annotations__)  # also what it has of Launch with another default
    launch = {f.name for f in fields(Launch)} - own  # last in the help, although a base class comes first
    parser.add_class_arguments(cls, as_group=False, skip=launch)
    parser.add_class_arguments(Launch, as_group=False, skip=own)
    return parser


def _split_config_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Take every `--config FILE` out of the arguments, so that a flag beats the file wherever either stands."""
    files, rest, position = [], [], 0
    while position < len(argv):
        argument = argv[position]
        if argument == "--config":
            if position + 1 == len(argv):
                raise ValueError("--config needs a file")
            files.append(argv[position + 1])
            position += 1
        elif argument.startswith("--config="):
            files.append(argument.split("=", 1)[1])
        else:
            rest.append(argument)
        position += 1
    return files, rest


def _normalise_flags(argv: list[str], names: list[str], cls: type) -> list[str]:
    """Refuse names that are no setting, and let a bare boolean flag mean true."""
    booleans = {f.name for f in fields(cls) if f.type is bool}
    result = []
    for position, argument in enumerate(argv):
        result.append(argument)
        if not argument.startswith("--"):
            continue
        name = re.split(r"[.=+]", argument[2:])[0]
        if name not in names and argument not in ("--help", "--print_config"):
            raise ValueError(f"unknown flag --{name}{_suggestion(name, names)}")
        following = argv[position + 1] if position + 1 < len(argv) else "--"
        if name in booleans and "=" not in argument:
            if following.startswith("--"):
                result.append("true")
            elif following.lower() not in ("true", "false", "yes", "no"):
                raise ValueError(f"--{name}: expected true or false, got {following}")
    return result


def _check_config_file(path: str, names: list[str]) -> None:
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError:
        raise
    except Exception as error:  # not only YAMLError: also RecursionError, and KeyError for `!!bool x`
        raise ValueError(f"{path}: not valid YAML ({one_line(error)})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold 'name: value' lines")
    for name in values:
        if name not in names:
            raise ValueError(f"{path}: unknown setting {name!r}{_suggestion(str(name), names, prefix='')}")


def _suggestion(name: str, names: list[str], prefix: str = "--") -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists all"


def _plain(text: str) -> str:
    """jsonargparse's message without its Python types."""
    text = text.replace("arguments are required: ", "arguments are required: --")
    found = re.search(r'Parser key "([\w.]+)":\s*(.*)', text)
    if not found or found[1] == "config":
        return text
    reason = re.sub(r"<class '(\w+)'>", r"\1", found[2]).replace("typing.Literal", "one of ")
    if "Union subtypes" in reason:
        expected = [e for e in re.findall(r"- Expected an? (.+?)(?= - |\. | Given|$)", reason) if "NoneType" not in e]
        reason = f"Expected a {' or '.join(expected)}. Got value: {reason.split('Given value:')[-1].strip()}"
    return f"--{found[1]}: " + reason.replace("Expected a ", "expected ").replace(". Got value: ", ", got ")
