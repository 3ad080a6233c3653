"""What this process and its machine use; GPUs through a library that answers as NVIDIA's does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from nfdt.core.host.usage import EVERY_S, UsageMeter

MEGABYTE = 2**20
# Two GPUs; the second one does not say how much it computes, as a part of a GPU.
LIBRARY = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Use;
static char *gpus[] = {"GPU-0", "GPU-1"};
int nvmlInitWithFlags(unsigned flags) { return START; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index > 1) return 2;
  *handle = gpus[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  return nvmlDeviceGetHandleByIndex_v2(!strcmp(uuid, "GPU-0") ? 0 : !strcmp(uuid, "GPU-1") ? 1 : 2, handle);
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
  return snprintf(uuid, length, "%s", (char *) handle) < 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
  *memory = (Memory) {80, 50, 30};
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, Use *use) {
  *use = (Use) {75, 10};
  return handle == gpus[1] ? 3 : 0;
}
"""
PROGRAM = """
import json
from nfdt.core.host.usage import UsageMeter
meter = UsageMeter()
print(json.dumps([[vars(gpu) for gpu in meter.gpus()], meter.of_process()]))
"""


@pytest.fixture
def measured(tmp_path):
    """Return a function that measures a process with this CUDA_VISIBLE_DEVICES, beside a library of two GPUs."""

    def measure(visible: str, start: int = 0):
        (tmp_path / "nvml.c").write_text(LIBRARY.replace("START", str(start)))
        compiler = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "nvml.c")]
        subprocess.run(compiler, check=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "LD_LIBRARY_PATH": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(run.stdout)

    return measure


@pytest.mark.parametrize("visible", ["0,1", "GPU-0,GPU-1", "0,1,7"])
def test_gpus_that_a_process_may_use_are_measured(measured, visible):
    gpus, process = measured(visible)
    assert gpus == [
        {"uuid": "GPU-0", "use": 0.75, "memory_bytes": 30, "total_bytes": 80},
        {"uuid": "GPU-1", "use": None, "memory_bytes": 30, "total_bytes": 80},
    ]
    assert (process["gpu_use"], process["gpu_memory_bytes"]) == (0.75, 60)


@pytest.mark.parametrize(("visible", "start"), [("", 0), ("-1", 0), ("0", 9)], ids=["hidden", "none", "no driver"])
def test_without_gpus_nothing_is_said_of_them(measured, visible, start):
    gpus, process = measured(visible, start)
    assert gpus == []
    assert set(process) == {"cpu_s", "peak_memory_bytes", "memory_bytes"}


def test_memory_and_processor_time_of_this_process():
    clock = iter([0.0, 0.0, 10.0])  # at each look
    meter = UsageMeter({}, clock=lambda: next(clock))
    assert meter.of_machine()["cores"] == 0
    began = time.process_time()
    held = b"x" * (200 * MEGABYTE)
    while time.process_time() - began < 0.3:
        pass
    assert meter.of_process()["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    used = meter.of_machine()
    assert 0.03 <= used["cores"] < 0.2
    assert len(held) < used["memory_bytes"] <= used["peak_memory_bytes"] + MEGABYTE
    assert 0 < used["used_bytes"] < used["total_bytes"]
    assert used["machine_cores"] == psutil.cpu_count()


def test_a_look_lasts_a_second():
    times = [0.0]
    meter = UsageMeter({}, clock=lambda: times[0])
    first = meter.of_process()
    assert meter.due
    meter.of_machine()
    assert not meter.due
    held = b"x" * (100 * MEGABYTE)
    assert meter.of_process()["memory_bytes"] == first["memory_bytes"]
    times[0] = EVERY_S
    assert meter.due
    assert meter.of_process()["memory_bytes"] > first["memory_bytes"] + len(held) / 2
