"""Reflections of robots that are the same on their left and on their right.

A reflection is a signed permutation. A task declares those of its observation groups and of its actions in
``EnvSpec.info["symmetry"]``: ``{"policy": side_by_side(POLAR, AXIAL, joints, joints), "action": joints}``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pql.errors import ConfigError

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
    index, sign = (tuple(part) for part in value)
    fits = len(index) == len(sign) == size and sorted(index) == [*range(size)] and {*map(abs, sign)} <= {1}
    if not fits or any(index[j] != i or sign[i] != sign[j] for i, j in enumerate(index)):
        allowed = f"{size} indices and {size} signs that give the identity when applied twice"
        raise ConfigError(f"symmetry of {name}", value, allowed)
    return index, sign
