"""Files of transitions, and exact saving and loading of a replay ring.

A file is one safetensors file with one tensor per column, in one of two layouts (reference: ``docs/replay.md``):

* rows: ``[T, N, ...]`` for N environments, with each observation once and only the newest frame of a stack: the content
  of a ring, as ``save_replay`` writes it. Final observations are in filler rows, or in columns of their own;
* transitions: ``[M, ...]`` with ``next_obs.<group>`` and whole stacks, as most other software records them.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pql.config.files import check_header, expanded
from pql.contract.env import ObsSpec
from pql.data import tensorfile
from pql.data.flags import NEXT_FIRST, TERMINATED, TRUNCATED, VALID
from pql.data.frames import in_parts, kept_shape
from pql.data.replay import Replay
from pql.errors import ConfigError, nearest

Columns = dict[str, Tensor]
BITS = {"terminated": TERMINATED, "truncated": TRUNCATED, "first": NEXT_FIRST, "valid": VALID}
META = {"format": "pql-replay-2"}  # one entry: safetensors writes several in random order, so files would differ


# -- content of a ring ------------------------------------------------------------------------------------------------


def save_replay(replay: Replay, path: str | Path) -> None:
    """Write a ring's content in rows, oldest first. Call it between ticks, while nothing writes to the ring.

    Raises:
        OSError: it cannot be written; an existing file is kept.
    """
    path = expanded("path", path)
    temporary = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensorfile.write(temporary, rows_of(replay), META)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rows_of(replay: Replay) -> Columns:
    """Return a ring's intact rows: columns [T, N, ...], where each environment's ``length`` rows come first."""
    head, n = replay.live.head, replay.num_envs
    length = head.clamp(max=replay.rows - 1)  # the next observation to act on occupies the oldest row
    t = torch.arange(int(length.max()) + 1, device=replay.device)[:, None]  # [T + 1, 1]
    logical = head - length + torch.minimum(t, length)
    cell = logical % replay.rows * n + replay.columns  # [T + 1, N]
    obs = {f"obs.{k}": v[cell] for k, v in replay.obs.items()}
    cell = cell[:-1]
    flags = replay.flags[cell].int()
    held = t[:-1] < length
    marks = {k: (flags & bit > 0) & held for k, bit in BITS.items()}
    # Stacks of the first rows lack overwritten frames: these rows only supply frames to later stacks.
    marks["valid"] &= (t[:-1] >= max(replay.stacks.values()) - 1) | (head == length)
    rest = {"action": replay.action[cell], "reward": replay.reward[cell], "length": length}
    rest |= {f"extra.{k}": v[cell] for k, v in replay.extra.items()}
    return {**obs, **rest, **marks}


def load_replay(replay: Replay, path: str | Path) -> None:
    """Fill a ring from a file of :func:`save_replay`, to the same samples; keeps the newest rows that fit.

    Raises:
        ConfigError: no such file, or columns that do not fit this ring; names the column.
    """
    n = replay.num_envs
    groups = {k: ObsSpec(tuple(v.shape[1:]), v.dtype) for k, v in replay.obs.items()}
    data = read_transitions("replay", path, groups, None if replay.obs_only else replay.action, replay.extra)
    if data["reward"].dim() != 2 or data["reward"].shape[1] != n:
        have = f"not rewards of shape {list(data['reward'].shape)} (replay.prefill accepts those)"
        raise ConfigError("replay", path, f"rows of {n} environments, {have}")
    length = data["length"].clamp(max=replay.rows - 1)
    skipped = data["length"] - length  # [N] rows too old for this ring
    t, columns = torch.arange(int(length.max()) + 1)[:, None], torch.arange(n)
    taken = skipped + torch.minimum(t, length)  # [T + 1, N] rows of the file
    for k in replay.obs:
        write_transitions(replay.obs[k], data[f"obs.{k}"][taken, columns])
    taken = taken[:-1].clamp(max=data["reward"].shape[0] - 1)
    write_transitions(replay.flags, flags_of(data)[taken, columns])
    replay.live.head.copy_(length)
    if replay.obs_only:
        return
    write_transitions(replay.action, data["action"][taken, columns])
    write_transitions(replay.reward, data["reward"][taken, columns])
    for k, store in replay.extra.items():
        write_transitions(store, data[f"extra.{k}"][taken, columns])


def flags_of(data: Columns) -> Tensor:
    """Compute a ring's packed flags, uint8 [T, N]."""
    return sum((data[k] * bit for k, bit in BITS.items()), torch.zeros_like(data["reward"], dtype=torch.int64)).byte()


def with_fillers(data: Columns) -> Columns:
    """Return a file's rows with the final observations of ``final_row`` in filler rows, as a ring has them.

    Those of rows without ``first`` are left out: the next row already has them.
    """
    row, (rows, n) = data["final_row"], data["first"].shape
    row, which = (v[(data["first"] & data["valid"]).flatten()[row]] for v in (row, torch.arange(len(row))))
    added = torch.zeros(rows * n, dtype=torch.int64).index_fill_(0, row, 1).view(rows, n)
    before = torch.cat((added.new_zeros(1, n), added.cumsum(0)))  # [T + 1, N] fillers before row t
    place, column = torch.arange(rows + 1)[:, None] + before, torch.arange(n)
    filler = place.flatten()[row] + 1, row % n
    total, out = rows + int(before[-1].max()), {}
    for k, v in data.items():
        if k == "length":
            out[k] = v + before.gather(0, v[None])[0]
        elif not k.startswith("final_"):
            # No actor has valued the observations of filler rows.
            out[k] = v.new_full((total + len(v) - rows, *v.shape[1:]), torch.nan if k.startswith("extra.") else 0)
            out[k][place[: len(v)], column] = v
            if k.startswith("obs."):
                out[k][filler] = data[f"final_{k}"][which].to(v)
    out["first"][place.flatten()[row], row % n], out["first"][filler] = False, True
    return out


