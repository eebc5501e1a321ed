"""A short form of ``tools/bench/long_runs.py``, and what must hold far past the ends of schedules."""

from pathlib import Path

import pytest
import torch

from pql.collect.epsilon import Epsilon
from pql.config import EpsilonConfig
from pql.data.priority import PriorityRule, Ranked
from pql.engine.optim import LrSchedule, annealed
from pql.run.log.displays import duration

ROOT = Path(__file__).parents[2]
EDGE = 2**31
CPU = torch.device("cpu")


@pytest.mark.fault(14)
def test_a_chain_of_resumes_has_the_bits_of_one_run(tool, tmp_path):
    out = tool("bench.long_runs").chain(tmp_path, 3)
    assert out["equal"]
    assert out["ticks"] == [12, 12]


def test_schedules_stay_at_their_ends():
    for steps in (1000, EDGE - 1, EDGE, 2**40):
        count = torch.tensor(float(steps))
        assert LrSchedule("linear", 1000, 0.25)(count) == 0.25
        assert LrSchedule("cosine", 1000, 0.25)(count) == 0.25
        assert annealed(torch.tensor(steps), 8, 8000) == 0
        epsilon = Epsilon(EpsilonConfig(kind="annealed", start=1.0, end=0.05, steps=1000), 4, CPU)
        epsilon.steps.fill_(steps)
        assert (epsilon() == torch.tensor(0.05)).all()
        assert epsilon.steps == steps + 4
        ranked = Ranked(8, CPU, PriorityRule(0.6, 0.4, 8000, 8))
        ranked.ticks.fill_(steps)
        ranked.count_tick()
        assert ranked.beta == 1
        assert ranked.ticks == steps + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3599, "59:59"), (3600, "1:00:00"), (36_000, "10:00:00"), (86_399.6, "24:00:00"), (900_000, "250:00:00")],
)
def test_times_of_many_hours_have_one_form(seconds, text):
    assert duration(seconds) == text
