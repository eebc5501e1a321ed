"""Runs on histories of vectors that are stored frame by frame: the same bits as when they are stored whole."""

import pytest
import torch
from conftest import bits, differences, go_on, start, ticks
from lagging import Lagging

from pql.config.compose import compose
from pql.contract.conformance import check_env
from pql.errors import ConfigError

CASES = {  # the ring wraps in none of these: guarding the older frames takes rows
    "pql2": ("pendulum", "algo=pql2", "algo.n_step=3"),
    "pql": ("pendulum", "algo=pql", "algo.n_step=1", "replay.dtype=float16"),
    "rainbow": ("cartpole", "algo=rainbow", "algo.priority.alpha=0.6", "replay.capacity=4000"),
    "r2d2": ("cartpole", "algo=r2d2", "algo.period=5", "algo.length=5", "algo.burn_in=5", "replay.capacity=8000"),
}


def config(case, *words):
    task, *own = CASES[case]
    small = ["task.name=lagging:Lagging", f"task.kwargs.task={task}", "task.kwargs.max_episode_steps=7", "num_envs=4"]
    small += ["device=cpu", "placement.executor=inline", "placement.matmul=exact", "seed=1", "algo.batch_size=32"]
    return compose([*small, *own, "algo.warmup_steps=24", *words])


@pytest.mark.parametrize("fill", ["first", "zeros"])
@pytest.mark.parametrize("case", CASES)
def test_a_declared_stack_changes_no_bit_of_the_training(case, fill):
    """A resume point of the run that did not declare it is read by the other one."""
    words = [[f"task.kwargs.fill={fill}", f"task.kwargs.declared={x}"] for x in (0, 1)]
    whole, once = (go_on(start(config(case, *given)), 12) for given in words)
    again = start(config(case, *words[1]))
    again.load_state_dict(whole.state_dict(), ticks=12)
    assert differences(bits(once), bits(go_on(again, 0))) == []
    found = [bits(run) for run in (whole, once)]
    sizes = [[v.pop(k).numel() for k in [*v] if k.endswith("obs.policy")] for v in found]
    assert sizes == [[5 * sizes[1][0]], sizes[1]]
    assert differences(*found) == []
    rings = [run.collector.replays[0] for run in (whole, once)]
    places = torch.cartesian_prod(torch.arange(int(rings[0].live.head.min())), rings[0].columns).unbind(1)
    assert torch.equal(*(ring.observations(*places)["policy"] for ring in rings))
    for run in (whole, once, again):
        run.close_envs()


def test_a_resumed_run_and_concurrent_workers_give_the_same_bits():
    words = ["replay.capacity=320", "algo.schedule=concurrent"]  # the ring wraps
    executors = ("inline", "inline", "threads")
    parts, again, threads = (start(config("pql2", *words, f"placement.executor={one}")) for one in executors)
    ticks(parts, 60)
    again.load_state_dict(parts.state_dict(), ticks=60)
    for one, count in ((parts, 20), (again, 20), (threads, 80)):
        go_on(one, count)
        assert int(parts.collector.replays[0].live.head.min()) > 80
    for other in (again, threads):
        assert differences(bits(parts), bits(other)) == []
        other.close_envs()
    parts.close_envs()


@pytest.mark.parametrize("fault", ["begin", "step"])
def test_a_history_that_would_not_come_back_is_refused_at_the_start(fault):
    what = r"reset.* its first frame where an episode begins" if fault == "begin" else r"step.* the newest of the obs"
    with pytest.raises(ConfigError, match=rf"{what}.*: pql doctor --env NAME tests it"):
        start(config("pql2", f"task.kwargs.fault={fault}"))
    assert check_env(Lagging(3, "cpu", fault=fault, max_episode_steps=6), steps=40).failed == ["stack"]
    assert check_env(Lagging(3, "cpu", max_episode_steps=6), steps=40).ok
