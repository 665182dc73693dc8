"""Lets TorchRL's ``PettingZooEnv`` find MPE, which has left PettingZoo for ``mpe2``.

Python imports this in every process whose ``PYTHONPATH`` has this folder, so TorchRL's
worker processes find the tasks, too. They are added to PettingZoo's table of tasks.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

TABLE = "pettingzoo.utils.all_modules"


class AddTasks(importlib.abc.MetaPathFinder):
    """Adds MPE's tasks to the table when it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the table only."""
        if name != TABLE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                from mpe2.all_modules import mpe_environments

                load(module)
                module.all_environments.update(mpe_environments)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AddTasks())
