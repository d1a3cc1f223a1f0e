"""How many places a change of the library takes: each is made in a scratch copy, and what it added is used there."""

from __future__ import annotations

from pathlib import Path

import pytest

import edits
from edits import Change, Edit

TRAIN = """
from pathlib import Path
import torch
from torch import nn

def train(optimizer={"name": "sgd", "lr": 0.1}, **settings):
    torch.manual_seed(0)
    inputs, weights = torch.randn(64, 4), torch.randn(4, 1)
    trainer = paceline.Trainer(
        nn.Linear(4, 1), optimizer, criterion=nn.MSELoss(), batch=16, log_every=1, quiet=True, device="cpu", **settings
    )
    return trainer.train(torch.utils.data.TensorDataset(inputs, inputs @ weights), epochs=3)
"""

CLI = """
import contextlib, sys
from paceline.__main__ import main

def cli(*args):
    sys.argv, code = ["paceline", *args], 0
    # Not into a StringIO: torch wants the descriptor of stderr where it starts a rank.
    with open("output", "w+") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        output.seek(0)
        return code, output.read()
"""

OPTIMIZER = Change(
    "optimizer",
    (
        Edit(
            "config/components.py",
            """
            OPTIMIZERS.declare("signsgd", OptimizerFacts(("SignSGD",), state_per_param=0, elementwise=True))
            """,
        ),
        Edit(
            "optim/optimizers.py",
            """
            @OPTIMIZERS.implement("signsgd")
            class SignSGD(torch.optim.Optimizer):
                def __init__(self, params: OptimizerParams, settings: Settings, lr: float) -> None:
                    super().__init__(params.groups, {"lr": lr})

                @torch.no_grad()
                def step(self, closure: Any = None) -> None:
                    for group in self.param_groups:
                        for parameter in group["params"]:
                            parameter.sub_(group["lr"] * parameter.grad.sign())
            """,
        ),
    ),
    TRAIN
    + """
losses = train({"name": "signsgd", "lr": 0.05}, run=False).losses
assert losses[-1] < losses[0], losses
assert "signsgd" in paceline.Config.json_schema()["$defs"]["Optimizer"]["properties"]["name"]["enum"]
""",
)

LOGGER = Change(
    "logger",
    (
        Edit("config/components.py", 'LOGGERS.declare("lines", LoggerFacts())'),
        Edit(
            "monitor/loggers.py",
            """
            @LOGGERS.implement("lines")
            class Lines:
                def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
                    self._file = open_to_append(run.path / "lines.txt")

                def write(self, records: Sequence[Record]) -> None:
                    self._file.writelines(f"{record['step']} {record['loss']}\\n" for record in records)

                def close(self) -> None:
                    self._file.close()
            """,
        ),
    ),
    TRAIN
    + """
history = train(run="here", loggers=["lines"])
lines = Path(history.run, "lines.txt").read_text().splitlines()
assert len(lines) == len(history.losses) == 12, lines
""",
)

METRIC = Change(
    "metric",
    (
        Edit("config/components.py", 'METRICS.declare("bias", MetricFacts(_VALUES))'),
        Edit(
            "models/metrics.py",
            """
            METRICS.implement("bias")(NamedMetric("bias", lambda outputs, targets, _: _mean_of(outputs - targets)))
            """,
        ),
    ),
    TRAIN
    + """
model = nn.Linear(1, 1)
nn.init.zeros_(model.weight)
nn.init.constant_(model.bias, 3.0)
trainer = paceline.Trainer(model, criterion=nn.MSELoss(), metrics=["bias"], run=False, quiet=True, batch=2)
values = trainer.evaluate(torch.utils.data.TensorDataset(torch.ones(5, 1), torch.ones(5, 1)))
assert values["bias"] == 2.0, values.values
""",
)

SCHEDULE = Change(
    "LR schedule",
    (
        Edit("config/components.py", 'SCHEDULES.declare("sqrt", ScheduleFacts(needs_horizon=True))'),
        Edit(
            "optim/schedules.py",
            """
            @SCHEDULES.implement("sqrt")
            def sqrt(schedule: Schedule, step: int) -> float:
                return schedule.above_floor(math.sqrt(1.0 - schedule.progress(step, schedule.warmup)))
            """,
        ),
    ),
    TRAIN
    + """
rates = [record["lr"] for record in train(schedule={"name": "sqrt", "warmup": 4}, run=False).steps]
assert rates[3] == rates[4] == 0.1 and abs(rates[10] - 0.1 * (1 - 6 / 8) ** 0.5) < 1e-9, rates
""",
)

