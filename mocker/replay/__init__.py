"""Replays of workloads through a simulated cluster; ``python -m mocker.replay`` is the command line."""
from ..workload import SyntheticSpec
from .api import run_synthetic_trace_replay, run_trace_replay, simulate

__all__ = ["SyntheticSpec", "run_synthetic_trace_replay", "run_trace_replay", "simulate"]
