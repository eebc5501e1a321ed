"""Make the README's animation: the policies of docs/policies, each in its own task, side by side, as one GIF.

python tools/picture_policies.py [POLICY ...] [--out docs/policies.gif] [--seconds 4] [--columns 4]

Needs offscreen rendering (EGL or OSMesa) and pillow (``pip install 'pql-rl[mujoco,video]'``).
"""

import argparse
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from pql.run.play import Stage

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, HEIGHT = 240, 180
RATE = 12.5  # frames per second: GIFs count in hundredths
COLORS = 64
POLICIES = ("walker2d", "halfcheetah", "ant", "humanoid")  # in the README's order
LARGEST = 3_000_000  # bytes


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


def save(frames: list[Image.Image], file: Path) -> None:
    """Write a GIF that repeats for ever, all frames with the palette of the middle one."""
    palette = frames[len(frames) // 2].quantize(COLORS)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(file, save_all=True, append_images=islice(small, 1, None), duration=round(1000 / RATE), loop=0)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", type=Path, metavar="POLICY")
    parser.add_argument("--out", type=Path, default=DOCS / "policies.gif")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--skip", type=float, default=1.0, help="seconds before the first frame")
    parser.add_argument("--columns", type=int, default=4)
    args = parser.parse_args(words)
    policies = args.policies or [DOCS / "policies" / name for name in POLICIES]
    save(tile([film(policy, args.seconds, args.skip) for policy in policies], args.columns), args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {len(policies)} policies, {size / 1e6:.2f} MB")
    if size > LARGEST:
        parser.exit(1, f"more than {LARGEST / 1e6:.0f} MB: choose fewer --seconds\n")


if __name__ == "__main__":
    main()
