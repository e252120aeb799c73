"""The exercises of the course, by name: a module for each group of notebooks."""

from shardscope.teach.exercises import (
    choosing,
    context_and_experts,
    data_parallel,
    memory,
    offload_and_adapters,
    pipeline,
    tensor_parallel,
    write_it_yourself,
)
from shardscope.teach.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        *memory.EXERCISES,
        *data_parallel.EXERCISES,
        *tensor_parallel.EXERCISES,
        *pipeline.EXERCISES,
        *context_and_experts.EXERCISES,
        *offload_and_adapters.EXERCISES,
        *choosing.EXERCISES,
        *write_it_yourself.EXERCISES,
    )
}
"""Every exercise by its name, in the order of the course."""
