"""Contradictions between the launcher's variables and the Trainer, found before anybody waits for anybody.

Lightning reads the variables of the first launcher that it recognises and ignores the others. Each check here names one
way in which that goes wrong in silence, or as a wait for processes that nobody has started.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from lightning_distplus import env
from lightning_distplus.preflight.check import Check, Facts, Finding, Status
from lightning_distplus.preflight.host import interfaces

LIGHTNING = "LightningEnvironment"
SLURM = "SLURMEnvironment"
TORCHRUN = "TorchElasticEnvironment"
MPI = "MPIEnvironment"


def slurm(facts: Facts) -> Iterator[Finding]:
    """Slurm's job variables say how many processes were asked for; only srun starts them."""
    expected = facts.world_size
    if facts.environment != SLURM or expected is None:
        return
    if not facts.is_in_srun_step:
        if max(expected, facts.number(env.SLURM_NTASKS) or 1) > 1:
            yield Finding.error(
                f"This process runs in Slurm job {facts.text(env.SLURM_JOB_ID)} with no srun step: "
                f"nobody starts the other {expected - 1} of {expected} processes.",
                detail=facts.shown(env.SLURM_NTASKS, env.SLURM_NNODES, env.SLURM_STEP_ID)
                + " (a batch script has the first two as well; srun sets the last)",
                remedy=f"Start it by srun, in the batch script: {facts.srun()}{_unused_nodes(facts)}",
            )
        return
    tasks, nodes = facts.number(env.SLURM_STEP_NUM_TASKS), facts.number(env.SLURM_STEP_NUM_NODES)
    if tasks is not None and tasks != facts.started:
        yield Finding.error(
            f"srun started {tasks} processes, and Lightning counts {facts.started}, by SLURM_NTASKS.",
            detail=facts.shown(env.SLURM_NTASKS, env.SLURM_STEP_NUM_TASKS, env.SLURM_STEP_NUM_NODES),
            remedy=f"Give srun the layout of the run: {facts.srun()}",
        )
    elif nodes is not None and nodes != facts.num_nodes:
        yield Finding.error(
            f"srun started the processes on {nodes} nodes, and Trainer(num_nodes={facts.num_nodes}) expects "
            f"{facts.num_nodes}.",
            detail=facts.shown(env.SLURM_STEP_NUM_NODES, env.SLURM_STEP_NUM_TASKS),
            remedy=f"Set Trainer(num_nodes={nodes}), or start {facts.srun()}",
        )


def _unused_nodes(facts: Facts) -> str:
    count = facts.number(env.SLURM_NNODES) or 1
    if count <= (facts.num_nodes or 1):
        return ""
    return f"; the job has {count} nodes: Trainer(num_nodes={count}) uses them"


def launcher(facts: Facts) -> Iterator[Finding]:
    """A launcher whose ranks Lightning does not read: every process would call itself rank 0, or start more."""
    if facts.environment != LIGHTNING or facts.world_size is None:
        return
    starts_others = facts.text(env.LOCAL_RANK) is None
    mpi_size = facts.number(env.OMPI_COMM_WORLD_SIZE) or facts.number(env.PMI_SIZE) or 1
    if mpi_size > 1 and starts_others:
        yield Finding.error(
            f"mpirun started {mpi_size} processes, and Lightning does not know it: each of them calls itself rank 0.",
            detail=facts.shown(
                env.OMPI_COMM_WORLD_SIZE, env.OMPI_COMM_WORLD_RANK, env.PMI_SIZE, env.PMI_RANK, env.LOCAL_RANK
            ),
            remedy="Install mpi4py (Lightning reads MPI only through it), or start it by torchrun on each node: "
            + facts.torchrun(),
        )
    elif facts.text(env.RANK) and (facts.number(env.WORLD_SIZE) or 1) > 1 and starts_others:
        if facts.text(env.NODE_RANK) is None and facts.text(env.GROUP_RANK) is None:
            yield _kubernetes_job(facts)
    elif (facts.number(env.CROSS_SIZE) or 1) > 1 and facts.number(env.NODE_RANK) != facts.number(env.CROSS_RANK):
        yield Finding.error(
            "DeepSpeed's launcher started this process, and Lightning does not read its node rank: the ranks "
            "of all nodes begin at 0.",
            detail=facts.shown(env.CROSS_RANK, env.CROSS_SIZE, env.NODE_RANK, env.RANK, env.LOCAL_RANK),
            remedy=f"Start it by torchrun on each node: {facts.torchrun()} (DeepSpeed's strategy needs no launcher of "
            "its own)",
        )
    elif not starts_others:
        yield from _another_rank(facts)


