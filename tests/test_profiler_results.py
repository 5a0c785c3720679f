"""Folders of profiler results: the grid of the reference's converter, and errors by file and field."""
import json
import os

import numpy as np
import pytest

import mocker
from mocker import MockEngineArgs, simulate
from mocker.profiler_results import is_profiler_folder, load_profiler_folder
from mocker.timing import load_timing

# Of the converter of ai-dynamo 1.3.0.post1 with scikit-learn 1.7.2, for the folders of `measurements`.
RECORDED = [
    (14091.29292929293, 822.6801894869648, 1914.1149231672282, 398884.0, 5678.059417706477, 5.24870472880066,
     13.728300660134012, 98805.57464452588),
    (15112.939393939394, 781.4663629446981, 1929.1711015706544, 392295.0, 5611.750561167228, 5.355979998907556,
     15.227166188753403, 122055.15557077521),
    (17173.555555555555, 899.8969544205464, 2033.2410828737868, 369687.0, 5602.927097057533, 5.10148822961028,
     14.442647676173006, 102779.92808603308),
    (14013.141414141415, 836.2526004974238, 1745.988404577961, 372586.0, 5656.2340067340065, 6.305704201188523,
     16.521185175964327, 141165.64750913146)]


def measurements(seed):
    rng = np.random.default_rng(seed)
    isl = np.sort(rng.integers(50, 40_000, 12 + seed))
    ttft = 5 + 0.05 * isl + rng.normal(0, 10, len(isl)) ** 2
    usage = rng.uniform(0, 1, 30 + seed)
    context = rng.choice([128.0, 500.0, 1000.0, 3000.0, 9000.5], len(usage))
    itl = 4 + usage * (10 + seed) + np.abs(rng.normal(0, 1, len(usage)))
    if seed % 2:
        itl += 300 / context
    return ({"prefill_isl": isl, "prefill_ttft": ttft},
            {"x_kv_usage": usage, "y_context_length": context, "z_itl": itl, "max_kv_tokens": np.array([400_000])})


def write(folder, prefill, decode, as_json=False):
    for name, data in (("prefill", prefill), ("decode", decode)):
        if as_json:
            plain = {key: value.tolist() for key, value in data.items()}
            if "max_kv_tokens" in plain:
                plain["max_kv_tokens"] = plain["max_kv_tokens"][0]
            (folder / f"{name}_raw_data.json").write_text(json.dumps(plain))
        else:
            os.makedirs(folder / f"selected_{name}_interpolation", exist_ok=True)
            np.savez(folder / f"selected_{name}_interpolation" / "raw_data.npz", **data)


@pytest.mark.parametrize("seed", range(4))
def test_grid_of_the_reference_s_converter(seed, tmp_path):
    write(tmp_path, *measurements(seed), as_json=seed >= 2)
    assert is_profiler_folder(tmp_path) and not is_profiler_folder(tmp_path / "none")
    grid = load_timing(tmp_path).arrays
    itl = grid["decode_itl"]
    shown = (grid["prefill_isl"][37], grid["prefill_ttft_ms"][37], grid["prefill_ttft_ms"][-1],
             grid["decode_active_kv_tokens"][-1], grid["decode_context_length"][61], itl[3, 90], itl[88, 4], itl.sum())
    assert itl.shape == (100, 100)
    assert shown == pytest.approx(RECORDED[seed], 1e-11)


def test_replay_with_a_folder_that_changes(tmp_path):
    prefill, decode = measurements(0)
    write(tmp_path, prefill, decode)
    spec, args = mocker.SyntheticSpec(500, 20, 10), MockEngineArgs(planner_profile_data=tmp_path)
    first = simulate(spec, extra_engine_args=args).report["duration_ms"]
    load_profiler_folder(tmp_path).save(tmp_path / "profile.npz")
    saved = MockEngineArgs(planner_profile_data=tmp_path / "profile.npz")
    assert simulate(spec, extra_engine_args=saved).report["duration_ms"] == first
    write(tmp_path, prefill, decode | {"z_itl": 50 + decode["z_itl"]})
    assert simulate(spec, extra_engine_args=args).report["duration_ms"] > first + 900


@pytest.mark.parametrize(("part", "change", "message"), [
    (0, {"prefill_ttft": None}, r"prefill_interpolation.raw_data.npz: lacks prefill_ttft; it has prefill_isl$"),
    (0, {"prefill_ttft": np.ones(3)}, r"prefill_ttft must have .* the length of prefill_isl, got shape \(3,"),
    (0, {"prefill_isl": np.full(12, 700)}, "prefill_isl needs at least two different lengths, got 700 only"),
    (0, {"prefill_isl": np.array(["a"] * 12)}, "prefill_isl must hold real numbers"),
    (0, {"prefill_ttft": np.linspace(90, 1, 12)}, "prefill_ttft falls with prefill_isl"),
    (0, {"prefill_ttft": np.zeros(12)}, "prefill_ttft has no time other than 0"),
    (0, {"prefill_ttft": np.array([1.0] * 11 + [np.nan])}, r"prefill_ttft\[11\] must be .* got nan"),
    (1, {"z_itl": -np.ones(30)}, r"decode_interpolation.raw_data.npz: z_itl\[0\] must be .* got -1"),
    (1, {"max_kv_tokens": np.array([1, 2])}, "max_kv_tokens must be one number"),
    (1, {"max_kv_tokens": np.array([0])}, "x_kv_usage .* is 0 tokens at most"),
    (1, {"x_kv_usage": np.array([])}, "y_context_length must have one dimension and the length of x_kv_usage"),
    (1, {"z_itl": np.linspace(50, 1, 30), "x_kv_usage": np.linspace(0.1, 1, 30)}, "z_itl falls with the KV tokens"),
])
def test_bad_measurements(part, change, message, tmp_path):
    data = list(measurements(0))
    data[part] = {name: value for name, value in (data[part] | change).items() if value is not None}
    write(tmp_path, *data)
    with pytest.raises(ValueError, match=message):
        simulate(mocker.SyntheticSpec(50, 5, 2), extra_engine_args=MockEngineArgs(planner_profile_data=tmp_path))


def test_bad_files(tmp_path):
    write(tmp_path, *measurements(0), as_json=True)
    for content, message in (("[1]", "cannot be read: not a JSON object"), ("{", "cannot be read"),
                             ('{"prefill_isl": [[1], 2], "prefill_ttft": 3}', "prefill_isl is no array of numbers")):
        (tmp_path / "prefill_raw_data.json").write_text(content)
        with pytest.raises(ValueError, match=f"prefill_raw_data.json: {message}"):
            load_profiler_folder(tmp_path)
    os.unlink(tmp_path / "prefill_raw_data.json")
    with pytest.raises(ValueError, match="not a folder of profiler results: it has neither selected_prefill"):
        load_profiler_folder(tmp_path)
