"""What IMPALA and APPO learn beside their collector, and what V-trace is for."""

import pytest
from conftest import start
from impala_runs import ticks
from test_ppo_learning import score

from pql.compose import compose
from pql.schedule import Inline

ONE = ("device=cpu", "placement.matmul=exact", "placement.threads.collector=1", "placement.threads.v=1")


@pytest.mark.parametrize(("name", "count"), [("impala", 290), ("appo", 75)])
def test_balls_are_caught_from_pixels_with_the_preset(name, count):
    parts = start(compose([*ONE, f"algo={name}", "task=catch"]), Inline())
    assert parts.learners["learner"].state.net.value.body is None  # one network for both
    assert score(parts, 256) < -0.2  # untrained
    ticks(parts, count)
    assert parts.schedule.lag == 1
    assert score(parts, 256) > 0.8  # nine balls of ten


def test_a_cart_pole_is_balanced_with_the_preset():
    parts = start(compose([*ONE, "algo=impala", "task=cartpole"]), Inline())
    assert score(parts) < 100
    ticks(parts, 300)
    assert score(parts) > 450  # of 500
