"""The commands of ``dg-core``, one module each; ``dg_core.cli`` loads the one that is asked for."""

CUDA_ENGINE_MISSING = "needs the CUDA engine, which this version does not have"
