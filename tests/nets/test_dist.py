"""Distributions against manually computed numbers, slow oracles and their own samples."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import c51_projection, chi_square_fits, tanh_gaussian_log_prob
from torch.utils._python_dispatch import TorchDispatchMode

from pql.nets import distributions as dist
from pql.nets.distributions import Categorical, DiagGaussian, MultiCategorical, lower_mean, project, squashed_gaussian

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)


# The projection in the form that the CPU runs and in the one that CUDA runs, and how near each is to the oracle: the
# former computes positions in float32.
FORMS = {"cpu": (project, 2e-4), "cuda": (dist._project_sums, 1e-6)}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize(
    ("atoms", "support", "probs", "want"),
    [
        ([4, 5, 6, 7, 8], [0, 2, 4, 6, 8], [0.1, 0.6, 0.1, 0.1, 0.1], [0.8, 0, 0.1, 0, 0.1]),
        ([4, 5, 6, 7, 8], [1, 3, 4, 5, 6], [0.1, 0.2, 0.5, 0.1, 0.1], [0.8, 0.1, 0.1, 0, 0]),
        ([3, 4, 5, 6, 7], [0, 1, 2, 3, 4], [0.1, 0.2, 0.1, 0.3, 0.3], [0.7, 0.3, 0, 0, 0]),
        ([0, 1, 2], [0.25, 1.5, 9.0], [0.5, 0.25, 0.25], [0.375, 0.25, 0.375]),
    ],
)
def test_projection_of_known_distributions(atoms, support, probs, want):
    row = [torch.tensor([x], dtype=torch.float32) for x in (support, probs)]
    for form, _ in FORMS.values():
        out = form(*row, torch.tensor(atoms).float())
        torch.testing.assert_close(out, torch.tensor([want], dtype=torch.float32), rtol=0, atol=1e-6)
    assert c51_projection(support, probs, atoms) == pytest.approx(want, abs=1e-12)


@EVERY_FORM
def test_what_sits_on_the_atoms_stays_there(form):
    """C51's own support: steps of 0.4 are no binary fractions."""
    atoms = torch.linspace(-10, 10, 51)
    out = FORMS[form][0](atoms.expand(51, 51), torch.eye(51), atoms)
    assert (out - torch.eye(51)).abs().max() < 5e-6


@st.composite
def distributions(draw):
    atoms, low = draw(st.integers(2, 51)), draw(st.floats(-50, 50))
    high = low + draw(st.floats(0.5, 100))
    count = draw(st.integers(1, 51))
    size = draw(st.sampled_from([300.0, 2.0**30]))
    support = sorted(draw(st.lists(st.floats(-size, size, width=32), min_size=count, max_size=count)))
    weights = draw(st.lists(st.floats(0.0, 1.0, width=32), min_size=count, max_size=count))
    weights = [w + 1e-3 for w in weights]
    return torch.linspace(low, high, atoms), support, [w / sum(weights) for w in weights]


@EVERY_FORM
@QUICK
@given(case=distributions())
def test_projection_keeps_the_mass_and_equals_the_loop(form, case):
    atoms, support, probs = case
    (projected, tolerance), rows = FORMS[form], torch.tensor([probs])
    out = projected(torch.tensor([support]), rows, atoms)
    assert out.shape == (1, len(atoms))
    assert out.min() >= 0
    assert out.double().sum().item() == pytest.approx(rows.double().sum().item(), abs=min(tolerance, 1e-5))
    assert out[0].tolist() == pytest.approx(c51_projection(support, probs, atoms.tolist()), abs=tolerance)


