"""Lets test files import the helpers beside them; property tests are repeatable and never judged by the clock.

Measured times are asked anew and pages are made anew: nothing in the user's cache.
"""
import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ["MOCKER_AIC_MEMO"] = os.environ["MOCKER_PAGE_CACHE"] = "off"
sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
