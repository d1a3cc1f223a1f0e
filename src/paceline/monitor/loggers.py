"""Further places for the metrics: a CSV file, TensorBoard, Weights & Biases, MLflow.

    for logger in open_loggers(["csv", "wandb"], run_folder, config.to_dict()): …

Only rank 0 opens them. Records of training become `train/loss`, those of evaluations `eval/loss`; in the CSV file,
where every record is a row, training's columns are plain. A run that goes on in the same folder goes on in the same
file, the same W&B run and the same MLflow run.

A place that fails while training runs (a server that is away, a full disk) is warned about once and left alone:
metrics.jsonl has everything, and hours of training are worth more than a curve. A place that can't be opened at the
beginning is an error, because then nothing is lost yet.
"""

from __future__ import annotations

import csv
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from paceline.config.components import LOGGERS, LoggerFacts
from paceline.errors import PacelineError, TrainError
from paceline.log import rank_log
from paceline.run.folder import METRICS, RunFolder
from paceline.run.jsonl import open_to_append
from paceline.text import flatten

Record = Mapping[str, Any]


class Logger(Protocol):
    def write(self, records: Sequence[Record]) -> None: ...
    def close(self) -> None: ...


Opener = TypeVar("Opener", bound=Callable[..., Logger])


def register_logger(name: str) -> Callable[[Opener], Opener]:
    """Register a logger of your own, for `loggers: [name]` in a recipe or `Trainer(loggers=[name])`.

        @paceline.register_logger("lines")
        class Lines:
            def __init__(self, run, settings): ...
            def write(self, records): ...
            def close(self): ...

    It is opened on rank 0 with the run folder (a `Path`) and the recipe (a dict), gets the records of each log point
    and evaluation, and is closed when training ends. A resumed run opens it again on the same folder.
    """

    def add(opener: Opener) -> Opener:
        LOGGERS.declare(name, LoggerFacts())
        LOGGERS.implement(name)(lambda run, settings: opener(run.path, settings))
        return opener

    return add


def open_loggers(names: Sequence[str], run: RunFolder, settings: Mapping[str, Any]) -> list[Logger]:
    """Open these places for the run in that folder. `settings` is the recipe, for those that show it."""
    opened: list[Logger] = []
    try:
        for name in names:
            opened.append(_Guarded(name, _open(name, run, settings)))
    except BaseException:
        for logger in opened:
            logger.close()
        raise
    return opened


def _open(name: str, run: RunFolder, settings: Mapping[str, Any]) -> Logger:
    try:
        logger: Logger = LOGGERS.find(name)(run, settings)
        return logger
    except PacelineError:
        raise
    except Exception as error:
        raise TrainError(
            "logger-failed",
            f"The logger {name!r} could not be opened: {error}",
            why="it was asked for by `loggers`, and training without it would be found out at the end",
            fix=f"see what {name} says above, or take {name!r} out of `loggers`",
        ) from error


