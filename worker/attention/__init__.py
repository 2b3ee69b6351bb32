"""Attention over paged KV memory, one backend for each kind of device."""
