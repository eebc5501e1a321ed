"""Shared fixtures and helpers: one intra-op thread, small runs from dataclasses, bit-exact comparison of trees."""

import gc
import importlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import fault_rows
import pytest
import torch
from fault_rows import *  # noqa: F403
from gates import LearningGate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pql.algos.off_policy import make_critic
from pql.algos.registry import make_policy
from pql.config import Config, PlacementConfig, from_dict
from pql.config.families import record_of
from pql.config.migrate import known
from pql.config.validate import validate
from pql.contract.conformance import Report, check_env
from pql.contract.env import EnvSpec
from pql.engine import watchdog
from pql.engine.executors import Executor
from pql.engine.placement import set_precision
from pql.engine.schedule import Trace
from pql.nets.mlp import Critic, seeded
from pql.run.build import build
from pql.run.components import Parts
from pql.run.store.checkpoint import flatten

gc.set_threshold(50_000, 20, 100)  # by default a sixth of the suite's time is garbage collection

# Also inherited by processes that a test starts.
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE / "support"), os.environ.get("PYTHONPATH", "")])


# SAC with the settings of recent recipes.
MODERN: dict[str, Any] = {
    "family": "sac",
    "normalize_reward": True,
    "return_cap": 5.0,
    "lr_schedule": "cosine",
    "lr_updates": 100,
    "explore": {"kind": "none", "repeat": True},
    "critic": {
        "hidden": [8, 8],
        "trunk": "residual",
        "norm": "rms",
        "atoms": 11,
        "v_min": -5.0,
        "v_max": 5.0,
        "loss": "hl_gauss",
        "ensemble": 3,
        "subset": 2,
    },
    "policy": {"hidden": [8, 8], "trunk": "residual", "init": "orthogonal", "head": "small", "reduce": "mean"},
}

# SAC with BatchNorm, weights of unit norm and the temperature at the V-learner.
FLASH: dict[str, Any] = {
    "family": "sac",
    "amp": True,
    "alpha_updates": "critic",
    "alpha_loss": "exp",
    "explore": {"kind": "none"},
    "critic": {"hidden": [8], "trunk": "residual", "batch_norm": True, "unit_weights": "all", "atoms": 11},
    "policy": {"hidden": [8, 8], "batch_norm": True, "unit_weights": "linear"},
}


@pytest.fixture
def tool() -> Callable[[str], Any]:
    """Return a function: dotted name below ``tools`` -> the script as a module."""
    return lambda name: importlib.import_module(f"tools.{name}")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    """A run in an earlier test may have chosen bfloat16 products, which CPUs with matrix units have."""
    set_precision(PlacementConfig(matmul="exact"))


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """Default threads of runs: with such small networks a second thread does not help, and it costs ten times its gain
    where other programs share the cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pql.engine.placement.available_cores", lambda: 1)
        patch.setenv("OMP_NUM_THREADS", "1")  # of other libraries' programs
        yield


@pytest.fixture(scope="session", autouse=True)
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Redirect other software's temporary files (torchrun, Stable-Baselines3) to pytest's folder, which is cleared."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_records() -> Iterator[None]:
    """Keep no record of the tests' runs, as if their directories came from somebody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", "/dev/null")
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, as in a terminal; background processes of a shell may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
HERE_TOO = pytest.mark.parametrize("machine", [CUDA, "stand-in"], indirect=True)
"""On a CUDA device if there is one, and on a stand-in (``stand_in.py``)."""


def everywhere(
    cases: dict[str, Any], here: Iterable[str] = (), name: str = "algo", slowly: Iterable[str] = ()
) -> pytest.MarkDecorator:
    """Parametrise over every case on a CUDA device, and those named in ``here`` also on a stand-in.

    Args:
        slowly: more cases on a stand-in, marked slow.
    """
    there = [pytest.param("cuda", v, id=f"{k}-cuda", marks=CUDA.marks) for k, v in cases.items()]
    pretended = [
        pytest.param("stand-in", cases[k], id=f"{k}-stand-in", marks=() if k in here else pytest.mark.slow)
        for k in dict.fromkeys([*here, *slowly])
    ]
    return pytest.mark.parametrize(("machine", name), [*there, *pretended], indirect=["machine"])


@pytest.fixture(params=[CUDA])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where a test marked ``gpu`` runs: "cuda" or "stand-in"."""
    if request.param == "stand-in":
        from stand_in import pretend

        pretend(monkeypatch)
    return request.param


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a separate working directory: MuJoCo writes its warnings to a file there."""
    monkeypatch.chdir(tmp_path)


class SummaryTables:
    """Rows of tables printed after all tests; the reports of parallel workers carry them."""

    HEADS = {  # noqa: RUF012
        "agreement": "MuJoCo Warp on the CPU against C, from the same states: the largest gap of nine rows in ten",
        "episodes": "random episodes of both engines",
        "conformance": "the contract's rules, on most of the environments",
    }

    def __init__(self, record: Callable[[str, object], None], case: str):
        self._record, self._case = record, case

    def row(self, table: str, text: str) -> None:
        self._record(f"summary {table}", text)

    def conformance(self, report: Report) -> None:
        kept = [r.name for r in report.results if r.ok]
        idle = ", ".join(r.name for r in report.results if r.ok is None)
        self.row("conformance", f"{report.env:24} {len(kept):2} kept  {self._case}; without an occasion: {idle}")


@pytest.fixture
def summary_tables(record_property: Callable[[str, object], None], request: pytest.FixtureRequest) -> SummaryTables:
    return SummaryTables(record_property, request.node.name)


