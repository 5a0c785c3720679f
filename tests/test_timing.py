"""Timing models: profiles against the reference's recorded replays, functions against equal models, and bad ones."""
from __future__ import annotations

import ctypes
import json
import pickle
import random
import threading
from fractions import Fraction

import numpy as np
import pytest
from fuzz_timing import GOLDEN, case, random_profile, rows_digest

import mocker
from mocker import MockEngineArgs, simulate
from mocker._models import MemoModel
from mocker._timing import decode_ms, decode_row_ms, duration_ms
from mocker.timeline import SERIES, Recording
from mocker.timing import FormulaTiming, FunctionTiming, GridTiming, load_timing

RECORDED = json.loads(GOLDEN.read_text())["seeds"]
SPEC = mocker.SyntheticSpec(300, 60, 40, arrival_interval_ms=3.0)


def same(one, other) -> None:
    assert list(one.per_request) == list(other.per_request)
    for name, column in one.per_request.items():
        np.testing.assert_array_equal(column, other.per_request[name], err_msg=name)


def arrays() -> dict:
    return {"prefill_isl": np.array([0.0, 100.0, 1000.0]), "prefill_ttft_ms": np.array([5.0, 7.0, 40.0]),
            "decode_active_kv_tokens": np.array([0.0, 5000.0]), "decode_context_length": np.array([0.0, 200.0, 400.0]),
            "decode_itl": np.array([[2.0, 3.0, 5.0], [4.0, 6.0, 11.0]])}


@pytest.mark.parametrize("seed", [int(s) for s in RECORDED])
def test_profiles_as_reference(seed, tmp_path):
    _, options = case(seed, tmp_path)
    for fast in (True, False):
        result = simulate(tmp_path / "trace.jsonl", compat="reference", fast_forward=fast, router_tie_break="lowest",
                          **options)
        assert list(rows_digest(result)) == RECORDED[str(seed)]


def test_interpolation():
    """On, between and outside points, as exact arithmetic has it."""
    rng = random.Random(5)
    for _ in range(60):
        model = random_profile(rng)
        a = {name: [Fraction(x) for x in values.ravel().tolist()] for name, values in model.arrays.items()}
        for _ in range(20):
            tokens, kv, context = (rng.choice([rng.randrange(1, 500), int(rng.choice(points.tolist())) + 1])
                                   for points in list(model.arrays.values())[:1] + list(model.arrays.values())[2:4])
            batch = rng.randrange(1, 4)
            want = max(line(a["prefill_isl"], a["prefill_ttft_ms"], batch * tokens), 0)
            assert model.prefill_ms(batch, tokens, 9) == pytest.approx(float(want), rel=1e-9, abs=1e-6)
            columns = len(a["decode_context_length"])
            rows = [line(a["decode_active_kv_tokens"], a["decode_itl"][j::columns], kv) for j in range(columns)]
            want = max(line(a["decode_context_length"], rows, context), 1)
            assert model.decode_ms(batch, kv, context) == pytest.approx(float(want), rel=1e-9, abs=1e-6)


def line(xs: list, ys: list, x) -> Fraction:
    i = max([0] + [i for i in range(len(xs) - 1) if xs[i] <= x])
    return ys[i] + (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) * (x - xs[i])


@pytest.mark.parametrize(("change", "message"), [
    ({"decode_itl": None}, "lacks decode_itl"),
    ({"prefill_isl": None, "decode_context_length": None}, "lacks prefill_isl, decode_context_length"),
    ({"prefill_ttft_ms": [5.0, 7.0]}, r"prefill_ttft_ms must have shape \(3,\)"),
    ({"decode_itl": np.ones((3, 2))}, r"decode_itl must have shape \(2, 3\)"),
    ({"prefill_isl": [[0.0, 1.0, 2.0]]}, "prefill_isl must have one dimension"),
    ({"decode_active_kv_tokens": [1.0], "decode_itl": np.ones((1, 3))}, "decode_active_kv_tokens needs at least 2"),
    ({"prefill_isl": [0.0, 9.0, 9.0]}, "prefill_isl must rise strictly, but repeats at index 2: 9, 9"),
    ({"decode_context_length": [0.0, 5.0, 4.0]}, "decode_context_length must rise strictly, but falls at index 2"),
    ({"prefill_ttft_ms": [5.0, np.nan, 7.0]}, "prefill_ttft_ms holds nan"),
    ({"decode_active_kv_tokens": [0.0, np.inf]}, "decode_active_kv_tokens holds inf"),
    ({"decode_itl": [[2.0, 3.0, 4.0], [1.0, -2.0, 1.0]]}, r"decode_itl\[1, 1\] must be ms from 0"),
    ({"prefill_ttft_ms": [5.0, 1e13, 7.0]}, r"prefill_ttft_ms\[1\] must be ms from 0"),
    ({"prefill_isl": ["a", "b", "c"]}, "prefill_isl must hold real numbers"),
    ({"prefill_isl": [1j, 2j, 3j]}, "prefill_isl must hold real numbers"),
])
def test_bad_profiles(change, message, tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, **{name: value for name, value in (arrays() | change).items() if value is not None})
    for use in (lambda: GridTiming.load(path), lambda: simulate(SPEC, extra_engine_args=MockEngineArgs(
            planner_profile_data=path)), lambda: MockEngineArgs(timing_model=str(path))):
        with pytest.raises(ValueError, match=message) as caught:
            use()
        assert "bad.npz" in str(caught.value)


