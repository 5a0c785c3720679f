"""Synthetic workloads: arrivals, lengths, shared prefixes and sessions, all from one seed.

`Recipe(1000, arrivals="poisson:10", input="lognormal:512,1").trace()` is a trace like one from a file.
"""
from .arrivals import Arrivals, Curve, Diurnal, Gaps, OnOff, Ramp, Rate, Steady
from .distributions import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Normal,
    Uniform,
    Zipf,
)
from .prompts import PrefixTree
from .recipe import Recipe, parse_arrivals, parse_distribution

__all__ = [
    "Arrivals", "Constant", "Curve", "Distribution", "Diurnal", "Empirical", "Exponential", "Gaps", "LogNormal",
    "Normal", "OnOff", "PrefixTree", "Ramp", "Rate", "Recipe", "Steady", "Uniform", "Zipf", "parse_arrivals",
    "parse_distribution",
]
