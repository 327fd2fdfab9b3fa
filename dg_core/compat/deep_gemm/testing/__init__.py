"""``deep_gemm.testing``: timings, differences and conditions of test functions."""

from .bench import *  # noqa: F403
from .numeric import *  # noqa: F403
from .utils import *  # noqa: F403
