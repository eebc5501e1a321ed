"""The page of task images has every MuJoCo task, its sizes and an existing image; and the script that draws them."""

import re
from pathlib import Path

import numpy as np
import pytest

# ruff: noqa: E402
pytest.importorskip("mujoco")  # first: the imports below need it
Image = pytest.importorskip("PIL.Image")


from pql.contract.env import Discrete, make_env
from pql.envs.mujoco import TASKS

FOLDER = Path(__file__).parents[2] / "docs" / "tasks"
PAGE = (FOLDER / "README.md").read_text()
ROWS = {
    row[1]: [cell.strip() for cell in row[0].strip("|\n").split("|")]
    for row in re.finditer(r"^\| `(\w+)` \|.*\d / \d.*$", PAGE, re.M)
}
REWARDS = {name for line in re.findall(r"^\* ([^:]*):", PAGE, re.M) for name in re.findall(r"`(\w+)`", line)}


DRAWN = ("pendulum", "cartpole_swingup", "cartpole", "ball_balance", "catch", "tmaze")


@pytest.mark.parametrize("name", [*TASKS, *DRAWN])
def test_a_task_has_a_row_with_its_sizes_a_picture_and_its_reward(name):
    spec = TASKS[name].describe(1) if name in TASKS else make_env(name, num_envs=1).spec
    assert name in REWARDS, f"docs/tasks/README.md does not describe the reward of {name}"
    assert name in ROWS, f"docs/tasks/README.md has no row for {name}"
    _, shown, sizes, *_ = ROWS[name]
    actions = spec.action.n if isinstance(spec.action, Discrete) else spec.action.size
    assert sizes == f"{' x '.join(map(str, spec.obs['policy'].shape))} / {actions}"
    if shown != "as above":
        assert shown == f"![]({name}.png)"
        file = FOLDER / f"{name}.png"
        assert file.stat().st_size <= 60_000
        with Image.open(file) as image:
            assert image.size in ((480, 360), (336, 336))
            assert np.asarray(image.convert("L")).std() > 3  # something is to be seen


def test_pictures_are_drawn(tool, tmp_path, capsys):
    pictures = tool("pictures")
    pictures.main(
        ["tasks", "ballbalance_pixels", "tmaze", "--out", str(tmp_path), "--steps", "1"]
    )  # drawn without OpenGL
    with Image.open(tmp_path / "ballbalance_pixels.png") as image:
        assert (image.size, image.mode) == ((336, 336), "L")
    with Image.open(tmp_path / "tmaze.png") as image:
        assert image.size == (480, 360)
    with pytest.raises(SystemExit):
        pictures.main(["tasks", "hoper"])
    assert "no pictures of hoper" in capsys.readouterr().err
