"""Lock of a run directory, which ensures a single writer. The kernel releases it when the process dies."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
import warnings
import weakref
from pathlib import Path
from typing import IO

from pql.errors import ConfigError, PqlWarning

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)  # file systems without locks
TRIES = 1000  # names for runs of the same second; also attempts to lock a directory that others create and remove


class Claim:
    """A run directory locked for this process, until the claim is closed.

    The lock is held by an open file. Started programs do not inherit it. A forked process closes its copy; otherwise
    a simulator's workers would hold the lock after the run.

    Args:
        path: the directory.
        made: directories created for this claim; ``close`` removes those that are still empty.
        folder: descriptor of the open directory. While it is open, no new directory gets the same inode.
        file: the locked file; None: the file system has no locks.
    """

    def __init__(self, path: Path, made: list[Path], folder: int, file: IO[str] | None):
        self.path, self._made, self._file, self._process = path, made, file, os.getpid()
        self._folder: int | None = folder
        _open.add(self)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._drop()  # a descriptor, unlike a file object, does not close itself

    def close(self) -> None:
        """Release the directory. May be called repeatedly."""
        if self._process != os.getpid():
            return
        if self._file is not None:
            with contextlib.suppress(OSError):
                if _is(self._file, self.path / LOCK):  # else the directory was deleted and may belong to another run
                    (self.path / LOCK).unlink()  # before unlocking, while no other process can hold it
        with contextlib.suppress(OSError):  # not empty, or already deleted
            for path in self._made:
                path.rmdir()
        self._drop()

    def there(self) -> bool:
        """Return True if the path still names the claimed directory, whether or not its lock was deleted."""
        try:
            return self._folder is not None and os.path.samestat(os.fstat(self._folder), self.path.stat())
        except OSError:
            return False

    def renew(self) -> None:
        """Lock the directory again if it or its lock was deleted; create it if missing. Raises ``ConfigError``: another
        process has locked a directory of the same name, or it cannot be written."""
        locked = self._file is None or _is(self._file, self.path / LOCK)
        if locked and self.there():
            return
        again = claim(self.path)
        self._file, again._file = again._file, self._file
        self._folder, again._folder = again._folder, self._folder
        again._drop()

    def _drop(self) -> None:
        """Close the files without removing the lock from the directory."""
        if self._file is not None:
            self._file.close()
        if self._folder is not None:
            os.close(self._folder)
        self._file, self._folder, self._made = None, None, []


_open: "weakref.WeakSet[Claim]" = weakref.WeakSet()


def _forked() -> None:
    for one in _open:
        one._drop()  # the parent's files stay open and locked


os.register_at_fork(after_in_child=_forked)


def claim(path: Path) -> Claim:
    """Lock the run directory ``path``; create it if missing. Raises ``ConfigError``: another process holds it, or it
    cannot be written."""
    for _ in range(TRIES):
        with contextlib.ExitStack() as opened:
            try:
                made = _missing(path)
                path.mkdir(parents=True, exist_ok=True)
                folder = os.open(path, os.O_RDONLY)
                opened.callback(os.close, folder)
                file = opened.enter_context(open_lock(path / LOCK, os.O_RDWR | os.O_CREAT))
            except FileNotFoundError:  # another process has just removed it
                continue
            except OSError as error:
                raise ConfigError("run_dir", path, f"a folder that can be written ({error})") from error
            supported = _lock(file, path)
            if supported and not _is(file, path / LOCK):
                continue  # it was removed by its last holder before it was locked here
            opened.pop_all()
            if not supported:
                file.close()
                return Claim(path, made, folder, None)
            text = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            with contextlib.suppress(OSError):  # it only informs: a full disk must not keep a run from being resumed
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), text.encode())
            return Claim(path, made, folder, file)
    raise ConfigError("run_dir", path, "a folder that other processes do not keep creating and removing")


def open_lock(path: Path, flags: int) -> IO[str]:
    """Open a lock file, which may be in another user's folder: links are not followed, pipes not waited for.

    Args:
        flags: ``os.O_RDONLY``, or ``os.O_RDWR | os.O_CREAT``.
    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "r+" if flags & os.O_RDWR else "r", errors="replace")


def claim_new(stem: Path) -> Claim:
    """Create and lock a new directory: ``stem``, or ``stem-2``, ``stem-3``, ... if other processes took the name.
    Raises ``ConfigError``: it cannot be created."""
    for i in range(1, TRIES):
        path = stem if i == 1 else stem.with_name(f"{stem.name}-{i}")
        made = _missing(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except (FileExistsError, FileNotFoundError):  # another process created it, or removed a parent folder
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
        with open_lock(path / LOCK, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _name(path)
    except OSError:
        return None
    return None


def _missing(path: Path) -> list[Path]:
    """Return the missing folders among ``path`` and its parents, innermost first."""
    return [one for one in (path, *path.parents) if not one.exists()]


def _lock(file: IO[str], path: Path) -> bool:
    """Lock the file. Return False, with a warning, if the file system has no locks. Raises ``ConfigError``: another
    process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = f"a folder that no other run writes to: {_name(path)} holds it"
        raise ConfigError("run_dir", path, free) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise ConfigError("run_dir", path, f"a folder that can be written ({error})") from error
        what = f"{path} cannot be locked ({error.strerror}): a second run could write to it"
        warnings.warn(what, PqlWarning, stacklevel=4)
        return False
    return True


def _is(file: IO[str], path: Path) -> bool:
    """Return True if the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


def _name(path: Path) -> str:
    """Return the text that the holder writes shortly after it takes the lock."""
    for _ in range(20):
        try:
            with open_lock(path / LOCK, os.O_RDONLY) as file:
                text = file.read(200).strip()
            if text:
                return text
        except OSError:
            break
        time.sleep(0.01)
    return "another process"
