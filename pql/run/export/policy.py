"""Loader of exported policies. Without trust it loads ``.onnx`` files only, and executes nothing from them.

``docs/export.md`` describes the files, ``docs/security.md`` how they are validated before use.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.config.files import parse_json, read_bytes, read_json
from pql.contract.bounds import Bounds
from pql.contract.env import Box
from pql.contract.spec_json import spec_from_dict
from pql.errors import ConfigError
from pql.run.base_policy import BasePolicy
from pql.run.export.onnx_check import check_onnx
from pql.run.store.manifest import check_export
from pql.types import Obs

INSTALL = "pip install 'pql-rl[export]'"
LARGEST = 2 << 30  # bytes of an export

Function = Callable[[Sequence[Tensor]], list[Tensor]]
"""Inputs in the order of ``metadata["inputs"]`` -> outputs in the order of ``metadata["outputs"]``."""


def unit_map(about: Mapping[str, Any], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function that maps an export's action to the environment contract's: to [-1, 1], or to a count from 0.
    ``about`` is the metadata's entry ``action``."""
    if about["scaled"] and "start" in about:  # not of a box
        start = torch.tensor(about["start"], device=device)
        return lambda action: action - start
    if not about["scaled"] or "low" not in about:
        return lambda action: action
    bounds = Bounds(Box(len(about["low"]), about["low"], about["high"], about.get("center"))).to(device)
    return (lambda action: action) if bounds.idle else bounds.unit


class ExportedPolicy(BasePolicy):
    """A policy loaded from its export. Like a run's ``Policy``, it returns actions in [-1, 1], or from 0 on.

    Args:
        path: ``policy.pt2`` or ``policy.onnx``.
        device: device of inputs and outputs. ONNX Runtime computes on the CPU.
        trust: load a ``.pt2``, with torch's loader, which runs code from the file; load an ``.onnx`` unchecked.

    Attributes:
        metadata: content of ``policy.json``.

    Raises:
        ConfigError: the file is missing, is not an export of pql or does not match the ``policy.json`` next to it, a
            package is missing, or a ``.pt2`` is not trusted.
    """

    def __init__(self, path: str | Path, device: str | torch.device = "cpu", trust: bool = False):
        self.path, self.device = Path(path), torch.device(device)
        if not self.path.is_file():
            raise ConfigError("policy", path, "a file")
        self._function, self.metadata = open_export(self.path, self.device, trust)
        self._to_unit = unit_map(self.metadata["action"], self.device)
        self.spec = spec_from_dict(self.metadata["spec"])
        inputs = {i["name"]: tuple(i["shape"][1:]) for i in self.metadata["inputs"]}
        self.groups = tuple(k.removeprefix("obs.") for k in inputs if k.startswith("obs."))
        self.state_shapes = {k.removeprefix("state."): s for k, s in inputs.items() if k.startswith("state.")}

    @torch.no_grad()
    def act(self, obs: Obs | Tensor, state: Obs) -> tuple[Tensor, Obs]:
        action, *after = self._function([*self.readable(obs).values(), *(state[k] for k in self.state_shapes)])
        return self._to_unit(action), dict(zip(self.state_shapes, after, strict=True))

    def digest(self) -> str:
        return sha256(read_bytes(self.path, LARGEST)).hexdigest()


def open_export(path: Path, device: torch.device, trust: bool) -> tuple[Function, dict[str, Any]]:
    """Return the function and the metadata of an export. Raises like :class:`ExportedPolicy`."""
    onnx = path.suffix == ".onnx"
    if not (onnx or trust):
        what = "--trust (trust=True) if the file is yours, since torch runs code from a .pt2; or an export as .onnx"
        raise ConfigError("policy", path, what)
    try:
        data = read_bytes(path, LARGEST)
        _check_sidecar(path, data)
        return _open_onnx(path, data, device, trust) if onnx else _open_pt2(data, device)
    except (OSError, ValueError) as error:
        raise ConfigError("policy", path, f"a {path.suffix} file that pql export wrote ({error})") from error


def _check_sidecar(path: Path, data: bytes) -> None:
    """Raise ``ValueError`` if the metadata next to a file belong to another file."""
    if (sidecar := path.with_suffix(".json")).exists():
        metadata = read_json(sidecar)
        known = metadata.get("sha256") if isinstance(metadata, dict) else None
        known = known.get(path.name) if isinstance(known, dict) else None
        if known is not None and known != sha256(data).hexdigest():
            raise ValueError(f"its hash is not the one in {sidecar.name} next to it")


def _open_pt2(data: bytes, device: torch.device) -> tuple[Function, dict[str, Any]]:
    """Load with torch's own loader, which unpickles and may run code from the file."""
    from torch.export.passes import move_to_device_pass

    extra: dict[str, Any] = {"metadata.json": ""}
    try:
        with quiet():
            program = torch.export.load(io.BytesIO(data), extra_files=extra)
            module = move_to_device_pass(program, device).module()
    except Exception as error:  # a damaged archive raises errors of many types
        raise ValueError(str(error)) from error
    metadata = parse_json(extra["metadata.json"])
    check_export(metadata)
    return (lambda inputs: list(module(*inputs))), metadata


def _open_onnx(path: Path, data: bytes, device: torch.device, trust: bool) -> tuple[Function, dict[str, Any]]:
    runtime = need("onnxruntime", "policy", path)
    if not trust:
        check_onnx(data)
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.load_model_format", "ONNX")
    try:
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        text = session.get_modelmeta().custom_metadata_map["pql"]
    except Exception as error:  # the runtime's own errors have no common base
        raise ValueError(str(error)) from error
    metadata = parse_json(text)
    check_export(metadata)
    names = [i["name"] for i in metadata["inputs"]]
    if names != [i.name for i in session.get_inputs()]:
        raise ValueError("its inputs differ from its metadata")

    def function(inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays: list[np.ndarray] = [x.cpu().numpy() for x in inputs]
        return [torch.from_numpy(y).to(device) for y in session.run(None, dict(zip(names, arrays, strict=True)))]

    return function, metadata


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporters' warnings and log messages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def need(package: str, setting: str, value: Any) -> Any:
    """Import an optional package."""
    import importlib

    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(setting, value, f"the package {package!r}, which is not installed: {INSTALL}") from error
