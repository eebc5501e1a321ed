"""Declarations of settings: default, range or choices, description and condition, next to the definition.

Validation, ``--help``, completion, the reference page and the bounds of a sweep all read these declarations.
"""

import copy
import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pql.errors import ConfigError, nearest, show

KEY = "pql"  # of a dataclass field's metadata


class Range(NamedTuple):
    """Allowed numbers: from ``low`` (or above it) up to ``high``."""

    low: float
    high: float
    inclusive: bool = True

    def check(self, name: str, value: float | None) -> None:
        """Raise ``ConfigError`` for a number out of range. None passes: the type check decides."""
        if value is None:
            return
        if not ((self.low <= value if self.inclusive else self.low < value) and value <= self.high):
            raise ConfigError(name, value, f"a number {self}")

    def __str__(self) -> str:
        return f"{'from' if self.inclusive else 'above'} {self.low} up to {self.high}"


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Metadata of a setting in addition to its name, type and default.

    Attributes:
        doc: one sentence.
        range: of a number.
        choices: of a text.
        when: the condition under which it is read, see :func:`is_read`; "": always.
        replaces: settings of other algorithms that have the same purpose; a wrong name is answered with this one.
        ranks: how several processes of one run divide it: "divide" (evenly), "floor", or "" (they do not).
        weights: ``init_from`` refuses a run in which this setting differs, for its "policy" or "critic"; "": never.
        live: a resumed run may change it: updates read it, and nothing that is saved depends on it.
    """

    doc: str = ""
    range: Range | None = None
    choices: tuple[str, ...] = ()
    when: str = ""
    replaces: tuple[str, ...] = ()
    ranks: str = ""
    weights: str = ""
    live: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ``ConfigError`` for a value that is not allowed."""
        if self.choices and value not in self.choices:
            raise ConfigError(name, value, f"one of {', '.join(self.choices)}{nearest(str(value), self.choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, value, "a finite number")
        if self.range is not None:
            self.range.check(name, value)


def setting(
    default: Any,
    doc: str = "",
    *,
    low: float | None = None,
    above: float | None = None,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    when: str = "",
    replaces: tuple[str, ...] = (),
    ranks: str = "",
    weights: str = "",
    live: bool = False,
) -> Any:
    """Return a dataclass field for a setting.

    Args:
        low, above, high: of a number: inclusive lower bound, exclusive lower bound, inclusive upper bound.

    Others as in :class:`Declaration`.
    """
    limits = None
    if low is not None or above is not None:
        limits = Range(low if low is not None else above, high, low is not None)  # type: ignore[arg-type]
    return _field(default, Declaration(doc, limits, choices, when, replaces, ranks, weights, live))


def like(record: type, name: str, default: Any = dataclasses.MISSING, **changes: Any) -> Any:
    """Return a dataclass field for a setting that ``record`` declares.

    Args:
        default: another default.
        changes: other attributes of its :class:`Declaration`.
    """
    field = {one.name: one for one in dataclasses.fields(record)}[name]
    value = getattr(record(), name) if default is dataclasses.MISSING else default
    return _field(value, dataclasses.replace(field.metadata[KEY], **changes))


def _field(default: Any, declaration: Declaration) -> Any:
    metadata = {KEY: declaration}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(record: type, doc: str = "", replaces: tuple[str, ...] = (), **defaults: Any) -> Any:
    """Return a dataclass field for a group of settings; ``defaults`` override those of ``record``."""
    metadata = {KEY: Declaration(doc, replaces=replaces)}
    return dataclasses.field(default_factory=lambda: record(**defaults), metadata=metadata)


_types: dict[type, Mapping[str, Any]] = {}


def types_of(record: type) -> Mapping[str, Any]:
    """Return the declared types of a record's settings and groups, by name."""
    if record not in _types:  # evaluating every annotation is slow
        _types[record] = typing.get_type_hints(record)
    return _types[record]


class Setting(NamedTuple):
    """A setting of a configuration: dotted name, value, declaration, and the record that it is a field of."""

    name: str
    value: Any
    declaration: Declaration
    record: Any


def settings(record: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a record and its groups."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        else:
            yield Setting(prefix + field.name, value, field.metadata.get(KEY, Declaration()), record)


def instead_of(record: Any, name: str, prefix: str = "") -> str | None:
    """Return the setting or group of ``record`` declared as the replacement of ``name``, if any."""
    for field in dataclasses.fields(record):
        replaces = field.metadata.get(KEY, Declaration()).replaces
        if any(name == other or name.startswith(f"{other}.") for other in replaces):
            return prefix + field.name
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value) and (found := instead_of(value, name, f"{prefix}{field.name}.")):
            return found
    return None


def reads(config: Any, name: str) -> bool:
    """Return True if a configuration has the setting ``name``."""
    return any(found.name == name for found in settings(config))


CONDITION = re.compile(r"(?P<name>[\w.]+?)(?P<test>=|>|$)(?P<values>.*)")


def is_read(config: Any, found: Setting) -> bool:
    """Return True if a setting's condition holds. A condition is ``name`` (neither null nor false), ``name=a|b`` (one
    of these) or ``name>0``; ``name`` is a field of the same record, or, with a dot at the beginning, a dotted name from
    the root: ``.algo.optimizer=adam``."""
    if not found.declaration.when:
        return True
    value, match = _condition(config, found), _parts(found)
    if match["test"] == "":
        return value is not None and value is not False
    if match["test"] == ">":
        return value is not None and value > float(match["values"])
    return show(value) in match["values"].split("|")


def condition_text(found: Setting) -> str:
    """Return a setting's condition as readable text with full names: ``algo.priority.alpha above 0``."""
    match, parent = _parts(found), found.name.rpartition(".")[0] + "."
    name = match["name"] if found.declaration.when.startswith(".") else parent + match["name"]
    if match["test"] == "":
        return f"{name}=true" if isinstance(_condition(None, found), bool) else name
    if match["test"] == ">":
        return f"{name} above {match['values']}"
    return f"{name}={match['values'].replace('|', ' or ')}"


def _parts(found: Setting) -> re.Match[str]:
    match = CONDITION.fullmatch(found.declaration.when.removeprefix("."))
    assert match is not None, found.declaration.when
    return match


def _condition(config: Any, found: Setting) -> Any:
    """Return the value that a setting's condition tests."""
    value = config if found.declaration.when.startswith(".") else found.record
    for part in _parts(found)["name"].split("."):
        value = getattr(value, part)
    return value
