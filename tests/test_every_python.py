"""Everything that starts a process, in other builds of Python and on other kernels.

A build of Python lacks functions if it was compiled against old headers: conda's has no
``os.pidfd_open``, uv's had no ``os.memfd_create``. Old kernels and strict containers
refuse the calls. ``sitecustomize`` removes the functions here; the kernel itself
refuses the calls, through a filter.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from support.processes import left, wait_until
from support.scripts import start_python

pytestmark = pytest.mark.processes

pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")

REFUSING: Final = Path(__file__).parent / "support" / "refusing.py"
SECONDS: Final = 280
"""Three interpreters that import torch; only a defect takes so long."""


@dataclass(frozen=True)
class Build:
    """An interpreter on a kernel, and what the trainer must use there.

    Attributes:
        customization: runs at the start of each interpreter.
        refusal: the kernel's answer to the calls; empty if it has them.
        memory: prefix of the name of shared memory.
        has_pidfds: whether processes have descriptors.
    """

    customization: str = ""
    refusal: str = ""
    memory: str = "/memfd:marl_collect"
    has_pidfds: bool = True


PIDFD: Final = "import os, signal; del os.pidfd_open, signal.pidfd_send_signal\n"
MEMFD: Final = "import os; del os.memfd_create, os.MFD_CLOEXEC\n"
BUILDS: Final = {
    "neither": Build(PIDFD + MEMFD),
    "strict-container": Build(PIDFD + MEMFD, "EPERM", "/dev/shm/", has_pidfds=False),
}

SCRIPT: Final = """
import gc, os, signal
from pathlib import Path
from typer.testing import CliRunner
from marl_collect import MultiSyncCollector, ParallelEnv, describe, evaluate
from marl_collect.cli.main import app
from marl_collect.envs import PettingZooEnv
from marl_collect.errors import WorkerError
from marl_collect.processes import WorkerPool
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner

def files():
    names = (os.readlink(path) for path in Path("/proc/self/fd").iterdir()
             if path.is_symlink())
    return [name for name in names if name.startswith(("/memfd:marl", "/dev/shm/"))
            or "pidfd" in name]

def killed(pid, use):
    os.kill(pid, signal.SIGKILL)
    try:
        use()
    except WorkerError as error:
        print("killed", error.exitcode)

make_env = lambda: PettingZooEnv("simple_spread_v3")
print("describe", *describe(make_env).groups)

result = CliRunner().invoke(app, ["info", "simple_spread_v3"])
print("info", result.exit_code, "observation" in result.output)

options = TrainingOptions(gamma=0.95, reward="team", reward_scale=0.1)
learner = PPOLearner(describe(make_env), Setup("mappo"), options, seed=0)
collector = MultiSyncCollector(
    [make_env] * 2, learner.policy, frames_per_batch=100, total_frames=200
)
for batch in collector:
    learner.update(batch, progress=collector.frames / 200)
    collector.update_policy_weights_()
    print("batch", *batch.batch_size)
print("evaluate", evaluate(learner.policy, make_env, episodes=1).mean_team_return < 0)

with ParallelEnv(2, make_env) as env:
    print("step", *env.step(env.rand_action(env.reset())).batch_size)
    killed(env.engine().pids[0], env.reset)

collector = MultiSyncCollector(
    [make_env] * 2, frames_per_batch=100, total_frames=-1, num_workers=2
)
collector.next()
used = files()
print("memory", sorted({name.split("#")[0].split(" ")[0] for name in used
                        if "pidfd" not in name}))
print("pidfds", any("pidfd" in name for name in used))
killed(collector.worker_pids[1], lambda: [collector.next() for _ in range(9)])
collector.shutdown()
del batch, collector

def obey(worker, argument):
    worker.send(worker.receive() + argument)
    worker.receive()

pool = WorkerPool(obey, [1, 2], start_method="spawn")
pool.broadcast(1)
print("spawned", sorted(pool.receive() for _ in range(2)))
killed(pool.pids[0], lambda: pool.receive([0]))
pool.close()
del learner, env, pool
gc.collect()
print("left", files())
"""

PRINTED: Final = """\
describe agent
info 0 True
batch 2 50
batch 2 50
evaluate True
step 2
killed -9
memory ['{memory}']
pidfds {pidfds}
killed -9
spawned [(0, 2), (1, 3)]
killed -9
left []
"""


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", BUILDS)
def test_whatever_starts_processes_runs_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    build = BUILDS[name]
    (tmp_path / "sitecustomize.py").write_text(build.customization)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    refusing = [str(REFUSING), build.refusal, sys.executable] if build.refusal else []
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with start_python(*refusing, script, env=env, interpreter=True) as program:
        printed, errors = program.communicate(timeout=SECONDS)
    assert errors == ""
    assert printed == PRINTED.format(memory=build.memory, pidfds=build.has_pidfds)
    wait_until(lambda: not left(program.pid), "a process is left behind")
