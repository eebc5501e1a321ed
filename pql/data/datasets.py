"""Demonstrations in other formats: LeRobot datasets (parquet) and robomimic files (HDF5), as columns of rows.

Sources: LeRobotDataset v2 and v3 (https://github.com/huggingface/lerobot), robomimic's dataset structure
(https://robomimic.github.io/docs/datasets/overview.html). Images of videos are not decoded.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pql.config.files import read_json
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.contract.stacks import kept_shape
from pql.errors import ConfigError, PqlWarning, nearest

KEYS = "replay.demo_keys"
HDF5 = (".hdf5", ".h5")


class LeRobot:
    """A dataset's folder. Columns have one entry for each of T frames, episode after episode.

    Attributes:
        kinds: (type, shape of one entry) of all columns by name.
        ends: [T] bool; the last frame of an episode, or one after which frames are missing.
    """

    groups, action, reward = ("observation.{}", "observation.state"), "action", "next.reward"
    done: tuple[str, ...] = ("next.done", "next.success")  # an end that is no success may be a time limit's

    def __init__(self, path: Path):
        import pyarrow.parquet

        info, self.read = read_json(path / "meta" / "info.json"), pyarrow.parquet.read_table
        if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
            raise ValueError("its meta/info.json has no features")
        if not str(version := info.get("codebase_version", "")).startswith(("v2", "v3")):
            raise ValueError(f"a dataset of LeRobot v2 or v3, not {version or 'without codebase_version'}")
        self.kinds = {k: (str(v["dtype"]), tuple(v["shape"])) for k, v in info["features"].items()}
        if not (files := sorted((path / "data").rglob("*.parquet"))):
            raise ValueError("it has no data/**/*.parquet")
        self.files = files
        number = torch.stack([self.column(k).flatten() for k in ("episode_index", "frame_index")])
        if number.shape[1] != info["total_frames"]:
            raise ValueError(f"a dataset with its {info['total_frames']:,} frames; data has {number.shape[1]:,}")
        self.order = (number[0] * (number[1].max() + 1) + number[1]).argsort()
        step = number[:, self.order].diff(dim=1)
        self.ends = torch.cat((~((step[0] == 0) & (step[1] == 1)), torch.ones(1, dtype=torch.bool)))
        if "next.done" not in self.kinds:
            self.done = ()

    def column(self, name: str) -> Tensor:
        """Return a column [T, ...]."""
        shape, parts = self.kinds[name][1], []
        for file in self.files:
            values = self.read(file, columns=[name], partitioning=None).column(name).combine_chunks()
            values = getattr(values, "storage", values)  # of an extension type
            while values.type.num_fields:
                values = values.flatten()
            parts.append(torch.from_numpy(values.to_numpy(zero_copy_only=False).copy()).view(-1, *shape))
        whole = torch.cat(parts)
        if hasattr(self, "order") and len(whole) != len(self.order):
            raise ValueError(f"{name} has no {list(shape)} numbers in each frame, as meta/info.json says")
        return whole[self.order] if hasattr(self, "order") else whole

    def finals(self, name: str) -> None:
        """Return None: the observation after an episode's last frame is not recorded."""


class Robomimic:
    """A file of demonstrations. Attributes and methods as of :class:`LeRobot`."""

    groups, action, reward, done = ("{}",), "actions", "rewards", ("dones",)

    def __init__(self, path: Path):
        import h5py

        self.path, data = str(path), h5py.File(path, "r")["data"]
        names = sorted(data, key=lambda name: (len(name), name))
        if other := [k for k in names if "actions" not in data[k]]:
            raise ValueError(f"data/{other[0]} has no actions")
        self.demos = [data[k] for k in names if len(data[k]["actions"])]
        if not self.demos:
            raise ValueError("it has no demonstrations")
        first = {k: v for k, v in self.demos[0].items() if hasattr(v, "dtype")} | dict(self.demos[0].get("obs", {}))
        self.kinds = {k: (str(v.dtype), v.shape[1:]) for k, v in first.items()}
        sizes = [len(demo["actions"]) for demo in self.demos]
        self.ends = torch.cat([torch.arange(size) == size - 1 for size in sizes])

    def column(self, name: str) -> Tensor:
        """Return a column [T, ...]."""
        return torch.cat([self._array(demo[name] if name in demo else demo["obs"][name]) for demo in self.demos])

    def _array(self, part: Any) -> Tensor:
        """Return a dataset [T, ...] of the file itself: the file may be of somebody else. Raises ``ValueError``."""
        if part.file.filename != self.path or part.external or part.is_virtual:
            raise ValueError(f"{part.name} is in another file")
        return torch.from_numpy(part[()])

    def finals(self, name: str) -> Tensor | None:
        """Return the final observations of F episodes, [F, ...]; None: unknown."""
        if not all(name in demo.get("next_obs", {}) for demo in self.demos):
            return None
        return torch.stack([self._array(demo["next_obs"][name])[-1] for demo in self.demos])


