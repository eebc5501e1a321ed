"""Download and upload of a policy checkpoint and its card. Nothing that is downloaded is executed or unpickled."""

import copy
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pql.config import from_dict
from pql.config.files import JSON_BYTES, expanded
from pql.config.trust import names_foreign_code
from pql.engine import deadlines
from pql.errors import ConfigError, first_line, writing
from pql.run.hub.card import CARD_BYTES, card
from pql.run.policy import check_finite
from pql.run.store import checkpoint
from pql.run.store.checkpoint import MANIFEST, TENSORS

CARD, ORIGIN = "README.md", "hub.json"
LIMITS = {MANIFEST: JSON_BYTES, TENSORS: 1 << 30, CARD: CARD_BYTES}  # bytes
IGNORED = (".gitattributes", "LICENSE")  # may be there, and are not downloaded
NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
PRIVATE = (
    *(("run_dir",), ("init_from",), ("task", "remote"), ("logger",)),
    *(("replay", "prefill"), ("replay", "demos"), ("replay", "demo_keys")),
)
"""Settings that a policy does not need and that name places on a machine."""


class Pulled(NamedTuple):
    """A policy from the hub: its folder, the commit, and True if its settings name code, so that it needs --trust."""

    folder: Path
    commit: str
    foreign: bool


def pull(repo: str, out: str | Path | None = None, revision: str | None = None) -> Pulled:
    """Download a policy into a folder that ``pql eval``, ``play`` and ``export`` accept.

    All files are of one commit, which ``hub.json`` in the folder names.

    Args:
        repo: ``owner/name``.
        out: a new folder; default: ``policies/owner--name``.
        revision: a commit, tag or branch; default: the newest commit.
    Raises:
        ConfigError: no such repository or revision, one with other files than a policy's, too large a file, or a
            checkpoint that no run could have written.
    """
    check_repo(repo)
    folder = expanded("out", out) if out is not None else Path("policies") / repo.replace("/", "--")
    if folder.exists():
        raise ConfigError("out", folder, "a new folder")
    hub = _library()
    about = {"revision": revision, "files_metadata": True, "timeout": deadlines.HUB}
    info = _asked(repo, lambda: hub.HfApi(endpoint=endpoint()).model_info(repo, **about))
    commit = str(info.sha)
    if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision or "") and commit != revision):
        raise ConfigError("revision", revision, f"a commit of {repo}; the hub answers with {commit:.40}")
    check_listing(repo, {s.rfilename: s.size for s in info.siblings or ()})
    with _temporary_beside(folder) as name_of_temporary:
        temporary = Path(name_of_temporary)
        for name in LIMITS:
            where = {"revision": commit, "local_dir": temporary / "hub", "endpoint": endpoint()}
            _asked(repo, lambda name=name, where=where: hub.hf_hub_download(repo, name, **where))  # type: ignore[misc]
        run = _arranged(temporary, repo)
        manifest = checked(repo, run / "checkpoints" / "last")
        (run / ORIGIN).write_text(json.dumps({"repo": repo, "revision": commit}, indent=1) + "\n")
        run.rename(folder)
    return Pulled(folder, commit, names_foreign_code(from_dict(manifest["config"])))


def push(path: str | Path, repo: str, private: bool = True, message: str | None = None) -> str:
    """Upload the policy of a run or checkpoint with a card; return the commit.

    The upload has no paths of this machine except those that the task's settings name.

    Args:
        path: a run (its last policy, else its best) or a policy checkpoint.
        repo: ``owner/name``, created if missing; needs a login of huggingface_hub.
        private: of a new repository.
    Raises:
        ConfigError: no policy there, or a repository that cannot be written.
    """
    check_repo(repo)
    hub = _library()
    tensors, manifest, found = checkpoint.find(expanded("run", path), ("policy",))
    check_finite(tensors, manifest)
    public = without_places(manifest)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        checkpoint.save(folder, tensors, public)
        (folder / CARD).write_text(card(repo, found, public), encoding="utf-8")
        check_listing(repo, {p.name: p.stat().st_size for p in folder.iterdir()})
        files = [hub.CommitOperationAdd(name, str(folder / name)) for name in LIMITS]
        api, note = hub.HfApi(endpoint=endpoint()), message or "Policy trained with pql"
        _asked(repo, lambda: api.create_repo(repo, private=private, exist_ok=True))
        return str(_asked(repo, lambda: api.create_commit(repo, files, commit_message=note)).oid)


