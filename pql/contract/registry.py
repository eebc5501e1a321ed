"""Registry of simulators by name: built in, from installed packages, or registered by the user.

It needs no torch, and runs on Python 3.8, too.

Unregistered simulators and networks are named ``module:attribute``; the module may be in the working directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pql.contract.plugins import entry_points
from pql.errors import ConfigError, nearest

_registered: dict[str, Any] = {}


def register(name: str, factory: Any) -> None:
    """Register ``factory`` under ``name`` in this process. Packages use the entry-point group ``pql.envs`` instead."""
    _registered[name] = factory


def takes(settings: type) -> Callable[[Any], Any]:
    """Decorate a method ``(self, num_envs, device, **keywords)``: the fields of the dataclass are its keywords.
    ``inspect.signature`` of the factory then shows them, and an unknown keyword is refused by name."""

    def mark(method: Any) -> Any:
        own = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
        method.__signature__ = inspect.Signature([*own, *inspect.signature(settings).parameters.values()])
        return method

    return mark


def env_names() -> list[str]:
    """Return all names that ``make_env`` accepts: built in, registered, and from installed packages."""
    from pql.envs import BUILTIN

    return sorted({*BUILTIN, *_registered, *(e.name for e in entry_points(group="pql.envs"))})


def check_name(name: str) -> None:
    """Raise ``ConfigError`` for an unknown task name. Imports nothing, and accepts any ``module:attribute``."""
    if ":" not in name and name not in env_names():
        raise ConfigError("task", name, f"one of {', '.join(env_names())}{nearest(name, env_names())}")


def check_chosen(name: str, given: Container[str], prefix: Mapping[str, str] | None = None) -> None:
    """Raise ``ConfigError`` if ``name`` is a simulator of many tasks and the keywords ``given`` choose none of them.
    ``prefix``: keyword -> prefix of its setting, for the error; the key "" holds the default."""
    from pql.envs import CHOOSES

    if name in CHOOSES and (chosen := CHOOSES[name])[0] not in given:
        keyword, example = chosen
        setting = f"{(prefix or {}).get(keyword, (prefix or {}).get('', ''))}{keyword}"
        raise ConfigError(setting, None, f"one of the tasks that {name} has, such as {setting}={example}")


def check_keywords(factory: Callable[..., Any], kwargs: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ``ConfigError`` for the first keyword that ``factory`` does not take. A factory with ``**kwargs`` checks
    its keywords itself. The error names the keyword with ``prefix`` before it."""
    taken = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return
    known = [p.name for p in taken if p.name not in ("num_envs", "device")]
    for key, value in kwargs.items():
        if key not in known:
            raise ConfigError(prefix + key, value, f"one of the keywords {', '.join(known)}{nearest(key, known)}")


def find_factory(name: str) -> Any:
    """Return the factory of a task name, or of ``module:attribute``. Raises ``ConfigError``: unknown name, or its
    simulator is not installed (the message names the package)."""
    from pql.envs import BUILTIN, EXTRA_OF, NEEDS

    if name in _registered:
        return _registered[name]
    for entry in entry_points(group="pql.envs"):
        if entry.name == name:
            return import_name("task", entry.value)
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
        needed = f"the package {error.name!r}, which is not installed: pip install 'pql-rl[{extra}]'"
        raise ConfigError("task", name, needed) from error


def import_name(setting: str, name: str) -> Any:
    """Import ``module:attribute``; the working directory is searched first. ``setting``: named by the error. Raises
    ``ConfigError``: it cannot be imported."""
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
