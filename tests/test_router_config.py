"""Settings of the KV router: defaults, order, the old name, rules, JSON; and policy files."""
import copy
import json
import pickle

import pytest

from mocker.args import MockEngineArgs
from mocker.router_config import (
    KvRouterConfig,
    decode_router_config,
    prefill_router_config,
    replay_router_config,
)
from mocker.router_queues import PolicyProfile, RouterPolicyConfig

DEFAULTS = {
    "host_cache_hit_weight": 0.75, "disk_cache_hit_weight": 0.25, "router_temperature": 0.0, "use_kv_events": True,
    "durable_kv_events": False, "router_replica_sync": False, "router_track_active_blocks": True,
    "router_track_output_blocks": False, "router_assume_kv_reuse": True, "router_track_prefill_tokens": True,
    "router_prefill_load_model": "none", "router_snapshot_threshold": 1000000, "router_reset_states": False,
    "router_ttl_secs": 120.0, "router_queue_threshold": 16.0, "router_event_threads": 4,
    "router_queue_policy": "fcfs", "use_remote_indexer": False, "serve_indexer": False,
    "shared_cache_multiplier": 0.0, "shared_cache_type": "none", "router_predicted_ttl_secs": None,
    "overlap_score_credit": 1.0, "overlap_score_credit_decay": 0.0, "prefill_load_scale": 1.0,
    "router_policy_config": None, "skip_initial_worker_wait": False,
}


def test_defaults_and_order():
    config = KvRouterConfig()
    assert config.to_dict() == DEFAULTS
    assert config.overlap_score_weight == 1.0
    positional = [None, *list(DEFAULTS.values())[:22]]
    assert KvRouterConfig(*positional) == config
    with pytest.raises(TypeError):
        KvRouterConfig(*positional, 1.0)
    with pytest.raises(TypeError):
        KvRouterConfig(model="x")


def test_the_old_weight_wins_and_zero_takes_the_credit_away():
    assert KvRouterConfig(2.0, prefill_load_scale=3.0).prefill_load_scale == 2.0
    config = KvRouterConfig(overlap_score_weight=0)
    assert (config.overlap_score_credit, config.prefill_load_scale, config.overlap_score_weight) == (0.0, 0.0, 0.0)
    config.overlap_score_weight = 1.5
    assert (config.overlap_score_credit, config.prefill_load_scale) == (0.0, 1.5)
    made = KvRouterConfig().with_overrides(0.0, overlap_score_credit=0.5)
    assert (made.overlap_score_credit, made.prefill_load_scale) == (0.0, 0.0)


@pytest.mark.parametrize(("name", "value"), [
    ("overlap_score_weight", -1.0), ("overlap_score_credit", 1.5), ("overlap_score_credit", -0.1),
    ("overlap_score_credit", float("nan")), ("overlap_score_credit_decay", -1), ("prefill_load_scale", float("inf")),
    ("router_temperature", -1.0), ("router_temperature", float("nan")), ("router_temperature", None),
    ("router_queue_threshold", -1), ("router_snapshot_threshold", 0), ("router_event_threads", 0),
    ("router_event_threads", 1.5), ("router_queue_policy", "sjf"), ("router_prefill_load_model", "x"),
    ("shared_cache_type", "x"), ("shared_cache_multiplier", 2.0), ("host_cache_hit_weight", 1.1),
    ("disk_cache_hit_weight", -1), ("router_ttl_secs", -1), ("use_kv_events", 1), ("router_policy_config", "/nowhere"),
    ("router_temperature", "1"),
])
def test_bad_values_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        KvRouterConfig(**{name: value})
    if name != "router_policy_config" and value == value and value not in (float("inf"),):
        with pytest.raises(ValueError, match=f"Failed to parse KvRouterConfig JSON.*{name}"):
            KvRouterConfig.from_json(json.dumps({name: value}))


@pytest.mark.parametrize(("values", "name"), [
    ({"durable_kv_events": True, "use_kv_events": False}, "durable_kv_events"),
    ({"router_track_output_blocks": True, "router_track_active_blocks": False}, "router_track_output_blocks"),
    ({"router_prefill_load_model": "aic", "router_track_prefill_tokens": False}, "router_prefill_load_model"),
    ({"use_remote_indexer": True, "serve_indexer": True}, "serve_indexer"),
    ({"serve_indexer": True, "overlap_score_credit": 0.0}, "serve_indexer"),
    ({"router_predicted_ttl_secs": 3.0, "use_kv_events": False}, "router_predicted_ttl_secs"),
])
def test_rules_between_fields(values, name):
    with pytest.raises(ValueError, match=name):
        KvRouterConfig(**values)


