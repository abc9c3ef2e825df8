"""Fill a settings dataclass from --config FILE, then from the flags. An error is reported on one line."""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import yaml

from utils.config.other_names import fix_for_unknown
from utils.config.settings import LaunchConfig, TrainConfig
from utils.config.table import Table
from utils.config.yaml_text import load_yaml, read_yaml
from utils.errors import UserError, one_line
from utils.launch.exits import exit_with_error, reports_for_machine, with_rank

Config = TypeVar("Config", bound=LaunchConfig)

PATHS = "paths"  # the field for words of the command line that are not flags

# The groups of --help, by the first setting of each.
GROUPS = {
    "LaunchConfig": {"cpu": "processes and devices"},
    "TrainConfig": {
        "data": "data",
        "image_size": "input and augmentation",
        "model": "model",
        "epochs": "length and batch size",
        "optimizer": "optimizer, schedule and loss",
        "mixed_precision": "precision, speed and randomness",
        "output_dir": "run folder and checkpoints",
        "eval_every": "evaluation and log",
    },
    "EvalConfig": {"ckpt": "evaluation"},
    "PredictConfig": {"ckpt": "prediction"},
    "ExportConfig": {"ckpt": "export"},
    "ReplayConfig": {"run": "replay"},
    "DoctorConfig": {"timeout": "checks"},
}


def parse_args(cls: type[Config], prog: str, argv: Sequence[str] | None = None, tables: Sequence[Table] = ()) -> Config:
    """Fill `cls` from --config FILE, then from the flags. An error prints one line and exits with code 2.

    `tables` are those of settings whose value is a name. --help lists names and arguments, `Table.check` checks them.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # torch.distributed.launch adds this flag.
    argv = [word for word in argv if not re.fullmatch(r"--local[-_]rank=\d+", word)]
    try:
        argv, paths = _split_paths(argv, cls)
        files, flags = _split_config_files(argv)
        names = [f.name for f in fields(cls) if f.name != PATHS]
        config = _fill(cls, prog, files, _normalise_flags(flags, names, cls), tables, paths)
        for table in tables:
            table.check(config)
        return config
    except Exception as error:  # jsonargparse raises errors of many classes, all for invalid settings
        text = _simplify(one_line(error))
        word = text.partition("unrecognized arguments: ")[2]
        fix = ""
        if word:
            fix = f"to name the data, write --data {word}" if cls is TrainConfig else f"--ckpt {word} names a run"
        exit_with_error(with_rank(UserError(text, fix)), prog, reports_for_machine())


def read_config(path: Path) -> TrainConfig:
    """The settings in a --config file. Raises UserError if it is not valid."""
    try:
        return _fill(TrainConfig, "train.py", [str(path)], [])
    except Exception as error:
        text = _simplify(one_line(error))
        raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def _fill(
    cls: type[Config],
    prog: str,
    files: list[str],
    flags: list[str],
    tables: Sequence[Table] = (),
    paths: Sequence[str] = (),
) -> Config:
    names = [f.name for f in fields(cls) if f.name != PATHS]
    parser = _parser(cls, prog, tables)
    given: dict[str, Any] = {}
    for path in files:
        given |= _read_config_file(path, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = parser.parse_object(given) if given else None
        values = parser.parse_args(flags, namespace=before).as_dict()
    return cls(**{name: values[name] for name in names} | ({PATHS: list(paths)} if paths else {}))


def _parser(cls: type, prog: str, tables: Sequence[Table]):
    from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_loader, set_parsing_settings

    class Formatter(DefaultHelpFormatter):
        """Shows the default unless the help describes it, and no type."""

        def _get_help_string(self, action: argparse.Action) -> str:
            text = super()._get_help_string(action).replace(", type: %(type)s", "")
            text = text.replace("type: %(type)s, default", "default")
            return text.replace(" (default: %(default)s)", "") if action.default in (None, {}) else text

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader("lockstep", load_yaml, exceptions=(yaml.YAMLError,))  # also for strings inside a file
    options: dict[str, Any] = {
        "exit_on_error": False,
        "allow_abbrev": False,
        "parser_mode": "lockstep",
        "formatter_class": Formatter,
    }
    usage = "%(prog)s [flags]" + " PATH..." * hasattr(cls, PATHS)
    parser = ArgumentParser(prog=prog, usage=usage, description=cls.__doc__, **options)
    if cls is TrainConfig:
        parser.add_argument("--config", action="config", help="YAML file of settings, applied before all flags.")
    own = set(cls.__annotations__)  # includes settings of LaunchConfig for which `cls` has a different default
    launch = {f.name for f in fields(LaunchConfig)} - own  # the help lists these last, although their class is first
    parser.add_class_arguments(cls, as_group=False, skip={*launch, *({PATHS} & own)})
    parser.add_class_arguments(LaunchConfig, as_group=False, skip=own)
    helps = {setting: text for table in tables for setting, text in table.helps().items()}
    for action in parser._actions:
        if action.dest in helps:
            action.help = f"{str(action.help).rstrip('.')}{helps[action.dest].replace('%', '%%')}"
    _group_help(parser, cls)
    return parser


def _group_help(parser: argparse.ArgumentParser, cls: type) -> None:
    """Divide the list of --help into GROUPS."""
    titles, groups = GROUPS[cls.__name__] | GROUPS["LaunchConfig"], parser._action_groups
    listed = groups[1]._group_actions  # argparse's "options"
    first = next(index for index, action in enumerate(listed) if action.dest in titles)
    for action in listed[first:]:
        if action.dest in titles:
            parser.add_argument_group(titles[action.dest])
        groups[-1]._group_actions.append(action)
    del listed[first:]


def _split_paths(argv: list[str], cls: type) -> tuple[list[str], list[str]]:
    """Separate the words that are neither flags nor their values, and all words after `--`, if `cls` has `paths`."""
    if not hasattr(cls, PATHS):
        return argv, []
    booleans = {f"--{f.name}" for f in fields(cls) if f.type is bool}
    flags, paths, previous = list[str](), list[str](), ""
    for position, word in enumerate(argv):
        if word == "--":
            return flags, paths + argv[position + 1 :]
        is_flag = word.startswith("-")
        is_value = previous and (previous not in booleans or word in ("true", "false"))
        (flags if is_flag or is_value else paths).append(word)
        previous = word if word.startswith("--") and "=" not in word else ""
    return flags, paths


def _split_config_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Separate `--config FILE` from the flags, so that flags override files in any order on the command line."""
    files, flags, position = [], [], 0
    while position < len(argv):
        argument = argv[position]
        if argument == "--config":
            if position + 1 == len(argv):
                raise UserError("--config needs a file", "for example --config recipes/mnist.yaml")
            files.append(argv[position + 1])
            position += 1
        elif argument.startswith("--config="):
            files.append(argument.split("=", 1)[1])
        else:
            flags.append(argument)
        position += 1
    return files, flags


