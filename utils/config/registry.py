"""Registries: functions by name, for settings such as --optimizer whose value is a name."""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from utils.config.bounds import require
from utils.config.suggestions import suggestion
from utils.errors import UserError, one_line


class Registry(dict):
    """The functions that the setting `what` selects by name; the first line of a function's
    docstring is its help.

    The setting `what`_args, if there is one, passes arguments to the selected function, by the
    names of its parameters that have a default. `others` describes values of the setting that are
    not in the registry. An entry may be a string MODULE:NAME, which is imported at its first use.
    """

    def __init__(self, what: str, functions: dict, others: str = ""):
        super().__init__(functions)
        self.what = what
        self.others = others

    def __getitem__(self, name: str) -> Any:
        function = super().__getitem__(name)
        if isinstance(function, str):
            module, _, own = function.partition(":")
            function = getattr(import_module(module), own)
            self[name] = function
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
        return self._listed([*self])

    def call(self, config: Any, *given: Any) -> Any:
        """What the selected function returns for `given` and the arguments in the settings.

        Raises UserError if it does not accept these arguments.
        """
        function = self.choose(getattr(config, self.what))
        arguments = self._arguments(config)
        return self._attempt(config, lambda: function(*given, **arguments))

    def check(self, config: Any) -> None:
        """Raise UserError for an unknown name, an unknown argument, or a value that is not true or
        false where the default is.

        Does nothing for a registry with `others`.
        """
        if self.others:
            return
        arguments = self._arguments(config)
        name = getattr(config, self.what)
        if name is None:
            fix = f"set --{self.what} to {self.describe_values()}"
            require(not arguments, f"--{self.what}_args has no effect without --{self.what}", fix)
            return
        signature = inspect.signature(self.choose(name))
        self._attempt(config, lambda: signature.bind_partial(**arguments))
        for argument, value in arguments.items():
            parameter = signature.parameters.get(argument)
            if parameter and isinstance(parameter.default, bool):
                problem = f"{argument} must be true or false, got {value}"
                is_bool = isinstance(value, bool)  # no and off are texts, which count as true
                require(is_bool, f"--{self.what}_args for {name}: {problem}")

    def helps(self) -> dict[str, str]:
        """What --help adds to the texts of the setting and of its arguments, by the names of the
        settings.
        """
        names = []
        arguments = []
        for name in self:
            function = self[name]
            names.append(f"{name} ({_first_line(function)})")
            if optional := _with_default(function):
                arguments.append(f"{name}: {', '.join(optional)}")
        listed = "; ".join(arguments)
        return {self.what: f": {self._listed(names)}", f"{self.what}_args": f" ({listed})"}

    def _listed(self, names: list[str]) -> str:
        return ", ".join([*names, self.others] if self.others else names)

    def _attempt(self, config: Any, action: Callable[[], Any]) -> Any:
        """The result of `action`.

        If the user gave arguments, its error becomes a UserError that names their flag.
        """
        try:
            return action()
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, UserError) or not self._arguments(config):
                raise
            flag = f"--{self.what}_args for {getattr(config, self.what)}"
            fix = "change or remove these arguments"
            raise UserError(f"{flag}: {one_line(error)}", fix) from error

    def _arguments(self, config: Any) -> dict:
        return getattr(config, f"{self.what}_args", {})


def _first_line(function: Any) -> str:
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()).rstrip(".")


def _with_default(function: Any) -> list[str]:
    """The names of the parameters that have a default."""
    parameters = inspect.signature(function).parameters
    return [name for name, each in parameters.items() if each.default is not each.empty]


Registries = Sequence[Registry]
