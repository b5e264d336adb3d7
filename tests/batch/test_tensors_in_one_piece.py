"""Tensors of an engine that kernels read as one piece have to be one."""

from __future__ import annotations

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "slot_mapping"])
def test_a_column_of_a_wider_tensor_is_refused(name: str) -> None:
    lens, starts = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    given = {"query_start_loc": starts, "seq_lens": lens, "slot_mapping": torch.tensor([2, 19])}
    given[name] = given[name][:, None].repeat(1, 2)[:, 0]
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"pass {name}\.contiguous\(\)"):
        CommonAttentionMetadata.from_tensors(
            16, query_start_loc_cpu=starts, seq_lens_cpu=lens, page_table=table, **given
        )
