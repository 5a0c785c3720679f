"""Replays in pieces: equal to `simulate` however they are cut; requests in and out; copies that go on alike."""
from __future__ import annotations

import pickle
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mocker
from mocker import KvRouterConfig, MockEngineArgs, SglangArgs, Trace, open_simulation, simulate
from mocker.replay.fast import FastPaths

WALL = {"wall_time_ms"}


def small(engine="vllm", **changes):
    common = {"block_size": 4, "num_gpu_blocks": 120, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    return MockEngineArgs(**{**common, "engine_type": engine, **changes})


def trace(seed=1, rows=60, sessions=False):
    """Prompts that share beginnings, with short and long answers, in bursts; every third session has three turns."""
    rng = random.Random(seed)
    arrival, lengths, outputs, ids, offsets, session, turn, delay = [], [], [], [], [0], [], [], []
    now, number = 0.0, 0
    while len(lengths) < rows:
        now += rng.choice([0.0, 1.0, 7.0, 40.0])
        stem = [rng.randrange(4) * 100 + i for i in range(rng.randrange(6))]
        for k in range(3 if sessions and number % 3 == 0 else 1):
            stem = stem + [1000 + len(ids) + i for i in range(rng.randrange(1, 5))]
            arrival.append(now if k == 0 else np.nan)
            lengths.append(len(stem) * 8 - rng.randrange(8))
            outputs.append(rng.choice([1, 2, 9, 40]))
            ids += stem
            offsets.append(len(ids))
            session.append(number)
            turn.append(k)
            delay.append(0.0 if k == 0 else rng.choice([0.0, 3.0]))
        number += 1
    return Trace.from_columns(
        block_size=8, arrival_ms=np.array(arrival), input_length=np.array(lengths), output_length=np.array(outputs),
        hash_offsets=np.array(offsets), hash_ids=np.array(ids, np.uint64), session=np.array(session, np.int32),
        turn=np.array(turn, np.int32), delay_ms=np.array(delay))


def disagg(engine):
    common = {"kv_bytes_per_token": 100_000, "kv_transfer_bandwidth": 1.0}
    return {"prefill_engine_args": small(engine, worker_type="prefill", **common),
            "decode_engine_args": small(engine, worker_type="decode", **common), "num_prefill_workers": 2,
            "num_decode_workers": 2}


MTP = {"aic_nextn": 2, "aic_nextn_accept_rates": "0.7,0.5"}
CASES = {
    "one": {"extra_engine_args": small()},
    "no_cache": {"extra_engine_args": small(enable_prefix_caching=False), "num_workers": 2},
    "three": {"extra_engine_args": small(), "num_workers": 3},
    "trtllm": {"extra_engine_args": small("trtllm"), "num_workers": 2},
    "sglang": {"extra_engine_args": small("sglang"), "num_workers": 2},
    "sglang_lpm": {"extra_engine_args": small("sglang", sglang=SglangArgs(schedule_policy="lpm"))},
    "rules": {"extra_engine_args": small(scheduler_rules="vllm-0.33"), "num_workers": 2},
    "rules_async_kv": {"extra_engine_args": small(scheduler_rules="vllm-0.33-async"), "num_workers": 2,
                       "router_mode": "kv_router"},
    "mtp": {"extra_engine_args": small(**MTP), "num_workers": 2},
    "mtp_sglang": {"extra_engine_args": small("sglang", **MTP), "num_workers": 2},
    "kv": {"extra_engine_args": small(), "num_workers": 3, "router_mode": "kv_router"},
    "kv_queue": {"extra_engine_args": small(), "num_workers": 3, "router_mode": "kv_router",
                 "router_config": KvRouterConfig(router_queue_threshold=0.5)},
    "kv_sglang": {"extra_engine_args": small("sglang"), "num_workers": 3, "router_mode": "kv_router"},
    "least": {"extra_engine_args": small(), "num_workers": 3, "router_mode": "least_requests"},
    "two_choices": {"extra_engine_args": small(), "num_workers": 3, "router_mode": "power_of_two"},
    "closed": {"extra_engine_args": small(), "num_workers": 2, "replay_concurrency": 5},
    "closed_one": {"extra_engine_args": small(), "replay_concurrency": 5},
    "tokens": {"extra_engine_args": small(), "num_workers": 2, "fast_forward": FastPaths(extents=False)},
    "tokens_kv_sglang": {"extra_engine_args": small("sglang"), "num_workers": 2, "router_mode": "kv_router",
                         "fast_forward": FastPaths(extents=False)},
    "cap": {"extra_engine_args": small(), "num_workers": 2, "max_sim_time_ms": 400.0},
    "disagg": disagg("vllm"),
    "disagg_kv": {**disagg("vllm"), "router_mode": "kv_router"},
    "disagg_sglang": disagg("sglang"),
}


def same(a, b):
    """Two results are equal to the last bit."""
    keep = [{k: v for k, v in r.report.items() if k not in WALL and not k.startswith("processed_")} for r in (a, b)]
    assert repr(keep[0]) == repr(keep[1])
    assert list(a.per_request) == list(b.per_request)
    for name, column in a.per_request.items():
        np.testing.assert_array_equal(column, b.per_request[name], err_msg=name)


def cut(sim, seed):
    """Run to the end in pieces of all kinds."""
    rng = random.Random(seed)
    while not sim.finished:
        how = rng.randrange(4)
        if how == 0:
            sim.step()
        elif how == 1:
            sim.run_until(sim.now_ms + rng.choice([0.0, 0.3, 5.0, 60.0]))
        elif how == 2:
            sim.run_completions(rng.randrange(1, 6))
        else:
            for _ in range(rng.randrange(20)):
                sim.step()
    return sim


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_pieces_are_the_whole(name, sessions):
    arguments, work = CASES[name], trace(3, sessions=sessions)
    whole = simulate(work, **arguments)
    same(open_simulation(work, **arguments).run().result(), whole)
    for seed in range(2):
        same(cut(open_simulation(work, **arguments), seed).result(), whole)


def copies_agree(work, arguments, whole, copies, completions):
    """Copies of every kind, some completions apart from each other, go on as the run without any did."""
    sim, kept = open_simulation(work, **arguments), []
    for _ in range(copies):
        sim.run_completions(completions)
        kept.append((sim.fork(), sim.snapshot(), pickle.loads(pickle.dumps(sim))))
        for _ in range(5):
            sim.step()
    same(sim.run().result(), whole)
    for seed, (fork, snapshot, pickled) in enumerate(kept):
        same(cut(fork, seed).result(), whole)
        same(pickled.run().result(), whole)
        sim.restore(snapshot)
        same(sim.run().result(), whole)
        for each in (fork, pickled, sim):
            for engine in each._cluster.engines:
                engine.check()


@pytest.mark.parametrize("name", CASES)
def test_copies_go_on_alike(name):
    arguments, work = CASES[name], trace(5, sessions=True)
    copies_agree(work, arguments, simulate(work, **arguments), 6, 8)


# ---- requests in and out ----------------------------------------------------------------------------------------

def halves(work, rows):
    """A trace's first rows, and the others as requests to inject (single requests, in order of arrival)."""
    n = work.hash_offsets[rows]
    first = Trace.from_columns(
        block_size=8, arrival_ms=work.arrival_ms[:rows], input_length=work.input_length[:rows],
        output_length=work.output_length[:rows], hash_offsets=work.hash_offsets[:rows + 1],
        hash_ids=work.hash_ids[:n], session=np.arange(rows, dtype=np.int32), turn=np.zeros(rows, np.int32),
        delay_ms=np.zeros(rows))
    rest = [{"input_length": int(work.input_length[i]), "output_length": int(work.output_length[i]),
             "hash_ids": work.hash_ids[work.hash_offsets[i]:work.hash_offsets[i + 1]].tolist(),
             "timestamp": float(work.arrival_ms[i])} for i in range(rows, len(work))]
    return first, rest


OPEN = [name for name, case in CASES.items() if "replay_concurrency" not in case]


@pytest.mark.parametrize("name", OPEN)
def test_injected_requests_are_as_if_there_from_the_start(name):
    work = trace(7)
    work = replace(work, arrival_ms=work.arrival_ms - work.arrival_ms[0])      # as the replay itself begins
    whole = simulate(work, **CASES[name])
    first, rest = halves(work, 20)
    sim = open_simulation(first, **CASES[name])
    rng = random.Random(name)
    for i, request in enumerate(rest):
        if rng.random() < 0.5:                 # known some time before
            sim.run_until(min(max(sim.now_ms, request["timestamp"] - rng.choice([0.01, 3.0])),
                              request["timestamp"]))
        if i == 10:
            sim = pickle.loads(pickle.dumps(sim.fork()))
        if sim.finished:
            break
        assert sim.inject(request) == 20 + i
    if name != "cap":
        assert sim.requests == len(work)
    got = sim.run().result()
    for column, values in got.per_request.items():
        np.testing.assert_array_equal(values, whole.per_request[column], err_msg=column)
    for key in ("mean_itl_ms", "prefix_cache_reused_ratio", "duration_ms", "std_itl_ms", "p99_ttft_ms"):
        assert got.report[key] == whole.report[key], key


def changed(name, seed, **fast):
    """What comes of cancelling and injecting several requests each time that the clock stops."""
    rng, told = random.Random(seed), []
    sim = open_simulation(trace(seed, 40, sessions=seed % 2 == 1), **{**CASES[name], **fast})
    for _ in range(12):
        sim.run_until(sim.now_ms + rng.choice([0.0, 2.0, 15.0, 60.0]))
        for _ in range(rng.randrange(4)):
            row = rng.randrange(sim.requests)
            if sim.finished:
                break
            if rng.random() < 0.5:
                when = {"timestamp": sim.now_ms + 4.0} if name in OPEN and rng.random() < 0.4 else {}
                sim.inject(input_length=rng.randrange(1, 40), output_length=rng.choice([1, 3, 30]), **when)
            elif not np.isnan(sim.columns["arrival_ms"][row]):
                told.append((row, sim.cancel(row)))
    return sim.run().result(), told


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("tokens")])
def test_fast_paths_do_not_pass_what_is_changed(name):
    answers = set()
    for seed in range(6):
        (fast, told), (plain, told_plain) = changed(name, seed), changed(name, seed, fast_forward=False)
        same(fast, plain)
        assert told == told_plain
        answers |= {found for _, found in told}
    assert answers == {False, True}


