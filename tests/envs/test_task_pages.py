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
from pql.errors import ConfigError

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


PAPERS = (
    "isaac_ant",
    "isaac_humanoid",
    "anymal",
    "ballbalance",
    "ballbalance_pixels",
    "franka_cube_stack",
    "franka_cube_stack_torque",
    "shadow_hand",
    "shadow_hand_openai",
    "allegro_hand",
    "dclaw",
)


def test_the_papers_tasks_have_a_table_of_what_differs_from_which_commit():
    page = (FOLDER / "differences.md").read_text()
    assert "`ca7a4fb`" in page
    assert "`ca7a4fb`" in (FOLDER / "README.md").read_text()
    parts = re.split(r"^## ", page, flags=re.M)[1:]
    for name in PAPERS:
        (part,) = [part for part in parts if f"`{name}`" in part.partition("\n")[0] or f"`{name}`:" in part]
        assert name == "ballbalance_pixels" or "| | original | here | why |" in part, name
    rows = re.findall(r"^\|(.*)\|$", page, re.M)
    assert all(row.count("|") == 3 for row in rows)


def test_what_the_page_says_about_allegros_masses_is_so():
    from pql.envs.mujoco.task import load_model

    try:
        model = load_model(TASKS["allegro_hand"].task)
    except ConfigError as error:
        pytest.skip(str(error))
    masses = [round(float(model.body(f"link_{link}.0").mass[0]), 4) for link in (3, 7, 11, 15)]
    tips = [round(float(model.body(f"link_{link}.0_tip").mass[0]), 4) for link in (3, 7, 11, 15)]
    assert (masses, tips) == ([0.02, 0.0388, 0.0096, 0.0388], [0.0168, 0.0096, 0.0168, 0.0168])
    assert "index .020, middle .0388, ring .0096, thumb .0388" in (FOLDER / "differences.md").read_text()


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
