"""Checkpoints: saves and loads a training run as numbered checkpoints (generations) of a folder."""
