"""Tests of Megatron-LM's arguments in shell scripts, which are written in many ways."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.frameworks.megatron.files.shell_script import read_script_arguments

SIXTEEN = ss.Cluster.parse("2x8xh100-sxm-80gb")

ARRAYS = r"""#!/bin/bash
CHECKPOINTS=${1:-"checkpoints/8b"}
NODES=${SLURM_NNODES:-"2"}
MASTER_ADDR=${MASTER_ADDR:-localhost}
mkdir -p "$(dirname "$CHECKPOINTS")"
PROGRAM="pretrain_gpt.py"
TP=2     # within a node
DTYPE="fp8"
BATCH=4
GLOBAL_BATCH=$((BATCH * $NODES * 8))

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
DTYPE_ARGS=(--bf16)
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
    )
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    # --pipeline-model-parallel-size 8
    --sequence-parallel  # with TP
)
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce)
PARALLEL_ARGS+=("${DDP_ARGS[@]}")
if [ "${USE_FSDP:-0}" = 1 ]; then
    PARALLEL_ARGS=("${PARALLEL_ARGS[@]}" --use-megatron-fsdp)
elif [ "$NODES" -gt 1 ] && [ -z "$NO_PIPELINE" ]; then
    PARALLEL_ARGS+=(--pipeline-model-parallel-size 4)
else
    PARALLEL_ARGS+=(--context-parallel-size 2)
fi
if [ -n "${WANDB_API_KEY}" ]; then
    LOG_ARGS+=(--wandb-project ${WANDB_PROJECT:-"mine"})
fi
if [ ! -f "$PROGRAM" ]; then
    echo "It's not here: $PROGRAM --num-layers 1"
    exit 1
fi

