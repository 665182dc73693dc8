"""Measures collection with Ray on one machine.

* Overhead: ``RayCollector`` with one local actor against the same local collector, on
  multiwalker, one batch of each in turn. Both have the same seed, so they do the same
  work. Each batch follows an update of the weights. Ratios are taken within a pair.
* Bytes: transferred per frame and per version of the weights.
* Recovery: time from a kill of the actor in the middle of a batch to that batch.

    python benchmarks/distributed.py                         # takes minutes
    python benchmarks/distributed.py --frames 400 --pairs 2  # checks that it works
"""

import argparse
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import ray
from harness.estimates import Estimate
from harness.turns import Alternative, measure
from tensordict.nn import TensorDictModule

from marl_collect import Collector, MultiSyncCollector, RayCollector
from marl_collect.envs import PettingZooEnv
from marl_collect.models import MultiAgentMLP

STORE = 500_000_000


def make_env() -> Any:
    """Build multiwalker."""
    return PettingZooEnv("multiwalker_v9", n_walkers=3, shared_reward=False)


def make_policy() -> Any:
    """Build the policy of both collectors."""
    network = MultiAgentMLP(
        31, 4, 3, centralised=False, share_params=True, num_cells=(64, 64)
    )
    return TensorDictModule(
        network, [("walker", "observation")], [("walker", "action")]
    )


def updating(collector: Any) -> Alternative:
    """Return the call that collects a batch with new weights."""

    def call() -> None:
        collector.update_policy_weights_()
        collector.next()

    return Alternative.once(call)


def recovery(collector: Any, normal: float) -> float:
    """Kill the actor during a batch; return the seconds until the batch arrives."""
    (actor,) = collector.actors
    kill_times: list[float] = []

    def kill() -> None:
        kill_times.append(time.perf_counter())
        os.kill(actor["pid"], signal.SIGKILL)

    frames = collector.frames
    threading.Timer(normal / 2, kill).start()
    batch = collector.next()
    seconds = time.perf_counter() - kill_times[0]
    if collector.stats()["restarts"] != 1 or collector.frames - frames != batch.numel():
        raise RuntimeError("The actor was not restarted once, or frames were lost.")
    return seconds


def run(options: argparse.Namespace) -> None:
    """Measure with a Ray cluster on this machine, and print the results."""
    # As when a collector starts Ray: actors have the local collector's priority.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    ray.init(
        num_cpus=max(2, options.workers) + 1,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
    )
    several = options.workers > 1
    common: dict[str, Any] = {"frames_per_batch": options.frames, "seed": 0}
    kind: Any = MultiSyncCollector if several else Collector
    workers = {"num_workers": options.workers} if several else {}
    local = kind(make_env, make_policy(), **workers, **common)
    remote = RayCollector(
        make_env,
        make_policy(),
        num_collectors=1,
        num_workers_per_collector=options.workers,
        sync=True,
        **common,
    )
    loops = {"ray": updating(remote), "local": updating(local)}
    times = measure(loops, options.pairs, seconds=0.0, clock=time.perf_counter)
    local.shutdown()
    normal = float(np.median(times["ray"]))
    batch = remote.next()
    assert batch is not None
    frames = batch.numel()
    nbytes = sum(
        leaf.nbytes for leaf in batch.values(include_nested=True, leaves_only=True)
    )
    del batch
    recovered = recovery(remote, normal)
    weights = sum(p.nbytes for p in remote.policy.parameters())
    remote.shutdown()
    ray.shutdown()
    ratio = Estimate.of_ratios(times["ray"], times["local"])
    print(
        f"One local actor, {options.workers} workers, batches of {frames:,} frames: "
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) times the local "
        "collector's time."
    )
    print(
        f"A frame is {nbytes / frames:,.0f} bytes, a version of the weights "
        f"{weights:,}."
    )
    print(
        f"After a kill the batch took {recovered:.1f} s to arrive; without a kill it "
        f"takes {normal:.1f} s."
    )


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=4000, help="frames per batch")
    parser.add_argument("--workers", type=int, default=2, help="workers of the actor")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of batches")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
