"""Exports: the files' outputs and metadata, and that a wrong file is never left behind."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import words
from safetensors.torch import load_file
from torch import nn

import pql
from pql.cli.main import main
from pql.config import Config, to_dict
from pql.config.compose import compose
from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.data.normalize import Normalizer
from pql.errors import ConfigError, RunError
from pql.run.evaluation import EvaluationPlan, evaluate_saved
from pql.run.export import writer as export
from pql.run.export.writer import Deployed, difference, export_policy, random_inputs, unit_map, write_export
from pql.run.policy import Policy, open_stored
from pql.run.store.manifest import check_export

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
CPU = torch.device("cpu")
NETS = ("algo.policy.hidden=[16]", "algo.critic.hidden=[16]")
PPO = ("algo=ppo", "device=cpu", "num_envs=16", "algo.warmup_steps=8", *NETS, "eval.final=false")
DOCS = (Path(__file__).parents[2] / "docs" / "export.md").read_text()


def train(path: Path, *more: str) -> Path:
    assert main(["train", *words(path, "budget.env_steps=800", *more)]) == 0
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pendulum run (its actions are torques within 2 N m), exported to both formats by the command line."""
    path = train(tmp_path_factory.mktemp("export") / "run")
    assert main(["export", str(path)]) == 0
    return path


def onnx_run(path: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path))
    return session.run(None, {k.replace("__", "."): v for k, v in inputs.items()})


def by_hand(run: Path, obs: np.ndarray) -> np.ndarray:
    """The pendulum's action from the checkpoint's own numbers: normalise, clip, two layers, tanh, times 2 N m."""
    t = {k: v.double().numpy() for k, v in load_file(run / "checkpoints" / "last" / "tensors.safetensors").items()}
    assert t["norm/moments.policy.count"] > 500
    spread = np.sqrt(t["norm/moments.policy.m2"] / t["norm/moments.policy.count"] + 1e-8)
    x = np.clip((obs - t["norm/moments.policy.mean"]) / spread, -5, 5)
    x = x @ t["policy/net.0.weight"].T + t["policy/net.0.bias"]
    x = np.maximum(x, 0)  # the CPU scale's activation
    return 2.0 * np.tanh(x @ t["policy/net.2.weight"].T + t["policy/net.2.bias"])


def test_both_files_compute_the_checkpoints_policy_in_newton_metres(run: Path) -> None:
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32) * [1, 1, 8]
    want = by_hand(run, obs)
    assert np.abs(want).max() > 0.1
    (action,) = onnx_run(run / "export" / "policy.onnx", obs__policy=obs.astype(np.float32))
    np.testing.assert_allclose(action, want, atol=2e-5)
    module = torch.export.load(run / "export" / "policy.pt2").module()
    for rows in (1, 50):
        (action,) = module(torch.tensor(obs[:rows], dtype=torch.float32))
        np.testing.assert_allclose(action.numpy(), want[:rows], atol=2e-5)


def test_every_way_to_load_a_policy_gives_the_same_actions_in_the_unit_range(run: Path) -> None:
    obs = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 1, 8])
    want = by_hand(run, obs.double().numpy()) / 2
    for path in (run, run / "checkpoints" / "last", run / "export" / "policy.pt2", run / "export" / "policy.onnx"):
        policy = pql.load_policy(path, trust=path.suffix == ".pt2")
        assert policy.spec.action == Box(1, (-2.0,), (2.0,))
        assert policy.spec.obs == {"policy": ObsSpec((3,))}
        assert policy.initial_state(4) == {}
        for given in (obs, {"policy": obs, "other": obs}):
            np.testing.assert_allclose(policy(given), want, atol=1e-5)


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_an_export_is_evaluated_like_its_run(run: Path, capsys, form: str) -> None:
    assert main(["eval", str(run), "num_envs=2", "episodes=3"]) == 0
    trust = ["--trust"] * (form == "pt2")
    assert main(["eval", str(run / "export" / f"policy.{form}"), "num_envs=2", "episodes=3", *trust]) == 0
    said = capsys.readouterr().out
    want, got = (
        json.loads((run / "evaluations" / f"{name}-seed0-3episodes.json").read_text())
        for name in ("last", f"policy.{form}")
    )
    assert got["returns"] == pytest.approx(want["returns"], rel=1e-3)  # rounding, over 200 steps
    assert [got[k] for k in ("task", "algo", "lengths")] == ["pendulum", "pql", [200.0] * 3]
    assert "pql on pendulum: 3 episodes in 2 environments, seed 0" in said


