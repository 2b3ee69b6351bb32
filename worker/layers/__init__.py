"""What models are built of: linear maps, norms, rotary embeddings, and the arithmetic below them."""
