"""The cuda device: steps queued on a stream, decode behind CUDA graphs. Not yet run on a GPU, only on its emulation."""