torchrun ${DISTRIBUTED[@]} \
    "$PROGRAM" \
    ${MODEL_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    ${PARALLEL_ARGS[@]} $EXTRA \
    --seq-length 8192 --micro-batch-size $BATCH --global-batch-size ${GLOBAL_BATCH} \
    --save "$CHECKPOINTS" --data-path ${DATA} 2>&1 | tee logs/train.log
"""


def test_arrays_conditions_and_defaults_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(ARRAYS)
    plan = ss.Plan.from_megatron(file, cluster=SIXTEEN)
    layout, recipe = plan.layout, plan.recipe
    assert (layout.tp, layout.pp, layout.cp) == (2, 4, 1)
    assert isinstance(layout, type(ss.Layout.megatron())) and layout.overlap_grad_reduce
    assert (recipe.micro_batch_size, recipe.global_batch_size, recipe.seq_len) == (4, 64, 8192)
    assert recipe.precision == "fp8-mixed"
    assert plan.architecture.vocab_size == 128256


TEXTS = """
dp_size=$(( 16 / 2 ))
options=" \\
    --tensor-model-parallel-size 2 \\
    --micro-batch-size $((32 / dp_size)) \\
    --global-batch-size 32 \\
    --split '949,50,1'"
if [ "${checkpointing}" = "true" ]; then
options="${options} \\
    --recompute-granularity full"
fi
options+=" --bf16"
"""


@pytest.mark.parametrize(
    "command",
    [
        "torchrun pretrain_gpt.py ${options}",
        'run_cmd="deepspeed pretrain_gpt.py $@ ${options} &> log.txt"\necho ${run_cmd}\neval ${run_cmd}',
        'COMMAND="cd /megatron; python -u pretrain_gpt.py ${options}"\nsrun -l bash -c "${COMMAND}" 2>&1',
        "sbatch <<EOF\n#SBATCH --nodes=2\nsrun python /megatron/pretrain_gpt.py ${options}\nEOF",
        "python prepare.py --input x; torchrun pretrain_gpt.py ${options} && echo done",
        'cat <<EOF > ds.json\n{"it\'s": 1}\nEOF\ntorchrun pretrain_gpt.py $options > "log file" --lr 1',
    ],
)
def test_command_is_found_wherever_the_script_has_it(command: str) -> None:
    arguments = read_script_arguments("train.sh", TEXTS + command + "\n")
    expected = ["--tensor-model-parallel-size", "2", "--micro-batch-size", "4", "--global-batch-size", "32"]
    assert arguments[:6] == expected
    assert "--bf16" in arguments and "--recompute-granularity" not in arguments
    assert not {"|", "&&", ">", "log file", "done", "2>&1", "log.txt"} & set(arguments)


def test_variable_that_the_script_does_not_set_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    text = "torchrun pretrain_gpt.py $EXTRA --tensor-model-parallel-size ${TP} --bf16 ${MORE} "
    file.write_text(text + "--micro-batch-size 1 --global-batch-size 16")
    with pytest.raises(ValueError, match=r"--tensor-model-parallel-size is '\$\{TP\}'; allowed: a value"):
        ss.Plan.from_megatron(file, architecture=ss.models["llama-3.1-8b"], cluster=SIXTEEN)


LONG = 'A="' + "x" * 50_000 + '"\n'


def test_condition_on_an_argument_of_the_script_is_unknown() -> None:
    """Neither "$2" != false nor "$2" = true holds: whoever starts the script gives it."""
    text = """OFFLOAD=${2}
if [ $OFFLOAD != false ]; then
    OPTIONS="--optimizer-cpu-offload"
elif [ -z "$2" ]; then
    OPTIONS="--use-megatron-fsdp"
fi
[ -n "$NOT_SET" ] || OPTIONS="$OPTIONS --bf16"
torchrun pretrain_gpt.py --micro-batch-size 1 $OPTIONS
"""
    assert "--optimizer-cpu-offload" not in read_script_arguments("train.sh", text)
    assert "--use-megatron-fsdp" not in read_script_arguments("train.sh", text)
    assert read_script_arguments("train.sh", text)[-1] == "--bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL_ARGS=(--num-layers 32)\n", "a script that calls pretrain_gpt.py"),
        ("source model.sh\ntorchrun pretrain_gpt.py $MODEL_ARGS\n", "a script that calls pretrain_gpt.py"),
        ("A='x\ntorchrun pretrain_gpt.py --bf16\n", "Nearest fix: a closing '"),
        ("A=" + "$(" * 2000 + "\n", "Nearest fix: less nesting"),
        (LONG + 'B="$A$A$A"\n' * 20, "500,000 characters"),
        (LONG + "torchrun pretrain_gpt.py --bf16 " + "$A " * 100_000, "500,000 characters"),
        (LONG + "B=(" + "$A " * 100_000 + ")\n", "500,000 characters"),
        (LONG + 'torchrun pretrain_gpt.py "' + "$A" * 100_000 + '"\n', "500,000 characters"),
    ],
    ids=[
        "model only",
        "other file",
        "quote",
        "nested",
        "long value",
        "long command",
        "long list",
        "long word",
    ],
)
def test_script_without_readable_arguments_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_script_arguments("train.sh", text)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("cd /megatron && RUN --tensor-model-parallel-size 4", "4"),
        ("N=2\n[ $N -gt 2 ] && TP=8 || TP=4", "4"),
        ("N=4\nif test $N -gt 2 -a $N -lt 8; then TP=8; else TP=1; fi", "8"),
        ("X=a\nTP=1\n[[ $X = b || $X = c ]] && TP=2\n! [ $X = a ] || TP=8", "8"),
        ("M=llama-70b\nif [[ $M == *70b* ]]; then TP=8; else TP=1; fi", "8"),
        ("X=a\nif [ $X = a ] || [ $X = b ] && [ -z $X ]; then TP=1; else TP=8; fi", "8"),
        ("export JOB TP=8", "8"),
        ("TP=8\nTP=1 python prepare.py", "8"),
        ("TP=8\ntrue || {\nTP=2\nTP=1\n}", "8"),
        ("TP=8\npython tools/preprocess.py --seq-length 128", "8"),
    ],
)
def test_values_are_those_that_bash_has(script: str, expected: str) -> None:
    """Each was read as another value, or not at all."""
    run = "torchrun pretrain_gpt.py --num-layers 2"
    text = (
        script.replace("RUN", run) if "RUN" in script else f"{script}\n{run} --tensor-model-parallel-size $TP"
    )
    assert read_script_arguments("train.sh", text)[2:] == ["--tensor-model-parallel-size", expected]


def test_variable_that_is_added_to_itself_starts_empty() -> None:
    """An eval replaced the variable in its own value once more: its flags were there twice."""
    text = 'O="$O --num-layers 2"\nO="$O --bf16"\neval "torchrun pretrain_gpt.py $O"'
    assert read_script_arguments("train.sh", text) == ["--num-layers", "2", "--bf16"]


@pytest.mark.parametrize("change", ["let TP=TP*2", "((TP = TP * 2))", "read -r TP", "unset TP"])
def test_variable_that_a_command_changes_is_unknown(change: str) -> None:
    text = f"TP=4\n{change}\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP"
    assert read_script_arguments("train.sh", text)[-1] == "${TP}"


@pytest.mark.parametrize(
    "script",
    [
        "if [ -d /data ]; then TP=8; else TP=1; fi",
        "TP=1\nif [ -d /data ]; then TP=8; fi",
        "TP=1\nif nvidia-smi | grep -q H100; then TP=8; fi",
        "TP=1\n[[ $(hostname) = node* ]] && TP=8",
        'M=llama-70b\nif [ "${M%-*}" = llama ]; then TP=8; else TP=1; fi',
        "M=70b\nTP=1\ncase $M in\n7b) TP=2;;\n70b) TP=8;;\nesac",
        "TP=8\nsmall() {\n  TP=1\n}",
        "for TP in 1 8; do",
    ],
)
def test_what_only_a_shell_can_follow_is_warned_of(script: str, tmp_path: Path) -> None:
    """One of both values was in the plan, and nobody knew of the other."""
    file = tmp_path / "train.sh"
    file.write_text(
        f"{script}\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP "
        "--micro-batch-size 1 --global-batch-size 16 --group-query-attention --num-query-groups 8 --swiglu "
        "--disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm "
        "--position-embedding-type rope --bf16 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--ffn-hidden-size 14336 --vocab-size 128256\n"
    )
    with pytest.warns(UserWarning, match=r"read with --tensor-.*-size 1 \(or --tensor-.*-size 8\)"):
        plan = ss.Plan.from_megatron(file, architecture=ss.models["llama-3.1-8b"], cluster=SIXTEEN)
    assert plan.degrees.tp == 1


@pytest.mark.parametrize(
    "script",
    [
        """CMD='eval "$CMD"; eval "$CMD"; python x.py'\neval "$CMD"\n""",
        "A0=x\n"
        + "".join(f"""A{n + 1}='eval "$A{n}"; eval "$A{n}"'\n""" for n in range(40))
        + 'eval "$A40"\n',
    ],
    ids=["itself", "doubling"],
)
def test_texts_that_run_themselves_end(script: str) -> None:
    with pytest.raises(ValueError, match=r"less nesting|characters together"):
        read_script_arguments("train.sh", script + "torchrun pretrain_gpt.py --bf16")


TOKENS = [
    *(
        "if",
        "[",
        "[[",
        "]",
        "]]",
        "then",
        "else",
        "elif",
        "fi",
        "for",
        "in",
        "do",
        "done",
        "case",
        "esac",
        "!",
    ),
    *("-n", "=", "&&", "||", "|", ">", ";", "(", ")", "{", "}", "'", "`", "#", "\\", "cat", "<<EOF", "EOF"),
    *("test", "function", "()", "((", "until", "-a", "export", "read", "&", "<<<", "*"),
    *("eval", "x.py", "--bf16", "A=", "A+=(", "$(", "${", "$((", "))", "$((1+", "$A", "${A[@]}", "${A:-x}"),
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


def test_deeply_nested_conditions_take_no_time() -> None:
    start = time.perf_counter()
    text = "if [ a = a ]; then\n" * 20_000 + "[ " + "a || " * 20_000 + "] && torchrun x.py --bf16\n"
    with pytest.raises(FieldError):
        read_script_arguments("train.sh", text)
    assert time.perf_counter() - start < 10  # It took minutes, or ended in a RecursionError.
