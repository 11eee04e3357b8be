"""Settings of NCCL: checked, shown in the ledger, and never against what the environment already says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_distplus import env
from lightning_distplus.errors import PreflightError

__all__ = ["NcclSettings"]

_SMALLEST_BUFFER = 1 << 16


@dataclass(frozen=True, kw_only=True)
class NcclSettings:
    """What NCCL reads from the environment when its first group is formed."""

    buffer_size_bytes: int | None = None
    """Buffer of each channel (NCCL_BUFFSIZE), a power of two; NCCL's own default is 4 MiB."""
    interface: str | None = None
    """Network interfaces (NCCL_SOCKET_IFNAME), for example "eth0", or "^docker0,lo" for all but these."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL says (NCCL_DEBUG)."""

    def __post_init__(self) -> None:
        size = self.buffer_size_bytes
        if size is not None and (size < _SMALLEST_BUFFER or size & (size - 1)):
            raise ValueError(
                f"nccl.buffer_size_bytes is {size}; it is a power of two of at least {_SMALLEST_BUFFER}, "
                "such as 8388608 for 8 MiB."
            )
        if self.interface is not None and not self.interface.strip("^=, "):
            raise ValueError(f'nccl.interface is {self.interface!r}; it names interfaces, such as "eth0" or "^lo".')
        if self.debug not in (None, "VERSION", "WARN", "INFO", "TRACE"):
            raise ValueError(f"nccl.debug is {self.debug!r}; it is VERSION, WARN, INFO or TRACE.")

    def apply(self) -> dict[str, str]:
        """Sets the variables; returns every one with its value.

        Raises:
            PreflightError: The environment sets one of them to another value.
        """
        wanted = {
            env.NCCL_BUFFSIZE: self.buffer_size_bytes,
            env.NCCL_SOCKET_IFNAME: self.interface,
            env.NCCL_DEBUG: self.debug,
        }
        settings = {variable: str(value) for variable, value in wanted.items() if value is not None}
        for variable, value in settings.items():
            present = variable.get()
            if present is not None and present != value:
                raise PreflightError(
                    f"the environment sets {variable.name}={present}, the strategy's nccl argument says {value}. "
                    "Neither wins silently: unset the variable, or remove the setting."
                )
        for variable, value in settings.items():
            variable.set(value)
        return {variable.name: value for variable, value in settings.items()}
