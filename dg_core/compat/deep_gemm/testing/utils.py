"""``deep_gemm.testing.utils``."""

from dg_core.testing.conditions import *  # noqa: F403