@pytest.fixture
def conforms(summary_tables: SummaryTables) -> Callable[..., set[str]]:
    """Return a function: (environment, steps) -> the rules without an occasion; it fails if the contract is broken."""

    def check(env: Any, steps: int, **more: Any) -> set[str]:
        report = check_env(env, steps=steps, **more)
        summary_tables.conformance(report)
        assert report.ok, str(report)
        return {r.name for r in report.results if r.ok is None}

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = [r for r in terminalreporter.getreports("passed") if r.when == "call"]
    for table, head in SummaryTables.HEADS.items():
        rows = sorted(str(text) for r in passed for key, text in r.user_properties if key == f"summary {table}")
        if rows:
            terminalreporter.write_line("\n".join(["", head, *(f"  {row}" for row in rows)]))


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no later garbage collection need look at a million objects again."""
    gc.collect()
    gc.freeze()


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    return [*fault_rows.listed(items)] if config.option.markexpr == "fault" else []


@pytest.fixture(autouse=True)
def _no_watchdog_left() -> Iterator[None]:
    """Fail if a test leaves a watchdog, which would end the process of a later test that hangs on purpose."""
    yield
    left, watchdog._dogs[:] = watchdog._dogs[:], []
    assert not left


@pytest.fixture
def learns(record_property: Callable[[str, object], None]) -> LearningGate:
    return LearningGate(record_property)


def pytest_configure(config: pytest.Config) -> None:
    fault_rows.begin(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = fault_rows.chosen(config, items)
    for item in items:
        if "learns" in getattr(item, "fixturenames", ()):
            item.add_marker("learning")


@pytest.fixture
def threads_left() -> Callable[[], list[str]]:
    """Return the names of the library's threads that this test began and that are still alive."""
    before = set(threading.enumerate())
    return lambda: [t.name for t in threading.enumerate() if t.name.startswith("pql-") and t not in before]


# Without graphs: to build them takes longer than the few ticks of most tests.
SMALL: dict[str, Any] = {
    "graphs": "off",
    "task": {"name": "pendulum"},
    "num_envs": 8,
    "device": "cpu",
    "seed": 3,
    "replay": {"capacity": 4096},
    "budget": {"env_steps": 1000},
    "placement": {"executor": "inline", "compile": "off", "threads": {"collector": 1, "v": 1, "p": 1}},
    "algo": {
        "batch_size": 32,
        "v_per_step": 2,
        "p_per_v": 0.5,
        "warmup_steps": 16,
        "critic": {"hidden": [16, 16]},
        "policy": {"hidden": [16, 16]},
    },
}


@contextmanager
def never_waiting() -> Iterator[None]:
    """Make every operation in the block that makes the host wait for a CUDA device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


class NoNarrowProducts(TorchDispatchMode):
    """Refuses products of float32 matrices, and operations made of them."""

    NAMES = (
        "mm",
        "bmm",
        "mv",
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "dot",
        "vdot",
        "_linalg_solve_ex",
        "linalg_inv_ex",
        "_cdist_forward",
        "convolution",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrow = any(isinstance(part, Tensor) and part.dtype == torch.float32 for part in args)
        assert not (narrow and func.overloadpacket.__name__ in self.NAMES), func
        return func(*args, **(kwargs or {}))


GROUPS = {field.name for field in fields(Config)}


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for k, v in change.items():
        out[k] = merge(base.get(k, {}), v) if isinstance(v, dict) else v
    return out


def fit(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """As ``merge``; if ``change`` names a family, settings that it lacks are removed from the algorithm."""
    algo = change.get("algo", {})
    if "family" in algo:
        base = {**base, "algo": known(record_of(algo), base.get("algo", {}))}
    return merge(base, change)


def small_config(**changes: Any) -> Config:
    """Create the config of a run of seconds: ``small_config(algo={"n_step": 1})``."""
    return from_dict(fit(SMALL, changes))


def configured(base: dict[str, Any], *changes: dict[str, Any]) -> Config:
    """Create a small run of ``base`` and then ``changes``; each applies to ``algo``, or to the groups that it names."""
    for change in changes:
        base = fit(base, change if {*change} & GROUPS else {"algo": change})
    return validate(small_config(**base))


def make_networks(config: Config, spec: EnvSpec, seed: int) -> tuple[nn.Module, Critic]:
    """Create the policy and the critics of an off-policy run, with their initial weights."""
    return seeded(lambda: (make_policy(config, spec), make_critic(config, spec)), seed)


def ticks(parts: Parts, count: int) -> Parts:
    for _ in range(count):
        parts.schedule.tick()
    return parts


def go_on(parts: Parts, count: int) -> Parts:
    """Run the last ``count`` ticks of a run and end its threads."""
    try:
        return ticks(parts, count)
    finally:
        parts.schedule.executor.close()


def start(config: Config, executor: Executor | None = None, trace: Trace | None = None) -> Parts:
    """Build, reset, warm up; tick 0 is next."""
    parts = build(config, executor=executor, trace=trace)
    parts.prepare()
    parts.start()
    parts.warm_up(config.algo.warmup_steps)
    parts.begin()
    return parts


def bits(parts: Parts) -> dict[str, torch.Tensor]:
    """Copy everything that the next tick depends on."""
    return {k: v.clone() for k, v in flatten(parts.state_dict()).items()}


def traces(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """As ``differences``, without cells of a store, whose content beyond its positions is unused."""
    positions = ("head", "finals", "row", "count")
    return [k for k in differences(before, after) if "/replay/" not in k or k.rsplit("/", 1)[-1] in positions]


def learners(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the learners' part of ``bits``."""
    return {k: v for k, v in state.items() if k.startswith("learners/")}


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return names of tensors that are not bit-identical (NaN equals NaN)."""
    assert a.keys() == b.keys()
    return [k for k in a if not torch.equal(torch.nan_to_num(a[k].double()), torch.nan_to_num(b[k].double()))]
