"""Checkpoints: a directory with one safetensors file and a JSON manifest, with hashes, written atomically.

Nothing is unpickled. Files are synced before the rename that makes them visible, and a replaced checkpoint is kept as
``.old-NAME`` until the new one is complete. A reader checks the hashes and falls back to the previous checkpoint.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pql.config import Config, from_dict
from pql.config.compose import changed_live
from pql.config.files import check_header, check_ordinary, create_file, read_json
from pql.config.migrate import as_trained
from pql.data import tensorfile
from pql.errors import ConfigError, PqlWarning
from pql.run.store.manifest import (
    FORMAT,
    NewerFormatError,
    check_manifest,
    check_schema,
    check_unwritten,
    config_entries,
)
from pql.types import Rows

TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
TRIES = 5  # reads of a checkpoint that is being replaced
LATER = (
    "quarantine",
    "final_obs",
    "progress",
)  # entries that checkpoints of older releases lack: they keep their initial values


class CorruptCheckpointError(ConfigError):
    """A checkpoint whose files are missing, truncated or altered."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts and lists of tensors and numbers -> one dict with names joined by slashes."""
    if isinstance(tree, Mapping):
        items = [(str(k), v) for k, v in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(i), v) for i, v in enumerate(tree)]
    else:
        return {prefix: tree.detach() if isinstance(tree, Tensor) else torch.as_tensor(tree)}
    out: dict[str, Tensor] = {}
    for k, v in items:
        out |= flatten(v, f"{prefix}/{k}" if prefix else k)
    return out


def unflatten(flat: Mapping[str, Tensor], like: Any, prefix: str = "", some: bool = False) -> Any:
    """Reverse :func:`flatten`, with the structure of ``like``.

    Args:
        some: the first axis may have another length; True for all entries below a :class:`~pql.types.Rows`.
    Raises:
        ConfigError: the checkpoint lacks an entry of the run, or an entry differs in shape or type.
    """
    if isinstance(like, Mapping):
        some = isinstance(like, Rows)
        return {k: unflatten(flat, v, f"{prefix}/{k}" if prefix else str(k), some) for k, v in like.items()}
    if isinstance(like, list | tuple):
        return [unflatten(flat, v, f"{prefix}/{i}" if prefix else str(i)) for i, v in enumerate(like)]
    if prefix not in flat:
        if any(part.partition(".")[0] in LATER for part in prefix.split("/")):
            return like
        raise ConfigError("checkpoint", prefix, "a checkpoint of the same task, algorithm and version; this lacks it")
    value = flat[prefix]
    if not isinstance(like, Tensor):
        return value.item()
    lead = 1 if some and like.dim() == value.dim() else 0
    if value.shape[lead:] != like.shape[lead:] or value.dtype != like.dtype:
        # Checked here because copying in place would silently broadcast or round.
        have, want = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (value, like))
        raise ConfigError("checkpoint", prefix, f"{want}, from this run's settings; the checkpoint has {have}")
    return value


