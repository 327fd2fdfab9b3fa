"""``deep_gemm.testing.numeric``."""

from dg_core.testing.numeric import *  # noqa: F403
