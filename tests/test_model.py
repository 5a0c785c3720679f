"""The compiled core against the plain Python model on random scripts, pass by pass, with the books checked.

MOCKER_FUZZ sets how many scripts a family gets (default 150); `python tests/fuzz.py` runs long ones.
"""
from __future__ import annotations

import os

import pytest
from fuzz import difference
from model.scripts import FAMILIES

COUNT = int(os.environ.get("MOCKER_FUZZ", "150"))


@pytest.mark.parametrize("wild", [False, True], ids=["fitting", "wild"])
@pytest.mark.parametrize("family", FAMILIES)
def test_core_equals_model(family, wild):
    for seed in range(COUNT):
        found = difference(family, seed, wild)
        assert found is None, f"random_script({family!r}, {seed}, wild={wild}): {found}"
