"""The run of ``make pretrain``: a small Llama is killed, comes back, and is compared bit for bit."""
