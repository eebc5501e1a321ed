"""Graphs on the CPU: programs give the bits of the eager body, and bodies that cannot become one stay eager."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import r2d2_runs
import torch
from conftest import FLASH, MODERN, bits, configured, differences, small_config, start, ticks
from families import FAMILIES
from sampling import sample
from torch import Generator, nn

from pql.config import Config
from pql.config.compose import compose
from pql.engine import cpu_graph as graphs
from pql.engine.cpu_graph import CpuGraph, Recorded, make_graph
from pql.engine.executors import Inline
from pql.engine.graph import Execution
from pql.engine.tape import Tape
from pql.errors import ConfigError, PqlWarning


def preset(name):
    """A small run with a preset's settings."""
    algo = compose(["device=cpu", f"algo={name}"]).algo
    critic, policy = (dataclasses.replace(net, hidden=[8, 8]) for net in (algo.critic, algo.policy))
    algo = dataclasses.replace(algo, critic=critic, policy=policy, warmup_steps=4, batch_size=8)
    return dataclasses.replace(small_config(), algo=algo)


TEN = {"trunk": "sphere", "ensemble": 10, "subset": 2, "target": "mean"}
RECIPES = {
    "pql2": preset("pql2"),
    "modern": configured({}, MODERN),
    "batch norm": configured({}, FLASH),
    "sphere": configured(
        {}, {"family": "sac", "explore": {"kind": "scaled"}, "critic": TEN, "policy": {"trunk": "sphere"}}
    ),
    "r2d2, bfloat16": r2d2_runs.config_of({"amp": True, "lr_schedule": "linear", "lr_updates": 30}),
}
RUNS = {**FAMILIES, **RECIPES}


class Owner:
    """State of a body: named tensors and a generator."""

    def __init__(self, **tensors):
        self.tensors, self.gen = tensors, Generator().manual_seed(0)

    def state_dict(self):
        return {**self.tensors, "gen": self.gen.get_state()}

    def load_state_dict(self, state):
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])
        self.gen.set_state(state["gen"])


def graph_of(body, owner, capture="auto"):
    return make_graph(body, torch.device("cpu"), [owner.gen], owner, Execution(capture), "the body")


def every_kind_of_argument(owner):
    """Optional tensors, lists, numbers, dtypes, devices, generators and results of several tensors."""
    x, out = owner.tensors["x"], owner.tensors["out"]
    drawn = torch.rand(4, 3, generator=owner.gen, dtype=torch.float32, device="cpu")
    x.add_(drawn).clamp_(min=0)
    a, b = (x * 2.5).split([1, 2], dim=1)
    top, where = x.max(0)
    half = x.to(torch.bfloat16).float() + torch.full_like(x, 3, dtype=torch.float64)
    picked = x[torch.arange(4), torch.randint(0, 3, (4,), generator=owner.gen)]
    x.index_put_((where[:1], where[1:2] % 3), picked[:1].clone())
    torch._foreach_add_([out, owner.tensors["count"]], [a + b.sum(1, keepdim=True), top.sum().view(1)])
    out.mul_(0.5).add_(half.float().mean() + torch.where(x > 1, x, 0.0).std(dim=(0, 1), correction=0))
    torch.stack(torch.unbind(x)).permute(1, 0).contiguous().sum()


@pytest.mark.fault(26, cases=(5, 100))
def test_a_program_gives_the_bits_of_its_body(cases):
    """On new inputs each time."""
    one, two, new = (Owner(x=torch.zeros(4, 3), out=torch.ones(4, 1), count=torch.zeros(1)) for _ in range(3))
    graph = graph_of(lambda: every_kind_of_argument(one), one)
    graph.prepare()
    assert isinstance(graph.graph, Recorded)
    assert differences(bits(one), bits(new)) == []
    inputs = Generator().manual_seed(1)
    for _ in range(cases):
        one.tensors["x"].normal_(generator=inputs)
        two.tensors["x"].copy_(one.tensors["x"])
        graph()
        every_kind_of_argument(two)
        assert differences(bits(one), bits(two)) == []
    assert one.tensors["count"].item() > 0


@pytest.mark.fault(26, cases=(5, 100))
def test_a_program_reads_weights_that_were_replaced_in_place(cases):
    """A network whose weights are swapped between replays: as eager code with the new ones."""
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 2)), torch.zeros(5, 3)
    owner = Owner(out=torch.zeros(5, 2))

    def body():
        with torch.no_grad():
            owner.tensors["out"].copy_(net(x))

    graph = graph_of(body, owner)
    graph.prepare()
    assert isinstance(graph.graph, Recorded)
    for i in range(cases):
        torch.manual_seed(i)
        net.load_state_dict({k: torch.randn_like(v) for k, v in net.state_dict().items()})
        x.normal_()
        graph()
        got = owner.tensors["out"].clone()
        body()
        assert torch.equal(got, owner.tensors["out"])


@pytest.mark.fault(26, cases=(5, 100))
def test_noise_differs_from_replay_to_replay_and_repeats_after_reseeding(cases):
    owner = Owner(x=torch.zeros(4))
    graph = graph_of(lambda: owner.tensors["x"].copy_(torch.randn(4, generator=owner.gen)), owner)
    graph.prepare()
    assert isinstance(graph.graph, Recorded)

    def drawn(seed):
        owner.gen.manual_seed(seed)
        return [(graph(), owner.tensors["x"].tolist())[1] for _ in range(cases)]

    first = drawn(7)
    assert len({tuple(values) for values in first}) == cases
    assert drawn(7) == first
    assert not any(a == b for a, b in zip(first, drawn(8), strict=True))


