"""Images that a replay stores reduced: the rows are those of a ring that stores them whole."""

import pytest
import torch
from conftest import configured
from pictures import averaged
from safetensors.torch import load_file, save_file
from test_transitions_frames import FakeCollector

from pql.algos.builders import stored_obs
from pql.collect.prefill import prefill
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.data import transitions
from pql.data.frames import stored_spec
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout, replay_bytes
from pql.errors import ConfigError
from pql.types import Step

CPU, SIDE, N = torch.device("cpu"), 4, 3
WHOLE = {
    "policy": ObsSpec((2,)),
    "stack": ObsSpec((3, 12, 10), torch.uint8, stack=3),
    "planes": ObsSpec((2, 12, 10), torch.uint8),
    "colour": ObsSpec((12, 10, 3), torch.uint8),
    "grey": ObsSpec((12, 10), torch.uint8),
    "depth": ObsSpec((12, 10)),
    "tiny": ObsSpec((4, 5), torch.uint8),
}
SHAPES = {"stack": (3, 4, 4), "planes": (2, 4, 4), "colour": (4, 4, 3), "grey": (4, 4)}
SMALL = {k: stored_spec(s, SIDE) for k, s in WHOLE.items()}


def layout(groups, rows=14):
    return ReplayLayout(groups, 1, N, rows, 3, True)


def observed(history, gen, begins):
    """Random images; stacks [3, 12, 10] shift by a frame, and are blank before an episode."""
    obs = {
        k: torch.randint(256, (N, *s.shape), dtype=torch.uint8, generator=gen)
        if s.dtype == torch.uint8
        else torch.rand(N, *s.shape, generator=gen)
        for k, s in WHOLE.items()
    }
    blank = torch.zeros(N, 2, 12, 10, dtype=torch.uint8)
    older = blank if history is None else torch.where(begins.view(-1, 1, 1, 1), blank, history["stack"][:, 1:])
    obs["stack"] = torch.cat((older, obs["stack"][:, -1:]), 1)
    return obs


