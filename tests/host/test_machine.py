"""Amounts of memory, read from the kernel's files."""

import pytest

from nfdt.core.host.machine import Memory, memory

MEGABYTE = 2**20


@pytest.fixture
def root(tmp_path):
    """Provide the files of a machine of 1000 MB, 600 of which are available, without control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal:  {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {600 * 1024} kB\n")
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def megabytes(found):
    return found.total / MEGABYTE, found.available / MEGABYTE


def make_group(root, folder, most, used, cache="inactive_file", version=2):
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (most, used), strict=True):
        write(root, f"{folder}/{name}", value if isinstance(value, str) else str(value * MEGABYTE))
    write(root, f"{folder}/memory.stat", f"anon 5\n{cache} {10 * MEGABYTE}\n")


def test_a_machine_has_the_memory_that_the_kernel_reports(root):
    assert megabytes(memory(root)) == (1000, 600)


def test_this_machine_has_some():
    found = memory()
    assert 0 < found.available <= found.total


def test_a_container_has_what_its_limit_leaves(root):
    write(root, "proc/self/cgroup", "0::/\n")
    make_group(root, "sys/fs/cgroup", 300, 200)
    assert megabytes(memory(root)) == (300, 110)


def test_the_narrowest_group_above_a_process_counts(root):
    write(root, "proc/self/cgroup", "0::/job/step\n")
    make_group(root, "sys/fs/cgroup/job", 200, 150)
    make_group(root, "sys/fs/cgroup/job/step", "max", 100)
    assert megabytes(memory(root)) == (200, 60)


def test_groups_of_the_first_version_count_too(root):
    write(root, "proc/self/cgroup", "5:memory:/job\n4:cpu:/other\n")
    make_group(root, "sys/fs/cgroup/memory/job", 400, 100, cache="total_inactive_file", version=1)
    assert megabytes(memory(root)) == (400, 310)


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(root):
    write(root, "proc/self/cgroup", "0::/\n")
    make_group(root, "sys/fs/cgroup", 300, 350)
    assert memory(root).available == 0


def test_a_system_without_such_files_counts_pages(tmp_path):
    assert isinstance(memory(tmp_path), Memory)
    assert memory(tmp_path).total > 0
