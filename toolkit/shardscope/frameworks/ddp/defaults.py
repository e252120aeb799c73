"""DDP defaults that the preflight checks depend on: those of the plain PyTorch engines."""

from __future__ import annotations

from shardscope.frameworks.defaults import describe_torch_checkpoint as get_checkpoint_format
from shardscope.frameworks.defaults import find_no_options as find_overlap_options
from shardscope.frameworks.defaults import find_no_options as find_unused_options
from shardscope.frameworks.defaults import get_vocab_size as pad_vocab_size
from shardscope.frameworks.defaults import get_weight_reduce_type as get_reduce_type
from shardscope.frameworks.defaults import has_fp32_weights as keeps_fp32_weights
from shardscope.frameworks.defaults import suggest_mixed_precision as suggest_fp32_reduction

__all__ = [
    "find_overlap_options",
    "find_unused_options",
    "get_checkpoint_format",
    "get_reduce_type",
    "keeps_fp32_weights",
    "pad_vocab_size",
    "suggest_fp32_reduction",
]
