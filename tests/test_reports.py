"""Forms of a finished replay: HTML page, pass trace, time series, comparison, summary."""
import base64
import csv
import gzip
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest

import mocker
from mocker import provenance as provenance_module
from mocker import simulation as simulation_module
from mocker.cli import main
from mocker.provenance import provenance
from mocker.reports import html as page
from mocker.reports import library, parts
from mocker.reports import run as run_module
from mocker.reports.compare import compare_reports, format_differences
from mocker.reports.definitions import DISTRIBUTIONS, OFFLOAD, OUTCOMES, TIERS, TIME_PER_TOKEN, TOTALS, describe
from mocker.reports.perfetto import write_trace
from mocker.reports.run import read_run, run_data
from mocker.reports.summary import sparkline, summary_lines
from mocker.timeline import SERIES, Recording

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run():
    trace = mocker.Trace.load(mocker.sample_trace_path()).head(400)
    return mocker.simulate(trace, num_workers=3, router_mode="kv_router", router_tie_break="lowest",
                           recording=Recording(interval_ms=500.0, passes=100_000), sla_ttft_ms=400.0, sla_itl_ms=20.0)


@pytest.fixture(scope="module")
def pools():
    args = {"kv_bytes_per_token": 100_000, "kv_transfer_bandwidth": 20.0}
    return mocker.simulate(
        mocker.Trace.load(mocker.sample_trace_path()).head(150), num_prefill_workers=1, num_decode_workers=2,
        prefill_engine_args=mocker.MockEngineArgs(worker_type="prefill", **args),
        decode_engine_args=mocker.MockEngineArgs(worker_type="decode"), recording=Recording(passes=100_000))


def _unpack(column):
    return np.frombuffer(base64.b64decode(column["bdata"]), "<f4")


class _Links(html.parser.HTMLParser):
    """Everything that a page would load, and its text."""

    def __init__(self):
        super().__init__()
        self.loads, self.text, self.scripts = [], "", 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.loads += [value for name, value in attrs if name in ("src", "href", "data", "srcset", "action")]

    def handle_data(self, data):
        self.text += data


# -- the page -----------------------------------------------------------------------------------------------------


def test_page_says_everything_and_loads_nothing(run, tmp_path):
    path = run.write_html(tmp_path / "r.html", name="</script><b>run</b>", command="mocker replay x.jsonl")
    text = path.read_text()
    links = _Links()
    links.feed(text)
    assert links.loads == [] and links.scripts == 3
    assert "@import" not in page._text("page.css") and "url(" not in page._text("page.css")
    assert "<b>run</b>" not in text and "mocker replay x.jsonl" in links.text
    for metric in [*TOTALS.values(), *DISTRIBUTIONS.values()]:
        assert metric.title in links.text and metric.definition in links.text
    for name, definition, _ in TIME_PER_TOKEN:
        assert name in links.text and definition in links.text
    assert all(meaning in links.text for meaning in OUTCOMES.values())
    assert f"{run.report['samples']['itl']:,}" in links.text
    assert provenance(run)["arguments_sha256"] in links.text
    good = run.report["goodput_completed_requests"]
    assert re.search(rf"every bound.*?{good}", links.text, re.DOTALL)


def test_data_of_the_page(run, tmp_path):
    (data,) = read_run(run.write_html(tmp_path / "r.html"))
    assert data["report"]["num_requests"] == 400 and data["attainment"]["all"]["of"] == 400
    assert data["attainment"]["all"]["good"] == run.report["goodput_completed_requests"]
    for key, column in (("ttft_ms", "ttft_ms"), ("tpot_ms", "itl_ms"), ("e2e_latency_ms", "e2e_latency_ms")):
        values = np.sort(run.per_request[column][~np.isnan(run.per_request[column])])
        cdf = data["cdf"][key]
        assert cdf["samples"] == len(values)
        x, y = _unpack(cdf["x"]), _unpack(cdf["y"])
        assert y[-1] == 1 and (np.diff(x) >= 0).all() and (np.diff(y) > 0).all()
        np.testing.assert_allclose(x, values[np.round(y * len(values)).astype(int) - 1], rtol=1e-6)
    assert data["cdf"]["itl_ms"]["samples"] == run.report["samples"]["itl"]
    series, timeline = data["series"], run.timeline
    assert series["workers"] == ["worker 0", "worker 1", "worker 2"]
    seconds = series["interval_s"]
    tokens = _unpack(series["total"]["output_tok_s"])[:-1].sum() * seconds     # the last bin is shorter
    whole = int(round(seconds * 1000 / timeline.interval_ms)) * (len(_unpack(series["t"])) - 1)
    assert tokens == pytest.approx(timeline.total("output_tokens")[:whole].sum(), rel=1e-5)