@EVERY_FORM
def test_projection_of_extreme_rewards_and_of_ends(form):
    """r + discount z for rewards far outside of the support, on its atoms, and where episodes end (discount 0)."""
    projected, tolerance = FORMS[form]
    atoms = torch.linspace(-10, 10, 51)
    gen = torch.Generator().manual_seed(3)
    probs = (4 * torch.randn(9, 51, generator=gen)).softmax(-1)
    reward = torch.tensor([0.0, 1e9, -1e9, 10.0, -10.0, 0.3, 0.0, 3.1e38, -3.1e38]).unsqueeze(1)
    discount = torch.tensor([0.0, 0.99, 0.99, 0.99, 0.0, 1e-6, 1.0, 1.0, 1.0]).unsqueeze(1)
    support = reward + discount * atoms
    out = projected(support, probs, atoms)
    torch.testing.assert_close(out.double().sum(-1), probs.double().sum(-1), rtol=0, atol=1e-6)
    for row in range(9):
        want = c51_projection(support[row].tolist(), probs[row].tolist(), atoms.tolist())
        assert out[row].tolist() == pytest.approx(want, abs=tolerance)
    assert [out[i, k].item() for i, k in ((0, 25), (1, 50), (2, 0), (4, 0))] == pytest.approx([1.0] * 4, abs=tolerance)


def test_projection_on_cuda_has_no_product_of_matrices_and_nothing_larger_than_its_sums():
    """Nothing for TF32 to round, nothing that is added up in any order, and no [B, Z, Z] in memory."""

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names, self.bytes = set(), 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.names.add(func.overloadpacket.__name__)
            for tensor in out if isinstance(out, tuple | list) else (out,):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
            return out

    batch, size = 64, 51
    probs = torch.full((batch, size), 1 / size)
    with Watch() as seen:
        dist._project_sums(torch.linspace(-9, 11, size).repeat(batch, 1), probs, torch.linspace(-10, 10, size))
    assert not seen.names & {"mm", "bmm", "addmm", "baddbmm", "mv", "scatter_add", "scatter_add_", "index_add_"}
    assert "cumsum" in seen.names
    assert seen.bytes <= 2 * batch * (size + 2) * 8


def test_lower_mean_picks_whole_distributions():
    gen = torch.Generator().manual_seed(1)
    atoms = torch.linspace(-1, 1, 11)
    probs = (3 * torch.randn(3, 40, 11, generator=gen)).softmax(-1)
    out = lower_mean(probs, atoms)
    picked = set()
    for b in range(40):
        means = [sum(p * z for p, z in zip(probs[e, b].tolist(), atoms.tolist(), strict=True)) for e in range(3)]
        best = means.index(min(means))
        picked.add(best)
        assert torch.equal(out[b], probs[best, b])
    assert picked == {0, 1, 2}


