"""Attention backends of GPU workers, by the names that --attention-backend takes: one line registers one."""

from worker.cuda.attention import MakeBackend
from worker.cuda.flashinfer import FlashInferAttention

BACKENDS: dict[str, MakeBackend] = {"flashinfer": FlashInferAttention}  # the first is the default
