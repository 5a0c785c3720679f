"""mocker.cli: flags, errors, exit codes, output; with a stand-in for the simulation except in the last tests."""

import gzip
import io
import json
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import mocker
from mocker import args as args_module
from mocker.args import MockEngineArgs
from mocker.cli import SCHEDULER_RULES, UNSUPPORTED, main, replay_flags, replay_main, terminal
from mocker.report import GOODPUT_KEYS, REPORT_KEYS
from mocker.simulation import Simulation

ROOT = Path(__file__).resolve().parent.parent
SYNTHETIC = ["--input-tokens", "100", "--output-tokens", "10", "--request-count", "3"]


class Stand:
    """A stand-in for the module mocker.replay: it records the call and returns a fixed result."""

    def __init__(self) -> None:
        self.workload = None
        self.options: dict = {}
        self.error: BaseException | None = None
        self.progress_calls: list[tuple[int, int, float]] = []

    def simulate(self, workload, **options):
        self.workload, self.options = workload, options
        if self.error is not None:
            raise self.error
        for call in self.progress_calls:
            if options["progress"] is not None:
                options["progress"](*call)
        columns = {
            "row": np.arange(3),
            "arrival_time_ms": np.array([2.0, 1.0, 0.0]),
            "ttft_ms": np.array([1.5, np.nan, 0.5]),
            "decode_worker_idx": np.array([0, -1, 1]),
            "terminal_status": np.array(["completed", "incomplete", "completed"], dtype=object),
        }
        report = {"num_requests": 3, "completed_requests": 2, "wall_time_ms": 1.0, "incomplete_requests": 1}
        return Simulation(report, columns, {})


def synthetic_spec(**values):
    return types.SimpleNamespace(**values)