def test_gradients_and_a_fused_optimiser_are_part_of_it():
    nets = [nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    owners = [Owner(**net.state_dict()) for net in nets]

    def body(net, owner):
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
        net(torch.randn(16, 3, generator=owner.gen)).square().mean().backward()
        with torch.no_grad():
            torch._foreach_add_([*net.parameters()], [p.grad for p in net.parameters()], alpha=-0.1)

    for net, owner in zip(nets, owners, strict=True):
        body(net, owner)  # creates the gradients, at fixed addresses from here on
    graph = graph_of(lambda: body(nets[0], owners[0]), owners[0])
    graph.prepare()
    assert isinstance(graph.graph, Recorded)
    before = nets[0][0].weight.detach().clone()
    for _ in range(5):
        graph()
        body(nets[1], owners[1])
    assert not torch.equal(nets[0][0].weight, before)
    assert differences(bits(owners[0]), bits(owners[1])) == []


def test_what_follows_a_capture_is_what_would_have_followed_without():
    owner = Owner(x=torch.zeros(3))
    graph = graph_of(lambda: owner.tensors["x"].add_(torch.rand(3, generator=owner.gen)), owner)
    graph.prepare()
    graph()
    assert torch.equal(owner.tensors["x"], torch.rand(3, generator=Generator().manual_seed(0)))


def counting(owner):
    """Adds 1, 2, 3, ...: a value that changes outside of tensors."""
    numbers = itertools.count(1)
    return lambda: owner.tensors["x"].add_(next(numbers))


def reading(owner):
    return lambda: owner.tensors["x"].add_(owner.tensors["x"].sum().item())


def complex_number(owner):
    return lambda: owner.tensors["x"].add_(torch.full((1,), 1 + 1j).real)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (counting, "it depends on values that change outside of tensors"),
        (reading, "the host would wait"),
        (complex_number, "a program cannot hold a complex"),
    ],
)
def test_a_body_that_cannot_become_a_program_stays_eager(make, why):
    owner = Owner(x=torch.ones(1))
    graph = graph_of(make(owner), owner)
    with pytest.warns(PqlWarning, match=f"the body: no graph, .*{why}"):
        graph.prepare()
    assert graph.graph is None
    assert owner.tensors["x"].item() == 1
    graph()
    assert owner.tensors["x"].item() > 1
    with pytest.raises(ConfigError, match=f"graphs=on: .*the body cannot be captured.*{why}"):
        graph_of(make(owner), owner, "on").prepare()


def test_a_body_with_large_results_stays_eager_without_a_word(monkeypatch, recwarn):
    monkeypatch.setattr(graphs, "ROOM", 4000)
    for size, captured in ((100, True), (1001, False)):
        owner = Owner(x=torch.ones(size))
        graph = graph_of(lambda owner=owner: owner.tensors["x"].copy_(owner.tensors["x"] * 2), owner)
        graph.prepare()
        assert (graph.graph is not None) == captured
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.fault(26, cases=(6, 20))
@pytest.mark.parametrize("run", sample(RUNS, keep=["pql", "rainbow", "ppo, lstm", "impala, lstm", "pqn", *RECIPES]))
def test_captured_runs_equal_eager_ones(run, recwarn, cases):
    """Updates of every family and of recent recipes, and acting; bit for bit."""
    config = RUNS[run]
    captured, eager = (start(dataclasses.replace(config, graphs=g), Inline()) for g in ("on", "off"))
    for parts, program in ((captured, True), (eager, False)):
        graphs = [job.graph for job in parts.jobs.values()] + [one._act for one in parts.collector.slices]
        assert len(graphs) >= 2
        assert {type(graph.graph) for graph in graphs} == {Recorded if program else type(None)}
    ticks(captured, cases)
    ticks(eager, cases)
    assert differences(bits(captured), bits(eager)) == []
    assert [str(w.message) for w in recwarn if "graph" in str(w.message)] == []


def test_operations_that_change_lists_are_kept():
    """TorchScript takes them for unused."""
    x, y = torch.zeros(2), torch.zeros(3)
    with Tape() as tape:
        torch._foreach_add_([x, y], 1.0)
    program = Recorded(tape)
    program.replay()
    assert (x.sum().item(), y.sum().item()) == (4, 6)


def test_off_means_eager():
    graph = graph_of(lambda: None, Owner(), "off")
    graph.prepare()
    assert isinstance(graph, CpuGraph)
    assert graph.graph is None


def test_small_runs_are_captured_by_default():
    parts = start(small_config(graphs=Config().graphs), Inline())
    assert all(isinstance(job.graph.graph, Recorded) for job in parts.jobs.values())


def test_a_program_keeps_no_intermediate_results():
    x = torch.ones(1000)
    with Tape() as tape:
        made = x * 2
        x.add_(made)
    alive = weakref.ref(made)
    program = Recorded(tape)
    del tape, made
    gc.collect()
    assert alive() is None
    program.replay()
    assert x[0].item() == 9
