"""Checkpoints: a directory with one safetensors file and a JSON manifest, hashed, written aside and renamed.

Nothing is ever unpickled. A checkpoint is complete or not there: files are synced before the rename that makes
them visible. A reader checks the hash and falls back to the one before.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pql.errors import ConfigError

FORMAT = 1
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"


class CorruptCheckpoint(ConfigError):
    """A checkpoint whose files are missing, truncated or altered."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts and lists of tensors and numbers -> one dict with names joined by slashes."""
    if isinstance(tree, Mapping):
        items = [(str(k), v) for k, v in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(i), v) for i, v in enumerate(tree)]
    else:
        tensor = tree.detach() if isinstance(tree, Tensor) else torch.as_tensor(tree)
        return {prefix: tensor}
    out: dict[str, Tensor] = {}
    for k, v in items:
        out |= flatten(v, f"{prefix}/{k}" if prefix else k)
    return out


def unflatten(flat: Mapping[str, Tensor], like: Any, prefix: str = "") -> Any:
    """The reverse of :func:`flatten`, in the shape of ``like``.

    Raises:
        ConfigError: the checkpoint lacks something that the run has.
    """
    if isinstance(like, Mapping):
        return {k: unflatten(flat, v, f"{prefix}/{k}" if prefix else str(k)) for k, v in like.items()}
    if isinstance(like, list | tuple):
        return [unflatten(flat, v, f"{prefix}/{i}") for i, v in enumerate(like)]
    if prefix not in flat:
        raise ConfigError(
            "checkpoint", prefix, "a checkpoint of the same task, algorithm and version: this one lacks it"
        )
    value = flat[prefix]
    return value if isinstance(like, Tensor) else value.item()


def save(path: Path, tree: Any, manifest: Mapping[str, Any]) -> None:
    """Write ``tree`` and ``manifest`` to the directory ``path``, atomically (an existing one is replaced)."""
    aside = path.with_name(f".writing-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        # Views of flat parameter tensors share storage, which safetensors refuses: those are copied (they are small).
        tensors = {k: _own(v) for k, v in flatten(tree).items()}
        save_file(tensors, aside / TENSORS)
        full = {"format": FORMAT, **manifest, "sha256": _sha256(aside / TENSORS)}
        (aside / MANIFEST).write_text(json.dumps(full, indent=1))
        for file in (aside / TENSORS, aside / MANIFEST, aside):
            _sync(file)
        old = path.with_name(f".old-{path.name}")
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        aside.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _own(tensor: Tensor) -> Tensor:
    shared = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.cpu().clone().contiguous() if shared else tensor.cpu().contiguous()


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and the manifest.

    Raises:
        CorruptCheckpoint: incomplete, truncated or altered.
        ConfigError: written by a newer format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        whole = manifest["sha256"] == _sha256(path / TENSORS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(
            "checkpoint", path, f"a complete checkpoint ({type(error).__name__}: {error})"
        ) from error
    if not whole:
        raise CorruptCheckpoint("checkpoint", path, "an intact checkpoint: its content does not match its hash")
    if manifest["format"] > FORMAT:
        raise ConfigError("checkpoint", path, f"format {FORMAT} or older; this is {manifest['format']}: update pql")
    try:
        return load_file(path / TENSORS), manifest
    except SafetensorError as error:
        raise CorruptCheckpoint("checkpoint", path, f"a readable checkpoint ({error})") from error


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """The newest intact resume point in ``folder``; damaged ones are skipped with a warning.

    Raises:
        ConfigError: there is none.
    """
    points = resume_points(folder)
    for path in reversed(points):
        try:
            return (*load(path), path)
        except CorruptCheckpoint as error:
            warnings.warn(f"{error}; trying the one before", stacklevel=2)
    what = "none is intact" if points else "there is none"
    raise ConfigError("run", folder.parent, f"a run with a resume point: {what} in {folder}")


def resume_points(folder: Path) -> list[Path]:
    """Resume points, oldest first."""
    return sorted(folder.glob("tick-*")) if folder.is_dir() else []


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` resume points, and what an interrupted save left behind."""
    for path in [*resume_points(folder)[:-keep], *folder.glob(".writing-*"), *folder.glob(".old-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