def test_setters_check_and_change_nothing_on_error():
    config = KvRouterConfig(serve_indexer=True)
    for name, value in [("overlap_score_credit", 0.0), ("overlap_score_credit", 2.0), ("prefill_load_scale", -1.0),
                        ("overlap_score_credit_decay", -1.0), ("overlap_score_weight", 0.0)]:
        with pytest.raises(ValueError):
            setattr(config, name, value)
    assert config == KvRouterConfig(serve_indexer=True)
    config.overlap_score_credit, config.overlap_score_credit_decay, config.prefill_load_scale = 0.5, 2, 3
    assert (config.overlap_score_credit, config.overlap_score_credit_decay, config.overlap_score_weight) == (0.5, 2, 3)
    with pytest.raises(AttributeError, match="read-only"):
        config.router_temperature = 1.0


def test_json_and_copies():
    config = KvRouterConfig(router_temperature=1, router_queue_threshold=None, skip_initial_worker_wait=True)
    for made in (KvRouterConfig.from_json(config.to_json()), config.copy(), copy.deepcopy(config),
                 pickle.loads(pickle.dumps(config)), config.replace(), config.with_overrides()):
        assert made == config
    made = config.copy()
    made.prefill_load_scale = 5.0
    assert config.prefill_load_scale == 1.0
    assert KvRouterConfig.from_json('{"overlap_score_weight": null}') == KvRouterConfig()
    assert KvRouterConfig.from_json('{"overlap_score_weight": 0}').overlap_score_credit == 0.0
    assert KvRouterConfig.from_json('{"router_queue_threshold": null}').router_queue_threshold is None
    for text in ('{"foo": 1}', "[]", "nope", '{"router_temperature": 1, "router_temperature": 2}'):
        with pytest.raises(ValueError, match="Failed to parse KvRouterConfig JSON"):
            KvRouterConfig.from_json(text)


def test_derived_settings():
    args = MockEngineArgs(router_queue_policy="wspt")
    config = KvRouterConfig(router_track_output_blocks=True, router_prefill_load_model="aic", serve_indexer=True)
    assert replay_router_config(args, config) == config.replace(router_queue_policy="wspt")
    assert replay_router_config(MockEngineArgs()) == KvRouterConfig()
    prefill, decode = prefill_router_config(args, config), decode_router_config(args, config)
    assert not prefill.router_track_active_blocks and prefill.router_track_prefill_tokens
    assert prefill.router_queue_policy == decode.router_queue_policy == "wspt"
    assert (decode.overlap_score_credit, decode.router_assume_kv_reuse) == (0.0, False)
    assert (decode.router_track_prefill_tokens, decode.router_prefill_load_model) == (False, "none")
    assert decode.router_track_active_blocks
    assert config.router_track_active_blocks


# ---- policy files -------------------------------------------------------------------------------------------------

CLASSES = [
    {"name": "small", "policy_family": "f", "cache_bucket": "lo", "quantum": 2, "queue_policy": "wspt"},
    {"name": "large", "policy_family": "f", "cache_bucket": "hi", "quantum": 3, "prefill_busy_threshold": 100,
     "raw_isl_token_queue_limit_per_worker": 0},
    {"name": "own", "quantum": 1, "prefill_busy_threshold_frac": 0.5},
]
PROFILE = {
    "default_policy_family": "f",
    "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "lo"}, {"min_tokens": 10, "bucket": "hi"}],
    "policy_classes": CLASSES,
}


def parse(document):
    return RouterPolicyConfig.from_yaml(json.dumps(document))


def test_a_profile():
    profile = parse(PROFILE).profile(None, 1.0, "fcfs")
    small, large, own = profile.classes
    assert (small.queue_policy, small.busy_tokens, small.busy_fraction, small.quantum) == ("wspt", None, 16.0, 2)
    assert (large.busy_tokens, large.busy_fraction, large.max_isl_tokens) == (100, None, 0)
    assert own.busy_fraction == 0.5
    assert profile.code("own") == 2
    assert profile.code("f") == profile.code(None) == profile.code("unknown") == -1
    assert (profile.buckets, profile.table) == ((0, 10), (0, 1))


