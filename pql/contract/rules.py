"""Rules of ``check_env``: one function per rule; each takes one recorded step and returns a message, "" if it holds.

They synchronise with the host, which code in a training loop must not do; :func:`check_answer` does not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pql.contract import shapes
from pql.contract.env import EnvSpec, ObsSpec
from pql.contract.stacks import frames_of
from pql.errors import ConfigError
from pql.types import Obs, Step


@dataclass
class Row:
    """One recorded step with the context that the rules need. All tensors are clones."""

    spec: EnvSpec
    index: int  # steps since reset
    step: Step
    before: Obs  # [N, ...]; the observation before the step
    length: Tensor  # [N] int64; valid rows of the current episode, this one included
    after_end: Tensor  # [N] bool; the row before was valid and ended an episode
    after_filler: Tensor  # [N] bool
    next_valid: Tensor  # [N] bool; the row after this one is not a filler


def ended(step: Step) -> Tensor:
    """Return [N] bool: rows with ``terminated`` or ``truncated``."""
    return step.terminated | step.truncated


def continues(row: Row) -> Tensor:
    """Return [N] bool: rows with ``terminated`` whose episode continues (a lost life, if ``spec.info`` declares it).
    Under next-step autoreset such a row is recognised by the missing filler row after it."""
    if not row.spec.info.get("lost_life"):
        return torch.zeros_like(row.step.first)
    return row.step.terminated & (row.next_valid if row.spec.autoreset == "next_step" else ~row.step.first)


def restarted(row: Row) -> Tensor:
    """Return [N] bool: rows whose observation begins an episode although none ended."""
    return row.step.first & row.step.valid & ~ended(row.step)


def closes(row: Row) -> Tensor:
    """Return [N] bool: rows that end an episode."""
    return ended(row.step) & row.step.valid & ~continues(row)


def following(spec: EnvSpec, last: Row | None, step: Step, obs: Obs) -> Row:
    """Return the record of ``step`` [N, ...], which follows ``last``; None: the first after a reset to ``obs``."""
    none = torch.zeros_like(step.first)
    if last is None:
        return Row(spec, 0, step, obs, step.valid.long(), none, none, none)
    closed = closes(last)
    length = last.length.masked_fill(closed | last.step.first, 0) + step.valid
    return Row(spec, last.index + 1, step, last.step.obs, length, closed, ~last.step.valid, none)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Return [N] bool: rows in which ``a`` and ``b`` [N, ...] differ anywhere. NaN equals NaN."""
    return ((a != b) & ~((a != a) & (b != b))).reshape(len(a), -1).any(1)


def where(bad: Tensor) -> str:
    """Return ``" (environments 0, 3, ...)"`` for the rows of ``bad`` [N, ...] with a set entry, "" without any."""
    rows = bad.nonzero()[:, 0].unique().tolist()
    if not rows:
        return ""
    return f" (environments {', '.join(map(str, rows[:4]))}{', ...' if len(rows) > 4 else ''})"


