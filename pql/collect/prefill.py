"""A collector's empty rings filled from recorded data, in either layout of ``pql.data.transitions``.

Observations are handled as numbers of frames: a file may hold as many as fit into memory once. A *frame* is what a ring
keeps of one observation: of a stack the newest, of anything else all of it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pql.collect.collector import Collector
from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.data.flags import FINAL_OK, NEXT_FIRST, TERMINATED, VALID, tables
from pql.data.frames import Stacker, deepest, kept_shape
from pql.data.transitions import Columns, flags_of, read_transitions, write_transitions
from pql.errors import ConfigError
from pql.types import Obs

LARGEST_ACTION = 1 + 1e-4
CHUNK = 1 << 16  # observations that the normaliser sees at once: it works in float64


class Transitions(NamedTuple):
    """M usable transitions. Where ``next_obs[i]`` is ``obs[i + 1]``, and i ended nothing, n-step windows go on."""

    frames: Obs  # [F, ...] by group
    obs: Obs  # [M, S] int64, which frames: a stack's S, oldest first; S = 1 where nothing is stacked
    next_obs: Obs  # [M, S]
    columns: Columns  # action, reward, and what is kept beside them: [M, ...]
    terminated: Tensor  # [M] bool
    cut: Tensor  # [M] bool; the value of next_obs stands beyond this row, and no window does


class Stream(NamedTuple):
    """R rows as an environment would have made them that resets a step late, and one observation more."""

    newest: Obs  # [R + 1] int64 by group: the frame that each row adds
    columns: Columns  # [R + 1, ...]
    flags: Tensor  # [R] uint8, packed
    origin: Tensor  # [R] int64: which transition; -1: a filler row


def prefill(collector: Collector, path: str | Path, part: int = 0, parts: int = 1) -> int:
    """Fill the collector's empty rings from a file of either layout; the normaliser sees the observations, too.

    Of more data than fit, the last are taken. The collector goes on with the observations it has. Where a transition
    does not continue in the next one, a filler row holds its successor, and where a stack of frames does not continue
    that of the transition before, filler rows hold its older frames: that costs rows and loses nothing.
    Of ``parts`` rings that share the data, this is number ``part``.

    Returns the transitions taken.

    Raises:
        ConfigError: no such file, or columns that do not fit the environment; names the column.
    """
    setting, spec = "replay.prefill", collector.env.spec
    replay = collector.replays[0]
    data = read_transitions(setting, path, spec.obs, replay.action, replay.extra)
    kept = replay.rows - 2  # one is the filler at the end, one is in flight
    taken = share(last(transitions_of(data, spec.obs), kept * replay.num_envs * parts), part, parts)
    check_values(setting, path, taken, spec)
    stream = stream_of(taken)
    depth = min(stream.flags.shape[0] // replay.num_envs, kept)
    if depth == 0:
        raise ConfigError(setting, path, f"at least {replay.num_envs} transitions, one for each environment")
    start = stream.flags.shape[0] - depth * replay.num_envs
    # [depth + 1, N]: environments one after the other; the last row of each begins the next one, or ends the stream
    at = start + torch.arange(replay.num_envs) * depth + torch.arange(depth + 1)[:, None]
    flags = without_history(stream.flags, at, deepest(spec.obs.values()))
    for ring in collector.replays:
        for k, store in ring.obs.items():
            write_transitions(store, taken.frames[k][stream.newest[k][at]])
        write_transitions(ring.flags, torch.cat((flags, torch.full_like(flags[:1], NEXT_FIRST))))
        if not ring.obs_only:
            stores = {"action": ring.action, "reward": ring.reward, **{f"extra.{k}": v for k, v in ring.extra.items()}}
            for k, store in stores.items():
                write_transitions(store, stream.columns[k][at])
        ring.live.head.fill_(depth + 1)
        ring.begin({k: v.to(ring.device) for k, v in collector.obs.items()})
    valid = flags & VALID > 0
    for part in stream.origin[at[:-1][valid]].split(CHUNK):
        seen = {k: v for k, v in spec.obs.items() if v.dtype.is_floating_point}
        shown = {k: taken.frames[k][taken.obs[k][part]].view(-1, *s.shape) for k, s in seen.items()}
        collector.normalizer.observe({k: v.to(collector.device) for k, v in shown.items()})
    collector.normalizer.freeze()
    return int(valid.sum())


# -- a file's columns as transitions ----------------------------------------------------------------------------------


def transitions_of(data: Columns, specs: Mapping[str, ObsSpec]) -> Transitions:
    """Columns of either layout -> the usable transitions. Fillers and rows whose successor is lost fall away."""
    beside = [k for k in data if k in ("action", "reward") or k.startswith("extra.")]
    cut = data["truncated"] & ~data["terminated"]
    if data["reward"].dim() == 1:
        frames, obs, after = {}, {}, {}
        for k, s in specs.items():
            shown, count = torch.cat((data[f"obs.{k}"], data[f"next_obs.{k}"])), cut.shape[0]
            frames[k] = shown.reshape(-1, *kept_shape(s))
            obs[k], after[k] = torch.arange(2 * count * s.stack).view(2, count, s.stack)
        return Transitions(frames, obs, after, {k: data[k] for k in beside}, data["terminated"], cut)
    rows, n = cut.shape
    place = torch.full((rows * n,), -1)  # of a row's final observation
    place[data["final_row"]] = torch.arange(data["final_row"].shape[0])
    place = place.view(rows, n)
    unannounced = data["first"] & ~data["terminated"] & ~data["truncated"]
    usable = data["valid"] & (torch.arange(rows)[:, None] < data["length"]) & ~unannounced & ~(cut & (place < 0))
    column, row = usable.T.nonzero().unbind(1)  # environment by environment, in time
    cut, place = cut[row, column], place[row, column]
    # Frames: all rows' and those that follow the last ones, the final observations', and a blank one.
    finals = (rows + 1) * n
    blank = finals + data["final_row"].shape[0]
    flags = torch.cat((flags_of(data), data["valid"].new_zeros(1, n).to(torch.uint8))).flatten()
    stacker = Stacker(deepest(specs.values()), rows + 1, n, blank, tables(flags.device)["same episode"])
    cells = stacker.cells(flags, row, column)
    successor = torch.where(cut, finals + place, (row + 1) * n + column)
    following = torch.cat((cells[:, 1:], successor[:, None]), 1)
    frames = {
        k: torch.cat((v.flatten(0, 1), data[f"final_obs.{k}"], torch.zeros_like(v[0, :1])))
        for k, v in ((k, data[f"obs.{k}"]) for k in specs)
    }
    obs, after = ({k: c[:, -s.stack :] for k, s in specs.items()} for c in (cells, following))
    return Transitions(
        frames, obs, after, {k: data[k][row, column] for k in beside}, data["terminated"][row, column], cut
    )


def last(given: Transitions, count: int) -> Transitions:
    """The last ``count`` of them."""
    return picked(given, slice(-count, None))


def share(given: Transitions, part: int, parts: int) -> Transitions:
    """Part number ``part`` of ``parts`` that follow one another."""
    total = given.cut.shape[0]
    return picked(given, slice(part * total // parts, (part + 1) * total // parts))


def picked(given: Transitions, which: slice) -> Transitions:
    """Some of them; all frames stay."""
    obs, after, columns = ({k: v[which] for k, v in group.items()} for group in given[1:4])
    return Transitions(given.frames, obs, after, columns, given.terminated[which], given.cut[which])


def check_values(setting: str, path: str | Path, given: Transitions, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` for what no training could make sense of."""
    for name, v in {**given.columns, **{f"obs.{k}": v for k, v in given.frames.items()}}.items():
        if v.is_floating_point() and not bool(v.isfinite().all()):
            raise ConfigError(setting, path, f"finite numbers in column {name}")
    action = given.columns["action"]
    if isinstance(spec.action, Discrete):
        if action.numel() and not 0 <= int(action.min()) <= int(action.max()) < spec.action.n:
            raise ConfigError(setting, path, f"actions from 0 to {spec.action.n - 1}")
    elif action.numel() and float(largest := action.abs().max()) > LARGEST_ACTION:
        raise ConfigError(setting, path, f"actions in [-1, 1], as the policy gives them; one is {float(largest):.4g}")


