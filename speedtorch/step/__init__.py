"""A step: which rows are held, how others take their place, how lookups reach them."""
