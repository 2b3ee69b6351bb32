"""The parts of models: linear maps, norms, rotary embeddings, and the arithmetic below them."""
