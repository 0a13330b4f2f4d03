"""What a JSON file that we once wrote must hold, checked once where it is read. Imports no torch."""

import sys
from collections.abc import Iterable
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

_MOST = {int: 2**53, float: sys.float_info.max}  # no count or size of ours is larger; nothing is infinite
_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "list", dict: "object"}


def misfit(value: Any, kind: Any, name: str) -> str | None:
    """What is wrong with a JSON value called `name`, in words; None where it is of `kind`.

    Kinds: int, float, str, bool, list, dict, X | None, Literal, list[X], tuple[X, Y], tuple[X, ...], dict[str, X], a
    TypedDict or a dataclass. A tuple passes for a list, as it is written as one. A field that may be None, or has a
    default, may be missing; fields not named there are let through. Numbers are finite and integers at most 2**53; an
    integer passes for a float, true and false for no number.
    """
    if _is_number(value, _number_types(kind)):  # first: most of what is read is numbers
        return None
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        found = [misfit(value, one, name) for one in inner if one is not NoneType]
        return None if None in found else found[0]
    if origin is Literal:
        return None if value in inner else f"{name} is none of {', '.join(map(str, inner))}"
    if is_typeddict(kind) or is_dataclass(kind):
        return _misfit_of_object(value, kind, name)
    plain = list if origin is tuple else origin or kind
    if kind is not Any and (plain in (int, float) or not isinstance(value, (list, tuple) if plain is list else plain)):
        return f"{name} is no {_NAMES[plain]}"
    if origin is tuple and inner[-1] is not ... and len(value) != len(inner):
        return f"{name} has {len(value)} entries instead of {len(inner)}"
    parts: Iterable[tuple[str, Any, Any]] = ()
    if origin is tuple and inner[-1] is not ...:
        parts = ((f"[{i}]", v, k) for i, (v, k) in enumerate(zip(value, inner, strict=True)))
    elif origin in (list, tuple):
        numbers = _number_types(inner[0])
        parts = ((f"[{i}]", v, inner[0]) for i, v in enumerate(value) if not _is_number(v, numbers))
    elif origin is dict:
        parts = ((f".{key}", v, inner[1]) for key, v in value.items())
    return next((wrong for where, v, k in parts if (wrong := misfit(v, k, name + where)) is not None), None)


def _is_number(value: Any, types: frozenset[type]) -> bool:
    return type(value) in types and (value is None or abs(value) <= _MOST[type(value)])


@cache
def _number_types(kind: Any) -> frozenset[type]:
    """Types of the values of a kind that is a number, or a number or None; none for other kinds."""
    types = {int: {int}, float: {int, float}, NoneType: {NoneType}}
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if kind is NoneType or not all(part in types for part in parts):
        return frozenset()
    return frozenset[type]().union(*(types[part] for part in parts))


def _misfit_of_object(value: Any, kind: Any, name: str) -> str | None:
    if not isinstance(value, dict):
        return f"{name} is no object"
    for key, (hint, numbers, optional) in _fields(kind).items():
        if key not in value:
            if not optional:
                return f"{name}.{key} is missing"
        elif not _is_number(value[key], numbers) and (wrong := misfit(value[key], hint, f"{name}.{key}")) is not None:
            return wrong
    return None


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, frozenset[type], bool]]:
    """Name -> kind, the same as types of numbers, whether it may be missing."""
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        may = set(hints) - kind.__required_keys__
    else:
        may = {f.name for f in dataclass_fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}
    return {
        name: (hint, _number_types(hint), name in may or NoneType in get_args(hint)) for name, hint in hints.items()
    }