def test_bad_files(tmp_path):
    for name, content, message in [
            ("no.npz", None, "No such file"), ("text.npz", b"hello", "not an NPZ file"),
            ("cut.npz", b"PK\x03\x04 broken", "not an NPZ file"), ("empty.npz", b"", "not an NPZ file"),
            ("list.json", b"[1]", "mocker-timing-1"), ("cut.json", b"{", "not a JSON file"),
            ("term.json", b'{"format": "mocker-timing-1", "prefill_ms": {"cost": 1}, "decode_ms": {}}',
             "prefill_ms has unknown terms cost"),
            ("value.json", b'{"format": "mocker-timing-1", "prefill_ms": {"tokens": "1"}, "decode_ms": {}}',
             "prefill_ms.tokens must be a finite number, got '1'")]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            mocker.create_engine_core(MockEngineArgs(planner_profile_data=tmp_path / name))
        assert name in str(caught.value)
    with pytest.raises(ValueError, match=r"neither selected_prefill_interpolation/raw_data.npz nor prefill_raw"):
        mocker.create_engine_core(MockEngineArgs(planner_profile_data=tmp_path))
    objects = tmp_path / "objects.npz"
    np.savez(objects, **(arrays() | {"decode_itl": np.array([[{}]], dtype=object)}))
    with pytest.raises(ValueError, match=r"objects.npz: decode_itl cannot be read"):
        GridTiming.load(objects)


def prefill(batch, tokens, prefix):
    return 3.0 + 0.01 * (batch * tokens) + 1e-6 * (batch * tokens) * (prefix + 0.5 * tokens)


def decode(batch, kv_tokens, context):
    return 2.0 + 0.05 * batch + 1e-4 * kv_tokens + 2e-5 * (batch * context)


def decode_flat(batch, kv_tokens, context):
    return 2.0 + 0.05 * batch + 1e-4 * kv_tokens + 0.0 * context


ENGINES = [{}, {"engine_type": "sglang", "block_size": 4}, {"engine_type": "trtllm"}, {"aic_nextn": 2},
           {"scheduler_rules": "vllm-0.33"}, {"scheduler_rules": "vllm-0.33-async"},
           {"num_gpu_blocks": 100, "block_size": 16, "max_num_seqs": 7}]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())) or "vllm")
def test_functions_agree(engine):
    """One model as a formula and as functions of every kind, with and without fast-forward."""
    numba = pytest.importorskip("numba")
    compiled = [numba.cfunc("float64(int64, int64, int64)")(f) for f in (prefill, decode)]
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    signature = b"double (int64_t, int64_t, int64_t)"
    models = [FormulaTiming((3.0, 0.01, 0.0, 1e-6), (2.0, 0.05, 1e-4, 0.0, 2e-5)), FunctionTiming(prefill, decode),
              FunctionTiming(prefill, decode, vectorized=True), FunctionTiming(*compiled),
              FunctionTiming(*[new_capsule(f.address, signature, None) for f in compiled]),
              FunctionTiming(*[f.address for f in compiled])]
    first = None
    for model in models:
        for fast in (True, False):
            result = simulate(SPEC, extra_engine_args=MockEngineArgs(timing_model=model, **engine), num_workers=2,
                              fast_forward=fast)
            first = first or result
            same(first, result)