@pytest.mark.parametrize("name", CASES)
def test_cancelled_requests_leave_nothing_behind(name):
    work = trace(9, sessions=True)
    sim = open_simulation(work, **CASES[name])
    rng, gone = random.Random(name), set()
    while sim.step():
        row = rng.randrange(sim.requests)
        if rng.random() < 0.5 and not np.isnan(sim.columns["arrival_ms"][row]):
            ended = sim.columns["terminal"][row] != 0
            found = sim.cancel(row)
            assert found == (not ended)
            if found:
                gone.add(row)
            twin = sim.fork()
            twin.step()
    result = sim.result()
    status = dict(zip(result.per_request["row"].tolist(), result.per_request["terminal_status"], strict=True))
    assert gone and {status[row] for row in gone} == {"canceled"}
    if name != "cap":
        assert set(status) == set(range(len(work)))
        assert {s for row, s in status.items() if row not in gone} <= {"completed"}
        assert sim.in_flight == sim.queued == 0
        for engine, state in zip(sim._cluster.engines, sim.workers, strict=True):
            engine.check()
            assert state["running"] == state["waiting"] == state["used_blocks"] == 0


def test_cancelled_before_they_arrive():
    work = trace(11)
    sim = open_simulation(work, extra_engine_args=small(), num_workers=2)
    sim.run_until(30.0)
    late = np.flatnonzero(np.isnan(sim.columns["arrival_ms"]))
    assert all(sim.cancel(int(row)) for row in late)
    result = sim.run().result()
    assert sim.finished and len(result.per_request["row"]) == len(work) - len(late)
    chain = open_simulation(trace(11, sessions=True), extra_engine_args=small())
    with pytest.raises(ValueError, match="before those that it waits for have ended"):
        chain.cancel(2)


