"""The decoding core: token ids and arrays only. NumPy alone; no torch, no Triton, no text, no clock."""
