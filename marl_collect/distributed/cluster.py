"""Connects to a running Ray, or starts a local one."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, final

from marl_collect.errors import imports_of, warn

_lock = threading.Lock()
_users = 0  # Collectors in this process that use a Ray that one of them started.

# A Ray that we start sends no usage reports and has no dashboard. Its actors run at the
# priority of this process: Ray's default niceness of 15 would slow them down.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
_TOKENS = (2, 60)
"""A local Ray of this version or a later one has tokens by default."""
_DEFAULTS = {"address": "local", "include_dashboard": False, "log_to_driver": False}


def require_ray() -> ModuleType:
    """Return the module ``ray``.

    Raises:
        ImportError: if Ray is not installed; names the extra to install.
    """
    with imports_of("ray", "RayCollector"):
        import ray
    return ray  # type: ignore[no-any-return, unused-ignore]


def _protect(version: str) -> None:
    """Keep others from a Ray that is about to start: it listens on all interfaces.

    Newer versions answer only those who have the token in ``~/.ray``. Ray lets every
    user of the machine read that file, so the folder is closed here. Setting the mode
    here has no effect, because Ray read it when it was imported.

    Args:
        version: of Ray.
    """
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is None and tuple(map(int, version.split(".")[:2])) < _TOKENS:
        warn(
            f"Ray {version} listens on all interfaces without tokens, so whoever "
            "reaches this machine can run code in it. Install Ray "
            f"{_TOKENS[0]}.{_TOKENS[1]}, or set RAY_AUTH_MODE=token (Ray 2.52) before "
            "the program starts; RAY_AUTH_MODE=disabled hides this warning."
        )
    if mode in (None, "token"):
        folder = Path.home() / ".ray"
        with suppress(OSError):  # Ray reports it if it cannot write there.
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)


@final
class Cluster:
    """Keeps this process connected to a Ray for as long as a collector needs it."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        """Use the Ray that this process is connected to, or connect, or start one.

        Args:
            config: arguments of ``ray.init``. An ``address``, or ``RAY_ADDRESS`` in
                the environment, names a cluster to connect to.

        Raises:
            ValueError: if there are arguments, but this process is connected already.
        """
        global _users
        self.ray: Any = require_ray()
        with _lock:
            self._counted = not self.ray.is_initialized()
            if self._counted:
                self._begin(dict(config or {}))
            elif config:
                raise ValueError(
                    "ray_init_config has no effect, because this process is already "
                    "connected to Ray: leave ray_init_config out, or call "
                    "ray.shutdown() first."
                )
            # A second collector relies on the Ray that a first one started.
            self._counted = self._counted or _users > 0
            _users += self._counted

    def close(self) -> None:
        """Disconnect, and stop a Ray that was started here, if no collector uses it."""
        global _users
        with _lock:
            if not self._counted:
                return
            self._counted = False
            _users -= 1
            if _users == 0 and self.ray.is_initialized():
                self.ray.shutdown()

    def _begin(self, config: dict[str, Any]) -> None:
        joins = "address" in config or "RAY_ADDRESS" in os.environ
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        if not joins:
            config = _DEFAULTS | config
            _protect(self.ray.__version__)
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        try:
            self.ray.init(**config)
        finally:
            for name, old in before.items():
                if old is None:
                    os.environ.pop(name, None)
