"""Another Python for simulators in a separate process: a real 3.8 with NumPy if available, else a second virtual
environment of this one with only NumPy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy

NUMPY = "numpy==1.24.4"  # the last for Python 3.8


def old_python() -> str | None:
    """Find a Python 3.8 on this machine."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    places = [*sorted(root.glob("versions/3.8*/bin/python")), shutil.which("python3.8")]
    for place in places:
        if place and subprocess.run([place, "-c", "import sys; assert sys.version_info[:2] == (3, 8)"]).returncode == 0:
            return str(place)
    return None


def with_old_python(folder: Path, python: str) -> Path | None:
    """Create a virtual environment of Python 3.8 with NumPy; None if it cannot be downloaded."""
    done = folder / "bin" / "python"
    if (folder / "complete").exists():
        return done
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    target = folder / "lib" / "python3.8" / "site-packages"
    words = ["--quiet", "--disable-pip-version-check", "--retries=0", "--timeout=5", "--target", target, "--upgrade"]
    words += ["--python-version=3.8", "--only-binary=:all:", NUMPY]
    found = subprocess.run([sys.executable, "-m", "pip", "install", *words], stderr=subprocess.DEVNULL)
    if found.returncode != 0:
        return None
    (folder / "complete").touch()
    return done


def second_environment(folder: Path) -> Path:
    """Create another virtual environment of this Python, with only NumPy."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    (target,) = folder.glob("lib/python3*/site-packages")
    package = Path(numpy.__file__).parent
    for part in (package, package.parent / "numpy.libs"):
        if part.exists():
            (target / part.name).symlink_to(part)
    return folder / "bin" / "python"


def far_python(folder: Path) -> Path:
    """Return the interpreter; downloads are kept in this environment's folder."""
    old = old_python()
    found = with_old_python(Path(sys.prefix) / "far-python3.8", old) if old else None
    return found or second_environment(folder)
