"""Global order as a pure function, token stores, mixtures, loader, and resumable data modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_distplus.data import samplers
    from lightning_distplus.data.audit import SampleAudit
    from lightning_distplus.data.datamodule import ResumableDataModule
    from lightning_distplus.data.order import ORDER_VERSION, Mixture, permute
    from lightning_distplus.data.token_datamodule import TokenDataModule, document_mask
    from lightning_distplus.data.token_files import MegatronTokens, MegatronWriter, Source, TokenSource, dtype_for

__all__ = [
    "ORDER_VERSION",
    "MegatronTokens",
    "MegatronWriter",
    "Mixture",
    "ResumableDataModule",
    "SampleAudit",
    "Source",
    "TokenDataModule",
    "TokenSource",
    "document_mask",
    "dtype_for",
    "permute",
    "samplers",
]

_HOMES = {
    "audit": "SampleAudit",
    "datamodule": "ResumableDataModule",
    "order": "ORDER_VERSION Mixture permute",
    "token_datamodule": "TokenDataModule document_mask",
    "token_files": "MegatronTokens MegatronWriter Source TokenSource dtype_for",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: this package alone imports neither torch nor Lightning."""
    if name == "samplers":
        return importlib.import_module(f"{__name__}.samplers")
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
