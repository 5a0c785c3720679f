"""From the flags of `mocker replay` to the arguments of `mocker.simulate`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
from typing import Any

from .flags import AIC_FLAGS, dest, json_object
from .terminal import fail_usage
from .unsupported import given


def _add_shorthand(parser: argparse.ArgumentParser, values: dict[str, Any], assignment: str) -> None:
    """Put one NAME=VALUE of --engine into the engine arguments; a dot in the name leads into an inner object."""
    name, equals, text = assignment.partition("=")
    *outer, last = name.strip().split(".")
    if not equals or not last or not all(outer):
        parser.error(f"--engine {assignment}: expected NAME=VALUE, e.g. --engine block_size=64")
    for step in outer:
        inner = values.get(step)
        values[step] = dict(inner) if isinstance(inner, dict) else {}
        values = values[step]
    try:
        values[last] = json.loads(text)
    except ValueError:
        values[last] = text


def read_engine_values(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the engine arguments by the flag that they came with; absent if there are none."""
    engine_values = {}
    for flag in ("--extra-engine-args", "--prefill-engine-args", "--decode-engine-args"):
        text = getattr(args, dest(flag))
        if text is not None:
            engine_values[flag] = json_object(parser, flag, text)
    if args.engine:
        values = engine_values.setdefault("--extra-engine-args", {})
        for assignment in args.engine:
            _add_shorthand(parser, values, assignment)
    if args.scheduler_rules is not None:
        engine_values.setdefault("--extra-engine-args", {})["scheduler_rules"] = args.scheduler_rules
    for flag, values in engine_values.items():
        if values.get("worker_type") is not None and ("is_prefill" in values or "is_decode" in values):
            parser.error(f"{flag}: worker_type excludes is_prefill and is_decode; keep worker_type")
        if flag != "--extra-engine-args" and not {"worker_type", "is_prefill", "is_decode"} & values.keys():
            values["worker_type"] = "prefill" if flag == "--prefill-engine-args" else "decode"
        profile = values.get("planner_profile_data", "")
        if profile is None:
            del values["planner_profile_data"]
        elif (isinstance(profile, str) and profile and not profile.endswith((".npz", ".json"))
              and not os.path.isdir(profile)):
            parser.error(f"{flag}: planner_profile_data must be an .npz or .json file or a folder of profiler results, "
                         f"got {profile}")
    return engine_values


def engine_args(parser: argparse.ArgumentParser, args: argparse.Namespace, flag: str) -> Any:
    values = args.engine_values.get(flag)
    if values is None:
        return None
    from mocker.args import MockEngineArgs

    try:
        return MockEngineArgs.from_json(json.dumps(values))
    except ValueError as error:
        source = "--extra-engine-args/--engine" if args.engine else flag
        if args.scheduler_rules is not None:
            source += "/--scheduler-rules"
        fail_usage(parser, args, f"{source}: {error}")


def router_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    if args.router_config is None and args.router_policy_config is None:
        return None
    values = {} if args.router_config is None else json_object(parser, "--router-config", args.router_config)
    if args.router_policy_config is not None:
        values["router_policy_config"] = args.router_policy_config
    return importlib.import_module("mocker.router_config").KvRouterConfig.from_json(json.dumps(values))


def with_model(args: argparse.Namespace, options: dict[str, Any]) -> list[str]:
    """Put the model and GPUs of the flags into the engine arguments of `options`; returns what that assumes."""
    if args.model is None:
        return []
    from mocker.args import MockEngineArgs
    from mocker.profiles import model_profile

    lines: list[str] = []
    pools = [f"{pool}_engine_args" for pool in ("prefill", "decode") if options[f"{pool}_engine_args"] is not None]
    for name in pools or ["extra_engine_args"]:
        profile = model_profile(options[name] or MockEngineArgs(), args.model, args.system, args.tp, args.times,
                                args.mixed_steps)
        options[name] = profile.args
        of = f"{name.split('_')[0]}: " if pools else ""
        lines += [of + line for line in profile.assumptions]
    return lines


def aic_perf_config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    values = {dest(flag): getattr(args, dest(flag)) if given(flag)(args) else None for flag, _, _ in AIC_FLAGS}
    if all(value is None for value in values.values()):
        return None
    missing = [flag for flag in ("--aic-backend", "--aic-system", "--aic-model-path") if values[dest(flag)] is None]
    if missing:
        parser.error(f"the AIC performance model also needs {', '.join(missing)}")
    values["aic_tp_size"] = values["aic_tp_size"] or 1
    return importlib.import_module("mocker.aic").AicPerfConfig(**values)


def planner(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    """The planner that --planner names, or None."""
    if args.planner is None:
        return None
    path, _, name = args.planner.rpartition(":")
    if not path or not name:
        parser.error(f"--planner {args.planner}: expected FILE.py:NAME, e.g. --planner planners.py:QueuePlanner")
    if not os.path.isfile(path):
        parser.error(f"--planner {args.planner}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"{os.path.basename(path).partition('.')[0]}_of_planner", path)
    if spec is None or spec.loader is None:
        parser.error(f"--planner {args.planner}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if found is None:
        parser.error(f"--planner {args.planner}: {path} has no {name}")
    return found() if isinstance(found, type) else found
