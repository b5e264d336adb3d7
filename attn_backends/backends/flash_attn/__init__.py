"""FLASH_ATTN: FlashAttention 2, 3 and 4 by whichever library brings them. No host plan: lengths stay on the device.

backend.py    what the backend can do, and its five classes
options.py    the backend's options
metadata.py   a batch as rows, whose lengths and pages the kernels read on the device
state.py      all providers, best first, and which serves which layers; schedules; graph buffers
impl.py       one layer: write the new keys, attend, join what was attended in parts
call.py       what every provider is called with
provider.py   what a provider is, and how one is chosen
built.py      which kernels a compiled library holds
fa2.py        FlashAttention 2: `flash_attn`, or as vLLM builds it
fa3.py        FlashAttention 3: `flash_attn_interface`, or as vLLM builds it
fa4.py        FlashAttention 4, on Hopper: `flash-attn-4`
"""