@pytest.fixture
def stand(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DYN_ROUTER_POLICY_CONFIG", raising=False)
    stand = Stand()
    module = types.ModuleType("mocker.replay")
    module.simulate = stand.simulate
    module.SyntheticSpec = synthetic_spec
    monkeypatch.setitem(sys.modules, "mocker.replay", module)
    Path("trace.jsonl").write_text('{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n')
    Path("other.jsonl").write_text("{}\n")
    return stand


def run(*argv: str) -> int:
    """Run `mocker replay` and return its exit code, also where it leaves through SystemExit."""
    try:
        return replay_main(list(argv))
    except SystemExit as stop:
        return stop.code


def refused(capsys, *argv: str) -> str:
    """Run `mocker replay` with something wrong in the arguments, and return its last line on stderr."""
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert not list(Path().glob("dynamo_replay_report_*"))
    return err.rstrip("\n").splitlines()[-1]


# -- the call ---------------------------------------------------------------------------------------------------------


def test_trace_defaults(stand):
    assert run("trace.jsonl") == 0
    assert stand.workload == "trace.jsonl"
    assert stand.options == {
        "extra_engine_args": None,
        "prefill_engine_args": None,
        "decode_engine_args": None,
        "router_config": None,
        "aic_perf_config": None,
        "planner": None,
        "num_workers": 1,
        "num_prefill_workers": 1,
        "num_decode_workers": 1,
        "replay_concurrency": None,
        "replay_mode": "offline",
        "router_mode": "round_robin",
        "router_tie_break": "random",
        "router_seed": 0,
        "router_lower_tiers": False,
        "arrival_speedup_ratio": 1.0,
        "trace_block_size": None,
        "trace_format": "auto",
        "trace_shared_prefix_ratio": 0.0,
        "trace_num_prefix_groups": 0,
        "max_sim_time_ms": None,
        "model_name": None,
        "sla_ttft_ms": None,
        "sla_itl_ms": None,
        "sla_e2e_ms": None,
        "on_short_hash_ids": "error",
        "compat": None,
        "progress": None,
        "recording": None,
        "exact_gaps": None,
        "stream_to": None,
        "threads": 1,
    }


def test_trace_flags_on_both_sides_of_the_file(stand):
    flags = "--num-workers 4 --replay-concurrency 8 trace.jsonl --arrival-speedup-ratio 2 --trace-block-size 64"
    flags += " --max-sim-time-seconds 1.5 --sla-ttft-ms 100 --sla-itl-ms 10 --sla-e2e-ms 0 --compat reference"
    flags += " --on-short-hash-ids clamp --model-name m --trace-shared-prefix-ratio 0.5 --trace-num-prefix-groups 2"
    assert run(*flags.split()) == 0
    assert stand.workload == "trace.jsonl"
    expected = {"num_workers": 4, "replay_concurrency": 8, "arrival_speedup_ratio": 2.0, "trace_block_size": 64}
    expected |= {"max_sim_time_ms": 1500.0, "sla_ttft_ms": 100.0, "sla_itl_ms": 10.0, "sla_e2e_ms": 0.0}
    expected |= {"compat": "reference", "on_short_hash_ids": "clamp", "model_name": "m"}
    expected |= {"trace_shared_prefix_ratio": 0.5, "trace_num_prefix_groups": 2}
    assert {name: stand.options[name] for name in expected} == expected


def test_several_files_with_format_auto(stand):
    assert run("trace.jsonl", "--trace-format", "auto", "other.jsonl") == 0
    assert stand.workload == ["trace.jsonl", "other.jsonl"]
    assert stand.options["trace_format"] == "auto"


def test_synthetic(stand):
    assert run(*SYNTHETIC) == 0
    assert vars(stand.workload) == {
        "input_tokens": 100,
        "output_tokens": 10,
        "request_count": 3,
        "arrival_interval_ms": 1.0,
        "turns_per_session": 1,
        "shared_prefix_ratio": 0.0,
        "num_prefix_groups": 0,
        "inter_turn_delay_ms": 0.0,
    }
    more = "--arrival-interval-ms 0 --turns-per-session 2 --shared-prefix-ratio .5 --num-prefix-groups 3"
    assert run(*SYNTHETIC, *more.split(), "--inter-turn-delay-ms", "7") == 0
    assert list(vars(stand.workload).values())[3:] == [0.0, 2, 0.5, 3, 7.0]


def test_engine_args(stand):
    Path("engine.json").write_text('{"num_gpu_blocks": 100, "block_size": 16}')
    assert run("trace.jsonl", "--extra-engine-args", "@engine.json", "--engine", "block_size=32") == 0
    engine = stand.options["extra_engine_args"]
    assert (engine.num_gpu_blocks, engine.block_size) == (100, 32)
    flags = ["--engine", "engine_type=sglang", "--engine", "sglang.page_size=16", "--engine", "max_num_seqs=null"]
    assert run("trace.jsonl", *flags) == 0
    engine = stand.options["extra_engine_args"]
    assert (engine.engine_type, engine.block_size, engine.max_num_seqs) == ("sglang", 16, None)
    assert run("trace.jsonl", "--extra-engine-args", '{"planner_profile_data": null, "speedup_ratio": 2}') == 0
    assert stand.options["extra_engine_args"].speedup_ratio == 2.0


def test_scheduler_rules(stand):
    assert run("trace.jsonl", "--scheduler-rules", "vllm-0.33") == 0
    assert stand.options["extra_engine_args"] == MockEngineArgs(scheduler_rules="vllm-0.33")
    options = ["--engine", "watermark=0.1", "--engine", "vllm_scheduling_policy=priority", "--engine", "dp_size=1"]
    assert run("trace.jsonl", *options, "--engine", "scheduler_rules=vllm-0.33-async") == 0
    expected = MockEngineArgs(scheduler_rules="vllm-0.33-async", watermark=0.1, vllm_scheduling_policy="priority")
    assert stand.options["extra_engine_args"] == expected
    given = ["--extra-engine-args", '{"scheduler_rules": "dynamo-mocker-1.3.0", "reserve_full_isl": false}']
    assert run("trace.jsonl", *given, "--scheduler-rules", "vllm-0.33-async") == 0
    expected = MockEngineArgs(scheduler_rules="vllm-0.33-async", reserve_full_isl=False)
    assert stand.options["extra_engine_args"] == expected
    both = ["--engine", "scheduler_rules=vllm-0.33", "--scheduler-rules", "dynamo-mocker-1.3.0"]
    assert run("trace.jsonl", *both) == 0
    assert stand.options["extra_engine_args"] == MockEngineArgs()


def test_scheduler_rules_are_those_of_the_engine():
    assert SCHEDULER_RULES == args_module.SCHEDULER_RULES


# -- wrong flags ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("", ["name a trace file", "--input-tokens"]),
        ("trace.jsonl --input-tokens 5", ["exclude each other", "--input-tokens"]),
        ("trace.jsonl --turns-per-session 2", ["exclude each other", "--turns-per-session"]),
        ("--input-tokens 5", ["also needs --output-tokens, --request-count"]),
        ("--shared-prefix-ratio 0.5", ["also needs --input-tokens, --output-tokens, --request-count"]),
        ("--trace-format dynamo {syn}", ["--trace-format dynamo needs a trace file"]),
        ("trace.jsonl other.jsonl --trace-format mooncake", ["--trace-format mooncake takes one trace file, got 2"]),
        ("trace.jsonl --trace-format applied_compute_agentic", ["needs --replay-concurrency"]),
        ("trace.jsonl --trace-format xml", ["--trace-format", "'xml'", "mooncake"]),
        ("{syn} --report-jsonl r.jsonl", ["--report-jsonl needs a trace file", "--per-request"]),
        ("{syn} --max-sim-time-seconds 1", ["--max-sim-time-seconds needs a trace file"]),
        ("trace.jsonl --report-jsonl r --planner-config {{}}", ["--report-jsonl", "with --planner-config"]),
        ("trace.jsonl --max-sim-time-seconds 1 --planner-config {{}}", ["--max-sim-time-seconds", "--planner-config"]),
        ("trace.jsonl --report-jsonl r --replay-mode online", ["--report-jsonl needs --replay-mode offline"]),
        ("trace.jsonl --planner-config {{}} --replay-mode online", ["--planner-config needs --replay-mode offline"]),
        ("trace.jsonl --planner-config {{}} --trace-format csv", ["--planner-config needs --trace-format mooncake"]),
        ("trace.jsonl --num-workers 0", ["--num-workers", "at least 1, got 0"]),
        ("trace.jsonl --num-workers two", ["--num-workers", "integer, got 'two'"]),
        ("trace.jsonl --replay-concurrency 0", ["--replay-concurrency", "at least 1"]),
        ("trace.jsonl --arrival-speedup-ratio 0", ["--arrival-speedup-ratio", "finite and above 0, got 0"]),
        ("trace.jsonl --arrival-speedup-ratio inf", ["--arrival-speedup-ratio", "got inf"]),
        ("trace.jsonl --sla-ttft-ms -1", ["--sla-ttft-ms", "at least 0, got -1"]),
        ("trace.jsonl --sla-itl-ms nan", ["--sla-itl-ms", "got nan"]),
        ("trace.jsonl --max-sim-time-seconds x", ["--max-sim-time-seconds", "number, got 'x'"]),
        ("{syn} --shared-prefix-ratio 1.5", ["--shared-prefix-ratio", "between 0 and 1, got 1.5"]),
        ("trace.jsonl --extra-engine-args {{", ["--extra-engine-args is not valid JSON"]),
        ("trace.jsonl --extra-engine-args [1]", ["--extra-engine-args must be a JSON object", "got [1]"]),
        ("trace.jsonl --extra-engine-args other.jsonl", ["not valid JSON", "write @other.jsonl to read a file"]),
        (
            "trace.jsonl --extra-engine-args @none.json",
            ["--extra-engine-args @none.json cannot be read", "No such file"],
        ),
        ("trace.jsonl --engine block_size", ["--engine block_size: expected NAME=VALUE"]),
        ("trace.jsonl --engine =3", ["--engine =3: expected NAME=VALUE"]),
        ("trace.jsonl --engine a..b=3", ["--engine a..b=3: expected NAME=VALUE"]),
        (
            "trace.jsonl --engine x=1 --prefill-engine-args {{}}",
            ["--engine is for aggregated", "--prefill-engine-args"],
        ),
        ("trace.jsonl --engine planner_profile_data=folder", ["or a folder of profiler results, got folder"]),
        ("trace.jsonl --engine worker_type=decode --engine is_decode=true", ["worker_type excludes is_prefill"]),
        ("trace.jsonl --scheduler-rules vllm-9", ["--scheduler-rules", "'vllm-9'", "vllm-0.33-async"]),
        (
            "trace.jsonl --scheduler-rules vllm-0.33 --decode-engine-args {{}}",
            ["--scheduler-rules is for aggregated", "--decode-engine-args"],
        ),
        (
            "trace.jsonl --scheduler-rules vllm-0.33 --engine engine_type=trtllm",
            ["--extra-engine-args/--engine/--scheduler-rules", "engine_type='trtllm'"],
        ),
        ("trace.jsonl --engine scheduler_rules=vllm-9", ["scheduler_rules", "vllm-9", "vllm-0.33-async"]),
        ("trace.jsonl --engine watermark=0.1", ["watermark requires scheduler_rules", "'vllm-0.33'"]),
        ("trace.jsonl --engine block_sise=3", ["--extra-engine-args/--engine", "block_sise"]),
        ("trace.jsonl --engine max_num_seqs=-3", ["--extra-engine-args/--engine", "max_num_seqs", "-3"]),
        ("missing.jsonl", ["trace file missing.jsonl does not exist"]),
        (".", ["trace file . is a folder"]),
        ("trace.jsonl --per-request r.txt", ["--per-request r.txt", ".jsonl, .jsonl.gz, .csv, .csv.gz, .parquet"]),
        ("trace.jsonl --timeseries r.jsonl", ["--timeseries r.jsonl", ".csv, .csv.gz, .parquet"]),
        ("trace.jsonl --trace-out r.txt", ["--trace-out r.txt", ".json, .json.gz"]),
        ("trace.jsonl --stream-to r.csv", ["--stream-to r.csv", ".jsonl, .parquet"]),
        ("trace.jsonl --stream-to trace.jsonl", ["--stream-to trace.jsonl is the file of the trace"]),
        ("trace.jsonl --stream-to s.jsonl --per-request r.csv --timeseries t.csv",
         ["--stream-to keeps no columns of requests; drop --per-request, --timeseries"]),
        ("trace.jsonl --exact-gaps 0", ["--exact-gaps", "at least 1, got 0"]),
        ("trace.jsonl --trace-window 5", ["--trace-window 5", "START:END"]),
        ("trace.jsonl --trace-window 5:5", ["--trace-window 5:5", "after the start"]),
        ("trace.jsonl --per-request .", ["--per-request . is a folder"]),
        ("trace.jsonl --per-request trace.jsonl", ["--per-request trace.jsonl is the file of the trace"]),
        ("trace.jsonl --report-jsonl a.jsonl --per-request ./a.jsonl", ["--per-request", "the file of --report-jsonl"]),
        ("trace.jsonl --report-json other.jsonl/r.json", ["--report-json", "cannot be written", "not a folder"]),
        ("trace.jsonl --frobnicate", ["--frobnicate"]),
    ],
)
def test_refused(stand, capsys, flags, parts):
    message = refused(capsys, *flags.format(syn=" ".join(SYNTHETIC)).split())
    assert message.startswith("mocker replay: error: ")
    for part in parts:
        assert part in message
    assert stand.workload is None