CODE = Change(
    "error code",
    (
        Edit(
            "plan/batch.py",
            """
            if config.batch == 13:
                raise ConfigError("unlucky-batch", "The batch is 13.", fix="set batch to 12 or 14")
            """,
            into="derive_batch",
        ),
        Edit("diagnose/catalog.md", "## config.unlucky-batch\n\nThirteen samples do not make a batch."),
    ),
    CLI
    + f"""
import runpy

code, shown = cli("config", "show", "batch=13")
assert code == 2 and "[config.unlucky-batch]" in shown, shown
assert "Thirteen samples" in cli("explain", "config.unlucky-batch")[1]
structure = runpy.run_path({str(Path(__file__).with_name("test_structure.py"))!r})
structure["test_every_error_code_has_a_page_and_every_page_a_code"]()
""",
)

# A backend whose only node is forked from the front end: what it is given goes through a node order all the same.
FORKED = """
import os
import sys
from paceline.launcher.cluster import frontend

class ForkedNode:
    names = ("here",)

    def start(self, node, order):
        reader, self._order = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._order)
            os.dup2(reader, 0)
            status = 1
            try:
                from paceline.__main__ import main

                sys.argv = ["paceline", "node"]
                main()
            except SystemExit as ended:
                status = ended.code
            finally:
                os._exit(status)
        os.write(self._order, order)

    def ended(self):
        return {}

    def stop(self):
        os.close(self._order)
        os.waitpid(self._process, 0)

def launch(workload, spec, command):
    return frontend.launch_on(ForkedNode(), workload, spec, [spec.ranks], address="127.0.0.1").status
"""

OPTION = Change(
    "launch option",
    (
        Edit(
            "config/launch.py",
            'greeting: str | None = option(None, "--greeting", help="value of GREETING")',
            into="LaunchOptions",
        ),
        Edit("launcher/local/start.py", 'os.environ["GREETING"] = str(start.spec.greeting)', into="rank_environment"),
    ),
    CLI
    + FORKED
    + """
from pathlib import Path
from paceline.config.launch import LaunchSpec
from paceline.launcher.workload import Target, Workload

assert all("--greeting" in cli(verb, "--help")[1] for verb in ("launch", "train"))
config = paceline.Config.from_dict({"launch": {"greeting": "from the recipe"}})
Path("script.py").write_text("import os; open('greeting', 'w').write(os.environ['GREETING'])")
code, shown = cli("launch", "-n", "1", "--greeting", "from the command line", "script.py")
assert code == 0 and Path("greeting").read_text() == "from the command line", shown
target = Target("script", "script.py")
spec = LaunchSpec.resolve(config, {"ranks": 1})
assert launch(Workload(target.run, target=target), spec, []) == 0
assert Path("greeting").read_text() == "from the recipe"
""",
)

BACKEND = Change(
    "launch backend",
    (
        Edit(
            "config/launch.py",
            'forked: bool = option(False, "--forked", help="on a forked node", panel=REMOTE_NODES)',
            into="LaunchOptions",
        ),
        Edit("launcher/backends/forked.py", FORKED),
        Edit("launcher/dispatch.py", 'Backend("forked", "paceline.launcher.backends.forked:launch"),', into="BACKENDS"),
    ),
    CLI
    + """
from pathlib import Path

Path("script.py").write_text("import os; open('rank', 'w').write(os.environ['RANK'])")
code, shown = cli("launch", "--forked", "-n", "1", "script.py")
assert code == 0 and Path("rank").read_text() == "0", shown
code, shown = cli("launch", "--forked", "--ray", "auto", "script.py")
assert code == 2 and "--ray and --forked are mutually exclusive" in shown, shown
""",
)

PART = Change(
    "checkpointed part",
    (
        Edit(
            "train/checkpointing/entries.py",
            """
            StateEntry("seen", __import__("toy").SEEN, if_absent="keep"),
            """,
            into="training_state.entries",
        ),
    ),
    """
import sys, types
import torch

class Seen:
    def __init__(self):
        self.note, self.sum = "new", torch.zeros(2)

    def state_dict(self):
        return {"note": self.note, "sum": self.sum}

    def load_state_dict(self, state):
        self.note, self.sum = state["note"], state["sum"]

toy = sys.modules["toy"] = types.ModuleType("toy")
sys.modules.pop("format2", None)  # it may have imported paceline from elsewhere
import format2

def resume(strategy, checkpoint, expected, again=None):
    toy.SEEN = seen = Seen()
    trainer = format2.trainer(strategy, run=False, resume=str(checkpoint))
    assert trainer.step_count == format2.SAVED and [seen.note, *seen.sum.tolist()] == expected, vars(seen)
    seen.note, seen.sum = "saved", seen.sum + 7
    if again is not None:
        trainer.save_checkpoint(again)

resume("single", format2.CHECKPOINT, ["new", 0.0, 0.0], "one")  # from before there was such a part
paceline.launch(resume, ranks=2, strategy="fsdp", checkpoint="one", expected=["saved", 7.0, 7.0], again="two")
resume("single", "two", ["saved", 14.0, 14.0])
""",
)