def _kubernetes_job(facts: Facts) -> Finding:
    address, port = facts.text(env.MASTER_ADDR), facts.text(env.MASTER_PORT)
    line = facts.torchrun("$RANK", address or "<host of node 0>", port or "29500")
    return Finding.error(
        f"RANK={facts.text(env.RANK)} of WORLD_SIZE={facts.text(env.WORLD_SIZE)} is set (a Kubernetes "
        "PyTorchJob does so), and Lightning does not read it without LOCAL_RANK: every pod calls itself rank 0.",
        detail=facts.shown(env.RANK, env.WORLD_SIZE, env.LOCAL_RANK, env.NODE_RANK, env.MASTER_ADDR)
        + f"; Trainer(devices={facts.devices}, num_nodes={facts.num_nodes})",
        remedy=f"Make the pod's command a torchrun: {line}; or, with one process a pod, "
        "Trainer(plugins=[KubeflowEnvironment()])",
    )


def _another_rank(facts: Facts) -> Iterator[Finding]:
    for variable in (env.RANK, env.OMPI_COMM_WORLD_RANK, env.PMI_RANK):
        said = facts.number(variable)
        # A PyTorchJob's RANK is that of the pod; then it is the node's.
        if said is not None and said not in (facts.rank, facts.number(env.NODE_RANK)):
            yield Finding.error(
                f"The launcher calls this process rank {said}, and Lightning takes it for rank {facts.rank} "
                f"(node rank x {facts.devices} + local rank).",
                detail=facts.shown(variable, env.NODE_RANK, env.GROUP_RANK, env.LOCAL_RANK, env.WORLD_SIZE),
                remedy=f"Let the launcher set NODE_RANK too, or start it by torchrun on each node: {facts.torchrun()}",
            )
            return


def torchrun(facts: Facts) -> Iterator[Finding]:
    """Agents that do not know of each other, and a layout that only has the right product."""
    agents = facts.number(env.GROUP_WORLD_SIZE)
    if facts.environment != TORCHRUN or agents is None:
        return
    tasks = facts.number(env.SLURM_STEP_NUM_TASKS) if facts.is_in_srun_step else None
    if tasks is not None and tasks > 1 and tasks != agents:
        yield Finding.error(
            f"srun and torchrun both started this process, and do not know of each other: srun counts {tasks} "
            f"tasks and torchrun {agents} agents. They are separate runs that write the same files.",
            detail=facts.shown(env.SLURM_STEP_NUM_TASKS, env.SLURM_STEP_NUM_NODES, env.GROUP_WORLD_SIZE),
            remedy=f"One torchrun a node: srun --nodes {facts.num_nodes or 1} --ntasks-per-node 1 "
            f"{facts.torchrun('$SLURM_NODEID')}; or no torchrun: {facts.srun()}",
        )
    elif facts.started == facts.world_size and agents != facts.num_nodes:
        per_node = facts.number(env.LOCAL_WORLD_SIZE) or 1
        yield Finding(
            status=Status.ERROR if per_node > (facts.devices or 1) else Status.WARNING,
            subject=f"torchrun started {agents} agents, and Trainer(devices={facts.devices}, "
            f"num_nodes={facts.num_nodes}) expects {facts.num_nodes}; only the product is right.",
            detail=facts.shown(env.LOCAL_WORLD_SIZE, env.GROUP_WORLD_SIZE),
            remedy=f"Set Trainer(devices={per_node}, num_nodes={agents}), or start {facts.torchrun()}",
        )


