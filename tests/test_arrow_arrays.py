"""Columns to Arrow and back, against what pyarrow itself makes of them."""
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import mocker
from mocker.arrow_arrays import arrow_array, nulls, numbers

pa = pytest.importorskip("pyarrow")

TYPES = [np.int8, np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64, np.bool_]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_numbers_as_pyarrow_makes_them(dtype, n):
    rng = np.random.default_rng(n)
    values = rng.integers(0, 100, n).astype(dtype)
    for missing in (None, np.zeros(n, bool), np.ones(n, bool), rng.random(n) < 0.3):
        ours = arrow_array(values, missing)
        ours.validate(full=True)
        assert ours.equals(pa.array(values, mask=missing))
    assert arrow_array(np.repeat(values, 2)[::2]).equals(pa.array(values))


def test_text_as_pyarrow_makes_it():
    for values in ([], ["a", "", "ü\U0001f600", "x" * 1000], ["a", None, "b"], [None, None]):
        ours = arrow_array(np.array(values, object))
        ours.validate(full=True)
        assert ours.equals(pa.array(values, pa.string()))
    missing = np.array([True, False])
    assert arrow_array(np.array(["a", "b"]), missing).to_pylist() == [None, "b"]
    assert arrow_array(np.array([1, "b"], object)[:1]).equals(pa.array([1]))
    with pytest.raises(UnicodeEncodeError):
        arrow_array(np.array(["\ud800"], object))


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.timestamp("ms"),
                                  pa.timestamp("us", tz="UTC"), pa.duration("s")])
def test_values_and_nulls_of_slices(kind):
    given = pa.array([5, None, 7, 0, None, 9, 11, 2, None, 4, 1], pa.int64()).cast(kind)
    plain = pa.array([3, 1, 2], pa.int64()).cast(kind)
    for array in (given, given[3:], given[1:2], given[5:8], given[:0], plain, plain[1:]):
        want = [0 if value is None else value for value in array.cast(pa.int64()).to_pylist()]
        assert numbers(array).tolist() == want
        assert nulls(array).tolist() == [value is None for value in array.to_pylist()]
    assert nulls(pa.nulls(3)).tolist() == [True] * 3


def test_no_pandas_for_parquet(tmp_path):
    """Importing pandas takes longer than everything else in such a replay."""
    code = ("import sys, mocker; from mocker.formats.write import write;"
            "t = mocker.Trace.load(mocker.sample_trace_path());"
            f"write(t, {str(tmp_path / 't.parquet')!r}); t = mocker.Trace.load({str(tmp_path / 't.parquet')!r});"
            "r = mocker.simulate(t, num_workers=2, recording=mocker.Recording());"
            f"r.write_parquet({str(tmp_path / 'r.parquet')!r}); r.write_timeseries({str(tmp_path / 's.parquet')!r});"
            "print('pandas' in sys.modules, len(t))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", str(len(mocker.Trace.load(mocker.sample_trace_path())))]
