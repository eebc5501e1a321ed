"""Settings that can make a run import a module, start a program or access a file.

Typed by the user they are the user's own. In a file (a run directory, a checkpoint, an export) they are its maker's,
and refused, unless the user says ``--trust`` or types the same setting again: ``docs/security.md``.
"""

import os
import re
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pql.config import Config, leaves
from pql.errors import ConfigError

PYTHON = "task.process.python"
NETWORKS = ("algo.policy.net", "algo.critic.net")
NAMING = (PYTHON, "task.name", "task.id", "task.game", "task.model", "task.kwargs", "task.remote", *NETWORKS)
"""Settings that can name these."""
FILES = ("replay.demos", "algo.teacher")  # that a resumed run reads
FOREIGN_KEYWORDS = {"isaacgym": ("overrides",)}  # keywords read by the configuration of another program

OWN_FOLDERS = ("checkpoints", "dumps", "evaluations", "export", "report", "tensorboard", "videos")
"""Folders of a run directory from which pql reads, or to which it writes."""
TRACKERS = ("swanlab", "wandb")  # folders of other programs in which pql has one file: ``trackers.own_id``

TEXT = re.compile(r"(?!.*\.\.)([\w.+(\[-][\w .,;+=()\[\]'!?%*<>&/-]*)?")
"""Texts that a file may give to a task. Without ``:`` nothing can be imported: all that import by name split there.
Nor is any of these an absolute path, or one that leads upwards."""
HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d{1,5}")  # addresses reachable only from this machine


def names_code(setting: str) -> bool:
    """Return True if ``setting`` can name a module, program or file."""
    return any(setting == name or setting.startswith(f"{name}.") for name in NAMING)


def check_task(config: Config, source: object, given: Collection[str] = ()) -> None:
    """Check the task of a config that was read from ``source``. ``given``: settings that the user typed, which are not
    looked at. Raises ``ConfigError``: the first setting that names code, a program or a file, and how to allow it."""
    _refuse(_of_task(config), source, given)


def check_networks(config: Config, source: object, given: Collection[str] = ()) -> None:
    """Check the networks of a config that was read from ``source``. Arguments and errors as for :func:`check_task`."""
    nets = ((name, net) for name, net in leaves(config) if name in NETWORKS)
    _refuse(((name, net) for name, net in nets if net is not None and ":" in net), source, given)


def check_files(config: Config, source: object, given: Collection[str] = ()) -> None:
    """Check the files that a resumed run reads: demonstrations, a teacher. Arguments and errors as for
    :func:`check_task`."""
    _refuse(((name, path) for name, path in leaves(config) if name in FILES and path is not None), source, given)


def names_foreign_code(config: Config) -> bool:
    """Return True if a run with this configuration is refused without ``--trust`` when it is read from a file."""
    try:
        check_task(config, "")
        check_networks(config, "")
        check_files(config, "")
    except ConfigError:
        return True
    return False


def check_links(run: Path, *names: str) -> None:
    """Raises ``ConfigError`` for a symbolic link out of a run directory where a command is about to read or write: in a
    run of somebody else it would lead astray.

    Args:
        names: of the folders that it writes to; none: all that a run writes. Folders of loggers, which make links of
            their own, are not looked through; pql writes nothing through those.
    """
    inside = run.resolve()
    folders = [inside / name for name in names or OWN_FOLDERS]
    used = (*OWN_FOLDERS, *TRACKERS)
    top = [] if names else [path for path in inside.iterdir() if path.name in used or not path.is_dir()]
    walks = (os.walk(folder) for folder in folders)
    below = (Path(root) / name for walk in walks for root, *parts in walk for name in (*parts[0], *parts[1]))
    for path in chain(folders, top, below):
        if path.is_symlink() and _leads_astray(path.resolve(), inside):
            what = f"a run directory without links to elsewhere; {path} is one. --trust (report: out=FOLDER) allows it"
            raise ConfigError("run", run, what)


def _leads_astray(target: Path, inside: Path) -> bool:
    """Return True if a link's target is out of the run, or a folder of it that is not looked through."""
    if not target.is_relative_to(inside):
        return True
    return target.is_dir() and target.relative_to(inside).parts[:1] not in [(name,) for name in OWN_FOLDERS]


def _refuse(found: Iterator[tuple[str, Any]], source: object, given: Collection[str]) -> None:
    for name, value in found:
        if any(name == own or name.startswith(f"{own}.") for own in given):
            continue
        where = Path(str(source)).name
        raise ConfigError(
            name,
            value,
            f"something built in or registered: {where} imports code, starts a program or opens a file by this setting."
            " If you trust its author, repeat the command with --trust (in Python trust=True); see docs/security.md",
        )


def _of_task(config: Config) -> Iterator[tuple[str, Any]]:
    task = config.task
    if task.process.python is not None:
        yield PYTHON, task.process.python
    if ":" in task.name and not _registered(task.name):
        yield "task.name", task.name
    for name in ("id", "game", "model"):
        yield from _texts(f"task.{name}", getattr(task, name))
    for name in FOREIGN_KEYWORDS.get(task.name, ()):
        if name in task.kwargs:
            yield f"task.kwargs.{name}", task.kwargs[name]
    keywords = {"task.kwargs": task.kwargs, "task.remote": task.remote}
    if task.by_actors:
        group = "task.remote" if task.remote else "task.kwargs"
        yield from _of_actors(group, keywords[group])
        keywords[group] = {k: v for k, v in keywords[group].items() if k != "listen"}
    for group, given in keywords.items():
        yield from _texts(group, given)


def _registered(name: str) -> bool:
    from pql.contract.registry import env_names

    return name in env_names()


def _of_actors(group: str, keywords: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return files with secrets, and addresses that other machines can reach."""
    yield from ((f"{group}.{k}", keywords[k]) for k in ("token_file", "cert", "key") if keywords.get(k) is not None)
    listen = str(keywords.get("listen", "127.0.0.1:5555"))
    if not HERE.fullmatch(listen):
        yield f"{group}.listen", listen


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Texts in ``value`` that could name a module, or a path away from where the user is; their keys included."""
    if isinstance(value, str):
        if not TEXT.fullmatch(value):
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(name, key)
            yield from _texts(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _texts(f"{name}.{i}", part)