def test_scaling_by_hand_is_a_planner_s():
    class Twice:
        def initial_tick_ms(self):
            return 50.0

        def on_tick(self, metrics):
            first = metrics["now_ms"] == 50.0
            return {"target_prefill": None, "target_decode": 3 if first else 1,
                    "next_tick_ms": 300.0 if first else None}

    arguments = {"extra_engine_args": small(startup_time=0.02), "num_workers": 1}
    planned = simulate(trace(13), planner=Twice(), **arguments)
    sim = open_simulation(trace(13), scaling=True, **arguments)
    sim.run_until(50.0)
    sim.scale(3)
    fork = sim.fork()
    for each in (sim, fork):
        each.run_until(300.0)
        assert each.workers["life"].tolist() == [1, 1, 1]
        each.scale(1)
    for each in (sim, pickle.loads(pickle.dumps(fork))):
        got = each.run().result()
        for column, values in got.per_request.items():
            np.testing.assert_array_equal(values, planned.per_request[column], err_msg=column)
        assert got.scaling == planned.scaling and got.report["gpu_hours"] == planned.report["gpu_hours"]


# ---- looking at it ----------------------------------------------------------------------------------------------

def test_views_follow_the_simulation():
    sim = open_simulation(trace(1), extra_engine_args=small(), num_workers=2)
    columns, workers = sim.columns, sim.workers
    memory = {name: column.ctypes.data for name, column in columns.items()}
    sim.run_until(100.0)
    assert not np.isnan(columns["first_token_ms"]).all()       # the same memory
    assert {name: column.ctypes.data for name, column in sim.columns.items()} == memory
    assert sim.workers is workers and workers["running"].sum() + workers["waiting"].sum() > 0
    assert (workers["used_blocks"] + workers["cached_blocks"] <= workers["capacity_blocks"]).all()
    with pytest.raises(ValueError, match="read-only"):
        columns["first_token_ms"][0] = 1.0
    partial = sim.result()
    assert partial.report["num_requests"] < 60 and not sim.finished
    same(sim.run().result(), simulate(trace(1), extra_engine_args=small(), num_workers=2))


