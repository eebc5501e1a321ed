"""``pql`` on a machine with only NumPy, grpcio and a simulator: without torch, Hydra or an installed pql.

Such a machine is simulated by a folder of links to the packages and a Python without its site-packages.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = """
import importlib.util, sys
def mount(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
sys.path[:0] = [{lib!r}, {tests!r}]
mount("pql", {root!r} + "/pql")
missing = [name for name in ("torch", "hydra", "omegaconf", "rich") if importlib.util.find_spec(name) is None]
assert len(missing) == 4, missing
from pql.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""
SIMULATORS = {"gymnasium": ("gymnasium", "farama_notifications", "cloudpickle"), "atari": ("ale_py",)}


def command(folder: Path, *simulators: str) -> list[str]:
    """Return the command that runs ``pql`` there, to be followed by its arguments. ``folder``: for the links."""
    lib = folder / "lib"
    lib.mkdir(exist_ok=True)
    for name in ("numpy", "grpc", "typing_extensions", *(p for s in simulators for p in SIMULATORS[s])):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin)
        found = [origin.parent if spec.submodule_search_locations else origin]
        found += found[0].parent.glob(f"{name}.libs")
        found += found[0].parent.glob(f"{name}-*.dist-info")
        for path in found:
            if not (lib / path.name).exists():
                (lib / path.name).symlink_to(path)
    start = folder / "start.py"
    start.write_text(START.format(lib=str(lib), root=str(ROOT), tests=str(ROOT / "tests" / "support")))
    return [sys.executable, "-I", "-S", str(start)]
