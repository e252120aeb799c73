"""Test of rehearsals from a config.json without formulas: a known family has the same result both ways."""

from __future__ import annotations

from dataclasses import replace

from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import needs, thorough

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


@thorough()
def test_a_config_without_its_family_has_the_same_rehearsal() -> None:
    known = ss.Plan(
        ss.Architecture.from_hf(CONFIG),
        ss.Cluster.parse("2xh100-sxm-80gb"),
        ss.Recipe(seq_len=512, global_batch_size=2),
        ss.Layout.fsdp2(),
    )
    unknown = replace(known, architecture=UnknownFamily.from_config(CONFIG, "mine"))
    of_known, of_unknown = rehearse_in_this_process(known), rehearse_in_this_process(unknown)
    assert of_unknown.tier == "rehearsed"
    assert dict(of_unknown.components) == dict(of_known.components)
    rotary_tables = 2 * 4 * 64 // 2
    assert of_unknown.components["parameters"] == 4 * known.architecture.num_parameters // 2 + rotary_tables


@thorough()
def test_zero_2_rehearses_a_config_without_formulas() -> None:
    """The rank with most is computed from tensors' sizes, which are unknown here: it is the first."""
    architecture = ss.Architecture.from_hf({**CONFIG, "model_type": "stablelm"}, rehearse_only=True)
    recipe, layout = ss.Recipe(seq_len=128, global_batch_size=2), ss.Layout.zero(stage=2)
    report = rehearse_in_this_process(
        ss.Plan(architecture, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, layout)
    )
    assert report.components["parameters"] >= 2 * architecture.num_parameters
