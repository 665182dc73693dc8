"""Measures collection with Ray on one machine, and predicts it for many.

* Overhead: ``RayCollector`` with one local actor against the same local collector, on
  multiwalker, one batch of each in turn. Both have the same seed, so they do the same
  work. Each batch follows an update of the weights. Ratios are taken within a pair.
* Bytes: transferred per frame and per version of the weights.
* Recovery: time from a kill of the actor in the middle of a batch to that batch.
* Model: predicted frames per second of 2 to 1,000 nodes like this one. Its inputs are
  measured in the same run, except the speed of the network (``--network``). Async: the
  nodes, the learner's network or the learner's process is the limit. Sync: all nodes
  collect, then all send.

    python benchmarks/distributed.py              # takes minutes
    python benchmarks/distributed.py --quick      # checks that it works
"""

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from harness.estimates import Estimate
from harness.machine import machine
from harness.turns import Alternative, measure
from rich.console import Console
from rich.table import Table
from tensordict.nn import TensorDictModule
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, RayCollector
from marl_collect.envs import PettingZooEnv
from marl_collect.models import MultiAgentMLP

NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
STORE = 500_000_000
SMALL = 300  # Batches of one frame, to measure the fixed cost of a request.


@dataclass(frozen=True)
class Inputs:
    """Inputs of the model. All but the network's speed are measured in this run.

    Attributes:
        frames_per_batch: frames in a batch of one actor.
        node_frames_per_second: frames per second that one actor collects, with Ray.
        bytes_per_frame: size of a frame in a batch.
        weight_bytes: size of one version of the weights.
        order_seconds: fixed processor time of the learner's process per request and
            reply.
        copy_bytes_per_second: speed of copies from the store to the learner's slot.
        store_bytes_per_second: speed of copies from an actor's slot to the store.
        store_bytes: size of the store on the learner's node.
        network_bytes_per_second: speed of the learner's network, from ``--network``.
    """

    frames_per_batch: int
    node_frames_per_second: float
    bytes_per_frame: float
    weight_bytes: int
    order_seconds: float
    copy_bytes_per_second: float
    store_bytes_per_second: float
    store_bytes: float
    network_bytes_per_second: float


@dataclass(frozen=True)
class Prediction:
    """Predicted frames per second of a number of nodes, and what limits them."""

    nodes: int
    asynchronous: float
    synchronous: float
    network: float
    driver: float
    store: float
    limit: str


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


def updating(collector: Any, say: Callable[[str], None]) -> Alternative:
    """Return the call that collects a batch with new weights."""

    def call() -> None:
        collector.update_policy_weights_()
        batch = collector.next()
        del batch
        say(f"a batch of {type(collector).__name__}")

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


def order_seconds() -> float:
    """Return the learner's processor time for a request of one frame."""
    with RayCollector(CountingEnv, frames_per_batch=1, sync=True) as collector:
        collector.next()
        begin = time.process_time()
        for _ in range(SMALL):
            collector.next()
        return (time.process_time() - begin) / SMALL


