"""Writes what is known of the dependencies: their hashes and their licences.

    python tools/dependencies.py hashes      requirements/locked.txt, for make setup LOCKED=1
    python tools/dependencies.py licences    docs/licences.md

constraints.txt pins every package that ``make setup`` and the extras install. Hashes are the package index's, of all
files of a version, so that every platform finds its own; torch is left out, since its build depends on the machine.
Licences are those of the installed packages' metadata; a package that is not installed is downloaded.
"""

import argparse
import email
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCKED, PAGE = ROOT / "requirements" / "locked.txt", ROOT / "docs" / "licences.md"
INDEX = "https://pypi.org/simple/"
KIND = "application/vnd.pypi.simple.v1+json"

SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "DFSG approved; MIT License": "MIT",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT License; Apache Software License": "MIT AND Apache-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""Names in packages' metadata, and the SPDX identifiers that they mean."""

STATED = {"genesis-world": "Apache-2.0", "mani-skill": "Apache-2.0"}
"""Licences of packages whose metadata state none, from their repositories."""

PERMISSIVE = {"MIT", "MIT-CMU", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "ISC", "Apache-2.0", "LLVM-exception"}
PERMISSIVE |= {"PSF-2.0", "Zlib", "BSL-1.0", "CC0-1.0"}
WEAK = {"MPL-2.0"}  # copyleft of single files: none of them is part of pql

HEAD = """# Licences of the dependencies

pql is MIT licensed, and copies no code or data of other packages. `make setup` installs the packages below, each under
its own licence; `pip install pql-rl` installs only those marked *core*. All licences are permissive, except

* MPL-2.0, whose copyleft is limited to the package's own files;
* GPL-2.0-only: `ale-py`, the emulator of Atari games (extra `atari`). pql does not contain it; whoever distributes it
  together with other programs has to observe its licence.

Licences are those of the packages' metadata. `python tools/dependencies.py licences` writes this page, and the suite
compares it with the installed packages.

| package | version | licence | |
|---|---|---|---|
"""


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt by normalised name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([\w.+!]+)", line) for line in lines)
    return {normal(m[1]): m[2] for m in found if m}


def normal(name: str) -> str:
    """Return a package's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def files(name: str, version: str) -> list[dict[str, Any]]:
    """Return the index's entries of all files of a version."""
    request = urllib.request.Request(f"{INDEX}{name}/", headers={"Accept": KIND})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)["files"]
    return [file for file in found if of_version(file["filename"], name, version)]


def of_version(file: str, name: str, version: str) -> bool:
    """Return True if a wheel or source archive is of this version (not of one that it begins)."""
    head = re.match(r"(.+?)-(\d[^-]*?)(-.*\.whl|\.tar\.gz|\.zip)$", file)
    return head is not None and normal(head[1]) == name and head[2] == version


def locked() -> Iterator[str]:
    """Yield the lines of requirements/locked.txt."""
    extras = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert extras is not None
    yield "# Written by tools/dependencies.py: what make setup installs, but torch, with the hashes of all files."
    names = {*wanted(extras[1].split(",")), "setuptools"} - {"torch"}
    for name, version in pins().items():
        if name in names:
            hashes = sorted(file["hashes"]["sha256"] for file in files(name, version))
            if not hashes:
                raise SystemExit(f"{name} {version}: the index has no files")
            yield " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes)])
    if missing := names - pins().keys():
        raise SystemExit(f"not in constraints.txt: {', '.join(sorted(missing))}")


def licence(name: str) -> str | None:
    """Return an installed package's licence as an SPDX expression; None if it is not installed."""
    try:
        return spdx(name, importlib.metadata.metadata(name))
    except importlib.metadata.PackageNotFoundError:
        return None


def downloaded(name: str, version: str) -> str:
    """Return the licence in the metadata of a version's wheel, which pip downloads."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, f"{name}=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            (file,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            return spdx(name, email.message_from_bytes(archive.read(file)))


def spdx(name: str, data: Any) -> str:
    """Return the SPDX expression for the licence that a package's metadata state; empty if they state none."""
    classes = [c.rpartition(" :: ")[2] for c in data.get_all("Classifier") or () if c.startswith("License")]
    stated = data.get("License-Expression") or "; ".join(classes) or (data.get("License") or "").split("\n")[0]
    return SPDX.get(stated, stated) or STATED.get(name, "")


def parts(expression: str) -> list[str]:
    """Return the identifiers of an SPDX expression."""
    return [word for word in re.findall(r"[\w.+-]+", expression) if word not in ("AND", "OR", "WITH")]


def wanted(extras: Iterable[str] = ()) -> set[str]:
    """Return the packages that pql installs with these extras on this platform, by what installed packages require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line for extra in extras for line in project["optional-dependencies"][extra]]
    left = [Requirement(line) for line in (*project["dependencies"], *named)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        one = left.pop()
        key = normal(one.name), frozenset(one.extras)
        if key not in seen:
            seen.add(key)
            left += required(*key)
    return {name for name, _ in seen}


def required(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what an installed package requires with these extras on this platform."""
    try:
        lines = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one


def table(page: str) -> dict[str, tuple[str, str, bool]]:
    """Return version, licence and whether it is a core dependency, by package, of the page's rows."""
    rows = re.finditer(r"^\| (\S+) \| (\S+) \| (.*?) \| (core )?\|$", page, re.M)
    return {m[1]: (m[2], m[3], bool(m[4])) for m in rows if m[1] != "package"}


def licences() -> Iterator[str]:
    """Yield the rows of docs/licences.md."""
    inner = wanted()
    for name, version in pins().items():
        found = licence(name) or downloaded(name, version)
        yield f"| {name} | {version} | {found} | {'core ' if name in inner else ''}|"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hashes", "licences"))
    args = parser.parse_args(argv)
    file, lines = (LOCKED, [*locked()]) if args.what == "hashes" else (PAGE, [HEAD + "\n".join(licences())])
    file.write_text("\n".join(lines) + "\n")
    print(f"{file.relative_to(ROOT)}: {len(pins())} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
