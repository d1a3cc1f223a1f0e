"""Ranks that do different things, and processes that are started twice."""

from __future__ import annotations

from mistakes.mistake import PYTHON, Mistake, script, trained, trainer

_PLAIN = "model, sgd, criterion=criterion, batch=16, timeout=5"
_RANK = "from paceline import dist\n"

ALL = (
    Mistake(
        "main-process-evaluates",
        trainer(_PLAIN, "trainer.train(data, epochs=1)\nif trainer.is_main_process:\n    trainer.evaluate(data)  # <-"),
        ("evaluate", "every rank", "is_main_process"),
    ),
    Mistake(
        "main-process-evaluates-in-a-callback",
        script(
            "class Check:\n    def on_epoch(self, record):\n        if trainer.is_main_process:\n"
            "            trainer.evaluate(data)  # <-\n\n"
            f"trainer = paceline.Trainer({_PLAIN}, callbacks=[Check()])\ntrainer.train(data, epochs=2)"
        ),
        ("evaluate", "every rank"),
    ),
    Mistake(
        "main-process-saves-shards",
        trainer(
            f'{_PLAIN}, strategy="fsdp"',
            'trainer.train(data, epochs=1)\nif trainer.is_main_process:\n    trainer.save_checkpoint("final")  # <-',
        ),
        ("save_checkpoint", "every rank"),
    ),
    Mistake(
        "main-process-trains",
        trainer(_PLAIN, "if trainer.is_main_process:\n    trainer.train(data, epochs=1)  # <-"),
        ("train", "rank 1"),
    ),
    Mistake(
        "main-process-barrier",
        trainer(
            _PLAIN, "if trainer.is_main_process:\n    paceline.dist.barrier()  # <-\ntrainer.train(data, epochs=1)"
        ),
        ("rank 0: dist.barrier() at train.py:15", "at: train.py:15", "call dist.barrier() and trainer.train() on"),
    ),
    Mistake(
        "rank-returns-early",
        script(
            f"{_RANK}import sys\n"
            f"trainer = paceline.Trainer({_PLAIN})\n"
            f"if dist.rank() == 1:\n"
            f"    sys.exit()  # <-\n"
            f"trainer.train(data, epochs=1)"
        ),
        ("rank 1: has ended at", "on every rank", "exit on some ranks"),
    ),
    Mistake(
        "other-model-on-a-rank",
        script(
            f"{_RANK}model = nn.Sequential(nn.Linear(8, 16 + dist.rank()), nn.ReLU(), nn.Linear(16 + dist.rank(), 3))\n"
            f"trainer = paceline.Trainer({_PLAIN})  # <-"
        ),
        ("0.weight", "rank 1"),
    ),
    Mistake(
        "other-model-on-a-rank-fsdp",
        script(
            f"{_RANK}model = nn.Sequential(nn.Linear(8, 16 + dist.rank()), nn.ReLU(), nn.Linear(16 + dist.rank(), 3))\n"
            f"trainer = paceline.Trainer({_PLAIN}, strategy='fsdp')  # <-"
        ),
        ("0.weight", "rank 1"),
    ),
    Mistake(
        "shorter-data-on-a-rank",
        script(
            f"{_RANK}size = 64 - 16 * dist.rank()\n"
            f"data = TensorDataset(torch.randn(size, 8), torch.randint(0, 3, (size,)))\n"
            f"trainer = paceline.Trainer({_PLAIN})\n"
            f"trainer.train(data, epochs=1)  # <-"
        ),
        ("data.", "rank 1", "48"),
    ),
    Mistake(
        "split-data-by-hand",
        script(
            f"{_RANK}part = list(range(dist.rank(), 64, dist.world()))\n"
            f"trainer = paceline.Trainer({_PLAIN})\n"
            f"trainer.train(torch.utils.data.Subset(data, part), epochs=1)  # <-"
        ),
        ("data.", "rank 1"),
    ),
    Mistake(
        "own-distributed-sampler",
        script(
            "trainer = paceline.Trainer(model, sgd, criterion=criterion)\n"
            "sampler = torch.utils.data.DistributedSampler(data)\n"
            "trainer.train(DataLoader(data, batch_size=16, sampler=sampler), epochs=1)"
        ),
        ("DistributedSampler", "2 ranks × 16 = 32", "not needed"),
        succeeds=True,
    ),
    Mistake(
        "wrapped-in-ddp",
        script(
            'torch.distributed.init_process_group("gloo")\n'
            "model = nn.parallel.DistributedDataParallel(model)\n"
            f"trainer = paceline.Trainer({_PLAIN})\ntrainer.train(data, epochs=1)"
        ),
        ("DistributedDataParallel",),
        succeeds=True,
    ),
    Mistake("data-parallel", trained("model = nn.DataParallel(model)", _PLAIN), ("DataParallel",), succeeds=True),
    Mistake(
        "init-process-group-alone", script('torch.distributed.init_process_group("gloo")  # <-'), ("RANK",), PYTHON
    ),
    Mistake(
        "launch-within-launch",
        script("def main():\n    pass\n\npaceline.launch(main, ranks=2)  # <-"),
        ("launch.inside-a-rank", "run the script with python"),
    ),
    Mistake(
        "launch-after-a-group",
        script(
            "def main():\n    pass\n\n"
            'torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)\n'
            "paceline.launch(main, ranks=2)  # <-"
        ),
        ("launch.group-already-open",),
        PYTHON,
    ),
    Mistake(
        "launch-calls",
        script("def main(rank):\n    pass\n\npaceline.launch(main(0), ranks=2)  # <-"),
        ("launch.not-a-function", "got None", "paceline.launch(main, ranks=2"),
        PYTHON,
    ),
    Mistake(
        "launch-arguments", script("def main(lr):\n    pass\n\npaceline.launch(main, ranks=2)  # <-"), ("lr",), PYTHON
    ),
    Mistake(
        "batch-smaller-than-ranks",
        trained("", "model, sgd, criterion=criterion, batch=1"),
        ("batch 1 < 2 data ranks",),
        succeeds=True,
    ),
    Mistake(
        "batch-indivisible",
        trained("", "model, sgd, criterion=criterion, batch=16, micro_batch=8, accumulate=4"),
        ("batch",),
    ),
    Mistake(
        "exception-on-a-rank",
        script(
            f"{_RANK}def main():\n"
            f"    trainer = paceline.Trainer({_PLAIN})\n"
            f"    if dist.rank() == 1:\n"
            f"        trainer.modle  # <-\n"
            f"    trainer.train(data, epochs=1)\n"
            f"\n"
            f"main()"
        ),
        ("AttributeError", "rank 1"),
    ),
    Mistake(
        "error-in-a-launched-function",
        script(
            f"def main():\n"
            f"    trainer = paceline.Trainer({_PLAIN})\n"
            f'    trainer.train("data.csv", epochs=1)  # <-\n'
            f"\n"
            f"paceline.launch(main, ranks=2)"
        ),
        ("data.", "str"),
        PYTHON,
    ),
    Mistake(
        "program-argument",
        script(
            "import argparse\n"
            "parser = argparse.ArgumentParser()\n"
            "parser.add_argument('--lr', type=float)\n"
            "parser.parse_args()  # <-"
        ),
        ("--learning-rate", "rank 0"),
        "paceline launch -n 2 train.py --learning-rate 1",
    ),
)
