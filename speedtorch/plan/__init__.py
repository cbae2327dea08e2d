"""Plans of batches: distinct rows, their places in a step, and what changes between steps."""
