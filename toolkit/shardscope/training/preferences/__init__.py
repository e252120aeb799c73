"""Direct preference optimization (DPO): pairs of a chosen and a rejected answer, loss, and reference.

``Dpo`` is an engine's objective; ``PairBatches`` its batches; ``iterate_pairs`` the tokens of pairs.
"""