@pytest.mark.slow
def test_a_recurrent_export_remembers_where_it_is_evaluated(tmp_path: Path) -> None:
    """A policy that recalls the cue needs its memory, and must lose it where the next episode begins."""
    run = tmp_path / "run"
    own = ["graphs=off", "algo.lstm=8", "algo.horizon=25", "algo.epochs=1", "algo.minibatches=1"]
    assert main(["train", "task=recall", *PPO, *own, "budget.env_steps=2000", f"run_dir={run}"]) == 0
    out = export_policy(run, formats=["onnx"])
    want, got = (evaluate_saved(path, EvaluationPlan(2, 6)) for path in (run, out.files["onnx"]))
    assert got["returns"] == pytest.approx(want["returns"], abs=1e-4)
    assert got["successes"] == want["successes"] == [r > 0 for r in want["returns"]]
    assert len({round(r, 3) for r in want["returns"]}) > 1


@pytest.mark.slow
def test_a_policy_that_learned_in_bfloat16_leaves_in_float32(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "task=pendulum", *PPO, "budget.env_steps=1000", "algo.amp=true", f"run_dir={run}"]) == 0
    assert sorted(export_policy(run).parity) == ["onnx", "pt2"]  # the check passed


def test_files_and_folder_tell_the_same_metadata(run: Path) -> None:
    beside = json.loads((run / "export" / "policy.json").read_text())
    parity, hashes = beside.pop("parity"), beside.pop("sha256")
    for name in ("policy.pt2", "policy.onnx"):
        assert hashes[name] == hashlib.sha256((run / "export" / name).read_bytes()).hexdigest()
    assert parity["rows"] == 1000
    assert all(0 <= worst <= 1e-5 for worst in parity["largest_difference"].values())
    session = ort.InferenceSession(str(run / "export" / "policy.onnx"))
    extra = {"metadata.json": ""}
    torch.export.load(run / "export" / "policy.pt2", extra_files=extra)
    assert (
        beside == json.loads(session.get_modelmeta().custom_metadata_map["pql"]) == json.loads(extra["metadata.json"])
    )
    assert beside["inputs"] == [{"name": "obs.policy", "shape": ["batch", 3], "dtype": "float32"}]
    assert beside["outputs"] == [{"name": "action", "shape": ["batch", 1], "dtype": "float32"}]
    assert beside["action"] == {"kind": "box", "size": 1, "low": [-2.0], "high": [2.0], "scaled": True}
    assert beside["task"]["name"] == "pendulum"
    assert (beside["algorithm"], beside["normalizes_observations"]) == ("pql", True)
    assert beside["checkpoint"] == "run/checkpoints/last"
    assert beside["versions"]["torch"] == torch.__version__
    for end, tensors in (("input", session.get_inputs()), ("output", session.get_outputs())):
        assert [(t.name, t.shape) for t in tensors] == [(t["name"], t["shape"]) for t in beside[f"{end}s"]]


def test_an_export_goes_into_the_model_that_its_policy_was_trained_on(remembering: Policy, tmp_path: Path) -> None:
    manifest = {"config": to_dict(compose(["device=cpu", "task=hopper", "task.model=fast"]))}
    metadata = export.export_metadata(remembering, manifest, Path("a/b/c"), scale=True)
    write_export(remembering, metadata, tmp_path, ("pt2",))
    assert open_stored(tmp_path / "policy.pt2", trust=True).config.task.model == "fast"


