"""The Trainer of Hugging Face: torchrun --nproc-per-node 2 examples/migrate/before_hf_trainer.py"""

import torch
from task import EPOCHS, TRAIN, VAL, Classifier
from transformers import Trainer, TrainingArguments


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir="hf-trainer",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=12,
        weight_decay=0.01,
        bf16=True,
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=TRAIN, eval_dataset=VAL, compute_metrics=accuracy)
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {result['eval_accuracy']:.3f} on {arguments.world_size} ranks")


if __name__ == "__main__":
    main()