def test_refused_without_pyarrow(stand, capsys, monkeypatch):
    monkeypatch.setattr(replay_flags.importlib.util, "find_spec", lambda name: None)
    message = refused(capsys, "trace.jsonl", "--per-request", "r.parquet")
    assert "pip install 'mocker-llm[parquet]'" in message


def test_refused_without_permission(stand, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(replay_flags.os, "access", lambda path, mode: False)
    assert "no permission" in refused(capsys, "trace.jsonl", "--report-json", str(tmp_path / "r.json"))


def example_of(what: str) -> list[str]:
    """Flags that ask for an unsupported thing."""
    flag, _, value = what.partition(" ")
    if not value:
        value = "2" if flag.endswith(("-size", "-nextn")) else "{}"
    more = ["--replay-concurrency", "2"] if value == "applied_compute_agentic" else []
    return [flag, value, *more]


@pytest.mark.parametrize("what", [entry.what for entry in UNSUPPORTED])
def test_unsupported(stand, capsys, what):
    message = refused(capsys, "trace.jsonl", *example_of(what))
    assert message.startswith(f"mocker replay: error: {what} is not supported yet; ")
    assert stand.workload is None


def test_nothing_unsupported_in_plain_use(stand):
    assert run("trace.jsonl", "--aic-gemm-dtype", "auto", "--benchmark-granularity", "3") == 0


def test_policy_config_of_the_environment(stand, monkeypatch, capsys):
    monkeypatch.setenv("DYN_ROUTER_POLICY_CONFIG", "policy.yaml")
    assert run("trace.jsonl") == 0  # round robin has no queue policies
    assert "policy.yaml" in refused_after_success(capsys, "trace.jsonl", "--router-mode", "kv_router")


def refused_after_success(capsys, *argv: str) -> str:
    for path in Path().glob("dynamo_replay_report_*"):
        path.unlink()
    capsys.readouterr()
    return refused(capsys, *argv)


# -- output -----------------------------------------------------------------------------------------------------------


def test_table_and_default_report(stand, capsys):
    assert run("trace.jsonl") == 0
    out, err = capsys.readouterr()
    (path,) = Path().glob("dynamo_replay_report_*.json")
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "mocker | LLM serving simulation"
    assert lines[-2] == "Incomplete: 1 (not finished when the replay ended)"
    assert lines[-1] == f"Saved full report to: {path.absolute()}"
    expected = {"num_requests": 3, "completed_requests": 2, "wall_time_ms": 1.0, "incomplete_requests": 1}
    assert path.read_text() == json.dumps(expected, indent=2, sort_keys=True) + "\n"


def test_quiet(stand, capsys):
    assert run("trace.jsonl", "--quiet", "--report-json", "out/r.json") == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads(Path("out/r.json").read_text())["num_requests"] == 3


def test_report_json_folder(stand):
    Path("out").mkdir()
    assert run("trace.jsonl", "--report-json", "out") == 0
    assert len(list(Path("out").glob("dynamo_replay_report_*.json"))) == 1


def test_per_request_files(stand, capsys):
    assert run("trace.jsonl", "--report-jsonl", "ended.jsonl", "--per-request", "all.jsonl.gz") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["Saved per-request records to: ended.jsonl", "Saved per-request records to: all.jsonl.gz"]
    ended = [json.loads(line) for line in Path("ended.jsonl").read_text().splitlines()]
    assert [record["row"] for record in ended] == [2, 0]
    records = [json.loads(line) for line in gzip.decompress(Path("all.jsonl.gz").read_bytes()).splitlines()]
    assert [record["ttft_ms"] for record in records] == [1.5, None, 0.5]
    assert run(*SYNTHETIC, "--per-request", "all.parquet") == 0
    assert pq.read_table("all.parquet")["decode_worker_idx"].to_pylist() == [0, None, 1]


def test_devices_may_be_named(stand, capsys):
    assert run("trace.jsonl", "--report-json", os.devnull, "--report-jsonl", os.devnull) == 0
    assert not os.path.isfile(os.devnull)


def test_plain_box_where_the_encoding_has_no_lines(stand, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run("trace.jsonl") == 0
    lines = raw.getvalue().decode().splitlines()
    assert lines[1].startswith("+-")
    assert lines[2].startswith("| Metric ")


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("num_workers: bad"), 2, "num_workers: bad"),
        (FileNotFoundError(2, "No such file or directory", "x.npz"), 2, "x.npz: No such file or directory"),
        (IsADirectoryError(21, "Is a directory"), 2, "Is a directory"),
        (RuntimeError("no progress"), 1, "RuntimeError: no progress (--debug shows where)"),
        (ImportError("no compiled core"), 1, "no compiled core (--debug shows where)"),
        (MemoryError(), 1, "out of memory (--debug shows where)"),
        (KeyError("x"), 1, "KeyError: 'x' (--debug shows where)"),
    ],
)
def test_failure(stand, capsys, error, status, text):
    stand.error = error
    assert run("trace.jsonl") == status
    assert capsys.readouterr() == ("", f"mocker replay: error: {text}\n")
    assert not list(Path().glob("dynamo_replay_report_*"))


