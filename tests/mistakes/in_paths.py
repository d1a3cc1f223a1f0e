"""Paths, checkpoints, installed packages and the environment."""

from __future__ import annotations

from mistakes.mistake import PYTHON, Mistake, built, script, trainer

_PLAIN = "model, sgd, criterion=criterion, batch=16"

ALL = (
    Mistake("script-path", {}, ("launch.no-script", "trian.py"), "paceline launch -n 2 trian.py"),
    Mistake("script-folder", {}, ("launch.no-script",), "paceline launch -n 2 ."),
    Mistake("script-syntax", {"train.py": "import torch\nfor epoch in range(3)  # <-\n    pass\n"}, ("SyntaxError",)),
    Mistake(
        "missing-module",
        {"train.py": "import torch\nimport torhc  # <-\n"},
        ("ModuleNotFoundError", "torhc", "at: train.py:2"),
    ),
    Mistake("recipe-path", {}, ("config.missing-file", "recipies/gpt.yaml"), "paceline train recipies/gpt.yaml"),
    Mistake("recipe-is-a-script", script("pass"), ("train.py", "paceline launch"), "paceline train train.py"),
    Mistake("script-is-a-recipe", {"r.yaml": "batch: 8\n"}, ("r.yaml", "paceline train"), "paceline launch r.yaml"),
    Mistake(
        "checkpoint-path",
        trainer(_PLAIN, 'trainer.load_checkpoint("runs/nothing/step-000100")  # <-'),
        ("checkpoint.", "runs/nothing/step-000100"),
    ),
    Mistake(
        "checkpoint-file",
        {**trainer(_PLAIN, 'trainer.load_checkpoint("weights.pt")  # <-'), "weights.pt": "hello"},
        ("checkpoint.", "weights.pt", "not a pickle"),
    ),
    Mistake(
        "checkpoint-of-another-model",
        trainer(
            f'{_PLAIN}, run="first"',
            "trainer.train(data, epochs=1)\n"
            "bigger = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))\n"
            'other = paceline.Trainer(bigger, sgd, criterion=criterion, batch=16, resume="runs/first")  # <-',
        ),
        ("checkpoint.", "0.weight"),
    ),
    Mistake("resume-without-a-run", built(f'{_PLAIN}, resume="runs/nothing"'), ("checkpoint.", "runs/nothing")),
    Mistake(
        "data-file",
        script(
            "class Images(Dataset):\n"
            "    def __len__(self):\n        return 64\n\n"
            "    def __getitem__(self, index):\n"
            '        return torch.load(f"images/{index}.pt"), 0  # <-\n\n'
            "trainer = paceline.Trainer(model, sgd, criterion=criterion, batch=16, workers=1)\n"
            "trainer.train(Images(), epochs=1)"
        ),
        ("FileNotFoundError", "images/"),
    ),
    Mistake(
        "run-in-use",
        script(
            "class Again:\n    def on_save(self, saved):\n"
            f'        paceline.Trainer({_PLAIN}, resume="runs/same").train(data, epochs=2)  # <-\n\n'
            f'trainer = paceline.Trainer({_PLAIN}, run="same", save_every=1, callbacks=[Again()])\n'
            "trainer.train(data, epochs=2)"
        ),
        ("checkpoint.", "runs/same"),
        PYTHON,
    ),
    Mistake(
        "logger-not-installed",
        script(
            'import sys\nsys.modules["mlflow"] = None  # not installed\n'
            f'trainer = paceline.Trainer({_PLAIN}, run="x", loggers=["mlflow"])\n'
            "trainer.train(data, epochs=1)  # <-"
        ),
        ("mlflow", "pip install"),
    ),
    Mistake("logger-typo", built(f'{_PLAIN}, loggers=["tensorbord"]'), ("fix: did you mean 'tensorboard'?",)),
    Mistake("gpu-on-a-cpu-machine", built(f'{_PLAIN}, device="cuda"'), ("world.no-such-gpu", "cuda")),
    Mistake("cuda-by-hand", script('model = model.to("cuda")  # <-'), ("remove .cuda()", "CPU build")),
    Mistake(
        "nccl-on-a-cpu-machine",
        built(f'{_PLAIN}, backend="nccl"'),
        ("[world.no-backend]", "gloo", "at: train.py:"),
        unwanted=("Traceback",),
    ),
    Mistake("bf16-word", built(f'{_PLAIN}, precision="16-mixed"'), ("bad-value", "fix: did you mean 'fp16'?")),
    Mistake("port-in-use", script("pass"), ("launch.port-in-use",), "paceline launch -n 2 --port {port} train.py"),
    Mistake(
        "world-size-exported",
        trainer(_PLAIN, "trainer.train(data, epochs=1)"),
        ("WORLD_SIZE is ignored",),
        PYTHON,
        env={"WORLD_SIZE": "4"},
        succeeds=True,
    ),
    Mistake(
        "rank-without-master",
        built(_PLAIN),
        ("MASTER_ADDR", "world."),
        PYTHON,
        env={"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
    ),
    Mistake("negative-ranks", script("pass"), ("launch.",), "paceline launch -n -2 train.py"),
    Mistake(
        "gpus-asked-for", script("pass"), ("-n expects a number", "fix: omit it"), "paceline launch -n all train.py"
    ),
    Mistake(
        "export-before-training", {}, ("checkpoint.",), "paceline checkpoint export runs/none --to safetensors -o out"
    ),
    Mistake("explain-typo", {}, ("config.unknown-key",), "paceline explain config.unknown-keys"),
)
