"""The page table that persists from step to step, on the host and on the device."""
