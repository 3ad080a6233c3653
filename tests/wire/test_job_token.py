from __future__ import annotations

import pytest

from nfdt.core.wire.job_token import worker_of, worker_token

KEY = "k" * 64


@pytest.mark.parametrize("name", ["worker-0", "a:b", "group 1"])
def test_a_worker_is_known_by_its_token(name):
    assert worker_of(KEY, worker_token(KEY, name)) == name


@pytest.mark.parametrize(
    "token",
    [
        "",
        KEY,
        ":",
        "worker-1",
        "worker-1:",
        worker_token("another job's key", "worker-1"),
        worker_token(KEY, "worker-0").replace("worker-0", "worker-1"),
        worker_token(KEY, "worker-1")[:-1],
        ":" + worker_token(KEY, "").partition(":")[2],
    ],
)
def test_any_other_token_belongs_to_no_worker(token):
    assert worker_of(KEY, token) is None


def test_a_worker_s_token_does_not_reveal_the_key():
    assert KEY not in worker_token(KEY, "worker-0")
