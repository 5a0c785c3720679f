"""Synthetic workloads: the processes have the moments that they promise, prompts share what their streams share."""
from __future__ import annotations

import numpy as np
import pytest

from mocker import MockEngineArgs, Trace, simulate
from mocker.synth import (
    Arrivals,
    Curve,
    Diurnal,
    Empirical,
    Gaps,
    OnOff,
    PrefixTree,
    Ramp,
    Recipe,
    Steady,
    parse_arrivals,
    parse_distribution,
)

N = 40_000


def draw(arrivals: Arrivals | str, n: int = N, seed: int = 1) -> np.ndarray:
    process = parse_arrivals(arrivals) if isinstance(arrivals, str) else arrivals
    times = process.draw(np.random.default_rng(seed), n)
    assert times.shape == (n,) and (np.diff(times) >= 0).all() and times[0] >= 0
    return times


@pytest.mark.parametrize(("text", "cv"), [
    ("constant:20", 0.0), ("20", 0.0), ("poisson:20", 1.0), ("gamma:20,cv=2.5", 2.5), ("gamma:20,0.3", 0.3),
    ("weibull:20,shape=0.7", 1.4624), ("weibull:20,2", 0.5227),
])
def test_gaps_have_the_rate_and_the_variation(text, cv):
    gaps = np.diff(draw(text))
    assert gaps.mean() == pytest.approx(50.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06, abs=1e-9)


def test_rates_over_time():
    # Constant gaps show the curve itself: the k-th arrival comes when the integral of the rate is k.
    def counts(rate, edges):
        return np.histogram(draw(Arrivals(rate, Gaps("constant")), 4000), np.array(edges) * 1e3)[0].tolist()

    assert counts(Curve([10, 0, 30], 10.0), [0, 10.01, 20, 30.01, 40.01, 50]) == [101, 0, 300, 100, 0]
    assert counts(OnOff(20, 5, 15, random=0), [0, 5.01, 20, 25.01]) == [101, 0, 100]
    ramp = draw(Arrivals(Ramp(0, 40, 50), Gaps("constant")), 2001) / 1e3
    assert ramp[1000] == pytest.approx(50.0) and ramp[250] == pytest.approx(25.0) and ramp[2000] == pytest.approx(75.0)
    day = draw(Arrivals(Diurnal(10, 0.9, period=1000, peak=250), Gaps("constant")), 10_001) / 1e3
    assert day[-1] == pytest.approx(1000, abs=0.2)
    share = np.histogram(day, 4, (0, 1000))[0] / 10_000
    assert share == pytest.approx([0.25 + 0.9 / (2 * np.pi), 0.25 + 0.9 / (2 * np.pi), 0.1067, 0.1067], abs=0.002)
    bursts = np.diff(draw("onoff:50,10,40", 100_000))
    assert bursts.std() / bursts.mean() > 10 and 1e3 / bursts.mean() == pytest.approx(10, rel=0.15)


@pytest.mark.parametrize(("text", "mean", "low", "high"), [
    ("512", 512, 512, 512), ("fixed:7", 7, 7, 7), ("uniform:100,300", 200, 100, 300),
    ("normal:1000,50", 1000, 700, 1300),
    ("lognormal:100,0.5", 100 * np.exp(0.125), 1, 2000), ("exponential:80,high=4000", 80, 0, 4000),
    ("zipf:1,high=4", 4 / (1 + 1 / 2 + 1 / 3 + 1 / 4), 1, 4), ("zipf:0,low=10,high=20", 15, 10, 20),
])
def test_lengths(text, mean, low, high):
    values = parse_distribution(text).draw(np.random.default_rng(3), N)
    assert values.mean() == pytest.approx(mean, rel=0.02)
    assert low <= values.min() <= values.max() <= high


def test_empirical_lengths(tmp_path):
    sample = tmp_path / "lengths.txt"
    sample.write_text("3\n\n5.0\n3\n")
    drawn = parse_distribution(f"empirical:{sample}").draw(np.random.default_rng(0), 3000)
    assert np.isin(drawn, [3, 5]).all() and drawn.mean() == pytest.approx(11 / 3, rel=0.05)
    weighted = Empirical([1, 2, 9], [1, 0, 3]).draw(np.random.default_rng(0), 4000)
    assert np.unique(weighted).tolist() == [1, 9] and (weighted == 9).mean() == pytest.approx(0.75, abs=0.03)
    trace = Recipe(5, input="uniform:1,99", seed=4).trace()
    trace.save(tmp_path / "t.jsonl")
    again = parse_distribution(f"empirical:{tmp_path / 't.jsonl'},column=input")
    assert np.isin(again.draw(np.random.default_rng(0), 50), trace.input_length).all()
    sample.write_text("3\nmany\n")
    with pytest.raises(ValueError, match=r"lengths\.txt:2: expected one number a line, got 'many'"):
        parse_distribution(f"empirical:{sample}")


def test_one_seed_and_a_stream_for_each_column():
    recipe = "count=300; arrivals=gamma:5,cv=2; input=lognormal:300,1; output=zipf:1.2,high=99; turns=3; seed="
    one = Recipe.parse(recipe + "9").trace()
    assert one == Recipe.parse(recipe + "9").trace()
    assert one != Recipe.parse(recipe + "10").trace()
    other = Recipe.parse(recipe.replace("zipf:1.2,high=99", "7") + "9").trace()
    assert np.array_equal(one.arrival_ms, other.arrival_ms, equal_nan=True)
    assert one.turn.tolist() == other.turn.tolist()


