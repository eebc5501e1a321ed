"""Render the images of the tasks in docs/tasks: one environment of each after a few random actions.

python tools/picture_tasks.py [NAME ...] [--out docs/tasks] [--steps 12]

Default: the MuJoCo tasks whose robot is installed, and the tasks in pure torch. For a MuJoCo task from pixels, the
image is the policy's observation. Needs offscreen rendering (EGL or OSMesa) and pillow
(``pip install 'pql-rl[mujoco,video]'``).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pql.contract.env import Discrete, EnvSpec, make_env
from pql.contract.optional import Renderable, supports
from pql.envs.mujoco import TASKS
from pql.errors import ConfigError

TORCH = ("pendulum", "cartpole_swingup", "cartpole", "ball_balance", "catch", "tmaze")  # drawn in 2D by pillow

WIDTH, HEIGHT = 480, 360
COLORS = 128  # colours of the palette: shading still looks smooth, and no image is above 60 kB
ENLARGED = 4  # enlargement of frames of 84 x 84 pixels


def picture(name: str, steps: int) -> np.ndarray:
    """Render one environment after ``steps`` random actions: uint8 [H, W, 3], or [H, W] in grey."""
    env = make_env(name, 1, "cpu", **({"threads": 1} if name in TASKS else {}))
    assert supports(env, Renderable)
    try:
        obs, generator = env.reset(seed=1), torch.Generator().manual_seed(1)
        for _ in range(steps):
            obs = env.step(random_action(env.spec, generator)).obs
        frames = obs["policy"][0]
        if name in TASKS and frames.dtype == torch.uint8:
            return frames[-1].numpy().repeat(ENLARGED, 0).repeat(ENLARGED, 1)
        image: np.ndarray = env.render(0, WIDTH, HEIGHT)
        return image
    finally:
        env.close()


def random_action(spec: EnvSpec, generator: torch.Generator) -> torch.Tensor:
    """Draw an action of one environment, [1, A] in [-1, 1] or [1]."""
    if isinstance(spec.action, Discrete):
        return torch.randint(spec.action.n, (1,), generator=generator)
    return torch.rand(1, *spec.action.shape, generator=generator) * 2 - 1


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "tasks")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(words)
    every = (*TASKS, *TORCH)
    if unknown := {*args.names} - {*every}:
        parser.error(f"no pictures of {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or every:
        try:
            image = Image.fromarray(picture(name, args.steps))
        except ConfigError as error:
            if args.names:
                raise
            print(f"{name}: {error}")
            continue
        file = args.out / f"{name}.png"
        (image.quantize(COLORS) if image.mode == "RGB" else image).save(file, optimize=True)
        print(f"{file}: {image.width} x {image.height}, {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
