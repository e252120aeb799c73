"""The transformers model that a plan describes: built, cut, recomputed, compiled, quantized."""
