"""Loggers of metrics: CSV, TensorBoard, Weights & Biases, MLflow.

    for logger in open_loggers(["csv", "wandb"], run_folder, config.to_dict()): …

Only rank 0 opens them. Metrics of training are named `train/loss`, those of evaluations `eval/loss`; in the CSV file,
where every record is a row, columns of training have no prefix. A resumed run continues the same file, W&B run and
MLflow run.

A logger that cannot be opened is an error. One that fails during training (server unreachable, disk full) is disabled
with a warning, because metrics.jsonl contains all metrics and training should not stop. `convert` feeds them from that
file, after a run has ended.
"""

from __future__ import annotations

import csv
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, TypeVar

from paceline.config.components import LOGGERS, LoggerFacts
from paceline.errors import CheckpointError, PacelineError, TrainError
from paceline.log import rank_log
from paceline.run import jsonl, regular_files
from paceline.run.folder import METRICS, RunFolder
from paceline.text import flatten

_RECORDS = 10_000  # that are converted at a time

Record = Mapping[str, Any]


class Logger(Protocol):
    def write(self, records: Sequence[Record]) -> None: ...
    def close(self) -> None: ...


Opener = TypeVar("Opener", bound=Callable[..., Logger])


def register_logger(name: str) -> Callable[[Opener], Opener]:
    """Decorator that registers a custom logger, for `loggers: [name]` in a recipe or `Trainer(loggers=[name])`.

    It is opened on rank 0 with the run folder (a `Path`) and the recipe (a dict), receives the records of each log
    point and evaluation, and is closed when training ends. A resumed run opens it with the same folder. With a method
    `write_media`, it also receives each line of `media.jsonl`: images, texts and histograms.

    Args:
        name: of the logger

    Returns:
        The decorator.

    Raises:
        TrainError: `train.bad-registration`: the name is not a string, or what is decorated can't be called

    Example:
        >>> import paceline
        >>> @paceline.register_logger("lines")
        ... class Lines:
        ...     def __init__(self, run, settings):
        ...         self.file = (run / "lines.txt").open("a")
        ...     def write(self, records):
        ...         self.file.writelines(f"{record}\\n" for record in records)
        ...     def close(self):
        ...         self.file.close()
    """

    implement = LOGGERS.implement(name)

    def add(opener: Opener) -> Opener:
        implement(opener)  # refuses what can't be called
        implement(wraps(opener)(lambda run, settings: opener(run.path, settings)))
        LOGGERS.declare(name, LoggerFacts())
        return opener

    return add


def open_loggers(names: Sequence[str], run: RunFolder, settings: Mapping[str, Any]) -> list[GuardedLogger]:
    """Open loggers for a run. `settings` is the recipe."""
    opened: list[GuardedLogger] = []
    try:
        for name in names:
            opened.append(GuardedLogger(name, open_logger(name, run, settings)))
    except BaseException:
        for logger in opened:
            logger.close()
        raise
    return opened


def open_logger(name: str, run: RunFolder, settings: Mapping[str, Any]) -> Logger:
    """A logger whose errors are raised."""
    try:
        logger: Logger = LOGGERS.find(name)(run, settings)
        missing = [method for method in ("write", "close") if not callable(getattr(logger, method, None))]
        if missing:
            raise TypeError(f"{type(logger).__name__} has no method {missing[0]} ({LOGGERS.place(name)})")
        return logger
    except PacelineError:
        raise
    except Exception as error:
        raise TrainError(
            "logger-failed",
            f"The logger {name!r} could not be opened: {error}",
            fix=f"check the output of {name} above, or remove {name!r} from `loggers`",
        ) from error


class GuardedLogger:
    """Disables what fails of a logger, so that training continues."""

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger = name, logger
        self._failed: set[str] = set()

    def write(self, records: Sequence[Record]) -> None:
        self._try("write", "", records)

    def write_media(self, record: Record) -> None:
        if hasattr(self._logger, "write_media"):
            self._try("write_media", " for images, texts and histograms", record)

    def close(self) -> None:
        self._try("close", "")

    def _try(self, method: str, what: str, *given: Any) -> None:
        if method in self._failed:
            return
        try:
            getattr(self._logger, method)(*given)
        except Exception as error:
            if method != "close" or not self._failed:
                line = f"Logger {self._name!r} failed and is disabled{what}: {error}. {METRICS} contains all metrics."
                rank_log(0).warning(line)
            self._failed.add(method)


