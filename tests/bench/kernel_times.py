"""Where the time of a pass on a card goes, by kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_MOST = 16  # kernels that are listed
_WIDTH = 60


def write_kernel_times(name: str, run: Callable[[], object], file: Path) -> None:
    """Append the longest kernels of one run, and how much of its time the device did something, to a file."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    begin = min(event.time_range.start for event in events)
    end = max(event.time_range.end for event in events)
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name[:_WIDTH], []).append(event.time_range.elapsed_us())
    busy = sum(map(sum, times.values()))
    lines = [
        f"{name}: {1e-3 * (end - begin):.2f} ms from the first kernel to the last, {1e-3 * busy:.2f} ms in kernels"
    ]
    for kernel, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:_MOST]:
        lines.append(f"  {kernel:{_WIDTH}} {len(each):5} times {1e-3 * sum(each):9.2f} ms")
    with file.open("a") as out:
        out.write("\n".join(lines) + "\n")
    print(f"kernels of {name}: in {file}", flush=True)
