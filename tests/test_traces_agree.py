"""Every way to replay a trace gives the same events: segments or tokens, fast-forward or not, or the object API."""
from __future__ import annotations

import os

from fuzz import trace_difference

COUNT = int(os.environ.get("MOCKER_FUZZ", "150"))


def test_ways_agree():
    for seed in range(COUNT):
        found = trace_difference(seed)
        assert found is None, f"trace seed {seed}: {found}"
