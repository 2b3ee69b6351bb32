"""Parameters of each token to sample, the same for every device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from proto.messages import AdmitRow, Sampling
from proto.parameters import MAX_UINT64, Parameter, parameters_of
from worker.steps.batch import I32Array

_PARAMETERS = parameters_of(Sampling)


def _column_of(parameter: Parameter) -> tuple[str, str]:
    """Name and type of a parameter's column."""
    if parameter.kind is float:
        return parameter.field, "f8"
    return parameter.field, "u8" if parameter.spec.high == MAX_UINT64 else "i4"


# How a slot's tokens are drawn: the parameters of `Sampling` and `min_len`, before which stop ids are masked. Aligned,
# so that a device which keeps the same records can view each field as a tensor.
SAMPLING = np.dtype([*map(_column_of, _PARAMETERS), ("min_len", "i4")], align=True)


def sampling_records(rows: Iterable[AdmitRow]) -> npt.NDArray[Any]:
    """Return records of SAMPLING of the requests that these rows admit."""
    records = [(*[getattr(row.sampling, p.field) for p in _PARAMETERS], row.min_len) for row in rows]
    return np.array(records, SAMPLING)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of each sampled token of a step; a decode row with a limit has several. S tokens."""

    slots: I32Array  # [S]
    positions: I32Array  # [S] absolute position of the token that is drawn
    params: npt.NDArray[Any]  # [S] of SAMPLING
    masked: list[tuple[int, I32Array]]  # (index along S, ids that may not be drawn there)
