# Learn to play a published table at a small size, and to read it beside the paper's numbers.
# %% [markdown]
# # A paper's table, small
# `halfmoon recipes` lists 30 tables and figures. `feddure-table1` is Table 1 of FedDure; on the embedded digits, at the
# scale `tiny`, a cell takes seconds. A scaled table is not the paper's experiment, and says so wherever it is shown.
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
# A call again reads the finished cells, so a table can grow: more seeds, more methods. The cells are a data frame.
# %%
table.summary
# %%
frame = table.to_frame()
ends = frame[frame["metric"] == "accuracy"].groupby(["axis:setting", "axis:method"])["value"].last().unstack()
axes = ends.plot.bar(rot=0, ylabel="test accuracy (%)", figsize=(6, 3.4))
# %% [markdown]
# The page of the same sweep, with charts, CSV and LaTeX beside it:
# %%
from pathlib import Path

from halfmoon.report.writer import write_report

files, missing = write_report([table.folder], Path("table.html"))
[file.name for file in files]
