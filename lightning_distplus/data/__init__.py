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
    "ORDER_VERSION": "order",
    "MegatronTokens": "token_files",
    "MegatronWriter": "token_files",
    "Mixture": "order",
    "ResumableDataModule": "datamodule",
    "SampleAudit": "audit",
    "Source": "token_files",
    "TokenDataModule": "token_datamodule",
    "TokenSource": "token_files",
    "document_mask": "token_datamodule",
    "dtype_for": "token_files",
    "permute": "order",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: this package alone imports neither torch nor Lightning."""
    if name == "samplers":
        return importlib.import_module(f"{__name__}.samplers")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
