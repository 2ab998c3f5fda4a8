"""What a method is written with, in this package or in another: CONTRIBUTING.md has the recipe.

GlobalAggregator, PersonalisedAggregator, ClusterAggregator    base classes: one model, one per client, one per cluster
register                           adds a method, by its name
Range, SetBy                       for annotations of options: Annotated[float, Range(0, 1)]
RoundInput, ClientValue            what a method takes in a round, and what its result says about each client
Cohort, Gram, Weights              the clients of a round, their inner products, and what a method returns
ExampleRound, ExampleNet           for example_round(): what tests and benchmarks run
float64, ratio, shares             arithmetic that methods share
InputError, BadClientError         what to raise; the second leaves clients out with on_bad_client="drop"
ranks                              means of the clients' values by their rank, element by element: median, trimmed
open_tensors                       a model whose tensors are in safetensors files, for Round.add()
nonfinite, tables, kernels         the engine below, for methods that look at tensors themselves
"""

from fastagg._engine import kernels, nonfinite, ranks
from fastagg._engine import table as tables
from fastagg._engine.aggregator import Aggregator, ClusterAggregator, GlobalAggregator, Pass, PersonalisedAggregator
from fastagg._engine.checks import BadClientError, InputError, byte_count, check_choice
from fastagg._engine.cohort import Cohort
from fastagg._engine.describe import ClientValue, describe, describe_several
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.examples import ExampleNet, ExampleRound, example_batches, example_inputs
from fastagg._engine.files.mapped import open_tensors
from fastagg._engine.forked import one_thread
from fastagg._engine.gram import Gram
from fastagg._engine.inputs import RoundInput, bad_clients, read_inputs
from fastagg._engine.numerics import float64, ratio, shares
from fastagg._engine.options import Range, SetBy
from fastagg._engine.registry import aggregator, register
from fastagg._engine.remembered import check_form, check_tensor
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Layout, StateDict, Table, as_tensor, module_of
from fastagg._engine.weights import Weights
from fastagg._engine.wide import largest_update, wide_dtype

__all__ = [
    "FLOATING",
    "Aggregator",
    "BadClientError",
    "ClientValue",
    "ClusterAggregator",
    "Cohort",
    "ExampleNet",
    "ExampleRound",
    "GlobalAggregator",
    "Gram",
    "InputError",
    "Layout",
    "Pass",
    "PersonalisedAggregator",
    "Range",
    "Result",
    "Results",
    "RoundInput",
    "SetBy",
    "StateDict",
    "Table",
    "Weights",
    "aggregator",
    "as_tensor",
    "bad_clients",
    "byte_count",
    "check_choice",
    "check_form",
    "check_tensor",
    "describe",
    "describe_several",
    "example_batches",
    "example_inputs",
    "float64",
    "kernels",
    "largest_update",
    "module_of",
    "nonfinite",
    "one_thread",
    "open_tensors",
    "ranks",
    "ratio",
    "read_inputs",
    "register",
    "shares",
    "tables",
    "wide_dtype",
]
