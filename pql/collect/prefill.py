"""Prefill: fills a collector's empty rings with recorded data, in either layout of ``pql.data.transitions``.

Observations are handled as frame indices, so that a file has to fit into memory only once. A *frame* is the part of an
observation that a ring stores: the newest image of a stack, otherwise the whole observation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pql.collect.collector import Collector
from pql.collect.nonfinite import LARGEST, all_finite
from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.contract.stacks import frames_of, from_frames, kept_shape
from pql.data.datasets import read_dataset
from pql.data.flags import NEXT_FIRST, TERMINATED, VALID, tables
from pql.data.frames import Stacker, deepest
from pql.data.normalize import Normalizer
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.data.transitions import Columns, File, flags_of, read_transitions, write_transitions
from pql.errors import ConfigError
from pql.types import Obs

LARGEST_ACTION = 1 + 1e-4
CHUNK = 1 << 16  # observations per call of the normaliser, which works in float64


class Transitions(NamedTuple):
    """M usable transitions. If ``next_obs[i]`` is ``obs[i + 1]`` and i ends nothing, n-step windows continue."""

    frames: Obs  # [F, ...] by group
    obs: Obs  # [M, S] int64, frame indices: a stack's S, oldest first; S = 1 without stacking
    next_obs: Obs  # [M, S]
    columns: Columns  # action, reward and extra columns: [M, ...]
    terminated: Tensor  # [M] bool
    cut: Tensor  # [M] bool; bootstrap from next_obs; no n-step window continues
    followed: Tensor  # [M] bool; next_obs is known (else the transition is terminated)


class Stream(NamedTuple):
    """R rows as from an environment with next-step autoreset, and one more observation."""

    newest: Obs  # [R + 1] int64 by group: index of the frame that each row adds
    columns: Columns  # [R + 1, ...]
    flags: Tensor  # [R] uint8, packed
    origin: Tensor  # [R] int64: index of the transition; -1: a filler row


class Demonstrations(NamedTuple):
    """Rings of recorded transitions, and what they were made of."""

    rings: list[Replay]
    taken: Transitions
    used: Tensor  # [M] int64, indices of ``taken``


def prefill(collector: Collector, path: str | Path, part: int = 0, parts: int = 1) -> int:
    """Fill the collector's empty rings from a file of either layout; the normaliser sees the observations, too.

    If the file has more data than fits, the last is used. The collector continues from its own observations. Where a
    transition does not continue in the next one, a filler row holds its successor; where a stack of frames does not
    continue the previous transition's, filler rows hold its older frames. This costs rows and loses no data. ``part``
    is the index among ``parts`` rings that share the data.

    Returns the number of transitions used.

    Raises:
        ConfigError: no such file, or columns that do not fit the environment; names the column.
    """
    setting, spec = "replay.prefill", collector.env.spec
    replay = collector.replays[0]
    kept = replay.rows - 2  # one is the filler at the end, one is in flight
    taken = share(last(transitions_in(setting, path, replay, spec), kept * replay.num_envs * parts), part, parts)
    check_values(setting, path, taken, spec)
    stream = stream_of(taken, replay.specs)
    depth = min(stream.flags.shape[0] // replay.num_envs, kept)
    if depth == 0:
        raise ConfigError(setting, path, f"at least {replay.num_envs} transitions, one for each environment")
    start = stream.flags.shape[0] - depth * replay.num_envs
    # [depth + 1, N]: consecutive per environment; each one's last row is the next one's first, or ends the stream
    at = start + torch.arange(replay.num_envs) * depth + torch.arange(depth + 1)[:, None]
    flags = without_history(stream.flags, at, deepest(replay.specs.values()))
    for ring in collector.replays:
        write_rows(ring, taken, stream, at, torch.cat((flags, torch.full_like(flags[:1], NEXT_FIRST))))
        ring.begin({k: v.to(ring.device) for k, v in collector.obs.items()})
    used = stream.origin[at[:-1][flags & VALID > 0]]
    observe_recorded(collector.normalizer, taken, used, spec)
    collector.normalizer.freeze()
    return len(used)


def demonstrations(
    path: Path, keys: Mapping[str, Any], rings: Sequence[Replay], layout: ReplayLayout, spec: EnvSpec
) -> Demonstrations:
    """Read recorded transitions into rings of one column that nothing writes to later, one for each of ``rings``.

    Args:
        path, keys: of a file, or as for :func:`pql.data.datasets.read_dataset`.
        rings: of the run, to whose devices and columns they are copied.
        layout: of the run's rings.
    Raises:
        ConfigError: as for :func:`prefill`.
    """
    setting = "replay.demos"
    taken = transitions_in(setting, path, rings[0], spec, read_dataset(setting, path, keys, rings[0].specs, spec))
    check_values(setting, path, taken, spec)
    stream, depth = stream_of(taken, rings[0].specs), deepest(rings[0].specs.values())
    count = stream.flags.shape[0]
    if count == 0:
        raise ConfigError(setting, path, "at least one transition whose successor is known")
    made, at = [], torch.arange(count + 1)[:, None]
    for like in rings:
        one = replace(layout, num_envs=1, horizon=1, rows=count + depth + 2, fillers=False)
        ring = Replay(one, like.device, obs_only=like.obs_only, reward_clip=like.reward_clip)
        write_rows(ring, taken, stream, at, without_history(stream.flags, at, depth))
        made.append(ring)
    return Demonstrations(made, taken, stream.origin[stream.origin >= 0])


def transitions_in(
    setting: str, path: str | Path, replay: Replay, spec: EnvSpec, data: Columns | None = None
) -> Transitions:
    """Return the usable transitions of a file, or of its columns ``data``, for a run's ring."""
    file = File(setting, path, replay.specs, spec.obs, data)
    return transitions_of(read_transitions(file, replay.action, replay.extra), replay.specs)