def test_time_per_token_by_every_name(run):
    per_request, pooled, pooled_too, again, whole = run_data(run, "r", {})["time_per_token"]
    columns = run.per_request
    several = columns["output_tokens"] > 1
    assert per_request == again == pytest.approx(np.nanmean(columns["itl_ms"]))
    gaps = (columns["output_tokens"][several] - 1)
    assert pooled == pytest.approx(pooled_too)
    assert pooled == pytest.approx(
        (columns["itl_ms"][several] * gaps).sum() / gaps.sum())
    assert whole == pytest.approx((columns["e2e_latency_ms"] / columns["output_tokens"]).mean())


def test_runs_side_by_side(run, pools, tmp_path):
    path = page.write_html(tmp_path / "two.html", {"one pool": run, "two pools": pools})
    runs = read_run(path)
    assert [r["name"] for r in runs] == ["one pool", "two pools"]
    assert runs[1]["series"]["workers"] == ["decode 0", "decode 1", "prefill 0"]
    assert "Differences to one pool" in path.read_text()
    assert _unpack(runs[1]["series"]["total"]["output_tok_s"]).max() > 0


@pytest.fixture
def packing(tmp_path, monkeypatch):
    """A cache folder for the packed library."""
    monkeypatch.setenv("MOCKER_PAGE_CACHE", str(tmp_path / "cache"))
    library.packed.cache_clear()
    yield tmp_path / "cache"
    library.packed.cache_clear()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
@pytest.mark.parametrize("packs", [True, False])
def test_page_in_a_browser(run, pools, tmp_path, packing, monkeypatch, packs):
    if not packs:
        monkeypatch.setenv("MOCKER_PAGE_CACHE", "off")
    path = page.write_html(tmp_path / "two.html", {"a": run, "b": pools})
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0", path.as_uri()],
        capture_output=True, timeout=120, check=True)
    dom = done.stdout.decode()
    assert not re.findall(r"CONSOLE.*(?:Error|error)", done.stderr.decode())
    charts = re.findall(r'data-chart="(\w+)"', dom)
    assert {"ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "e2e_latency_ms", "waiting", "running", "kv_usage",
            "batch_tokens_per_pass", "cache_hit_ratio", "output_tok_s"} <= set(charts)
    assert dom.count('class="scatterlayer mlayer"') >= len(charts)
    assert len(re.findall(r'<g class="trace scatter trace\w+"', dom)) >= 2 * 10


