"""Types of settings and of saved values: which values a field takes, and how a setting is saved and
resumed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields
from math import isfinite
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from utils.errors import UserError, alternatives

T = TypeVar("T")
OneStart = Annotated[T, "one start"]  # not saved with the run
Machine = Annotated[T, "machine"]  # not taken from a checkpoint, which is not trusted
Fixed = Annotated[T, "fixed"]  # a resumed run must have the same
Chosen = Annotated[T, "chosen"]  # follows from the data if it has its default; then fixed


class Bound(NamedTuple):
    """A condition on the values of a setting. An error says that the setting must be `text`."""

    text: str
    holds: Callable[[Any], Any]


def at_least(limit: int) -> Bound:
    """Numbers of at least this limit."""
    return Bound(f"at least {limit}", lambda number: number >= limit)


def at_most(limit: int) -> Bound:
    """Numbers of at most this limit."""
    return Bound(f"at most {limit}", lambda number: number <= limit)


_ABOVE_0 = Bound("above 0", lambda number: number > 0)
_BELOW_1 = Bound("below 1", lambda number: number < 1)
PositiveInt = Annotated[int, at_least(1), at_most(2**31 - 1)]
NonNegativeInt = Annotated[int, at_least(0), at_most(2**31 - 1)]
Number = Annotated[float, Bound("a finite number", isfinite)]
PositiveFloat = Annotated[Number, _ABOVE_0]
NonNegativeFloat = Annotated[Number, at_least(0)]
Probability = Annotated[NonNegativeFloat, at_most(1)]
ProbabilityBelow1 = Annotated[NonNegativeFloat, _BELOW_1]
Fraction = Annotated[PositiveFloat, at_most(1)]
FractionBelow1 = Annotated[PositiveFloat, _BELOW_1]
Count = Annotated[int, at_least(0), at_most(2**63 - 1)]
NotEmpty = Annotated[str, Bound("a name", bool)]
Arguments = dict[str, Any]  # keyword arguments, in YAML

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS = {
    bool: ["true", "false"],
    int: ["an integer"],
    float: ["a number"],
    str: ["text"],
    dict: ["'{NAME: VALUE}'"],
}
_LISTS = {int: "integers such as 160 224", float: "numbers such as 0.5 0.5 0.5", str: "names"}


def find_marked(cls: type, mark: Any) -> tuple[str, ...]:
    """The names of the settings whose type has this mark, such as `OneStart`."""
    (wanted,) = mark.__metadata__
    types = {setting.name: setting.type for setting in fields(cls)}
    return tuple(
        name for name, kind in types.items() if wanted in getattr(kind, "__metadata__", ())
    )


def check_fields(config: Any) -> None:
    """Convert the values of a settings class to the types of its fields.

    Raises UserError for one that does not fit.
    """
    for setting in fields(config):
        value = getattr(config, setting.name)
        try:
            if value is not setting.default:
                setattr(config, setting.name, fit(value, setting.type))
        except (TypeError, ValueError, OverflowError) as error:
            valid = error if isinstance(error, ValueError) else describe(setting.type)
            given = str(value)[:80] or repr(value)
            raise UserError(f"--{setting.name} must be {valid}, got {given}") from None


def read_fields(cls: Any, values: Any) -> Any:
    """A dataclass from untrusted JSON. Raises ValueError, which names the first malformed field.

    Fields are required, even if they have a default, unless their metadata has "optional". A field
    whose type is a class with `from_dict` is read by that.
    """
    values = values if isinstance(values, dict) else {}
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for each in fields(cls):
        name = each.name
        kind = hints[name]
        value = values.get(name, MISSING)
        if value is MISSING and each.metadata.get("optional"):
            continue
        try:
            found[name] = kind.from_dict(value) if hasattr(kind, "from_dict") else fit(value, kind)
        except (TypeError, OverflowError, ValueError):
            raise ValueError(f"{name!r} is missing or malformed") from None
    return cls(**found)


def exclude(config: Any, one: str, *others: str) -> None:
    """Raise UserError if the first of these settings was changed, and another one too."""
    for other in others:
        both = all(getattr(config, name) != getattr(type(config), name) for name in (one, other))
        require(not both, f"--{one} and --{other} cannot be used together", "use only one")


def require(condition: object, problem: str, fix: str = "") -> None:
    """Raise UserError with this problem and fix unless the condition holds."""
    if not condition:
        raise UserError(problem, fix)


def kinds(hint: Any) -> list[Any]:
    """The types that a type consists of, without their bounds; a list is one type."""
    hint = hint.__origin__ if get_origin(hint) is Annotated else hint
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [kind for part in parts for kind in kinds(part)] or [hint]


def describe(hint: Any) -> str:
    """The values of a type, in words."""
    words: list[str] = []
    for kind in kinds(hint):
        if get_origin(kind) is Literal:
            words += get_args(kind)
        elif get_origin(kind) is list:
            words.append(_LISTS[kinds(*get_args(kind))[0]])
        elif kind is not NoneType:
            words += _WORDS[get_origin(kind) or kind]
    return alternatives(words)


def fit(value: Any, hint: Any) -> Any:
    """The value as this type.

    Raises TypeError if it is of another, and ValueError if it is out of bounds.
    """
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin is Annotated:
        value = fit(value, parts[0])
        for bound in parts[1:]:
            if isinstance(bound, Bound) and not bound.holds(value):
                raise ValueError(bound.text)
        return value
    if origin in (Union, UnionType):
        for part in parts:
            with suppress(TypeError):
                return fit(value, part)
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [fit(item, parts[0]) for item in items]
    if origin is dict and isinstance(value, dict):
        return {fit(name, parts[0]): fit(item, parts[1]) for name, item in value.items()}
    if hint is bool:
        value = _BOOLEANS.get(str(value).lower())
    if hint is float and type(value) is int:
        value = float(value)
    if hint is Any or (value in parts if origin is Literal else type(value) is hint):
        return value
    raise TypeError
