"""Searches over configurations: the cheapest that keeps its bounds, the highest rate, the front of cost and latency."""
from .optimize import OptimizeResult, ParetoResult, optimize, pareto_front
from .rate import RateResult, highest_rate
from .space import Between

__all__ = ["Between", "OptimizeResult", "ParetoResult", "RateResult", "highest_rate", "optimize", "pareto_front"]