def processes(facts: Facts) -> Iterator[Finding]:
    """Devices times nodes is the number of processes, for every strategy."""
    if facts.started is None or facts.started == facts.world_size:
        return
    devices, nodes = facts.devices, facts.num_nodes
    yield Finding.error(
        f"The launcher ({facts.environment}) started {facts.started} processes, but "
        f"Trainer(devices={devices}, num_nodes={nodes}) expects {devices} x {nodes} = {facts.world_size}.",
        detail=facts.shown(env.WORLD_SIZE, env.LOCAL_WORLD_SIZE, env.SLURM_NTASKS, env.SLURM_NNODES),
        remedy=f"Make them equal: torchrun --nnodes {nodes} --nproc-per-node {devices}, srun --nodes {nodes} "
        f"--ntasks-per-node {devices}, or change devices and num_nodes",
    )


def nodes(facts: Facts) -> Iterator[Finding]:
    """Several nodes need an address, a port and a node rank each; one node must not be told of more."""
    if facts.environment != LIGHTNING or facts.world_size is None or facts.num_nodes is None:
        return
    node_rank = facts.number(env.NODE_RANK)
    if node_rank is not None and node_rank >= facts.num_nodes:
        yield Finding.error(
            f"NODE_RANK={node_rank} lies outside 0..{facts.num_nodes - 1} of Trainer(num_nodes={facts.num_nodes}).",
            detail=facts.shown(env.NODE_RANK, env.NNODES, env.MASTER_ADDR),
            remedy=f"Set Trainer(num_nodes={node_rank + 1}) or more, the same on every node, or mend NODE_RANK",
        )
    elif facts.num_nodes > 1:
        yield from _nobody_said_where(facts)
    else:
        yield from _more_nodes_than_one(facts)


def _nobody_said_where(facts: Facts) -> Iterator[Finding]:
    missing = [variable for variable in (env.MASTER_ADDR, env.MASTER_PORT) if facts.text(variable) is None]
    has_node_rank = facts.text(env.NODE_RANK) is not None or facts.text(env.GROUP_RANK) is not None
    here, size, devices = facts.number(env.NODE_RANK) or 0, facts.world_size or 1, facts.devices or 1
    others = [str(node) for node in range(facts.num_nodes or 1) if node != here]
    detail = (
        f"{facts.shown(env.MASTER_ADDR, env.MASTER_PORT, env.NODE_RANK, env.LOCAL_RANK)}; this node would be ranks "
        f"{here * devices}..{here * devices + devices - 1} of 0..{size - 1} and wait for node rank {', '.join(others)}"
    )
    if missing:
        names = " and ".join(variable.name for variable in (*missing, *([] if has_node_rank else [env.NODE_RANK])))
        yield Finding.error(
            f"Trainer(num_nodes={facts.num_nodes}) needs {facts.num_nodes} nodes, and no launcher told this "
            f"process where they are: {names} unset, so that every node waits for the others alone.",
            detail=detail,
            remedy=f"Run on each node, with its own node rank: {facts.torchrun()} (in Slurm: {facts.srun()})",
        )
    elif not has_node_rank:
        yield Finding.warning(
            "NODE_RANK is unset, so that this node takes itself for node 0; only one node may.",
            detail=detail,
            remedy=f"Set NODE_RANK=0..{(facts.num_nodes or 1) - 1}, another on each node",
        )