def test_unscaled_sac_export_leaves_out_the_bounds(tmp_path: Path) -> None:
    run = train(tmp_path / "sac", "algo=sac")
    out = export_policy(run, tmp_path / "robot", ["onnx"], scale=False)
    assert sorted(f.name for f in (tmp_path / "robot").iterdir()) == ["policy.json", "policy.onnx"]
    assert out.files == {"onnx": tmp_path / "robot" / "policy.onnx"}
    assert json.loads(out.metadata.read_text())["action"]["scaled"] is False
    obs = torch.randn(9, 3, generator=torch.Generator().manual_seed(2))
    (action,) = onnx_run(out.files["onnx"], obs__policy=obs.numpy())
    np.testing.assert_allclose(action, pql.load_policy(run)(obs), atol=1e-5)
    np.testing.assert_allclose(pql.load_policy(out.files["onnx"])(obs), action, atol=1e-7)


def test_an_export_has_the_running_statistics_of_batch_norm(tmp_path: Path) -> None:
    """XQC's policy in float64 from the checkpoint: BatchNorm of the input and before each ReLU."""
    run = train(tmp_path / "xqc", "algo=xqc", "algo.policy.hidden=[8]")
    t = {k: v.double().numpy() for k, v in load_file(run / "checkpoints" / "last" / "tensors.safetensors").items()}
    t = {k.removeprefix("policy/net."): v for k, v in t.items()}
    obs = np.random.default_rng(2).normal(size=(9, 3)).astype(np.float32)

    def normed(x: np.ndarray, at: int) -> np.ndarray:
        spread = np.sqrt(t[f"{at}.running_var"] + 1e-5)
        return (x - t[f"{at}.running_mean"]) / spread * t[f"{at}.weight"] + t[f"{at}.bias"]

    hidden = np.maximum(normed(normed(obs, 0) @ t["1.weight"].T, 2), 0)
    mean = (hidden @ t["4.weight"].T + t["4.bias"])[:, :1]
    assert np.abs(t["0.running_mean"]).max() > 0.01
    for file in export_policy(run).files.values():
        np.testing.assert_allclose(pql.load_policy(file, trust=True)(torch.from_numpy(obs)), np.tanh(mean), atol=1e-5)


# -- outputs of no algorithm here: recurrent states, several groups, frames, unbounded outputs -----------------------


class Remembering(nn.Module):
    """An LSTM over two groups, one of them frames; its action leaves [-1, 1] at times."""

    groups = ("policy", "frame")
    state_shapes = {"h": (5,), "c": (5,)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4 + 12, 5), nn.Linear(5, 2)
        self.gain, self.off = 8.0, 0.0

    def mean_action(self, obs, state):
        x = torch.cat((obs["policy"], obs["frame"].float().flatten(1) / 255), 1)
        h, c = self.cell(x, (state["h"], state["c"]))
        off = self.off if torch.compiler.is_exporting() else 0.0
        return self.gain * self.out(h) + off, {"h": h, "c": c}


@pytest.fixture
def remembering() -> Policy:
    torch.manual_seed(0)
    obs = {"critic": ObsSpec((7,)), "policy": ObsSpec((4,)), "frame": ObsSpec((3, 4), torch.uint8)}
    spec = EnvSpec("made up", 1, obs, Box(2, (-1.0, 0.0), (3.0, 10.0)), CPU)
    norm = Normalizer(obs, 1, CPU)
    norm.observe({k: torch.rand(64, *s.shape) * 9 + 5 for k, s in obs.items()})
    norm.freeze()
    return Policy(Remembering(), norm, spec)


def metadata_of(policy: Policy, scale: bool = True) -> dict:
    return export.export_metadata(policy, {"config": to_dict(Config())}, Path("a/b/c"), scale=scale)


