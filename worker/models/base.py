"""The interface of models to the worker and the loader."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.layers.module import Module
from worker.layers.ops import Ops
from worker.ranks.group import ALONE, Group


class Model(Module, ABC):
    """A decoder: embedding, layers, head. N tokens (padded), T of them real."""

    # How checkpoints call the parts that hold parameters: ours → theirs, with {} for each number. Of maps that one
    # product merges, a checkpoint names each ("….qkv.q") or all in one ("….qkv").
    hugging_face_names: ClassVar[dict[str, str]]
    hugging_face_roots: ClassVar[tuple[tuple[str, str], ...]] = ()  # (start of their names, what some files have there)
    hugging_face_ignored: ClassVar[tuple[str, ...]] = ()  # starts of names of what we do not run
    gguf_names: ClassVar[dict[str, str]] = {}  # {} = GGUF files are not supported

    @abstractmethod
    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        """Allocate the weights: fill `parameters()`, then call `pack()`. Raises ValueError for the config.

        `config` is of the whole model, of which this rank of `group` holds its share. `max_position` is the length
        of the longest sequence that is wanted, `--max-model-len` or else the model's own.
        """

    @abstractmethod
    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """ids [N], positions [T ≤ N] int32 → hidden states [N, hidden] before the last norm."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] → [N, vocab] float32."""


class Block(Module, ABC):
    """A transformer block of a decoder with rotary positions, as `Llama` calls it."""

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take x + delta (None = 0), and return the output as two summands: the next block's norm adds them up."""
