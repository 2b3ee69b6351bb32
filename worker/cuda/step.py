"""The arithmetic of a step on the device: forward pass, then sampling. All of it is queued on the current stream.

`inputs` is device memory that one copy from the host fills each step. It begins with what sampling and decode read, at
places that depend on the number of rows B alone, so that graphs can read it there:

    inputs[0:B]    slot of each sampled row, the padding slot behind them
    inputs[B:2B]   position of each sampled row's last token

In a step of decode rows only, those are all its rows. In others the forward pass reads what lies behind: `MixedInputs`.
"""

from dataclasses import dataclass

import torch

from worker.attention.flashinfer import FlashInferAttention
from worker.batch import StepBatch
from worker.cuda.frames import Span
from worker.cuda.piecewise import PiecewiseGraphs
from worker.cuda.sampling import Mode, finite_rows, sample
from worker.cuda.state import SlotState
from worker.models.base import Model
from worker.parallel import Group


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """Where a step with chunks has its tokens in `inputs`. T tokens, R rows, S of them sampled."""

    tokens: int  # N ≥ T: with padding, for piecewise graphs
    slots: Span  # [N] the slot of each token, the padding slot behind them
    positions: Span  # [N]
    ids: Span  # [N]; of decode rows unknown to the host
    row_slots: Span  # [R]
    kv_indptr: Span  # [R + 1]
    logit_tokens: Span  # [S] index along T


class GpuStep:
    """Model, attention, slots, and the buffers that steps share."""

    def __init__(
        self,
        model: Model,
        attention: FlashInferAttention,
        state: SlotState,
        group: Group,
        *,
        max_rows: int,
        vocab_size: int,
        words: int,
    ) -> None:
        """`words` of metadata at most come with a step."""
        device = state.pages.device
        self.model = model
        self.attention = attention
        self.state = state
        self._group = group
        self.inputs = torch.zeros(words, dtype=torch.int32, device=device)
        self.logits = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=device)
        self.finite = torch.zeros(max_rows, dtype=torch.bool, device=device)  # by row of logits, before any mask
        self.drawn = torch.zeros(max_rows, 2, dtype=torch.int32, device=device)  # id and RowStatus
        self._indices_for: tuple[object, int] = (None, 0)  # whose page ids `attention.kv_indices` holds

    def view(self, span: Span) -> torch.Tensor:
        """Words of this step's inputs, int32."""
        return self.inputs[span[0] : span[1]]

    # ------------------------------------------------------------------ decode, in a graph or not

    def holds_indices(self, batch: StepBatch, bucket: int) -> bool:
        """Are the batch's page ids in place? Tables hand on the same array as long as no row enters a page."""
        return self._indices_for[0] is batch.kv_indices and self._indices_for[1] == bucket

    def place_indices(self, batch: StepBatch | None, bucket: int, slots: Span, indptr: Span, count: int) -> None:
        """Build the page ids of a step, `count` in all; `batch`: for which `holds_indices` shall be true."""
        ids = self.state.page_ids(self.view(slots), self.view(indptr), count)
        self.attention.kv_indices[:count].copy_(ids)
        self._indices_for = (None if batch is None else batch.kv_indices, bucket)

    def decode(self, bucket: int) -> None:
        """Logits of `bucket` decode rows, after attention's `plan_graph`."""
        slots, positions = self.inputs[:bucket], self.inputs[bucket : 2 * bucket]
        self.attention.kv_slots[:bucket].copy_(self.state.kv_slots(slots, positions))
        hidden = self.model.hidden(self.state.last_tokens[slots], positions, self.attention)
        self._take_logits(hidden)

    # ------------------------------------------------------------------ any step, never in a graph

    def mixed(self, batch: StepBatch, where: MixedInputs, pieces: PiecewiseGraphs | None) -> None:
        """Logits of the sampled rows of a step of any kind; `pieces`: by its graphs."""
        tokens, decodes = where.tokens, batch.decode_rows
        slots, positions, ids = self.view(where.slots), self.view(where.positions), self.view(where.ids)
        ids[:decodes].copy_(self.state.last_tokens[slots[:decodes]])
        self.attention.kv_slots[:tokens].copy_(self.state.kv_slots(slots, positions))
        self.place_indices(None, 0, where.row_slots, where.kv_indptr, int(batch.kv_indptr[-1]))
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
