"""Count the CUDA kernels of compiled updates and steps, without a GPU: more than the bounds are an error.

    python tools/gpu/kernels.py [--case pql2]

Bodies are recorded on the CPU. Their graphs are moved to CUDA on fake tensors, and Inductor writes its code for compute
capability 9.0, which is neither compiled nor run. It needs a CUDA build of torch, and no driver. Torch is told that it
has a device, so the process is of no other use. Tried with torch 2.11.0+cu130.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from pql.config.compose import compose
from pql.engine import compiled
from pql.engine.executors import Inline
from pql.engine.graph import Graph
from pql.engine.inductor import SETTINGS
from pql.run.build import build

COMMON = "task=cartpole_swingup scale=gpu num_envs=4096 device=cpu graphs=off placement.compile=on"
ONE = "algo.v_per_step=1 algo.p_per_v=1 replay.capacity=500000"
V, P, LEARNER, STEP = (*(f"the updates of worker {name}" for name in ("v", "p", "learner")), "a step of the collector")
WIDE = "algo.batch_size=8192 algo.critic.hidden=[512,256,128]"
CASES = {
    "pql2": (f"algo=pql2 {ONE}", {V: (57, 14), P: (52, 14), STEP: (32, 3)}),
    "pql2 wide": (
        f"algo=pql2 {ONE} {WIDE} algo.policy.hidden=[512,256,128]",
        {V: (74, 19), P: (68, 19), STEP: (34, 4)},
    ),
    "pql": (f"algo=pql {ONE}", {V: (50, 19), P: (50, 19), STEP: (33, 4)}),
    "fasttd3": (f"algo=fasttd3 {ONE} {WIDE}", {V: (55, 19), P: (52, 19), STEP: (33, 4)}),
    "ppo": ("algo=ppo", {LEARNER: (72, 22), STEP: (33, 4)}),
}
"""By name: settings, and for each body the kernels of its largest function and of these products, as last counted."""

SPARE = 1.1
"""Times what was counted: how many kernels may be there."""

SIZES = {"multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "warp_size": 32}
SIZES |= {"major": 9, "regs_per_multiprocessor": 65536}
"""What an H100 says of itself."""


class WrittenError(Exception):
    """Carries the code that Inductor has written."""


def stand_in() -> None:
    """Have torch believe in one device of compute capability 9.0, and Inductor stop when its code is written."""
    import torch._inductor.graph as lowering
    import triton
    from torch._dynamo import utils
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import hints
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    memory = {"total_memory": 80 * 2**30, "L2_cache_size": 50 * 2**20, "max_threads_per_block": 1024}
    shared = {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448}
    about = {"type": "cuda", "index": 0, "minor": 0, "cc": 90, "name": "NVIDIA H100", "gcnArchName": ""}
    shared |= {"shared_memory_per_multiprocessor": 233472}
    properties = type("Properties", (), about | SIZES | memory | shared)
    fields = hints.DeviceProperties._fields
    more = {"max_threads_per_block": 1024} if "max_threads_per_block" in fields else {}
    one = hints.DeviceProperties(type="cuda", index=0, cc=90, **SIZES, **more)

    def answer(value: Any) -> Any:
        return lambda *args, **kwargs: value

    device, here, interface = torch.device("cuda", 0), torch.cuda, CudaInterface
    target = {"get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0}
    target |= {"get_active_torch_device": device, "get_device_capability": (9, 0)}
    driver = type("Driver", (), {"launcher_cls": None, **{k: answer(v) for k, v in target.items()}})
    state = torch.zeros(16, dtype=torch.uint8)
    patches: list[tuple[Any, str, Any]] = [(hints.DeviceProperties, "create", one), (here, "is_available", True)]
    patches += [(here, "is_initialized", True), (here, "device_count", 1), (here, "get_device_properties", properties)]
    patches += [(here, name, 0) for name in ("current_device", "_exchange_device", "_maybe_exchange_device")]
    patches += [(here, "get_device_capability", (9, 0)), (here, "_lazy_init", None), (here, "synchronize", None)]
    patches += [(place, "get_rng_state", state) for place in (here, here.random)]
    patches += [(here, "set_rng_state", None), (torch._C, "_cuda_getDevice", 0)]
    patches += [(fake_tensor, "init_gpu_context", None), (utils, "preserve_rng_state", contextlib.nullcontext())]
    patches += [(interface, "get_compute_capability", 90), (interface, "is_triton_capable", True)]
    patches += [(interface, "is_available", True), (interface, "raise_if_triton_unavailable", None)]
    patches += [(interface, "current_device", 0), (interface.Worker, "get_device_properties", properties)]
    for place, name, value in patches:
        setattr(place, name, staticmethod(answer(value)) if isinstance(place, type) else answer(value))
    torch._C._ensureCUDADeviceGuardSet()
    triton.runtime.driver.set_active(driver())

    def stop(self: Any) -> None:
        made = self.codegen()
        code = made[0] if isinstance(made, tuple) else made
        raise WrittenError(getattr(code, "value", code))

    for name in ("_compile_to_module", "compile_to_module"):
        setattr(lowering.GraphLowering, name, stop)


def code_of(module: torch.fx.GraphModule, example: Sequence[Tensor]) -> str:
    """Return what Inductor writes for a graph of CPU tensors like ``example``, moved to CUDA."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        here, there = (
            [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=where) for t in example]
            for where in ("cpu", "cuda")
        )
        traced = make_fx(functionalize(lambda *given: module(*given)), select_decomp_table(), "real")(*here)
        for node in traced.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        traced.recompile()
    FakeTensorProp(traced, mode).propagate(*there)
    settings = {**SETTINGS, "force_disable_caches": True, "compile_threads": 1}
    with mode, config.patch(settings):
        try:
            compile_fx_inner(traced, there)
        except Exception as error:  # Inductor wraps ours
            inner: BaseException | None = error
            while inner is not None and not isinstance(inner, WrittenError):
                inner = inner.__cause__ or inner.__context__
            if inner is None:
                raise
            return str(inner)
    raise AssertionError("Inductor wrote no code")


