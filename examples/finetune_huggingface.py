"""Fine-tune a causal language model of Hugging Face transformers: metrics, `save_pretrained` and `generate`.

python examples/finetune_huggingface.py
paceline launch -n 2 examples/finetune_huggingface.py --model gpt2 --text book.txt --strategy fsdp

`--model` is a folder or a name that `from_pretrained` accepts. Without it, a tiny Llama with random weights is trained
on bytes, so that the example needs no download.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import paceline

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Bytes:
    """What this example needs of a tokenizer."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(int(token) for token in tokens).decode(errors="replace")


class Windows(torch.utils.data.Dataset):
    """Samples as the model's `forward` takes them, by name. It shifts the labels itself; -100 would be ignored."""

    def __init__(self, tokens, context):
        count = len(tokens) // context
        self.rows = torch.tensor(tokens[: count * context]).view(count, context)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def next_token_accuracy(logits, labels):
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & (labels[:, 1:] != -100)
    return paceline.Loss(sum=hits.sum().float(), weight=(labels[:, 1:] != -100).sum())  # Σ sum / Σ weight over ranks


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder or name for from_pretrained; default: a tiny Llama")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file; default: this script")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", default="finetuned")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model)
    else:
        tokenizer, model = Bytes(), LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, **TINY))
    tokens = tokenizer.encode(args.text.read_text())
    cut = int(0.9 * len(tokens))
    train_data, val_data = Windows(tokens[:cut], args.context), Windows(tokens[cut:], args.context)

    trainer = paceline.Trainer(
        model,  # returns an object with `loss` and `logits`; the loss is averaged over the labels of all ranks
        {"name": "adamw", "lr": 5e-5 if args.model else 3e-3, "weight_decay": 0.01},
        schedule={"name": "linear", "warmup": 0.1},
        metrics={"accuracy": next_token_accuracy},
        strategy=args.strategy,
        batch=8,
        clip_norm=1.0,
    )
    history = trainer.train(train_data, val_data, epochs=args.epochs)

    weights = trainer.state_dict()  # on every rank, because parameters may be sharded; rank 0 receives all of them
    if trainer.is_main_process:
        last = history.evaluations[-1]
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}")
        print(f"evaluation: accuracy {last['accuracy']:.3f}, perplexity {math.exp(last['loss']):.1f}")
        trainer.model.save_pretrained(args.save, state_dict=weights)
        saved = AutoModelForCausalLM.from_pretrained(args.save).eval()  # generate on one rank, with the whole model
        prompt = torch.tensor([tokenizer.encode("import ")])
        print(repr(tokenizer.decode(saved.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0])))


if __name__ == "__main__":
    main()