def test_what_is_refused():
    work, arguments = trace(1, rows=10), {"extra_engine_args": small()}
    sim = open_simulation(work, **arguments)
    for request, message in [({"input_length": 0, "output_length": 1}, "input_length .* out of range"),
                             ({"input_length": 3}, "output_length .* must be an integer"),
                             ({"input_length": 9, "output_length": 1, "hash_ids": [1]}, "do not cover"),
                             ({"input_length": 9, "output_length": 1, "isl": 1}, "no field 'isl'"),
                             ({"input_length": 9, "output_length": 1, "timestamp": -1.0}, "not before 0")]:
        with pytest.raises(ValueError, match=message):
            sim.inject(request)
    with pytest.raises(ValueError, match="there is no request 10"):
        sim.cancel(10)
    with pytest.raises(ValueError, match="finite time that is not before"):
        sim.run_until(float("nan"))
    with pytest.raises(ValueError, match="of another simulation"):
        sim.restore(open_simulation(work, **arguments).snapshot())
    with pytest.raises(ValueError, match="scaling=True"):
        sim.scale(2)
    with pytest.raises(TypeError, match="unexpected keyword"):
        open_simulation(work, workers=2)
    with pytest.raises(ValueError, match="no progress"):
        open_simulation(work, progress=print)
    data = bytearray(pickle.dumps(sim.snapshot()))
    at = data.index(sim.snapshot()._data[:200])
    data[at + 100] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        pickle.loads(bytes(data))


@pytest.mark.parametrize("name", ["three", "kv_queue", "kv_sglang", "rules_async_kv", "disagg_kv", "closed"])
def test_copies_record_alike(name):
    """Series, passes and reports of copies, while the log of passes is thinned out."""
    arguments = {**CASES[name], "recording": mocker.Recording(passes=60)}
    sim = open_simulation(trace(5), **arguments)
    for _ in range(3):
        sim.run_completions(9)
        snapshot, copies = sim.snapshot(), [sim.fork(), pickle.loads(pickle.dumps(sim))]
        partial = sim.result().timeline
    sim.restore(snapshot)
    whole = sim.run().result()
    for copy in copies:
        got = copy.run().result()
        same(got, whole)
        for field in ("interval_ms", "series", "router_queue", "passes", "sampling"):
            np.testing.assert_equal(getattr(got.timeline, field), getattr(whole.timeline, field))
    assert len(partial.passes["start_ms"]) > 0 and sim.result() is whole