# -- transitions as rows ----------------------------------------------------------------------------------------------


def stream_of(given: Transitions) -> Stream:
    """Transitions as a stream of rows.

    The successor of a row is the next row's observation: where the next transition has another, a filler row comes in
    between. A stack that does not go on from the transition before needs its older frames in filler rows before it.
    """
    goes_on = torch.ones_like(given.cut)
    for k, frames in given.frames.items():
        goes_on[:-1] &= same_frames(frames, given.next_obs[k][:-1], given.obs[k][1:])
    goes_on[-1:] = False
    depth = max(v.shape[1] for v in given.obs.values())
    life = given.terminated & goes_on & (depth > 1)  # the next stack goes on: no episode ended
    filled = ~given.terminated & (given.cut | ~goes_on)
    linked = goes_on & ~given.cut & (~given.terminated | life)
    history = torch.where(torch.cat((linked[-1:] | True, ~linked[:-1])), older_frames(given), 0)  # rows before it
    total = history + 1 + filled.long()
    place = total.cumsum(0) - total + history
    count = int(total.sum())
    newest: Obs = {}
    for k, v in given.obs.items():
        index = v.new_zeros(count + 1)
        index[place] = v[:, -1]
        index[place[filled] + 1] = given.next_obs[k][filled, -1]
        for back in range(1, v.shape[1]):
            needed = history >= back
            index[place[needed] - back] = v[needed, -1 - back]
        newest[k] = index
    columns = {k: v.new_zeros(count + 1, *v.shape[1:]) for k, v in given.columns.items()}
    for k, v in columns.items():
        v[place] = given.columns[k]
    flags = torch.full((count,), FINAL_OK, dtype=torch.uint8)
    flags[place[filled] + 1] |= NEXT_FIRST
    flags[place] |= (VALID + given.terminated * TERMINATED + (given.terminated & ~life) * NEXT_FIRST).to(torch.uint8)
    origin = torch.full((count,), -1)
    origin[place] = torch.arange(place.shape[0])
    return Stream(newest, columns, flags, origin)


