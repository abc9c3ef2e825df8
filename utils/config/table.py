"""Tables: functions by name, for settings such as --optimizer whose value is a name."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from utils.config.bounds import require
from utils.errors import UserError, one_line


class Table(dict):
    """The functions that the setting `what` selects by name; the first line of a function's
    docstring is its help.

    The setting `what`_args, if there is one, passes arguments to the selected function, by the
    names of its parameters that have a default. `trial(config)` raises an error if these arguments
    have invalid values. `others` describes values of the setting that are not in the table. A
    function may be a text MODULE:NAME, which TABLE[name] imports at the first use.
    """

    def __init__(
        self,
        what: str,
        functions: dict,
        others: str = "",
        trial: Callable[[Any], object] | None = None,
    ):
        super().__init__(functions)
        self.what = what
        self.others = others
        self.trial = trial

    def __getitem__(self, name: str) -> Any:
        function = super().__getitem__(name)
        if isinstance(function, str):
            module, _, own = function.partition(":")
            self[name] = function = getattr(import_module(module), own)
        return function

    def choose(self, name: str) -> Any:
        """The function of this name.

        Raises UserError, which suggests a similar name or lists all.
        """
        if name not in self:
            problem = f"--{self.what} {name}: no such {self.what.replace('_', ' ')}"
            raise UserError(problem, suggestion(name, self, f"use {self.describe_values()}"))
        return self[name]

    def describe_values(self) -> str:
        """All values of the setting, on one line."""
        return ", ".join([*self, self.others] if self.others else self)

    def call(self, config: Any, *given: Any) -> Any:
        """What the selected function returns for `given` and the arguments in the settings.

        Raises UserError if it does not accept these arguments.
        """
        function = self.choose(getattr(config, self.what))
        arguments = self._arguments(config)
        return self._attempt(config, lambda: function(*given, **arguments))

    def check(self, config: Any) -> None:
        """Raise UserError for an unknown name or invalid arguments.

        Does nothing for a table with `others`.
        """
        if self.others:
            return
        if getattr(config, self.what) is None:
            used = self._arguments(config)
            fix = f"set --{self.what} to {self.describe_values()}"
            require(not used, f"--{self.what}_args has no effect without --{self.what}", fix)
            return
        function = self.choose(getattr(config, self.what))
        arguments = self._arguments(config)
        parameters = inspect.signature(function).parameters
        defaults = _defaults(parameters)
        flag = self._flag(config)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name, value in arguments.items():
            if name in defaults:
                problem = f"{name} must be a value such as {defaults[name]}, got {value}"
                require(_fits(value, defaults[name]), f"{flag}: {problem}")
                continue
            problem = f"{flag}: {name} is set by --{name}"
            require(not hasattr(config, name), problem, "leave it out here")
            none = "remove it, this function takes no arguments"
            fix = suggestion(name, defaults, f"use {', '.join(defaults)}" if defaults else none)
            require(takes_any, f"{flag}: unknown argument {name}", fix)
        if arguments and (trial := self.trial):
            self._attempt(config, lambda: trial(config))

    def helps(self) -> dict[str, str]:
        """What --help adds to the texts of the setting and of its arguments, by the names of the
        settings.
        """
        names = [f"{name} ({_first_line(self[name])})" for name in self]
        takes = {
            name: ", ".join(_defaults(inspect.signature(self[name]).parameters)) for name in self
        }
        arguments = "; ".join(f"{name}: {valid}" for name, valid in takes.items() if valid)
        values = ", ".join([*names, self.others] if self.others else names)
        return {self.what: f": {values}", f"{self.what}_args": f" ({arguments})"}

    def _attempt(self, config: Any, action: Callable[[], Any]) -> Any:
        """The result of `action`.

        If the user gave arguments, its error becomes a UserError that names their flag.
        """
        try:
            return action()
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, UserError) or not self._arguments(config):
                raise
            raise UserError(
                f"{self._flag(config)}: {one_line(error)}", "change or remove these arguments"
            ) from error

    def _arguments(self, config: Any) -> dict:
        return getattr(config, f"{self.what}_args", {})

    def _flag(self, config: Any) -> str:
        return f"--{self.what}_args for {getattr(config, self.what)}"


def suggestion(name: str, names: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """The fix for a name that does not exist: up to four similar valid names, or `otherwise`.

    The first of these that exist: the name in another spelling, names that begin with it, contain
    it, or resemble it.
    """
    given = re.sub(r"[-\s]", "_", name.lower())
    known = {known.lower(): known for known in names}
    similar = (
        [given] if given in known else [word for word in known if given and word.startswith(given)]
    )
    similar = similar or [word for word in known if len(given) > 2 and given in word]
    similar = similar or get_close_matches(given, known, n=1)
    *others, last = [prefix + known[word] for word in similar[:4]] or [""]
    if not last:
        return otherwise
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def _first_line(function: Any) -> str:
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()).rstrip(".")


def _defaults(parameters: Any) -> dict:
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _fits(value: Any, default: Any) -> bool:
    """Whether a value from a YAML text can stand for the default of a parameter."""
    if type(default) is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if isinstance(default, tuple):
        return isinstance(value, list)
    return default is None or type(value) is type(default)
