"""Direct preference optimization (DPO): pairs of a chosen and a rejected answer, loss, and reference.

``Dpo`` is an engine's objective; ``PairBatches`` its batches; tokens and preview of pairs are
those of ``training.examples``.
"""
