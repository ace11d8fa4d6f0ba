"""Options: the fields of configs. Each says once what it means, what it may be, and whether one program can sweep it."""

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, TypeVar, dataclass_transform

import jax


def traced(
    default: float | None, doc: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A float that is a pytree leaf: swept by ``vmap`` without a new compilation. ``low <= value <= high``, ``value > above``."""
    return dataclasses.field(default=default, metadata=dict(traced=True, doc=doc, low=low, high=high, above=above))


def static(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] | None = None
) -> Any:
    """A size, name or switch that fixes the program: another value is another compilation."""
    return dataclasses.field(default=default, metadata=dict(traced=False, doc=doc, low=low, high=high, choices=choices))


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(traced, static))
def config(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass whose `traced` fields are pytree leaves and whose `static` fields are structure."""
    cls.__post_init__ = check_fields  # type: ignore[attr-defined]
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    names = {kind: [f.name for f in dataclasses.fields(made) if f.metadata["traced"] == kind] for kind in (True, False)}
    return jax.tree_util.register_dataclass(made, data_fields=names[True], meta_fields=names[False])


def range_text(meta: Any) -> str:
    """The bounds or choices of a field, as in ">= 0 and <= 1"; empty without any."""
    if meta.get("choices"):
        return "one of " + ", ".join(meta["choices"])
    bounds = ((">=", meta.get("low")), ("<=", meta.get("high")), (">", meta.get("above")))
    return " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


def is_in_range(value: Any, meta: Any) -> bool:
    """Whether a number or a choice is one that its field allows."""
    low, high, above, choices = (meta.get(key) for key in ("low", "high", "above", "choices"))
    if choices is not None and value not in choices:
        return False
    return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)


def check_fields(self: Any, section: str = "algo") -> None:
    """Raises ValueError, naming the field, for a number out of its range or an unknown choice; tracers pass."""
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
        if is_plain and not is_in_range(value, field.metadata):
            raise ValueError(f"{section}.{field.name} must be {range_text(field.metadata)}, got {value!r}")


def is_number(value: Any) -> typing.TypeGuard[int | float]:
    """Whether it is a finite number that a float can hold; True and False are none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def convert(key: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` asks: whole floats pass as int, ints as float, numpy's and jax's numbers and arrays as Python's, the
    text "none" as None.

    Raises:
      ValueError: it is of another type.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(convert(key, v, item) for v in (value if isinstance(value, list | tuple) else [value]))
    if hint is float and is_number(value):
        return float(value)
    if hint is int and is_number(value) and value == int(value):
        return int(value)
    if (hint is bool and isinstance(value, bool)) or (hint is str and isinstance(value, str)):
        return value
    wanted = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}[hint]
    raise ValueError(f"{key} must be {wanted}, got {value!r}")


def check_range(key: str, value: Any, meta: Any) -> None:
    """
    Args:
      value: what `convert` returns.
      meta: of the field.

    Raises:
      ValueError: a number out of its range, an unknown choice, a size of a layer that is none.
    """
    for item in value if isinstance(value, tuple) else (value,):
        if item is not None and not is_in_range(item, meta):
            near = did_you_mean(item, list(meta["choices"])) if meta.get("choices") else ""
            raise ValueError(f"{key} must be {range_text(meta)}, got {item!r}{near}")
    if key.endswith("hidden") and (not value or min(value) < 1):
        raise ValueError(f"{key} must hold one or more positive sizes, got {list(value)}")


def did_you_mean(word: str, options: list[str]) -> str:
    """``"; did you mean 'x' or 'y'?"``, or nothing where no option is near."""
    by_lower = {option.lower(): option for option in options}
    near = [by_lower[match] for match in difflib.get_close_matches(word.lower(), by_lower, n=3, cutoff=0.55)]
    near = near or [option for option in options if word.lower() in option.lower()][:3]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