def test_debug_shows_the_traceback(stand, capsys):
    stand.error = RuntimeError("no progress")
    assert run("trace.jsonl", "--debug") == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("mocker replay: error: RuntimeError: no progress\n")


def test_interrupted(stand, capsys):
    stand.error = KeyboardInterrupt()
    assert run("trace.jsonl") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mocker replay: interrupted: ")
    assert "partial results are lost" in err


def test_interrupted_while_writing(stand, capsys, monkeypatch):
    def interrupt(self, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "write_jsonl", interrupt)
    assert run("trace.jsonl", "--report-json", "r.json", "--per-request", "all.jsonl") == 130
    assert capsys.readouterr().err == "mocker replay: interrupted: written: r.json; other results are lost\n"
    assert Path("r.json").exists()


def test_write_failure_still_prints_the_table(stand, capsys, monkeypatch):
    def fail(self, path):
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(Simulation, "write_jsonl", fail)
    assert run("trace.jsonl", "--report-json", "r.json", "--per-request", "all.jsonl") == 1
    out, err = capsys.readouterr()
    assert err == "mocker replay: error: the results could not be written: all.jsonl: No space left on device\n"
    assert "Request Count" in out
    assert out.splitlines()[-1] == "Saved full report to: r.json"


def script(*argv: str, unbuffered: bool = False) -> list[str]:
    """The command of a process that runs `mocker replay` with a stand-in."""
    code = f"""
        import sys, types
        import numpy as np
        from mocker.simulation import Simulation
        module = types.ModuleType("mocker.replay")
        module.simulate = lambda *a, **k: Simulation({{"num_requests": 3}}, {{"row": np.arange(3)}}, {{}})
        module.SyntheticSpec = object
        sys.modules["mocker.replay"] = module
        from mocker.cli import replay_main
        sys.exit(replay_main({list(argv)!r}))
    """
    return [sys.executable, *(["-u"] if unbuffered else []), "-c", textwrap.dedent(code)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_closed_pipe(tmp_path, unbuffered):
    (tmp_path / "trace.jsonl").write_text("{}\n")
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = script("trace.jsonl", "--report-json", "r.json", unbuffered=unbuffered)
    result = subprocess.run(
        command, cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE, env=environment(), timeout=60, check=False
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")
    assert json.loads((tmp_path / "r.json").read_text()) == {"num_requests": 3}


# -- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(stand, monkeypatch):
    """A function that runs `mocker replay` with a terminal as stderr, and returns what it showed."""
    stand.progress_calls = [(1, 3, 1500.0), (2, 3, 2500.0), (3, 3, 3000.0)]
    monkeypatch.setattr(terminal, "PROGRESS_DELAY_S", 0.0)

    def run_there(*argv, status=0, stderr=Terminal):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr())
            assert run(*argv) == status
            return sys.stderr.getvalue()

    return run_there


def test_progress_on_a_terminal(on_terminal):
    text = on_terminal("trace.jsonl")
    assert "1/3" in text
    assert "requests" in text
    assert "1.5 s simulated" in text


def test_no_progress_in_a_short_run(stand, on_terminal, monkeypatch):
    monkeypatch.setattr(terminal, "PROGRESS_DELAY_S", 1000.0)
    assert on_terminal("trace.jsonl") == ""
    assert stand.options["progress"] is not None


@pytest.mark.parametrize("flag", ["--quiet", "--no-progress"])
def test_no_progress_by_flag(stand, on_terminal, flag):
    assert on_terminal("trace.jsonl", flag) == ""
    assert stand.options["progress"] is None


def test_no_progress_without_a_terminal(stand, on_terminal):
    assert on_terminal("trace.jsonl", stderr=io.StringIO) == ""
    assert stand.options["progress"] is None


def test_progress_ends_with_an_error(on_terminal, monkeypatch):
    def simulate(workload, *, progress, **options):
        progress(1, 3, 0.0)
        raise RuntimeError("no progress")

    monkeypatch.setattr(sys.modules["mocker.replay"], "simulate", simulate)
    text = on_terminal("trace.jsonl", status=1)
    assert text.splitlines()[-1].endswith("RuntimeError: no progress (--debug shows where)")


# -- the command ------------------------------------------------------------------------------------------------------


def test_main_without_arguments_prints_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: mocker ")
    assert "replay" in out


def test_main_replay(stand, capsys):
    assert main(["replay", "trace.jsonl", "--quiet"]) == 0
    assert stand.workload == "trace.jsonl"
    with pytest.raises(SystemExit):
        main(["replay"])
    assert "mocker replay: error: " in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "status"), [(["--version"], 0), (["nonsense"], 2), (["replay", "--help"], 0)])
