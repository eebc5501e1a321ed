"""A run directory has one writer: a lock in it, which the kernel releases when its process dies, however it dies."""

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from pathlib import Path
from typing import IO

from pql.errors import ConfigError, PqlWarning

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)  # file systems without locks
TRIES = 1000  # names for runs of the same second; also attempts at a directory that others make and remove


class Claim:
    """A run directory that no other process may write to until this is closed.

    The lock is that of an open file. A program that this one starts does not inherit it; a fork closes its copy, or
    the lock would outlive the run in a simulator's workers.

    Args:
        path: the directory.
        made: directories that were made for this claim: closing removes them again where nothing was written to them.
        file: the locked one; None: the file system has no locks.
    """

    def __init__(self, path: Path, made: list[Path], file: IO[str] | None):
        self.path, self._made, self._file, self._process = path, made, file, os.getpid()
        _open.add(self)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory. As often as one likes."""
        if self._process != os.getpid():
            return
        if self._file is not None:
            with contextlib.suppress(OSError):
                if _is(self._file, self.path / LOCK):  # else the directory was deleted, and is another run's by now
                    (self.path / LOCK).unlink()  # while it is locked: nobody else's
            self._file.close()
        with contextlib.suppress(OSError):  # it holds a run, or others, or is gone
            for path in self._made:
                path.rmdir()
        self._file, self._made = None, []

    def renew(self) -> None:
        """Lock the directory again after it was deleted and created again.

        Raises:
            ConfigError: another process holds one of that name, or it cannot be written.
        """
        again = claim(self.path)
        if self._file is not None:
            self._file.close()
        self._file, again._file = again._file, None


_open: "weakref.WeakSet[Claim]" = weakref.WeakSet()


def _forked() -> None:
    for one in _open:
        if one._file is not None:
            one._file.close()  # the other process's file stays locked


os.register_at_fork(after_in_child=_forked)


def claim(path: Path) -> Claim:
    """Lock the run directory ``path``, which is made where it is not there.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
    """
    for _ in range(TRIES):
        try:
            made = _missing(path)
            path.mkdir(parents=True, exist_ok=True)
            file = (path / LOCK).open("a+")
        except FileNotFoundError:  # whoever had made it has just removed it
            continue
        except OSError as error:
            raise ConfigError("run_dir", path, f"a folder that can be written ({error})") from error
        if not _lock(file, path):
            return Claim(path, made, None)
        if _is(file, path / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            file.flush()
            return Claim(path, made, file)
        file.close()  # it was removed by its last holder before it was locked here
    raise ConfigError("run_dir", path, "a folder that is not made and removed all the time")


def claim_new(stem: Path) -> Claim:
    """A directory that was not there before: ``stem``, or ``stem-2``, ``stem-3``, ... where others are quicker.

    Raises:
        ConfigError: it cannot be made.
    """
    for i in range(1, TRIES):
        path = stem if i == 1 else stem.with_name(f"{stem.name}-{i}")
        made = _missing(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except (FileExistsError, FileNotFoundError):  # others were quicker, or have removed a folder above it
            continue
        except OSError as error:
            raise ConfigError("run_dir", path, f"a folder that can be written ({error})") from error
        held = claim(path)
        held._made = made
        return held
    raise ConfigError("run_dir", stem, f"fewer than {TRIES} runs of the same second")


def holder(path: Path) -> str | None:
    """Return the writer of the run directory ``path``: process, host and start; None without a writer or locks."""
    try:
        with (path / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _name(path)
    except OSError:
        return None
    return None


def _missing(path: Path) -> list[Path]:
    """``path`` and the folders above it that are not there, the innermost first."""
    return [one for one in (path, *path.parents) if not one.exists()]


def _lock(file: IO[str], path: Path) -> bool:
    """False, with a warning, where the file system has no locks.

    Raises:
        ConfigError: another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        free = f"a folder that no other run writes to: {_name(path)} holds it"
        raise ConfigError("run_dir", path, free) from None
    except OSError as error:
        file.close()
        if error.errno not in UNSUPPORTED:
            raise ConfigError("run_dir", path, f"a folder that can be written ({error})") from error
        what = f"{path} cannot be locked ({error.strerror}): nothing keeps a second run from writing to it"
        warnings.warn(what, PqlWarning, stacklevel=4)
        return False
    return True


def _is(file: IO[str], path: Path) -> bool:
    """Return True if the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _name(path: Path) -> str:
    """Text written by the holder, a moment after it takes the lock."""
    for _ in range(20):
        try:
            if text := (path / LOCK).read_text(errors="replace").strip():
                return text[:200]
        except OSError:
            break
        time.sleep(0.01)
    return "another process"
