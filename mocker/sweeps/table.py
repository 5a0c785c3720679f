"""The table that a sweep returns: a row per configuration, as NumPy columns, Arrow, pandas or dicts."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..extras import import_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = dict[str, Any]


class SweepTable:
    """Rows of a sweep, in the order of the configurations.

    Parameters
    ----------
    configs : sequence of dict
        The configuration of each row.
    outcomes : sequence of dict
        ``{"report": {key: value}}`` or ``{"error": text}`` of each.
    keys : sequence of str
        The report keys.

    Attributes
    ----------
    config_names : list of str
        Names that the configurations set, in order of first appearance.
    keys : list of str
        Report keys.
    """

    def __init__(self, configs: Sequence[Row], outcomes: Sequence[Row], keys: Sequence[str]) -> None:
        self._configs, self._outcomes, self.keys = list(configs), list(outcomes), list(keys)
        self.config_names = list(dict.fromkeys(name for config in self._configs for name in config))

    def __len__(self) -> int:
        return len(self._configs)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def __repr__(self) -> str:
        failed = len(self.errors)
        return f"<SweepTable: {len(self)} configurations{f', {failed} failed' if failed else ''}>"

    @property
    def errors(self) -> dict[int, str]:
        """Row number to error text, of the configurations that failed."""
        return {i: outcome["error"] for i, outcome in enumerate(self._outcomes) if "error" in outcome}

    def config(self, row: int) -> Row:
        """The configuration of a row."""
        return dict(self._configs[row])

    def rows(self) -> list[Row]:
        """One dict a row: the configuration, then the report keys (None in a row that failed), then ``error``."""
        out = []
        for config, outcome in zip(self._configs, self._outcomes, strict=True):
            report = outcome.get("report", {})
            out.append({**{name: config.get(name) for name in self.config_names},
                        **{key: report.get(key) for key in self.keys}, "error": outcome.get("error")})
        return out

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """Name to NumPy column.

        Integers without gaps are int64, truth values bool, other numbers float64 with NaN for a missing value;
        everything else is a column of objects with None for a missing value.
        """
        rows = self.rows()
        return {name: _column([row[name] for row in rows]) for name in (*self.config_names, *self.keys, "error")}

    def best(self, key: str, *, largest: bool = False) -> Row:
        """The row with the smallest (or largest) value of a column; the first of equal ones.

        Raises
        ------
        ValueError
            No row has a value.
        """
        rows = [row for row in self.rows() if row.get(key) is not None]
        if not rows:
            raise ValueError(f"no configuration has a value of {key!r}")
        return (max if largest else min)(rows, key=lambda row: row[key])

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` (needs pandas)."""
        return import_extra("pandas", "pandas", "to_pandas").DataFrame(self.columns)

    def to_arrow(self) -> Any:
        """A `pyarrow.Table` with nulls for missing values (needs pyarrow)."""
        pa = import_extra("pyarrow", "parquet", "to_arrow")
        rows = self.rows()
        arrays = {}
        for name, column in self.columns.items():
            values = [row[name] for row in rows]
            if column.dtype.kind == "O" and not all(value is None or isinstance(value, str) for value in values):
                values = [None if value is None else str(value) for value in values]
            arrays[name] = pa.array(values, pa.string() if column.dtype.kind == "O" else pa.from_numpy_dtype(
                column.dtype))
        return pa.table(arrays)

    def write_parquet(self, path: Any) -> None:
        """Write `to_arrow` to a Parquet file (needs pyarrow)."""
        from ..report import write_atomically

        table = self.to_arrow()
        with write_atomically(path) as file:
            import_extra("pyarrow.parquet", "parquet", "write_parquet").write_table(table, file)

    def write_csv(self, path: Any) -> None:
        """Write a CSV file, empty where a value is missing."""
        import csv
        import io

        from ..report import write_atomically

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [*self.config_names, *self.keys, "error"]
        writer.writerow(names)
        writer.writerows([["" if row[name] is None else row[name] for name in names] for row in self.rows()])
        with write_atomically(path) as file:
            file.write(text.getvalue().encode())

    def text(self, keys: Sequence[str] | None = None) -> str:
        """A text table: what differs between the configurations, and the given keys (all by default)."""
        rows = self.rows()
        differ = [name for name in self.config_names if len({str(row[name]) for row in rows}) > 1]
        names = [*differ, *(self.keys if keys is None else keys), *(["error"] if self.errors else [])]
        cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
        return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip()
                         for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _column(values: list[Any]) -> NDArray[Any]:
    kinds = {type(value) for value in values}
    if kinds and kinds <= {bool}:
        return np.array(values, bool)
    if kinds and kinds <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            kinds = {object}
    if kinds <= {int, float, type(None)} and kinds & {int, float}:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), object)
    for i, value in enumerate(values):         # one by one: NumPy would take a list apart
        column[i] = value
    return column
