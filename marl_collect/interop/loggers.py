"""TorchRL's loggers for the metrics of training runs.

Needs the extra ``loggers``, and the package of the logger: wandb, mlflow or trackio.
"""

import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

from typing_extensions import override

from marl_collect.core.closing import Closing
from marl_collect.errors import MissingPackageError, imports_of, install_command
from marl_collect.options import did_you_mean, nearest

LOGGERS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("torchrl", "tensorboard"),
    "csv": ("torchrl",),
    "wandb": ("torchrl", "wandb"),
    "mlflow": ("torchrl", "mlflow"),
    "trackio": ("torchrl", "trackio"),
}
"""The packages that each logger needs."""
_EXTRA: Final = "loggers"
_OF_EXTRA: Final = ("torchrl", "tensorboard")


def check_logger(name: str) -> None:
    """Check that a logger exists, and that its packages are installed.

    Raises:
        ValueError: if there is no such logger.
        MissingPackageError: if a package is missing; says how to install it.
    """
    if name not in LOGGERS:
        hint = did_you_mean(nearest(name, list(LOGGERS), most=1))
        raise ValueError(
            f"There is no logger {name!r}.{hint} Expected one of {', '.join(LOGGERS)}."
        )
    for package in LOGGERS[name]:
        if find_spec(package) is None:
            ours = package in _OF_EXTRA
            command = install_command(_EXTRA) if ours else f"pip install {package}"
            raise MissingPackageError(
                f"The logger {name} needs {package}, which is not installed. Install "
                f"it with: {command}",
                name=package,
            )


@final
class RunLogger(Closing):
    """Gives the metrics of a run to one of TorchRL's loggers, each metric once.

    Metrics wait until the run's checkpoint is written. A resumed run repeats all that
    came after its last checkpoint, so what waited when it was killed is not lost, and
    what was logged is not logged again.

    CSV files, events of TensorBoard and the files of W&B are written to folders in the
    folder of the run, MLflow's database is ``mlflow.db`` there unless
    ``MLFLOW_TRACKING_URI`` names a server, and Trackio's is where Trackio keeps all.

    Args:
        name: of the logger, from ``LOGGERS``.
        folder: of the run.
        run: name of the run, unique in its project.
        project: of W&B and Trackio.
        state: from ``state_dict``, to continue the log of a resumed run. None begins
            a new log.

    Raises:
        ValueError: if there is no such logger.
        MissingPackageError: if one of its packages is missing.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        run: str,
        project: str,
        state: Mapping[str, str] | None = None,
    ) -> None:
        check_logger(name)
        project = re.sub(r"[^\w.-]", "-", project)  # W&B forbids some characters.
        self._name = name
        self._waiting: list[tuple[dict[str, float], int]] = []
        # Names the run: two comparisons may have the same setups and seeds.
        self._id = state["id"] if state else uuid.uuid4().hex
        self._mlflow_run = state["mlflow_run"] if state else ""
        with imports_of(_EXTRA, f"The logger {name}"):
            from torchrl.record.loggers import get_logger
        self._logger: Any
        if name == "mlflow":
            self._logger = self._mlflow(folder, f"{project}/{run}")
        elif name in ("tensorboard", "csv"):
            self._logger = get_logger(name, str(folder), name)
        elif name == "wandb":
            self._logger = get_logger(
                name,
                str(folder),
                run,
                wandb_kwargs={"id": self._id, "project": project},
            )
        else:
            self._logger = get_logger(
                name,
                str(folder),
                f"{run}-{self._id[:8]}",
                trackio_kwargs={"project": project},
            )

    def _mlflow(self, folder: Path, experiment: str) -> Any:
        """Return the logger of MLflow.

        ``get_logger`` chooses a store of files, which MLflow has given up, and a new
        run in each process.
        """
        from torchrl.record.loggers.mlflow import MLFlowLogger

        place = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        place = os.environ.get("MLFLOW_TRACKING_URI", place)
        with _environment("MLFLOW_RUN_ID", self._mlflow_run):
            logger = MLFlowLogger(exp_name=experiment, tracking_uri=place)
        self._mlflow_run = logger.experiment.info.run_id
        return logger

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Log the settings of a run: plain data, nested or not."""
        flat = dict(_flat(settings))
        if self._name == "mlflow":  # TorchRL's method needs OmegaConf.
            import mlflow

            mlflow.log_params(flat)
        else:
            self._logger.log_hparams(flat)

    def add(self, metrics: Mapping[str, float], frames: int) -> None:
        """Take metrics that were measured after so many frames; only finite ones."""
        finite = {
            name: value
            for name, value in metrics.items()
            if name != "frames" and math.isfinite(value)
        }
        self._waiting.append((finite, frames))

    def write(self) -> None:
        """Log all metrics that wait. Call it when a checkpoint was written."""
        waiting, self._waiting = self._waiting, []
        for metrics, frames in waiting:
            for name, value in metrics.items():
                self._logger.log_scalar(name, value, step=frames)

    def state_dict(self) -> dict[str, str]:
        """Return the names of the log, with which another process continues it."""
        return {"logger": self._name, "id": self._id, "mlflow_run": self._mlflow_run}

    @override
    def close(self) -> None:
        """Close the log, without the metrics that wait."""
        self._waiting.clear()
        if self._name == "mlflow":
            import mlflow

            mlflow.end_run()
            return
        experiment = self._logger.experiment
        for name in ("finish", "close"):  # CSV files have neither.
            if callable(end := getattr(experiment, name, None)):
                end()
                return


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings with dotted names, as numbers and text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            yield f"{prefix}{name}", value if plain else str(value)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment inside, unless it is to be empty."""
    before = os.environ.get(name)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
