"""Fits a timing model to logs of real (or simulated) engines: per-step logs, or only per-request TTFT and ITL.

Everything is a row "this mixture of prefill and decode work took so long"; robust regression of relative errors finds
the coefficients of `FormulaTiming`, a part of the rows is held out to say how good it is, and terms that the data
cannot tell apart are named and left out instead of guessed.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibrate_logs import Steps, read_log, steps_from_metrics, steps_from_requests, steps_from_rows
from .timing import FormulaTiming

__all__ = ["Calibration", "Steps", "fit", "read_log", "steps_from_metrics", "steps_from_requests", "steps_from_rows"]

Column = NDArray[np.float64]
NEEDED = 20                             # rows of a kind of work
HELD_OUT = 0.2
STRONG = 6.0                            # of the criterion: what a later form has to be better by
SPREAD = 3e-4                           # part of a column that the others do not explain: below, it is theirs


SHAPES = (
    ("prefill.constant", "prefill.tokens"), ("prefill.constant", "prefill.tokens", "prefill.attention"),
    ("prefill.constant", "prefill.tokens", "prefill.tokens_squared"),
), (
    ("decode.constant", "decode.batch"), ("decode.constant", "decode.batch", "decode.context_sum"),
    ("decode.constant", "decode.batch", "decode.kv_tokens"), ("decode.constant", "decode.kv_tokens"),
    ("decode.constant", "decode.kv_tokens", "decode.kv_tokens_squared"),
    ("decode.constant", "decode.batch", "decode.kv_tokens", "decode.kv_tokens_squared"),
)
"""Forms that are tried for each part, simple ones first."""


@dataclass
class Calibration:
    """A fitted model and how far to trust it.

    Parameters
    ----------
    model : FormulaTiming
    errors : dict
        Relative errors on held-out rows, by kind of step: "median", "p90", "bias", "rows".
    doubts : list of str
        What the data cannot say.
    """

    model: FormulaTiming
    errors: dict[str, dict[str, float]]
    doubts: list[str] = field(default_factory=list)


def fit(steps: Steps, seed: int = 0, held_out: float = HELD_OUT) -> Calibration:
    """Find the model that explains observed steps.

    Parameters
    ----------
    steps : Steps
    seed : int
        Of the choice of held-out rows.
    held_out : float
        Their share, above 0 and below 1.

    Returns
    -------
    Calibration

    Raises
    ------
    ValueError
        There are too few steps, or none of a kind; or SciPy is missing (extra `calibrate`).
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must be above 0 and below 1, got {held_out}")
    steps = steps.pick(np.flatnonzero((steps.ms > 0) & ((steps.tokens > 0) | (steps.decodes > 0))))
    counts = {"prefill": int((steps.tokens > 0).sum()), "decode": int((steps.decodes > 0).sum())}
    for kind, count in counts.items():
        if count < NEEDED:
            raise ValueError(f"the data have {count} steps with {kind} work and at least {NEEDED} are needed: nothing "
                             f"can be said of {kind} times")
    chosen = np.random.default_rng(seed).random(len(steps)) < held_out
    train, test = steps.pick(np.flatnonzero(~chosen)), steps.pick(np.flatnonzero(chosen))
    terms = train.terms()
    doubts: list[str] = []
    best: tuple[float, dict[str, float], list[str]] | None = None
    for first in SHAPES[0]:
        for second in SHAPES[1]:
            names, said = _told_apart([*first, *second], terms, train.ms)
            coefficients, unlikely = _regress(names, terms, train.ms)
            if best is None or unlikely < best[0] - STRONG:
                best = (unlikely, coefficients, said)
    assert best is not None
    _, coefficients, doubts = best
    model = _model(coefficients, {"rows": len(steps), **{f"{kind}_rows": count for kind, count in counts.items()}})
    predicted = _predict(coefficients, test.terms())
    errors = {}
    for kind, rows in (("prefill", test.tokens > 0), ("decode only", test.tokens == 0), ("all", test.ms > 0)):
        if rows.any():
            error_of = predicted[rows] / test.ms[rows] - 1.0
            errors[kind] = {"median": float(np.median(np.abs(error_of))),
                            "p90": float(np.quantile(np.abs(error_of), 0.9)), "bias": float(np.median(error_of)),
                            "rows": int(rows.sum())}
    model.about["held_out_errors"] = errors
    model.about["doubts"] = doubts
    return Calibration(model, errors, doubts)


def _told_apart(names: list[str], terms: Mapping[str, Column], ms: Column) -> tuple[list[str], list[str]]:
    """The names without those whose columns the ones before explain, and a sentence for each of these."""
    kept: list[str] = []
    said = []
    basis: list[Column] = []
    for name in names:
        column = terms[name] / ms
        size = float(np.linalg.norm(column))
        rest = column.copy()
        for known in basis:
            rest -= known * (known @ rest)
        left = float(np.linalg.norm(rest))
        if size == 0.0 or left < SPREAD**0.5 * size:
            if size == 0.0:
                said.append(f"{name}: nothing of it is in the data; taken as 0")
            else:
                said.append(f"{name}: the data cannot tell it from {' and '.join(kept)} (it always goes with them); "
                            "taken as 0, so that other mixtures than those in the data may be far off")
            continue
        kept.append(name)
        basis.append(rest / left)
    return kept, said


def _regress(names: Sequence[str], terms: Mapping[str, Column], ms: Column) -> tuple[dict[str, float], float]:
    """Coefficients by robust regression of relative errors, and their Bayesian information criterion (lower: better).

    The errors are taken as Cauchy distributed: outliers, such as pauses of the engine, hardly count.
    """
    try:
        from scipy.optimize import least_squares, lsq_linear
    except ImportError:
        raise ValueError("calibration needs SciPy: pip install 'mocker-llm[calibrate]'") from None
    matrix = np.stack([terms[name] / ms for name in names], axis=1)
    scale = np.linalg.norm(matrix, axis=0)
    matrix = matrix / scale
    low = np.array([-np.inf if name.endswith("squared") else 0.0 for name in names])
    start = lsq_linear(matrix, np.ones(len(ms)), bounds=(low, np.inf)).x

    def ratio(x: Column) -> Column:
        return np.asarray(np.maximum(matrix @ x, 1e-9))

    def errors(x: Column) -> Column:           # as logarithms: too short counts as too long
        return np.asarray(np.log(ratio(x)))

    def width(x: Column) -> float:
        return max(1.4826 * float(np.median(np.abs(errors(x)))), 1e-9)

    for _ in range(2):                         # the width of the bulk, once outliers count less
        start = least_squares(errors, np.maximum(start, low + 1e-12), bounds=(low, np.inf), loss="cauchy",
                              jac=lambda x: matrix / ratio(x)[:, None], f_scale=width(start), x_scale="jac").x
    spread = width(start)
    unlikely = 2.0 * (len(ms) * np.log(spread) + np.log1p((errors(start) / spread) ** 2).sum())
    unlikely += len(names) * np.log(len(ms))
    return dict(zip(names, (start / scale).tolist(), strict=True)), float(unlikely)


def _predict(coefficients: Mapping[str, float], terms: Mapping[str, Column]) -> Column:
    return np.asarray(sum(value * terms[name] for name, value in coefficients.items()))


def _model(coefficients: Mapping[str, float], about: dict[str, Any]) -> FormulaTiming:
    parts = [[coefficients.get(f"{part}.{term}", 0.0) for term in terms]
             for part, terms in (("prefill", FormulaTiming.PREFILL_TERMS), ("decode", FormulaTiming.DECODE_TERMS))]
    return FormulaTiming(parts[0], parts[1], about)
