"""Files of transitions, and exact saving and loading of a replay ring.

A file is one safetensors file with one tensor per column, in one of two layouts (reference: ``docs/replay.md``):

* rows: ``[T, N, ...]`` for N environments, with each observation once and only the newest frame of a stack: the content
  of a ring, as ``save_replay`` writes it. Final observations are in filler rows, or in columns of their own;
* transitions: ``[M, ...]`` with ``next_obs.<group>`` and whole stacks, as most other software records them.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pql.config.files import check_header, expanded
from pql.contract.env import ObsSpec
from pql.contract.stacks import kept_shape, newest_frame
from pql.data import tensorfile
from pql.data.flags import NEXT_FIRST, TERMINATED, TRUNCATED, VALID
from pql.data.frames import in_parts
from pql.data.replay import Replay
from pql.errors import ConfigError, nearest

Columns = dict[str, Tensor]
Specs = Mapping[str, ObsSpec]
BITS = {"terminated": TERMINATED, "truncated": TRUNCATED, "first": NEXT_FIRST, "valid": VALID}
META = {"format": "pql-replay-2"}  # one entry: safetensors writes several in random order, so files would differ


# -- content of a ring ------------------------------------------------------------------------------------------------


def save_replay(replay: Replay, path: str | Path) -> None:
    """Write a ring's content in rows, oldest first. Call it between ticks, while nothing writes to the ring.

    Raises:
        OSError: it cannot be written; an existing file is kept.
    """
    save_rows(rows_of(replay), expanded("path", path))


def save_rows(rows: Columns, path: Path) -> None:
    """Write columns [T, N, ...] of rows, whole or not at all. Raises ``OSError`` as :func:`save_replay`."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensorfile.write(temporary, rows, META)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rows_of(replay: Replay) -> Columns:
    """Return a ring's intact rows: columns [T, N, ...], where each environment's ``length`` rows come first."""
    head = replay.live.head
    length = head.clamp(max=replay.rows - 1)  # the next observation to act on occupies the oldest row
    t = torch.arange(int(length.max()) + 1, device=replay.device)[:, None]  # [T + 1, 1]
    cell = replay.cell(head - length + torch.minimum(t, length), replay.columns)  # [T + 1, N]
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
    file = File("replay", path, groups, groups)
    data = read_transitions(file, None if replay.obs_only else replay.action, replay.extra)
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


def read_transitions(file: "File", action: Tensor | None, extra: Iterable[str] = ()) -> Columns:
    """Return a file's columns, checked against an environment, with defaults for optional ones.

    Args:
        action: the ring's action store, for shape and type; None: only observations are required.
        extra: names of additional numbers that the ring stores.
    """
    file.take_obs("obs", file.lead if file.flat else [file.lead[0] + 1, file.lead[1]])
    file.take("reward", file.lead, "float")
    file.take("terminated", file.lead, "bool")
    file.take("truncated", file.lead, "bool")
    if action is not None:
        file.take("action", [*file.lead, *action.shape[1:]], "float" if action.is_floating_point() else "int64")
        for name in extra:
            file.take(f"extra.{name}", file.lead, "float", torch.zeros(file.lead))
    if not file.flat:
        return with_fillers(file.rows())
    file.take_obs("next_obs", file.lead)
    return file.taken


