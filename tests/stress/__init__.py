"""The stress test: random programs of every feature against a mirror of all rows in NumPy.

`python -m stress` runs them for hours, from a seed that it prints if a program fails. `modes.py`
names the kinds of programs, `mirror.py` has the expected rows, `progress.py` adds the hours up.
"""
