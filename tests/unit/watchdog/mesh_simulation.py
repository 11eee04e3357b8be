"""A mesh of ranks that run ahead of their GPUs until they block: who was hung is known, and their dumps are written.

The simulation knows programs, streams and meetings, and nothing of the judge. A rank's processor puts calls on streams
and goes on; only a synchronisation makes it wait. A call ends when all members have come and their streams are free.
Ranks hang before a call, hold the lock (their record is empty) or die (their record ends early, or there is none).
"""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HABITS = (
    "all ranks of the last stage read the loss",
    "all ranks of the last stage read a result before the loss",
    "the first rank of each tensor-parallel group reads the loss",
    "the last rank reads every second loss",
    "all ranks read what the gradients tell",
    "the first rank of each host reads what the gradients tell",
    "rank 0 synchronizes before the norm",
    "all ranks synchronize before each backward",
    "the processors are slow",
)
"""What a program may do otherwise, above all where it waits for its GPU."""
RANKS_OF_HOST = 8
FAULTS = ("hangs", "holds the lock", "dies", "dies without a dump")
SHAPES = [(2, 2, 4), (4, 2, 2), (2, 4, 2), (4, 4, 2), (2, 4, 4), (8, 2, 2), (4, 4, 4), (8, 2, 4), (4, 4, 1), (16, 1, 2)]
STEPS = 2
LEAVING_S = 0.5  # a process that raises takes a while to end; what it has launched runs on until then


@dataclass
class Node:
    """A kernel on a stream of one rank, or a batch of sends and receives."""

    rank: int
    duration: float
    key: tuple[Any, ...] = ()
    ends: list[tuple[Any, ...]] = field(default_factory=list)
    open_deps: int = 0
    ready: float = 0.0
    done: float | None = None
    waiters: list[Node] = field(default_factory=list)
    is_ready: bool = False


