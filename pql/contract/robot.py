"""Record of a robot, ``EnvSpec.info["robot"]``: what a program that runs a policy on the robot needs to know.

Simulators fill it; exports store it (``docs/export.md``), and ``pql.deploy`` reads it. It holds JSON types only, for it
crosses process borders.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Numbers = float | list[float]
INF = float("inf")


class Term(TypedDict, total=False):
    """A part of an observation group: ``compute``, then clip, then scale, then history."""

    name: str
    source: str  # name of the function that computes it, such as ``joint_pos_rel`` or ``last_action``
    width: int  # of one frame
    scale: Numbers  # factor, for all numbers or for each
    clip: list[Numbers] | None  # [low, high] before the scale, for all numbers or for each
    history: int  # frames, oldest first; 0: none
    flatten: bool  # frames are joined to one vector; False: [history, width]


class RobotRecord(TypedDict, total=False):
    """Entries with A values are in the order of the actions. They are absent for actions other than position targets
    of joints, for which ``target = default + scale * action``."""

    runtime: str  # pql, mjlab or isaaclab
    dt: float  # seconds per step
    terms: dict[str, list[Term]]  # by observation group
    commands: list[str]
    joints: list[str]  # A names
    default: list[float]  # [A] rad, the targets for actions of 0
    scale: list[float]  # [A] rad per unit of the simulator's actions
    kp: list[float]  # [A] Nm/rad
    kd: list[float]  # [A] Nm s/rad
    effort: list[float]  # [A] Nm, largest torque
    limits: list[list[float]]  # [A] pairs of rad
    target_clip: list[list[float]]  # [A] pairs of rad, to which the simulator clips targets; absent: to none
    all_joints: list[str]  # in the order of observations
    all_default: list[float]  # rad


TEXTS, PER_JOINT = ("commands", "joints", "all_joints"), ("default", "scale", "kp", "kd", "effort")
PAIRS = ("limits", "target_clip")
LISTS = (*PER_JOINT, *PAIRS, "all_default")


def robot_fault(robot: Any, size: int | None, obs: Mapping[str, Sequence[int]]) -> str:
    """Check a record; return what is wrong, "" if nothing is.

    Args:
        size: number of actions A; None: not continuous.
        obs: shape of each observation group.
    """
    if not isinstance(robot, Mapping) or not all(isinstance(k, str) for k in robot):
        return "robot is not a mapping"
    if unknown := sorted(robot.keys() - RobotRecord.__annotations__.keys()):
        return f"robot.{unknown[0]} is unknown"
    for name in TEXTS:
        if not _all(robot.get(name, []), lambda x: isinstance(x, str)):
            return f"robot.{name} is not a list of names"
    for name in (*PER_JOINT, "all_default"):
        values = robot.get(name)
        if isinstance(values, list) and any(_number(x) and abs(x) == INF for x in values):
            return f"robot.{name} is not finite"
    joints = robot.get("joints")
    if joints is not None and (len({*joints}) < len(joints) or 0 in (robot.get("scale") or [])):
        return "robot.joints has a name twice, or robot.scale a zero"
    if joints is not None and len(joints) != size:
        return f"robot.joints has {len(joints)} names for {size} actions"
    for name in LISTS:
        values, count = robot.get(name), len(robot.get("all_joints" if name == "all_default" else "joints") or ())
        fits = (lambda x: _all(x, _number) and len(x) == 2) if name in PAIRS else _number
        if values is not None and not (_all(values, fits) and len(values) == count):
            return f"robot.{name} is not {count} {'pairs' if name in PAIRS else 'numbers'}"
    if joints is not None and not {"default", "scale"} <= robot.keys():
        return "robot.joints without default and scale"
    if not isinstance(robot.get("runtime", ""), str) or not (_number(robot.get("dt")) and 0 < robot["dt"] < 1e6):
        return "robot.runtime is no text, or robot.dt no time"
    terms = robot.get("terms", {})
    if not isinstance(terms, Mapping):
        return "robot.terms is not a mapping"
    return next((fault for k, v in terms.items() if (fault := _terms_fault(k, v, obs))), "")


def _terms_fault(group: str, terms: Any, obs: Mapping[str, Sequence[int]]) -> str:
    where = f"robot.terms.{group}"
    if group not in obs or not _all(terms, lambda x: isinstance(x, Mapping)):
        return f"{where} is not a list of terms of an observation group"
    total = 0
    for term in terms:
        texts = [term.get(k) for k in ("name", "source")]
        counts = [term.get(k) for k in ("width", "history")]
        named = _all(texts, lambda x: isinstance(x, str))
        if not named or not _all(counts, lambda x: type(x) is int and 0 <= x < 2**31):
            return f"{where} has a term without name, source, width and history"
        width, clip = term["width"], term.get("clip")
        ends = [term.get("scale"), *(clip if isinstance(clip, list) else ())]
        fine = all(_number(x) or (_all(x, _number) and len(x) == width) for x in ends)
        if not fine or not (clip is None or len(ends) == 3) or not isinstance(term.get("flatten"), bool):
            return f"{where}.{term['name']} has a wrong scale, clip or flatten"
        total += width * (max(term["history"], 1) if term["flatten"] else 1)
    wanted = obs[group][-1] if len(obs[group]) else 0
    return "" if total == wanted else f"{where} has {total} numbers, the group {wanted}"


def _number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


def _all(values: Any, fits: Any) -> bool:
    return isinstance(values, list) and all(map(fits, values))