def test_main_exits(capsys, argv, status):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == status
    out, err = capsys.readouterr()
    if argv == ["--version"]:
        assert out == f"mocker {mocker.__version__}\n"
    if argv == ["nonsense"]:
        assert "nonsense" in err
        assert "replay" in err


def test_argv_of_the_process(stand, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mocker", "replay", "trace.jsonl", "--quiet"])
    assert main() == 0
    monkeypatch.setattr(sys, "argv", ["replay", "other.jsonl", "--quiet"])
    assert replay_main(prog="python -m mocker.replay") == 0
    assert stand.workload == "other.jsonl"


def test_prog_in_messages(stand, capsys):
    with pytest.raises(SystemExit):
        replay_main([], prog="python -m mocker.replay")
    assert "python -m mocker.replay: error: " in capsys.readouterr().err


def test_help_marks_what_is_unsupported(capsys):
    with pytest.raises(SystemExit):
        replay_main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for entry in UNSUPPORTED:
        if entry.what.startswith("--") and " " not in entry.what:
            start = text.index(f" {entry.what} ")
            assert "(not supported yet)" in text[start : start + 200]


def test_python_m_mocker():
    result = subprocess.run(
        [sys.executable, "-m", "mocker", "--version"], env=environment(), capture_output=True, timeout=60, check=True
    )
    assert result.stdout.decode().split() == ["mocker", mocker._version.__version__]


def test_startup_imports_nothing_heavy():
    code = "import sys, mocker.cli; print([m for m in ('pandas', 'pyarrow', 'numba', 'tqdm') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60, check=True
    )
    assert result.stdout.decode().strip() == "[]"