def test_tiers_of_a_run(run, tmp_path):
    """Tiers, links and the host's content over time, for the runs that have them; nothing of it for others."""
    args = mocker.MockEngineArgs(num_gpu_blocks=6000, kv_bytes_per_token=131_072, num_g2_blocks=40_000,
                                 num_g3_blocks=30_000, enable_g4_storage=True)
    tiers = mocker.simulate(mocker.Trace.load(mocker.sample_trace_path()).head(400), num_workers=2,
                            extra_engine_args=args, recording=Recording(passes=100))
    host = tiers.timeline.series["kv_host_blocks"]
    assert host.max() == pytest.approx(tiers.report["offload"]["g2"]["peak_blocks"])
    assert host[:, -1].min() > 0 and (np.diff(host) >= -1e-6).all()        # slots are filled before any is used again
    disk, remote = (tiers.timeline.shared[f"kv_{name}_blocks"] for name in ("disk", "remote"))
    assert disk.max() == pytest.approx(tiers.report["offload"]["g3"]["peak_blocks"])
    assert remote[-1] <= tiers.report["offload"]["g4"]["peak_blocks"] and (np.diff(remote) >= -1e-6).all()
    assert remote[-1] == pytest.approx(tiers.report["offload"]["g4"]["peak_blocks"], rel=0.1)
    columns = tiers.timeline.columns()
    assert columns["kv_disk_blocks"][1::2].tolist() == columns["kv_disk_blocks"][::2].tolist() == disk.tolist()
    assert "kv_disk_blocks" not in run.timeline.columns()
    events = json.loads(tiers.write_pass_trace(tmp_path / "t.json").read_bytes())["traceEvents"]
    most = {name: max(e["args"]["blocks"] for e in events if e["ph"] == "C" and e["name"] == name)
            for name in ("kv_host_blocks", "kv_disk_blocks", "kv_remote_blocks")}
    assert most == {"kv_host_blocks": pytest.approx(host.max()), "kv_disk_blocks": pytest.approx(disk.max()),
                    "kv_remote_blocks": pytest.approx(remote.max())}
    path = page.write_html(tmp_path / "two.html", {"plain": run, "tiers": tiers})
    text = path.read_text()
    given = tiers.report["offload"]
    section = text[text.index('<section id="offload">'):]
    section = section[:section.index("</section>")]
    for key in ("g2", "g3", "g4"):
        assert TIERS[key] in section and page.number(given[key]["hit_tokens"]) in section
        for way in ("down", "up"):
            assert f"{given[key][way]['utilization']:.1%}" in section
            assert page.number(given[key][way]["mean_queue_delay_ms"]) in section
    assert all(metric.definition in section and page.number(given[key]) in section for key, metric in OFFLOAD.items())
    assert "plain" not in section
    plain, with_tiers = read_run(path)
    assert not {"kv_host_blocks", "kv_disk_blocks", "kv_remote_blocks"} & set(plain["series"]["total"])
    assert _unpack(with_tiers["series"]["total"]["kv_disk_blocks"]).max() == pytest.approx(disk.max(), rel=0.05)
    assert "kv_remote_blocks" in with_tiers["series"]["total"]
    assert _unpack(with_tiers["series"]["total"]["kv_host_blocks"]).max() == pytest.approx(host.sum(0).max(), rel=0.05)
    assert 'id="offload"' not in run.write_html(tmp_path / "one.html").read_text()


def test_a_run_without_recording_has_a_page_without_curves(tmp_path):
    plain = mocker.simulate(mocker.SyntheticSpec(100, 10, 5))
    (data,) = read_run(plain.write_html(tmp_path / "p.html"))
    assert "series" not in data and "itl_ms" not in data["cdf"] and data["cdf"]["ttft_ms"]["samples"] == 5


def test_library_is_packed_once(run, tmp_path, packing, monkeypatch):
    """The page has the package's library, packed; a damaged copy is made anew, and without a folder there is none."""
    def carried():
        text = run.write_html(tmp_path / "r.html").read_text()
        found = re.search(r'<script type="text/plain" id="plotly">\s*([A-Za-z0-9+/=]+)\s*</script>', text)
        return found and gzip.decompress(base64.b64decode(found[1]))

    given = library.plotly().read_bytes()
    assert carried() == given
    (copy,) = packing.iterdir()
    text, made = copy.read_bytes(), copy.stat().st_mtime_ns
    for kept in (text, text[:1000], b"no gzip"):
        copy.write_bytes(kept)
        library.packed.cache_clear()
        assert carried() == given and copy.read_bytes() == text
    assert copy.stat().st_mtime_ns != made
    monkeypatch.setenv("MOCKER_PAGE_CACHE", str(copy / "no folder"))
    library.packed.cache_clear()
    assert carried() is None and given in (tmp_path / "r.html").read_bytes()


