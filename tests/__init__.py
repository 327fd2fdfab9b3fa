"""Tests of dg_core. A package, so that test modules can share helpers by relative imports."""
