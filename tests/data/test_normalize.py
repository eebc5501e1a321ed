"""Running statistics against Welford's algorithm and float64 statistics of all inputs."""

import pytest
import torch
from oracles import Welford

from pql.contract.env import ObsSpec
from pql.data.normalize import CLIP, Moments, Normalizer, merge_moments

CPU = torch.device("cpu")
SPECS = {"policy": ObsSpec((3,)), "critic": ObsSpec((2,)), "frame": ObsSpec((1, 2), torch.uint8)}


def frames(count, num_envs, seed=0):
    gen = torch.Generator().manual_seed(seed)
    scale, shift = torch.tensor([0.1, 1.0, 50.0]), torch.tensor([0.0, -3.0, 400.0])
    for _ in range(count):
        x = torch.randn(num_envs, 3, generator=gen) * scale + shift
        yield {
            "policy": x,
            "critic": x[:, :2] * 2,
            "frame": torch.randint(256, (num_envs, 1, 2), generator=gen).to(torch.uint8),
        }


@pytest.mark.parametrize("num_envs", [1, 7])
def test_moments_equal_welford(num_envs):
    moments, slow = Moments((), CPU), Welford()
    gen = torch.Generator().manual_seed(0)
    for _ in range(50):
        x = torch.randn(num_envs, generator=gen) * 3 + 1000
        moments.update(x)
        for value in x.tolist():
            slow.add(value)
    assert moments.count.item() == slow.count
    assert moments.mean.item() == pytest.approx(slow.mean, rel=1e-13)
    assert moments.variance().item() == pytest.approx(slow.variance(), rel=1e-9)


def test_rows_that_are_no_real_frames_are_left_out():
    some, slow = Moments((2,), CPU), [Welford(), Welford()]
    gen = torch.Generator().manual_seed(0)
    for keep in ([True, False, True], [False] * 3, [True] * 3, [False, False, True]):
        x = torch.randn(3, 2, generator=gen) + 100
        junk = torch.where(torch.tensor(keep).unsqueeze(1), x, float("nan"))
        some.update(junk, torch.tensor(keep))
        for row in x[torch.tensor(keep)].tolist():
            for one, value in zip(slow, row, strict=True):
                one.add(value)
    assert some.count.item() == 6
    assert some.mean.tolist() == pytest.approx([s.mean for s in slow], rel=1e-12)
    assert some.variance().tolist() == pytest.approx([s.variance() for s in slow], rel=1e-9)


def test_frozen_statistics_are_those_of_everything_fed():
    norm, fed = Normalizer(SPECS, 16, CPU), list(frames(40, 16))
    for obs in fed:
        norm.observe(obs)
    norm.freeze()
    out = norm(fed[-1])
    for k in ("policy", "critic"):
        every = torch.cat([obs[k] for obs in fed]).double()
        want = (fed[-1][k].double() - every.mean(0)) / every.std(0, correction=0)
        torch.testing.assert_close(out[k].double(), want.clamp(-5, 5), rtol=0, atol=1e-4)
    assert torch.equal(out["frame"], fed[-1]["frame"])


def test_statistics_in_use_change_only_at_a_freeze():
    norm = Normalizer(SPECS, 16, CPU)
    first, second, probe = frames(3, 16)
    identity = {k: v.clamp(-5, 5) if k != "frame" else v for k, v in probe.items()}
    norm.observe(first)
    assert all(torch.equal(v, identity[k]) for k, v in norm(probe).items())
    norm.freeze()
    used = norm(probe)
    assert not torch.equal(used["policy"], identity["policy"])
    norm.observe(second)
    assert torch.equal(norm(probe)["policy"], used["policy"])
    norm.freeze()
    assert not torch.equal(norm(probe)["policy"], used["policy"])


def test_freezing_before_anything_was_fed_changes_nothing():
    norm = Normalizer(SPECS, 4, CPU, reward_scale=0.1, reward_gamma=0.9)
    norm.freeze()
    x = torch.tensor([[-7.0, 0.5, 2.0]])
    assert norm({"policy": x})["policy"].tolist() == [[-5.0, 0.5, 2.0]]
    assert norm.reward_scale.item() == pytest.approx(0.1)


def test_clamp_and_its_input():
    norm = Normalizer(SPECS, 8, CPU)
    for obs in frames(5, 8):
        norm.observe(obs)
    norm.freeze()
    x = torch.tensor([[1e6, -1e6, 400.0]])
    out = norm({"policy": x})["policy"]
    assert out[0, :2].tolist() == [CLIP, -CLIP]
    assert CLIP == 5.0
    assert x.tolist() == [[1e6, -1e6, 400.0]]


def test_switched_off_it_is_the_identity():
    norm = Normalizer(SPECS, 8, CPU, normalize_obs=False)
    obs = next(frames(1, 8))
    norm.observe(obs)
    norm.freeze()
    assert all(torch.equal(v, obs[k]) for k, v in norm(obs).items())
    assert norm({"policy": torch.full((1, 3), 99.0)})["policy"].max() == 99


TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.float64)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_of_every_type_are_those_of_floats(dtype, shape):
    """But images of bytes, which networks scale."""
    gen = torch.Generator().manual_seed(0)
    fed = [torch.randint(2 if dtype == torch.bool else 100, (8, *shape), generator=gen).to(dtype) for _ in range(5)]
    for switched in (True, False):
        found, expected = (
            Normalizer({"policy": ObsSpec(shape, kind)}, 8, CPU, switched) for kind in (dtype, torch.float32)
        )
        for x in fed:
            found.observe({"policy": x})
            expected.observe({"policy": x.float()})
        for norm in (found, expected):
            norm.freeze()
        out = found({"policy": fed[0]})["policy"]
        if dtype == torch.uint8 and len(shape) > 1:
            assert out is fed[0]
            continue
        factor = 1 / 255 if dtype == torch.uint8 and not switched else 1
        assert out.dtype == torch.float32
        assert torch.equal(out, expected({"policy": fed[0].float() * factor})["policy"])
    raw = Normalizer({"policy": ObsSpec(shape, dtype)}, 8, CPU, integers=False)
    seen = raw({"policy": fed[0]})["policy"]
    assert seen is fed[0] if not dtype.is_floating_point else seen.dtype == torch.float32


