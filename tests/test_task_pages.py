"""The page of pictures has every MuJoCo task, with its sizes and a picture that is there; and the script that draws."""

import re
from pathlib import Path

import numpy as np
import pytest

# ruff: noqa: E402
pytest.importorskip("mujoco")  # first: the imports below need it
Image = pytest.importorskip("PIL.Image")

from test_tools import tool as tool

from pql.envs.mujoco import TASKS

FOLDER = Path(__file__).parents[1] / "docs" / "tasks"
ROWS = {
    row[1]: [cell.strip() for cell in row[0].strip("|\n").split("|")]
    for row in re.finditer(r"^\| `(\w+)` \|.*$", (FOLDER / "README.md").read_text(), re.M)
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_a_row_with_its_sizes_and_a_picture(name):
    spec = TASKS[name].describe(1)
    assert name in ROWS, f"docs/tasks/README.md has no row for {name}"
    _, shown, sizes, *_ = ROWS[name]
    assert sizes == f"{' x '.join(map(str, spec.obs['policy'].shape))} / {spec.action.size}"
    if shown != "as above":
        assert shown == f"![]({name}.png)"
        file = FOLDER / f"{name}.png"
        assert file.stat().st_size <= 60_000
        with Image.open(file) as image:
            assert image.size in ((480, 360), (336, 336))
            assert np.asarray(image.convert("L")).std() > 3  # something is to be seen


def test_pictures_are_drawn(tool, tmp_path, capsys):
    pictures = tool("picture_tasks")
    pictures.main(["ballbalance_pixels", "--out", str(tmp_path), "--steps", "1"])  # torch draws it: anywhere
    with Image.open(tmp_path / "ballbalance_pixels.png") as image:
        assert (image.size, image.mode) == ((336, 336), "L")
    with pytest.raises(SystemExit):
        pictures.main(["hoper"])
    assert "no MuJoCo tasks: hoper" in capsys.readouterr().err
