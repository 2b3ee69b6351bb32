"""What the worker and the loader ask of a model."""

from typing import ClassVar, Protocol

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend
from worker.layers.gemm_shape import GemmShape
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.ranks.group import ALONE, Group


class Model(Protocol):
    """A decoder: embedding, layers, head. N tokens (padded), T of them real."""

    # How checkpoints call the parameters: ours → theirs, with {} for each number. () and {} = none.
    hugging_face_names: ClassVar[dict[str, str]]
    hugging_face_roots: ClassVar[tuple[tuple[str, str], ...]]  # (start of their names, what some files have there)
    hugging_face_ignored: ClassVar[tuple[str, ...]]  # starts of names of what we do not run
    gguf_names: ClassVar[dict[str, str]]

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        """Weights are allocated, not set: fill `parameters()`, then call `pack()`. Raises ValueError for the config.

        `config` is of the whole model, of which this rank of `group` holds its share.
        """

    def parameters(self) -> list[Parameter]:
        """Every tensor that a checkpoint must fill; a tied head has none of its own."""

    def pack(self) -> None:
        """Once every parameter is filled: lay weights out as the device wants them."""

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """ids [N], positions [T ≤ N] int32 → hidden states [N, hidden] before the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] → [N, vocab] float32."""

    @staticmethod
    def gemm_shapes(config: ModelConfig, dtype: torch.dtype, tokens: int, sampled: int) -> list[GemmShape]:
        """Every matrix product of the model, in steps of up to `tokens` tokens and `sampled` rows of logits.

        Of one rank's share, with a config of that size (`Group.shape`).
        """
