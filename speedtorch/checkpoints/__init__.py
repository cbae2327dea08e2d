"""Checkpoints: all of a training run in generations of a folder, saved and loaded."""