def test_functions_without_context():
    models = [FormulaTiming((3.0, 0.01, 0.0, 1e-6), (2.0, 0.05, 1e-4, 0.0, 0.0)),
              FunctionTiming(prefill, decode_flat, uses_context=False),
              FunctionTiming(prefill, decode_flat, uses_context=False, vectorized=True),
              FunctionTiming(prefill, decode_flat)]
    results = [simulate(SPEC, extra_engine_args=MockEngineArgs(timing_model=m)) for m in models]
    for result in results:
        same(results[0], result)
    calls = [m.core.calls for m in models[1:]]
    assert calls[0] == calls[1] < calls[2] / 2


@pytest.mark.parametrize("engine", [{}, {"engine_type": "sglang"}, {"scheduler_rules": "vllm-0.33-async"}])
def test_failing_functions(engine):
    def fail(batch, tokens, depth):
        if depth > 320:
            raise KeyError("beyond my table")
        return 5.0

    for bad, error, message in [(fail, KeyError, "beyond my table"), (lambda *_: float("nan"), ValueError, "got nan"),
                                (lambda *_: -1.0, ValueError, "got -1.0"), (lambda *_: None, ValueError, "got None"),
                                (lambda *_: 1e300, ValueError, "got 1e")]:
        args = MockEngineArgs(timing_model=FunctionTiming(prefill, bad), **engine)
        for _ in range(2):
            with pytest.raises(error, match=message):
                simulate(SPEC, extra_engine_args=args)
    core = mocker.create_engine_core(MockEngineArgs(timing_model=FunctionTiming(fail, fail), **engine))
    core.receive(mocker.DirectRequest(tokens=list(range(400)), max_output_tokens=9))
    with pytest.raises(KeyError, match="beyond"):
        for _ in range(9):
            core.execute_pass(0.0)
    args = MockEngineArgs(timing_model=FunctionTiming(prefill, lambda b, k, c: np.ones(3), vectorized=True), **engine)
    with pytest.raises(ValueError, match="must return 64 times for 64 questions"):
        simulate(SPEC, extra_engine_args=args)


def test_bad_functions():
    numba = pytest.importorskip("numba")
    narrow = numba.cfunc("float64(int64, int64)")(lambda a, b: 1.0)
    wide = numba.cfunc("float64(int64, int64, int64)")(decode)
    for given, message in [((prefill, 1.5), "decode must be callable"), ((prefill, narrow), "cfunc of float64"),
                           ((prefill, wide), "both be compiled"), ((wide, wide, True), "cannot be vectorized")]:
        with pytest.raises(TypeError, match=message):
            FunctionTiming(*given[:2], vectorized=len(given) > 2)
    with pytest.raises(ValueError, match="timing_model: must be a timing model of mocker.timing"):
        MockEngineArgs(timing_model=3)
    both = MockEngineArgs(timing_model=FunctionTiming(prefill, decode), planner_profile_data="p.npz")
    with pytest.raises(ValueError, match="both set"):
        simulate(SPEC, extra_engine_args=both)