def save(path: Path, tree: Any, manifest: Mapping[str, Any]) -> None:
    """Write ``tree`` and ``manifest`` to the directory ``path`` atomically, replacing an existing checkpoint.

    Raises:
        OSError: it could not be written; an earlier checkpoint at ``path`` is kept. ``FileNotFoundError``: there is no
            ``path.parent.parent``. A deleted run directory is not created here, but by :meth:`Archive.restore`.
        TypeError, ValueError: readers would refuse the manifest.
    """
    manifest = {"format": FORMAT, **manifest}
    check_unwritten(manifest)
    temporary, old = path.with_name(f".writing-{path.name}"), _old(path)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        path.parent.mkdir(exist_ok=True)
        temporary.mkdir()
        digest = tensorfile.write(temporary / TENSORS, flatten(tree))
        _write_manifest(temporary, {**manifest, "sha256": digest})
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        temporary.rename(path)
        sync(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    temporary = folder / f".{MANIFEST}"
    create_file(temporary, json.dumps({**manifest, "manifest_sha256": _manifest_hash(manifest)}, indent=1))
    sync(temporary)
    temporary.replace(folder / MANIFEST)
    sync(folder)


def _manifest(path: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged or invalid.
    """
    manifest: dict[str, Any] = read_json(_present(path) / MANIFEST)
    check_manifest(manifest, kinds)
    if manifest["manifest_sha256"] != _manifest_hash(manifest):
        raise ValueError("its content does not match its hash")
    if kinds:
        check_schema(manifest)
        manifest["config"] = as_trained(manifest["config"], manifest.get("release", ""))
    return manifest


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise ``ConfigError`` with the checkpoint's path for a manifest of another release."""
    try:
        yield
    except NewerFormatError as error:
        raise ConfigError("checkpoint", path, str(error)) from error


def _manifest_hash(manifest: Mapping[str, Any]) -> str:
    known = {k: v for k, v in manifest.items() if k != "manifest_sha256"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def load(path: Path, kinds: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors by name, and the manifest. Safe while a run replaces the checkpoint.

    Args:
        kinds: allowed kinds (``policy``, ``resume``, ``dump``); the whole manifest is then validated.
    Raises:
        CorruptCheckpointError: incomplete, truncated, altered, or with an invalid manifest.
        ConfigError: written by another release, in a format or with settings that this one does not know.
    """
    for _ in range(TRIES):
        before, found = _stamp(path), _present(path)  # in this order: a change in between is noticed
        try:
            return _read(found, kinds)
        except CorruptCheckpointError:
            if _stamp(path) == before:
                raise
    return _read(_present(path), kinds)


def _stamp(path: Path) -> list[tuple[int, int] | None]:
    """Return what changes when :func:`save` replaces the checkpoint: identity and time of its folder and the old one's.

    A save has two renames and a deletion, so that a reader may see three states of the same checkpoint.
    """
    found: list[tuple[int, int] | None] = []
    for folder in (path, _old(path)):
        try:
            facts = folder.stat()
            found.append((facts.st_ino, facts.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _read(path: Path, kinds: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with _named(path):
            manifest = _manifest(path, kinds)
        check_ordinary(path / TENSORS)
        intact = manifest["sha256"] == _sha256(path / TENSORS)
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError("checkpoint", path, f"a complete, intact checkpoint ({error})") from error
    if not intact:
        raise CorruptCheckpointError("checkpoint", path, "an intact checkpoint: its content does not match its hash")
    try:
        check_header(path / TENSORS)
        return load_file(path / TENSORS), manifest
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptCheckpointError("checkpoint", path, f"a readable checkpoint ({error})") from error


def newest_checkpoint(folder: Path, kinds: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """Return the newest intact resume point in ``folder``; damaged ones are skipped with a warning. ``kinds`` as for
    :func:`load`. Raises ``ConfigError``: there is none."""
    points = resume_points(folder)
    for path in reversed(points):
        try:
            return (*load(path, kinds), path)
        except CorruptCheckpointError as error:
            warnings.warn(f"{error}; trying the previous one", PqlWarning, stacklevel=2)
    what = "none is intact" if points else "there is none (checkpoint.replay=false keeps none)"
    raise ConfigError("run", folder.parent, f"a run with a resume point: {what} in {folder}")


def resume_points(folder: Path) -> list[Path]:
    """Return resume points, oldest first, with one whose replacement was interrupted (:func:`load` finds it)."""
    found = (*folder.glob("tick-*"), *folder.glob(".old-tick-*"))
    return [folder / name for name in sorted({path.name.removeprefix(".old-") for path in found})]


def ranks(folder: Path) -> int | None:
    """Return the number of ranks of the resume points in ``folder``, or None without any."""
    for path in reversed(resume_points(folder)):
        with contextlib.suppress(OSError, ValueError):
            return int(_manifest(path, ()).get("ranks", 1))
    return None


def checkpoint_settings(folder: Path) -> dict[str, Any] | None:
    """Return the config in the newest intact resume-point manifest in ``folder``, or None. Raises ``ConfigError``:
    written by another release, in a format or with settings that this one does not know."""
    for path in reversed(resume_points(folder)):
        with contextlib.suppress(OSError, ValueError), _named(path):
            return dict(_manifest(path, ("resume",))["config"])
    return None


def amend_manifest(folder: Path, config: Config) -> None:
    """Replace the config in all resume points in ``folder`` with intact manifests and the same live settings, whose
    effects they hold. Raises ``OSError``: it cannot be written; the old manifest is kept."""
    for path in resume_points(folder):
        try:
            manifest = _manifest(path, ("resume",))
        except (OSError, ValueError):  # readers skip it as well
            continue
        if not changed_live(from_dict(manifest["config"]), config):
            _write_manifest(_present(path), {**manifest, **config_entries(config)})


def of_rank(folder: Path, rank: int) -> Path:
    """Return the folder of one rank's resume points; rank 0 uses the run's, with the policy."""
    return folder if rank == 0 else folder / f"rank-{rank}"


def find(path: Path, kinds: Sequence[str] = (), whole: bool = False) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """Return a checkpoint, or that of a run: the last policy, else the newest resume point, else the best policy.

    Damaged checkpoints of a run are skipped with a warning.

    Args:
        kinds: as for :func:`load`.
        whole: prefer the newest resume point, which also has the critics.
    Raises:
        ConfigError: there is none.
        CorruptCheckpointError: none is intact.
    """
    if (path / MANIFEST).exists() or (path / TENSORS).exists():
        return (*load(path, kinds), path)
    folder = path / "checkpoints"
    last, points = [folder / "last"], resume_points(folder)[::-1]
    order = [*points, *last] if whole else [*last, *points]
    known = [p for p in [*order, folder / "best"] if p.exists() or _old(p).exists()]
    if not known:
        raise ConfigError("run", path, "a run directory with a checkpoint, or a checkpoint in one (with manifest.json)")
    for i, candidate in enumerate(known, 1):
        try:
            return (*load(candidate, kinds), candidate)
        except CorruptCheckpointError as error:
            if i == len(known):
                raise
            warnings.warn(f"{error}; taking {known[i].name} instead", PqlWarning, stacklevel=2)
    raise AssertionError("one was returned, or raised")


def home(path: Path) -> Path:
    """Return the run directory of a checkpoint or export; if it was moved, the folder that contains it."""
    folder = Path(os.path.abspath(path)).parent  # links are not followed, because they may lead anywhere
    return folder.parent if folder.name in ("checkpoints", "export") else folder


def set_aside(folder: Path, keep_up_to: Path) -> None:
    """Rename the resume points newer than ``keep_up_to``, which cannot be used, so that they are no longer found.

    They are damaged, or another rank lacks them.
    """
    for path in resume_points(folder):
        if path.name > keep_up_to.name:
            endings = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
            names = (folder / f"skipped-{path.name}{ending}" for ending in endings)
            path.rename(next(name for name in names if not name.exists()))


def rotate(folder: Path, keep: int, common: Collection[str] = ()) -> None:
    """Delete all but the newest ``keep`` resume points, and the leftovers of interrupted saves. ``common``: names of
    the resume points that all ranks have; the newest ``keep`` of these stay, too."""
    with contextlib.suppress(OSError):
        recover(folder)
    replaced = (old for old in folder.glob(".old-*") if old.with_name(old.name.removeprefix(".old-")).exists())
    for path in [*folder.glob(".removing-*"), *folder.glob(".writing-*"), *replaced]:
        shutil.rmtree(path, ignore_errors=True)
    points = resume_points(folder)
    staying = {*points[-keep:], *[path for path in points if path.name in common][-keep:]}
    for path in (path for path in points if path not in staying):
        removing = path.with_name(f".removing-{path.name}")
        with contextlib.suppress(OSError):
            path.rename(removing)  # if the process dies here, nobody takes what is left for a resume point
            shutil.rmtree(removing, ignore_errors=True)


def recover(folder: Path) -> None:
    """Restore checkpoints whose replacement was interrupted. Only for the process that writes to ``folder``."""
    for old in folder.glob(".old-*"):
        path = old.with_name(old.name.removeprefix(".old-"))
        if not path.exists():
            old.rename(path)


def _old(path: Path) -> Path:
    """Temporary path of a checkpoint while it is replaced."""
    return path.with_name(f".old-{path.name}")


def _present(path: Path) -> Path:
    """Return where a checkpoint is: ``path``, or its temporary path if its replacement was interrupted."""
    return _old(path) if not path.exists() and _old(path).exists() else path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Sync a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
