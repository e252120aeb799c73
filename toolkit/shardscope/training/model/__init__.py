"""The transformers model of a plan: building, pipeline parts, recomputation, LoRA, compilation,
quantization.
"""
