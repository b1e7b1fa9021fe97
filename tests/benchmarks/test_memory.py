"""Peak memory is that of the whole process tree, and of no other process."""

import os
import subprocess
import sys

import pytest

from benchmarks.memory import PeakMemory, tree_memory

CHILD = """
import subprocess, sys
code = "data = bytearray(80_000_000); print('ready', flush=True); input()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
grandchild = subprocess.Popen([sys.executable, "-c", code], **pipes)
grandchild.stdout.readline()
print("ready", flush=True)
input()
grandchild.communicate(b"end\\n")
"""


@pytest.mark.timeout(60)
def test_memory_of_grandchildren_counts():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert 80e6 < tree_memory(child.pid) < 160e6
    finally:
        child.communicate(b"end\n")
    assert tree_memory(child.pid) == 0, "the process has ended"


@pytest.mark.timeout(60)
def test_peak_remembers_memory_that_was_freed():
    before = tree_memory(os.getpid())
    with PeakMemory(os.getpid(), interval=0.001) as memory:
        data = bytearray(100_000_000)
        seen_at = memory.peak
        while memory.peak < before + 90e6:
            pass
        del data
    assert memory.peak >= before + 90e6 > seen_at or seen_at >= before + 90e6
    assert tree_memory(os.getpid()) < before + 50e6
