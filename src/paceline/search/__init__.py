"""Hyperparameter search: many runs over the GPUs one has, on Optuna."""
