"""Compiled bodies: the operations of every family as regions give the numbers of the eager body."""

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import fields, replace

import pytest
import run_files
import torch
from conftest import bits, differences, flatten, start, ticks
from sampling import sample
from test_cpu_graph import RUNS, Owner
from torch import Generator

from pql.cli.main import main
from pql.engine import compiled, graph, inductor
from pql.engine.comparison import relative
from pql.engine.compiled import Region, compile_body
from pql.engine.executors import Inline, Threads
from pql.engine.forms import adamw_, product, sum_and_product
from pql.engine.graph import Execution, Graph, clone_state, recording
from pql.engine.recorder import NotCompiledError
from pql.errors import ConfigError, PqlWarning
from pql.run.build import build
from pql.run.store import checkpoint

CPU = torch.device("cpu")
BOUNDS = {"batch norm": 5e-3}
NOISE = "state/policy/net.0.bias"  # before BatchNorm: its gradient is a rounding error, which Adam divides by its size
"""Relative differences in float32: gradients before a normalisation are differences of nearly equal numbers."""


@pytest.fixture
def plain(monkeypatch):
    """Run regions as graphs of their operations, without Inductor."""
    monkeypatch.setattr(compiled, "inductor", lambda module, example, text: lambda given: module(*given))


def jobs(config, amp=False):
    """Build a run and make three ticks. Yields its learners' jobs, with one update per burst.

    Over several, Adam's first steps enlarge rounding errors of gradients near zero.
    """
    names = {f.name for f in fields(config.algo)}
    algo = replace(config.algo, **dict.fromkeys(names & {"epochs", "minibatches"}, 1), amp=amp)
    for name, job in ticks(start(replace(config, graphs="off", algo=algo), Inline()), 3).jobs.items():
        job.size = 1
        yield name, job


def apart(job):
    """Return relative differences between a burst's changes of the state, compiled and eager, by name."""
    before = clone_state(job.state_dict())
    after = []
    with recording():
        program = compile_body(job._burst, [job.learner.gen])
        for body in (job._burst, program.replay):
            job.load_state_dict(clone_state(before))
            body()
            after.append(
                {k: v for k, v in flatten(clone_state(job.state_dict())).items() if isinstance(v, torch.Tensor)}
            )
    old = flatten(before)
    return {k: relative(after[1][k], after[0][k], old[k]) for k in after[0]}


@pytest.mark.parametrize("name", RUNS)
def test_the_regions_of_every_family_do_what_its_body_does(plain, name):
    for worker, job in jobs(RUNS[name]):
        changes = {k: v for k, v in apart(job).items() if (name, k) != ("batch norm", NOISE)}
        assert {k: v for k, v in changes.items() if v > BOUNDS.get(name, 1e-4)} == {}, worker


LEARNERS = [(name, worker) for name, config in RUNS.items() for worker in config.algo.learners]


@pytest.mark.parametrize(("name", "worker"), sample(LEARNERS, keep=[("pql", "v")]))  # half a minute each
def test_inductor_gives_the_numbers_of_eager_updates(name, worker):
    job = dict(jobs(RUNS[name]))[worker]
    assert {k: v for k, v in apart(job).items() if v > BOUNDS.get(name, 1e-4)} == {}


@pytest.mark.parametrize("name", ["batch norm", "r2d2, bfloat16", "ppo"])
def test_gradients_in_bfloat16_differ_by_its_rounding(plain, name):
    """Numbers are rounded to 2^-9 of their size, at other places: biases are added after products are rounded."""
    for worker, job in jobs(RUNS[name], amp=True):
        size = apart(job)["state/optimizer/mean"]
        assert 0 < size < 2**-5, worker


def test_updates_of_a_burst_share_a_function(plain):
    for _, job in jobs(RUNS["pql"]):
        job.size = 8
        with recording():
            program = compile_body(job._burst, [job.learner.gen])
        regions = [step for step in program.steps if isinstance(step, Region)]
        assert len(regions) == 1 + job.size
        assert len(program.shared) == 2  # the draw, the update


