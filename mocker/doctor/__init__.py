"""The trace doctor: statistics of a trace, what looks wrong in it, and plots.

`statistics(trace)` describes, `check(trace)` lints, `plot` draws; `mocker trace` is the same on the command line.
"""
from .lints import LINTS, Finding, check
from .plots import plot
from .reuse import Reuse, prefix_reuse
from .stats import Distribution, TraceStats, statistics
from .text import findings_text, sparkline, stats_text

__all__ = [
    "LINTS", "Distribution", "Finding", "Reuse", "TraceStats", "check", "findings_text", "plot", "prefix_reuse",
    "sparkline", "statistics", "stats_text",
]