class _Guarded:
    """A logger whose failure does not end training."""

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger = name, logger
        self._failed = False

    def write(self, records: Sequence[Record]) -> None:
        if not self._failed:
            self._try(lambda: self._logger.write(records))

    def close(self) -> None:
        self._try(self._logger.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                self._failed = True
                rank_log(0).warning(f"{self._name} takes no more metrics of this run: {error}. {METRICS} has them all.")


@LOGGERS.implement("csv")
class CsvFile:
    """A CSV file. A new column means that the file is written again, with the new header."""

    _SHARED = ("step", "epoch", "time")

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self._path = run.csv
        self._columns: list[str] = []
        self._file: TextIO | None = None
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])

    def write(self, records: Sequence[Record]) -> None:
        rows = [self._row(record) for record in records]
        wanted = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if wanted != self._columns:
            self._widen(wanted)
        if self._file is None:
            self._file = open_to_append(self._path)
        self._writer(self._file).writerows(rows)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _row(self, record: Record) -> dict[str, Any]:
        prefix = "eval/" if record.get("evaluation") else ""
        items = ((name, value) for name, value in record.items() if name != "evaluation")
        return {name if name in self._SHARED else prefix + name: value for name, value in items}

    def _widen(self, columns: list[str]) -> None:
        self.close()
        old: list[dict[str, Any]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                old = list(csv.DictReader(file))
        self._columns = columns
        new = self._path.with_suffix(".csv.new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(old)
        new.replace(self._path)

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        # Ignored: the surplus cells of a line that a killed writer left.
        return csv.DictWriter(file, self._columns, lineterminator="\n", extrasaction="ignore")


@LOGGERS.implement("tensorboard")
class TensorBoard:
    """Event files in `tensorboard/`; `tensorboard --logdir RUNS` shows them. NaN is kept as it is."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        _module("tensorboard", "tensorboard")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(run.tensorboard))

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in _numbers(record):
                self._writer.add_scalar(name, value, record["step"], walltime=record.get("time"))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@LOGGERS.implement("wandb")
class WeightsAndBiases:
    """A W&B run, with the recipe as its config. WANDB_MODE, WANDB_ENTITY and the like are W&B's own and hold."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        wandb = _module("wandb", "wandb")
        noted = run.wandb_id
        resumed = noted.exists()
        identity = noted.read_text().strip() if resumed else uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=_project(settings), name=run.path.name, id=identity, resume="allow" if resumed else None,
            dir=str(run), config=dict(settings),
            # Our bar would be copied a line at each refresh.
            settings=wandb.Settings(console="off"),
        )  # fmt: skip
        noted.write_text(identity + "\n")
        # W&B drops what comes for an earlier step than its own counter's; an axis of ours has no such order.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({"step": record["step"], **dict(_numbers(record))})

    def close(self) -> None:
        self._run.finish()


@LOGGERS.implement("mlflow")
class Mlflow:
    """An MLflow run, with the recipe as its parameters: on the server of MLFLOW_TRACKING_URI, else in `mlflow.db`."""

    _MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # in one request

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self._mlflow = _module("mlflow", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            for part in ("sqlalchemy", "alembic"):
                _module(part, "mlflow")
            uri = f"sqlite:///{run.mlflow_database.resolve()}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        noted = run.mlflow_id
        if noted.exists():
            self._run_id = noted.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._create(run, settings)
        noted.write_text(self._run_id + "\n")

    def write(self, records: Sequence[Record]) -> None:
        metrics = []
        for record in records:
            milliseconds = int(1000 * record.get("time", time.time()))
            for name, value in _numbers(record):
                metrics.append(self._mlflow.entities.Metric(name, float(value), milliseconds, record["step"]))
        for part in _parts(metrics, self._MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create(self, run: RunFolder, settings: Mapping[str, Any]) -> str:
        name = _project(settings)
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_id: str = self._client.create_run(identity, run_name=run.path.name).info.run_id
        parameters = [self._mlflow.entities.Param(key, str(value)) for key, value in flatten(settings).items()]
        for part in _parts(parameters, self._MOST_PARAMETERS):
            self._client.log_batch(run_id, params=part)
        return run_id


def _module(name: str, logger: str) -> Any:
    """A package that only this logger needs, imported when it is opened."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrainError(
            "logger-not-installed",
            f"The logger {logger!r} needs the package {name!r}.",
            why=f"it could not be imported: {error}",
            fix=f"pip install 'paceline[{LOGGERS.facts(logger).extra}]'",
        ) from None


def _project(settings: Mapping[str, Any]) -> str:
    """A named run's name; runs that were only numbered or dated share a project."""
    run = settings.get("run")
    return Path(run).name if isinstance(run, str) else "paceline"


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record under the names that these tools group by."""
    prefix = "eval/" if record.get("evaluation") else "train/"
    for name, value in record.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "time"):
            yield prefix + name, value


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