def test_no_plotly(run, tmp_path, monkeypatch):
    library.plotly.cache_clear()               # it was there for other tests
    library.packed.cache_clear()
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"mocker-llm\[html\]"):
        run.write_html(tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_workers_that_come_and_go(tmp_path):
    class More:
        def initial_tick_ms(self):
            return 3000.0

        def on_tick(self, metrics):
            return {"target_prefill": None, "target_decode": min(metrics["active_decode_count"] + 1, 4),
                    "next_tick_ms": metrics["now_ms"] + 20_000.0}

    run = mocker.simulate(mocker.Trace.load(mocker.sample_trace_path()).head(150), planner=More(),
                          recording=Recording(passes=100_000))
    timeline = run.timeline
    assert len(timeline.workers) > 1 and timeline.series["arrivals"].sum() == 150
    span = timeline.end_ms - timeline.start_ms
    inside = (timeline.total("running") + timeline.total("waiting") + timeline.router_queue) @ span
    assert inside == pytest.approx(run.per_request["e2e_latency_ms"].sum(), rel=1e-9)
    path = run.write_html(tmp_path / "s.html")
    (data,) = read_run(path)
    assert data["scaling"][0] == {"at_ms": 3000.0, "role": "aggregated", "before": 1, "target": 2}
    assert "Changes of the number of workers" in path.read_text()
    flows = [e for e in json.loads(write_trace(tmp_path / "t.json", run).read_bytes())["traceEvents"] if e["ph"] == "f"]
    assert len(flows) == 150


# -- the pass trace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["run", "pools"])
def test_pass_trace(which, request, tmp_path):
    simulation = request.getfixturevalue(which)
    plain = write_trace(tmp_path / "t.json", simulation).read_bytes()
    assert gzip.decompress(write_trace(tmp_path / "t.json.gz", simulation).read_bytes()) == plain
    events = json.loads(plain)["traceEvents"]
    timeline = simulation.timeline
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"arrivals", *timeline.workers}
    slices = [e for e in events if e.get("cat") == "pass"]
    assert sum(e["args"]["passes"] for e in slices) == pytest.approx(timeline.series["passes"].sum())
    assert sum(e["args"]["output_tokens"] for e in slices) == pytest.approx(timeline.series["output_tokens"].sum())
    tracks = {}
    for e in slices:
        tracks.setdefault(e["pid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        starts, ends = np.array(sorted(spans)).T
        assert (ends[:-1] <= starts[1:] + 0.01).all()                       # µs, written with three decimals
    flows = {}
    for e in events:
        if e.get("cat") == "request" and e["ph"] in "stf":
            flows.setdefault(e["id"], []).append(e)
    assert len(flows) == len(simulation.per_request["row"])
    for row, points in flows.items():
        assert [e["ph"] for e in points] == ["s", *["t"] * (len(points) - 2), "f"]
        for e in points[1:]:
            starts, ends = np.array(sorted(tracks[e["pid"]])).T
            at = np.searchsorted(starts, e["ts"], side="right") - 1
            assert starts[at] <= e["ts"] <= ends[at]
        last = simulation.per_request["last_token_ms"][row] * 1000
        at = np.searchsorted(starts, points[-1]["ts"], side="right") - 1
        assert starts[at] < last <= ends[at] + 0.01
    counters = {(e["pid"], e["name"]) for e in events if e["ph"] == "C"}
    assert counters == {(w + 2, name) for w in range(3) for name in ("requests", "KV blocks")}


def test_pass_trace_needs_a_log(tmp_path):
    simulation = mocker.simulate(mocker.SyntheticSpec(100, 10, 5), recording=Recording())
    with pytest.raises(ValueError, match=r"Recording\(passes"):
        simulation.write_pass_trace(tmp_path / "t.json")


# -- tables ---------------------------------------------------------------------------------------------------------


def test_time_series_files(run, tmp_path):
    expected = run.timeline.columns()
    with open(run.write_timeseries(tmp_path / "s.csv"), newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["start_ms", "end_ms", "worker", "pool", *SERIES, "router_queue"]
    table = pq.read_table(run.write_timeseries(tmp_path / "s.parquet"))
    for i, name in enumerate(header):
        if name == "pool":
            assert {row[i] for row in rows} == {"aggregated"}
            continue
        from_csv = np.array([float(row[i] or "nan") for row in rows])
        np.testing.assert_array_equal(from_csv, expected[name], err_msg=name)
        np.testing.assert_array_equal(table[name].to_pandas().to_numpy(float), expected[name], err_msg=name)
    packed = run.write_timeseries(tmp_path / "s.csv.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "s.csv").read_bytes()
    with pytest.raises(ValueError, match=r"\.csv, \.csv\.gz, \.parquet"):
        run.write_timeseries(tmp_path / "s.txt")


def test_requests_as_csv(run, tmp_path):
    with open(run.write_csv(tmp_path / "r.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["ttft_ms"]) for row in rows] == run.per_request["ttft_ms"].tolist()
    assert {row["prefill_worker_idx"] for row in rows} == {""} and len(rows) == 400


# -- comparison -----------------------------------------------------------------------------------------------------


def test_directions():
    before = {"num_requests": 5, "mean_ttft_ms": 100.0, "output_throughput_tok_s": 50.0, "rejected_requests": 0,
              "std_itl_ms": 1.0, "p99_itl_ms": 3.0, "median_ttst_ms": None, "wall_time_ms": 1.0}
    after = {"num_requests": 5, "mean_ttft_ms": 90.0, "output_throughput_tok_s": 45.0, "rejected_requests": 2,
             "std_itl_ms": 2.0, "p99_itl_ms": 3.0 * (1 + 1e-12), "median_ttst_ms": 4.0, "wall_time_ms": 9.0}
    rows = {row.key: row for row in compare_reports(before, after)}
    assert {key: row.verdict for key, row in rows.items()} == {
        "num_requests": "same", "mean_ttft_ms": "better", "output_throughput_tok_s": "worse",
        "rejected_requests": "worse", "std_itl_ms": "changed", "p99_itl_ms": "same", "median_ttst_ms": "changed"}
    assert rows["mean_ttft_ms"].change() == "▼ 10 (-10.00%)" and rows["rejected_requests"].change() == "▲ 2"
    text = format_differences(list(rows.values()), "A", "B")
    assert "TTFT mean (ms)" in text and text.endswith("2 more metrics are the same.")
    assert format_differences(compare_reports(before, before), "A", "A") == "No difference in 6 metrics."
    assert all(row.verdict == "same" for row in compare_reports(before, {**after, **before}, tolerance=0.0))


def test_every_key_of_a_report_is_described(run):
    known = {key for key in run.report if describe(key) is not None}
    assert set(run.report) - known == {"samples", "clamped_requests"}


def test_compare_command(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = ["replay", "--input-tokens", "300", "--output-tokens", "20", "--request-count", "20", "--quiet"]
    for name, extra in (("a", []), ("b", ["--num-workers", "2"])):
        assert main([*first, *extra, "--report-json", f"{name}.json", "--report-html", f"{name}.html"]) == 0
    (data,) = read_run("b.html")
    assert data["provenance"]["command"] == "mocker " + " ".join(first) + (
        " --num-workers 2 --report-json b.json --report-html b.html")
    assert data["provenance"]["workload"]["synthetic"]["input_tokens"] == 300
    assert main(["compare", "a.json", "b.json"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"TTFT mean \(ms\) .*▼ .*better", out)
    assert main(["compare", "a.html", "b.html", "--report-html", "both.html", "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)["differences"]["b"]
    assert any(row["key"] == "mean_ttft_ms" and row["difference"] < 0 for row in differences)
    assert [r["name"] for r in read_run("both.html")] == ["a", "b"]
    assert main(["compare", "b.json", "a.json", "--fail-if-worse"]) == 1
    assert main(["compare", "b.json", "b.json", "--fail-if-worse"]) == 0
    capsys.readouterr()
    for bad, text in (('{"x": 1}', "not a report"), ("[1, 2]", "not a report"), ("{", "not a report")):
        (tmp_path / "bad.json").write_text(bad)
        assert main(["compare", "a.json", "bad.json"]) == 2
        assert text in capsys.readouterr().err
    hostile = {"num_requests": 3, "samples": [1], "stalled": "x", "mean_ttft_ms": "fast", "p99_ttft_ms": [1],
               "duration_ms": 1e400, "completed_requests": True, "mean_itl_ms": None, "request_throughput_rps": -1e300}
    (tmp_path / "odd.json").write_text(json.dumps(hostile))
    assert main(["compare", "a.json", "odd.json", "--report-html", "odd.html"]) == 0
    page = (tmp_path / "a.html").read_text()
    for old, new, text in (
            ('"provenance":{', '"provenance":[1],"x":{', "provenance"), ('"format":1', '"format":9', "newer"),
            ('[{"format"', '[[{"format"', "cannot be read"), ('"report":{', '"repart":{', "cannot be read")):
        (tmp_path / "bad.html").write_text(page.replace(old, new, 1))
        assert main(["compare", "a.json", "bad.html"]) == 2
        assert text in capsys.readouterr().err
    (tmp_path / "bad.html").write_text("<html></html>")
    assert main(["compare", "a.json", "bad.html"]) == 2 and "bad.html: not a page" in capsys.readouterr().err
    assert main(["compare", "a.json", "missing.json"]) == 2 and "missing.json" in capsys.readouterr().err


# -- provenance and summary -------------------------------------------------------------------------------------------


def test_provenance(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n')
    options = {"num_workers": 2, "extra_engine_args": mocker.MockEngineArgs(block_size=16), "sla_ttft_ms": 5.0}
    run = mocker.simulate(str(file), **options)
    made = provenance(run)
    assert made["workload"] == {"file": str(file), "bytes": file.stat().st_size,
                                "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert made["arguments"]["num_workers"] == 2 and made["arguments"]["extra_engine_args"]["block_size"] == 16
    again = eval(made["command"], {"mocker": mocker})
    assert provenance(again) == made
    assert {k: v for k, v in again.report.items() if "wall" not in k and "processed" not in k} == {
        k: v for k, v in run.report.items() if "wall" not in k and "processed" not in k}
    other = provenance(mocker.simulate(str(file), **{**options, "num_workers": 3}))
    assert other["arguments_sha256"] != made["arguments_sha256"]
    loaded = [provenance(mocker.simulate(mocker.Trace.load(file)))["workload"]["columns_xxh3"] for _ in range(2)]
    assert loaded[0] == loaded[1]
    file.write_text(file.read_text().replace('"input_length": 4', '"input_length": 5'))
    assert provenance(mocker.simulate(mocker.Trace.load(file)))["workload"]["columns_xxh3"] != loaded[0]


def test_digests_of_files_are_kept_until_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance_module, "_digests", {})
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n')
    run = mocker.simulate(str(file))

    def digest():
        made = provenance(run)["workload"]
        assert made == {"file": str(file), "bytes": file.stat().st_size,
                        "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        return made["sha256"]

    fresh = digest()
    assert not provenance_module._digests      # it may change again within one tick of the clock
    os.utime(file, (1e9, 1e9))
    assert digest() == fresh and len(provenance_module._digests) == 1
    with monkeypatch.context() as patch:
        patch.setattr(provenance_module, "_digest_of_file", None)
        assert digest() == fresh
    file.write_text(file.read_text().replace('"input_length": 4', '"input_length": 5'))
    os.utime(file, (1e9, 1e9))                 # of the same size and age, but changed later
    assert digest() != fresh


def test_long_runs_write_the_same_page(run, tmp_path, monkeypatch):
    one = run.write_html(tmp_path / "a.html", name="r").read_bytes()
    monkeypatch.setattr(simulation_module, "_SHORT", 0)
    assert run.write_html(tmp_path / "b.html", name="r").read_bytes() == one


def test_summary(run):
    lines = summary_lines(run)
    assert any(line.startswith("  In the system") for line in lines)
    assert any(line.startswith("  ITL, pooled") and f"{run.report['mean_itl_ms']:,.3f}" in line for line in lines)
    assert sparkline(np.array([0.0, 1.0, 8.0, 4.0])) == " ▁█▄" and sparkline(np.zeros(3)) == "   "
    columns = run.per_request
    inside = columns["e2e_latency_ms"].sum() / columns["last_token_ms"].max()
    shown = float(next(line for line in lines if "In the system" in line).split("max ")[1].split()[0])
    assert inside <= shown + 0.05


def test_long_runs_are_taken_in_parts(run, tmp_path, monkeypatch):
    whole, lines = run_data(run, "r", {}), summary_lines(run)

    def events(name):
        return sorted(line.rstrip(b",") for line in run.write_pass_trace(tmp_path / name).read_bytes().splitlines())

    trace = events("a.json")
    monkeypatch.setattr(parts, "PART", 64)
    monkeypatch.setattr(run_module, "PART", 64)
    cut = run_data(run, "r", {})
    assert summary_lines(run) == lines and events("b.json") == trace
    assert cut["attainment"] == whole["attainment"] and cut["series"] == whole["series"]
    assert cut["time_per_token"] == pytest.approx(whole["time_per_token"])
    for key in ("ttft_ms", "e2e_latency_ms"):
        x, y = (_unpack(cut["cdf"][key][axis]) for axis in "xy")
        values = np.sort(run.per_request[key])
        assert cut["cdf"][key]["samples"] == 400 and y[-1] == 1
        exact = values[np.round(y * 400).astype(int) - 1]
        assert (exact <= x * (1 + 1e-6)).all() and (x <= exact * (1 + 1 / 60)).all()