def read_dataset(
    setting: str, path: Path, keys: Mapping[str, Any], obs: Mapping[str, ObsSpec], spec: EnvSpec
) -> dict[str, Tensor] | None:
    """Return a dataset as columns [T, 1, ...] (``pql.data.transitions``, rows); None: ``path`` is no dataset.

    An episode's last frame is terminated where the dataset says so, else truncated. Actions of the simulator's bounds
    become those in [-1, 1].

    Args:
        keys: names of the columns of an observation group, of ``action``, ``reward`` and ``terminated``; of others the
            usual ones are taken.
        obs: observation groups as the replay stores them.
    Raises:
        ConfigError: it cannot be read, a package is missing, or a column is; names what the dataset has.
    """
    kind = LeRobot if (path / "meta" / "info.json").is_file() else Robomimic if path.suffix in HDF5 else None
    if kind is None:
        if keys:
            raise ConfigError(KEYS, keys, f"{{}} for {path.name}: a LeRobot dataset or a robomimic file has such keys")
        return None
    for name in keys:
        if name not in (known := [*obs, "action", "reward", "terminated"]):
            raise ConfigError(f"{KEYS}.{name}", keys[name], f"one of {', '.join(known)}{nearest(name, known)}")
        given = [keys[name]] if isinstance(keys[name], str) else keys[name]
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            raise ConfigError(f"{KEYS}.{name}", given, "a list of columns, such as [observation.state]")
    try:
        return _columns(setting, path, keys, obs, spec, kind(path))
    except ModuleNotFoundError as error:
        what = f"the package {error.name!r}, which is not installed: pip install 'pql-rl[demos]'"
        raise ConfigError(setting, path, what) from error
    except (OSError, LookupError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(setting, path, f"a {kind.__name__} dataset ({error})") from error


def _columns(
    setting: str, path: Path, keys: Mapping[str, Any], obs: Mapping[str, ObsSpec], spec: EnvSpec, found: Any
) -> dict[str, Tensor]:
    """Return the columns of an opened dataset."""
    out, ends = {}, found.ends
    for group, one in obs.items():
        names, frames = _read(found, keys, group, [name.format(group) for name in found.groups], kept_shape(one))
        out[f"obs.{group}"] = torch.cat((frames, frames[-1:]))
        finals = [found.finals(name) for name in names]
        if all(final is not None for final in finals):
            out |= {f"final_obs.{group}": torch.cat(finals, -1), "final_row": ends.nonzero().flatten()}
    usual = [name for name in found.done if name in found.kinds]
    done = _read(found, keys, "terminated", usual)[1] if keys.get("terminated", usual) else torch.zeros(len(ends), 1)
    terminated = (done.view(len(ends), -1) > 0).all(1)
    action = _unit(setting, path, _read(found, keys, "action", [found.action], spec.action.shape)[1], spec)
    reward = _read(found, keys, "reward", [found.reward])[1].float().flatten()
    flags = {"terminated": terminated, "truncated": ends & ~terminated, "first": ends}
    out |= {"action": action, "reward": reward, **flags}
    return {k: v if k.startswith("final") else v[:, None] for k, v in out.items()}


def _read(
    found: Any, keys: Mapping[str, Any], what: str, usual: list[str], shape: tuple[int, ...] | None = None
) -> tuple[list[str], Tensor]:
    """Return the names of the columns for ``what``, and their entries joined at the last axis, [T, *shape].

    Raises:
        ConfigError: the dataset does not have them, or they have another shape.
    """
    given, kinds = keys.get(what), found.kinds
    names = [given] if isinstance(given, str) else given
    if names is None:
        alike = [k for k, (_, size) in kinds.items() if k.startswith("observation.") and size == shape]
        named = [name for name in usual if name in kinds]
        names = named if what == "terminated" else named[:1] or (alike if len(alike) == 1 else [])
    unread = [name for name in names if kinds.get(name, ("",))[0] in ("video", "image", "string")]
    if names and not unread and {*names} <= {*kinds}:
        parts = [found.column(name) for name in names]
        joined = torch.cat([one.view(len(one), *(one.shape[1:] or (1,))) for one in parts], -1)
        if shape is None or joined.shape[1:] == shape:
            return list(names), joined
    has = ", ".join(f"{k} {kind} {[*size]}" for k, (kind, size) in kinds.items())
    wanted = "columns of numbers" + ("" if shape is None else f", of shape {[*shape]} together")
    why = f"{unread[0]} is not decoded; " if unread else ""
    raise ConfigError(f"{KEYS}.{what}", given, f"{wanted} (else {usual[:1]}); {why}the dataset has {has}")


def _unit(setting: str, path: Path, action: Tensor, spec: EnvSpec) -> Tensor:
    """Convert actions [T, A] of the simulator's bounds to those in [-1, 1]; clip others, with a warning."""
    box = cast(Box, spec.action)
    low, high = (torch.tensor(end) for end in box.bounds)
    middle = (low + high) / 2 if box.center is None else torch.tensor(box.center)
    reach = torch.where(action < middle, middle - low, high - middle)
    if "action_reach" in spec.info:
        reach = torch.tensor(spec.action_reach)
    if not bool(reach.isfinite().all()):
        raise ConfigError(setting, path, f"a task with finite bounds of actions; {spec.name} has {box.bounds}")
    unit = (action - middle) / reach
    if outside := int((unit.abs() > 1 + 1e-4).any(-1).sum()):
        what = f"{setting}={path}: {outside:,} of {len(unit):,} actions are outside the task's bounds: clipped"
        warnings.warn(what, PqlWarning, stacklevel=2)
    return unit.clamp(-1, 1).float()
