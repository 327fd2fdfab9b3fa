"""Mega MoE under test: data from seeds, an oracle in float64, the driver of the command lines, faults."""
