"""The rooms behind the front: one package a backend, none of which knows another.

Import them as `dg_core.backends`.  The directory stands at the top of the repository and is linked into
`dg_core/`, so with the repository root on `sys.path` Python could also find it under the bare name `backends`
and would then hold two copies of every module, with two registries and two sets of exception classes.  That
name is therefore refused.
"""

if __name__ == "backends":
    raise ImportError(
        "import dg_core.backends, not backends: the bare name would load a second copy of every backend"
    )
