"""``deep_gemm.utils``: casts, scale-factor layouts and helpers of multi-process programs."""

from . import dist, layout, math
from .dist import *  # noqa: F403
from .layout import *  # noqa: F403
from .math import *  # noqa: F403

__all__ = [*dist.__all__, *layout.__all__, *math.__all__]
