"""Tests of Megatron-LM's arguments in shell scripts, which are written in many ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.frameworks.megatron.files.shell_script import read_script_arguments

SIXTEEN = ss.Cluster.parse("2x8xh100-sxm-80gb")

SCRIPT = r"""#!/bin/bash
CHECKPOINTS=${1:-"checkpoints/8b"}
NODES=${SLURM_NNODES:-"2"}
export MASTER_ADDR=${MASTER_ADDR:-localhost}
mkdir -p "$(dirname "$CHECKPOINTS")"
PROGRAM="pretrain_gpt.py"
TP=2     # within a node
DTYPE="fp8"
BATCH=4

DISTRIBUTED=(
    --nproc_per_node 8 --nnodes $NODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --vocab-size 128256 --max-position-embeddings 8192
    --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
    )
fi
OPTIONS=" \
    --bf16 \
    --split '949,50,1'"
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    # --pipeline-model-parallel-size 8
    --sequence-parallel  # with TP
)
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce)
PARALLEL_ARGS+=("${DDP_ARGS[@]}")
if [ "${USE_FSDP:-0}" = 1 ]; then
    PARALLEL_ARGS=("${PARALLEL_ARGS[@]}" --use-megatron-fsdp)
fi
[ -z "$NO_CONTEXT" ] || PARALLEL_ARGS+=(--context-parallel-size 2)
prepare() {
    OPTIONS="--fp16"
}
if [ ! -f "$PROGRAM" ]; then
    echo "It's not here: $PROGRAM --num-layers 1"
    exit 1
fi

python prepare.py --output data; torchrun ${DISTRIBUTED[@]} \
    "$PROGRAM" \
    ${MODEL_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    ${PARALLEL_ARGS[@]} $OPTIONS $EXTRA \
    --seq-length 8192 --micro-batch-size $BATCH --global-batch-size 64 \
    --save "$CHECKPOINTS" --data-path ${DATA} 2>&1 > "log file" | tee logs/train.log
"""


def test_arrays_and_defaults_are_followed_and_conditions_named(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    with pytest.warns(UserWarning) as warnings:
        plan = ss.Plan.from_megatron(file, cluster=SIXTEEN)
    layout, recipe = plan.layout, plan.recipe
    assert (layout.tp, layout.pp, layout.cp) == (2, 1, 1)
    assert isinstance(layout, type(ss.Layout.megatron())) and layout.overlap_grad_reduce
    assert (recipe.micro_batch_size, recipe.global_batch_size, recipe.seq_len) == (4, 64, 8192)
    assert recipe.precision == "bf16-mixed"
    assert plan.architecture.vocab_size == 128256
    text = str(warnings[0].message)
    for flag in ("--fp8-format", "--use-megatron-fsdp", "--context-parallel-size", "--fp16"):
        assert flag in text
    assert "--pipeline-model-parallel-size" not in text


VALUES = "SIZES='--micro-batch-size 1 --global-batch-size 16'\n"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun pretrain_gpt.py ${SIZES} --bf16",
        "cd /megatron && torchrun pretrain_gpt.py $SIZES --bf16 &> train.log && echo done",
        'if [ -f x ]; then\n  torchrun "/megatron/pretrain_gpt.py" $SIZES $MORE --bf16 < /dev/null\nfi',
        "python prepare.py --input x\nsrun -l torchrun pretrain_gpt.py $SIZES --bf16 2>&1 | tee log",
    ],
)
def test_command_is_found_with_its_own_words_only(command: str) -> None:
    arguments, _ = read_script_arguments("train.sh", f"{VALUES}{command}\n", frozenset({"bf16"}))
    assert arguments == ["--micro-batch-size", "1", "--global-batch-size", "16", "--bf16"]


@pytest.mark.parametrize(
    ("value", "named"), [("${TP}", r"\$\{TP\}"), ("$2", r"\$\{2\}"), ("$((8 / 4))", r"\$\{8/4\}")]
)
def test_value_that_only_a_shell_knows_is_named(tmp_path: Path, value: str, named: str) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"{VALUES}torchrun pretrain_gpt.py --tensor-model-parallel-size {value} $SIZES --bf16\n")
    with pytest.raises(ValueError, match=rf"--tensor-model-parallel-size is '{named}'; allowed: a value"):
        ss.Plan.from_megatron(file, architecture=ss.models["llama-3.1-8b"], cluster=SIXTEEN)


LONG = 'A="' + "x" * 50_000 + '"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL_ARGS=(--num-layers 32)\n", "a script that calls pretrain_gpt.py"),
        ("source model.sh\ntorchrun pretrain_gpt.py $MODEL_ARGS\n", "a script that calls pretrain_gpt.py"),
        ("A='x\ntorchrun pretrain_gpt.py --bf16\n", "balanced quotes"),
        (LONG + 'B="$A$A$A"\ntorchrun pretrain_gpt.py $B --bf16\n', "100,000 characters"),
        (LONG + "torchrun pretrain_gpt.py --bf16 " + "$A " * 10_000, "100,000 characters"),
        (LONG + "A+=$A\n" * 30 + "torchrun pretrain_gpt.py --bf16 $A", "100,000 characters"),
    ],
    ids=["model only", "other file", "quote", "long value", "long command", "doubled"],
)
def test_script_without_readable_arguments_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_script_arguments("train.sh", text)


TOKENS = [
    *("if", "[[", "]]", "then", "else", "fi", "for", "do", "done", "case", "esac", "!", "name()", "''"),
    *("-n", "=", "&&", "||", "|", ">", ";", "(", ")", "{", "}", "'", "`", "#", "\\", "<<EOF", "EOF"),
    *("x.py", "--bf16", "A=", "A+=(", "$(", "${", "$((", "))", "$A", "${A[@]}", "${A:-x}", "export"),
    *('"${A[@]}"', '"', "\n", "\\\n", " "),
]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=40))
def test_any_script_is_read_or_raises_a_value_error(tokens: list[str]) -> None:
    for text in (" ".join(tokens), "".join(tokens)):
        try:
            read_script_arguments("train.sh", text)
        except FieldError as error:
            assert "train.sh" in str(error)