# --- the squashed Gaussian ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_prob_by_change_of_variables(dtype):
    gen = torch.Generator().manual_seed(2)
    mean = torch.randn(200, 3, generator=gen, dtype=dtype) * 2
    log_std = torch.rand(200, 3, generator=gen, dtype=dtype) * 3 - 2.5
    action, log_prob = squashed_gaussian(mean, log_std, torch.Generator().manual_seed(3))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(3))
    raw = mean.double() + log_std.double().exp() * noise.double()
    tolerance = 1e-6 if dtype == torch.float64 else 2e-4  # the noise itself is float32
    torch.testing.assert_close(action.double(), raw.tanh(), rtol=0, atol=tolerance)
    want = [
        tanh_gaussian_log_prob(*rows) for rows in zip(*(x.tolist() for x in (raw, mean, log_std.exp())), strict=True)
    ]
    assert log_prob.tolist() == pytest.approx(want, abs=tolerance, rel=1e-5)
    # From the action alone, if float64 still distinguishes it from 1.
    if dtype == torch.float64:
        back = torch.atanh(action)
        one = torch.distributions.Normal(mean, log_std.exp()).log_prob(back) - torch.log1p(-action.square())
        near = (back.abs() < 4).all(-1)
        assert near.sum() > 50
        torch.testing.assert_close(one.sum(-1)[near], log_prob[near], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mean", [-40.0, 40.0, 300.0])
def test_log_prob_is_finite_where_tanh_saturates(mean):
    mean = torch.full((4, 2), mean, requires_grad=True)
    log_std = torch.zeros(4, 2, requires_grad=True)
    action, log_prob = squashed_gaussian(mean, log_std, torch.Generator().manual_seed(0))
    log_prob.sum().backward()
    for x in (action, log_prob, mean.grad, log_std.grad):
        assert x.isfinite().all()
    # log sech(u)^2 -> 2 (log 2 - |u|): the density grows with e^(2|u|).
    noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    raw = (mean.detach() + noise).double()
    want = (-0.5 * noise.double() ** 2 - 0.5 * math.log(2 * math.pi) + 2 * (raw.abs() - math.log(2))).sum(-1)
    torch.testing.assert_close(log_prob.detach().double(), want, rtol=1e-5, atol=1e-4)


def test_samples_have_the_moments_and_the_density_that_they_claim():
    count = 200_000
    mean, log_std = torch.full((count, 1), 0.3, dtype=torch.float64), torch.full((count, 1), -0.4, dtype=torch.float64)
    action, log_prob = squashed_gaussian(mean, log_std, torch.Generator().manual_seed(4))
    raw = torch.atanh(action)
    std = math.exp(-0.4)
    assert raw.mean().item() == pytest.approx(0.3, abs=5 * std / count**0.5)
    assert raw.std().item() == pytest.approx(std, abs=5 * std / (2 * count) ** 0.5)
    # E[1{|a| < .9} / p(a)] is the length of that interval if, and only if, p is the density of a.
    inside = action.squeeze(-1).abs() < 0.9
    volume = torch.where(inside, (-log_prob).exp(), 0.0)
    assert volume.mean().item() == pytest.approx(1.8, abs=5 * volume.std().item() / count**0.5)


def test_samples_are_reparameterised():
    """d action / d mean and d log_prob / d log_std against central differences, the noise held fixed."""
    mean, log_std = torch.tensor([[0.2, -0.7]], dtype=torch.float64), torch.tensor([[-0.5, 0.1]], dtype=torch.float64)

    def both(mean, log_std):
        action, log_prob = squashed_gaussian(mean, log_std, torch.Generator().manual_seed(5))
        return action, log_prob

    assert torch.autograd.gradcheck(both, (mean.requires_grad_(), log_std.requires_grad_()))


# --- parameters that stored policies act with ---


def test_the_diagonal_gaussian_is_torchs():
    gen = torch.Generator().manual_seed(0)
    params, other = (torch.randn(50, 6, generator=gen, dtype=torch.float64) for _ in range(2))
    raw, dist = torch.randn(50, 3, generator=gen, dtype=torch.float64), DiagGaussian(3)
    one, two = (torch.distributions.Normal(p[:, :3], p[:, 3:].exp()) for p in (params, other))
    torch.testing.assert_close(dist.log_prob(params, raw), one.log_prob(raw).sum(-1))
    torch.testing.assert_close(dist.entropy(params, gen), one.entropy().sum(-1))
    torch.testing.assert_close(dist.kl(params, other), torch.distributions.kl_divergence(one, two).sum(-1))
    assert dist.params_size == 6
    assert torch.equal(dist.mode(params), params[:, :3].clamp(-1, 1))


def test_the_categorical_is_torchs():
    gen = torch.Generator().manual_seed(1)
    params, other = (torch.randn(50, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    raw, dist = torch.randint(4, (50,), generator=gen), Categorical(4)
    one, two = (torch.distributions.Categorical(logits=p) for p in (params, other))
    torch.testing.assert_close(dist.log_prob(params, raw), one.log_prob(raw))
    torch.testing.assert_close(dist.entropy(params, gen), one.entropy())
    torch.testing.assert_close(dist.kl(params, other), torch.distributions.kl_divergence(one, two))
    assert torch.equal(dist.mode(params), params.argmax(-1))


@pytest.mark.parametrize("nvec", [(3, 2), (2, 2, 2), (4, 4, 1, 3)])
def test_the_product_of_categoricals_is_torchs(nvec):
    gen, dist = torch.Generator().manual_seed(1), MultiCategorical(nvec)
    params, other = (torch.randn(5, 6, sum(nvec), generator=gen, dtype=torch.float64) for _ in range(2))
    raw = torch.stack([torch.randint(n, (5, 6), generator=gen) for n in nvec], -1)
    one, two = (
        [torch.distributions.Categorical(logits=part) for part in p.split(list(nvec), -1)] for p in (params, other)
    )
    log_prob = sum(c.log_prob(r) for c, r in zip(one, raw.unbind(-1), strict=True))
    torch.testing.assert_close(dist.log_prob(params, raw), log_prob)
    torch.testing.assert_close(dist.entropy(params, gen), sum(c.entropy() for c in one))
    kl = sum(torch.distributions.kl_divergence(p, q) for p, q in zip(one, two, strict=True))
    torch.testing.assert_close(dist.kl(params, other), kl)
    assert torch.equal(dist.mode(params), torch.stack([c.logits.argmax(-1) for c in one], -1))
    assert dist.sample(params, gen).shape == (5, 6, len(nvec))


def test_samples_follow_the_parameters():
    gen, count = torch.Generator().manual_seed(2), 100_000
    raw = DiagGaussian(1).sample(torch.tensor([[0.4, -0.7]]).expand(count, 2), gen)
    std = math.exp(-0.7)
    assert raw.mean().item() == pytest.approx(0.4, abs=5 * std / count**0.5)
    assert raw.std().item() == pytest.approx(std, abs=5 * std / (2 * count) ** 0.5)
    logits = torch.tensor([0.0, 1.0, -2.0])
    drawn = Categorical(3).sample(logits.expand(count, 3), gen)
    expected = (logits.softmax(0) * count).tolist()
    assert chi_square_fits(torch.bincount(drawn, minlength=3).tolist(), expected)
    both = torch.tensor([0.0, 1.0, -2.0, 0.5, -0.5, 1.0, 0.0])  # of 3, 2 and 2 actions
    one, two, three = MultiCategorical((3, 2, 2)).sample(both.expand(count, 7), gen).unbind(-1)
    joint = both[:3].softmax(0).view(3, 1, 1) * both[3:5].softmax(0).view(2, 1) * both[5:].softmax(0)  # independent
    drawn = torch.bincount(4 * one + 2 * two + three, minlength=12)
    assert chi_square_fits(drawn.tolist(), (joint.flatten() * count).tolist())


def test_the_squashed_gaussians_entropy_is_that_of_its_density():
    """E[-log p(a)] over samples of the other implementation, whose density is tested above."""
    count, dist = 200_000, DiagGaussian(1, squash=True)
    params = torch.tensor([[0.6, -0.2]], dtype=torch.float64).expand(count, 2)
    estimate = dist.entropy(params, torch.Generator().manual_seed(3))
    action, log_prob = squashed_gaussian(params[:, :1], params[:, 1:], torch.Generator().manual_seed(4))
    error = 5 * math.hypot(estimate.std().item(), log_prob.std().item()) / count**0.5
    assert estimate.mean().item() == pytest.approx(-log_prob.mean().item(), abs=error)
    assert error < 0.02
    torch.testing.assert_close(dist.action(torch.atanh(action)), action)
    assert dist.mode(params)[0].item() == pytest.approx(math.tanh(0.6))


def test_the_log_ratio_of_a_squashed_action_needs_no_jacobian():
    dist, gen = DiagGaussian(2, squash=True), torch.Generator().manual_seed(5)
    params, other = (0.3 * torch.randn(40, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    raw = dist.sample(params, gen)

    def full(rows):
        return [
            tanh_gaussian_log_prob(r, p[:2], [math.exp(x) for x in p[2:]])
            for r, p in zip(raw.tolist(), rows.tolist(), strict=True)
        ]

    ratio = dist.log_prob(other, raw) - dist.log_prob(params, raw)
    assert ratio.tolist() == pytest.approx([b - a for a, b in zip(full(params), full(other), strict=True)], abs=1e-9)
