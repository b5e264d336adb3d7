"""FLASHINFER: paged attention by FlashInfer's wrappers (package `flashinfer-python`), planned on the host.

backend.py    what the backend can do, and its five classes
options.py    the backend's options
metadata.py   a batch as rows for FlashInfer's kernels, on the device and, for the plans, on the host; what graphs read
state.py      workspaces, plans, graph buffers
impl.py       one layer: write the new keys, run what was planned
plans.py      one wrapper of FlashInfer and its plans
graph_schedule.py  the schedule of graphs whose rows are short, in place of FlashInfer's
kernel_choice.py   which kernels serve a layer, and what options rule out
library.py    FlashInfer itself: which version, and where versions differ
workspace.py  how large the workspaces must be
"""
