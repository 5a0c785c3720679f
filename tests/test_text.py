"""Columns as text: numbers as `repr` writes them, missing values, quoting, and what is refused."""
import csv
import gzip
import io
import json
import math

import numpy as np
import pytest

from mocker._text import Writer, encoded, lines
from mocker.text import csv_lines, csv_text, json_lines, open_text


def column_text(values, missing=b"?"):
    return lines([b"", b"\n"], [values], missing).decode().splitlines()


def doubles():
    rng = np.random.default_rng(7)
    n = 20_000
    bits = rng.integers(0, 2**64, n, dtype=np.uint64)
    yield bits.view(np.float64)
    yield (bits >> np.uint64(12)).view(np.float64)                                  # below the normal ones
    yield (np.arange(4096, dtype=np.uint64) << np.uint64(52)).view(np.float64)      # powers of two
    yield np.nextafter((np.arange(1, 2046, dtype=np.uint64) << np.uint64(52)).view(np.float64), 0.0)
    yield 10.0 ** np.arange(-323, 309)
    yield rng.random(n) * 1e6
    yield np.round(rng.random(n) * 1e7, 3)
    yield rng.integers(0, 10**18, n) * 10.0 ** rng.integers(-30, 30, n)
    yield np.ldexp(rng.integers(1, 2**20, n).astype(float), rng.integers(-40, 40, n))  # too near for a fraction
    yield np.array([0.0, -0.0, 1e15, 1e16, 1e17, 2.0**53 + 2, 5e-324, 1.7976931348623157e308, 1e-4, 1e-5, -1.5])


@pytest.mark.parametrize("values", list(doubles()), ids=range(10))
def test_numbers_are_those_of_repr(values):
    assert column_text(values) == [repr(x) if math.isfinite(x) else "?" for x in values.tolist()]


def test_whole_numbers_and_missing_ones():
    tens = [10**k + d for k in range(1, 19) for d in (-1, 0, 1)]
    values = np.array([0, -1, 7, -9, 10, 100, 12345, 2**63 - 1, -2**63, *tens, *(-x for x in tens)])
    assert column_text(values) == [str(x) for x in values.tolist()]
    assert column_text((values, True))[:3] == ["0", "?", "7"]
    assert column_text(np.array([3, -1], np.int32)) == ["3", "-1"]
    assert column_text(np.array([0.5, np.nan, 3.0], np.float32)) == ["0.5", "?", "3.0"]


def test_rounded_and_scaled_numbers():
    """As NumPy rounds them, half to even, and `repr` writes them; no zero has a sign."""
    rng = np.random.default_rng(2)
    reals = np.concatenate([rng.integers(-10**6, 10**6, 5000) / 2,
                            rng.random(5000) * 10.0 ** rng.integers(-5, 12, 5000),
                            rng.integers(0, 10**7, 5000) / 1000, [0.0, -0.0, -0.0004, 0.0005, 1e12, 1e15, 2.0**50]])
    assert column_text((reals, "whole")) == [str(int(x)) for x in np.rint(reals).tolist()]
    assert column_text((np.array([np.nan, np.inf, 2.0**51, 7.5]), "whole")) == ["?", "?", "?", "8"]
    for factor in (1.0, 500.0, 1000.0):
        assert column_text((reals, factor)) == [repr(x + 0.0) for x in np.round(reals * factor, 3).tolist()]
    assert column_text((np.array([np.nan, -np.inf, 2.5]), 1.0)) == ["?", "?", "2.5"]


def test_long_texts_and_many_columns():
    rng = np.random.default_rng(1)
    texts = [bytes(rng.integers(97, 122, int(n), np.uint8)) for n in rng.integers(0, 200_000, 20)]
    out = lines([b"<", b"|", b"|", b">"], [texts, np.arange(20), np.arange(20) / 4], b"")
    assert out == b"".join(b"<%s|%d|%s>" % (text, i, repr(i / 4).encode()) for i, text in enumerate(texts))