@LOGGERS.implement("csv")
class CsvFile:
    """A CSV file. It is rewritten with a new header when a column is added."""

    _SHARED = ("step", "epoch", "time")

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self._path = run.csv
        self._columns: list[str] = []
        self._file: TextIO | None = None
        old = self._rows()
        if old:  # a resumed run writes the rows of later steps again
            recorded = _recorded(run)
            self._rewrite(list(old[0]), [row for row in old if recorded is None or _identity(row) in recorded])

    def write(self, records: Sequence[Record]) -> None:
        rows = [self._row(record) for record in records]
        wanted = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if wanted != self._columns:
            self._rewrite(wanted, self._rows())
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

    def _rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with os.fdopen(regular_files.open_descriptor(self._path), newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        self.close()
        self._columns = [name for name in columns if name]  # a partial line may have had extra cells
        with regular_files.replacing(self._path) as new, new.open("w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        # extrasaction: an interrupted writer may have left a line with extra cells.
        return csv.DictWriter(file, self._columns, lineterminator="\n", extrasaction="ignore")


def _recorded(run: RunFolder) -> set[tuple[str, bool]] | None:
    """The steps and evaluations in the metrics file, from which a run that resumes has removed later ones."""
    if not run.metrics.exists():
        return None
    return {(str(record.get("step")), bool(record.get("evaluation"))) for record in jsonl.read(run.metrics)}


def _identity(row: Mapping[str, Any]) -> tuple[str, bool]:
    return row["step"], not row.get("loss") and bool(row.get("eval/loss"))


def open_to_append(path: Path) -> TextIO:
    """Open a file of lines. A partial line of a killed writer is terminated, so that it does not corrupt the next."""
    return os.fdopen(jsonl.open_lines(path), "a", encoding="utf-8", newline="")


@LOGGERS.implement("tensorboard")
class TensorBoard:
    """Event files in `tensorboard/`, for `tensorboard --logdir RUNS`. NaN values are kept."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        _module("tensorboard", "tensorboard")
        steps = [int(step) for step, _ in _recorded(run) or () if step.isdecimal()]
        # TensorBoard hides what an interrupted run wrote after the step that this one resumes from.
        purge = max(steps, default=0) + 1 if run.tensorboard.exists() else None
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer, self._folder = module.SummaryWriter(str(run.tensorboard), purge_step=purge), run.path

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in _numbers(record):
                self._writer.add_scalar(name, value, record["step"], walltime=record.get("time"))
        self._writer.flush()

    def write_media(self, record: Record) -> None:
        tag, step = f"{record['kind']}/{record['name']}", record["step"]
        if record["kind"] == "text":
            self._writer.add_text(tag, "    " + record["text"].replace("\n", "\n    "), step)  # Markdown of code
        elif record["kind"] == "histogram":
            counts, edges, mean, number = record["counts"], _edges(record), record["mean"], sum(record["counts"])
            sums = (number, mean * number, (mean**2 + record["std"] ** 2) * number)
            self._writer.add_histogram_raw(tag, edges[0], edges[-1], *sums, edges[1:], counts, step)
        else:  # add_image requires Pillow, to encode what is encoded already
            image = {"height": record["height"], "width": record["width"]}
            image |= {"colorspace": 4, "encoded_image_string": (self._folder / record["file"]).read_bytes()}
            summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
            self._writer.file_writer.add_summary(summary(value=[{"tag": tag, "image": image}]), step)

    def close(self) -> None:
        self._writer.close()


@LOGGERS.implement("wandb")
class WeightsAndBiases:
    """A W&B run with the recipe as its config. WANDB_MODE, WANDB_ENTITY and similar variables are respected."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self._wandb = wandb = _module("wandb", "wandb")
        self._folder, noted = run.path, run.wandb_id
        resumed = noted.exists()
        identity = regular_files.read_text(noted).strip() if resumed else uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=_project(settings), name=run.path.name, id=identity, resume="allow" if resumed else None,
            dir=str(run), config=dict(settings),
            # Otherwise every refresh of the progress bar would be logged as a line.
            settings=wandb.Settings(console="off"),
        )  # fmt: skip
        regular_files.replace(noted, f"{identity}\n".encode())
        # W&B drops records whose step is lower than its own counter; a custom step metric has no such restriction.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({"step": record["step"], **dict(_numbers(record))})

    def write_media(self, record: Record) -> None:
        if record["kind"] == "text":
            value = self._wandb.Table(columns=["text"], data=[[record["text"]]])
        elif record["kind"] == "histogram":
            value = self._wandb.Histogram(np_histogram=(record["counts"], _edges(record)))
        else:
            value = self._wandb.Image(str(self._folder / record["file"]))
        self._run.log({"step": record["step"], f"{record['kind']}/{record['name']}": value})

    def close(self) -> None:
        self._run.finish()


@LOGGERS.implement("mlflow")
class Mlflow:
    """An MLflow run with the recipe as its parameters, on the server of MLFLOW_TRACKING_URI or in `mlflow.db`."""

    _MAX_METRICS, _MAX_PARAMETERS = 1000, 100  # per request

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self._mlflow, self._folder = _module("mlflow", "mlflow"), run
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            for part in ("sqlalchemy", "alembic"):
                _module(part, "mlflow")
            uri = f"sqlite:///{run.mlflow_database.resolve()}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        noted = run.mlflow_id
        if noted.exists():
            self._run_id = regular_files.read_text(noted).strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._create(run, settings)
        regular_files.replace(noted, f"{self._run_id}\n".encode())

    def write(self, records: Sequence[Record]) -> None:
        metrics = []
        for record in records:
            milliseconds = int(1000 * record.get("time", time.time()))
            for name, value in _numbers(record):
                metrics.append(self._mlflow.entities.Metric(name, float(value), milliseconds, record["step"]))
        for part in _chunks(metrics, self._MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def write_media(self, record: Record) -> None:
        """MLflow has files only, and no histograms."""
        if record["kind"] == "image":
            self._client.log_artifact(self._run_id, str(self._folder.path / record["file"]), "image")
        elif record["kind"] == "text":
            name = self._folder.image(record["name"], record["step"]).stem
            self._client.log_text(self._run_id, record["text"], f"text/{name}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create(self, run: RunFolder, settings: Mapping[str, Any]) -> str:
        name = _project(settings)
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_id: str = self._client.create_run(identity, run_name=run.path.name).info.run_id
        parameters = [self._mlflow.entities.Param(key, str(value)) for key, value in flatten(settings).items()]
        for part in _chunks(parameters, self._MAX_PARAMETERS):
            self._client.log_batch(run_id, params=part)
        return run_id


def _module(name: str, logger: str) -> Any:
    """Import an optional dependency of a logger."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrainError(
            "logger-not-installed",
            f"The logger {logger!r} requires the package {name!r}.",
            why=f"the import failed: {error}",
            fix=f"pip install 'paceline[{LOGGERS.facts(logger).extra}]'",
        ) from None


def _project(settings: Mapping[str, Any]) -> str:
    """The name of the run; unnamed runs share a project."""
    run = settings.get("run")
    return Path(run).name if isinstance(run, str) else "paceline"


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record, with the prefix that these tools group by."""
    prefix = "eval/" if record.get("evaluation") else "train/"
    for name, value in record.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "time"):
            yield prefix + name, value


def _edges(histogram: Record) -> list[float]:
    return [histogram["low"] + number * histogram["width"] for number in range(len(histogram["counts"]) + 1)]


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def convert(run: RunFolder, to: Literal["tensorboard", "csv"], output: Path | None) -> Path:
    """Write the metrics of a run to a folder, by default that of the run. Returns what was written."""
    if not run.metrics.is_file():
        raise CheckpointError("no-metrics", f"The run {run} has no {run.metrics.name}.")
    target = run if output is None else RunFolder(output)
    written = target.csv if to == "csv" else target.tensorboard
    if written.exists():
        raise CheckpointError(
            "exists",
            f"{written} exists already.",
            why="the run may have written it, with `loggers`",
            fix="remove it, or pass another folder with -o",
        )
    target.path.mkdir(parents=True, exist_ok=True)
    logger = open_logger(to, target, {})
    records = jsonl.read(run.metrics)
    while some := list(islice(records, _RECORDS)):
        logger.write([record for record in some if isinstance(record.get("step"), int)])
    logger.close()
    return written
