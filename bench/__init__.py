"""Benchmarks: `python -m bench` (quick), `python -m bench --full` (the whole grid).

cases.py      what is measured: problems as data
targets.py    the claims the project holds itself to, each a ratio of rows of the full grid
problems.py   inputs of a case and the fp64 oracle on a sample of its queries
providers.py  who computes it: one table of functions
measure.py    one function that times, checks and weighs all providers of a case
child.py      a fresh process for every measurement
results.py    rows, CSV, resuming
report.py     rows -> text; plot.py: rows -> figures and README tables
micro/        kernel microbenchmarks (pytest-benchmark)
"""