def counts(code: str) -> tuple[int, int]:
    """Return the kernels that ``code`` launches, and how many of these are products of cuBLAS."""
    call = code[code.index("def call(") :]
    products = len(re.findall(r"extern_kernels\.\w+\(", call))
    return len(re.findall(r"triton_\w+\.run\(", call)) + products, products


def count(settings: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each body of a run, the kernels of its largest function, and how many of these are products."""
    found: dict[str, list[tuple[int, int]]] = {}
    parts = build(compose([*COMMON.split(), *settings.split()]), executor=Inline())

    def inductor(module: torch.fx.GraphModule, example: list[Tensor], text: str) -> Any:
        name = parts.preparation().partition(" (")[0]
        found.setdefault(name, []).append(counts(code_of(module, example)))
        return lambda given: module(*given)

    compiled.inductor = inductor
    compiled.Program.difference = lambda self: None  # type: ignore[method-assign]
    parts.prepare()
    parts.close()
    yield from ((name, *max(each)) for name, each in found.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="only this one")
    only = parser.parse_args(argv).case
    if torch.version.cuda is None:
        print(f"kernels.py: torch {torch.__version__} cannot generate code for CUDA: install a CUDA build of torch")
        return 2
    stand_in()
    nothing = staticmethod(lambda *args: contextlib.nullcontext())
    Graph.possible, Graph.place, Graph.finish = staticmethod(lambda device: True), nothing, nothing  # type: ignore
    worst = 0
    for case, (settings, bounds) in CASES.items():
        if only in (None, case):
            found = [*count(settings)]
            if missing := {*bounds} - {name for name, *_ in found}:
                print(f"{case}: not compiled: {', '.join(sorted(missing))}")
                worst = 1
            for name, *now in found:
                most = [int(SPARE * n) for n in bounds.get(name, (0, 0))]
                over = any(n > m for n, m in zip(now, most, strict=True))
                worst |= over
                text = f"{case}, {name}: {now[0]} kernels, of these {now[1]} products; at most {most[0]}, {most[1]}"
                print(text + ": TOO MANY" * over, flush=True)
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
