"""Device memory of one cache group: K and V of its layers, and where a step's lie in it."""

import torch

from worker.layers.attention import AttentionShape


class GroupPages:
    """The last page, `dummy_page`, belongs to nobody: padding rows read and write it."""

    def __init__(
        self,
        shape: AttentionShape,
        layers: list[int],
        kv_dtype: torch.dtype,
        *,
        page_ids: int,
        max_tokens: int,
        max_rows: int,
        device: torch.device | str,
    ) -> None:
        """Of these layers, which have equally many pages. `page_ids`: listed by a step, at most."""
        self.layers = layers
        self.windows = tuple(dict.fromkeys(shape.window_of(layer) for layer in layers))
        self.dummy_page = shape.pages_of(layers[0])
        self.dummy_slot = self.dummy_page * shape.page_size
        pages = (len(layers), self.dummy_page + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # Zeros: kernels multiply what lies behind a row's end by 0, and 0 × NaN is NaN.
        self.keys = torch.zeros(pages, dtype=kv_dtype, device=device)
        self.values = torch.zeros(pages, dtype=kv_dtype, device=device)
        self.kv_indices = torch.full((page_ids,), self.dummy_page, dtype=torch.int32, device=device)
        self.kv_slots = torch.full((max_tokens,), self.dummy_slot, dtype=torch.int32, device=device)
        self.kv_indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)


def groups_of(shape: AttentionShape) -> dict[int, list[int]]:
    """Layers of each cache group that there is."""
    found: dict[int, list[int]] = {}
    for layer in range(shape.num_layers):
        found.setdefault(shape.group_of(shape.window_of(layer)), []).append(layer)
    return dict(sorted(found.items()))
