"""A robot's record (``pql.contract.robot``) from the managers of Isaac Lab and mjlab.

The two name some attributes differently; both names are looked for. Isaac Lab 3 has arrays of Warp where 2.3 and mjlab
have tensors.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.contract.robot import RobotRecord, Term
from pql.contract.rules import stack_fault
from pql.contract.symmetry import of_robot
from pql.errors import ConfigError, PqlWarning, nearest
from pql.types import Obs

E = TypeVar("E", bound=Any)


class Joints(NamedTuple):
    """Joints that a term of the action manager moves: ``ids`` within the articulation ``owner``."""

    term: Any
    owner: Any
    ids: list[int]
    names: list[str]

    def each(self, values: Any) -> list[float]:
        """Return ``values``, a number or [N, A], for each joint."""
        return [float(values)] * len(self.ids) if isinstance(values, (int, float)) else numbers(tensor(values)[0])

    def of(self, name: str) -> Tensor:
        """Return the articulation's data ``name`` for these joints."""
        return tensor(getattr(self.owner.data, name))[0, self.ids]


def tensor(values: Any) -> Tensor:
    """Return a tensor, or an array of Warp as one."""
    if isinstance(values, Tensor):
        return values
    import warp

    return warp.to_torch(values)


def numbers(values: Tensor) -> Any:
    """Return a tensor's [...] float32 numbers in nested lists."""
    return values.detach().float().cpu().tolist()


def action_terms(env: Any) -> Iterator[tuple[str, Any]]:
    """Yield the terms of the action manager by name; none without one."""
    manager: Any = getattr(env, "action_manager", None)
    for name in () if manager is None else manager.active_terms:
        yield name, manager.get_term(name)


def joints_of(term: Any) -> Joints:
    """Return the joints that a term of joint actions moves."""
    owner: Any
    owner, ids, names = (
        getattr(term, a, getattr(term, b, ()))
        for a, b in (("_asset", "_entity"), ("_joint_ids", "_target_ids"), ("_joint_names", "_target_names"))
    )
    chosen = range(len(owner.joint_names))[ids] if isinstance(ids, slice) else [int(i) for i in ids]
    return Joints(term, owner, list(chosen), list(names))


