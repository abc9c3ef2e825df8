"""From the command line to a settings dataclass: --config FILE first, then the flags; a mistake is one line."""

import difflib
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import yaml

from utils.config.settings import Launch, TrainConfig
from utils.config.yaml_text import load_yaml, read_yaml
from utils.errors import one_line
from utils.launch.exits import exit_with_error, reports_for_machine, with_rank

Config = TypeVar("Config")


def parse_args(cls: type[Config], prog: str, argv: Sequence[str] | None = None) -> Config:
    """Fill `cls` from --config FILE, then from the flags; a mistake ends the process with one line and code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = [word for word in argv if not re.fullmatch(r"--local[-_]rank=\d+", word)]  # of torch.distributed.launch
    try:
        files, flags = _split_config_files(argv)
        return _fill(cls, prog, files, _normalise_flags(flags, [f.name for f in fields(cls)], cls))
    except Exception as error:  # jsonargparse raises many kinds; each of them means a bad setting
        exit_with_error(with_rank(ValueError(_plain(one_line(error)))), prog, reports_for_machine())


def read_config(path: Path) -> TrainConfig:
    """The settings in a file that --config reads; ValueError when it is none."""
    try:
        return _fill(TrainConfig, "train.py", [str(path)], [])
    except Exception as error:
        text = _plain(one_line(error))
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def _fill(cls: type[Config], prog: str, files: list[str], flags: list[str]) -> Config:
    names = [f.name for f in fields(cls)]
    parser, given = _parser(cls, prog), {}
    for path in files:
        given |= _read_config_file(path, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = parser.parse_object(given) if given else None
        values = parser.parse_args(flags, namespace=before).as_dict()
    return cls(**{name: values[name] for name in names})


def _parser(cls: type, prog: str):
    from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader("lockstep", load_yaml, exceptions=(yaml.YAMLError,))  # also for strings inside a file
    options = {"exit_on_error": False, "allow_abbrev": False, "parser_mode": "lockstep"}
    parser = ArgumentParser(prog=prog, description=cls.__doc__, **options)
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
    """Refuse unknown flags. A bare boolean flag means true; the numbers after a list flag are its values."""
    booleans = {f.name for f in fields(cls) if f.type is bool}
    lists = {f.name for f in fields(cls) if f.type == list[float] | None}
    result, of_list = [], 0
    for position, argument in enumerate(argv):
        if of_list:
            of_list -= 1
            continue
        result.append(argument)
        if not argument.startswith("--"):
            continue
        name = re.split(r"[.=+]", argument[2:])[0]
        if name not in names and argument not in ("--help", "--print_config"):
            raise ValueError(f"unknown flag --{name}{_suggestion(name, names)}")
        following = argv[position + 1] if position + 1 < len(argv) else "--"
        if name in lists:
            words = argv[position + 1 :] if "=" not in argument else [argument.partition("=")[2]]
            numbers = list(takewhile(_is_number, words))
            if numbers:
                of_list = len(numbers) if "=" not in argument else 0
                result[-1] = f"--{name}=[{', '.join(numbers)}]"
        if name in booleans and "=" not in argument:
            if following.startswith("--"):
                result.append("true")
            elif following.lower() not in ("true", "false", "yes", "no"):
                raise ValueError(f"--{name}: expected true or false, got {following}")
    return result


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) is not None


def _read_config_file(path: str, names: list[str]) -> dict:
    values = read_yaml(Path(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold 'name: value' lines")
    for name in values:
        if name not in names:
            raise ValueError(f"{path}: unknown setting {name!r}{_suggestion(str(name), names, prefix='')}")
    return values


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
    return f"--{found[1]}: " + reason.replace("Expected a ", "expected ").replace(". Got value: ", ", got ").replace(
        "expected list,", "expected numbers, such as 0.5 0.5 0.5,"
    )