@dataclass
class Mesh:
    """What one seed draws: the shape of the job, its habits, its faults."""

    seed: int
    habit: str = ""
    """One of ``HABITS``."""
    kinds: tuple[str, ...] = FAULTS
    guilty: set[int] = field(default_factory=set)
    faults: dict[int, str] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        self.dp, self.pp, self.tp = draw.choice(SHAPES)
        self.size = self.dp * self.pp * self.tp
        self.layers, self.batches = draw.randint(1, 3), self.pp * draw.choice([1, 2])
        self.syncs_layers = draw.random() < 0.3  # as experts do, whose sizes the processor must know
        self.syncs_sends = draw.random() < 0.3
        self.overlaps = draw.random() < 0.7
        self.is_eager = draw.random() < 0.2
        self.logs_alone = draw.random() < 0.3  # `if rank == 0: print(loss.item())`
        self.is_timed, self.only_active = draw.random() < 0.3, draw.random() < 0.05
        self.ring = draw.choice([96, 300, 2000])
        self.skew = [draw.uniform(-0.02, 0.02) for _ in range(self.size)]
        self.groups: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", list(range(self.size)))}
        self._add("mesh_tp", lambda p, d, t: (p, d))
        self._add("mesh_dp", lambda p, d, t: (p, t))
        self._add("mesh_pp", lambda p, d, t: (d, t))
        self._add("model_parallel", lambda p, d, t: (d,))
        self.of = {(rank, desc): name for name, (desc, ranks) in self.groups.items() for rank in ranks}
        assert self.habit in ("", *HABITS)
        self.programs = [list(self._with_habit(rank)) for rank in range(self.size)]
        self.pace = [random.Random(f"{self.seed}-{rank}") for rank in range(self.size)]
        self.costs = [[self._cost(rank, one) for one in program] for rank, program in enumerate(self.programs)]

    def _add(self, desc: str, key: Any) -> None:
        found: dict[Any, list[int]] = defaultdict(list)
        for rank in range(self.size):
            found[key(*self.place(rank))].append(rank)
        for ranks in found.values():
            self.groups[str(len(self.groups))] = (desc, ranks)

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def _cost(self, rank: int, one: tuple[Any, ...]) -> float:
        draw = self.pace[rank]
        if one[0] == "compute":
            return one[1] * draw.uniform(0.9, 1.3)
        return draw.uniform(20e-6, 150e-6) * (10 if self.habit == "the processors are slow" else 1)

    # -- the program of one rank ------------------------------------------------------------------------------------

    def _program(self, rank: int) -> Iterator[tuple[Any, ...]]:
        stage = self.place(rank)[0]
        back, ahead = rank - self.dp * self.tp, rank + self.dp * self.tp
        is_first, is_last = stage == 0, stage == self.pp - 1
        warm = min(self.pp - stage - 1, self.batches)
        yield ("coll", "0", "broadcast", [16], "start")
        yield ("wait", "start")
        for step in range(STEPS):
            if not is_first:
                yield from self._sends(("recv", back))
            for batch in range(self.batches + warm):
                if batch < self.batches:
                    yield from self._layers("forward", step, batch)
                    if is_last:
                        yield ("coll", self.of[rank, "mesh_tp"], "all_reduce", [1], "loss")
                        yield ("wait", "loss")
                        if self.logs_alone and rank == self.size - 1:
                            yield ("item", "loss")
                is_ahead, is_behind = batch < warm, batch >= self.batches
                ends: list[tuple[str, int]] = [] if is_last or is_behind else [("send", ahead)]
                if not is_last and not is_ahead:
                    ends.append(("recv", ahead))
                yield from self._sends(*ends)
                if is_ahead:
                    if not is_first and batch + 1 < self.batches:
                        yield from self._sends(("recv", back))
                    continue
                yield from self._layers("backward", step, batch - warm)
                if not is_first:
                    more = [("recv", back)] if batch + 1 < self.batches else []
                    yield from self._sends(("send", back), *more)
            yield from self._end_of_step(rank, step)
        yield ("coll", "0", "all_reduce", [1], "end")
        yield ("item", "end")

    def _with_habit(self, rank: int) -> Iterator[tuple[Any, ...]]:
        before, num_losses = "", 0
        for one in self._program(rank):
            num_losses += one == ("item", "loss")
            kind, is_of_grads = one[0], str(one[-1]).startswith("grads")
            ahead: list[tuple[Any, ...]] = []
            behind: list[tuple[Any, ...]] = []
            match self.habit:
                case "all ranks synchronize before each backward":
                    ahead = [("sync",)] * (one == ("compute", self.draw_time("backward")) and before != "wait")
                case "rank 0 synchronizes before the norm":
                    ahead = [("sync",)] * (rank == 0 and one[4:] == ("norm",))
                case "all ranks of the last stage read a result before the loss":
                    ahead = [("item", "tp")] * (one[4:] == ("loss",))
                case "all ranks of the last stage read the loss":
                    behind = [("item", "loss")] * (one == ("wait", "loss"))
                case "the first rank of each tensor-parallel group reads the loss":
                    behind = [("item", "loss")] * (one == ("wait", "loss") and not self.place(rank)[2])
                case "all ranks read what the gradients tell":
                    behind = [("item", one[-1])] * (kind == "wait" and is_of_grads)
                case "the first rank of each host reads what the gradients tell":
                    behind = [("item", one[-1])] * (kind == "coll" and is_of_grads and rank % RANKS_OF_HOST == 0)
                case "the last rank reads every second loss" if one == ("item", "loss") and num_losses % 2:
                    continue
            yield from (*ahead, one, *behind)
            before = kind

    def _layers(self, way: str, step: int, batch: int) -> Iterator[tuple[Any, ...]]:
        for layer in range(self.layers):
            yield ("compute", self.draw_time(way))
            if way == "forward" and batch == 0 and step and self.overlaps:
                yield ("wait", f"weights {layer}")
            yield ("coll", "mesh_tp", "_all_gather_base", [64], "tp")
            yield ("wait", "tp")
            if self.syncs_layers:
                yield ("item", "tp")
            yield ("compute", self.draw_time(way))
            yield ("coll", "mesh_tp", "_reduce_scatter_base", [256], "tp")
            yield ("wait", "tp")
            if way == "backward" and batch == self.batches - 1 and self.overlaps:
                yield ("coll", "mesh_dp", "_reduce_scatter_base", [1024 + layer], f"grads {layer}")

    @staticmethod
    def draw_time(way: str) -> float:
        return 1e-3 if way == "forward" else 2e-3

    def _sends(self, *ends: tuple[str, int]) -> Iterator[tuple[Any, ...]]:
        if ends:
            yield ("p2p", "mesh_pp", list(ends))
            yield ("wait", "p2p")
            if self.syncs_sends:
                yield ("sync",)

    def _end_of_step(self, rank: int, step: int) -> Iterator[tuple[Any, ...]]:
        for layer in range(self.layers):
            if not self.overlaps:
                yield ("coll", "mesh_dp", "_reduce_scatter_base", [1024 + layer], f"grads {layer}")
            yield ("wait", f"grads {layer}")
        yield ("coll", "model_parallel", "all_reduce", [1], "norm")
        yield ("item", "norm")
        yield ("compute", 1e-3)
        for layer in range(self.layers):
            yield ("coll", "mesh_dp", "_all_gather_base", [512 + layer], f"weights {layer}")
            if not self.overlaps:
                yield ("wait", f"weights {layer}")

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self, stops: dict[int, int], deaths: dict[int, float]) -> None:
        """Runs until nobody moves; ``stops`` are indices of programs, ``deaths`` are times."""
        self.stops, self.deaths = stops, deaths
        self.clock = [0.0] * self.size
        self.next = [0] * self.size
        self.times: list[list[float]] = [[] for _ in range(self.size)]
        self.tails: list[list[Node]] = [[] for _ in range(self.size)]
        self.streams: dict[tuple[int, Any], Node] = {}
        self.handles: dict[tuple[int, str], Node] = {}
        self.counts: dict[tuple[Any, ...], int] = defaultdict(int)
        self.met: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
        self.entries: list[list[dict[str, Any]]] = [[] for _ in range(self.size)]
        self.asleep: dict[int, list[int]] = defaultdict(list)
        todo = list(range(self.size))
        while todo:
            rank = todo.pop()
            self._drive(rank)
            todo += self.woken
        self.fired = {rank for rank, stop in stops.items() if self.next[rank] >= stop}

    def _drive(self, rank: int) -> None:
        self.woken: list[int] = []
        program = self.programs[rank]
        while self.next[rank] < len(program):
            if self.next[rank] >= self.stops.get(rank, len(program)) or self.clock[rank] >= self.deaths.get(rank, 1e9):
                if self.next[rank] == self.leaves.get(rank):
                    self.deaths[rank] = self.clock[rank] + LEAVING_S
                return
            one, cost = program[self.next[rank]], self.costs[rank][self.next[rank]]
            if one[0] in ("item", "sync"):
                last = [self.handles[rank, one[1]]] if one[0] == "item" else self._streams(rank)
                waits = [*self.tails[rank], *last]
                unfinished = next((node for node in waits if node.done is None), None)
                if unfinished is not None:
                    self.asleep[id(unfinished)].append(rank)
                    return
                self.clock[rank] = max([self.clock[rank], *(node.done or 0.0 for node in waits)])
            self.clock[rank] += cost if one[0] != "compute" else 20e-6
            self.times[rank].append(self.clock[rank])
            self.next[rank] += 1
            if one[0] == "compute":
                self.tails[rank] = [self._put(Node(rank, cost), self.tails[rank])]
            elif one[0] == "wait" and (rank, one[1]) in self.handles:
                self.tails[rank] = [*self.tails[rank], self.handles[rank, one[1]]]
            elif one[0] == "coll":
                self._collective(rank, *one[1:])
            elif one[0] == "p2p":
                self._batch(rank, one[1], one[2])

    def _streams(self, rank: int) -> list[Node]:
        """The last kernel of every stream: `torch.cuda.synchronize()` waits for all of the device, not for one."""
        return [node for (owner, _), node in self.streams.items() if owner == rank]

    def _put(self, node: Node, deps: list[Node]) -> Node:
        node.ready = self.clock[node.rank]
        for dep in deps:
            if dep.done is None:
                dep.waiters.append(node)
                node.open_deps += 1
            else:
                node.ready = max(node.ready, dep.done)
        if not node.open_deps:
            self._on_ready(node)
        return node

    def _collective(self, rank: int, group: str, op: str, shape: list[int], handle: str) -> None:
        name = self.of.get((rank, group), group)
        ranks = self.groups[name][1]
        self.counts[rank, name] += 1
        node = Node(rank, 200e-6, key=(name, self.counts[rank, name], len(ranks)))
        self._record(rank, name, f"nccl:{op}", shape, node, is_p2p=False)
        self._on_stream(rank, name, node, handle)

    def _batch(self, rank: int, group: str, ends: list[tuple[str, int]]) -> None:
        name = self.of[rank, group]
        ranks = self.groups[name][1]
        node = Node(rank, 100e-6)
        self.counts[rank, name, "p2p"] += 1
        for op, peer in ends:
            pair = (rank, peer) if op == "send" else (peer, rank)
            self.counts[rank, name, op, peer] += 1
            node.ends.append((name, *pair, self.counts[rank, name, op, peer], op))
            arrow = "->" if op == "send" else "<-"
            title = f"nccl:{op} {ranks.index(rank)}{arrow}{ranks.index(peer)}"
            self._record(rank, name, title, [4096], node if len(ends) == 1 else None, is_p2p=True)
        if len(ends) > 1:  # one kernel, whose own entry comes last; those of its parts never change their state
            self._record(rank, name, "nccl:coalesced", None, node, is_p2p=True)
        stream = name if len(ends) > 1 else (name, tuple(sorted((rank, ends[0][1]))))
        self._on_stream(rank, stream, node, "p2p")

    def _on_stream(self, rank: int, stream: Any, node: Node, handle: str) -> None:
        before = self.streams.get((rank, stream))
        self.streams[rank, stream] = self.handles[rank, handle] = node
        self._put(node, [*self.tails[rank], *([before] if before else [])])

    def _record(self, rank: int, name: str, title: str, shape: list[int] | None, node: Any, *, is_p2p: bool) -> None:
        sizes = [] if shape is None else [shape]
        self.entries[rank].append({
            "pg_id": int(name), "process_group": [name, self.groups[name][0]],
            "collective_seq_id": self.counts[rank, name],
            "p2p_seq_id": self.counts[rank, name, "p2p"] if is_p2p else 0,
            "profiling_name": title, "input_sizes": sizes, "output_sizes": sizes,
            "input_dtypes": ["BFloat16"] * len(sizes), "output_dtypes": ["BFloat16"] * len(sizes),
            "time_created_ns": self.clock[rank], "is_p2p": is_p2p, "state": node,
        })  # fmt: skip

    def _on_ready(self, node: Node) -> None:
        node.is_ready = True
        if node.ends:
            for name, source, target, count, op in node.ends:
                self.met[name, source, target, count].append(node)
                if self.is_eager and op == "send":
                    self.met[name, source, target, count].append(node)
            for *pair, _ in node.ends:
                for one in self.met[tuple(pair)]:
                    self._finish_batch(one)
        elif node.key:
            self.met[node.key].append(node)
            nodes = self.met[node.key]
            if len(nodes) == node.key[2]:
                self._finish(nodes, max(one.ready for one in nodes) + node.duration)
        else:
            self._finish([node], node.ready + node.duration)

    def _finish_batch(self, node: Node) -> None:
        meetings = [self.met[tuple(pair)] for *pair, _ in node.ends]
        if node.done is None and all(len(nodes) >= 2 for nodes in meetings):
            both = {id(one): one for nodes in meetings for one in nodes}.values()
            end = max(one.ready for one in both) + node.duration
            if all(end <= self.deaths.get(one.rank, 1e9) for one in both):
                self._finish([node], end)

    def _finish(self, nodes: list[Node], end: float) -> None:
        if any(end > self.deaths.get(node.rank, 1e9) for node in nodes):
            return
        for node in nodes:
            node.done = end
            self.woken += self.asleep.pop(id(node), [])
        for node in nodes:
            for waiter in node.waiters:
                waiter.ready = max(waiter.ready, end)
                waiter.open_deps -= 1
                if not waiter.open_deps:
                    self._on_ready(waiter)

    # -- faults and dumps -------------------------------------------------------------------------------------------

    def break_down(self) -> Mesh:
        """Runs once whole, and once more with one to three faults at about the same time."""
        self.run({}, {})
        assert all(self.next[rank] == len(self.programs[rank]) for rank in range(self.size)), "the program is at fault"
        chosen = self.draw.sample(range(self.size), self.draw.choice([1, 1, 2, 2, 3]))
        length = len(self.programs[chosen[0]])
        begin = self.times[chosen[0]][self.draw.randrange(length // 4, length * 3 // 4)]
        stops, deaths = {}, {}
        for rank in chosen:
            moment = begin + self.draw.uniform(0, 2e-3)
            kind = self.faults[rank] = self.draw.choice(self.kinds)
            if kind == "dies without a dump":
                deaths[rank] = moment
                continue
            length = len(self.programs[rank])
            stop = next((i for i, at in enumerate(self.times[rank]) if at >= moment), length)
            while stop < length and self.programs[rank][stop][0] not in ("coll", "p2p"):
                stop += 1
            stops[rank] = stop
            if kind == "dies" and stop < length:
                self.leaves[rank] = stop
        self.run(stops, deaths)
        self.guilty = self.fired | set(deaths)
        return self

    def write(self, folder: Path) -> Path:
        """Writes the dumps as torch does, one per rank, in JSON or pickled."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.size):
            fault = self.faults.get(rank, "") if rank in self.guilty else ""
            if fault == "dies without a dump":
                continue
            written = [] if fault == "holds the lock" else self._entries(rank)
            config = {
                name: {"name": name, "desc": desc, "ranks": str(ranks)}
                for name, (desc, ranks) in self.groups.items()
                if rank in ranks
            }
            dump = {"version": "2.10", "pg_config": config, "entries": written}
            if self.seed % 2:
                (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
            else:
                (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
        return folder

    def _entries(self, rank: int) -> list[dict[str, Any]]:
        return [found for entry in self.entries[rank][-self.ring :] if (found := self._entry(entry, rank)) is not None]

    def _entry(self, entry: dict[str, Any], rank: int) -> dict[str, Any] | None:
        node = entry["state"]
        is_done = node is not None and node.done is not None
        if is_done and self.only_active:
            return None
        started = node is not None and node.is_ready and self.is_timed
        return {
            **entry,
            "process_group": tuple(entry["process_group"]) if self.seed % 2 else entry["process_group"],
            "state": "completed" if is_done else "started" if started else "scheduled",
            "retired": is_done,
            "time_created_ns": round((1.7e9 + entry["time_created_ns"] + self.skew[rank]) * 1e9),
        }