# -- with the real simulation -----------------------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch, tmp_path):
    pytest.importorskip("mocker.replay", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)


def test_real_synthetic(real, capsys):
    start = time.monotonic()
    assert run(*SYNTHETIC, "--report-json", "r.json", "--per-request", "all.jsonl", "--num-workers", "2") == 0
    assert time.monotonic() - start < 30
    report = json.loads(Path("r.json").read_text())
    assert set(REPORT_KEYS) - set(GOODPUT_KEYS) <= set(report)
    assert (report["num_requests"], report["completed_requests"], report["total_output_tokens"]) == (3, 3, 30)
    records = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == [0, 1, 2]
    assert [record["output_tokens"] for record in records] == [10, 10, 10]
    assert {record["terminal_status"] for record in records} == {"completed"}
    assert "Request Count" in capsys.readouterr().out


def test_real_trace_with_a_bad_line(real, capsys):
    good = '{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n'
    Path("bad.jsonl").write_text(good + '{"timestamp": 1, "input_length": "x", "output_length": 2, "hash_ids": [1]}\n')
    assert run("bad.jsonl") == 2
    err = capsys.readouterr().err
    assert "bad.jsonl" in err
    assert "2" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_real_stream(real, capsys, name):
    """The rows are all there, twice over, and the report is that of a replay which keeps them."""
    assert run(*SYNTHETIC, "--report-json", "whole.json") == 0
    for _ in range(2):
        assert run(*SYNTHETIC, "--report-json", "r.json", "--stream-to", name, "--exact-gaps", "1000") == 0
        assert f"Saved requests as they ended to: {name}" in capsys.readouterr().out
        rows = ([json.loads(line) for line in Path(name).read_text().splitlines()] if name.endswith("l")
                else pq.read_table(name).to_pylist())
        assert sorted(row["row"] for row in rows) == [0, 1, 2]
    whole, got = json.loads(Path("whole.json").read_text()), json.loads(Path("r.json").read_text())
    exact = [k for k in whole if not k.startswith(("wall_", "processed_", "mean_", "std_"))]
    assert {k: got[k] for k in exact} == {k: whole[k] for k in exact} and set(got) == set(whole)
    assert got["mean_e2e_latency_ms"] == pytest.approx(whole["mean_e2e_latency_ms"])
    assert run(*SYNTHETIC, "--report-json", "r.json", "--exact-gaps", "1") == 0
    assert "itl" in str(json.loads(Path("r.json").read_text())["sketched"])