def test_recurrent_policy_carries_its_state_from_step_to_step(remembering: Policy, tmp_path: Path) -> None:
    write_export(remembering, metadata_of(remembering), tmp_path, ("pt2", "onnx"))
    gen = torch.Generator().manual_seed(3)
    loaded = [pql.load_policy(tmp_path / f"policy.{f}", trust=True) for f in ("pt2", "onnx")]
    states = [p.initial_state(6) for p in (remembering, *loaded)]
    assert [{k: v.shape for k, v in s.items()} for s in states] == [{"h": (6, 5), "c": (6, 5)}] * 3
    session = ort.InferenceSession(str(tmp_path / "policy.onnx"))
    assert [i.name for i in session.get_inputs()] == ["obs.policy", "obs.frame", "state.h", "state.c"]
    raw = {f"state.{k}": v.numpy() for k, v in states[0].items()}
    for _ in range(12):
        obs = {
            "policy": torch.rand(6, 4, generator=gen) * 9 + 5,
            "frame": torch.randint(256, (6, 3, 4), generator=gen, dtype=torch.uint8),
        }
        action, states[0] = remembering.act(obs, states[0])
        assert action.abs().max() > 1
        low, high = (np.array(b) for b in remembering.spec.action.bounds)
        scaled, h, c = session.run(None, raw | {f"obs.{k}": v.numpy() for k, v in obs.items()})
        np.testing.assert_allclose(scaled, low + (action.clamp(-1, 1).numpy() + 1) / 2 * (high - low), atol=5e-5)
        raw = {"state.h": h, "state.c": c}
        for i, policy in enumerate(loaded, 1):
            got, states[i] = policy.act(obs, states[i])
            torch.testing.assert_close(got, action.clamp(-1, 1), atol=1e-5, rtol=0)
            torch.testing.assert_close(states[i], states[0], atol=1e-5, rtol=0)
    assert states[0]["h"].abs().max() > 0.1


def test_loaded_policies_remember_from_call_to_call_and_forget_on_demand(remembering: Policy, tmp_path: Path) -> None:
    remembering.net.gain = 1.0
    write_export(remembering, metadata_of(remembering), tmp_path, ("onnx",))
    gen = torch.Generator().manual_seed(3)
    obs = {
        "policy": torch.rand(2, 4, generator=gen) * 9 + 5,
        "frame": torch.randint(256, (2, 3, 4), generator=gen, dtype=torch.uint8),
    }
    for policy in (remembering, pql.load_policy(tmp_path / "policy.onnx")):
        first, second = policy(obs), policy(obs)
        assert (first - second).abs().max() > 0.01
        policy.reset(torch.tensor([True, False]))
        third = policy(obs)
        torch.testing.assert_close(third[0], first[0])
        assert (third[1] - second[1]).abs().max() > 1e-3
        policy.reset()
        torch.testing.assert_close(policy(obs), first)
        with pytest.raises(ValueError, match=r"1 observations for a memory of 2 .* policy.reset\(\) starts again"):
            policy({k: v[:1] for k, v in obs.items()})


