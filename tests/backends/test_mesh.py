"""Number of devices of a worker, and the mesh of a ModelParallel as data."""

from __future__ import annotations

import json

import pytest

from nfdt.core.errors import UsageError
from nfdt.model.backends.mesh import Mesh, choose_devices

GPUS = ("gpu:0", "gpu:1", "gpu:2", "gpu:3")
CPUS = tuple(name.replace("gpu", "cpu") for name in GPUS)
MESH = Mesh((1, 2), ("rows", "parts"), "rows", ((".*kernel", (None, "parts")),), (("dense/kernel", (None, "parts")),))


@pytest.mark.parametrize(
    ("available", "wanted", "mesh", "emulated", "count"),
    [
        (GPUS, None, None, None, 4),
        (GPUS, "all", None, None, 4),
        (GPUS, 3, None, None, 3),
        (GPUS, None, MESH, None, 2),
        (CPUS, None, None, None, 1),
        (CPUS, "all", None, None, 4),
        (CPUS, None, None, 3, 3),
        (CPUS, None, None, 1, 1),
        (CPUS, 2, None, 3, 2),
        (CPUS, 2, MESH, None, 2),
    ],
)
def test_a_worker_computes_on_these_devices(available, wanted, mesh, emulated, count):
    assert choose_devices(available, wanted, mesh, emulated=emulated) == available[:count]


@pytest.mark.parametrize(
    ("wanted", "mesh", "emulated", "message"),
    [
        (
            5,
            None,
            None,
            r"devices_per_worker=5: expected as many devices in the process of w on a. Received: 4 \(gpu:0",
        ),
        (3, None, 2, r"devices_per_worker=3: expected .* Received: 2 \(gpu:0, gpu:1\)"),
        (None, None, 5, r"emulate.devices=5: expected as many devices in the process of w on a. Received: 4 "),
        (None, MESH, 1, r"mesh of the script's ModelParallel has 2: expected .* Received: 1 \(gpu:0\)"),
    ],
)
def test_too_few_devices_are_refused(wanted, mesh, emulated, message):
    with pytest.raises(UsageError, match=message) as refused:
        choose_devices(GPUS, wanted, mesh, emulated=emulated, owner="w on a")
    assert "more GPUs" in str(refused.value)


def test_a_mesh_travels_as_json():
    assert Mesh.from_json(json.loads(json.dumps(MESH.to_json()))) == MESH
    assert MESH.size == 2
