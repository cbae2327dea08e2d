"""Batch plans: unique rows, their positions in a step, and the changes between two steps."""
