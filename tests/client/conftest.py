"""Fixtures: a fake job server and connections to it; models and data where Keras is needed."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from nfdt_client.connection import JobsClient

from tests.support import fake_server


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch, tmp_path_factory):
    for name in [name for name in os.environ if name.startswith("NFDT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture
def fake():
    server = fake_server.start()
    yield server
    server.grpc_server.stop(None)


@pytest.fixture
def connection(fake):
    link = JobsClient(fake.address, fake_server.TOKEN, reconnect_s=5)
    yield link
    link.close()