MODEL = Change(
    "model",
    (
        Edit(
            "models/linear.py",
            """
            \"\"\"A linear model.\"\"\"

            from torch import nn

            from paceline.models.zoo import register_model


            @register_model("linear")
            class Line(nn.Linear):
                def __init__(self, inputs: int = 4) -> None:
                    super().__init__(inputs, 1)
            """,
        ),
        Edit("models/zoo.py", "from paceline.models import linear  # noqa: F401", into="_load_embedded"),
    ),
    """
import paceline

config = paceline.Config.from_dict({"model": {"name": "linear", "inputs": 3}, "run": False, "quiet": True})
assert paceline.Trainer.from_config(config).model.in_features == 3
""",
)

FEATURE = Change(
    "feature of training",
    (
        Edit(
            "config/recipe.py", 'shrink: float | None = Field(None, description="a factor of gradients")', into="Config"
        ),
        Edit(
            "plan/passes.py",
            '"shrink-and-graph": lambda config, degrees: config.shrink is not None and config.graph,',
            into="_REFUSED",
        ),
        Edit(
            "plan/passes.toml",
            """
            [refused.shrink-and-graph]
            settings = "shrink with graph"
            why = "steps are counted on the host"
            fix = "remove graph"
            """,
        ),
        Edit(
            "train/features/shrink.py",
            """
            from paceline.checkpoint.state import StateEntry
            from paceline.train.hooks import Hooks

            class Steps:
                number = 0

                def state_dict(self):
                    return self.number

                def load_state_dict(self, state):
                    self.number = state

            def build(context):
                if context.config.shrink is None:
                    return None
                steps = Steps()

                def shrink(gradients):
                    gradients.multiply(context.config.shrink ** (steps.number + 1))

                def count(step, stepped):
                    steps.number += 1

                state = [StateEntry("shrink", steps, if_absent="keep")]
                return Hooks(name="shrink", on_gradients=shrink, after_update=count, state=state)
            """,
        ),
        Edit(
            "train/features/table.py",
            '__import__("paceline.train.features.shrink", fromlist=["build"]).build,',
            into="FEATURES",
        ),
    ),
    TRAIN
    + CLI
    + """
from paceline.errors import PacelineError

assert "shrink" in cli("config", "show", "shrink=0.5")[1]
try:
    train(shrink=0.5, graph=True, run=False)
except PacelineError as error:
    assert error.code == "layout.shrink-and-graph", error
else:
    raise AssertionError("a graph counts no steps")
sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.0}
whole = train(sgd, shrink=0.5, run="whole").losses
assert whole != train(sgd, run=False).losses and whole[:1] == train(sgd, run=False).losses[:1]
train(sgd, shrink=0.5, run="parts", train={"pause_at": 5})
assert train(sgd, shrink=0.5, run="parts", resume="auto").losses == whole[5:]
""",
)

CHANGES = [
    (OPTIMIZER, 2),
    (MODEL, 2),
    (METRIC, 2),
    (LOGGER, 2),
    (SCHEDULE, 2),
    (CODE, 2),
    (OPTION, 2),
    (BACKEND, 3),
    (PART, 1),
    (FEATURE, 5),
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edits.copy_source(tmp_path_factory.mktemp("copy"))


@pytest.mark.parametrize(("change", "count"), CHANGES, ids=[change.name for change, _ in CHANGES])
def test_a_change_takes_few_edits(change: Change, count: int, scratch: Path, tmp_path: Path) -> None:
    assert len(change.edits) == count
    edits.try_out(change, scratch, tmp_path)


def test_a_change_that_lacks_an_edit_fails(scratch: Path, tmp_path: Path) -> None:
    half = Change("half", SCHEDULE.edits[:1], SCHEDULE.use)
    with pytest.raises(AssertionError, match="sqrt"):
        edits.try_out(half, scratch, tmp_path)