def store_rates(nbytes: int) -> tuple[float, float]:
    """Return the bytes per second of copies to the store and from it to a slot."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    put_seconds: list[float] = []
    out: list[float] = []
    for _ in range(20):
        begin = time.perf_counter()
        reference = ray.put(source)
        put_seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        np.copyto(target, ray.get(reference, timeout=60.0))
        out.append(time.perf_counter() - begin)
    return nbytes / float(np.median(put_seconds)), nbytes / float(np.median(out))


def predict(measured: Inputs, nodes: int) -> Prediction:
    """Predict the frames per second of ``nodes`` nodes like this one."""
    batch_bytes = measured.frames_per_batch * measured.bytes_per_frame
    collecting = measured.frames_per_batch / measured.node_frames_per_second
    collecting += batch_bytes / measured.store_bytes_per_second
    moved_bytes = batch_bytes + measured.weight_bytes
    network = nodes * moved_bytes / measured.network_bytes_per_second
    driver = nodes * (
        measured.order_seconds + batch_bytes / measured.copy_bytes_per_second
    )
    frames = nodes * measured.frames_per_batch
    slowest = max(collecting, network, driver)
    limits = {collecting: "the nodes", network: "network", driver: "driver"}
    return Prediction(
        nodes=nodes,
        asynchronous=frames / slowest,
        synchronous=frames / (collecting + max(network, driver)),
        network=network / slowest,
        driver=driver / slowest,
        store=nodes * batch_bytes / measured.store_bytes,
        limit=limits[slowest],
    )


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything, with a Ray cluster on this machine."""
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
    say = console.log if options.verbose else lambda _: None
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
    loops = {"ray": updating(remote, say), "local": updating(local, say)}
    times = measure(loops, options.pairs, seconds=0.0, clock=time.perf_counter)
    here_seconds, there_seconds = times["local"], times["ray"]
    local.shutdown()
    normal = float(np.median(there_seconds))
    batch = remote.next()
    assert batch is not None
    frames, nbytes = (
        batch.numel(),
        sum(
            leaf.numel() * leaf.element_size()
            for leaf in batch.values(include_nested=True, leaves_only=True)
        ),
    )
    del batch
    recovered = recovery(remote, normal)
    weights = sum(p.numel() * p.element_size() for p in remote.policy.parameters())
    remote.shutdown()
    put_rate, out = store_rates(nbytes)
    inputs = Inputs(
        frames_per_batch=frames,
        node_frames_per_second=frames / normal,
        bytes_per_frame=nbytes / frames,
        weight_bytes=weights,
        order_seconds=order_seconds(),
        copy_bytes_per_second=out,
        store_bytes_per_second=put_rate,
        store_bytes=options.store * 1e9,
        network_bytes_per_second=options.network * 1e9 / 8,
    )
    ray.shutdown()
    return {
        "machine": machine(),
        "workers": options.workers,
        "seconds": {"local": here_seconds, "ray": there_seconds},
        "ratio": asdict(Estimate.of_ratios(there_seconds, here_seconds)),
        "recovery_seconds": recovered,
        "batch_seconds": normal,
        "inputs": asdict(inputs),
        "predictions": [asdict(predict(inputs, nodes)) for nodes in NODES],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the results."""
    ratio, inputs = result["ratio"], result["inputs"]
    console.print(
        f"One local actor, {result['workers']} workers, batches of "
        f"{inputs['frames_per_batch']:,} frames: {ratio['median']:.3f} "
        f"({ratio['low']:.3f} to {ratio['high']:.3f}) times the local collector's time."
    )
    console.print(
        f"A frame is {inputs['bytes_per_frame']:,.0f} bytes, a version of the weights "
        f"{inputs['weight_bytes']:,}."
    )
    console.print(
        f"After a kill the batch took {result['recovery_seconds']:.1f} s to arrive; "
        f"without a kill it takes {result['batch_seconds']:.1f} s."
    )
    console.print("Inputs of the model:")
    for name, value in inputs.items():
        console.print(f"  {name:26} {value:,.6g}")
    table = Table(title="PREDICTION, not measured: nodes like this one")
    for column in ("nodes", "async frames/s", "sync frames/s"):
        table.add_column(column, justify="right")
    for column in ("network", "driver", "store, sync", "limited by"):
        table.add_column(column, justify="right")
    for prediction in result["predictions"]:
        table.add_row(
            f"{prediction['nodes']:,}",
            f"{prediction['asynchronous']:,.0f}",
            f"{prediction['synchronous']:,.0f}",
            f"{prediction['network']:.0%}",
            f"{prediction['driver']:.0%}",
            f"{prediction['store']:.0%}",
            prediction["limit"] + (", store spills" if prediction["store"] > 1 else ""),
        )
    console.print(table)


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=4000, help="frames per batch")
    parser.add_argument("--workers", type=int, default=2, help="workers of the actor")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of batches")
    parser.add_argument(
        "--network", type=float, default=10.0, help="learner's network, Gbit/s"
    )
    parser.add_argument(
        "--store", type=float, default=20.0, help="store on the learner's node, GB"
    )
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two pairs")
    options = parser.parse_args()
    if options.quick:
        options.frames, options.pairs = 400, 2
    console = Console()
    result = run(options, console)
    show(result, console)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
