"""Export of a policy: one ``.pt2`` (torch.export) and one ``.onnx`` file, each sufficient for acting.

Both contain the observation normaliser, the deterministic action and its scaling to the simulator's bounds. A recurrent
policy takes its state as an input and returns the next one. Files are published only after they agree with the policy.
"""

import contextlib
import copy
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pql import __version__
from pql.config import from_dict, to_dict
from pql.config.files import expanded
from pql.config.trust import check_links
from pql.contract.bounds import Bounds
from pql.contract.env import Box, Discrete, MultiDiscrete
from pql.contract.spec_json import spec_to_dict
from pql.engine.watchdog import touch
from pql.errors import ConfigError, RunError, nearest, writing
from pql.nets.cnn import fold
from pql.run.export.policy import Function, need, open_export, quiet, unit_map
from pql.run.policy import POLICIES, Policy, policy_of
from pql.run.store import checkpoint
from pql.run.store.manifest import EXPORT_FORMAT
from pql.run.store.own import started_here
from pql.run.store.run_dir import versions

FORMATS = ("pt2", "onnx")
PARITY_ROWS, TOLERANCE = 1000, 1e-5
GAINS = {"stiffness": "kp", "damping": "kd"}


@dataclass(frozen=True)
class Export:
    """Result of an export: ``files`` by format, the path of their JSON, and the largest difference by format."""

    files: dict[str, Path]
    metadata: Path
    parity: dict[str, float]


class Deployed(nn.Module):
    """(observation groups, then states) -> (action, then next states), as tensors in the metadata's order."""

    start: Tensor

    def __init__(self, policy: Policy, scale: bool):
        super().__init__()
        self.net, self.norm = fold(copy.deepcopy(policy.net).cpu()), copy.deepcopy(policy.norm).cpu()
        self.groups, self.states = policy.groups, tuple(policy.state_shapes)
        self.box, space = isinstance(policy.spec.action, Box), policy.spec.action
        bounds = Bounds(space) if scale and isinstance(space, Box) else None
        self.bounds = None if bounds is None or bounds.idle else bounds
        self.shifted = scale and not isinstance(space, Box) and space.start not in (0, None)
        if self.shifted:
            self.register_buffer("start", torch.tensor(cast(Discrete | MultiDiscrete, space).start))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        obs = self.norm(dict(zip(self.groups, inputs, strict=False)))
        state = dict(zip(self.states, inputs[len(self.groups) :], strict=True))
        action, state = self.net.mean_action(obs, state) if self.states else (self.net.mean_action(obs), {})  # type: ignore[operator]
        if self.bounds is not None:
            action = self.bounds(action)
        elif self.box:
            action = action.clamp(-1, 1)
        if self.shifted:
            action = action + self.start
        return (action, *(state[k] for k in self.states))


def export_policy(
    path: str | Path,
    out: str | Path | None = None,
    formats: Sequence[str] = FORMATS,
    scale: bool = True,
    trust: bool = False,
) -> Export:
    """Write the policy of a run or checkpoint as ``policy.pt2``, ``policy.onnx`` and ``policy.json``, and check them.

    Args:
        out: folder to write to; default ``export`` in the run directory. Files of an earlier export are replaced.
        formats: ``pt2``, ``onnx`` or both.
        scale: the simulator's own actions: within its bounds, or from its ``start`` on; False: in [-1, 1], or from 0.
        trust: allow networks of the run that are neither built in nor registered (``docs/security.md``).
    Raises:
        ConfigError: no checkpoint at ``path``, an unknown format, or a package that is not installed.
        RunError: a file computes other actions than the policy; no file is left behind.
    """
    _check_formats(formats)
    tensors, manifest, source = checkpoint.find(expanded("run", path), POLICIES)
    own = started_here(checkpoint.home(source), from_dict(manifest["config"]))
    policy = policy_of(tensors, manifest, "cpu", trust or own)
    folder = expanded("out", out) if out is not None else checkpoint.home(source) / "export"
    if out is None and not trust:
        check_links(folder.parent, folder.name)
    return write_export(policy, export_metadata(policy, manifest, source, scale), folder, formats)


