"""Imports of slots, which leave a process that can be forked."""

import os

import pytest

from nfdt.core.host.startup import without_allocator_threads

OPTIONS = "JE_ARROW_MALLOC_CONF"


@pytest.mark.parametrize(
    ("theirs", "inside"),
    [(None, "background_thread:false"), ("dirty_decay_ms:0", "dirty_decay_ms:0,background_thread:false")],
)
def test_the_allocator_of_pyarrow_starts_no_thread_and_keeps_its_other_options(monkeypatch, theirs, inside):
    monkeypatch.delenv(OPTIONS, raising=False)
    if theirs is not None:
        monkeypatch.setenv(OPTIONS, theirs)
    with without_allocator_threads():
        assert os.environ[OPTIONS] == inside
    assert os.environ.get(OPTIONS) == theirs
