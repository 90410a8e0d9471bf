"""Makes replies of JSON. Fields that this version does not know are ignored: a newer daemon may send more."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Optional, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import ForkdError

T = TypeVar("T")


def decode(cls: type[T], data: Any) -> T:
    """The reply `cls` of JSON. A reply that lacks a field is an error, not an object with holes.

    >>> from forkd.models import Health
    >>> decode(Health, {"ok": True, "a field of a newer daemon": 1})
    Health(ok=True)
    """
    try:
        return cast(T, _decoder(cls)(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"the daemon's reply is no {cls.__name__} ({error!r}): is this the address of forkd?"
        raise ForkdError(text) from error


def decode_list(cls: type[T], data: Any) -> list[T]:
    """A list of replies."""
    if not isinstance(data, list):
        raise ForkdError(f"the daemon's reply is no list of {cls.__name__}: is this the address of forkd?")
    return [decode(cls, item) for item in cast("list[Any]", data)]


@functools.lru_cache(maxsize=None)
def _decoder(cls: type[Any]) -> Callable[[Any], Any]:
    """A function that makes a `cls` of a JSON object: the types of its fields are looked at only once."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    converters = [(f.name, _converter(hints[f.name])) for f in fields]
    plain = frozenset(name for name, convert in converters if convert is None)
    nested = [(name, convert) for name, convert in converters if convert is not None]
    missing = dataclasses.MISSING
    required = frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing)
    defaults = {f.name: f.default for f in fields if f.default is not missing}
    factories = [(f.name, f.default_factory) for f in fields if f.default_factory is not missing]

    def make(data: Any) -> Any:
        values = {name: value for name, value in data.items() if name in plain}
        for name, convert in nested:
            value = data.get(name)
            if value is not None:
                values[name] = convert(value)
        if not required <= values.keys():
            raise KeyError(*sorted(required - values.keys()))
        # A frozen data class sets its fields one by one, which takes longer than all the rest.
        made: Any = object.__new__(cls)
        made.__dict__.update(defaults, **values)
        for name, factory in factories:
            if name not in values:
                made.__dict__[name] = factory()
        return made

    return make


def _converter(hint: Any) -> Optional[Callable[[Any], Any]]:
    """How a field of this type is made of JSON; None if JSON has the value already."""
    arguments = [a for a in get_args(hint) if a is not type(None)]
    if get_origin(hint) is list and dataclasses.is_dataclass(arguments[0]):
        item = cast("type[Any]", arguments[0])
        return lambda values: [_decoder(item)(value) for value in values]
    if get_origin(hint) is Union:
        return _converter(arguments[0])
    if dataclasses.is_dataclass(hint):
        return _decoder(cast("type[Any]", hint))
    return None