def write_export(policy: Policy, metadata: dict[str, Any], folder: Path, formats: Sequence[str]) -> Export:
    """Write, read back and compare; files appear in ``folder`` only if they are correct. See :func:`export_policy`."""
    model = Deployed(policy, metadata["action"]["scaled"]).eval().requires_grad_(False)
    temporary = folder / f".writing-{os.getpid()}"
    with writing("out", folder):
        temporary.mkdir(parents=True)
    try:
        with exact_products():
            _write(model, metadata, temporary, formats)
            touch("reading the files")
            parity = {f: difference(policy, model, metadata, _read(temporary / f"policy.{f}")) for f in formats}
        _check_parity(parity)
        metadata |= {
            "parity": {"rows": PARITY_ROWS, "tolerance": TOLERANCE, "largest_difference": parity},
            "sha256": {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(temporary.iterdir())},
        }
        (temporary / "policy.json").write_text(json.dumps(metadata, indent=1) + "\n")
        for suffix in (*FORMATS, "json"):
            (folder / f"policy.{suffix}").unlink(missing_ok=True)
        for file in temporary.iterdir():
            file.rename(folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export({f: folder / f"policy.{f}" for f in formats}, folder / "policy.json", parity)


def _check_formats(formats: Sequence[str]) -> None:
    for name in formats:
        if name not in FORMATS:
            raise ConfigError("formats", name, f"one or more of {', '.join(FORMATS)}{nearest(name, FORMATS)}")
    if not formats or len({*formats}) < len(formats):
        raise ConfigError("formats", ",".join(formats), f"one or more of {', '.join(FORMATS)}, each once")
    if "onnx" in formats:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            need(package, "formats", "onnx")


# -- metadata ---------------------------------------------------------------------------------------------------------


def export_metadata(policy: Policy, manifest: Mapping[str, Any], source: Path, scale: bool) -> dict[str, Any]:
    """Return the metadata, stored in ``policy.json`` and in both files. ``docs/export.md`` explains every entry."""
    config, spec = from_dict(manifest["config"]), policy.spec
    obs = [_tensor(f"obs.{k}", spec.obs[k].shape, str(spec.obs[k].dtype)) for k in policy.groups]
    states = [_tensor(f"state.{k}", s, "torch.float32") for k, s in policy.state_shapes.items()]
    if isinstance(spec.action, Box):
        low, high = spec.action.bounds
        about = {"kind": "box", "size": spec.action.size, "low": low, "high": high, "scaled": scale}
        about |= {} if spec.action.center is None else {"center": spec.action.center}
        action = _tensor("action", (spec.action.size,), "torch.float32")
    else:
        about = _of_discrete(spec.action, scale)
        action = _tensor("action", spec.action.shape, "torch.int64")
    after = [_tensor(f"next_state.{k}", s, "torch.float32") for k, s in policy.state_shapes.items()]
    return {
        "format": "pql-policy",
        "format_version": EXPORT_FORMAT if "center" in about else 1 if about.get("start", 0) == 0 else 2,
        "algorithm": config.algo.name,
        "family": config.algo.family,
        "task": {k: v for k, v in to_dict(config.task).items() if k in ("name", "id", "game", "model", "kwargs")},
        "inputs": [*obs, *states],
        "outputs": [action, *after],
        "action": about,
        "normalizes_observations": config.algo.normalize_obs,
        "initial_state": "zeros" if states else None,
        "spec": spec_to_dict(spec),
        "checkpoint": "/".join(source.absolute().parts[-3:]),  # run/checkpoints/name: no absolute path
        "counters": manifest.get("counters", {}),
        "release": __version__,
        "versions": versions(),
    }


def _of_discrete(space: Discrete | MultiDiscrete, scale: bool) -> dict[str, Any]:
    """Return the metadata's entry ``action``."""
    if isinstance(space, Discrete):
        return {"kind": "discrete", "size": space.n, "start": space.start, "scaled": scale and space.start != 0}
    start = space.start or (0,) * len(space.nvec)
    fields = {"size": len(space.nvec), "nvec": space.nvec, "start": start, "scaled": scale and any(start)}
    return {"kind": "multi_discrete", **fields}


def _tensor(name: str, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    return {"name": name, "shape": ["batch", *shape], "dtype": dtype.removeprefix("torch.")}


def mjlab_entries(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries that mjlab's exporter adds to an ONNX file, for a policy of one of its tasks that move joints
    by position targets. Numbers have full precision (there: three decimals)."""
    robot = metadata["spec"].get("robot", {})
    if robot.get("runtime") != "mjlab" or "joints" not in robot:
        return {}
    order = [robot["joints"].index(name) for name in robot["all_joints"] if name in robot["joints"]]
    terms = robot["terms"]["policy"]
    gains = {f"joint_{name}": [robot[k][i] for i in order] for name, k in GAINS.items() if k in robot}
    lists = {
        "joint_names": robot["all_joints"],
        **gains,
        "default_joint_pos": robot["all_default"],
        "command_names": robot["commands"],
        "observation_names": [term["name"] for term in terms],
        "observation_terms_scale": [term["scale"] for term in terms],
        "observation_terms_clip": [term["clip"] or [-math.inf, math.inf] for term in terms],
        "observation_terms_history_length": [term["history"] for term in terms],
        "observation_terms_flatten_history_dim": [term["flatten"] for term in terms],
        "action_scale": robot["scale"],
    }
    return {"run_path": metadata["checkpoint"], **{k: ",".join(map(_entry, v)) for k, v in lists.items()}}


def _entry(value: Any) -> str:
    if isinstance(value, list):
        return ";".join(map(_entry, value))
    return value if isinstance(value, str) else repr(float(value))


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(model: Deployed, metadata: dict[str, Any], folder: Path, formats: Sequence[str]) -> None:
    inputs, text = random_inputs(metadata, 2, model), json.dumps(metadata)
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    with quiet():
        program = torch.export.export(model, tuple(inputs), dynamic_shapes=(shapes,))
        program.example_inputs = None  # they would be pickled
        for node in program.graph.nodes:  # stack traces contain paths of this machine
            node.meta.pop("stack_trace", None)
        if "pt2" in formats:
            touch("saving policy.pt2")
            torch.export.save(program, folder / "policy.pt2", extra_files={"metadata.json": text})
        if "onnx" in formats:
            touch("saving policy.onnx")
            ins, outs = ([t["name"] for t in metadata[end]] for end in ("inputs", "outputs"))
            onnx = torch.onnx.export(
                program, dynamo=True, external_data=False, verbose=False, input_names=ins, output_names=outs
            )
            assert onnx is not None
            onnx.model.metadata_props.update(pql=text, **mjlab_entries(metadata))
            for value in (*onnx.model.graph.inputs, *onnx.model.graph.outputs):
                value.shape = onnx_shape(value.shape)
            onnx.save(folder / "policy.onnx")


def onnx_shape(shape: Any) -> Any:
    """Return the shape with its free axis named ``batch``; the exporter may have numbered it instead."""
    import onnx_ir

    return onnx_ir.Shape([size if isinstance(size, int) else "batch" for size in shape])


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products and convolutions in full float32, as other runtimes do, whatever the settings of a run
    in this process."""
    places: Any = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


# -- parity -----------------------------------------------------------------------------------------------------------


def random_inputs(metadata: Mapping[str, Any], rows: int, model: Deployed) -> list[Tensor]:
    """Return random tensors for every input, as the metadata describe them, with ``rows`` rows each.

    Observations have three times the standard deviation of training, so that clipping takes effect.
    """
    gen = torch.Generator().manual_seed(0)
    out = []
    for entry in metadata["inputs"]:
        shape = (rows, *entry["shape"][1:])
        name = entry["name"].removeprefix("obs.")
        if entry["dtype"] == "uint8":
            out.append(torch.randint(256, shape, generator=gen, dtype=torch.uint8))
            continue
        x = torch.randn(shape, generator=gen)
        if entry["name"].startswith("obs.") and hasattr(model.norm, f"scale_{name}"):
            x = (3 * x - getattr(model.norm, f"shift_{name}")) / getattr(model.norm, f"scale_{name}")
        out.append(as_dtype(x, getattr(torch, entry["dtype"])))
    return out


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers of any shape, rounded and clamped to the range of an integer ``dtype``; bool: above 0."""
    if dtype.is_floating_point or dtype == torch.bool:
        return x.to(dtype) if dtype.is_floating_point else x > 0
    ends = torch.iinfo(dtype)
    return x.double().round().clamp(max(ends.min, -(2**53)), min(ends.max, 2**53)).to(dtype)


@torch.no_grad()
def difference(policy: Policy, model: Deployed, metadata: Mapping[str, Any], function: Function) -> float:
    """Return the largest difference from the policy over ``PARITY_ROWS`` rows, in batches of 1, 7 and the rest.

    Continuous actions are compared in [-1, 1], discrete ones by index, states without scaling. NaN counts as infinite.
    """
    inputs, worst = random_inputs(metadata, PARITY_ROWS, model), 0.0
    split, to_unit = len(policy.groups), unit_map(metadata["action"], torch.device("cpu"))
    for rows in (slice(0, 1), slice(1, 8), slice(8, None)):
        batch = [x[rows] for x in inputs]
        obs, state = dict(zip(policy.groups, batch, strict=False)), dict(zip(model.states, batch[split:], strict=True))
        action, after = policy.act(obs, state)
        got = function(batch)
        got[0] = to_unit(got[0])
        action = action.clamp(-1, 1) if model.box else action
        for want, have in zip((action, *(after[k] for k in model.states)), got, strict=True):
            if want.shape != have.shape or want.dtype != have.dtype:
                return float("inf")
            worst = max(worst, float((want - have).abs().max().float().nan_to_num(nan=torch.inf)))
    return worst


def _read(path: Path) -> Function:
    """Open a file as its recipient does: an ``.onnx`` without trust."""
    return open_export(path, torch.device("cpu"), trust=path.suffix == ".pt2")[0]


def _check_parity(parity: Mapping[str, float]) -> None:
    for name, worst in parity.items():
        if not worst <= TOLERANCE:
            raise RunError(
                f"the exported {name} differs from the live policy by {worst:.3g} on {PARITY_ROWS:,} random "
                f"observations (at most {TOLERANCE:g} allowed): nothing was written"
            )