def write_transitions(store: Tensor, values: Tensor) -> None:
    """Copy ``values`` [T, N, ...] into the first cells of a ring's tensor, converted to its type."""
    store[: values.shape[0] * values.shape[1]] = values.flatten(0, 1).to(store)


# -- files ------------------------------------------------------------------------------------------------------------


def read_transitions(
    setting: str,
    path: str | Path,
    obs: Mapping[str, ObsSpec],
    action: Tensor | None,
    extra: Iterable[str] = (),
    whole: Mapping[str, ObsSpec] | None = None,
) -> Columns:
    """Return a file's columns, checked against an environment, with defaults for optional ones.

    Args:
        setting: name of the setting, for errors.
        action: the ring's action store, for shape and type; None: only observations are required.
        extra: names of additional numbers that the ring stores.
        whole: groups before the ring reduces their images. The file may have these, too.
    """
    file = _File(setting, path)
    reward = file.column("reward")
    flat, lead = reward.dim() == 1, list(reward.shape)
    if reward.dim() not in (1, 2):
        raise ConfigError(setting, path, f"a column reward of shape [T, N] or [M], not {lead}")
    shape_of = (lambda s: s.shape) if flat else kept_shape
    groups = {k: _Group(s.dtype, shape_of(s), shape_of((whole or obs)[k])) for k, s in obs.items()}
    file.take_obs("obs", lead if flat else [lead[0] + 1, lead[1]], groups)
    file.take("reward", lead, "float")
    file.take("terminated", lead, "bool")
    file.take("truncated", lead, "bool")
    if action is not None:
        file.take("action", [*lead, *action.shape[1:]], "float" if action.is_floating_point() else "int64")
        for name in extra:
            file.take(f"extra.{name}", lead, "float", torch.zeros(lead))
    if flat:
        file.take_obs("next_obs", lead, groups)
        return file.taken
    return with_fillers(_take_rows(file, lead, groups))


class _Group(NamedTuple):
    """An observation group as a file holds it: its type, and the shapes that the ring stores and before reduction."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]


class _File:
    """A file's columns; those that have been checked are in ``taken``.

    Raises:
        ConfigError: no safetensors file, or a column that is missing or does not fit; names it.
    """

    def __init__(self, setting: str, path: str | Path):
        self.setting, self.path = setting, path
        self.taken: Columns = {}
        try:
            file = expanded(setting, path)
            check_header(file)
            self.data = load_file(file)
            with safe_open(file, "pt") as opened:
                self.older = (opened.metadata() or {}).get("format") == "pql-replay-1"
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(setting, path, f"a safetensors file ({error})") from error

    def column(self, name: str) -> Tensor:
        if name not in self.data:
            has = ", ".join(sorted(self.data)) or "none"
            raise ConfigError(self.setting, self.path, f"a column {name}{nearest(name, self.data)}; it has {has}")
        return self.data[name]

    def take(self, name: str, shape: list[int], kind: str, default: Tensor | None = None, also: str = "") -> None:
        """Check a column; ``default`` stands for one that is missing, ``also`` tells of other shapes in an error."""
        value = default if default is not None and name not in self.data else self.column(name)
        fits = value.is_floating_point() if kind == "float" else value.dtype == getattr(torch, kind)
        if list(value.shape) != shape or not fits:
            have = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise ConfigError(self.setting, self.path, f"a column {name} of {kind} {shape}{also}, not {have}")
        self.taken[name] = value

    def take_obs(self, prefix: str, count: list[int], groups: Mapping[str, _Group]) -> None:
        """Check the columns [*count, ...] of all groups; whole images of bytes are reduced."""
        for k, (dtype, shape, whole) in groups.items():
            name = f"{prefix}.{k}"
            if shape != whole and self.column(name).shape == (*count, *whole) and self.data[name].dtype == torch.uint8:
                rows = self.data[name].flatten(0, len(count) - 1)
                self.data[name] = in_parts(rows, shape).view(*count, *shape)
            kind = "float" if dtype.is_floating_point else str(dtype).removeprefix("torch.")
            also = f" or of whole images {[*count, *whole]}" if shape != whole else ""
            self.take(name, [*count, *shape], kind, also=also)


def _take_rows(file: _File, lead: list[int], groups: Mapping[str, _Group]) -> Columns:
    """Return the columns of a file of rows, ``lead`` = [T, N]."""
    out = file.taken
    file.take("first", lead, "bool", out["terminated"] | out["truncated"])
    file.take("valid", lead, "bool", torch.ones(lead, dtype=torch.bool))
    file.take("length", lead[1:], "int64", torch.full(lead[1:], lead[0]))
    finals = list(file.data.get("final_row", torch.empty(0)).shape)
    file.take("final_row", finals, "int64", torch.empty(0, dtype=torch.int64))
    if finals != [0]:
        file.take_obs("final_obs", finals, groups)
    else:
        out |= {f"final_obs.{k}": out[f"obs.{k}"][:0, 0] for k in groups}
    for name, top in (("length", lead[0]), ("final_row", lead[0] * lead[1] - 1)):
        if ((out[name] < 0) | (out[name] > top)).any():
            raise ConfigError(file.setting, file.path, f"a column {name} within 0 to {top}")
    if file.older:  # release 0.2: only ``final_row`` says which final observations are known
        known = torch.zeros(lead, dtype=torch.bool).view(-1).index_fill_(0, out["final_row"], True).view(lead)
        out["first"] = out["first"] | out["truncated"] & ~known
    return out
