"""Find a routing policy by random search over a Gymnasium environment, and compare it with the built-in routers.

    python examples/routing_policy.py trace.jsonl --workers 4 --trials 20

The policy is linear: of each worker's observed load and of how much of the prompt it has cached.
"""
import argparse

import numpy as np

import mocker
from mocker.gym import RoutingEnv


def episode(env, weights):
    """Total reward of one replay."""
    seen, _ = env.reset()
    total, over = 0.0, False
    while not over:
        loads = seen[:-1].reshape(-1, 5)
        seen, reward, over, _, _ = env.step(int(np.argmax(loads @ weights)))
        total += reward
    return total


def search(env, trials, seed=0):
    """The best weights of `trials` random ones, and their reward."""
    rng = np.random.default_rng(seed)
    tried = [rng.normal([-1.0, -1.0, 0.0, 0.0, 1.0], 0.5) for _ in range(trials)]
    rewards = [episode(env, weights) for weights in tried]
    best = int(np.argmax(rewards))
    return tried[best], rewards[best]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    args = parser.parse_args(argv)
    trace = mocker.Trace.load(args.trace)
    env = RoutingEnv(trace, num_workers=args.workers, ttft_ms=args.ttft_ms)
    weights, reward = search(env, args.trials)
    episode(env, weights)
    print(f"found      {np.round(weights, 2)}, reward {reward:.0f}, "
          f"mean TTFT {env.result().report['mean_ttft_ms']:.0f} ms")
    for mode in ("round_robin", "least_requests", "kv_router"):
        report = mocker.simulate(trace, num_workers=args.workers, router_mode=mode).report
        print(f"{mode:<15} mean TTFT {report['mean_ttft_ms']:.0f} ms")
    return weights


if __name__ == "__main__":
    main()
