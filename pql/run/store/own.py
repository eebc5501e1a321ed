"""Record of the runs that this user started here, so that their settings need no ``--trust``.

Nothing in a run directory is believed: it may come from anybody. The record is outside, in the user's state directory
(``$XDG_STATE_HOME/pql/runs``): a file whose name is a hash of the settings that can name code or a file, and of
everything that decides which they name: the working directory, where modules are searched first, the interpreter's
path, the machine and the user; and of the run directory's path. A directory that somebody else puts there passes only
with the same settings, so it can start nothing but what the user has started in this place. See ``docs/security.md``.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from pql.config import Config, leaves
from pql.config.trust import FILES, PYTHON, names_code, names_foreign_code

MOST = 10_000  # records that are kept


def folder() -> Path:
    """Return the folder of the records."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "pql" / "runs"


def record_name(run_dir: Path, config: Config) -> str:
    """Return the name of the record of a run with these settings, in this working directory."""
    named = {name: value for name, value in leaves(config) if names_code(name) or name in FILES}
    found = shutil.which(os.path.expanduser(named.get(PYTHON) or "")) or ""
    facts: dict[str, Any] = {
        "run": os.path.realpath(run_dir),
        "here": os.path.realpath(os.getcwd()),
        "python": [os.path.abspath(found), os.path.realpath(found)] if found else None,
        "machine": platform.node(),
        "user": os.getuid(),
        "settings": named,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def record(run_dir: Path, config: Config) -> None:
    """Record a run that the user has just started with settings that name code. If it cannot be written, commands on
    the run need ``--trust``."""
    if not names_foreign_code(config):
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home directory
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / record_name(run_dir, config)).touch(mode=0o600)
        for old in sorted(place.iterdir(), key=lambda path: path.stat().st_mtime)[:-MOST]:
            old.unlink()


def started_here(run_dir: Path, config: Config) -> bool:
    """Return True if this user started the run in ``run_dir`` with these settings, on this machine and in this working
    directory. Records that others may write do not count."""
    with contextlib.suppress(OSError, RuntimeError):
        place = folder()
        return all(_private(path) for path in (place, place / record_name(run_dir, config)))
    return False


def _private(path: Path) -> bool:
    found = path.lstat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022