def tensors(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a step with its name, such as ``obs[policy]``."""
    for name, value in step._asdict().items():
        if isinstance(value, dict):
            yield from ((f"{name}[{key}]", tensor) for key, tensor in value.items())
        else:
            yield name, value


# --- rules on one step: "" if it holds, else the message ----------------------------------------------------------


def _judge(spec: EnvSpec) -> shapes.Judge:
    """Judge tensors on the device of ``spec``; nothing waits for it."""
    device = spec.device

    def of(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        if not isinstance(value, Tensor):
            return f"{name} is a {type(value).__name__}, not a tensor"
        if fault := shapes.array_fault(name, value, shape, value.dtype == dtype, (value.dtype, dtype)):
            return fault
        if value.device.type != device.type or (device.index is not None and value.device.index != device.index):
            return f"{name} is on {value.device}, expected {device}"
        if value.requires_grad or value.is_inference():
            return f"{name} must carry neither a gradient nor inference mode"
        return ""

    return of


def obs_fault(name: str, obs: Any, spec: EnvSpec) -> str:
    """Check observation groups against ``spec.obs``: names, shapes [N, ...], dtypes, device."""
    return shapes.groups_fault(name, obs, spec, _judge(spec))


def shapes_fault(step: Any, spec: EnvSpec) -> str:
    """Check types, shapes, dtypes and devices of a step. The other rules are tested only if this one holds."""
    if not isinstance(step, Step):
        return f"step returned a {type(step).__name__}, not a pql.types.Step"
    return shapes.step_fault(step, spec, _judge(spec), torch.float32, torch.bool)


def log_fault(step: Any, spec: EnvSpec) -> str:
    """Check that ``log`` has the keys of ``spec.log``, each [N] float32."""
    return shapes.log_keys_fault(step.log, spec, _judge(spec), torch.float32)


def check_answer(method: str, answer: Any, spec: EnvSpec, rows: int | None = None) -> None:
    """Check what ``reset``, ``reset_where`` or ``step`` returned: the rules ``shapes`` and ``log``.

    It looks at types and shapes only, so nothing waits for the device.

    Args:
        rows: environments that the answer is of; None: all.
    Raises:
        ConfigError: a rule is broken.
    """
    spec, whole = spec if rows is None else replace(spec, num_envs=rows), method == "step"
    if not isinstance(answer, Step if whole else dict):
        like = ", as gymnasium has it" if isinstance(answer, tuple) else ""
        wanted = f"a {'pql.Step' if whole else 'dict of observations'}, not a {type(answer).__name__}{like}"
    else:
        fault = (shapes_fault(answer, spec) or log_fault(answer, spec)) if whole else obs_fault("obs", answer, spec)
        wanted = fault and f"what its spec says, but {fault}"
    if wanted:
        raise ConfigError("task", spec.name, f"{method}() to return {wanted}: pql doctor --env NAME tests it")


def check_stacks(method: str, obs: Obs, before: Obs, begins: Tensor, asked: Tensor, spec: EnvSpec) -> None:
    """Check the stacks [N, ...] that ``reset`` or ``step`` returned, of which a replay keeps the newest frames only. It
    waits for the device if there are any.

    Args:
        before, begins, asked: see :func:`stack_fault`.
    Raises:
        ConfigError: their older frames are not those that the replay would rebuild.
    """
    if fault := stack_fault("obs", obs, before, begins, asked, spec.obs):
        wanted = f"{method}() to return the stacks that its spec says, but {fault}: pql doctor --env NAME tests it"
        raise ConfigError("task", spec.name, wanted)


def finite(row: Row) -> str:
    """No float tensor of a step holds NaN or infinity."""
    for name, value in tensors(row.step):
        if value.is_floating_point() and not value.isfinite().all():
            return f"{name} holds NaN or infinity" + where(~value.isfinite())
    return ""


def disjoint(row: Row) -> str:
    """``terminated`` and ``truncated`` are never both set."""
    both = row.step.terminated & row.step.truncated
    return f"terminated and truncated are both set{where(both)}: terminated wins" if both.any() else ""


def final_obs(row: Row) -> str:
    """``final_obs`` equals ``obs`` except where same-step autoreset replaced ``obs``."""
    step = row.step
    exempt = restarted(row) | (closes(row) if row.spec.autoreset == "same_step" else ~step.final_ok)
    for name, obs in step.obs.items():
        bad = differs(obs, step.final_obs[name]) & ~exempt
        if bad.any():
            return f"final_obs[{name}] differs from obs, which is the true successor there{where(bad)}"
    return ""


def final_ok(row: Row) -> str:
    """``final_ok`` is False exactly at the ends of episodes with ``spec.final_obs="never"``."""
    lost = closes(row) if row.spec.final_obs == "never" else torch.zeros_like(row.step.first)
    bad = (row.step.final_ok == lost) & ~restarted(row)
    if not bad.any():
        return ""
    wanted = "False on a row that ends an episode" if (bad & lost).any() else "True"
    return f"final_ok must be {wanted} with spec.final_obs={row.spec.final_obs}{where(bad)}"


def first(row: Row) -> str:
    """``first`` is set exactly where ``obs`` begins an episode."""
    step, same = row.step, row.spec.autoreset == "same_step"
    begins = closes(row) if same else row.after_end | (row.after_filler & ~step.valid)
    bad = step.first != begins
    if row.spec.info.get("restarts"):
        bad &= ~restarted(row)
    if not bad.any():
        return ""
    rows = "a row that ends an episode" if same else "the filler row after an episode's end"
    if (bad & begins).any():
        return f"first is missing on {rows}{where(bad & begins)}"
    declare = "declare spec.info['restarts'] if the simulator restarts itself"
    return f"first is set on other than {rows}{where(bad)}; {declare}"


def filler(row: Row) -> str:
    """A filler row follows every end of an episode under next-step autoreset, and occurs nowhere else."""
    valid = row.step.valid
    if row.spec.autoreset == "same_step":
        return f"valid is False under same-step autoreset{where(~valid)}" if not valid.all() else ""
    missing, extra = row.after_end & valid, ~(row.after_end | row.after_filler) & ~valid
    if missing.any():
        return f"no filler row (valid=False) after a row that ended an episode{where(missing)}"
    return f"a filler row (valid=False) that follows no end of an episode{where(extra)}" if extra.any() else ""


def filler_flags(row: Row) -> str:
    """Filler rows have neither ``terminated`` nor ``truncated`` set."""
    bad = ended(row.step) & ~row.step.valid
    return f"a filler row carries terminated or truncated{where(bad)}" if bad.any() else ""


def time_limit(row: Row) -> str:
    """No episode is longer than ``spec.max_episode_steps``."""
    limit = row.spec.max_episode_steps
    if limit is None:
        return ""
    late = (row.length >= limit) & row.step.valid & ~ended(row.step) & ~row.step.first
    return f"an episode continues after max_episode_steps={limit} rows{where(late)}" if late.any() else ""


def stack(row: Row) -> str:
    """Frame stacks of ``obs`` and ``final_obs`` continue those of the observation before."""
    step, spec = row.step, row.spec
    # Next-step autoreset returns the final observation in obs; the simulator may have lost it.
    shown = stack_fault("obs", step.obs, row.before, step.first, step.first | step.final_ok, spec.obs)
    none = torch.zeros_like(step.first)
    return shown or stack_fault("final_obs", step.final_obs, row.before, none, step.final_ok & step.valid, spec.obs)


def stack_fault(name: str, obs: Obs, before: Obs, begins: Tensor, asked: Tensor, groups: Mapping[str, ObsSpec]) -> str:
    """Check the older frames of stacks [N, ...]: ``fill`` where an episode begins, else the newest of ``before``.

    Args:
        begins: [N] bool, an episode begins in this row; asked: [N] bool, rows to check.
    """
    for key, part in groups.items():
        if part.stack > 1:
            shown = frames_of(obs[key], part)
            older, kept = shown[:, :-1], frames_of(before[key], part)[:, 1:]
            fill = shown[:, -1:].expand_as(older) if part.fill == "first" else torch.zeros_like(older)
            wrong = differs(older, fill) & begins & asked
            if wrong.any():
                what = "zeros" if part.fill == "zeros" else "its first frame"
                return f"older frames of {name}[{key}] are not {what} where an episode begins{where(wrong)}"
            moved = differs(older, kept) & ~begins & asked
            if moved.any():
                return f"older frames of {name}[{key}] are not the newest of the observation before{where(moved)}"
    return ""


_RULES = (finite, disjoint, final_obs, final_ok, first, filler, filler_flags, time_limit, stack)
STEP_RULES: dict[str, Callable[[Row], str]] = {rule.__name__: rule for rule in _RULES}