def test_numbers_of_texts_and_hexadecimal():
    codes, texts = encoded(["b", None, "b", 7, None, 7.5], lambda value: str(value).encode())
    assert codes.tolist() == [0, 1, 0, 2, 1, 3]
    assert texts == [b"b", b"None", b"7", b"7.5"]
    values = np.random.default_rng(5).integers(-2**40, 2**40, 3000)[np.random.default_rng(6).integers(0, 3000, 9000)]
    numbers, words = encoded(values, lambda value: b"%d" % value)
    assert len(words) == len(set(words)) and [words[i] for i in numbers] == [b"%d" % value for value in values]
    numbers = np.array([0, 1, 255, 4096, 2**47 + 5, 2**48 - 1])
    out = lines([b"", b" ", b"\n"], [(codes, texts), (numbers, "hex")], b"").decode().splitlines()
    assert out == [f"{texts[c].decode()} {n:012x}" for c, n in zip(codes, numbers.tolist(), strict=True)]


def test_pages_are_written_whole():
    """What is written ends with a page, however long rows are, until the end; nothing is lost or doubled."""
    rng = np.random.default_rng(3)
    given, parts = [], []
    out = Writer(lambda part: parts.append(bytes(part)))
    for n in (0, 1, 1000, 20_000, 3):
        texts = [b"x" * int(k) for k in rng.integers(0, 60 if n > 3 else 400_000, n)]
        given += [b"a", lines([b"<", b",", b">\n"], [np.arange(n), texts], b"")]
        out.write(b"a")
        assert lines([b"<", b",", b">\n"], [np.arange(n), texts], b"", out) == b""
    before = len(parts)
    out.flush()
    out.flush()
    assert b"".join(parts) == b"".join(given)
    assert len(parts) == before + 1 and not any(len(part) % 4096 for part in parts[:-1])


def test_long_files_end_with_their_text(tmp_path):
    """The room that is set aside for a file of many megabytes is given back."""
    values = np.arange(200_000) / 7
    for name in ("long.txt", "long.txt.gz"):
        with open_text(tmp_path / name, 1) as out:
            for _ in range(5):
                lines([b"number ", b" of them\n"], [values], b"", out)
    text = (tmp_path / "long.txt").read_bytes()
    assert text == 5 * lines([b"number ", b" of them\n"], [values], b"") and len(text) > 2**24
    assert gzip.decompress((tmp_path / "long.txt.gz").read_bytes()) == text
    assert (tmp_path / "long.txt").stat().st_blocks * 512 < len(text) + 2**17
    with open_text(tmp_path / "short.txt") as out:             # of which more was to be expected
        lines([b"", b"\n"], [[b"x" * 200_000] * 5 + [b"y"] * 1000], b"", out)
    assert (tmp_path / "short.txt").stat().st_blocks * 512 < 1_002_005 + 2**17


@pytest.mark.parametrize(("pieces", "columns", "error"), [
    ([b""], [np.zeros(2)], "1 columns need 2 pieces, got 1"),
    ([b"", b"", b""], [np.zeros(2), np.arange(3)], "differ in length: 2 and 3"),
    ([b"", b""], [["text"]], "must be bytes, got str"),
    ([b"", b""], [(np.array([0, 1]), [b"one"])], "a number of a text is not below 1"),
])
def test_refused(pieces, columns, error):
    with pytest.raises((TypeError, ValueError), match=error):
        lines(pieces, columns, b"")


def test_json_lines():
    columns = {"a": np.array([0.5, np.nan]), "b%": np.array([-1, 2]), "c": np.array(["x\"\n", None], object),
               "d": np.array([True, False]), "e": np.array([[1, {"k": np.float64(2)}], "é"], object)}
    rows = [json.loads(line) for line in json_lines(["none", "c", *columns], columns).decode().splitlines()]
    assert rows == [{"none": None, "a": 0.5, "b%": None, "c": "x\"\n", "d": True, "e": [1, {"k": 2.0}]},
                    {"none": None, "a": None, "b%": 2, "c": None, "d": False, "e": "é"}]
    assert json_lines(["none"], {}) == b""


def test_csv_lines():
    columns = {"a,b": np.array([0.1, np.nan]), "n": np.array([-1, 2]), "m": np.array([-1, 2]),
               "s": np.array(["say \"x\", y\n", None], object), "i": np.array([np.inf, -0.0])}
    text = b",".join(map(csv_text, columns)) + b"\n" + csv_lines(columns, {"m"})
    assert list(csv.reader(io.StringIO(text.decode()))) == [
        ["a,b", "n", "m", "s", "i"], ["0.1", "-1", "", "say \"x\", y\n", "inf"], ["", "2", "2", "", "-0.0"]]
