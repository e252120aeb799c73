"""The same question put to a public analytical model: llm-analysis, which is asked one layout after another.

It is none of Shardscope's dependencies: it is asked where ``LLM_ANALYSIS_PYTHON`` (or this interpreter) has
it, as after ``python -m venv other && other/bin/pip install llm-analysis``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import shardscope as ss
from benchmarks.search import CLUSTER, GLOBAL_BATCH_SIZE, MODEL, SEQ_LEN

_ASK = """
import contextlib, io, json, logging, sys, time
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import GPUConfig, ModelConfig, ParallelismConfig
logging.disable(logging.CRITICAL)
question = json.loads(sys.argv[1])
model, gpu = ModelConfig(**question["model"]), GPUConfig(**question["gpu"])
start, asked, answered = time.process_time(), 0, 0
for tp, pp, dp, micro_batch in question["layouts"]:
    for recompute in ActivationRecomputation:
        for zero in DSZeRO:
            asked += 1
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
                parts = ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp)
                LLMAnalysis(model, gpu, parallelism_config=parts).training(
                    batch_size_per_gpu=micro_batch, global_batch_size=question["batch"],
                    seq_len=question["seq_len"], activation_recomputation=recompute, ds_zero=zero,
                    mlp_gated_linear_units=True)
                answered += 1
print(json.dumps([asked, answered, time.process_time() - start]))
"""


class Other(NamedTuple):
    """What it answered."""

    num_asked: int
    num_answered: int
    cpu_seconds: float

    @property
    def layouts_per_second(self) -> float:
        """Asked in a second of one core, those that it refuses too."""
        return self.num_asked / self.cpu_seconds


def measure() -> Other | None:
    """Ask it; None where it is not at hand."""
    python = os.environ.get("LLM_ANALYSIS_PYTHON", sys.executable)
    looked = subprocess.run([python, "-c", "import llm_analysis"], check=False, capture_output=True)
    if looked.returncode:
        return None
    done = subprocess.run(
        [python, "-c", _ASK, json.dumps(_make_question())], check=True, capture_output=True, text=True
    )
    return Other(*json.loads(done.stdout.splitlines()[-1]))


def _make_question() -> dict[str, object]:
    model, cluster = ss.models[MODEL], ss.Cluster.parse(CLUSTER)
    gpu = cluster.gpu
    tps = [1 << power for power in range(4)]
    layouts = [
        (tp, pp, cluster.num_gpus // (tp * pp), micro_batch)
        for tp in tps
        for pp in (1, 2, 4, 8, 16, 32, 64, 128)
        for micro_batch in (1, 2, 4, 8)
        if GLOBAL_BATCH_SIZE % (cluster.num_gpus // (tp * pp) * micro_batch) == 0
    ]
    return {
        "model": {
            "name": model.name,
            "num_layers": model.num_hidden_layers,
            "n_head": model.num_attention_heads,
            "hidden_dim": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_seq_len": SEQ_LEN,
            "num_key_value_heads": model.num_key_value_heads,
            # It takes multiples of the hidden size only: the nearest one, which costs it as long.
            "ffn_embed_dim": round(model.intermediate_size / model.hidden_size) * model.hidden_size,
        },
        "gpu": {
            "name": gpu.name,
            "mem_per_GPU_in_GB": gpu.memory_bytes / 1e9,
            "hbm_bandwidth_in_GB_per_sec": 3350,
            "intra_node_bandwidth_in_GB_per_sec": 450,
            "intra_node_min_message_latency": 8e-6,
            "peak_fp16_TFLOPS": 989,
        },
        "layouts": layouts,
        "batch": GLOBAL_BATCH_SIZE,
        "seq_len": SEQ_LEN,
    }
