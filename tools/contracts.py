"""A contract type for import-linter that the rule of the rooms needs: these modules may import these and no
others.

import-linter's own `forbidden` contract lists what must not be imported, so each new module of `dg_core`
would be open to the backends until somebody thought of adding it.  This one lists what may be.  It looks at
direct imports only: what an allowed module imports in turn is that module's business, and the layers contract
keeps it in order.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """Modules below `importers` import, of the root package, only each other and `allowed`.

    Fields: `importers` and `allowed`, lists of modules; an importer stands for its whole package, an allowed
    module for itself alone.  A module in `allowed` that does not exist yet is no error: the list is the rule,
    not an inventory.
    """

    type_name = "only"

    importers = fields.ListField(subfield=fields.ModuleField())
    allowed = fields.ListField(subfield=fields.ModuleField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        allowed = {module.name for module in self.allowed}  # type: ignore[attr-defined]
        broken: list[tuple[str, str]] = []
        for package in sorted(module.name for module in self.importers):  # type: ignore[attr-defined]
            inside = {package, *graph.find_descendants(package)}
            for importer in sorted(inside):
                imported = graph.find_modules_directly_imported_by(importer)
                broken += [(importer, name) for name in sorted(imported - inside - allowed)]
        lines = {
            pair: sorted(
                {
                    detail["line_number"]
                    for detail in graph.get_import_details(importer=pair[0], imported=pair[1])
                }
            )
            for pair in broken
        }
        return ContractCheck(kept=not broken, metadata={"broken": broken, "lines": lines})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            where = ", ".join(f"l. {line}" for line in check.metadata["lines"][importer, imported])
            output.print_error(
                f"{importer} imports {imported} ({where}), which is not in the list of allowed modules."
            )
