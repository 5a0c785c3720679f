"""Statistics of a trace as one self-contained page, with plotly."""
from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..trace import Trace
from .stats import TraceStats

__all__ = ["plot"]


def plot(trace: Trace, stats: TraceStats, path: str | os.PathLike[str]) -> Path:
    """Draw arrival rate, length distributions and the reuse curve into an HTML file that needs no network.

    Parameters
    ----------
    trace : Trace
    stats : TraceStats
        Of the same trace.
    path : path-like
        Its name ends in .html.

    Raises
    ------
    ValueError
        Another ending.
    ImportError
        plotly is missing; names the extra to install.
    """
    name = Path(path)
    if name.suffix.lower() != ".html":
        raise ValueError(f"{name}: a plot is a web page; its name must end in .html")
    try:
        go: Any = importlib.import_module("plotly.graph_objects")
        make_subplots: Any = importlib.import_module("plotly.subplots").make_subplots
    except ImportError as error:
        raise ImportError(
            "a plot needs plotly, which is not installed: pip install 'mocker-llm[html]'") from error
    figure = make_subplots(
        rows=2, cols=2, subplot_titles=("Arrivals", "Lengths", "Prefix reuse", "Lengths, cumulative"))
    if stats.bin_ms > 0:
        middle = (np.arange(len(stats.arrivals)) + 0.5) * stats.bin_ms / 1e3
        figure.add_trace(go.Scatter(x=middle, y=stats.arrivals / stats.bin_ms * 1e3, line_shape="hvh",
                                    name="requests/s"), row=1, col=1)
        figure.update_yaxes(title="requests/s", rangemode="tozero", row=1, col=1)
        figure.update_xaxes(title="time, s", row=1, col=1)
    for label, values, color in (("prompt", trace.input_length, "#ef553b"), ("answer", trace.output_length, "#ab63fa")):
        positive = values[values > 0]
        if len(positive):
            low, high = float(positive.min()), float(positive.max())
            counts, edges = np.histogram(positive, np.geomspace(low * 0.999, max(high, low) * 1.001, 60))
            figure.add_trace(go.Scatter(x=np.sqrt(edges[1:] * edges[:-1]), y=counts, line_shape="hvh", name=label,
                                        line_color=color),
                             row=1, col=2)
            share = np.linspace(0, 1, 201)
            figure.add_trace(go.Scatter(x=np.percentile(positive, share * 100), y=share, name=f"{label}, cumulative",
                                        line_color=color, showlegend=False),
                             row=2, col=2)
    for row, what in ((1, "requests"), (2, "share of requests")):
        figure.update_xaxes(title="tokens", type="log", row=row, col=2)
        figure.update_yaxes(title=what, rangemode="tozero", row=row, col=2)
    if stats.reuse is not None:
        sizes, ratios = stats.reuse.curve(100)
        figure.add_trace(go.Scatter(x=sizes, y=ratios, name="saved by an LRU cache"), row=2, col=1)
        figure.add_hline(y=stats.reuse.hit_ratio, line_dash="dash", annotation_text="unlimited cache", row=2, col=1)
        figure.update_xaxes(title="cache, blocks", type="log", row=2, col=1)
        figure.update_yaxes(title="share of prompt tokens", rangemode="tozero", row=2, col=1)
    figure.update_layout(title=f"{Path(trace.path).name or 'trace'}: {stats.requests:,} requests", height=850,
                         template="plotly_white")
    # A fixed name of the element: equal input gives equal bytes.
    figure.write_html(name, include_plotlyjs=True, full_html=True, div_id="trace")
    return name
