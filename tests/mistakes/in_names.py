"""Typos, and names from other frameworks."""

from __future__ import annotations

from mistakes.mistake import PYTHON, Mistake, built, script, trainer

_RECIPE = """\
model: {name: gpt, layers: 1, width: 16, heads: 2}
data: {name: stdlib-text}
optimizer: {name: adamw, lr: 0.001}
batch: 8
train: {max_steps: 2}
"""
_TRAIN = "paceline train -n 2 recipe.yaml"


def recipe(old: str, new: str) -> dict[str, str]:
    assert old in _RECIPE
    return {"recipe.yaml": _RECIPE.replace(old, new)}


ALL = (
    Mistake(
        "setting-typo", built("model, sgd, criterion=criterion, bach=8"), ("unknown-key", "fix: did you mean 'batch'?")
    ),
    Mistake(
        "setting-typo-alone",
        built("model, sgd, criterion=criterion, log_evry=1"),
        ("unknown-key", "fix: did you mean 'log_every'?"),
        PYTHON,
    ),
    Mistake(
        "setting-value",
        built('model, sgd, criterion=criterion, precision="float16"'),
        ("config.bad-value", "fix: did you mean 'fp16'?"),
    ),
    Mistake(
        "strategy-typo",
        built('model, sgd, criterion=criterion, strategy="dpp"'),
        ("bad-value", "fix: did you mean 'ddp'"),
    ),
    Mistake(
        "optimizer-name",
        built('model, {"name": "adamm", "lr": 1e-3}, criterion=criterion'),
        ("config.bad-value", "fix: did you mean 'adam' or 'adamw'?"),
    ),
    Mistake(
        "optimizer-key",
        built('model, {"name": "adamw", "learning_rate": 1e-3}, criterion=criterion'),
        ("unknown-key", "fix: the learning rate belongs to the optimizer, `optimizer.lr`"),
    ),
    Mistake(
        "optimizer-class",
        built("model, torch.optim.SGD, criterion=criterion"),
        ("optimizer", "torch.optim.SGD(model.parameters()"),
    ),
    Mistake(
        "optimizer-string", built('model, "admw", criterion=criterion'), ("bad-value", "fix: did you mean 'adam' or")
    ),
    Mistake(
        "model-class",
        script("class Net(nn.Module):\n    pass\n\ntrainer = paceline.Trainer(Net, sgd, criterion=criterion)  # <-"),
        ("model.not-a-module", "Net("),
    ),
    Mistake("criterion-class", built("model, sgd, criterion=nn.CrossEntropyLoss"), ("CrossEntropyLoss()",)),
    Mistake(
        "callback-hook",
        script(
            "class Stop:\n    def on_batch_end(self, record):\n        pass\n\n"
            "trainer = paceline.Trainer(model, sgd, criterion=criterion, callbacks=[Stop()])  # <-"
        ),
        ("on_batch_end", "on_step"),
    ),
    Mistake(
        "train-keyword",
        trainer("model, sgd, criterion=criterion", "trainer.train(data, max_epochs=3)  # <-"),
        ("config.unknown-key", "fix: use epochs=3"),
    ),
    Mistake(
        "lightning-fit", trainer("model, sgd, criterion=criterion", "trainer.fit(data)  # <-"), ("fit", "trainer.train")
    ),
    Mistake(
        "huggingface-arguments",
        built("model, sgd, criterion=criterion, per_device_train_batch_size=8, gradient_accumulation_steps=4"),
        ("unknown-key", "fix: per_device_train_batch_size: use `batch_per_rank`", "`accumulate`", "splits"),
    ),
    Mistake(
        "lr-of-the-trainer",
        built("model, criterion=criterion, lr=0.1, epochs=3"),
        ("unknown-key", "fix: lr: the learning rate belongs to the optimizer", "trainer.train("),
    ),
    Mistake(
        "amp",
        built("model, sgd, criterion=criterion, use_amp=True"),
        ("unknown-key", 'fix: use `precision`: precision="bf16"'),
    ),
    Mistake("recipe-key", recipe("batch: 8", "bacth: 8  # <-"), ("unknown-key", "fix: did you mean 'batch'?"), _TRAIN),
    Mistake(
        "recipe-section",
        recipe("max_steps: 2}", "epoch: 2}  # <-"),
        ("unknown-key", "'train.epoch' (recipe.yaml:5)", "fix: did you mean 'epochs'?"),
        _TRAIN,
    ),
    Mistake(
        "recipe-value",
        recipe("lr: 0.001}", "lr: fast}  # <-"),
        ("bad-value", "'optimizer.lr' is 'fast' (recipe.yaml:3)", "fix: set optimizer.lr to a number"),
        _TRAIN,
    ),
    Mistake("recipe-model", recipe("name: gpt,", "name: gtp,"), ("model.unknown-name", "'gpt'"), _TRAIN),
    Mistake("recipe-model-option", recipe("layers: 1", "layer: 1"), ("model.unknown-option", "'layers'"), _TRAIN),
    Mistake("recipe-data", recipe("stdlib-text", "stdlib"), ("data.unknown-name", "'stdlib-text'"), _TRAIN),
    Mistake("recipe-indentation", recipe("batch: 8", "  batch: 8  # <-"), ("malformed", "line 4 is indented"), _TRAIN),
    Mistake("recipe-of-others", recipe("batch: 8", "gradient_clip_val: 1.0  # <-"), ("fix: use `clip_norm`",), _TRAIN),
    Mistake(
        "recipe-override", recipe("", ""), ("unknown-key", "fix: use one of betas, lr"), f"{_TRAIN} optimizer.rate=1"
    ),
    Mistake("command-typo", {}, ("trian", "train"), "paceline trian recipe.yaml"),
    Mistake("option-typo", script(""), ("--ranks",), "paceline launch --rnks 2 train.py"),
    Mistake("deepspeed-option", script(""), ("--num_gpus", "--ranks"), "paceline launch --num_gpus 2 train.py"),
    Mistake(
        "torchrun-option",
        script(""),
        ("--master_addr", "--master"),
        "paceline launch --master_addr a --master_port 1234 train.py",
    ),
    Mistake(
        "option-after-script",
        script("print('fine')"),
        ("-n is passed to train.py", "before"),
        "paceline launch train.py -n 2",
        succeeds=True,
    ),
)
