"""A byte-level GPT on your own text file, or on the source code of the Python standard library.

python examples/gpt.py
paceline launch -n 2 examples/gpt.py --strategy fsdp --text book.txt --steps 2000
paceline launch -n 4 examples/gpt.py --strategy pp                    # or tp, hsdp, auto

The strategy does not change the result. The command line does all of this without a script: `paceline train`.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset

import paceline


class Windows(Dataset):
    """Consecutive windows of a text as `context` bytes each, with the bytes that follow as targets."""

    draws_randomness = False  # nothing random happens in __getitem__, so no generator has to be seeded for a sample

    def __init__(self, text, context):
        self.text, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def load_data(path, context, size):
    if path is None:
        return paceline.get_data("stdlib-text", context=context, size=size)
    text = path.read_bytes()[:size]
    cut = int(0.95 * len(text))
    return Windows(text[:cut], context), Windows(text[cut:], context)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="a text file; default: the Python standard library")
    parser.add_argument("--strategy", default="auto", help="ddp, fsdp, hsdp, tp, pp or auto")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32, help="samples per step, over all ranks")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes of text to use")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    args = parser.parse_args()

    train_data, val_data = load_data(args.text, args.context, args.size)
    with torch.device("meta"):  # each rank allocates its own part of the weights only
        model = paceline.get_model("gpt")(width=args.width, layers=args.layers, context=args.context)
    trainer = paceline.Trainer(
        model,
        {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        schedule={"name": "cosine", "warmup": 0.05, "floor": 0.1},
        strategy=args.strategy,
        precision=args.precision,
        batch=args.batch,
        clip_norm=1.0,
        eval_every=max(args.steps // 4, 1),
    )
    history = trainer.train(train_data, val_data, max_steps=args.steps)

    weights = trainer.state_dict()  # of the whole model, on rank 0, whatever the layout; called on every rank
    if trainer.is_main_process:
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}; run folder {history.run}")
        alone = paceline.get_model("gpt")(width=args.width, layers=args.layers, context=args.context)
        alone.load_state_dict(weights)
        prompt = torch.tensor([list(b"\n    def ")])
        print(bytes(alone.generate(prompt, length=60)[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
