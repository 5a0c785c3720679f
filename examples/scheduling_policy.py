"""Find an admission policy by random search over a Gymnasium environment, and compare it with first come, first served.

    python examples/scheduling_policy.py trace.jsonl --workers 1 --trials 20

The policy is linear: of how long each of the first requests in the queue has waited, of its prompt, of how much of it
is cached, and of what it will make. Many environments run at once, each with its own weights.
"""
import argparse

import numpy as np

import mocker
from mocker.gym import SchedulingEnv, ThreadedVectorEnv


def choose(seen, weights):
    """The place of the request with the highest value among those that wait."""
    queue = seen[4:].reshape(-1, 4)
    value = queue @ weights
    value[queue[:, 1] == 0.0] = -np.inf                # nobody waits at this place
    return int(np.argmax(value))


def episodes(make, weights):
    """Total reward of one replay with each of the weights, all at once."""
    many = ThreadedVectorEnv([make] * len(weights))
    seen, _ = many.reset()
    total, going = np.zeros(len(weights)), np.ones(len(weights), bool)
    while going.any():
        actions = np.array([choose(one, w) for one, w in zip(seen, weights, strict=True)])
        seen, rewards, over, _, _ = many.step(actions)
        total += np.where(going, rewards, 0.0)
        going &= ~over
    many.close()
    return total


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    args = parser.parse_args(argv)
    trace = mocker.Trace.load(args.trace)

    def make():
        return SchedulingEnv(trace, num_workers=args.workers, ttft_ms=args.ttft_ms)

    rng = np.random.default_rng(0)
    weights = [np.array([1.0, 0.0, 0.0, 0.0]), *rng.normal([0.5, -1.0, 1.0, 0.0], 0.5, (args.trials, 4))]
    rewards = episodes(make, weights)
    best = int(np.argmax(rewards))
    print(f"first come, first served: reward {rewards[0]:.0f}")
    print(f"found {np.round(weights[best], 2)}: reward {rewards[best]:.0f}")
    return rewards


if __name__ == "__main__":
    main()
