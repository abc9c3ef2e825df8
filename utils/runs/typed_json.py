"""Read JSON values as the types of a dataclass's fields, because a checkpoint may come from a stranger."""

import dataclasses
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def parse(kind: Any, value: Any, name: str) -> Any:
    """`value` as `kind`: a dataclass, list, dict, str, bool, int (0 or above), finite float, or one of these or None.

    A dataclass may have a `check` that raises ValueError for values that no run can have.
    Fields are required, even if they have a default, unless their metadata has "optional". Raises ValueError, which
    names the field.
    """
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is UnionType:  # X | None
        return None if value is None and NoneType in inner else parse(inner[0], value, name)
    if dataclasses.is_dataclass(outer) and type(value) is dict:
        return _parse_fields(outer, value)
    if outer is list and type(value) is list:
        return [parse(inner[0], each, name) for each in value]
    if outer is dict and type(value) is dict:
        return {key: parse(inner[1], each, name) for key, each in value.items()}
    if outer is int and type(value) is int and 0 <= value < 2**63:
        return value
    if outer is float and type(value) in (int, float) and abs(value) < 2**63:  # False for NaN
        return value
    if outer in (str, bool) and type(value) is outer:
        return value
    raise ValueError(f"{name!r} is missing or malformed")


def _parse_fields(kind: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    needed = [f.name for f in dataclasses.fields(kind) if f.name in values or not f.metadata.get("optional")]
    made = kind(**{name: parse(hints[name], values.get(name, dataclasses.MISSING), name) for name in needed})
    if hasattr(made, "check"):
        made.check()
    return made
