"""Attention backends are chosen by name, and the devices know only the contract: toy ones serve, too."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.builders import make_worker_options
from tests.cuda_cases import LatePair, expected, options_of, silent, submit, told
from tests.flashinfer_double import simulate
from tests.marks import mark_rest
from tests.pair import Pair
from worker.cpu import backends as cpu_backends
from worker.cpu.reference_attention import rotate
from worker.cpu.start import start as start_cpu
from worker.cuda import backends as cuda_backends
from worker.cuda.attention import DevicePageLists, KvFormat, Limits, pad_indptr
from worker.cuda.pinned import PinnedRing
from worker.cuda.start import start
from worker.device import DeviceError
from worker.layers.attention import AttentionShape, Rotation, choose_backend
from worker.steps.batch import I32Array, PageLists, StepBatch

# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("device", "name", "offered"),
    [
        ("cpu", "flashinfer", "auto, numba, reference"),
        ("cpu", "Numba", "auto, numba, reference"),
        ("reference", "numba", "auto, reference"),
    ],
)
def test_an_unknown_name_is_refused_by_a_list_of_those_that_the_device_offers(
    device: str, name: str, offered: str
) -> None:
    with pytest.raises(DeviceError) as refused:
        start_cpu(make_worker_options(device=device, attention_backend=name), silent)
    assert str(refused.value) == f"--attention-backend {name}: --device {device} offers {offered}"


def test_a_gpu_refuses_an_unknown_name_too() -> None:
    with simulate(0), pytest.raises(DeviceError, match="--attention-backend numba: --device cuda offers auto, flashin"):
        start(options_of("cuda", attention_backend="numba"), silent)


def test_auto_is_the_first() -> None:
    assert choose_backend({"a": 1, "b": 2}, "auto", "cpu") == 1
    assert choose_backend({"a": 1, "b": 2}, "b", "cpu") == 2


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_both_backends_of_a_cpu_give_the_reference_devices_tokens(name: str) -> None:
    assert tokens_on_cpu(name) == expected()[0]


def tokens_on_cpu(name: str) -> list[object]:
    options = options_of("cpu", attention_backend=name)
    pair = Pair(start_cpu(options, silent), options, depth=2)
    submit(pair)
    pair.run()
    return list(told(pair))


# --------------------------------------------------------------------------- a toy on the CPU


class ToyAttention:
    """Each token by itself: gathers the slots of its context, and lets torch attend."""

    def __init__(self, shape: AttentionShape, threads: int) -> None:
        self._shape = shape
        sizes = [(shape.pages_of(n) * shape.page_size, shape.num_kv_heads, shape.head_dim) for n in range(2)]
        self._keys = [torch.zeros(size, dtype=shape.dtype) for size in sizes]
        self._values = [torch.zeros(size, dtype=shape.dtype) for size in sizes]

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        assert rotation is not None
        rotate(q, rotation)
        rotate(k, rotation)
        window, size = self._shape.window_of(layer), self._shape.page_size
        lists, out = self._batch.pages_of(window), torch.zeros(len(q), q[0].numel())
        tokens = len(lists.kv_slots)
        self._keys[layer][lists.kv_slots], self._values[layer][lists.kv_slots] = k[:tokens], v[:tokens]
        row_of = np.repeat(np.arange(len(self._batch.slots)), np.diff(self._batch.qo_indptr))
        for token, (row, position) in enumerate(zip(row_of, self._batch.positions, strict=True)):
            pages = lists.kv_indices[lists.kv_indptr[row] : lists.kv_indptr[row + 1]]
            slots = (pages[:, None] * size + np.arange(size)).ravel()
            behind = lists.first_pages[row] * size
            seen = slots[max(position + 1 - window - behind, 0) if window else 0 : position + 1 - behind]
            keys, values = (kept[layer][seen].transpose(0, 1) for kept in (self._keys, self._values))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[token][:, None], keys, values, scale=self._shape.scale, enable_gqa=True
            )
            out[token] = attended.flatten()
        return out


def test_a_backend_that_is_registered_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_backends.BACKENDS, "toy", ToyAttention)
    assert tokens_on_cpu("toy") == expected()[0]


# --------------------------------------------------------------------------- a toy on the GPU


class ToyGpuAttention:
    """All rows at once: gathers as many pages as a row may have, and masks what a token does not see."""

    def __init__(self, shape: AttentionShape, limits: Limits, kv_format: KvFormat, *, deterministic: bool) -> None:
        self._shape, self._limits = shape, limits
        self.groups = {group: DevicePageLists(shape, group, limits, "cuda") for group in shape.groups}
        self._kept = [
            torch.zeros(
                2, shape.pages_of(layer) + 1, shape.page_size, shape.num_kv_heads, shape.head_dim, device="cuda"
            )
            for layer in range(shape.num_layers)
        ]
        # Of each token, by cache group: where its row's list begins, and its place counted from there.
        words = (limits.max_tokens, len(self.groups))
        self._begins, self._places = (torch.zeros(words, dtype=torch.int32, device="cuda") for _ in range(2))
        self._ring = PinnedRing(limits.depth, 2 * limits.max_tokens * len(self.groups))
        self._pages = torch.arange(limits.max_pages_per_row, device="cuda")
        self._tokens = 0

    def plan(self, batch: StepBatch) -> None:
        raise NotImplementedError("only --deterministic and a measured pool ask for it")

    def plan_eager(self, batch: StepBatch) -> None:
        lists = [batch.of_group(group) for group in self.groups]
        self._plan([each.kv_indptr for each in lists], batch.last_page_len, batch.qo_indptr)

    def plan_graph(self, batch: StepBatch | None, bucket: int) -> None:
        lists: list[StepBatch | PageLists | None] = [batch and batch.of_group(group) for group in self.groups]
        last = np.ones(bucket, np.int32)
        if batch is not None:
            last[: len(batch.slots)] = batch.last_page_len
        self._plan([pad_indptr(each, bucket) for each in lists], last, np.arange(bucket + 1, dtype=np.int32))

    def _plan(self, indptrs: list[I32Array], last_page_len: I32Array, qo_indptr: I32Array) -> None:
        counts, self._tokens = np.diff(qo_indptr), int(qo_indptr[-1])
        after = (np.repeat(qo_indptr[1:], counts) - np.arange(self._tokens) - 1)[:, None]
        begins = np.stack([np.repeat(indptr[:-1], counts) for indptr in indptrs], axis=1)
        ends = [np.repeat((np.diff(indptr) - 1) * self._shape.page_size + last_page_len, counts) for indptr in indptrs]
        places: npt.NDArray[np.int32] = (np.stack(ends, axis=1) - after - 1).astype(np.int32)
        turn = self._ring.begin()
        for target, found in ((self._begins, begins), (self._places, places)):
            target[: self._tokens].copy_(turn.put(found.ravel()).view(-1, len(self.groups)), non_blocking=True)
        self._ring.end()

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        assert rotation is not None
        tokens, shape, window = self._tokens, self._shape, self._shape.window_of(layer)
        number = shape.group_of(window)
        lists, column = self.groups[number], list(self.groups).index(number)
        for kept, new in zip(self._kept[layer], (_rotated(k, rotation, tokens), v[:tokens]), strict=True):
            kept.view(-1, *kept.shape[2:]).index_copy_(0, lists.kv_slots[:tokens].long(), new)
        begins, place = self._begins[:tokens, column], self._places[:tokens, column]
        listed = (begins[:, None] + self._pages).clamp(max=len(lists.kv_indices) - 1)
        keys, values = (kept[lists.kv_indices[listed]].flatten(1, 2) for kept in self._kept[layer])  # [T, L, kv, d]
        at = torch.arange(keys.shape[1], device="cuda")
        seen = (at <= place[:, None]) & (at > place[:, None] - window if window else at >= 0)
        groups = _rotated(q, rotation, tokens).view(tokens, shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("tkgd,tlkd->tkgl", groups, keys) * shape.scale
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        out = torch.zeros(len(q), q.shape[1] * q.shape[2], device="cuda")
        out[:tokens].copy_(torch.einsum("tkgl,tlkd->tkgd", weights, values).flatten(1))
        return out


def _rotated(x: torch.Tensor, rotation: Rotation, tokens: int) -> torch.Tensor:
    a, b = x[:tokens].chunk(2, dim=-1)
    c, s = (table[rotation.positions[:tokens]][:, None] for table in (rotation.cos, rotation.sin))
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


@pytest.mark.parametrize("enforce_eager", mark_rest(pytest.mark.emulation, [True, False]))
def test_steps_and_graphs_know_only_the_contract(enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_backends.BACKENDS, "toy", ToyGpuAttention)
    with simulate(7) as gpu:
        options = options_of("cuda", attention_backend="toy", enforce_eager=enforce_eager)
        pair = LatePair(gpu, start(options, silent), options, depth=3)
        submit(pair)
        pair.run()
        assert told(pair) == expected()[0]
