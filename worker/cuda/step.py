"""The arithmetic of a step on the device: forward pass, then sampling. All of it is queued on the current stream.

`inputs` is device memory that one copy from the host fills each step. It begins with what sampling and decode read, at
offsets that depend on the number of rows B alone, so that graphs can read it:

    inputs[0:B]    slot of each sampled row, the padding slot behind them
    inputs[B:2B]   position of each sampled row's last token

In a step of decode rows only, those are all its rows. In others the forward pass reads what follows: `MixedInputs`.
"""

from dataclasses import dataclass

import torch

from worker.cuda.attention import CudaAttention
from worker.cuda.frames import Span
from worker.cuda.piecewise import PiecewiseGraphs
from worker.cuda.sampling import Mode, finite_rows, sample
from worker.cuda.state import SlotState
from worker.models.base import Model
from worker.ranks.group import Group
from worker.steps.batch import StepBatch


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """Spans of a step with chunks in `inputs`. T tokens, R rows, S of them sampled."""

    tokens: int  # N ≥ T: with padding, for piecewise graphs
    slots: Span  # [N] the slot of each token, the padding slot behind them
    positions: Span  # [N]
    ids: Span  # [N]; those of decode rows are unknown to the host
    row_slots: Span  # [R]
    row_starts: Span  # [R] position of each row's first token; empty where no group has a window
    kv_indptr: dict[int, Span]  # [R + 1], by cache group
    logit_tokens: Span  # [S] index along T


class GpuStep:
    """Model, attention, slots, and the buffers that steps share."""

    def __init__(
        self,
        model: Model,
        attention: CudaAttention,
        state: SlotState,
        group: Group,
        *,
        max_rows: int,
        vocab_size: int,
        words: int,
    ) -> None:
        """`words`: of metadata that a step brings, at most."""
        device = state.last_tokens.device
        self.model = model
        self.attention = attention
        self.state = state
        self._group = group
        self.inputs = torch.zeros(words, dtype=torch.int32, device=device)
        self.logits = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=device)
        self.finite = torch.zeros(max_rows, dtype=torch.bool, device=device)  # by row of logits, before any mask
        self.drawn = torch.zeros(max_rows, 2, dtype=torch.int32, device=device)  # id and RowStatus
        # By cache group: the version of the lists and the bucket whose page ids attention's `kv_indices` holds.
        self._indices_for: dict[int, tuple[int, int]] = dict.fromkeys(state.groups, (0, 0))

    def view(self, span: Span) -> torch.Tensor:
        """Return words of this step's inputs, int32."""
        return self.inputs[span[0] : span[1]]

    # ------------------------------------------------------------------ decode, in a graph or not

    def holds_indices(self, group: int, batch: StepBatch, bucket: int) -> bool:
        """Tell whether the page ids of a step of decode rows are in place already."""
        return self._indices_for[group] == (batch.of_group(group).list_version, bucket)

    def place_indices(
        self, group: int, batch: StepBatch, bucket: int, rows: tuple[Span, Span, Span], count: int
    ) -> None:
        """Build the `count` page ids of a step from its rows' slots, starts and indptr; `bucket` 0: not for a graph.

        From now on `holds_indices` is true of this step and bucket.
        """
        slots, starts, indptr = map(self.view, rows)
        ids = self.state.groups[group].page_ids(slots, starts, indptr, count)
        self.attention.groups[group].kv_indices[:count].copy_(ids)
        self._indices_for[group] = (batch.of_group(group).list_version, bucket)

    def _place_slots(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Set where each layer writes K and V of tokens at `positions` of `slots`."""
        for group, pages in self.state.groups.items():
            self.attention.groups[group].kv_slots[: len(slots)].copy_(pages.kv_slots(slots, positions))

    def decode(self, bucket: int) -> None:
        """Compute logits of `bucket` decode rows, after attention's `plan_graph`."""
        slots, positions = self.inputs[:bucket], self.inputs[bucket : 2 * bucket]
        self._place_slots(slots, positions)
        hidden = self.model.hidden(self.state.last_tokens[slots], positions, self.attention)
        self._take_logits(hidden)

    # ------------------------------------------------------------------ any step, never in a graph

    def mixed(self, batch: StepBatch, where: MixedInputs, pieces: PiecewiseGraphs | None) -> None:
        """Compute logits of the sampled rows of a step of any kind, by the graphs of `pieces` if given."""
        tokens, decodes = where.tokens, batch.decode_rows
        slots, positions, ids = self.view(where.slots), self.view(where.positions), self.view(where.ids)
        ids[:decodes].copy_(self.state.last_tokens[slots[:decodes]])
        self._place_slots(slots, positions)
        for group, indptr in where.kv_indptr.items():
            rows = where.row_slots, where.row_starts, indptr
            self.place_indices(group, batch, 0, rows, int(batch.of_group(group).kv_indptr[-1]))
        self.attention.plan_eager(batch)
        if pieces is None:
            hidden = self.model.hidden(ids, positions, self.attention)
        else:
            hidden = pieces.hidden(tokens, ids, positions, self.attention)
        if len(batch.logit_tokens):
            self._take_logits(hidden[self.view(where.logit_tokens)])

    def _take_logits(self, hidden: torch.Tensor) -> None:
        rows = hidden.shape[0]
        self.logits[:rows].copy_(self.model.logits(hidden))
        self.finite[:rows].copy_(finite_rows(self.logits[:rows]))

    # ------------------------------------------------------------------ sampling, in a graph or not

    def mask(self, rows: Span, ids: Span) -> None:
        """Forbid `ids` [n] to `rows` [n]."""
        at = self.view(rows).long(), self.view(ids).long()
        self.logits.index_put_(at, torch.full_like(self.logits[0, 0], float("-inf")))

    def sample(self, bucket: int, mode: Mode) -> None:
        """Draw one id for each of `bucket` rows; it becomes the newest token of its slot. All ranks take rank 0's."""
        slots, positions = self.inputs[:bucket], self.inputs[bucket : 2 * bucket]
        drawn = sample(self.logits[:bucket], self.finite[:bucket], slots, positions, self.state.sampling, mode)
        drawn = self._group.of_rank_0(drawn)
        self.drawn[:bucket].copy_(drawn)
        # Padding rows share their slot: any of their ids will do there.
        self.state.last_tokens.index_put_((slots.long(),), drawn[:, 0])
