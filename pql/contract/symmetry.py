"""Reflections of robots that are the same on their left and on their right.

A reflection is a signed permutation. A task declares those of its observation groups and of its actions in
``EnvSpec.info["symmetry"]``: ``{"policy": side_by_side(POLAR, AXIAL, joints, joints), "action": joints}``.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pql.errors import ConfigError, PqlWarning, nearest

Reflection = tuple[tuple[int, ...], tuple[float, ...]]
"""Index and sign: element i of the reflection is ``sign[i] * x[index[i]]``."""

POLAR: Reflection = ((0, 1, 2), (1, -1, 1))  # reflected at the plane y = 0: positions, velocities, forces
AXIAL: Reflection = ((0, 1, 2), (-1, 1, -1))  # angular velocities, torques
QUATERNION: Reflection = ((0, 1, 2, 3), (1, -1, 1, -1))  # w, x, y, z
COMMAND: Reflection = ((0, 1, 2), (1, -1, -1))  # velocity ahead, to the left, around the vertical
SCALAR: Reflection = ((0,), (1,))


def side_by_side(*parts: Reflection) -> Reflection:
    """Return the reflection of a vector made of ``parts``, one after the other."""
    index, sign = list[int](), list[float]()
    for part, signs in parts:
        index += [len(sign) + i for i in part]
        sign += signs
    return tuple(index), tuple(sign)


def floating(joints: Reflection) -> tuple[Reflection, Reflection]:
    """Return the reflections of MuJoCo's positions and velocities of a free body with ``joints``."""
    return side_by_side(POLAR, QUATERNION, joints), side_by_side(POLAR, AXIAL, joints)


def reflect(reflection: Reflection, x: Tensor) -> Tensor:
    """Return ``x`` [..., D] reflected."""
    index, sign = reflection
    return x[..., list(index)] * x.new_tensor(sign)


def by_names(names: Sequence[str], sides: Mapping[str, str], odd: Sequence[str] = ()) -> Reflection:
    """Return the reflection of values named ``names``, such as joints.

    Args:
        sides: parts of names that replace each other: ``{"left": "right"}``. A name without any is its own partner.
        odd: parts of the names of joints whose angle changes its sign, such as roll and yaw.
    Raises:
        ConfigError: a partner is not among the names.
    """
    both = {**sides, **{b: a for a, b in sides.items()}}
    index = []
    for name in names:
        part = next((one for one in both if one in name), None)
        partner = name if part is None else name.replace(part, both[part])
        if partner not in names:
            raise ConfigError("symmetry", name, f"joints in pairs: there is no {partner}")
        index.append(list(names).index(partner))
    return tuple(index), tuple(-1.0 if any(one in name for one in odd) else 1.0 for name in names)


def check_reflection(name: str, value: Any, size: int) -> Reflection:
    """Return the declared reflection of group ``name``.

    Raises:
        ConfigError: it is not one of ``size`` elements, or not its own inverse.
    """
    try:
        index, sign = tuple(map(int, value[0])), tuple(map(float, value[1]))
        fits = len(index) == len(sign) == size and sorted(index) == [*range(size)] and {*map(abs, sign)} <= {1}
        fits = fits and all(index[j] == i and sign[i] == sign[j] for i, j in enumerate(index))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        allowed = f"{size} indices and {size} signs that give the identity when applied twice"
        raise ConfigError(f"symmetry of {name}", value, allowed)
    return index, sign


KINDS: dict[str, Reflection] = {"polar": POLAR, "axial": AXIAL, "command": COMMAND, "quaternion": QUATERNION}
TERMS = {  # kinds of observation terms, by name or by the function that computes them, in Isaac Lab and mjlab
    **dict.fromkeys(("base_lin_vel", "projected_gravity"), "polar"),
    "base_ang_vel": "axial",
    **dict.fromkeys(("command", "velocity_commands", "generated_commands"), "command"),
    **dict.fromkeys(("joint_pos", "joint_vel", "joint_pos_rel", "joint_vel_rel"), "joints"),
    **dict.fromkeys(("actions", "last_action"), "actions"),
}


def of_robot(
    robot: Mapping[str, Any],
    sides: Mapping[str, str],
    odd: Sequence[str] = (),
    terms: Mapping[str, Any] | None = None,
) -> dict[str, Reflection]:
    """Return the symmetry of a robot from its record (``EnvSpec.info["robot"]``).

    Args:
        sides, odd: see :func:`by_names`; of joints.
        terms: kinds of observation terms that are not known by name: ``polar``, ``axial``, ``command``, ``quaternion``,
            ``joints``, ``actions``, ``same`` (each number stays), or (indices, signs). A group with a term of none
            of these is left out, with a warning.
    Raises:
        ConfigError: no joints, joints without a partner, an unknown kind, or one of another width than the term.
    """
    if "joints" not in robot:
        raise ConfigError("mirror", dict(sides), "none: the actions of this task are not positions of joints")
    actions = by_names(robot["joints"], sides, odd)
    kinds = {**KINDS, "actions": actions, "joints": by_names(robot.get("all_joints", robot["joints"]), sides, odd)}
    found = {"action": actions}
    for group, parts in robot["terms"].items():
        given = [_of_term(part, kinds, terms or {}) for part in parts]
        if missing := [part["name"] for part, one in zip(parts, given, strict=True) if one is None]:
            what = f"mirror: group {group!r} has no symmetry without mirror.terms for {', '.join(missing)}"
            warnings.warn(what, PqlWarning, stacklevel=2)
        else:
            found[group] = side_by_side(*(one for one in given if one is not None))
    for name in terms or {}:
        known = [part["name"] for parts in robot["terms"].values() for part in parts]
        if name not in known:
            raise ConfigError("mirror.terms", name, f"one of {', '.join(known)}{nearest(name, known)}")
    return found


def _of_term(term: Mapping[str, Any], kinds: Mapping[str, Reflection], given: Mapping[str, Any]) -> Reflection | None:
    """Return the reflection of a term with its history; None if its kind is unknown."""
    name, width = term["name"], term["width"]
    kind = given.get(name, TERMS.get(name, TERMS.get(term["source"])))
    if kind is None:
        return None
    if isinstance(kind, str) and kind not in (*kinds, "same"):
        known = [*kinds, "same"]
        raise ConfigError(
            f"mirror.terms.{name}", kind, f"{', '.join(known)}, or indices and signs{nearest(kind, known)}"
        )
    one = ((*range(width),), (1.0,) * width) if kind == "same" else kinds[kind] if isinstance(kind, str) else kind
    frame = check_reflection(name, one, width)
    return side_by_side(*[frame] * (max(term["history"], 1) if term["flatten"] else 1))
