"""The exercises of the course, by name: a module for each group of notebooks."""

from shardscope.teach.exercises import data_parallel, memory
from shardscope.teach.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise for exercise in (*memory.EXERCISES, *data_parallel.EXERCISES)
}
"""Every exercise by its name, in the order of the course."""