def fill(*stores, steps=30):
    """Insert the same steps into all; in every fifth the episodes of all environments are cut off."""
    gen, off, on = torch.Generator().manual_seed(0), torch.zeros(N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
    now = observed(None, gen, on)
    for store in stores:
        store.begin(now)
    for t in range(steps):
        over = on if t % 5 == 4 else off
        final = observed(now, gen, off)
        now = observed(final, gen, on) if t % 5 == 4 else final
        reward = torch.rand(N, generator=gen)
        for store in stores:
            store.insert(reward.view(N, 1), Step(now, reward, off, over, over, final, on, on, {}))
    return stores


def reduced_by_hand(name, x):
    """Means over areas of images [B, ...], before rounding."""
    planes = x.movedim(-1, 1) if name == "colour" else x.unsqueeze(1) if name == "grey" else x
    small = averaged(planes.double(), SIDE)
    return small.movedim(1, -1) if name == "colour" else small.view(len(x), *SHAPES[name])


def assert_reduced(small, whole):
    assert {*small} == {*WHOLE}
    for k, x in whole.items():
        if k in SHAPES:
            assert (small[k].dtype, small[k].shape[1:]) == (torch.uint8, SHAPES[k])
            assert (small[k].double() - reduced_by_hand(k, x)).abs().max() <= 0.5 + 1e-4
        else:
            assert torch.equal(small[k], x)


def samples(ring, count=64):
    return ring.sample(ring.live, count, 2, 0.9, torch.Generator().manual_seed(3))


def test_samples_are_those_of_whole_images_reduced():
    """In all layouts, of first observations, successors and final ones, after the ring has wrapped."""
    whole, small = fill(Replay(layout(WHOLE), CPU), Replay(layout(SMALL), CPU))
    a, b = samples(whole), samples(small)
    for field in ("action", "reward", "discount", "mask", "index"):
        assert torch.equal(getattr(a, field), getattr(b, field))
    assert a.mask.sum() > 0
    assert_reduced(b.obs, a.obs)
    used = (a.mask > 0) & (a.discount > 0)
    assert_reduced(*({k: v[used] for k, v in x.next_obs.items()} for x in (b, a)))
    assert sum(t.nbytes for t in small.obs.values()) < sum(t.nbytes for t in whole.obs.values()) / 2
    assert replay_bytes(layout(SMALL)) - replay_bytes(layout(WHOLE)) == sum(
        t.nbytes - whole.obs[k].nbytes for k, t in small.obs.items()
    )


@pytest.mark.parametrize("flat", [False, True])
def test_a_file_of_whole_images_or_of_reduced_ones_prefills_the_same_rows(tmp_path, flat):
    whole, small = fill(Replay(layout(WHOLE, 40), CPU), Replay(layout(SMALL, 40), CPU))
    found = []
    for ring, name in ((whole, "whole"), (small, "small")):
        transitions.save_replay(ring, tmp_path / name)
        if flat:
            save_file(flattened(ring), tmp_path / name)
        collector = FakeCollector(WHOLE, N, 60)
        collector.replays = [Replay(layout(SMALL, 60), CPU)]
        collector.replays[0].begin(collector.obs)
        assert prefill(collector, tmp_path / name) == (24 * N if flat else 30 * N)
        found.append(samples(collector.replays[0]))
    for field in ("obs", "next_obs"):
        for k, v in getattr(found[0], field).items():
            kept = found[0].mask > 0
            assert torch.equal(v[kept], getattr(found[1], field)[k][kept]), k
    assert found[0].mask.sum() > 0


def flattened(ring):
    """Transitions that end no episode, as other software records them."""
    rows = torch.tensor([t for t in range(36) if t % 6 < 4]).repeat(N)  # without ends and their fillers
    columns, heads = torch.arange(N).repeat_interleave(24), ring.live.head[:1].expand(24 * N)
    batch = ring.windows(ring.live, rows, columns, heads, 1, 0.9)
    assert batch.mask.all()
    none = torch.zeros(24 * N, dtype=torch.bool)
    obs = {**{f"obs.{k}": v for k, v in batch.obs.items()}, **{f"next_obs.{k}": v for k, v in batch.next_obs.items()}}
    return {**obs, "action": batch.action, "reward": batch.reward, "terminated": none, "truncated": none.clone()}


def test_a_resume_point_with_whole_images_is_loaded():
    whole, small = fill(Replay(layout(WHOLE), CPU), Replay(layout(SMALL), CPU))
    loaded = Replay(layout(SMALL), CPU)
    loaded.load_state_dict({k: v.clone() for k, v in whole.state_dict().items()})
    a, b = samples(small), samples(loaded)
    assert a.mask.sum() > 0
    for one, two in ((a.obs, b.obs), (a.next_obs, b.next_obs)):
        for k, v in one.items():
            assert torch.equal(v[a.mask > 0], two[k][a.mask > 0]), k


@pytest.mark.parametrize(
    ("spec", "stored"),
    [
        (ObsSpec((4, 128), torch.uint8, stack=4), (4, 128)),
        (ObsSpec((4, 84, 3), torch.uint8, stack=4), (4, 2, 2)),
        (ObsSpec((84, 60, 4), torch.uint8), (2, 2, 4)),
    ],
)
def test_the_first_axis_of_a_stack_holds_its_frames(spec, stored):
    assert stored_spec(spec, 2).shape == stored


@pytest.mark.parametrize("wrong", [(14, 3, 12, 9), (7, 6, 12, 10), (13, 3, 12, 10)])
def test_images_of_another_size_are_refused(tmp_path, wrong):
    (ring,) = fill(Replay(layout(WHOLE), CPU))
    transitions.save_replay(ring, tmp_path / "ring")
    data = load_file(tmp_path / "ring")
    save_file({**data, "obs.grey": torch.zeros(wrong, dtype=torch.uint8)}, tmp_path / "other")
    collector = FakeCollector(WHOLE, N, 60)
    collector.replays = [Replay(layout(SMALL, 60), CPU)]
    with pytest.raises(ConfigError) as caught:
        prefill(collector, tmp_path / "other")
    known = "a column obs.grey of uint8 [14, 3, 4, 4] or of whole images [14, 3, 12, 10]"
    assert f"{known}, not uint8 {list(wrong)}" in str(caught.value)


def test_only_bytes_are_stored_reduced_and_only_for_our_own_networks():
    spec = EnvSpec("made up", N, WHOLE, Box(1), CPU)
    base = {"task": {"name": "pendulum"}, "algo": {"family": "sac", "encoder": {"size": SIDE}}}
    own = configured(base)
    changed = {k: s.shape for k, s in stored_obs(own, spec).items() if s != WHOLE[k]}
    assert changed == SHAPES
    for which in ("policy", "critic"):
        assert stored_obs(configured(base, {which: {"net": "a:B"}}), spec) == WHOLE
