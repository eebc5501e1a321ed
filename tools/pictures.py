"""Make the pictures of the documentation: docs/tasks/NAME.png, and the README's animation docs/policies.gif.

python tools/pictures.py tasks [NAME ...] [--out docs/tasks] [--steps 12]
python tools/pictures.py policies [POLICY ...] [--out docs/policies.gif] [--seconds 4] [--columns 4]

``tasks`` draws one environment of each task after a few random actions; by default of the MuJoCo tasks whose robot is
installed, and of the tasks in pure torch. For a MuJoCo task from pixels, the image is the policy's observation.
``policies`` films the policies of docs/policies, each in its own task, side by side.

Needs offscreen rendering (EGL or OSMesa) and pillow (``pip install 'pql-rl[mujoco,video]'``).
"""

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pql.contract.env import make_env
from pql.contract.optional import Renderable, supports
from pql.envs.mujoco import TASKS
from pql.errors import ConfigError
from pql.run.play import Stage
from tools.originals.by_hand import chance

DOCS = Path(__file__).resolve().parents[1] / "docs"
TORCH = ("pendulum", "cartpole_swingup", "cartpole", "ball_balance", "catch", "tmaze")  # drawn in 2D by pillow
POLICIES = ("walker2d", "halfcheetah", "ant", "humanoid")  # in the README's order
ENLARGED = 4  # enlargement of frames of 84 x 84 pixels
WIDTH, HEIGHT = 240, 180  # of a film
RATE = 12.5  # frames per second: GIFs count in hundredths
LARGEST = 3_000_000  # bytes of the animation


def picture(name: str, steps: int) -> np.ndarray:
    """Render one environment after ``steps`` random actions: uint8 [H, W, 3], or [H, W] in grey."""
    env = make_env(name, 1, "cpu", **({"threads": 1} if name in TASKS else {}))
    assert supports(env, Renderable)
    try:
        obs, act = env.reset(seed=1), chance(env, seed=1)
        for _ in range(steps):
            obs = env.step(act(obs)).obs
        frames = obs["policy"][0]
        if name in TASKS and frames.dtype == torch.uint8:
            return frames[-1].numpy().repeat(ENLARGED, 0).repeat(ENLARGED, 1)
        return np.asarray(env.render(0, 480, 360))
    finally:
        env.close()


def draw_tasks(names: Sequence[str], out: Path, steps: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names or (*TASKS, *TORCH):
        try:
            image = Image.fromarray(picture(name, steps))
        except ConfigError as error:
            if names:
                raise
            print(f"{name}: {error}")
            continue
        file = out / f"{name}.png"
        # With 128 colours shading still looks smooth, and no image is above 60 kB.
        (image.quantize(128) if image.mode == "RGB" else image).save(file, optimize=True)
        print(f"{file}: {image.width} x {image.height}, {file.stat().st_size / 1000:.0f} kB")


def film(policy: Path, seconds: float, skip: float) -> list[np.ndarray]:
    """Render the greedy policy at simulated speed: frames [H, W, 3] from ``skip`` seconds on."""
    with Stage(policy, seed=0, device="cpu") as stage:
        dt = stage.env.spec.info["dt"]
        wanted = iter(round((skip + n / RATE) / dt) for n in range(round(seconds * RATE)))
        due, frames = next(wanted), []
        for t in stage.run(episodes=10, steps=round((skip + seconds) / dt) + 1):
            if t == due:
                frames.append(stage.picture(WIDTH, HEIGHT))
                due = next(wanted, None)
    return frames


def tile(films: list[list[np.ndarray]], columns: int) -> list[Image.Image]:
    """Return frames that show all films side by side, ``columns`` in a row."""
    frames = []
    for pictures in zip(*films, strict=True):
        rows = [np.concatenate(pictures[n : n + columns], axis=1) for n in range(0, len(pictures), columns)]
        frames.append(Image.fromarray(np.concatenate(rows)))
    return frames


def save_gif(frames: list[Image.Image], file: Path) -> None:
    """Write a GIF that repeats for ever, all frames with the palette of the middle one."""
    palette = frames[len(frames) // 2].quantize(64)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(file, save_all=True, append_images=islice(small, 1, None), duration=round(1000 / RATE), loop=0)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tasks", "policies"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks, or folders of policies")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=12, help="random actions before the picture of a task")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the animation")
    parser.add_argument("--skip", type=float, default=1.0, help="seconds before its first frame")
    parser.add_argument("--columns", type=int, default=4)
    args = parser.parse_args(words)
    if args.what == "tasks":
        if unknown := {*args.names} - {*TASKS, *TORCH}:
            parser.error(f"no pictures of {', '.join(sorted(unknown))}; there are {', '.join((*TASKS, *TORCH))}")
        draw_tasks(args.names, args.out or DOCS / "tasks", args.steps)
        return
    policies = [*map(Path, args.names)] or [DOCS / "policies" / name for name in POLICIES]
    out = args.out or DOCS / "policies.gif"
    save_gif(tile([film(policy, args.seconds, args.skip) for policy in policies], args.columns), out)
    size = out.stat().st_size
    print(f"{out}: {len(policies)} policies, {size / 1e6:.2f} MB")
    if size > LARGEST:
        parser.exit(1, f"more than {LARGEST / 1e6:.0f} MB: choose fewer --seconds\n")


if __name__ == "__main__":
    main()
