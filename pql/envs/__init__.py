"""Simulators, one file or folder each, imported only when a task uses them.

``BUILTIN`` maps a task's environment name to ``module:factory``. ``EXTRA_OF`` names the extra that installs a module's
dependencies; ``NEEDS`` names packages to be installed manually. Other packages add environments through the entry-point
group ``pql.envs``, without changes here.
"""

MUJOCO = (
    *("halfcheetah", "hopper", "walker2d", "ant", "humanoid", "humanoidstandup", "swimmer", "reacher", "pusher"),
    *("invertedpendulum", "inverteddoublependulum", "isaac_ant", "isaac_humanoid", "anymal", "go1_velocity"),
    *("g1_velocity", "ballbalance", "ballbalance_pixels", "shadow_hand", "shadow_hand_full", "shadow_hand_full_no_vel"),
    *("shadow_hand_openai", "allegro_hand", "dclaw", "franka_cube_stack", "franka_cube_stack_torque"),
)
BUILTIN = {
    "counter": "pql.envs.toy:Counter",
    "lqr": "pql.envs.toy:LQR",
    "recall": "pql.envs.toy:Recall",
    "pendulum": "pql.envs.classic:Pendulum",
    "cartpole": "pql.envs.classic:Cartpole",
    "cartpole_swingup": "pql.envs.classic:CartpoleSwingup",
    "ball_balance": "pql.envs.ball_balance:BallBalance",
    "tmaze": "pql.envs.tmaze:TMaze",
    "catch": "pql.envs.catch:Catch",
    **{name: f"pql.envs.mujoco:{name}" for name in MUJOCO},
    "atari": "pql.envs.atari:AtariVec",
    "gymnasium": "pql.envs.adapters.gymnasium:GymnasiumVec",
    "remote": "pql.remote.env:Remote",
    "envpool": "pql.envs.adapters.envpool:EnvpoolVec",
    "isaacgym": "pql.envs.adapters.isaacgym:isaacgym",
    "isaaclab": "pql.envs.adapters.isaaclab:isaaclab",
    "mjlab": "pql.envs.adapters.mjlab:mjlab",
    "playground": "pql.envs.adapters.playground:PlaygroundVec",
    "maniskill": "pql.envs.adapters.maniskill:maniskill",
}

CHOOSES = {
    "gymnasium": ("id", "Pendulum-v1"),
    "envpool": ("id", "HalfCheetah-v5"),
    "atari": ("game", "pong"),
    "playground": ("env", "CartpoleSwingup"),
    "mjlab": ("task", "Mjlab-Velocity-Flat-Unitree-Go1"),
    "maniskill": ("task", "PickCube-v1"),
    "isaaclab": ("task", "Isaac-Ant"),
    "isaacgym": ("task", "Ant"),
}
"""Simulators with many tasks: the keyword that selects the task, and an example. There is no default task."""

EXTRA_OF = {
    "pql.envs.mujoco": "mujoco",
    "pql.envs.adapters.gymnasium": "gymnasium",
    "pql.envs.atari": "atari",
    "pql.remote.env": "remote",
    "pql.envs.adapters.envpool": "bench",
}

# Simulators that usually run in a separate Python (``task.process.python``), and the packages to look for there. For
# those that ``make robots`` installs without dependencies, one of the dependencies is listed, too.
NEEDS = {
    "isaacgym": ("isaacgymenvs",),
    "isaaclab": ("isaaclab_tasks",),
    "mjlab": ("mjlab", "tyro"),
    "playground": ("mujoco_playground",),
    "maniskill": ("mani_skill", "sapien"),
}
