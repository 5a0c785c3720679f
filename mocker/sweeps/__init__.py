"""Many simulations of one workload: configurations, where they run, their table and their file."""
from .configs import config_key, grid, simulate_keywords
from .run import sweep
from .table import SweepTable

__all__ = ["SweepTable", "config_key", "grid", "simulate_keywords", "sweep"]
