"""Transitions in files: a replay ring saved and loaded bit for bit, and one filled from recorded data.

One safetensors file, one tensor per column, in either of two layouts (``docs/replay.md`` is the reference):

* rows: ``[T, N, ...]``, N environments side by side, each observation once: a ring's content, as ``save`` writes it;
* transitions: ``[M, ...]`` with ``next_obs.<group>``; what most other software records.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pql.collect import Collector
from pql.env import ObsSpec
from pql.errors import ConfigError, nearest
from pql.flags import FINAL_OK, NEXT_FIRST, TERMINATED, TRUNCATED, VALID
from pql.replay import Replay
from pql.types import Obs

Columns = dict[str, Tensor]
META = {"format": "pql-replay-1"}  # one entry: safetensors writes several in random order
LARGEST_ACTION = 1 + 1e-4
CHUNK = 1 << 16  # observations that the normaliser sees at once: it works in float64


class Transitions(NamedTuple):
    """M usable transitions. Where ``next_obs[i]`` is ``obs[i + 1]``, and i ended nothing, n-step windows go on."""

    obs: Obs  # [M, ...]
    action: Tensor  # [M, A]
    reward: Tensor  # [M]
    terminated: Tensor  # [M] bool
    cut: Tensor  # [M] bool; the value of next_obs stands beyond this row, and no window does
    next_obs: Obs  # [M, ...]


# -- a ring as it is --------------------------------------------------------------------------------------------------


def save(replay: Replay, path: str | Path) -> None:
    """Write a ring's content in rows, oldest first. Between two ticks: nobody may be writing to it.

    Raises:
        OSError: it cannot be written; a file that was there before stays.
    """
    path = Path(path).expanduser()
    aside = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.cpu().contiguous() for k, v in rows_of(replay).items()}, aside, META)
        os.replace(aside, path)
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(str(error)) from error
    finally:
        aside.unlink(missing_ok=True)


def rows_of(replay: Replay) -> Columns:
    """A ring's intact rows: columns [T, N, ...], each environment's own ``length`` of them from the top."""
    head, n = replay.live.head, replay.num_envs
    length = head.clamp(max=replay.rows - 1)  # the observation to act on next lies in the oldest row's place
    t = torch.arange(int(length.max()) + 1, device=replay.device)[:, None]  # [T + 1, 1]
    logical = head - length + torch.minimum(t, length)
    cell = logical % replay.rows * n + replay.columns  # [T + 1, N]
    obs = {f"obs.{k}": v[cell] for k, v in replay.obs.items()}
    cell = cell[:-1]
    flags = replay.flags[cell].int()
    held = t[:-1] < length
    bits = {"terminated": TERMINATED, "truncated": TRUNCATED, "first": NEXT_FIRST, "valid": VALID}
    marks = {k: (flags & bit > 0) & held for k, bit in bits.items()}
    count = replay.final[cell]
    kept = count >= replay.live.finals - (replay.finals - replay.horizon)  # as a reader sees it
    known = marks["truncated"] & marks["valid"] & (flags & FINAL_OK > 0) & kept
    row, column = known.nonzero().unbind(1)
    slot = (replay.rows + count[row, column] % replay.finals) * n + column
    finals = {f"final_obs.{k}": v[slot] for k, v in replay.obs.items()}
    rest = {"action": replay.action[cell], "reward": replay.reward[cell], "length": length}
    return {**obs, **rest, **marks, **finals, "final_row": row * n + column}


def load(replay: Replay, path: str | Path) -> None:
    """Fill a ring from what :func:`save` wrote: it then gives the same samples. Of a longer file, the newest rows.

    Raises:
        ConfigError: no such file, or columns that do not fit this ring; names the column.
    """
    n = replay.num_envs
    groups = {k: ObsSpec(tuple(v.shape[1:]), v.dtype) for k, v in replay.obs.items()}
    data = read("replay", path, groups, None if replay.obs_only else replay.action.shape[1])
    if data["reward"].dim() != 2 or data["reward"].shape[1] != n:
        have = f"not rewards of shape {list(data['reward'].shape)} (replay.prefill takes those, too)"
        raise ConfigError("replay", path, f"rows of {n} environments, {have}")
    length = data["length"].clamp(max=replay.rows - 1)
    skipped = data["length"] - length  # [N] rows too old for this ring
    t, columns = torch.arange(int(length.max()) + 1)[:, None], torch.arange(n)
    taken = skipped + torch.minimum(t, length)  # [T + 1, N] rows of the file
    for k in replay.obs:
        write(replay.obs[k], data[f"obs.{k}"][taken, columns])
    taken = taken[:-1].clamp(max=data["reward"].shape[0] - 1)
    flags = flags_of(data)[taken, columns]
    write(replay.flags, flags)
    replay.live.head.copy_(length)
    if replay.obs_only:
        return
    write(replay.action, data["action"][taken, columns])
    write(replay.reward, data["reward"][taken, columns])
    counted = (flags & (TRUNCATED | VALID) == TRUNCATED | VALID) & (t[:-1] < length)  # as ``insert`` counts
    before, total = counted.cumsum(0) - counted.long(), counted.sum(0)
    write(replay.final, before)
    replay.live.finals.copy_(total)
    row, column = data["final_row"] // n, data["final_row"] % n
    row = row - skipped[column]
    count = before[row.clamp(min=0), column]
    held = ((row >= 0) & (count >= total[column] - replay.finals)).nonzero().squeeze(1)
    slot = (replay.rows + count % replay.finals)[held] * n + column[held]
    for k, v in replay.obs.items():
        v[slot.to(v.device)] = data[f"final_obs.{k}"][held].to(v)


def flags_of(data: Columns) -> Tensor:
    """A ring's packed flags, uint8 [T, N]."""
    bits = {"terminated": TERMINATED, "truncated": TRUNCATED, "first": NEXT_FIRST, "valid": VALID}
    flags = sum((data[k] * bit for k, bit in bits.items()), torch.zeros_like(data["reward"], dtype=torch.int64))
    found = torch.zeros_like(data["truncated"])
    found.view(-1)[data["final_row"]] = True
    return (flags + (found | ~data["truncated"]) * FINAL_OK).to(torch.uint8)


