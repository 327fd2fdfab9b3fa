"""DeepGEMM's package as its clients import it: dg_core's front, and the few names that are not in it.

``dg_core.compat.install()`` makes ``import deep_gemm`` mean this package; it can also be imported as it is.
No function here computes by itself: each is one of dg_core's under another name, or arranges its arguments.
"""

import dg_core
from dg_core import *  # noqa: F403

from . import labels, legacy, mega, names_2025, testing, utils
from .labels import *  # noqa: F403
from .mega import *  # noqa: F403
from .names_2025 import *  # noqa: F403
from .utils import *  # noqa: F403

# The version whose names and arguments these are: programs compare it to find out what they may call.
__version__ = "2.6.1"
dg_core_version = dg_core.__version__

__all__ = [
    "dg_core_version",
    "legacy",
    "mega",
    "testing",
    "utils",
    *sorted({*dg_core.__all__, *labels.__all__, *mega.__all__, *names_2025.__all__, *utils.__all__}),
]