# -- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(8, 16, 8), (5, 35, 51), (7, 1, 1), (3, 8, 13)])
def test_padded_products_are_products(dtype, rows, depth, columns):
    gen = Generator().manual_seed(0)
    a, b = (torch.randn(2, *size, generator=gen).to(dtype) for size in ((rows, depth), (depth, columns)))
    bias = torch.randn(2, 1, columns, generator=gen).to(dtype)
    close = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 0.2}
    torch.testing.assert_close(product(a, b), a @ b, **close)
    torch.testing.assert_close(product(a.mT.contiguous().mT, b.mT.contiguous().mT), a @ b, **close)
    torch.testing.assert_close(sum_and_product(bias, a, b), torch.baddbmm(bias, a, b), **close)
    torch.testing.assert_close(
        sum_and_product(bias, a, b, beta=0.5, alpha=2), torch.baddbmm(bias, a, b, beta=0.5, alpha=2), **close
    )


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_element_wise_adamw_is_the_fused_one(skip):
    gen = Generator().manual_seed(0)
    one = [torch.randn(40, generator=gen) for _ in range(3)] + [torch.rand(40, generator=gen), torch.tensor(0.0)]
    two = [t.clone() for t in one]
    found = None if skip is None else torch.tensor(skip)
    for step, (data, grad, mean, square, count) in ((torch._fused_adamw_, one), (adamw_, two)):
        for _ in range(3):
            count += 1
            step(
                *([data], [grad], [mean], [square], [], [count]),
                **{"lr": torch.tensor(1e-2), "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
                **{"amsgrad": False, "maximize": False, "found_inf": found},
            )
    assert torch.equal(one[0], two[0]) == (skip == 1.0)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- recordings -------------------------------------------------------------------------------------------------------


def replays(body, owner, trials=3):
    """Compare a compiled body with the eager one on the same state, with new noise each time."""
    program = compile_body(body, [owner.gen])
    for trial in range(trials):
        before = clone_state(owner.state_dict())
        owner.gen.manual_seed(trial)
        body()
        want = clone_state(owner.state_dict())
        owner.load_state_dict(before)
        owner.gen.manual_seed(trial)
        program.replay()
        assert differences(flatten(want), flatten(owner.state_dict())) == []
    return program


def test_draws_come_first_and_keep_their_order(plain):
    owner = Owner(x=torch.zeros(4, 3), y=torch.zeros(4, 3))

    def body():
        x, y = owner.tensors.values()
        x += torch.randn(4, 3, generator=owner.gen)
        y.copy_(x * torch.rand(4, 3, generator=owner.gen) + torch.empty_like(x).exponential_(generator=owner.gen))

    program = replays(body, owner)
    assert [isinstance(step, Region) for step in program.steps] == [False] * 4 + [True]


def test_results_that_outlive_a_body_are_those_of_its_latest_replay(plain):
    given, out, fixed = torch.ones(3), {}, torch.zeros(2)

    def body():
        out["sum"] = (given * 2).sum()
        out["fixed"] = fixed

    program = compile_body(body, [])
    given.fill_(5.0)
    program.replay()
    assert program.current(out["sum"]) == 30.0
    assert program.current(out["fixed"]) is fixed
    assert out["sum"] == 6.0


def test_a_draw_that_depends_on_numbers_divides_a_region(plain):
    owner = Owner(x=torch.full((4, 3), 0.5), y=torch.zeros(4, 3))

    def body():
        x, y = owner.tensors.values()
        y += torch.bernoulli(x.clamp(0, 1), generator=owner.gen)
        x.mul_(0.9)

    program = replays(body, owner)
    assert [isinstance(step, Region) for step in program.steps] == [True, False, True]


def test_draws_keep_their_order_after_one_that_depends_on_numbers(plain):
    owner = Owner(x=torch.full((4, 3), 0.5), y=torch.zeros(4, 3))

    def body():
        x, y = owner.tensors.values()
        y += torch.randn(4, 3, generator=owner.gen)
        y += torch.bernoulli(x.clamp(0, 1), generator=owner.gen)
        y += torch.randn(4, 3, generator=owner.gen)

    program = replays(body, owner)
    assert [isinstance(step, Region) for step in program.steps] == [False, True, False, True, False, True]


def test_memory_that_is_filled_twice_is_read_between(plain):
    owner = Owner(x=torch.zeros(4, 3))

    def body():
        noise = torch.empty(4, 3)
        for _ in range(2):
            owner.tensors["x"] += noise.normal_(generator=owner.gen)

    replays(body, owner)


def test_empty_results_hide_no_empty_tensor(plain):
    owner = Owner(x=torch.zeros(4), nothing=torch.zeros(0))

    def body():
        kept = owner.tensors["x"][:0] + 1
        owner.tensors["nothing"].add_(kept)
        owner.tensors["x"].add_(1 + torch.cat((kept, owner.tensors["nothing"])).sum())

    replays(body, owner)


def test_writing_a_vector_shows_in_its_parts_and_the_other_way_round(plain):
    vector = torch.zeros(30)
    owner = Owner(vector=vector, out=torch.zeros(4))
    weight, bias = vector[10:22].view(3, 4), vector[22:26]

    def body():
        vector.add_(1)
        owner.tensors["out"].copy_(weight.sum(0) + bias)
        bias.mul_(2)
        vector.sub_(vector.mean())

    replays(body, owner)


@pytest.mark.parametrize("write", ["whole", "part"])
def test_writing_a_result_of_which_an_earlier_region_has_another_view_is_refused(plain, write):
    gen, out = torch.Generator(), torch.zeros(4)

    def body():
        whole = out + 1.0
        part = whole[:2]
        drawn = torch.bernoulli(out.clamp(0, 1), generator=gen)  # divides the body
        (whole if write == "whole" else part).add_(drawn[0] + 10.0)
        out[2:].copy_(part * 2)
        out.add_(whole)

    with pytest.raises(NotCompiledError, match="of which it reads another view"):
        compile_body(body, [gen])


def test_results_keep_their_strides_between_regions(monkeypatch):
    """The next region is compiled for those of the recording."""
    examples, last = [], {}

    def dense(module, example, text):
        def function(given):
            last[text] = [t.stride() for t in given]
            return [t.contiguous() for t in module(*given)]

        examples.append((text, [t.stride() for t in example]))
        return function

    monkeypatch.setattr(compiled, "inductor", dense)
    owner = Owner(x=torch.arange(12.0).view(4, 3), y=torch.zeros(3, 4))

    def body():
        x, y = owner.tensors.values()
        turned = (x + 1.0).t()
        y.copy_(turned * 2 + torch.bernoulli(x.clamp(0, 1), generator=owner.gen).t())

    program = compile_body(body, [owner.gen])
    assert program.difference() is None
    program.replay()
    (_, (text, strides)) = examples
    assert (1, 3) in strides
    assert last[text] == strides


def test_rounding_is_no_difference_where_adam_begins(monkeypatch):
    """From moments of zero it divides a gradient by its size: gradients of zero and 1e-10 differ by whole steps."""

    def rounding(module, example, text):
        return lambda given: [t.detach() for t in given if t.shape == (5,) and t.add_(1e-10) is None] or module(*given)

    monkeypatch.setattr(compiled, "inductor", rounding)
    owner = Owner(w=torch.ones(4), m=torch.zeros(4), s=torch.zeros(4), count=torch.zeros(()), g=torch.zeros(5))

    def body():
        w, m, s, count, g = owner.tensors.values()
        count += 1
        settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adamw_([w], [g[:4] * 1.0], [m], [s], [], [count], amsgrad=False, maximize=False, **settings)

    assert compile_body(body, [owner.gen]).difference() is None


@pytest.mark.parametrize(("error", "found"), [(1e-3, False), (0.5, True)])
def test_rounding_of_a_mean_is_relative_to_what_is_added(monkeypatch, error, found):
    """Values of +-1 whose mean is 1e-3, less a target near it, in a result and in a sum of metrics."""

    def rounding(module, example, text):
        return lambda given: module(*[t + error if t.shape == (1000,) else t for t in given])

    monkeypatch.setattr(compiled, "inductor", rounding)
    values = torch.ones(1000).where(torch.arange(1000) % 2 == 0, -torch.ones(1000)) + 1e-3
    weights = torch.ones(1000, 1, dtype=torch.bfloat16)
    owner = Owner(x=values, weights=weights, total=torch.zeros(()), out=torch.zeros(()))

    def body():
        x, weights, total, out = owner.tensors.values()
        apart = (x.bfloat16().view(1, 1000) @ weights).float().sum() / 1000 - 1e-3
        torch._foreach_add_([total], [apart])
        out.add_(apart.neg())

    wrong = compile_body(body, [owner.gen]).difference()
    assert (wrong is not None) == found, wrong


def test_numbers_that_are_not_finite_in_one_result_alone_are_a_difference():
    nan, inf = math.nan, math.inf
    numbers = torch.tensor([1.0, nan, inf, 0.0])
    assert relative(numbers, numbers.clone()) == 0.0
    for other in ([1.0, nan, inf, nan], [1.0, 0.0, inf, 0.0], [1.0, nan, 9.0, 0.0]):
        assert relative(torch.tensor(other), numbers) == inf


def test_a_signal_ends_compilation(monkeypatch, plain):
    monkeypatch.setattr(Graph, "place", lambda self: torch.no_grad())
    monkeypatch.setattr(Graph, "finish", lambda self: None)
    owner = Owner(x=torch.full((3,), 4.0))
    one = graph_of(owner, "on")
    for module in (compiled, graph):
        monkeypatch.setattr(module, "asked", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        one.prepare()
    assert owner.tensors["x"].tolist() == [4.0] * 3
    assert not one.preparing


def test_a_result_used_behind_the_recordings_back_is_refused():
    x = torch.zeros(3)

    def body():
        y = x + 1
        x.copy_(torch.frombuffer(y.numpy(), dtype=torch.float32))

    with pytest.raises(NotCompiledError, match="outside of operations"):
        compile_body(body, [])


# -- fallbacks --------------------------------------------------------------------------------------------------------


def graph_of(owner, choice="on"):
    def body():
        owner.tensors["x"].mul_(0.5).add_(1)

    return Graph(body, CPU, [owner.gen], owner, Execution("off", choice), "the updates of v")


def test_a_wrong_result_is_not_used(monkeypatch):
    monkeypatch.setattr(
        compiled, "inductor", lambda module, example, text: lambda given: module(*[t + 1 for t in given])
    )
    monkeypatch.setattr(Graph, "place", lambda self: torch.no_grad())
    monkeypatch.setattr(Graph, "finish", lambda self: None)
    owner = Owner(x=torch.full((3,), 4.0))
    with pytest.raises(ConfigError, match=r"placement.compile=on: expected auto or off: the updates of v cannot be"):
        graph_of(owner).prepare()
    one = graph_of(owner, "on")
    one.compile = "auto"
    with pytest.warns(PqlWarning, match="the updates of v: not compiled, its results differ by"):
        one.prepare()
    assert owner.tensors["x"].tolist() == [4.0] * 3
    one()
    assert owner.tensors["x"].tolist() == [3.0] * 3


@pytest.mark.parametrize("fails", ["inductor", "compiler"])
def test_a_missing_compiler_or_an_exception_leaves_the_eager_body(monkeypatch, fails):
    def broken(module, example, text):
        raise RuntimeError("no kernel\nand a long trace")

    monkeypatch.setattr(compiled, "inductor", broken)
    monkeypatch.setattr(Graph, "place", lambda self: torch.no_grad())
    monkeypatch.setattr(Graph, "finish", lambda self: None)
    if fails == "compiler":
        monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    lacking = "no C++ compiler was found; install g++ or set CXX"
    why = lacking if fails == "compiler" else "RuntimeError: no kernel"
    owner = Owner(x=torch.full((3,), 4.0))
    one = graph_of(owner)
    one.compile = "auto"
    with pytest.warns(PqlWarning, match=f"the updates of v: not compiled, {re.escape(why)}$"):
        one.prepare()
    one()
    assert owner.tensors["x"].tolist() == [3.0] * 3


def test_what_a_gpu_lacks_to_compile_is_said_once(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(inductor.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(PqlWarning, match=r"^placement.compile=auto: nothing is compiled, triton is not installed$"):
        assert inductor.compilable("auto", cuda) == "off"
    assert [inductor.compilable(c, cuda) for c in ("on", "off")] == ["on", "off"]
    assert inductor.compilable("auto", CPU) == "auto"


def test_auto_compiles_on_cuda_alone():
    owner = Owner(x=torch.zeros(1))
    for device, choice in ((CPU, "off"), (torch.device("cuda", 0), "auto")):
        assert Graph(lambda: None, device, [], owner, Execution("off", "auto")).compile == choice


CACHED = """
import sys
import torch
from pql.engine.compiled import compile_body
from torch._dynamo.utils import counters

threads, offset, most = map(int, sys.argv[1:])
torch.set_num_threads(threads)
x, y = torch.ones(32)[offset:offset + 12].view(3, 4), torch.ones(4, 4)
compile_body(lambda: x.add_(x @ y).clamp_(max=most), []).replay()
print(x.unique().item(), *(counters["aot_autograd"][f"autograd_cache_{k}"] for k in ("hit", "miss", "bypass")))
"""


OTHERS = ((2, 0, 0), (1, 1, 0), (1, 0, 10**9))


@pytest.mark.parametrize(
    ("threads", "offset", "more", "counts"),
    [(1, 0, 0, "1 0 0"), *(pytest.param(*case, "0 1 0", marks=pytest.mark.slow) for case in OTHERS)],
)
def test_what_is_compiled_is_loaded_by_the_next_process(threads, offset, more, counts):
    """Unless threads, the alignment of memory or an operation differ."""
    new = time.time_ns()  # not in the cache yet

    def process(*case):
        command = [sys.executable, "-c", CACHED, *map(str, case)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert process(1, 0, new) == "25.0 0 1 0\n"
    assert process(threads, offset, new + more) == f"25.0 {counts}\n"


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["pql", "ppo"])
def test_another_process_and_a_resumed_run_give_the_same_bits(tmp_path, algo):
    """The other process has an empty cache, so that it compiles anew."""
    words = [w for w in run_files.WORDS if not w.startswith(("algo=", "budget", "replay", "algo.batch"))]
    words += [f"algo={algo}", "placement.compile=on", "eval.final=false", "budget.seconds=null"]
    half, full = (16 * (8 + 16 * n) for n in (2, 4))
    _, here, _ = run_files.whole_and_resumed(tmp_path, words, half, full)
    command = [
        sys.executable,
        "-m",
        "pql",
        "train",
        *words,
        f"budget.env_steps={full}",
        f"run_dir={tmp_path / 'there'}",
    ]
    subprocess.run(command, check=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    there, _ = checkpoint.load(run_files.points(tmp_path / "there")[-1])
    assert differences(here, there) == []


def test_a_run_says_what_is_compiled(plain, tmp_path, capsys):
    assert main(["train", *run_files.words(tmp_path, "placement.compile=on")]) == 0
    assert "compiled: collector, v, p\n" in "".join(capsys.readouterr())


LEARNS = "the updates of worker {}"


@pytest.mark.parametrize(
    ("name", "changes", "bodies"),
    [
        ("pql", {}, ["acting", LEARNS.format("v"), LEARNS.format("p")]),
        ("ppo", {}, ["acting", LEARNS.format("learner")]),
        ("ppo", {"schedule": "replicas", "replicas": 2}, ["acting", "acting"]),  # updates take locks
    ],
)
def test_a_run_says_which_of_its_bodies_it_compiles(monkeypatch, name, changes, bodies):
    config = RUNS[name]
    place = replace(config.placement, compile="on")
    parts = build(replace(config, graphs="off", algo=replace(config.algo, **changes), placement=place))
    seen = []

    def inductor(module, example, text):
        seen.append(parts.preparation())
        return lambda given: module(*given)

    monkeypatch.setattr(compiled, "inductor", inductor)
    parts.prepare()
    assert [*dict.fromkeys(seen)] == [f"{body} ({i} of {len(bodies)})" for i, body in enumerate(bodies, 1)]
    assert parts.preparation() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pql", "ppo", "rainbow"])
def test_threads_and_one_thread_give_the_same_bits(name):
    config = replace(RUNS[name], placement=replace(RUNS[name].placement, compile="on"))
    after = []
    for executor in (Inline(), Threads(("collector", *config.algo.learners))):
        parts = start(config, executor)
        assert all(job.graph.program is not None for job in parts.jobs.values())
        after.append(bits(ticks(parts, 6)))
        executor.close()
    assert differences(*after) == []
