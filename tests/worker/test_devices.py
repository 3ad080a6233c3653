"""State that a worker sets in its process."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from nfdt.core.host.keras_backend import Backend
from nfdt.worker import devices


@pytest.mark.parametrize(("backend", "seeds"), [("torch", [0, 1]), ("tensorflow", []), ("jax", [])])
def test_workers_on_pytorch_drop_out_different_units(monkeypatch, backend, seeds):
    torch, seen = ModuleType("torch"), []
    torch.manual_seed = seen.append
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(devices, "current_backend", lambda: Backend(backend, "for the test"))
    for worker in range(2):
        devices.seed_generator(worker)
    assert seen == seeds