def write(store: Tensor, values: Tensor) -> None:
    """``values`` [T, N, ...] into the first cells of a ring's tensor, in its own type."""
    store[: values.shape[0] * values.shape[1]] = values.flatten(0, 1).to(store)


# -- data of any origin -----------------------------------------------------------------------------------------------


def prefill(collector: Collector, path: str | Path) -> int:
    """Fill the collector's empty rings from a file of either layout; the normaliser sees the observations, too.

    Of more data than fit, the last are taken. The collector goes on with the observations it has. Where a transition
    does not continue in the next one, a filler row holds its successor, which costs a row and loses nothing.

    Returns the transitions taken.

    Raises:
        ConfigError: no such file, or columns that do not fit the environment; names the column.
    """
    setting, spec = "replay.prefill", collector.env.spec
    replay = collector.replays[0]
    data = read(setting, path, spec.obs, replay.action.shape[1])
    kept = replay.rows - 2  # one is the filler at the end, one is in flight
    taken = last(transitions_of(data), kept * replay.num_envs)
    check_values(setting, path, taken)
    stream, flags = stream_of(taken)
    depth = min(flags.shape[0] // replay.num_envs, kept)
    if depth == 0:
        raise ConfigError(setting, path, f"at least {replay.num_envs} transitions, one for each environment")
    start = flags.shape[0] - depth * replay.num_envs
    # [depth + 1, N]: environments one after the other; the last row of each begins the next one, or ends the stream
    at = start + torch.arange(replay.num_envs) * depth + torch.arange(depth + 1)[:, None]
    flags = flags[at[:-1]]
    for ring in collector.replays:
        for k, store in ring.obs.items():
            write(store, stream[f"obs.{k}"][at])
        write(ring.flags, torch.cat((flags, torch.full_like(flags[:1], NEXT_FIRST))))
        if not ring.obs_only:
            write(ring.action, stream["action"][at])
            write(ring.reward, stream["reward"][at])
        ring.live.head.fill_(depth + 1)
        ring.begin({k: v.to(ring.device) for k, v in collector.obs.items()})
    valid = (flags & VALID > 0).flatten()
    for part in at[:-1].flatten()[valid].split(CHUNK):
        collector.normalizer.observe({k: stream[f"obs.{k}"][part].to(collector.device) for k in spec.obs})
    collector.normalizer.freeze()
    return int(valid.sum())


def transitions_of(data: Columns) -> Transitions:
    """Columns of either layout -> the usable transitions. Fillers and rows whose successor is lost fall away."""
    groups = [k.removeprefix("obs.") for k in data if k.startswith("obs.")]
    if data["reward"].dim() == 1:
        obs, after = ({k: data[f"{what}.{k}"] for k in groups} for what in ("obs", "next_obs"))
        cut = data["truncated"] & ~data["terminated"]
        return Transitions(obs, data["action"], data["reward"], data["terminated"], cut, after)
    rows, n = data["reward"].shape
    cut = data["truncated"] & ~data["terminated"]
    place = torch.full((rows * n,), -1)  # of a row's final observation
    place[data["final_row"]] = torch.arange(data["final_row"].shape[0])
    place = place.view(rows, n)
    unannounced = data["first"] & ~data["terminated"] & ~data["truncated"]
    usable = data["valid"] & (torch.arange(rows)[:, None] < data["length"]) & ~unannounced & ~(cut & (place < 0))
    column, row = usable.T.nonzero().unbind(1)  # environment by environment, in time
    cut, place = cut[row, column], place[row, column]
    obs = {k: data[f"obs.{k}"][row, column] for k in groups}
    after = {k: data[f"obs.{k}"][row + 1, column] for k in groups}
    for k in groups:
        after[k][cut] = data[f"final_obs.{k}"][place[cut]]
    action, reward, terminated = (data[k][row, column] for k in ("action", "reward", "terminated"))
    return Transitions(obs, action, reward, terminated, cut, after)


def last(given: Transitions, count: int) -> Transitions:
    """The last ``count`` of them."""
    obs, after = ({k: v[-count:] for k, v in group.items()} for group in (given.obs, given.next_obs))
    action, reward, terminated, cut = (v[-count:] for v in (given.action, given.reward, given.terminated, given.cut))
    return Transitions(obs, action, reward, terminated, cut, after)


def stream_of(given: Transitions) -> tuple[Columns, Tensor]:
    """Transitions as a stream of rows, [R, ...] columns and one observation more, and their packed flags [R].

    The successor of a row is the next row's observation: where the next transition has another, a filler row comes in
    between, as from an environment that resets a step late.
    """
    goes_on = torch.ones_like(given.cut)
    for k, v in given.obs.items():
        goes_on[:-1] &= (v[1:] == given.next_obs[k][:-1]).flatten(1).all(1)
    goes_on[-1:] = False
    filled = ~given.terminated & (given.cut | ~goes_on)
    place = torch.arange(filled.shape[0]) + filled.cumsum(0) - filled.long()
    count = filled.shape[0] + int(filled.sum())
    out: Columns = {}
    for k, v in given.obs.items():
        out[f"obs.{k}"] = v.new_zeros(count + 1, *v.shape[1:])
        out[f"obs.{k}"][place] = v
        out[f"obs.{k}"][place[filled] + 1] = given.next_obs[k][filled]
    for name, v in (("action", given.action), ("reward", given.reward)):
        out[name] = v.new_zeros(count + 1, *v.shape[1:])
        out[name][place] = v
    flags = torch.full((count,), NEXT_FIRST | FINAL_OK, dtype=torch.uint8)
    ends = given.terminated * (TERMINATED | NEXT_FIRST)
    flags[place] = (VALID | FINAL_OK | ends).to(torch.uint8)
    return out, flags


# -- files ------------------------------------------------------------------------------------------------------------


def read(setting: str, path: str | Path, obs: Mapping[str, ObsSpec], action_size: int | None) -> Columns:
    """A file's columns, checked against an environment, with defaults for those that may be left out.

    Args:
        setting: what to call the file in an error.
        action_size: A; None: actions and all else but observations are not needed.
    """
    try:
        data = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise ConfigError(setting, path, f"a safetensors file ({error})") from error

    def column(name: str) -> Tensor:
        if name not in data:
            has = ", ".join(sorted(data))
            raise ConfigError(setting, path, f"a column {name}{nearest(name, data)}; it has {has or 'none'}")
        return data[name]

    reward = column("reward")
    flat, lead = reward.dim() == 1, list(reward.shape)
    if reward.dim() not in (1, 2):
        raise ConfigError(setting, path, f"a column reward of shape [T, N] or [M], not {lead}")
    out: Columns = {}

    def take(name: str, shape: list[int], kind: str, default: Tensor | None = None) -> None:
        value = default if default is not None and name not in data else column(name)
        fits = {"float": value.is_floating_point(), "bool": value.dtype == torch.bool,
                "uint8": value.dtype == torch.uint8, "int64": value.dtype == torch.int64}[kind]  # fmt: skip
        if list(value.shape) != shape or not fits:
            have = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise ConfigError(setting, path, f"a column {name} of {kind} {shape}, not {have}")
        out[name] = value

    def take_obs(prefix: str, count: list[int]) -> None:
        for k, s in obs.items():
            take(f"{prefix}.{k}", [*count, *s.shape], "float" if s.dtype.is_floating_point else "uint8")

    take_obs("obs", lead if flat else [lead[0] + 1, lead[1]])
    take("reward", lead, "float")
    take("terminated", lead, "bool")
    take("truncated", lead, "bool")
    if action_size is not None:
        take("action", [*lead, action_size], "float")
    if flat:
        take_obs("next_obs", lead)
        return out
    take("first", lead, "bool", out["terminated"] | out["truncated"])
    take("valid", lead, "bool", torch.ones(lead, dtype=torch.bool))
    take("length", lead[1:], "int64", torch.full(lead[1:], lead[0]))
    finals = list(data.get("final_row", torch.empty(0)).shape)
    take("final_row", finals, "int64", torch.empty(0, dtype=torch.int64))
    if finals != [0]:
        take_obs("final_obs", finals)
    else:
        out |= {f"final_obs.{k}": out[f"obs.{k}"][:0, 0] for k in obs}
    for name, top in (("length", lead[0]), ("final_row", lead[0] * lead[1] - 1)):
        if ((out[name] < 0) | (out[name] > top)).any():
            raise ConfigError(setting, path, f"a column {name} within 0 to {top}")
    return out


def check_values(setting: str, path: str | Path, given: Transitions) -> None:
    """Raises ``ConfigError`` for what no training could make sense of."""
    named = {"action": given.action, "reward": given.reward}
    named |= {f"obs.{k}": v for k, v in given.obs.items()} | {f"next_obs.{k}": v for k, v in given.next_obs.items()}
    for name, v in named.items():
        if v.is_floating_point() and not bool(v.isfinite().all()):
            raise ConfigError(setting, path, f"finite numbers in column {name}")
    if given.action.numel() and float(largest := given.action.abs().max()) > LARGEST_ACTION:
        raise ConfigError(setting, path, f"actions in [-1, 1], as the policy gives them; one is {float(largest):.4g}")