def check_repo(repo: str) -> None:
    """Raise ``ConfigError`` if ``repo`` is not ``owner/name``."""
    if not NAME.fullmatch(repo) or ".." in repo:
        raise ConfigError("repo", repo, "OWNER/NAME")


def check_listing(repo: str, sizes: Mapping[str, int | None]) -> None:
    """Raise ``ConfigError`` if a repository has other files than a policy's, lacks one, or one is too large. ``sizes``:
    bytes by file name."""
    for name in (n for n in LIMITS if n not in sizes):
        raise ConfigError("repo", repo, f"a policy of pql: {name} is missing")
    for name, size in sizes.items():
        if name in IGNORED:
            continue
        if name not in LIMITS:
            raise ConfigError("repo", repo, f"only {', '.join(LIMITS)}; it has {name:.80}, and nothing was downloaded")
        if size is None or size > LIMITS[name]:
            most = f"at most {LIMITS[name]:,} bytes in {name}, not {size or 'an unknown size'}"
            raise ConfigError("repo", repo, most)


def checked(repo: str, path: Path) -> dict[str, Any]:
    """Return the manifest of a policy checkpoint after all checks that need no environment. Raises ``ConfigError``: it
    is damaged, is no policy, or has weights that are not finite."""
    try:
        tensors, manifest = checkpoint.load(path, ("policy",))
        check_finite(tensors, manifest)
    except ConfigError as error:
        raise ConfigError("repo", repo, error.allowed) from error
    return manifest


def without_places(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without the ``PRIVATE`` settings and without hashes: those of files that the run has read, and
    those that ``checkpoint.save`` adds."""
    left_out = ("format", "sha256", "manifest_sha256", "sources")
    out = copy.deepcopy({k: v for k, v in manifest.items() if k not in left_out})
    for names in PRIVATE:
        _drop(out["config"], names)
    return out


def _drop(tree: Any, names: Sequence[str]) -> None:
    for name in names[:-1]:
        tree = tree.get(name) or {}
    tree.pop(names[-1], None)


def _arranged(temporary: Path, repo: str) -> Path:
    """Return a run directory with the downloaded files, whose sizes are checked again."""
    run = temporary / "run"
    (run / "checkpoints" / "last").mkdir(parents=True)
    check_listing(repo, {name: (temporary / "hub" / name).stat().st_size for name in LIMITS})
    for name in LIMITS:
        (temporary / "hub" / name).replace((run if name == CARD else run / "checkpoints" / "last") / name)
    return run


def _temporary_beside(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    with writing("out", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pulling-")


def endpoint() -> str | None:
    """Return the hub's address (``HF_ENDPOINT``); None: the library's default."""
    return os.environ.get("HF_ENDPOINT")


def _library() -> Any:
    if importlib.util.find_spec("huggingface_hub") is None:
        what = "the package 'huggingface_hub', which is not installed: pip install 'pql-rl[hub]'"
        raise ConfigError("command", "pull or push", what)
    import huggingface_hub

    return huggingface_hub


def _asked(repo: str, request: Callable[[], Any]) -> Any:
    """Return the hub's answer. Raises ``ConfigError`` with the first line of its error."""
    try:
        return request()
    except ConfigError:
        raise
    except Exception as error:  # of the library, of its HTTP client, or of the socket
        where = endpoint() or "the hub"
        raise ConfigError("repo", repo, f"a repository that {where} lets you use ({first_line(error)})") from error
