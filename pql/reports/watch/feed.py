"""Incremental reading of the runs below a folder: metrics, state, newest video and log. Nothing is written or executed.

Memory is bounded: of a long run every second row is left out whenever there are too many.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pql.config.files import read_yaml
from pql.run.store import run_dir

Row = dict[str, float]
POINTS = 400  # rows of each kind that are kept; at most twice as many
CHUNK = 8 << 20  # bytes of metrics.jsonl read at a time
KEYS, KEY = 200, 100  # metrics of a run, characters of a name
RUNS = 200
DEPTH = 4  # folders between the folder that is shown and a run
LOG_BYTES = 6000
ALIVE = 90.0  # seconds since the last row after which an unfinished run counts as stopped


class Thinned:
    """Rows of a series, of which at most ``2 * POINTS`` are kept, evenly."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.stride, self.seen = 1, 0

    def add(self, row: Row) -> None:
        if self.seen % self.stride == 0:
            self.rows.append(row)
        self.seen += 1
        if len(self.rows) > 2 * POINTS:
            self.rows, self.stride = self.rows[::2], 2 * self.stride


class Feed:
    """One run directory."""

    def __init__(self, path: Path):
        self.path = path
        self.settings: dict[str, Any] = {}
        self._restart()

    def _restart(self) -> None:
        self.offset, self.training, self.evaluations = 0, Thinned(), Thinned()
        self.latest: Row = {}
        self._rest = b""

    def update(self) -> None:
        """Read the rows that were appended since the last call; all of them if the file was replaced."""
        file = self.path / "metrics.jsonl"
        if not ordinary(file):
            return
        try:
            with file.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self.offset:
                    self._restart()
                stream.seek(self.offset)
                data = stream.read(CHUNK)
        except OSError:
            return
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-CHUNK:]
        for line in lines:
            self._add(line)
        if not self.settings:
            self.settings = settings_of(self.path)

    def _add(self, line: bytes) -> None:
        row = numbers(line)
        if "steps/env" in row:
            (self.evaluations if "eval/return_mean" in row else self.training).add(row)
            self.latest.update({k: v for k, v in row.items() if k in self.latest or len(self.latest) < KEYS})

    def state(self) -> str:
        """Return running, finished, or stopped."""
        if run_dir.state(self.path) == "finished":
            return "finished"
        ended = run_dir.read_summary(self.path) is not None
        return "running" if not ended and time.time() - modified(self.path / "metrics.jsonl") < ALIVE else "stopped"

    def version(self) -> str:
        """Return a text that changes whenever :meth:`body` does."""
        video, log = self.video(), self.log()
        return f"{self.offset} {described(video)} {described(log)}"

    def video(self) -> Path | None:
        """Return the newest complete video."""
        return newest(self.path / "videos", ".mp4")

    def log(self) -> Path | None:
        """Return the log of the run: a file next to its directory with its name, as sweeps write, else one in it."""
        beside = self.path.with_suffix(".log")
        return beside if ordinary(beside) else newest(self.path, ".log")

    def head(self) -> dict[str, Any]:
        """Return the run's line in the list of runs."""
        names = ("time/seconds", "steps/env", "train/return_mean", "eval/return_mean", "throughput/env_steps_per_s")
        return {
            **{key: text(self.settings, *path) for key, path in TEXTS.items()},
            "state": self.state(),
            "latest": {name: self.latest.get(name) for name in names},
        }

    def body(self) -> dict[str, Any]:
        """Return the curves and everything else about the run."""
        replay = self.settings.get("replay")
        capacity = replay.get("capacity") if isinstance(replay, Mapping) else None
        return {
            **self.head(),
            "version": self.version(),
            "training": columns(self.training.rows),
            "evaluations": columns(self.evaluations.rows),
            "latest": self.latest,
            "capacity": capacity if isinstance(capacity, int) else None,
            "video": described(self.video()) or None,
            "log": tail(self.log()),
        }


TEXTS = {"task": ("task", "name"), "algo": ("algo", "name"), "seed": ("seed",)}


def modified(path: Path) -> float:
    """Return the time at which a file or folder last changed; 0 if it has gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml, unchecked; {} if it cannot be read."""
    try:
        found = read_yaml(path / "config.yaml")
    except Exception:  # of a run directory that anybody may have written
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict | str | int)} if isinstance(found, dict) else {}


def text(settings: Mapping[str, Any], *path: str) -> str:
    """Return a setting as a short text."""
    node: Any = settings
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    return "" if node is None else str(node)[:KEY]


def numbers(line: bytes) -> Row:
    """Return the finite numbers of a line of metrics.jsonl; {} for a line that is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict):
        return {}
    items = [(k, v) for k, v in row.items() if isinstance(v, int | float) and len(k) <= KEY][:KEYS]
    return {k: float(v) for k, v in items if abs(v) < 1e300 and math.isfinite(v)}


def columns(rows: list[Row]) -> dict[str, list[float | None]]:
    """Return rows as columns of equal length, with None where a row lacks the metric."""
    names = list(dict.fromkeys(name for row in rows for name in row))[:KEYS]
    return {name: [row.get(name) for row in rows] for name in names}


def ordinary(path: Path) -> bool:
    """Return True for a file that is no link, so that opening it neither waits nor leads elsewhere."""
    return path.is_file() and not path.is_symlink()


def newest(folder: Path, suffix: str) -> Path | None:
    """Return the newest ordinary, complete file with the suffix; None if there is none."""
    try:
        found = [p for p in folder.iterdir() if p.suffix == suffix and p.name[0] != "." and ordinary(p)]
        return max(found, key=lambda p: p.stat().st_mtime_ns, default=None)
    except OSError:
        return None


def described(file: Path | None) -> str:
    """Return name, size and time of a file; "" for none, or one that has just gone."""
    try:
        return "" if file is None else f"{file.name} {(facts := file.stat()).st_size} {facts.st_mtime_ns}"
    except OSError:
        return ""


def tail(file: Path | None) -> str:
    """Return the last lines of a log file."""
    if file is None:
        return ""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_BYTES))
            return stream.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


class Folder:
    """All runs below a folder, or one run, by their path relative to it."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.feeds: dict[str, Feed] = {}

    def update(self) -> None:
        """Find new runs and read the new rows of all."""
        for path in sorted(self._paths(), key=lambda p: (-modified(p), p))[:RUNS]:
            name = str(path.relative_to(self.root)) if path != self.root else path.name
            self.feeds.setdefault(name, Feed(path))
        self.feeds = {name: feed for name, feed in sorted(self.feeds.items()) if feed.path.is_dir()}
        for feed in self.feeds.values():
            feed.update()

    def _paths(self) -> list[Path]:
        found: list[Path] = []
        folders = [(self.root, 0)]
        while folders and len(found) < 10 * RUNS:
            folder, depth = folders.pop()
            if (folder / "metrics.jsonl").is_file() or (folder / "config.yaml").is_file():
                found.append(folder)
            elif depth < DEPTH:
                try:
                    below = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and p.name[0] != "."]
                except OSError:
                    continue
                folders += [(p, depth + 1) for p in below]
        return found
