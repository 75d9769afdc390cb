"""What loading a model takes of the host's memory: `loaded_memory.py FOLDER SMALL WAY...`.

Prints a line of JSON for each way, of a process that loads nothing else: bytes of the weights that it holds then, and
by how many bytes it was larger than before, at the end and at most. SMALL is a model of the same family; loading it
first brings in the code.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import torch

from worker.cuda.dense import DenseModel
from worker.freed_memory import give_back_freed
from worker.model_config import load_config
from worker.models import model_class
from worker.models.decoder import Decoder
from worker.weights import iter_weights

WAYS = ("bfloat16", "int4", "float32", "device")
HOARDED = "device, all read before"


def load(folder: Path, way: str) -> Decoder:
    """In a type that a CPU holds it in, or on a device, of which this process's memory holds nothing.

    With `HOARDED` everything is read before anything is built: the second copy that must not be.
    """
    config = load_config(folder)
    weights = iter_weights(folder, config)
    if way in ("device", HOARDED):
        read = iter(list(weights)) if way == HOARDED else weights
        return DenseModel(config, read, torch.bfloat16, torch.device("meta"), 64)
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    return model_class(config)(config, weights, dtype, torch.device("cpu"), 64, way == "int4")


def resident(what: str) -> int:
    """Bytes that /proc tells of: VmRSS is now, VmHWM the most so far."""
    [kilobytes] = re.findall(rf"^{what}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) << 10


def measure(folder: Path, small: Path, way: str) -> dict[str, int]:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    load(small, way)
    give_back_freed()
    before = resident("VmRSS")
    model = load(folder, way)
    held = 0 if model.device.type == "meta" else model.weight_bytes
    return {"held": held, "end": resident("VmRSS") - before, "peak": resident("VmHWM") - before}


if __name__ == "__main__":
    for way in sys.argv[3:]:
        child = os.fork()
        if not child:
            print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]), way)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert not status, way