def write_rows(ring: Replay, taken: Transitions, stream: Stream, at: Tensor, flags: Tensor) -> None:
    """Write rows ``at`` [T + 1, N] of a stream into an empty ring; ``flags``: [T, N] or [T + 1, N], their flags."""
    for k, store in ring.obs.items():
        write_transitions(store, taken.frames[k][stream.newest[k][at]])
    write_transitions(ring.flags, flags)
    if not ring.obs_only:
        stores = {"action": ring.action, "reward": ring.reward, **{f"extra.{k}": v for k, v in ring.extra.items()}}
        for k, store in stores.items():
            write_transitions(store, stream.columns[k][at])
    ring.live.head.fill_(flags.shape[0])


def observe_recorded(normalizer: Normalizer, taken: Transitions, used: Tensor, spec: EnvSpec) -> None:
    """Update observation statistics with the transitions ``used`` [M]."""
    seen, device = {k: v for k, v in spec.obs.items() if k in normalizer.moments}, normalizer.reward_scale.device
    for part in used.split(CHUNK):
        shown = {k: from_frames(taken.frames[k][taken.obs[k][part]], s) for k, s in seen.items()}
        normalizer.observe({k: v.to(device) for k, v in shown.items()})


# -- a file's columns as transitions ----------------------------------------------------------------------------------


def transitions_of(data: Columns, specs: Mapping[str, ObsSpec]) -> Transitions:
    """Convert columns of either layout to the usable transitions, without fillers and rows with a lost successor."""
    beside = [k for k in data if k in ("action", "reward") or k.startswith("extra.")]
    cut = data["truncated"] & ~data["terminated"]
    if data["reward"].dim() == 1:
        frames, obs, after = {}, {}, {}
        for k, s in specs.items():
            shown, count = torch.cat((data[f"obs.{k}"], data[f"next_obs.{k}"])), cut.shape[0]
            frames[k] = frames_of(shown, s).reshape(-1, *kept_shape(s))
            obs[k], after[k] = torch.arange(2 * count * s.stack).view(2, count, s.stack)
        known = torch.ones_like(cut)
        return Transitions(frames, obs, after, {k: data[k] for k in beside}, data["terminated"], cut, known)
    rows, n = cut.shape
    lost = data["first"] & ~data["terminated"]  # the next row's observation is of another episode
    usable = data["valid"] & (torch.arange(rows)[:, None] < data["length"]) & ~lost
    column, row = usable.T.nonzero().unbind(1)  # environment by environment, in time
    cut = cut[row, column]
    blank = (rows + 1) * n  # after the frames of all rows and after the last ones
    flags = torch.cat((flags_of(data), data["valid"].new_zeros(1, n).to(torch.uint8))).flatten()
    same_episode, fills = tables(flags.device)["same episode"], {s.fill for s in specs.values()}
    cells = Stacker(deepest(specs.values()), rows + 1, n, blank, same_episode, fills).cells(flags, row, column)
    newest = ((row + 1) * n + column)[:, None]
    stored = {k: data[f"obs.{k}"] for k in specs}
    frames = {k: torch.cat((v.flatten(0, 1), torch.zeros_like(v[0, :1]))) for k, v in stored.items()}
    obs = {k: cells[s.fill][:, -s.stack :] for k, s in specs.items()}
    after = {k: torch.cat((cells[s.fill], newest), 1)[:, -s.stack :] for k, s in specs.items()}
    ends = data["terminated"][row, column], cut, ~data["first"][row, column]
    return Transitions(frames, obs, after, {k: data[k][row, column] for k in beside}, *ends)


def last(given: Transitions, count: int) -> Transitions:
    """Return the last ``count`` transitions."""
    return _picked(given, slice(-count, None))