def test_every_owned_array_is_carried():
    """A pointer in a structure that owns memory is named by the function that carries the structure."""
    package = Path(mocker.__file__).parent
    carried = "".join(path.read_text() for path in package.glob("_carry_*.pyx"))
    for file, structures, borrowed in [
            ("_kv.pxd", ["Path", "Pool"], {"tiers", "catalog", "fresh"}),
            ("_core.pxd", ["Request", "Core"], {"rows", "gaps", "tiers"}),
            ("_hooks.pxd", ["AdmissionHook"], {"engine"}),
            ("_ranks.pxd", ["Ranks"], {"now", "owner"}),
            ("_rules.pxd", ["Extra", "VllmRulesCore"], {"c"}), ("_radix.pxd", ["Map", "Node", "Radix"], set()),
            ("_sglang.pxd", ["SglRequest", "SglangCore"], {"rows", "gaps"}),
            ("_record.pxd", ["Timeline"], set()),
            ("_offload.pxd", ["Lane", "Lease", "Shared", "Offload", "World"],
             {"pending", "world", "core", "row_parked", "row_blocks", "workers", "timeline"}),
            ("_offload_blocks.pxd", ["Spans", "BlockSet", "KeyMap", "Catalog"], set()),
            ("_offload_links.pxd", ["Link"], set()), ("_offload_marks.pxd", ["Marks"], set()),
            ("_offload_tiers.pxd", ["Heap", "Tier"], {"future", "catalog"}),
            ("_router.pxd", ["KeyTable", "Segment", "Ticket", "QueueClass", "Lower", "Router"],
             {"choose_context", "estimate_context", "world"})]:
        text = (package / file).read_text()
        for structure in structures:
            body = re.search(rf"^cdef struct {structure}:.*?(?=\n\n\n|\Z)", text, re.M | re.S).group()
            for name in set(re.findall(r"^    [\w]+\* (\w+)", body, re.M)) - borrowed:
                assert re.search(rf"<void\*\*>&[\w.\[\]]*\b{name},", carried), f"{structure}.{name} is not carried"


@pytest.mark.parametrize("name", ["three", "kv_queue", "sglang", "disagg", "closed"])
def test_cancelling_is_a_client_s_giving_up(name):
    work = trace(15)
    after = np.full(len(work), np.nan)
    after[::5] = 30.0
    whole = simulate(replace(work, cancel_after_ms=after), **CASES[name])
    same(cut(open_simulation(replace(work, cancel_after_ms=after), **CASES[name]), 1).result(), whole)
    if name == "closed":                       # whose arrival times nobody knows before
        return
    sim = open_simulation(work, **CASES[name])
    for row in range(0, len(work), 5):
        sim.run_until(float(work.arrival_ms[row] - work.arrival_ms[0] + 30.0))
        sim.cancel(row)
    got = sim.run().result()
    for column in ("last_token_ms", "terminal_status", "output_tokens"):
        np.testing.assert_array_equal(got.per_request[column], whole.per_request[column], err_msg=column)


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 2, "router_mode": "kv_router"}],
                         ids=["one", "two", "kv"])
def test_tiers_below_the_pools(more):
    arguments = {"extra_engine_args": small(num_gpu_blocks=40, num_g2_blocks=80, kv_bytes_per_token=1000), **more}
    whole = simulate(trace(17), **arguments)
    sim = cut(open_simulation(trace(17), **arguments), 3)
    same(sim.result(), whole)


@pytest.mark.parametrize(("rows", "workers"), [(6000, 2), (12_031, 1)])
def test_long_logs_of_gaps_come_to_the_same_bits(rows, workers):
    """`simulate` sums them up in parts as they grow, a replay in pieces keeps them whole."""
    work = Trace.load(mocker.sample_trace_path()).head(rows)
    sim = open_simulation(work, num_workers=workers)
    sim.run_completions(rows // 2)
    sim.run_completions(rows)
    same(sim.result(), simulate(work, num_workers=workers))
    assert len(sim._cluster.collector.gap_log()[0]) > 2**15
