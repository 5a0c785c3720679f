"""What the documentation tells to run, runs: every `sh` command and `python` block of README and docs, on small input.

The blocks of one file run in order in one folder that has a small `trace.jsonl`; what they write is there for the next.
A block that is not to be run has another language, or none. `pip` and `pytest` are left to CI, which starts with them.
"""
import contextlib
import gzip
import io
import itertools
import re
import shlex
import shutil
from pathlib import Path

import numba
import numpy as np
import pytest

import mocker
from mocker.cli import main
from mocker.reports.definitions import DISTRIBUTIONS, OUTCOMES, TIME_PER_TOKEN, TOTALS
from mocker.timeline import SERIES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROWS = 120
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("pip ", "python -m pytest", "python benches/", "cd ")


def _commands(block: str):
    """Simple commands of a block: lines joined at backslashes, cut at `&&`, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for sep, group in itertools.groupby(words, lambda word: word == "&&"):
            if not sep:
                yield list(group)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder as the documentation supposes one."""
    with gzip.open(mocker.sample_trace_path(), "rt") as file:
        rows = "".join(itertools.islice(file, ROWS))
    (tmp_path / "trace.jsonl").write_text(rows)
    sample = tmp_path / "mocker" / "data" / mocker.sample_trace_path().name
    sample.parent.mkdir(parents=True)
    with gzip.open(sample, "wt") as file:
        file.write(rows)
    np.savez(tmp_path / "profile.npz", prefill_isl=[1, 1000], prefill_ttft_ms=[5, 50],
             decode_active_kv_tokens=[0, 10000], decode_context_length=[1, 1000], decode_itl=[[5, 6], [7, 8]])
    mocker.timing.FormulaTiming([5, 0.1, 0, 0], [5, 0.1, 0, 0, 0]).save(tmp_path / "profile.json")
    if (ROOT / "examples").is_dir():
        shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DYN_ROUTER_POLICY_CONFIG", raising=False)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_examples_run(page, folder, monkeypatch):
    small = mocker.Trace.load(folder / "trace.jsonl")
    monkeypatch.setattr(mocker, "sample_trace_path", lambda: folder / "trace.jsonl")
    names = {"mocker": mocker, "trace": small, "np": np, "numba": numba}
    blocks = BLOCK.findall(page.read_text())
    for _, title, block in blocks:             # a file that the commands take: ```yaml sweep.yaml
        if title.strip():
            Path(title.strip()).write_text(block)
    for language, title, block in blocks:
        if title.strip():
            continue
        if language == "sh":
            for words in _commands(block):
                command = shlex.join(words)
                if command.startswith(ELSEWHERE):
                    continue
                assert words[0] == "mocker", f"{page.name}: {command}: nobody runs this"
                out, err = io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    try:
                        status = main(words[1:])
                    except SystemExit as stop:
                        status = stop.code
                assert status == 0, f"{page.name}: {command}\n{err.getvalue()}"
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, str(page), "exec"), names)


def test_there_are_commands():
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(re.findall(r"^mocker \w+", "\n".join(b for lang, _, b in BLOCK.findall(text) if lang == "sh"),
                          re.MULTILINE)) >= 12


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_metric_and_series_is_defined():
    text = re.sub(r"\\\|", "|", (ROOT / "docs" / "reports.md").read_text())
    for key, metric in {**TOTALS, **DISTRIBUTIONS}.items():
        assert f"| `{key}` | {metric.title} |" in text and f"| {metric.definition} |" in text, key
    for name, meaning in {**OUTCOMES, **SERIES}.items():
        assert f"| `{name}` | {meaning} |" in text, name
    for name, definition, remarks in TIME_PER_TOKEN:
        assert f"| {name} | {definition} | {remarks} |" in text, name


def test_examples_of_the_help_run(folder, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    examples = re.findall(r"^  (mocker .*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        assert main(shlex.split(example)[1:]) == 0, example