def _more_nodes_than_one(facts: Facts) -> Iterator[Finding]:
    in_step = facts.number(env.SLURM_STEP_NUM_NODES) if facts.is_in_srun_step else None
    counts = {env.NNODES: facts.number(env.NNODES), env.PET_NNODES: facts.number(env.PET_NNODES)}
    counts[env.SLURM_STEP_NUM_NODES] = in_step
    for variable, count in counts.items():
        if count is not None and count > 1:
            yield Finding.error(
                f"{variable.name}={count}, and Trainer(num_nodes=1): each node would train alone and write the "
                "same files.",
                detail=facts.shown(variable, env.NODE_RANK, env.MASTER_ADDR),
                remedy=f"Set Trainer(num_nodes={count}), or unset {variable.name} where one node is meant",
            )
            return
    job_nodes = facts.number(env.SLURM_NNODES)
    address = facts.text(env.MASTER_ADDR)
    if in_step is None and job_nodes is not None and job_nodes > 1:
        yield Finding.warning(
            f"The Slurm job has {job_nodes} nodes, and Trainer(num_nodes=1) uses one.",
            detail=facts.shown(env.SLURM_NNODES, env.SLURM_STEP_ID),
            remedy=f"Set Trainer(num_nodes={job_nodes}) and start it by srun, or ask for one node",
        )
    elif facts.text(env.NODE_RANK) is not None and address is not None and not is_loopback(address):
        yield Finding.warning(
            "NODE_RANK and MASTER_ADDR are set as for several nodes, and Trainer(num_nodes=1).",
            detail=facts.shown(env.NODE_RANK, env.MASTER_ADDR),
            remedy="If there are more nodes, set Trainer(num_nodes=...): each of them trains alone now",
        )


def loopback(facts: Facts) -> Iterator[Finding]:
    """An address that leads every host to itself."""
    address = facts.text(env.MASTER_ADDR)
    if facts.environment not in (LIGHTNING, SLURM) or address is None or (facts.num_nodes or 1) == 1:
        return
    if is_loopback(address):
        yield Finding.error(
            f"MASTER_ADDR={address} leads every host to itself, and Trainer(num_nodes={facts.num_nodes}) needs "
            f"{facts.num_nodes} hosts.",
            detail=facts.shown(env.MASTER_ADDR, env.MASTER_PORT, env.NODE_RANK),
            remedy="Set MASTER_ADDR on every node to the name of node 0 in the network that they share; to play "
            'several nodes on one host: preflight={"loopback": "off"}',
        )


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host that asks; names are not resolved."""
    if address == "localhost" or address.startswith("localhost."):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def gpus(facts: Facts) -> Iterator[Finding]:
    """Each process of a node needs a GPU that it can see."""
    visible = facts.variables.get(env.CUDA_VISIBLE_DEVICES.name)
    if facts.accelerator != "cuda" or visible is None or facts.devices is None:
        return
    shown = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    needed = max(facts.devices, (facts.number(env.LOCAL_RANK) or 0) + 1)
    if len(shown) < needed:
        yield Finding.error(
            f"This process sees {len(shown)} GPUs, and Trainer(devices={facts.devices}) needs {needed} a node.",
            detail=f"CUDA_VISIBLE_DEVICES={visible!r}, {facts.shown(env.LOCAL_RANK)}",
            remedy="Show each process all GPUs of its node (in Slurm --gpus-per-node, not --gpus-per-task), or set "
            f"Trainer(devices={len(shown) or 1})",
        )
    elif len(set(shown)) < len(shown):
        yield Finding.error(
            "One GPU is named twice: two ranks would share it, and NCCL refuses that.",
            detail=f"CUDA_VISIBLE_DEVICES={visible!r}",
            remedy="Name each GPU once",
        )


LAUNCH_CHECKS: Mapping[str, Check] = {
    "slurm": slurm,
    "launcher": launcher,
    "torchrun": torchrun,
    "processes": processes,
    "nodes": nodes,
    "loopback": loopback,
    "gpus": gpus,
    "interfaces": interfaces,
}
"""The checks of the launch, by name; none of them opens a connection."""
