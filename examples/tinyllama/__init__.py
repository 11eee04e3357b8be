"""A TinyLlama-style model, pretrained on text that is on every machine."""
