"""Things by name: simulators of this library, of installed packages and of yours. Knows no torch, and imports none.

``module:attribute`` names what nobody has registered, for simulators and networks alike; its module may lie in the
working directory.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from pql.errors import ConfigError, nearest

_registered: dict[str, Any] = {}


def register(name: str, factory: Any) -> None:
    """Make ``factory`` available under ``name`` in this process (packages use the entry-point group ``pql.envs``)."""
    _registered[name] = factory


def env_names() -> list[str]:
    """All names ``make_env`` knows: built in, registered here, and from installed packages."""
    from pql.envs import BUILTIN

    return sorted({*BUILTIN, *_registered, *(e.name for e in entry_points(group="pql.envs"))})


def check_name(name: str) -> None:
    """Raises ``ConfigError`` for a task that nobody knows, without looking at those that somebody does."""
    if ":" not in name and name not in env_names():
        raise ConfigError("task", name, f"one of {', '.join(env_names())}{nearest(name, env_names())}")


def check_chosen(name: str, given: Container[str], prefix: Mapping[str, str] | None = None) -> None:
    """Raises ``ConfigError`` where ``name`` is a simulator of many tasks and the keywords ``given`` choose none.

    Args:
        prefix: what the user writes before a keyword; "" stands for all others.
    """
    from pql.envs import CHOOSES

    if name in CHOOSES and (chosen := CHOOSES[name])[0] not in given:
        keyword, example = chosen
        setting = f"{(prefix or {}).get(keyword, (prefix or {}).get('', ''))}{keyword}"
        raise ConfigError(setting, None, f"one of the tasks that {name} has, such as {setting}={example}")


def find_factory(name: str) -> Any:
    """Resolve a task name, or ``module:attribute`` of what nobody has registered.

    Raises:
        ConfigError: no such name, or its simulator is not installed (the message says what to install).
    """
    from pql.envs import BUILTIN, EXTRA_OF, NEEDS

    if name in _registered:
        return _registered[name]
    for entry in entry_points(group="pql.envs"):
        if entry.name == name:
            return entry.load()
    if ":" in name:
        return import_name("task", name)
    check_name(name)
    if not all(importlib.util.find_spec(package) for package in NEEDS.get(name, ())):
        where = "a Python that has it (docs/simulators.md): task.process.python=PATH"
        raise ConfigError("task", name, f"the whole package {NEEDS[name][0]!r}, or {where}")
    module, _, attribute = BUILTIN[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get(module)
        if extra is None or (error.name or "").startswith("pql"):
            raise
        raise ConfigError(
            "task", name, f"the package {error.name!r}, which is not installed: pip install 'pql-rl[{extra}]'"
        ) from error


def import_name(setting: str, name: str) -> Any:
    """``module:attribute``, looked for in the working directory too.

    Raises:
        ConfigError: it cannot be imported; ``setting`` is where it was asked for.
    """
    module, _, attribute = name.partition(":")
    try:
        if odd := [part for part in (*module.split("."), *attribute.split(".")) if not part.isidentifier()]:
            raise ValueError(f"{odd[0]!r} is no name in Python")
        with _working_directory_first():
            found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        where = "module:attribute of a module that can be imported here, the working directory included"
        raise ConfigError(setting, name, f"{where} ({error})") from error
    return found


@contextmanager
def _working_directory_first() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
