"""Measuring and looking at what a KV budget does to a model.

``Evaluator`` asks questions with known answers, ``continuations`` compares next-token distributions, ``measure_speed``
measures speed and memory, ``inspect_prompt`` shows what was kept. Each gives dataclasses; ``to_pandas`` makes a table.
"""

from pycriticalkv.evaluation.continuation import Continuation, continuations, summarize_continuations
from pycriticalkv.evaluation.inspection import Inspection, inspect_prompt, write_html
from pycriticalkv.evaluation.runner import Arm, Evaluator, Grid, Outcome
from pycriticalkv.evaluation.speed import Speed, SpeedRow, measure_speed, speed_rows
from pycriticalkv.evaluation.summary import Cell, summarize, to_pandas
from pycriticalkv.evaluation.tasks import TASKS, Sample, load_questions, make_sample

__all__ = [
    "TASKS",
    "Arm",
    "Cell",
    "Continuation",
    "Evaluator",
    "Grid",
    "Inspection",
    "Outcome",
    "Sample",
    "Speed",
    "SpeedRow",
    "continuations",
    "inspect_prompt",
    "load_questions",
    "make_sample",
    "measure_speed",
    "speed_rows",
    "summarize",
    "summarize_continuations",
    "to_pandas",
    "write_html",
]
