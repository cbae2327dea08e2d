"""Loads the rows of each step, tracks them during the step, and writes them back."""
