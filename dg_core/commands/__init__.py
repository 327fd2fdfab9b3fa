"""The commands of ``dg-core``, one module each; ``dg_core.cli`` loads the one that is asked for."""
