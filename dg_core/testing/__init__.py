"""Public helpers of tests and benchmarks: differences, timings, conditions of test functions."""

from .bench import *  # noqa: F403
from .conditions import *  # noqa: F403
from .numeric import *  # noqa: F403
