# Learn to run a published table at a small scale, and to compare it with the paper's numbers.
# %% [markdown]
# # A paper's table at a small scale
# `halfmoon recipes` lists 44 tables and figures. `feddure-table1` is Table 1 of FedDure. On the included digits, a cell
# at the scale `tiny` takes seconds. A scaled table is not the paper's experiment, and every output states this.
# %%
import halfmoon

table = halfmoon.sweep(
    "feddure-table1",
    scale="tiny",
    only={"dataset": "digits", "setting": ["iid-iid", "dir-dir"], "method": ["fedavg", "fedavg-fixmatch"]},
    seeds=1,
    threads=1,
)
table
# %% [markdown]
# Another call reads the finished cells, so you can add seeds and methods later. `to_frame` returns the cells as a data
# frame.
# %%
table.summary
# %%
frame = table.to_frame()
ends = frame[frame["metric"] == "accuracy"].groupby(["axis:setting", "axis:method"])["value"].last().unstack()
axes = ends.plot.bar(rot=0, ylabel="test accuracy (%)", figsize=(6, 3.4))
# %% [markdown]
# Write the report page of this sweep, and next to it charts, CSV and LaTeX:
# %%
from pathlib import Path

from halfmoon.report.writer import write_report

files, missing = write_report([table.folder], Path("table.html"))
[file.name for file in files]