def test_a_constant_feature_stays_finite():
    norm = Normalizer({"policy": ObsSpec((1,))}, 4, CPU)
    for _ in range(10):
        norm.observe({"policy": torch.full((4, 1), 3.0)})
    norm.freeze()
    assert norm({"policy": torch.full((4, 1), 3.0)})["policy"].abs().max() < 1e-2


def feed(norm, fed, seed):
    gen = torch.Generator().manual_seed(seed)
    for obs in fed:
        norm.observe(obs)
        norm.observe_reward(torch.randn(8, generator=gen), *(torch.rand(2, 8, generator=gen) < 0.2))
        norm.freeze()


def test_a_restored_normalizer_continues_like_the_uninterrupted_one():
    first, rest = list(frames(10, 8, 1)), list(frames(10, 8, 2))
    one, two = (Normalizer(SPECS, 8, CPU, reward_gamma=0.9) for _ in range(2))
    feed(one, first, 3)
    addresses = [t.data_ptr() for t in two.frozen()]
    two.load_state_dict({k: t.clone() for k, t in one.state_dict().items()})
    assert two.moments["policy"].count.item() == 80
    assert [t.data_ptr() for t in two.frozen()] == addresses
    for norm in (one, two):
        feed(norm, rest, 4)
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_frozen_tensors_are_all_that_a_reader_needs():
    one, two = (Normalizer(SPECS, 8, CPU, reward_gamma=0.9) for _ in range(2))
    feed(one, frames(10, 8), 0)
    for target, source in zip(two.frozen(), one.frozen(), strict=True):
        target.copy_(source)
    probe = next(frames(1, 8, 5))
    assert all(torch.equal(one(probe)[k], two(probe)[k]) for k in probe)
    assert two.reward_scale == one.reward_scale != 1


def test_constant_reward_scale_needs_no_returns():
    norm = Normalizer({}, 3, CPU, reward_scale=0.01)
    no = torch.zeros(3, dtype=torch.bool)
    norm.observe_reward(torch.randn(3) * 100, no, ~no)
    norm.freeze()
    assert norm.reward_scale.item() == pytest.approx(0.01)


def test_sets_that_meet_go_on_from_all_that_any_has_seen():
    """Three sets see rows of their own, meet, and see more: each then knows all but what others have seen since."""
    sets, gen = [Moments((2,), CPU) for _ in range(3)], torch.Generator().manual_seed(0)
    together: list[torch.Tensor] = []
    for counts in ((5, 3, 0), (1, 0, 2)):
        fresh = [torch.randn(n, 2, generator=gen) * 3 + 50 for n in counts]
        for one, rows in zip(sets, fresh, strict=True):
            if len(rows):
                one.update(rows)
            seen = torch.cat([*together, rows]).double()
            if len(seen):
                mean, variance = one.statistics()
                torch.testing.assert_close(mean, seen.mean(0), rtol=1e-12, atol=0)
                torch.testing.assert_close(variance, seen.var(0, correction=0), rtol=1e-9, atol=0)
        merge_moments(sets)
        together += fresh
        reported = [torch.stack(one.statistics()) for one in sets]
        assert torch.equal(reported[0], reported[1])
        assert torch.equal(reported[0], reported[2])
    assert [one.count.item() for one in sets] == [11, 0, 0]
    alone = Moments((2,), CPU)
    alone.update(together[0])
    before = torch.stack(alone.statistics())
    merge_moments([alone])
    assert torch.equal(torch.stack(alone.statistics()), before)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_reward_scale_is_one_over_the_spread_of_returns_or_keeps_the_largest_within_the_cap(cap):
    """By a loop over steps and environments: 1 / max(std of returns, max |return| / cap); filler rows do not count."""
    n, gamma = 3, 0.9
    norm = Normalizer({}, n, CPU, reward_scale=0.5, reward_gamma=gamma, return_cap=cap)
    gen, running, seen, scales = torch.Generator().manual_seed(0), [0.0] * n, [], []
    for step in range(60):
        reward = torch.randn(n, generator=gen) * (20 if step == 30 else 1)
        over, valid = (torch.rand(2, n, generator=gen) < torch.tensor([[0.1], [0.9]])).unbind()
        norm.observe_reward(torch.where(valid, reward, -1000.0), over, valid)
        for i in range(n):
            if valid[i]:
                running[i] = gamma * running[i] + reward[i].item()
                seen.append(running[i])
            if over[i]:
                running[i] = 0.0
        norm.freeze()
        mean = sum(seen) / len(seen)
        deviation = (sum((x - mean) ** 2 for x in seen) / len(seen)) ** 0.5
        bound = 0 if cap is None else max(map(abs, seen)) / cap
        scales.append(deviation < bound)
        assert norm.reward_scale.item() == pytest.approx(0.5 / max(deviation, bound), rel=1e-4)
    assert scales[-1] == (cap is not None)  # the cap is what counts at the end
    again = Normalizer({}, n, CPU, reward_scale=0.5, reward_gamma=gamma, return_cap=cap)
    again.load_state_dict(norm.state_dict())
    again.freeze()
    assert again.reward_scale == norm.reward_scale
