"""Actions in [-1, 1] as those of a simulator, and back."""

import pytest
import torch

from pql.contract.bounds import Bounds
from pql.contract.env import Box


@pytest.mark.parametrize(
    ("center", "want"), [(None, [-2.0, -0.5, 1.0, 2.5, 4.0]), ((0.0,), [-2.0, -1.0, 0.0, 2.0, 4.0])]
)
def test_both_directions_by_hand(center, want):
    bounds, unit = Bounds(Box(1, (-2.0,), (4.0,), center)), torch.tensor([[-1.0], [-0.5], [0.0], [0.5], [1.0]])
    assert bounds(unit).flatten().tolist() == want
    assert bounds.unit(bounds(unit)).equal(unit)
    assert bounds(torch.tensor([[-3.0], [1.5]])).flatten().tolist() == [-2.0, 4.0]  # clamped
    assert not bounds.idle


def test_which_map_changes_nothing():
    assert Bounds(Box(2)).idle
    assert Bounds(Box(2, (-1.0, -1.0), (1.0, 1.0), (0.0, 0.0))).idle
    assert not Bounds(Box(2, (-1.0, -1.0), (1.0, 1.0), (0.0, 0.5))).idle
