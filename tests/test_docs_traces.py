"""docs/formats.md and docs/traces.md describe every format and every lint, and their example files can be read."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from mocker import Trace, formats
from mocker.doctor import LINTS

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize(("heading", "example"), [
    (section.split("\n")[0], example)
    for section in (DOCS / "formats.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for example in re.findall(r"^```(?:csv|jsonl?)\n(.*?)^```$", section, re.M | re.S)
])
def test_examples_of_the_format_reference(tmp_path, heading, example):
    path = tmp_path / "example"
    path.write_text(example, encoding="utf-8")
    names = [name.strip() for name in heading.split(",")]
    assert set(names) <= formats.FORMATS.keys()
    found = Trace.load(path)
    assert found.n >= 1
    assert any(found == Trace.load(path, format=name) for name in names if name not in ("parquet", "arrow"))


def test_all_formats_and_lints_are_described():
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    headings = {name.strip() for heading in re.findall(r"^## (.*)$", text, re.M) for name in heading.split(",")}
    assert headings == formats.FORMATS.keys()
    guide = (DOCS / "traces.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([a-z-]+)`", guide.split("| code |")[1].split("\n\n")[0])) == LINTS.keys()
