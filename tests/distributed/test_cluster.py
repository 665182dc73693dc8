"""A Ray that a collector starts ends with it, and answers its user's token only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until_gone
from support.scripts import LIMIT, start_python

pytest.importorskip("ray")

from marl_collect.distributed.cluster import _protect

HOST = """
import os
import sys
import ray
from marl_collect import RayCollector
from workloads.counting import CountingEnv

collector = RayCollector(
    lambda: CountingEnv(),
    frames_per_batch=10,
    total_frames=30,
    ray_init_config={"num_cpus": 1, "object_store_memory": 80_000_000},
)
assert ray.is_initialized()
(pid,) = [actor["pid"] for actor in collector.actors]
assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
print(ray.get_runtime_context().gcs_address, pid, flush=True)
sys.stdin.readline()
assert sum(batch.numel() for batch in collector) == 30
assert not ray.is_initialized()
assert "RAY_worker_niceness" not in os.environ
"""
GUEST = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    print("nodes:", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60)))
except AuthenticationError:
    print("refused")
"""


def listens_everywhere(port: int) -> bool:
    """Return whether a port is open on all interfaces."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if int(number, 16) == port and not int(address, 16):
                return True
    return False


@pytest.mark.timeout(2 * LIMIT)
def test_a_local_ray_needs_its_token_and_ends_with_the_collector(
    tmp_path: Path,
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray").chmod(0o755)
    other.mkdir()
    names = [n for n in os.environ if not n.startswith("RAY_")]
    env = {name: os.environ[name] for name in names} | {"HOME": str(home)}
    guests = {
        "no token": {"RAY_AUTH_MODE": "disabled", "HOME": str(other)},
        "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 64},
        "right": {"RAY_AUTH_MODE": "token"},
    }
    with start_python("-c", HOST, env=env, stdin=subprocess.PIPE) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        address, pid = host.stdout.readline().split()
        # Why the token is needed: its port is open on every address of this machine.
        assert listens_everywhere(int(address.rpartition(":")[2]))
        started = {
            name: subprocess.Popen(
                [sys.executable, "-c", GUEST, address],
                env=env | changed,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for name, changed in guests.items()
        }
        told = {n: guest.communicate(timeout=LIMIT)[0] for n, guest in started.items()}
        host.stdin.write("\n")
        host.stdin.flush()
        assert host.wait(LIMIT) == 0
    wait_until_gone([int(pid)])
    assert told == {
        "no token": "refused\n",
        "wrong": "refused\n",
        "right": "nodes: 1\n",
    }
    token = home / ".ray" / "auth_token"
    assert token.read_text()
    assert token.parent.stat().st_mode & 0o077 == 0


def test_a_ray_without_tokens_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for version in ("2.40.0", "2.59.1"):
        with pytest.warns(UserWarning, match=rf"Ray {version} listens on all.*tokens"):
            _protect(version)
    _protect("2.60.0")
    _protect("3.0.0.dev0")
    assert (tmp_path / ".ray").stat().st_mode & 0o777 == 0o700
    (tmp_path / ".ray").rmdir()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    _protect("2.40.0")
    assert not (tmp_path / ".ray").exists()
