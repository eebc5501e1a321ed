"""A file in place of a device's memory, on both sides of ``pql.remote.process.near``."""

import os
import tempfile

import numpy as np
import torch

from pql.envs.toy import Counter
from pql.remote.process import shared_cuda

WAITED = []
FREED = []


def allocate(size, device):
    file, path = tempfile.mkstemp()
    os.ftruncate(file, size)
    os.close(file)
    return path, path


def shared_tensors(path, places, device):
    memory = np.memmap(path, np.uint8, "r+")
    found = {}
    for name, (dtype, shape, offset) in places.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        found[name] = torch.from_numpy(memory[offset : offset + size].view(dtype).reshape(shape))
    return found


PRETENCE = {
    "usable": lambda device: True,
    "allocate": allocate,
    "attach": lambda handle, device: handle,
    "shared_tensors": shared_tensors,
    "wait": WAITED.append,
    "free": lambda path, device: FREED.append(path),
}


class Pretending(Counter):
    """A simulator whose process uses files as devices."""

    def __init__(self, *args, attach=True, **kwargs):
        super().__init__(*args, **kwargs)
        for name, function in PRETENCE.items():
            setattr(shared_cuda, name, function)
        if not attach:
            shared_cuda.attach = refuse

    def step(self, action):
        before = len(WAITED)
        step = super().step(action)
        assert len(WAITED) == before  # a step's results are waited for once, after they were written
        return step


def refuse(handle, device):
    raise OSError("CUDA_ERROR_INVALID_CONTEXT")
