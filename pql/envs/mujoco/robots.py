"""Paths of robot models: files in installed packages. The packages are never imported.

Only these files are needed, so the packages are installed without their dependencies: ``make robots``.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from pql.errors import ConfigError


class Model(NamedTuple):
    """A file of an installed package."""

    package: str  # import name
    path: str  # relative to the package's folder
    project: str  # pip requirement, with the versions in which the file is at ``path``


ROBOTS = {
    "anymal_c": Model("genesis", "assets/urdf/anymal_c/urdf/anymal_c.urdf", "genesis-world>=1.4.5,<2"),
    "go1": Model("mjlab", "asset_zoo/robots/unitree_go1/xmls/go1.xml", "mjlab>=1.6,<2"),
    "g1": Model("mjlab", "asset_zoo/robots/unitree_g1/xmls/g1.xml", "mjlab>=1.6,<2"),
    "shadow_hand": Model("gymnasium_robotics", "envs/assets/hand/manipulate_block.xml", "gymnasium-robotics>=1.4.2,<2"),
    "allegro_hand": Model("mani_skill", "assets/robots/allegro/allegro_hand_right.urdf", "mani-skill>=3.0.1,<4"),
    "dclaw": Model("robel", "robel-scenes/dclaw/assets/chain3xh.xml", "robel>=0.1.2,<0.2"),
    "panda": Model("genesis", "assets/xml/franka_emika_panda/panda.xml", "genesis-world>=1.4.5,<2"),
}


TASKS = {
    "anymal": "anymal_c",
    "go1_velocity": "go1",
    "g1_velocity": "g1",
    "allegro_hand": "allegro_hand",
    "dclaw": "dclaw",
    **dict.fromkeys(("franka_cube_stack", "franka_cube_stack_torque"), "panda"),
    **{f"shadow_hand{seen}": "shadow_hand" for seen in ("", "_full", "_full_no_vel", "_openai")},
}
"""Robot models by task name."""


def model_file(robot: str) -> Path:
    """Return the model file of one of ``ROBOTS``. Raises ``KeyError``: no such robot; ``ConfigError``: its package is
    not installed, or has the file elsewhere; names the install command."""
    model = ROBOTS[robot]
    found = importlib.util.find_spec(model.package)
    folder = Path(found.origin).parent if found is not None and found.origin else None
    if folder is None or not (folder / model.path).exists():
        what = f"{model.package} with {model.path}"
        raise ConfigError("task", robot, f"{what} installed: make robots, or pip install --no-deps '{model.project}'")
    return folder / model.path
