"""Freed memory is kept for the next activations."""

import pytest
from support.scripts import run_python

pytestmark = pytest.mark.processes

FAULTS = """
import resource, sys
import torch
from marl_collect.training.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(25_000_000)  # 100 MB, above every dynamic threshold of glibc.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
assert keep_freed_memory()
first = faults()
print(before, first, faults())
"""


def test_large_tensors_reuse_the_pages_of_freed_ones() -> None:
    process = run_python("-c", FAULTS, check=True, interpreter=True)
    before, _first, after = map(int, process.stdout.split())
    assert before > 1_000  # Otherwise the page size or the C library is another.
    assert after < before / 2  # A freed block may be split once.