def test_a_models_profile_replaces_the_root():
    other = {**PROFILE, "policy_classes": [dict(c, name=c["name"] + "2") for c in CLASSES]}
    config = parse({**PROFILE, "models": {"m": other}})
    assert config.profile("m", None, "fcfs").classes[0].name == "small2"
    assert config.profile("n", None, "fcfs").classes[0].name == "small"
    only = parse({"models": {"m": other}})
    assert only.profile("n", 2.0, "lcfs") == PolicyProfile.single(2.0, "lcfs")


def changed(**changes):
    return {**PROFILE, **changes}


def with_class(index, **changes):
    classes = [dict(c) for c in CLASSES]
    classes[index].update(changes)
    return changed(policy_classes=classes)


@pytest.mark.parametrize(("document", "text"), [
    ({}, "at least one model"), ([], "mapping"), (changed(foo=1), "unknown field `foo`"),
    ({"default_policy_family": "f"}, "got only default_policy_family"), (changed(policy_classes=[]), "not be empty"),
    (changed(policy_classes={}), "must be a list"), (changed(default_policy_family="g"), "'g' does not name"),
    (changed(default_policy_family="a b"), "must match"), (changed(uncached_isl_buckets=[]), "not be empty"),
    (changed(uncached_isl_buckets=[{"min_tokens": 1, "bucket": "lo"}]), "start at min_tokens 0"),
    (changed(uncached_isl_buckets=[{"min_tokens": 0, "bucket": "lo"}] * 2), "strictly increasing"),
    (changed(uncached_isl_buckets=[{"min_tokens": 0, "bucket": "lo"}, {"min_tokens": 1, "bucket": "lo"}]), "twice"),
    (changed(uncached_isl_buckets=[*PROFILE["uncached_isl_buckets"], {"min_tokens": 20, "bucket": "x"}]),
     "no policy class for family 'f' and bucket 'x'"),
    (with_class(0, name="large"), "twice"), (with_class(0, quantum=0), "quantum"),
    (with_class(0, quantum=-1), "quantum"),
    (with_class(0, queue_policy="lcfs"), "fcfs or wspt"), (with_class(2, policy_family="f"), "both"),
    (with_class(0, cache_bucket="zz"), "unknown cache bucket"),
    (with_class(0, cache_bucket="hi"), "two policy classes"),
    (with_class(2, name="f"), "name of a policy family"), (with_class(0, extra=1), "unknown field `extra`"),
    (with_class(2, prefill_busy_threshold_frac=-1), "prefill_busy_threshold_frac"),
    (with_class(2, request_queue_limit_per_worker=-1), "request_queue_limit_per_worker"),
    ({"models": {"": PROFILE}}, "without a name"), ({"models": {"m": {}}}, "has no default_policy_family"),
])
def test_bad_policy_files(document, text):
    with pytest.raises(ValueError, match=text):
        parse(document)


def test_policy_files_are_read_once_at_construction(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(PROFILE))
    config = KvRouterConfig(router_policy_config=path)
    made = config.copy()
    path.unlink()
    assert made.policy_profile().classes[0].name == "small"
    assert config.with_overrides(prefill_load_scale=2.0).policy_profile("any").classes[0].name == "small"
    path.write_text("{")
    with pytest.raises(ValueError, match="router_policy_config: failed to parse router policy config"):
        KvRouterConfig(router_policy_config=path)


def test_yaml_policy_files():
    pytest.importorskip("yaml")
    text = "default_policy_family: f\nuncached_isl_buckets:\n  - {min_tokens: 0, bucket: all}\n" \
           "policy_classes:\n  - name: a\n    policy_family: f\n    cache_bucket: all\n    quantum: 3\n"
    assert RouterPolicyConfig.from_yaml(text).profile(None, None, "fcfs").classes[0].quantum == 3
    with pytest.raises(ValueError, match="failed to parse"):
        RouterPolicyConfig.from_yaml("a: [")


def test_yaml_without_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ValueError, match="PyYAML"):
        RouterPolicyConfig.from_yaml("a: b", "file")
