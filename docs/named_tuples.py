"""Signatures of named tuples, whose `__init__` no source code shows."""

from typing import Any

import griffe


class NamedTuples(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if any(str(base) == "NamedTuple" for base in cls.bases):
            cls.set_member("__init__", _init(cls))


def _init(cls: griffe.Class) -> griffe.Function:
    fields = filter(_is_field, cls.attributes.values())
    parameters = griffe.Parameters(*map(_parameter, fields))
    return griffe.Function("__init__", parameters=parameters)


def _is_field(attribute: griffe.Attribute) -> bool:
    return "property" not in attribute.labels and attribute.annotation is not None


def _parameter(field: griffe.Attribute) -> griffe.Parameter:
    return griffe.Parameter(
        field.name,
        annotation=field.annotation,
        kind=griffe.ParameterKind.positional_or_keyword,
        default=field.value,
    )