def share(given: Transitions, part: int, parts: int) -> Transitions:
    """Return part ``part`` of ``parts`` consecutive parts."""
    total = given.cut.shape[0]
    return _picked(given, slice(part * total // parts, (part + 1) * total // parts))


def _picked(given: Transitions, which: slice) -> Transitions:
    """Select transitions; all frames are kept."""
    obs, after, columns = ({k: v[which] for k, v in group.items()} for group in given[1:4])
    return Transitions(given.frames, obs, after, columns, *(v[which] for v in given[4:]))


def check_values(setting: str, path: str | Path, given: Transitions, spec: EnvSpec) -> None:
    """Raise ``ConfigError`` for non-finite values or invalid actions."""
    for name, v in {**given.columns, **{f"obs.{k}": v for k, v in given.frames.items()}}.items():
        if v.is_floating_point() and not all_finite((v,)):
            raise ConfigError(setting, path, f"finite numbers in column {name}, below {LARGEST:g}")
    action = given.columns["action"]
    if isinstance(spec.action, Discrete):
        if action.numel() and not 0 <= int(action.min()) <= int(action.max()) < spec.action.n:
            raise ConfigError(setting, path, f"actions from 0 to {spec.action.n - 1}")
    elif action.numel() and float(largest := action.abs().max()) > LARGEST_ACTION:
        raise ConfigError(setting, path, f"actions in [-1, 1], as the policy gives them; one is {float(largest):.4g}")


# -- transitions as rows ----------------------------------------------------------------------------------------------


def stream_of(given: Transitions, specs: Mapping[str, ObsSpec]) -> Stream:
    """Convert transitions with observations of ``specs`` to a stream of rows.

    A row's successor is the next row's observation. If the next transition has another observation, a filler row is
    inserted. A stack that does not continue the previous transition's needs filler rows with its older frames before
    it.
    """
    goes_on = torch.ones_like(given.cut)
    for k, frames in given.frames.items():
        goes_on[:-1] &= same_frames(frames, given.next_obs[k][:-1], given.obs[k][1:])
    goes_on[-1:] = False
    depth = max(v.shape[1] for v in given.obs.values())
    life = given.terminated & goes_on & (depth > 1)  # the next stack continues, so no episode ended (a lost life)
    filled = given.followed & ~life & (given.terminated | given.cut | ~goes_on)
    linked = goes_on & ~given.cut & (~given.terminated | life)
    begins = torch.cat((linked[-1:] | True, ~linked[:-1]))
    history = torch.where(begins, older_frames(given, specs), 0)  # fillers before it
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
    # No actor has valued the observations of filler rows.
    columns = {k: v.new_full((count + 1, *v.shape[1:]), torch.nan if "." in k else 0) for k, v in given.columns.items()}
    for k, v in columns.items():
        v[place] = given.columns[k]
    flags = torch.zeros(count, dtype=torch.uint8)
    flags[place[filled] + 1] |= NEXT_FIRST
    flags[place] |= (VALID + given.terminated * TERMINATED + ~(given.followed | life) * NEXT_FIRST).to(torch.uint8)
    origin = torch.full((count,), -1)
    origin[place] = torch.arange(place.shape[0])
    return Stream(newest, columns, flags, origin)


def same_frames(frames: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Return where the frames of ``one`` and ``two`` (both [m, S]) are bitwise equal, [m] bool."""
    same = (one == two).all(1)
    for part in (~same).nonzero().squeeze(1).split(CHUNK):
        same[part] = (frames[one[part]] == frames[two[part]]).flatten(1).all(1)
    return same


def older_frames(given: Transitions, specs: Mapping[str, ObsSpec]) -> Tensor:
    """Return how many frames before its newest a transition's stack has before they are those that a ring fills in,
    [M] int64: 0 without stacks."""
    reach = torch.zeros(given.cut.shape[0], dtype=torch.int64)
    for k, index in given.obs.items():
        if index.shape[1] > 1:
            older = index[:, :-1]
            if specs[k].fill == "first":  # a frame is needed if the next one differs
                pairs = (part.reshape(-1, 1) for part in (older, index[:, 1:]))
                needed = ~same_frames(given.frames[k], *pairs).view_as(older)
            else:
                needed = torch.cat([(part != 0).flatten(1).any(1) for part in given.frames[k].split(CHUNK)])[older]
            back = torch.arange(index.shape[1] - 1, 0, -1)  # oldest first
            reach = torch.maximum(reach, (needed * back).amax(1))
    return reach


def without_history(flags: Tensor, at: Tensor, depth: int) -> Tensor:
    """Return a column's flags [T, N] for rows ``at`` [T + 1, N] of a stream. Its first rows become fillers if older
    frames of their stacks are in another column."""
    inside, before = flags[at[:-1]], torch.cat((flags.new_tensor([NEXT_FIRST]), flags))[at[0]]
    begun = torch.cat((before[None], inside[:-1])).bitwise_and(NEXT_FIRST).cumsum(0) > 0  # begun in this column
    complete = begun | (torch.arange(inside.shape[0])[:, None] >= depth - 1)
    return torch.where(complete, inside, inside & (255 - VALID))
