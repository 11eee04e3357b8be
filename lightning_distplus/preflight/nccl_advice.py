"""Advice about NCCL's settings, each with what was seen, the reason and the line of its documentation. Nothing is set.

A longer time-out and a larger buffer hide a wrong order of calls until the tensors grow; so advice is given where
something that can be seen speaks for it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_distplus import env
from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status
from lightning_distplus.preflight.gpus import links, query
from lightning_distplus.preflight.running import Check

__all__ = ["ADVICE_CHECKS"]

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
INFINIBAND = Path("/sys/class/infiniband")
PROCESSORS = Path("/proc/cpuinfo")
_LARGE_BUFFER = 16 << 20
_RENAMED = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG")
_NOT_READ = ("NCCL_TIMEOUT",)


def advise(facts: Facts, *, infiniband: Path = INFINIBAND, processors: Path = PROCESSORS) -> Iterator[Finding]:
    """What speaks against the variables that are set, on this host.

    Args:
        facts: The variables.
        infiniband: Where Linux lists RDMA devices.
        processors: Where Linux describes the processors; a guest of a hypervisor has a flag of that name.
    """
    yield from _variables_without_effect(facts)
    yield from _buffers(facts)
    yield from _peer_to_peer(facts, processors)
    yield from _interconnect(facts, infiniband)
    yield from _logging(facts)


def _advice(subject: str, detail: str, remedy: str, source: str) -> Finding:
    return Finding(status=Status.ADVICE, subject=subject, detail=f"{detail} ({source})", remedy=remedy)


def _variables_without_effect(facts: Facts) -> Iterator[Finding]:
    for name in _NOT_READ:
        if name in facts.variables:
            yield _advice(
                f"{name} has no effect: neither NCCL nor torch reads it.",
                f"{name}={facts.variables[name]}",
                "Give the strategy its deadline: timeout=...; what hangs needs a cause more than a longer wait",
                _NCCL,
            )
    for name in _RENAMED:
        if name in facts.variables and f"TORCH_{name}" not in facts.variables:
            yield _advice(
                f"{name} is the old name of TORCH_{name}.",
                f"{name}={facts.variables[name]}, TORCH_{name} unset",
                f"Set TORCH_{name}, or unset both: a Resilient strategy has deadlines of its own",
                _TORCH,
            )


def _buffers(facts: Facts) -> Iterator[Finding]:
    size = facts.number(env.NCCL_BUFFSIZE)
    if size is not None and size > _LARGE_BUFFER:
        yield _advice(
            f"NCCL_BUFFSIZE={size} takes that much for each channel and peer; the default is 4 MiB.",
            f"{size >> 20} MiB; sends that fit a buffer do not wait for their receiver, so that a wrong order of sends "
            "and receives hides until tensors grow",
            "Unset it, and make sends and receives of one step one batch_isend_irecv",
            _NCCL,
        )


def _peer_to_peer(facts: Facts, processors: Path) -> Iterator[Finding]:
    is_off = facts.variables.get("NCCL_P2P_DISABLE") == "1" or facts.variables.get("NCCL_P2P_LEVEL") in ("LOC", "0")
    if is_off and any(any(states) for states in links().values()):
        yield _advice(
            "NCCL may not use the NVLink that this host has.",
            facts.shown(env.NCCL_P2P_DISABLE, env.NCCL_P2P_LEVEL) + "; nvidia-smi shows active NVLink connections",
            "Unset it; it is a workaround for hosts whose PCIe does not pass peers through",
            _NCCL,
        )
    elif not is_off and len(query()) > 1 and not links() and _is_guest(processors):
        yield _advice(
            "This host has several GPUs without NVLink, and runs in a virtual machine: peers may not reach each other.",
            f"{len(query())} GPUs ({query()[0]['name']}), no NVLink, a hypervisor in {processors}",
            "If the first collective hangs, try NCCL_P2P_DISABLE=1 once, and have PCI ACS switched off for good",
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
        )


def _is_guest(processors: Path) -> bool:
    return processors.is_file() and "hypervisor" in processors.read_text().split()


def _interconnect(facts: Facts, infiniband: Path) -> Iterator[Finding]:
    devices = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    if devices and facts.variables.get("NCCL_IB_DISABLE") == "1":
        yield _advice(
            "NCCL may not use the RDMA devices that this host has.",
            f"NCCL_IB_DISABLE=1; {', '.join(devices[:8])}",
            "Unset NCCL_IB_DISABLE, unless they are broken",
            _NCCL,
        )


def _logging(facts: Facts) -> Iterator[Finding]:
    level = (facts.text(env.NCCL_DEBUG) or "").upper()
    if level == "TRACE" and "NCCL_DEBUG_FILE" not in facts.variables:
        yield _advice(
            "NCCL_DEBUG=TRACE writes every call of every rank into its log.",
            facts.shown(env.NCCL_DEBUG) + ", NCCL_DEBUG_FILE unset",
            "NCCL_DEBUG=WARN; or NCCL_DEBUG_FILE=/some/where/%h.%p",
            _NCCL,
        )


ADVICE_CHECKS: Mapping[str, Check] = {"nccl": advise}
"""The advice about NCCL, as one check."""
