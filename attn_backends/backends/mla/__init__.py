"""Multi-head latent attention: what the backends of the family share, and the backends.

backend.py    the latent cache's shape
options.py    options that all of them have
metadata.py   a batch as decode rows, attended on the latent cache, and prefill rows, attended on expanded keys
state.py      the context workspace, plans, graph buffers
impl.py       one layer: write, absorb, decode, expand, prefill in bounded chunks, merge
prefill.py    attention of a batch's prompts by one launch of ours, where a GPU has it
attend.py     attention with its LSE in plain torch, a row at a time

torch_mla/       TORCH_MLA, on any device
flashmla/        FLASHMLA: library.py has its kernels, who brings them, and the two generations of their schedules
flashinfer_mla/  FLASHINFER_MLA: plan.py has one wrapper of FlashInfer and its plans
triton_mla/      TRITON_MLA: decode_kernel.py decodes, and decode_hopper_kernel.py many heads on Hopper; launch.py calls
                 them, tuning.py says in which tiles
flash_attn_mla/  FLASH_ATTN_MLA, over the builds of library.py

A backend names its own Impl and State over these. It must have `MLAImpl._decode`; it may have `MLAImpl._prefill`,
`MLAState.plan_decode` and `plan_prefill`, and what its `reject` adds.
"""