def same_frames(frames: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Return where the frames of ``one`` and ``two`` (both [m, S]) are bitwise equal, [m] bool."""
    same = (one == two).all(1)
    for part in (~same).nonzero().squeeze(1).split(CHUNK):
        same[part] = (frames[one[part]] == frames[two[part]]).flatten(1).all(1)
    return same


def older_frames(given: Transitions) -> Tensor:
    """How many frames back the stacks of a transition are other than blank, [M] int64: 0 without stacks."""
    reach = torch.zeros(given.cut.shape[0], dtype=torch.int64)
    for k, index in given.obs.items():
        if index.shape[1] > 1:
            shown = torch.cat([(part != 0).flatten(1).any(1) for part in given.frames[k].split(CHUNK)])
            back = torch.arange(index.shape[1] - 1, 0, -1)  # oldest first
            reach = torch.maximum(reach, (shown[index[:, :-1]] * back).amax(1))
    return reach


def without_history(flags: Tensor, at: Tensor, depth: int) -> Tensor:
    """A column's flags [T, N] of the rows ``at`` [T + 1, N] of a stream: its first rows are fillers where the stream
    has frames of their stacks before them, in another column."""
    inside, before = flags[at[:-1]], torch.cat((flags.new_tensor([NEXT_FIRST]), flags))[at[0]]
    begun = torch.cat((before[None], inside[:-1])).bitwise_and(NEXT_FIRST).cumsum(0) > 0  # an episode, in this column
    complete = begun | (torch.arange(inside.shape[0])[:, None] >= depth - 1)
    return torch.where(complete, inside, inside & (255 - VALID))