def test_real_goodput(real, capsys):
    Path("t.jsonl").write_text('{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n')
    assert run("t.jsonl", "--sla-e2e-ms", "1e9", "--report-json", "r.json", "--report-jsonl", "r.jsonl") == 0
    assert json.loads(Path("r.json").read_text())["goodput_completed_requests"] == 1
    assert len(Path("r.jsonl").read_text().splitlines()) == 1


def test_reading_flags_recipes_and_the_defaults_of_the_reference(stand, tmp_path, capsys):
    assert "--recipe stands alone; drop the trace file" in refused(capsys, "trace.jsonl", "--recipe", "count=5")
    assert run("trace.jsonl", "--on-error", "skip", "--trace-cache", "c", "--trace-option", "time-unit=s") == 0
    assert stand.options["trace_options"] == {"on_error": "skip", "cache": "c", "time_unit": "s"}
    assert run("--recipe", "count=5; input=9") == 0
    assert stand.workload.count == 5 and "trace_options" not in stand.options
    assert replay_main(["trace.jsonl", "--quiet", "--report-json", str(tmp_path)], "python -m mocker.replay") == 0
    assert stand.options["trace_format"] == "mooncake"


def test_replay_of_a_trace_with_bad_rows(tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n0,10,2\n1,ten,2\n2,10,2\n")
    argv = ["replay", str(trace), "--report-json", str(tmp_path), "--no-progress", "--quiet"]
    assert main(argv) == 2 and "t.csv:3: input_length: must be a number" in capsys.readouterr().err
    assert main([*argv, "--on-error", "skip"]) == 0
    assert "skipped 1 rows" in capsys.readouterr().err