def managed_robot(env: Any, runtime: str) -> RobotRecord | None:
    """Return the record of an environment with managers; None without them, and, with a warning, where this version
    of the simulator has other attributes."""
    if getattr(env, "observation_manager", None) is None:
        return None
    try:
        return _read(env, runtime)
    except (AttributeError, ImportError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        told = f"this version of {runtime} has other managers, so exports lack the robot's record"
        warnings.warn(f"{told} ({type(error).__name__}: {error})", PqlWarning, stacklevel=3)
        return None


def with_stacks(
    specs: Mapping[str, ObsSpec], robot: RobotRecord | None, before: Obs, after: Obs, over: Tensor
) -> dict[str, ObsSpec]:
    """Declare the stacks of groups of which every term has the same history, which begins with copies of its first
    frame. Not if this simulator's differ.

    Args:
        before: observations of a reset, [N, ...]; after: of the step that followed it.
        over: [N] bool, episodes that ended in this step.
    """
    found, every = dict(specs), torch.ones_like(over)
    for name, terms in ({} if robot is None else robot["terms"]).items():
        if name not in specs or len({(term["history"], term["flatten"]) for term in terms}) != 1:
            continue
        count, flat, widths = terms[0]["history"], terms[0]["flatten"], tuple(term["width"] for term in terms)
        if count < 2 or specs[name].shape != ((count * sum(widths),) if flat else (count, sum(widths))):
            continue
        group = {name: replace(specs[name], stack=count, terms=widths if flat else (), fill="first")}
        begun, moved = (before, before, every, every), (after, before, ~every, ~over)
        if not any(stack_fault("", *given, group) for given in (begun, moved)):
            found |= group
    return found


def with_symmetry(env: E, mirror: Mapping[str, Any] | None) -> E:
    """Declare the symmetry of a robot in an environment's specification.

    Args:
        mirror: keywords of ``pql.contract.symmetry.of_robot``; None: none is declared.
    Raises:
        ConfigError: unknown keywords, an environment without a robot's record, or as ``of_robot``.
    """
    if mirror is None:
        return env
    for key in mirror:
        if key not in (known := ("sides", "odd", "terms")):
            raise ConfigError("mirror", key, f"keywords {', '.join(known)}{nearest(key, known)}")
    if "robot" not in env.spec.info or "sides" not in mirror:
        raise ConfigError("mirror", dict(mirror), "sides, {left: right}, for a task of a robot with managers")
    found = of_robot(env.spec.info["robot"], **mirror)
    env.spec = replace(env.spec, info={**env.spec.info, "symmetry": found})
    return env


def _read(env: Any, runtime: str) -> RobotRecord:
    manager, commands = env.observation_manager, getattr(env, "command_manager", None)
    robot: RobotRecord = {"runtime": runtime, "dt": float(env.step_dt)}
    robot["terms"] = {
        "policy" if group == "actor" else group: [
            _term(name, config, manager.group_obs_term_dim[group][i])
            for i, (name, config) in enumerate(zip(names, manager._group_obs_term_cfgs[group], strict=True))
        ]
        for group, names in manager.active_terms.items()
    }
    robot["commands"] = [] if commands is None else list(commands.active_terms)
    terms = [term for _, term in action_terms(env)]
    if terms and all(type(term).__name__ == "JointPositionAction" for term in terms):
        robot |= _joints(env, [joints_of(term) for term in terms])
    return robot


def _term(name: str, config: Any, shape: Sequence[int]) -> Term:
    """Read an observation term whose shape with its history is ``shape``."""
    scale, clip, kept = config.scale, config.clip, int(config.history_length or 0)
    frames = kept if kept and config.flatten_history_dim else 1
    return {
        "name": name,
        "source": getattr(config.func, "__name__", type(config.func).__name__),
        "width": int(shape[-1]) // frames,
        "scale": 1.0 if scale is None else numbers(torch.as_tensor(scale)),
        "clip": None if not clip else [float(x) for x in clip],
        "history": kept,
        "flatten": bool(config.flatten_history_dim),
    }


def _joints(env: Any, moved: Sequence[Joints]) -> RobotRecord:
    owner = moved[0].owner
    out: RobotRecord = {
        "joints": [name for one in moved for name in one.names],
        "default": [x for one in moved for x in one.each(one.term._offset)],
        "scale": [x for one in moved for x in one.each(one.term._scale)],
        "limits": [pair for one in moved for pair in numbers(one.of("soft_joint_pos_limits"))],
        "all_joints": list(owner.joint_names),
        "all_default": numbers(tensor(owner.data.default_joint_pos)[0]),
    }
    if any(hasattr(one.term, "_clip") for one in moved):
        free = [[-math.inf, math.inf]]
        parts = [numbers(one.term._clip[0]) if hasattr(one.term, "_clip") else free * len(one.ids) for one in moved]
        out["target_clip"] = [pair for part in parts for pair in part]
    known: dict[str, dict[str, float]] = {"kp": {}, "kd": {}, "effort": {}}
    for owner in {id(one.owner): one.owner for one in moved}.values():
        _add_servos(known, env, owner)
        _add_models(known, owner)
    for key, values in known.items():
        if all(name in values for name in out["joints"]):
            out[key] = [values[name] for name in out["joints"]]  # type: ignore[literal-required]
    return out


def _add_servos(known: dict[str, dict[str, float]], env: Any, owner: Any) -> None:
    """Add gains and largest torques of MuJoCo's position servos (mjlab) by joint."""
    model: Any = getattr(getattr(env, "sim", None), "mj_model", None)
    prefix = "" if model is None else next(k for k, v in env.scene.entities.items() if v is owner)
    for i in range(0 if model is None else model.nu):
        joint = model.joint(model.actuator_trnid[i, 0]).name
        kp, bias = float(model.actuator_gainprm[i, 0]), model.actuator_biasprm[i]
        if model.actuator_trntype[i] == 0 and bias[1] == -kp and joint.startswith(f"{prefix}/"):  # 0: of a joint
            name = joint.split("/")[-1]
            known["kp"][name], known["kd"][name] = kp, -float(bias[2])
            if model.actuator_forcelimited[i]:
                known["effort"][name] = float(model.actuator_forcerange[i, 1])


def _add_models(known: dict[str, dict[str, float]], owner: Any) -> None:
    """Add what actuator models in Python hold, by joint."""
    acts = owner.actuators
    for act in acts.values() if hasattr(acts, "values") else acts:
        names = getattr(act, "joint_names", getattr(act, "target_names", ()))
        for key, *places in (("kp", "stiffness"), ("kd", "damping"), ("effort", "effort_limit", "force_limit")):
            values = next((v for place in places if (v := getattr(act, place, None)) is not None), None)
            if values is not None:
                known[key] |= zip(names, numbers(tensor(values)[0]), strict=True)
