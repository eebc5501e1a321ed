"""Frames on a CUDA device: stacked as on the CPU without host syncs; emulators transfer them unchanged."""

import pytest
import torch
from conftest import never_waiting
from torch import Generator

from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.envs.catch import Catch
from pql.types import Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def to_device(step: Step) -> Step:
    return Step._make({k: v.cuda() for k, v in f.items()} if isinstance(f, dict) else f.cuda() for f in step)


def test_the_ring_stacks_the_same_frames_without_waiting():
    env = Catch(64, max_episode_steps=5)
    layout = ReplayLayout(env.spec.obs, None, 64, 40, 3, True)
    rings = [Replay(layout, torch.device(d), reward_clip=0.5) for d in ("cpu", "cuda")]
    obs, gen = env.reset(0)["policy"], Generator().manual_seed(0)
    for ring in rings:
        ring.begin({"policy": obs.to(ring.device)})
    for _ in range(90):
        action = torch.randint(3, (64,), generator=gen)
        step = env.step(action)
        rings[0].insert(action, step)
        rings[1].insert(action.cuda(), to_device(step))
    row, column = torch.randint(90 - 40 + rings[0].guard, 90, (512,), generator=gen), torch.arange(512) % 64
    want = rings[0].windows(rings[0].live, row, column, rings[0].live.head[column], 3, 0.9)
    here = row.cuda(), column.cuda(), rings[1].live.head[column.cuda()]
    rings[1].constants(3, 0.9)
    with never_waiting():
        got = rings[1].windows(rings[1].live, *here, 3, 0.9)
    assert want.mask.sum() > 350
    for name in ("action", "reward", "discount", "mask", "index"):
        assert torch.equal(getattr(want, name), getattr(got, name).cpu()), name
    kept = want.mask * want.discount > 0
    assert torch.equal(want.obs["policy"], got.obs["policy"].cpu())
    assert torch.equal(want.next_obs["policy"][kept], got.next_obs["policy"].cpu()[kept])


def test_catch_is_the_same_game_and_never_waits():
    env = Catch(4096, "cuda")
    env.reset(0)
    with never_waiting():
        for _ in range(7):
            step = env.step(env.optimal_action())
    assert step.reward.min() == 1


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_consoles_hand_over_what_they_show(autoreset):
    pytest.importorskip("ale_py")
    from pql.envs.atari import AtariVec

    kwargs = {"game": "breakout", "autoreset": autoreset, "max_episode_steps": 40, "life_loss": True, "groups": 2}
    one, two = AtariVec(4, "cpu", **kwargs), AtariVec(4, "cuda", **kwargs)
    assert torch.equal(one.reset(0)["policy"], two.reset(0)["policy"].cpu())
    gen, steps = Generator().manual_seed(0), []
    for _ in range(100):
        action = torch.randint(4, (4,), generator=gen)
        steps.append((one.step(action), two.step(action.cuda())))
    for a, b in steps:  # only now: a pinned buffer that is filled too soon would show here
        assert torch.equal(a.obs["policy"], b.obs["policy"].cpu())
        assert torch.equal(a.final_obs["policy"], b.final_obs["policy"].cpu())
        for name in ("reward", "terminated", "truncated", "first", "valid"):
            assert torch.equal(getattr(a, name), getattr(b, name).cpu()), name
    one.close()
    two.close()
