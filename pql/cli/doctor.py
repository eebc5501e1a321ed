"""``pql doctor``: report this machine and installation, missing packages and the commands that install them."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any

from pql.cli.tables import table
from pql.run.store.run_dir import version

CORE = ("pql-rl", "torch", "numpy", "safetensors", "hydra-core", "omegaconf", "rich")

# extra: (what it is for, its packages). One line each; pyproject.toml has the versions (a test compares the two).
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mujoco": ("the MuJoCo tasks", ("mujoco", "gymnasium")),
    "warp": ("the MuJoCo tasks on CUDA", ("mujoco", "gymnasium", "mujoco-warp", "warp-lang")),
    "gymnasium": ("task=gymnasium", ("gymnasium",)),
    "atari": ("the Atari games", ("ale-py", "gymnasium")),
    "remote": ("task=remote and pql actor", ("grpcio",)),
    "cluster": ("pql fleet", ("ray", "grpcio")),
    "tensorboard": ("logger=tensorboard and pql watch", ("tensorboard",)),
    "wandb": ("logger=wandb", ("wandb",)),
    "trackio": ("logger=trackio", ("trackio",)),
    "swanlab": ("logger=swanlab", ("swanlab",)),
    "report": ("pql report and compare", ("matplotlib", "scipy", "jinja2")),
    "sweep": ("pql sweep", ("optuna",)),
    "pbt": ("pql sweep --pbt", ("ray",)),
    "export": ("pql export", ("onnx", "onnxscript", "onnxruntime")),
    "hub": ("pql pull and push", ("huggingface-hub",)),
    "video": ("pql play", ("imageio", "imageio-ffmpeg", "pillow")),
    "demos": ("replay.demos of LeRobot and robomimic datasets", ("pyarrow", "h5py")),
    "viser": ("pql play --browser", ("mjviser",)),
    "peers": ("pql.wrap for rsl_rl and Stable-Baselines3", ("rsl-rl-lib", "stable-baselines3", "gymnasium")),
    "lab": ("pql.lab in rsl_rl, mjlab and Isaac Lab", ("tensordict",)),
    "bench": ("comparisons with other simulators", ("envpool",)),
    "docs": ("the documentation site", ("mkdocs-material", "mkdocstrings")),
    "dev": (
        "the test suite",
        ("pytest", "pytest-timeout", "pytest-xdist", "nbmake", "ipykernel", "hypothesis", "scipy", "ruff", "mypy"),
    ),
}


def doctor_report() -> str:
    """Return the whole report as text."""
    return "\n\n".join(["\n".join(machine_lines()), table(extras()), table(simulators())])


def machine_lines() -> list[str]:
    import torch

    from pql.engine.placement import available_cores, host_memory

    def gpu(i: int) -> str:
        found = torch.cuda.get_device_properties(i)
        return f"cuda:{i} {found.name} ({found.total_memory / 2**30:.0f} GiB)"

    gpus = ", ".join(gpu(i) for i in range(torch.cuda.device_count()))
    return [
        f"python {platform.python_version()}, {platform.platform()}",
        f"{available_cores()} of {os.cpu_count()} cores, {host_memory() / 2**30:.1f} GiB of memory free",
        f"GPUs: {gpus or 'none'} (torch built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'})",
        ", ".join(f"{name} {version(name) or '-'}" for name in CORE),
    ]


def extras() -> list[list[str]]:
    """Return a row per extra: its name, its use, ok or the command that installs it, and its packages' versions."""
    rows = [["extra", "for", "state", "packages"]]
    for extra, (use, packages) in EXTRAS.items():
        needed = requirements(extra)
        found = {package: version(package) for package in packages}
        wrong = {p for p, v in found.items() if v is None or (p in needed and not needed[p].contains(v, True))}
        installed = ", ".join(
            f"{p} {v or 'missing'}" + (f" (needs {needed[p]})" if v and p in wrong else "") for p, v in found.items()
        )
        rows.append([extra, use, f"pip install 'pql-rl[{extra}]'" if wrong else "ok", installed])
    return rows


def requirements(extra: str) -> dict[str, Any]:
    """Return package -> versions that this installation of pql requires for ``extra``."""
    from packaging.requirements import Requirement

    try:
        words: Iterable[str] = importlib.metadata.requires("pql-rl") or ()
    except importlib.metadata.PackageNotFoundError:
        words = ()
    asked = (r for r in map(Requirement, words) if r.marker is None or r.marker.evaluate({"extra": extra}))
    return {r.name: r.specifier for r in asked}


def simulators() -> list[list[str]]:
    """Return a row per state: tasks and robots that are available here, and those that are not, with the reason."""
    from pql.config.layers import Presets
    from pql.contract.registry import env_names

    presets = Presets()
    tasks = {task: presets.setting("task", task, "name") for task in presets.names("task") if task != "env"}
    tasks |= {name: name for name in env_names() if name not in tasks}
    states: dict[str, list[str]] = {"ok": []}
    for task, name in sorted(tasks.items()):
        states.setdefault(state_of(name), []).append(task)
    return [["state", "tasks"], *([state, ", ".join(names)] for state, names in states.items())]


def state_of(name: str) -> str:
    """Return "ok", or the command that installs the missing packages of an environment."""
    from pql.contract.registry import find_factory
    from pql.errors import ConfigError, first_line

    try:
        find_factory(name)
        with contextlib.suppress(ModuleNotFoundError):
            from pql.envs.mujoco.robots import TASKS, model_file

            if name in TASKS:
                model_file(TASKS[name])
        return "ok"
    except ConfigError as error:
        return error.allowed.rpartition(": ")[2]  # the command that installs it
    except Exception as error:  # installed, but broken; usually a third-party package
        return first_line(error)