class File:
    """Columns of a file, and those taken from it so far: of the right shapes and types.

    Args:
        setting: name of the setting, for errors.
        obs: the groups as the ring stores them.
        whole: groups before the ring reduces their images. The file may have these, too.
        data: its columns, if they are already read.

    Attributes:
        lead: shape of ``reward``: [T, N], or [M] if the file is ``flat``.
    """

    def __init__(self, setting: str, path: str | Path, obs: Specs, whole: Specs, data: Columns | None = None):
        self.setting, self.path, self.obs, self.whole, self.taken = setting, path, obs, whole, Columns()
        self.data, self.older = self._load() if data is None else (data, False)
        self.lead = list(self._column("reward").shape)
        self.flat = len(self.lead) == 1
        if len(self.lead) not in (1, 2):
            raise self._wrong(f"a column reward of shape [T, N] or [M], not {self.lead}")

    def _load(self) -> tuple[Columns, bool]:
        """Read a safetensors file. Return also if release 0.2 wrote it."""
        try:
            file = expanded(self.setting, self.path)
            if file.suffix in (".hdf5", ".h5"):
                raise self._wrong("a safetensors file; replay.demos reads datasets")
            check_header(file)
            with safe_open(file, "pt") as opened:
                return load_file(file), (opened.metadata() or {}).get("format") == "pql-replay-1"
        except (OSError, ValueError, SafetensorError) as error:
            raise self._wrong(f"a safetensors file ({error})") from error

    def _wrong(self, expected: str) -> ConfigError:
        return ConfigError(self.setting, self.path, expected)

    def _column(self, name: str) -> Tensor:
        if name not in self.data:
            has = ", ".join(sorted(self.data)) or "none"
            raise self._wrong(f"a column {name}{nearest(name, self.data)}; it has {has}")
        return self.data[name]

    def take(self, name: str, shape: list[int], dtype: str, default: Tensor | None = None, also: str = "") -> None:
        """Take a column of ``shape`` and ``dtype`` ("float": any floating type), or ``default`` if it is missing."""
        value = default if default is not None and name not in self.data else self._column(name)
        fits = value.is_floating_point() if dtype == "float" else value.dtype == getattr(torch, dtype)
        if list(value.shape) != shape or not fits:
            have = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise self._wrong(f"a column {name} of {dtype} {shape}{also}, not {have}")
        self.taken[name] = value

    def take_obs(self, prefix: str, count: list[int]) -> None:
        """Take the observation groups ``prefix``, [*count, ...] each; whole images are reduced."""
        for k, spec in self.obs.items():
            name = f"{prefix}.{k}"
            shape, full = (s.shape if self.flat else kept_shape(s) for s in (spec, self.whole[k]))
            found = self._column(name)
            if shape != full and found.shape == (*count, *full) and found.dtype == torch.uint8:
                self.data[name] = in_parts(found.flatten(0, len(count) - 1), shape).view(*count, *shape)
            elif not self.flat and shape != spec.shape and found.shape == (*count, *spec.shape):  # undeclared histories
                self.data[name] = newest_frame(found.flatten(0, len(count) - 1), spec).view(*count, *shape)
            dtype = "float" if spec.dtype.is_floating_point else str(spec.dtype).removeprefix("torch.")
            also = f" or of whole images {[*count, *full]}" if shape != full else ""
            self.take(name, [*count, *shape], dtype, also=also)

    def rows(self) -> Columns:
        """Take the columns that only rows have, and return all."""
        (rows, n), out = self.lead, self.taken
        self.take("first", self.lead, "bool", out["terminated"] | out["truncated"])
        self.take("valid", self.lead, "bool", torch.ones(self.lead, dtype=torch.bool))
        self.take("length", [n], "int64", torch.full([n], rows))
        finals = list(self.data.get("final_row", torch.empty(0)).shape)
        self.take("final_row", finals, "int64", torch.empty(0, dtype=torch.int64))
        if finals != [0]:
            self.take_obs("final_obs", finals)
        else:
            out |= {f"final_obs.{k}": out[f"obs.{k}"][:0, 0] for k in self.obs}
        for name, top in (("length", rows), ("final_row", rows * n - 1)):
            if ((out[name] < 0) | (out[name] > top)).any():
                raise self._wrong(f"a column {name} within 0 to {top}")
        if self.older:  # release 0.2: only ``final_row`` says which final observations are known
            known = torch.zeros(rows * n, dtype=torch.bool).index_fill_(0, out["final_row"], True).view(rows, n)
            out["first"] = out["first"] | out["truncated"] & ~known
        return out