class Choosing(nn.Module):
    """One of three actions, and a limit that only other runtimes obey."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)
        self.shift = 0

    def mean_action(self, obs):
        action = self.net(obs["policy"]).argmax(-1)
        return (action + self.shift) % 3 if torch.compiler.is_exporting() else action


def choosing(space: Discrete) -> Policy:
    torch.manual_seed(1)
    obs = {"policy": ObsSpec((2,))}
    return Policy(Choosing(), Normalizer(obs, 1, CPU), EnvSpec("made up", 1, obs, space, CPU))


@pytest.mark.parametrize(("start", "scale"), [(-4, True), (-4, False), (0, True)])
def test_discrete_actions_leave_as_whole_numbers_from_the_simulators_start(tmp_path: Path, start, scale) -> None:
    policy = choosing(Discrete(3, start))
    metadata = metadata_of(policy, scale)
    assert metadata["action"] == {"kind": "discrete", "size": 3, "start": start, "scaled": scale and start != 0}
    old = (1, None)  # as in checkpoints without it
    assert (metadata["format_version"], metadata["spec"].get("action_start")) == ((2, start) if start else old)
    assert metadata["outputs"] == [{"name": "action", "shape": ["batch"], "dtype": "int64"}]
    write_export(policy, metadata, tmp_path, ("pt2", "onnx"))
    x = torch.randn(50, 2) * 3
    want = policy(x)
    assert {*want.tolist()} == {0, 1, 2}
    for f in ("pt2", "onnx"):
        loaded = pql.load_policy(tmp_path / f"policy.{f}", trust=True)
        assert loaded.spec.action == Discrete(3, start)
        assert torch.equal(loaded(x), want)  # as pql's environments take them
        raw = loaded._function([x])[0]  # type: ignore[union-attr]
        assert torch.equal(raw, want + start if scale else want)
        assert raw.dtype == torch.int64
    policy.net.shift = 1
    with pytest.raises(RunError, match=r"differs from the live policy by [12] on"):
        write_export(policy, metadata, tmp_path, ("onnx",))


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        ("action", {"start": 0.5}, "action.start is not whole numbers"),
        ("action", {"kind": "multi_discrete", "nvec": [3]}, "action.start is not whole numbers"),
        ("action", {"kind": "multi_discrete", "nvec": [0, 1, 1]}, "action.nvec is not whole numbers"),
        ("action", {"kind": "multi_discrete", "nvec": 3}, "action.nvec is not whole numbers"),
        ("action", {"kind": "tuple"}, "action is not a kind and a size"),
        ("spec", {"action_start": "1"}, "spec.action_start is not whole numbers"),
        ("spec", {"action": {"multi_discrete": []}}, "spec.action is not a number of actions"),
        ("spec", {"action": {"multi_discrete": [2, -1]}}, "spec.action is not a number of actions"),
        ("spec", {"action": {"multi_discrete": [2]}, "action_start": [1, 2]}, "spec.action_start is not whole numbers"),
    ],
)
def test_actions_of_an_export_are_checked(entry: str, changes: dict, message: str) -> None:
    metadata = json.loads(json.dumps(metadata_of(choosing(Discrete(3, start=-4)))))
    check_export(metadata)
    if "nvec" in changes and changes["nvec"] == [3]:
        changes = changes | {"size": 1}
    with pytest.raises(ValueError, match=message):
        check_export(metadata | {entry: metadata[entry] | changes})


def test_an_export_that_differs_is_refused_and_the_one_before_it_stays(remembering: Policy, tmp_path: Path) -> None:
    write_export(remembering, metadata_of(remembering), tmp_path, ("pt2",))
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert sorted(before) == ["policy.json", "policy.pt2"]
    remembering.net.off = 3e-5
    with pytest.raises(RunError, match=r"the exported pt2 differs .* by 3(\.\d+)?e-05 on 1,000 random .*1e-05 allowed"):
        write_export(remembering, metadata_of(remembering), tmp_path, ("pt2",))
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "worst"),
    [(lambda y: y + 0.25, 0.25), (lambda y: y * torch.nan, float("inf")), (lambda y: y[:, :1], float("inf"))],
)
def test_difference_sees_what_is_wrong(remembering: Policy, change, worst: float) -> None:
    metadata = metadata_of(remembering)
    model = Deployed(remembering, scale=False).eval()
    metadata["action"]["scaled"] = False

    def right(inputs):
        return list(model(*inputs))

    def wrong(inputs):  # in the rows that come last, in a state
        action, h, c = model(*inputs)
        return [action, h, change(c) if len(c) > 100 else c]

    with torch.no_grad():
        assert difference(remembering, model, metadata, right) == 0
        assert difference(remembering, model, metadata, wrong) == pytest.approx(worst)


def test_random_inputs_reach_the_clip_and_every_byte(remembering: Policy) -> None:
    metadata, model = metadata_of(remembering), Deployed(remembering, scale=True)
    policy, frame, h, c = random_inputs(metadata, 1000, model)
    normal = (policy - 9.5) / (9 / 12**0.5)  # the fixture fed uniform numbers from 5 to 14
    assert normal.std().item() == pytest.approx(3, abs=0.5)
    assert 0.02 < (normal.abs() > 5).float().mean() < 0.2
    assert (frame.min(), frame.max(), frame.dtype) == (0, 255, torch.uint8)
    assert h.shape == c.shape == (1000, 5)


def test_unit_map_undoes_the_scaling() -> None:
    to_unit = unit_map({"low": [-1.0, 0.0], "high": [3.0, 10.0], "scaled": True}, CPU)
    torch.testing.assert_close(to_unit(torch.tensor([[-1.0, 10.0], [1.0, 2.5]])), torch.tensor([[-1.0, 1], [0, -0.5]]))


class Linear(nn.Module):
    def mean_action(self, obs):
        return obs["policy"] * torch.tensor([1.0, -0.5])


def test_an_action_of_zero_leaves_as_the_center_of_asymmetric_bounds(tmp_path: Path) -> None:
    """The graph's rows at -1, 0, 1 and between; both files come back to [-1, 1]."""
    obs, box = {"policy": ObsSpec((2,))}, Box(2, (-1.0, 0.0), (3.0, 10.0), (0.0, 8.0))
    policy = Policy(Linear(), Normalizer(obs, 1, CPU), EnvSpec("made up", 1, obs, box, CPU))
    metadata = metadata_of(policy)
    assert (metadata["format_version"], metadata["action"]["center"]) == (3, (0.0, 8.0))
    write_export(policy, metadata, tmp_path, ("pt2", "onnx"))
    rows = torch.tensor([[-1.0, 2.0], [0.0, 0.0], [9.0, -9.0], [0.5, 1.0], [-0.5, -1.0]])
    out = torch.tensor([[-1.0, 0.0], [0.0, 8.0], [3.0, 10.0], [1.5, 4.0], [-0.5, 9.0]])
    for f in ("pt2", "onnx"):
        loaded = pql.load_policy(tmp_path / f"policy.{f}", trust=True)
        assert loaded.spec.action == box
        torch.testing.assert_close(loaded._function([rows])[0], out)  # type: ignore[union-attr]
        torch.testing.assert_close(loaded(rows), policy(rows).clamp(-1, 1))
    for center in ([-1.0, 8.0], [0.0], [0.0, None]):
        with pytest.raises(ValueError, match=r"action\.center is not (between low and high|2 numbers)"):
            check_export(json.loads(json.dumps({**metadata, "action": {**metadata["action"], "center": center}})))


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_failing_parity_ends_the_command_with_status_1(run: Path, monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    assert main(["export", str(run), f"out={tmp_path}", "formats=pt2"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("pql: the exported pt2 differs from the live policy by ")
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["formats=onxx"], "formats=onxx: expected one or more of pt2, onnx (did you mean onnx?)"),
        (["formats=pt2,pt2"], "formats=pt2,pt2: expected one or more of pt2, onnx, each once"),
        (["scale=1"], "scale=1: expected true or false"),
        (["format=pt2"], "format=pt2: expected one of formats, scale, out (did you mean formats?)"),
        (["out=/proc/nowhere"], "out=/proc/nowhere: expected a folder that can be written"),
    ],
)
def test_mistakes_are_one_line(run: Path, capsys, words: list[str], message: str) -> None:
    capsys.readouterr()
    assert main(["export", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pql: {message}")
    assert error.count("\n") == 1


def test_a_missing_package_is_named_with_what_installs_it(run: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        ConfigError, match=r"formats=onnx: expected the package 'onnxscript'.*pip install 'pql-rl\[export"
    ):
        export_policy(run)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"'onnxruntime', which is not installed: pip install 'pql-rl\[export\]'"):
        pql.load_policy(run / "export" / "policy.onnx")


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_what_is_no_export_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"other.{suffix}"
    with pytest.raises(ConfigError, match=f"policy={file}: expected a file"):
        pql.load_policy(file, trust=True)
    file.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=rf"policy={file}: expected an? \.{suffix} file that pql export wrote"):
        pql.load_policy(file, trust=True)


# -- away from torch --------------------------------------------------------------------------------------------------


def snippet(module: str) -> str:
    return next(b for b in re.findall(r"```python\n(.*?)```", DOCS, re.S) if f"import {module}\n" in b)


def test_the_documented_snippets_run_as_printed_one_of_them_without_torch(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "export", tmp_path, dirs_exist_ok=True)
    code = "import sys; sys.modules['torch'] = None\n" + snippet("onnxruntime")
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert float(out.strip("[]\n")) == pytest.approx(by_hand(run, np.zeros((1, 3)))[0, 0], abs=1e-5)
    scope: dict = {}
    exec(snippet("torch").replace('"policy.pt2"', f'r"{tmp_path}/policy.pt2"'), scope)
    np.testing.assert_allclose(scope["action"], by_hand(run, np.zeros((5, 3))), atol=1e-5)
