"""Rehearsing from a config.json alone, without a formula: a known family must give the same either way."""

from __future__ import annotations

from dataclasses import replace

from tests.in_process_rehearsal import rehearsed_here
from tests.requirements import needs

import shardscope as ss
from shardscope.families.unknown import UnknownFamily

needs("transformers")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


def test_a_config_alone_rehearses_as_its_family_does() -> None:
    known = ss.Plan(
        ss.Architecture.from_hf(CONFIG),
        ss.Cluster.parse("2xh100-sxm-80gb"),
        ss.Recipe(seq_len=512, global_batch_size=2),
        ss.Layout.fsdp2(),
    )
    alone = replace(known, architecture=UnknownFamily.from_config(CONFIG, "mine"))
    ours, theirs = rehearsed_here(known), rehearsed_here(alone)
    assert theirs.tier == "rehearsed"
    assert dict(theirs.components) == dict(ours.components)
    rotary_tables = 2 * 4 * 64 // 2
    assert theirs.components["parameters"] == 4 * known.architecture.num_parameters // 2 + rotary_tables
