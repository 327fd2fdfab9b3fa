"""``deep_gemm.testing.bench``."""

from dg_core.testing.bench import *  # noqa: F403
