"""Frames per second of simulators on a device, in at most ten minutes.

    python benchmarks/gpu_worlds.py --device cuda

The rows are those of ``micro.py worlds`` that have VMAS and JaxMARL: navigation, whose
episodes end together, balance, whose episodes end one by one, and JaxMARL's
simple_spread. A network with two hidden layers of 64 units acts. The bare loop stores
on the device what a batch has, observations at the root and under ``next``; it knows
neither trajectories nor returns, and begins episodes of many worlds together, as our
adapters do. ``MultiSyncCollector`` has one worker, and batches in memory of the CPU.
TorchRL's collector is measured over its ``VmasEnv``. The sides take turns; a ratio is
the median over rounds of their rates.
"""

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, final

import torch
from cases.worlds import DISCRETE, StockJaxMarl, torchrl_vmas
from harness.estimates import Estimate
from harness.turns import Alternative, measure

from marl_collect import Collector, MultiSyncCollector, describe
from marl_collect.envs import JaxMarlEnv, VmasEnv
from marl_collect.envs.vmas.env import renew
from marl_collect.models import make_policy

FRAMES = 50
"""Frames of each world in a batch."""
ROWS = ("vmas/navigation", "vmas/balance", "jaxmarl/MPE_simple_spread_v3")
SIDES = ("bare", "Collector", "MultiSyncCollector", "TorchRL")


@final
class VmasWorlds:
    """A VMAS scenario with discrete actions."""

    def __init__(self, scenario: str, worlds: int, device: str) -> None:
        """Build the worlds, and a twin from which worlds begin."""
        import vmas

        make = partial(vmas.make_env, scenario, worlds, device=device, **DISCRETE)
        self._env, self._twin = make(seed=0), make(seed=1)

    def begin(self, which: Any, seeds: Any) -> torch.Tensor:
        """Begin episodes, and return observations ``[K, n, ...]`` of all worlds."""
        del seeds
        if which is None:
            return torch.stack(self._env.reset(), 1)
        self._twin.reset(return_observations=False)
        renew(self._env, self._twin, which)
        observed = self._env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )[0]
        return torch.stack(observed, 1)

    def advance(self, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Step all worlds; return observations, rewards and ends."""
        observations, rewards, over, _ = self._env.step(
            list(actions[..., None].unbind(1))
        )
        return torch.stack(observations, 1), torch.stack(rewards, 1), over


def jax_worlds(task: str, worlds: int, device: str) -> StockJaxMarl:
    """Return the worlds of a JaxMARL task, whose arrays are shared with torch."""
    import jax

    from_jax, to_jax = torch.utils.dlpack.from_dlpack, jax.dlpack.from_dlpack
    stock = StockJaxMarl(task, worlds, from_jax, to_jax)
    if stock.begin(None, None).device.type != torch.device(device).type:
        raise ImportError(f"JAX for {device}")
    return stock


def bare(worlds: Any, network: Any, device: str) -> Callable[[], None]:
    """Return what collects one batch, and stores it on the device."""
    observed = worlds.begin(None, None)
    logits = network(observed)
    (k, n), like = logits.shape[:2], partial(torch.empty, device=device)
    roots, nexts = (like((FRAMES, *observed.shape)) for _ in range(2))
    logit, chance = like((FRAMES, *logits.shape)), like((FRAMES, k, n))
    rewards = like((FRAMES, k, n))
    action = like((FRAMES, k, n), dtype=torch.int64)
    ends, masks = (like((FRAMES, k), dtype=torch.bool) for _ in range(2))

    @torch.inference_mode()
    def collect() -> None:
        nonlocal observed
        for t in range(FRAMES):
            roots[t] = observed
            logits = network(observed)
            gumbel = torch.empty_like(logits).exponential_().log_().neg_()
            chosen = gumbel.add_(logits).argmax(-1)
            logit[t], action[t] = logits, chosen
            chance[t] = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
            observed, rewards[t], over = worlds.advance(chosen)
            over = over.bool()  # JAX shares bytes.
            nexts[t], ends[t], masks[t] = observed, over, ~over
            if over.any():
                first = worlds.begin(over, None)
                observed = torch.where(over[:, None, None], first, observed)

    return collect


def sides(
    row: str, worlds: int, device: str, stack: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return for each side of a row what collects one batch."""
    library, name = row.split("/")
    ours: Any = partial(JaxMarlEnv, name, worlds)
    stock: Any = jax_worlds
    if library == "vmas":
        ours = partial(VmasEnv, name, worlds, **DISCRETE)
        stock = VmasWorlds
    policy = make_policy(partial(ours, device="cpu"), num_cells=(64, 64))
    on_device = make_policy(partial(ours, device="cpu"), num_cells=(64, 64)).to(device)
    frames = worlds * FRAMES
    batches: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
    network: Any = on_device[0].module
    built: dict[str, Callable[[], object]] = {
        "bare": bare(stock(name, worlds, device), network, device),
        "Collector": stack.enter_context(
            Collector(partial(ours, device=device), on_device, **batches)
        ).next,
        "MultiSyncCollector": stack.enter_context(
            MultiSyncCollector([partial(ours, device=device)], policy, **batches)
        ).next,
    }
    if library == "vmas" and importlib.util.find_spec("torchrl"):
        from torchrl.collectors import Collector as TheirCollector

        theirs = torchrl_vmas(name, worlds, describe(ours), device)
        loop: Any = TheirCollector(theirs, on_device, device=device, **batches)
        stack.callback(loop.shutdown)
        built["TorchRL"] = partial(next, iter(loop))
    return built


def until_done(call: Callable[[], object], device: str) -> Alternative:
    """Return the call that also waits for the device."""

    def synchronised() -> None:
        call()
        torch.cuda.synchronize()

    return Alternative.once(call if device == "cpu" else synchronised)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--worlds", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10, help="begin no row after")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    name = args.device
    if name != "cpu":
        name = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {name}; frames/s (Collector / side)")
    print("| row | worlds |", " | ".join(SIDES), "|")
    print("|---|--:|" + "--:|" * len(SIDES))
    started = time.monotonic()
    for row in args.only:
        for worlds in args.worlds:
            cells = ["not measured"] * len(SIDES)
            if time.monotonic() - started < 60 * args.minutes:
                with ExitStack() as stack:
                    try:
                        built = sides(row, worlds, args.device, stack)
                    except ImportError as error:
                        print(f"| {row} | {worlds:,} | not installed: {error} |")
                        continue
                    calls = {s: until_done(built[s], args.device) for s in built}
                    clock = time.perf_counter
                    times = measure(calls, args.rounds, seconds=0, clock=clock)
                cells = [cell(times, side, worlds) for side in SIDES]
            print(f"| {row} | {worlds:,} |", " | ".join(cells), "|", flush=True)


def cell(times: dict[str, list[float]], side: str, worlds: int) -> str:
    """Return a side's rate, and how many times as fast ``Collector`` is."""
    if side not in times:
        return "-"
    rate = worlds * FRAMES / median(times[side])
    ratio = Estimate.of_ratios(times[side], times["Collector"]).median
    return f"{rate:,.0f}" if side == "Collector" else f"{rate:,.0f} ({ratio:.2f})"


if __name__ == "__main__":
    main()
