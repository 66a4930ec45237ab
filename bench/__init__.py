"""Benchmarks: `python -m bench` (quick), `python -m bench --full` (the whole grid).

cases.py          the problems that are measured, as data
targets.py        the performance claims of the project, as ratios of rows of the full grid
problems.py       the inputs of a case, and the fp64 oracle on a sample of its queries
accuracy.py       the accuracy check that a result must pass to get a speed-up
providers.py      the implementations that are compared, in one table
measure.py        time, accuracy and memory of all providers of a case
cores.py          waiting until the cores share a cache
child.py          a fresh process for every measurement
environment.py    machine, commit and versions, stored in every row
results.py        rows, CSV, resuming
extrapolation.py  estimates for rows that were too slow to run
report.py         rows -> text
plot.py           rows -> figures and Markdown tables
compare.py        whether two runs agree
scaleout.py       context parallelism and streaming
micro/            kernel microbenchmarks (pytest-benchmark)
"""