def test_prefix_tree_and_history(tmp_path):
    trace = Recipe(
        200, input="uniform:1,300", output=50, prefix="1x100/3x64,skew=1,share=0.7", turns=3, think="exponential:2",
        block_size=16, seed=2).trace()
    shared = 6 + 4                              # 100 and 64 tokens in whole blocks of 16
    streams: dict[int, list[int]] = {}
    common = 0
    for row in range(trace.n):
        ids = trace.hash_ids[trace.hash_offsets[row]:trace.hash_offsets[row + 1]].tolist()
        assert len(ids) == -(-trace.input_length[row] // 16)
        stream = streams.setdefault(int(trace.session[row]), ids)
        assert ids[:len(stream)] == stream      # each turn repeats the one before
        streams[int(trace.session[row])] = ids
        common += ids[0] == 0
    assert common / trace.n == pytest.approx(0.7, abs=0.1)
    with_prefix = [ids for ids in streams.values() if ids[:6] == list(range(6))]
    assert {tuple(ids[6:shared]) for ids in with_prefix} == {tuple(range(6 + 4 * k, 10 + 4 * k)) for k in range(3)}
    own = [i for ids in streams.values() for i in ids if i >= 18]
    assert len(own) == len(set(own))            # nothing else is shared
    grown = trace.input_length[1::3] - trace.input_length[::3]
    assert (grown > 50).all()                   # the answer and the new question
    assert np.isnan(trace.arrival_ms[trace.turn > 0]).all() and (trace.delay_ms[trace.turn > 0] > 0).all()
    trace.save(tmp_path / "t.jsonl")
    loaded = Trace.load(tmp_path / "t.jsonl", block_size=16)
    assert np.array_equal(loaded.hash_ids, trace.hash_ids) and np.array_equal(loaded.delay_ms, trace.delay_ms)
    apart = Recipe(50, input=32, output=5, prefix="1x16", turns=2, history=False, block_size=16).trace()
    assert (apart.input_length == 48).all() and len(np.unique(apart.hash_ids)) == 1 + 100 * 2


def test_planned_answers_are_found_again():
    recipe = "count=30; arrivals=1; input=64; output=32; turns=3; think=1; block_size=16; answers="
    reused = {}
    for answers in ("no", "yes"):
        result = simulate(Recipe.parse(recipe + answers),
                          extra_engine_args=MockEngineArgs(num_gpu_blocks=4096, block_size=16))
        reused[answers] = int(result.per_request["reused_input_tokens"].sum())
    # Turns 2 and 3 find the prompt before; with planned answers also the answer, but for the block of its last token.
    assert reused["no"] == 30 * (64 + 160)
    assert reused["yes"] - reused["no"] == 30 * (16 + 16)


@pytest.mark.parametrize(("recipe", "message"), [
    ("arrivals=poisson:1", "count is missing"),
    ("count=0", "count must be an integer from 1"),
    ("count=5; color=red", "there is no 'color'; there are answers"),
    ("count=5; count=6", "count is given twice"),
    ("count=5; input", "'input' must be KEY=VALUE"),
    ("count=5; arrivals=poisson", "arrivals 'poisson': expected a number"),
    ("count=5; arrivals=poisson:0", "rate must be between"),
    ("count=5; arrivals=poisson:nan", "not a finite number"),
    ("count=5; arrivals=gamma:5", "gamma gaps need cv"),
    ("count=5; arrivals=poisson:5,cv=2", "cv belongs to gamma gaps"),
    ("count=5; arrivals=tidal:5", "there are constant, poisson"),
    ("count=5; arrivals=ramp:1,2", "needs duration"),
    ("count=5; arrivals=onoff:1e9,1e-6,1e9,gaps=poisson,off_rate=0,random=2", "random must be 0 or 1"),
    ("count=100000; arrivals=onoff:1e-9,1e-6,1", "more than 10,000,000 bursts"),
    ("count=5; input=lognormal:512", "input 'lognormal:512': needs sigma"),
    ("count=5; input=uniform:9,3", "low <= high"),
    ("count=5; input=normal:5,1,medium=3", "not 'medium'"),
    ("count=5; input=fixed:-4", "between 0 and"),
    ("count=5; input=zipf:1,high=1e12", "fewer than"),
    ("count=5; prefix=12", "must look like 1x1024"),
    ("count=5; prefix=1000000x5/1000000x5/1000000x5", "too many nodes"),
    ("count=5; seed=x", "seed must be an integer"),
    ('{"count": 5, "input": [1]}', "input must be a number or text"),
    ('{"count": 5', "not JSON"),
    ("[" * 10_000, "must be KEY=VALUE"),
    ('{"count":' + "[" * 100_000, "not JSON"),
])
def test_bad_recipes(recipe, message):
    with pytest.raises(ValueError, match=message):
        Recipe.parse(recipe).trace()


def test_recipes_take_objects_numbers_and_text():
    same = Recipe(10, arrivals=Arrivals(Steady(2.0)), input=parse_distribution("uniform:5,9"), output=3,
                  prefix=PrefixTree(((1, 64),)), seed=1).trace()
    assert same == Recipe.parse('{"count": 10, "arrivals": "poisson:2", "input": "uniform:5,9", "output": 3, '
                                '"prefix": "1x64", "seed": 1}').trace()