def _normalise_flags(argv: list[str], names: list[str], cls: type) -> list[str]:
    """Reject unknown flags, set boolean flags without a value to true, and write lists as YAML.

    A flag that takes a list of strings may be repeated; its values are joined into one list.
    """
    # The words that a boolean flag accepts besides true and false. Those that may be None need a value.
    booleans = {
        f.name: [word for part in get_args(f.type) for word in get_args(part)]
        for f in fields(cls)
        if f.type is bool or (bool in get_args(f.type) and NoneType not in get_args(f.type))
    }
    # How many numbers are a list: one, or two if the flag also takes a single number.
    kinds = {f.name: get_args(f.type) for f in fields(cls)}
    least = {
        name: 1 + (int in parts or float in parts)
        for name, parts in kinds.items()
        if list[int] in parts or list[float] in parts
    }
    _check_names(argv, names)
    texts: dict[str, list[str]] = {f.name: [] for f in fields(cls) if f.type == list[str]}
    result: list[str] = []
    skip = 0  # following words that are already part of a list
    for position, argument in enumerate(argv):
        if skip:
            skip -= 1
            continue
        result.append(argument)
        if re.match(r"-[a-zA-Z]", argument) and argument != "-h":
            raise UserError(f"unknown flag {argument[:2]}", fix_for_unknown(argument[1], names, "--"))
        if not argument.startswith("--"):
            continue
        name = _name_of(argument)
        following = argv[position + 1] if position + 1 < len(argv) else "--"
        if name in least:
            words = argv[position + 1 :] if "=" not in argument else [argument.partition("=")[2]]
            numbers = list(takewhile(_is_number, words))
            if len(numbers) >= least[name]:
                skip = len(numbers) if "=" not in argument else 0
                result[-1] = f"--{name}=[{', '.join(numbers)}]"
        if name in texts:
            words = argv[position + 1 :] if "=" not in argument else [argument.partition("=")[2]]
            words = list(takewhile(lambda word: not word.startswith(("--", "[")), words))
            if words:
                skip = len(words) if "=" not in argument else 0
                texts[name] += words
                result[-1] = f"--{name}={json.dumps(texts[name])}"
        if name in booleans and "=" not in argument:
            if following.startswith("--"):
                result.append("true")
            elif following.lower() not in ("true", "false", "yes", "no", *booleans[name]):
                expected = ", ".join(["true", *booleans[name]])
                raise UserError(f"--{name}: expected {expected} or false, got {following}")
    return result


def _check_names(argv: list[str], names: list[str]) -> None:
    """Raise UserError with a fix for each unknown flag."""
    given = [_name_of(word) for word in argv if word.startswith("--") and word not in ("--help", "--print_config")]
    unknown = [name for name in dict.fromkeys(given) if name not in names]
    fixes = [fix_for_unknown(name, names, "--") for name in unknown]
    if len(unknown) == 1:
        raise UserError(f"unknown flag --{unknown[0]}", fixes[0])
    if unknown:
        flags = ", ".join(f"--{name}" for name in unknown)
        raise UserError(
            f"unknown flags {flags}", "; ".join(f"--{n}: {fix}" for n, fix in zip(unknown, fixes, strict=True))
        )


def _name_of(flag: str) -> str:
    return re.split(r"[.=+]", flag[2:])[0]


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) is not None


def _read_config_file(path: str, names: list[str]) -> dict:
    values = read_yaml(Path(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a file of settings", "write one 'name: value' on each line")
    # A file that a run saved before format 1 has all settings, and `cpu` is the first. Then min_scale was 0.08 by
    # default and had no effect on small images.
    if next(iter(values), "") == "cpu" and "profile" in values and values.get("min_scale") == 0.08:
        values["min_scale"] = None
    if values.pop("static_graph", False):  # a setting of earlier versions
        values["find_unused_parameters"] = True
    if values.pop("format", 1) != 1:
        raise UserError(f"{path}: was written by a newer version of Lockstep", "update Lockstep")
    for name in values:
        if name not in names:
            raise UserError(f"{path}: unknown setting {name!r}", fix_for_unknown(str(name), names))
    return values


def _simplify(text: str) -> str:
    """A message of jsonargparse without the names of Python types."""
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
    ).replace("expected dict,", "expected '{NAME: VALUE}',")