def test_memo_many_threads():
    """Replays that share a model fill its memo together and read it without the GIL; all are equal."""
    want = simulate(SPEC, extra_engine_args=MockEngineArgs(timing_model=FormulaTiming(
        (3.0, 0.01, 0.0, 1e-6), (2.0, 0.05, 1e-4, 0.0, 2e-5))))
    for _ in range(3):
        args = MockEngineArgs(timing_model=FunctionTiming(prefill, decode))
        results: list = []
        threads = [threading.Thread(target=lambda: results.append(simulate(SPEC, extra_engine_args=args)))  # noqa: B023
                   for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for result in results:
            same(want, result)


def test_memo_is_exact():
    """Each distinct question is asked once, whatever the order, and its answer is what was said."""
    asked: dict = {}

    def answer(*question):
        asked[question] = asked.get(question, 0) + 1
        return 1.0 + random.Random(repr(question)).random()

    model = MemoModel(lambda *question: answer("prefill", *question), lambda *question: answer("decode", *question),
                      True, True, 0)
    rng = random.Random(1)
    questions = [(rng.randrange(1, 40), rng.randrange(1, 200), rng.randrange(1, 9)) for _ in range(20_000)]
    for b, t, p in questions:
        assert model.prefill_ms(b, t, p) == 1.0 + random.Random(repr(("prefill", b, t, p))).random()
        assert model.decode_ms(b, p, t) == 1.0 + random.Random(repr(("decode", b, p, t))).random()
    assert set(asked.values()) == {1} and len(asked) == model.calls == 2 * len(set(questions))
    keys, times = model.tables[1].export()
    assert len(keys) == len(set(questions))
    again = MemoModel(None, None, True, True, 0)
    again.tables[1].load(keys, times)
    assert all(again.decode_ms(b, p, t) == model.decode_ms(b, p, t) for b, t, p in questions)


@pytest.mark.parametrize("rules", ["dynamo-mocker-1.3.0", "vllm-0.33-async"])
def test_recorded_over_time(rules):
    """Stretches of passes that grow longer fill the same bins as the passes one by one."""
    args = MockEngineArgs(timing_model=FormulaTiming((3.0, 0.01, 0.0, 0.0), (2.0, 0.05, 0.0, 0.0, 2e-3)),
                          scheduler_rules=rules)
    fast, slow = (simulate(SPEC, extra_engine_args=args, recording=Recording(), fast_forward=fast).timeline
                  for fast in (True, False))
    for name in SERIES:
        np.testing.assert_allclose(fast.series[name], slow.series[name], rtol=1e-3, atol=1e-3, err_msg=name)


def test_saved_and_pickled(tmp_path):
    grid = GridTiming(**arrays())
    grid.save(tmp_path / "grid.npz")
    formula = FormulaTiming((3.0, 0.01, 0.0, 1e-6), (2.0, 0.05, 1e-4, 0.0, 2e-5), {"rows": 7})
    formula.save(tmp_path / "formula.json")
    for model, name in ((grid, "grid.npz"), (formula, "formula.json")):
        want = simulate(SPEC, extra_engine_args=MockEngineArgs(timing_model=model))
        for args in (MockEngineArgs(timing_model=load_timing(tmp_path / name)),
                     MockEngineArgs(planner_profile_data=tmp_path / name),
                     MockEngineArgs.from_json(json.dumps({"timing_model": str(tmp_path / name)})),
                     pickle.loads(pickle.dumps(MockEngineArgs(timing_model=model)))):
            same(want, simulate(SPEC, extra_engine_args=args))
    args = MockEngineArgs(timing_model=formula)
    assert args.copy() == args != MockEngineArgs()
    assert "FormulaTiming" in json.loads(args.to_json())["timing_model"]
    assert "timing_model" not in MockEngineArgs().to_dict()
    function = pickle.loads(pickle.dumps(FunctionTiming(prefill, decode, uses_context=False)))
    assert function.decode_ms(3, 100, 50) == decode(3, 100, 0)


def test_clock_rounding():
    """Nanoseconds are the exact product's, ties to even, on the short way and on the long one."""
    rng = random.Random(3)
    cases = [rng.uniform(0.0, 10.0 ** rng.randrange(-6, 9)) for _ in range(20_000)]
    cases += [(2 * rng.randrange(1, 10**9) + 1) / 2e6 for _ in range(5_000)]          # near ties
    for ms in cases:
        seconds = Fraction(ms / 1000.0)
        nanos = round(seconds * 10**9)
        for ratio in (0.0, 1.0):
            assert duration_ms(ms, ratio) == (nanos // 10**9 + (nanos % 10**9) / 1e9) * 1000.0, (ms, ratio)


@pytest.mark.parametrize("speedup", [1.0, 2.5])
def test_decode_times_in_a_row_are_those_one_by_one(speedup):
    """Every pool in use, also those whose time lies between two nanoseconds, and pools in use beyond the whole."""
    tokens, wrong = 100_003, []
    for first in range(1, tokens, 31):
        row = decode_row_ms(first, 1, tokens, 31, tokens, 1, speedup)
        wrong += [first + k for k, ms in enumerate(row)
                  if ms != decode_ms(1, min(first + k, tokens), tokens, 1, speedup)]
    assert not wrong
    rng = random.Random(speedup)
    for _ in range(2000):
        blocks, size, step = rng.randrange(1, 10**rng.randrange(1, 7)), rng.choice([1, 16, 64]), rng.randrange(1, 300)
        first, most, count = rng.randrange(1, blocks + 1), blocks * rng.choice([1, 1, 2]), rng.randrange(1, 33)
        assert decode_row_ms(first, step, most, count, blocks, size, speedup) == [
            decode_ms(1, min(first + k * step, most), blocks, size, speedup) for k in range(count)]
