"""How long a given GPU would need for a step: the roofline model (Williams, Waterman, Patterson 2009).

    seconds = max(bytes moved / bandwidth, FLOPs / rate) + launch

Weights are read once a step, K/V once a row and layer; activations are taken to stay in caches.
"""

import sys
from dataclasses import dataclass, replace

import numpy as np

from proto.model import ModelConfig
from worker.device import DeviceError
from worker.steps.batch import StepBatch

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a device reaches, not what its data sheet says."""

    bandwidth: float  # bytes/s from memory
    flops: float  # dense matrix FLOP/s in bf16
    memory: float  # bytes
    launch: float  # seconds a step beyond the arithmetic: graph launch, sampling, copy of the ids
    eos: float = 0.0  # probability that a token is the model's EOS
    max_step_ids: float = 1.0  # ids that a decode row may gain in one step, as by speculation; how many is drawn


# Share of the data sheet's peak that good decode and GEMM kernels reach in practice.
_BANDWIDTH_REACHED = 0.80
_FLOPS_REACHED = 0.65
_LAUNCH = 20e-6

# Peaks: NVIDIA's data sheets of the H200 SXM (141 GB, 4.8 TB/s) and H100 SXM (80 GB, 3.35 TB/s); both 989 TFLOP/s bf16.
_PRESETS = {
    "h200": Gpu(4.8e12 * _BANDWIDTH_REACHED, 989e12 * _FLOPS_REACHED, 141e9, _LAUNCH),
    "h100": Gpu(3.35e12 * _BANDWIDTH_REACHED, 989e12 * _FLOPS_REACHED, 80e9, _LAUNCH),
}
_MOST = sys.float_info.max
_RANGES = {"launch": (0.0, _MOST), "eos": (0.0, 1.0), "max_step_ids": (1.0, 64.0)}  # of other fields: 1 and up
_FIELDS = tuple(Gpu.__dataclass_fields__)
_NEEDED = ("bandwidth", "flops", "memory")


def parse_gpu(device: str) -> Gpu:
    """Read `sim:h200`, `sim:h100` or `sim:custom,bandwidth=1e12,flops=1e14,memory=24e9[,launch=2e-5][,eos=0.01]
    [,max_step_ids=5]`.

    Numbers after a preset's name change that preset. Raises DeviceError.
    """
    name, *settings = device.removeprefix("sim:").split(",")
    values: dict[str, float] = {}
    for setting in settings:
        key, _, number = setting.partition("=")
        if key not in _FIELDS:
            raise DeviceError(f"--device {device}: {key!r} is not one of {', '.join(_FIELDS)}")
        try:
            values[key] = float(number)
        except ValueError:
            raise DeviceError(f"--device {device}: {key} is {number!r}, not a number") from None
        low, high = _RANGES.get(key, (1.0, _MOST))
        if not low <= values[key] <= high:
            limits = f"{low:g} to {high:g}" if high < _MOST else f"at least {low:g}"
            raise DeviceError(f"--device {device}: {key}={number} is out of range ({limits})")
        if key == "max_step_ids" and values[key] % 1:
            raise DeviceError(f"--device {device}: {key}={number} is not a whole number")
    if name == "custom":
        missing = [key for key in _NEEDED if key not in values]
        if missing:
            raise DeviceError(f"--device {device}: sim:custom needs {', '.join(missing)} as well")
        return Gpu(**{"launch": _LAUNCH, **values})
    if name not in _PRESETS:
        raise DeviceError(f"--device {device}: there is no such GPU; there are sim:h200, sim:h100 and sim:custom,…")
    return replace(_PRESETS[name], **values)


class Roofline:
    """The cost of a model's steps on a GPU."""

    def __init__(self, model: ModelConfig, gpu: Gpu, element_bytes: int) -> None:
        self._gpu = gpu
        self._element_bytes = element_bytes
        self._expert_layers = model.expert_layers
        self._experts, self._experts_per_token = model.num_experts, model.experts_per_token
        self._expert_params = model.expert_weights
        dense = (model.num_layers - model.expert_layers) * model.mlp_weights
        # What every token uses, whichever experts it is sent to
        self._layer_params = (
            model.num_layers * model.attention_weights + dense + model.expert_layers * model.router_weights
        )
        self._head_params = model.head_weights
        self.weight_bytes = model.parameters * element_bytes
        self.kv_bytes_per_token = model.kv_bytes_per_token(element_bytes)
        self._kv_bytes_per_layer = self.kv_bytes_per_token // model.num_layers
        # Q·K and P·V: a multiplication and an addition each, for every head dimension
        self._attention_flops = 4 * model.num_heads * model.head_dim
        windows = model.windows or (0,) * model.num_layers
        self._layers_by_window = {window: windows.count(window) for window in dict.fromkeys(windows)}

    def seconds(self, batch: StepBatch) -> float:
        """Return the seconds that one step takes."""
        tokens, sampled = len(batch.token_ids), len(batch.logit_tokens)
        if not tokens:
            return self._gpu.launch
        params = self._layer_params + (self._head_params if sampled else 0)
        chosen = self._expert_layers * self._expert_params * self._experts_per_token  # parameters, for one token
        if self._experts:  # tokens choose independently: so many experts are read at least once
            unused = (1 - self._experts_per_token / self._experts) ** tokens
            params += int(self._expert_layers * self._expert_params * self._experts * (1 - unused))
        read = params * self._element_bytes + tokens * self.kv_bytes_per_token
        flops = 2 * (tokens * (self._layer_params + chosen) + sampled * self._head_params)
        attended = batch.positions + 1  # [T] keys that each token sees
        row_keys = attended[batch.qo_indptr[1:] - 1]
        row_tokens = np.diff(batch.qo_indptr)
        for window, layers in self._layers_by_window.items():
            if window:
                keys = np.minimum(row_keys, window + row_tokens - 1).sum()
                pairs = np.minimum(attended, window).sum()
            else:
                keys, pairs = row_keys.sum(), attended.sum()
            read += layers * int(keys) * self._kv_bytes_per_layer
            flops += layers * int(pairs) * self._attention_flops
        return max(read / self._gpu.bandwidth, flops / self._gpu.flops) + self._gpu.launch
