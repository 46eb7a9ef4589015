"""Forest: a graph of rollouts in which equal observations are one node."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import ConfigError, DataError, MissingFieldError, MissingRowError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.maps import RowMap
from mouse_core.nested import FieldKey, as_array, flatten, key_of, nest, path_of, stack
from mouse_core.replay.transforms.fields import end_codes
from mouse_core.spec import check_list
from mouse_core.trees.tree import Steps, Tree, as_arrays

_FORMAT = 1

Integers = npt.NDArray[np.int64]


class Graph(NamedTuple):
    """The part of a forest that is reachable from a root: vertices and edges. Vertex 0 is the root.

    Attributes:
        nodes: The index of each node in the forest: first the vertices, then the nodes inside edges.
        edges: The parent and the child vertex of each edge, ``[E, 2]``, ordered by the parent.
        bounds: Edge e consists of the steps ``bounds[e] .. bounds[e + 1] - 1``.
        steps: For each step, the index of its edge in the forest.
        ended: Whether every transition of each edge terminated its episode.
        vertices: The number of vertices.
    """

    nodes: Integers
    edges: Integers
    bounds: Integers
    steps: Integers
    ended: npt.NDArray[np.bool_]
    vertices: int


def collect(forest: Links, root: int, max_depth: int | None, compact: bool) -> Graph:
    """Return the graph that is reachable from a node.

    Args:
        forest: The links between the forest's nodes.
        root: The node.
        max_depth: The largest number of edges between the root and a vertex; None: no limit.
        compact: Whether a chain of edges without branches becomes one edge.
    """
    out = _reachable(forest, root, None if compact else max_depth)
    if compact:
        kept = _branching(forest, out, root)
        chains = {node: [_chain(forest, out, edge, kept) for edge in out.get(node, ())] for node in kept}
    else:
        chains = {node: [[edge] for edge in edges] for node, edges in out.items()}
    return _numbered(forest, root, max_depth, chains)


class Links(NamedTuple):
    """The links between the nodes of a forest, as memory views, because single items of memory views are read quickly.

    Attributes:
        latest: The newest edge that leaves each node; -1 if no edge leaves the node.
        previous: For each edge, the previous edge that leaves the same node; -1 if there is no previous edge.
        target: The node to which each edge leads.
        terminated, count: For each edge, the number of episodes that terminated with the edge, and the number of
            transitions of the edge.
    """

    latest: Any
    previous: Any
    target: Any
    terminated: Any
    count: Any

    def leaving(self, node: int) -> list[int]:
        """Return the edges that leave a node, in the order of their first transitions."""
        found, edge = [], self.latest[node]
        while edge >= 0:
            found.append(edge)
            edge = self.previous[edge]
        return found[::-1]

    def ended(self, edge: int) -> bool:
        """Return whether every transition of an edge terminated its episode."""
        return bool(self.terminated[edge] == self.count[edge])


def _reachable(forest: Links, root: int, max_depth: int | None) -> dict[int, list[int]]:
    """Return the edges that leave each node that is reachable from the root. Edges whose transitions all terminated are
    not followed.
    """
    out: dict[int, list[int]] = {}
    waiting, seen = deque([(root, 0)]), {root}
    while waiting:
        node, depth = waiting.popleft()
        if max_depth is not None and depth >= max_depth:
            continue
        out[node] = forest.leaving(node)
        for edge in out[node]:
            target = forest.target[edge]
            if not forest.ended(edge) and target not in seen:
                seen.add(target)
                waiting.append((target, depth + 1))
    return out


def _branching(forest: Links, out: dict[int, list[int]], root: int) -> set[int]:
    """Return the nodes that become vertices: the root, leaves, and nodes with several incoming or outgoing edges."""
    reached: dict[int, int] = {}
    for edges in out.values():
        for edge in edges:
            target = forest.target[edge]
            reached[target] = reached.get(target, 0) + 1
    return {root} | {node for node, times in reached.items() if times > 1 or len(out.get(node, ())) != 1}


def _chain(forest: Links, out: dict[int, list[int]], edge: int, kept: set[int]) -> list[int]:
    """Return the chain of edges from ``edge`` to the next node in ``kept``."""
    chain = [edge]
    while (target := forest.target[chain[-1]]) not in kept:
        chain.append(out[target][0])
    return chain


def _numbered(forest: Links, root: int, max_depth: int | None, chains: dict[int, list[list[int]]]) -> Graph:
    """Return the graph, with vertices ordered by their distance from the root."""
    number, depths = {root: 0}, [0]
    order, edges, bounds, steps = [root], [], [0], []
    ended = []
    place = 0
    while place < len(order):
        node, depth = order[place], depths[place]
        if max_depth is None or depth < max_depth:
            for chain in chains.get(node, ()):
                target = forest.target[chain[-1]]
                if target not in number:
                    number[target] = len(order)
                    order.append(target)
                    depths.append(depth + 1)
                edges.append((place, number[target]))
                steps += chain
                bounds.append(len(steps))
                ended.append(forest.ended(chain[-1]))
        place += 1
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    within = [forest.target[edge] for edge in steps]
    inner = list(dict.fromkeys(node for node in within if node not in number))
    return Graph(
        nodes=np.array(order + inner, np.int64),
        edges=pairs,
        bounds=np.array(bounds, np.int64),
        steps=np.array(steps, np.int64),
        ended=np.array(ended, np.bool_),
        vertices=len(order),
    )


Fields = dict[FieldKey, npt.NDArray[Any]]
_DONE = ("done", "terminated", "truncated")
_TIMES = ("time", "episode_step")


class Transitions(NamedTuple):
    """The fields of ``n`` transitions.

    Attributes:
        before, after: The observations before and after the action, fields ``[n, ...]``.
        actions: The actions, fields ``[n, ...]``.
        rewards: The rewards, float64 ``[n]``.
        dones: Done codes (0 alive, 1 terminal, 2 truncated), int8 ``[n]``.
        extra: Further fields ``[n, ...]``.
    """

    before: Fields
    after: Fields
    actions: Fields
    rewards: npt.NDArray[np.float64]
    dones: npt.NDArray[np.int8]
    extra: Fields


class _Rows:
    """Gives access to the fields of rows as arrays ``[B, T, ...]``. The first ``batch_dims`` axes of the rows are batch
    axes.
    """

    def __init__(self, given: dict[FieldKey, Any], batch_dims: int) -> None:
        self.given, self.batch_dims = given, batch_dims
        self.shape: tuple[int, ...] | None = None
        self.mask = self.number("mask") != 0 if "mask" in given else None

    def has(self, key: FieldKey) -> bool:
        return key in self.given

    def field(self, key: FieldKey) -> npt.NDArray[Any]:
        """Return a field as an array ``[B, T, ...]``."""
        if key not in self.given:
            raise MissingFieldError(f"rows: expected a field {key!r}, found {list(self.given)}")
        array = as_array(self.given[key], where=f"rows: {key!r}")
        shape = array.shape[: self.batch_dims]
        if len(shape) < self.batch_dims or self.shape not in (None, shape):
            expected = self.shape or f"{self.batch_dims} axes of rows"
            raise SchemaError(
                f"rows: {key!r}: expected {expected}, found shape {array.shape}; "
                "batch_dims sets how many axes count rows"
            )
        self.shape = shape
        return array.reshape(*(1,) * (2 - len(shape)), *array.shape)

    def fields(self, keys: Sequence[FieldKey]) -> Fields:
        return {key: self.field(key) for key in keys}

    def number(self, key: FieldKey) -> npt.NDArray[Any]:
        """Return a field with one number for each row as an array ``[B, T]``; a last axis of length 1 is removed."""
        array = self.field(key)
        if array.shape[2:] not in ((), (1,)) or array.dtype.kind not in "biuf":
            raise SchemaError(
                f"rows: {key!r}: expected a number in each row, found {array.dtype} of shape {array.shape[2:]}; "
                "batch_dims sets how many axes count rows"
            )
        return array.reshape(array.shape[:2])

    def dones(self, prefix: tuple[str, ...]) -> npt.NDArray[np.int8] | None:
        """Return done codes 0, 1 or 2, ``[B, T]``, computed from the fields "done", "terminated" and "truncated" under
        a prefix; None if the rows have none of these fields.
        """
        keys = {name: (*prefix, name) if prefix else name for name in _DONE}
        flags = {name: self.number(key) for name, key in keys.items() if self.has(key)}
        return end_codes(flags, "done", where="rows") if flags else None


def _batch_dims(given: dict[FieldKey, Any], batch_dims: int | None) -> int:
    if batch_dims is None:
        return max(1, min(np.ndim(given["mask"]), 2)) if "mask" in given else 1
    if batch_dims not in (0, 1, 2):
        raise ConfigError(f"batch_dims: expected 0, 1 or 2, found {batch_dims!r}")
    return batch_dims


_NUMBERS = ("source", "target", "previous", "count", "terminated", "truncated")
_EDGE = np.dtype([(name, "i8") for name in _NUMBERS] + [("reward", "f8")])
"""The dtype of an edge of a forest: its two nodes, the previous edge of the same source node (or -1), the counts of its
transitions and of ends of episodes, and the sum of its rewards.
"""


class Forest:
    """A graph of transitions: each observation is a node, and each action is an edge to the next observation.

    Observations that are equal byte by byte are one node, also if they are from different rollouts. An edge is
    identified by a node, an action and the next node, so an action with several outcomes (next nodes) has an edge for
    each outcome. An edge stores the count of its transitions, the sum of their rewards, and the count of ends of
    episodes. The order of transitions determines the indices of nodes and edges, and the values of ``extra``. The
    forest is kept in memory; ``dumps`` writes the forest to a file.

    Args:
        observation: Fields of the observation.
        action: Fields of the action.
        reward: The field with the reward.
        extra: Further fields of edges; an edge has the values of its latest transition.

    Raises:
        ConfigError: An argument is not a list of fields, or a required list is empty.

    Example:
        >>> import numpy as np
        >>> from mouse_core.trees import Forest
        >>> forest = Forest()
        >>> rows = {"observation": np.array([0, 1]), "action": np.array([5, 6])}
        >>> edges = forest.extend(rows | {"next": {"observation": np.array([1, 2]), "reward": np.array([0.0, 1.0])}})
        >>> forest
        Forest(3 nodes, 2 edges)
        >>> forest.get_tree({"observation": 0})
        Tree(2 vertices, 1 edges, 2 steps)
    """

    def __init__(
        self,
        *,
        observation: Iterable[FieldKey] = ("observation",),
        action: Iterable[FieldKey] = ("action",),
        reward: FieldKey = "reward",
        extra: Iterable[FieldKey] = (),
    ) -> None:
        self._observation, self._action = check_list("observation", observation), check_list("action", action)
        self._reward, self._extra_fields = reward, check_list("extra", extra)
        if not self._observation:
            raise ConfigError("observation: expected at least one field, found none")
        self._forget()

    def _forget(self) -> None:
        self._node_map = RowMap(keys=self._observation)
        self._edge_map = RowMap()
        self._extra: RowMap | None = RowMap() if self._extra_fields else None
        self._memory = np.empty(0, _EDGE)
        # The newest edge that leaves each node, -1 without an edge; also for future nodes.
        self._latest = np.empty(0, np.int64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_nodes} nodes, {len(self)} edges)"

    def __len__(self) -> int:
        """The number of edges."""
        return len(self._edge_map)

    @property
    def num_nodes(self) -> int:
        """The number of nodes, which is the number of distinct observations."""
        return len(self._node_map)

    @property
    def nbytes(self) -> int:
        """The size of the forest in memory in bytes."""
        parts = (self._node_map, self._edge_map, self._extra, self._memory, self._latest)
        return sum(part.nbytes for part in parts if part is not None)

    # ------------------------------------------------------------------ writing

    def extend(self, rollouts: Any, *, batch_dims: int | None = None) -> Integers:
        """Add the transitions of rollouts.

        Args:
            rollouts: Nested dicts of arrays, or a list of single rows. With a field "next", each row is a transition
                (TED): the observation and action are at the root, and the next observation, reward and done are in
                "next"; reward and done may also be at the root. Without "next", rows have the alignment "arrived", as
                in stores: the action, reward and done of a row led to the row's observation. Episodes then end where
                "done" is not 0, and begin where "time" or "episode_step" is 0. Rows of alignment "outgoing" must have a
                field "next". "done" is 0, 1 (terminal) or 2 (truncated); alternatively rows have the flags "done",
                "terminated" and "truncated". Rows that a field "mask" excludes are ignored.
            batch_dims: The number of batch axes: 1 for ``[n]``, 2 for windows ``[B, T]``, 0 for a single transition. By
                default the number of axes of "mask", or 1 if there is no mask.

        Returns:
            The edge of each transition, int64 ``[n]``, in the order of the transitions.

        Raises:
            MissingFieldError: The rows lack an observation, an action, or a field that marks where episodes end.
            SchemaError: The shape or dtype of a field differs from earlier rows.
            DataError: A reward is not finite, or a code of ``done`` is unknown. The forest is unchanged.
        """
        given = self._transitions(rollouts, batch_dims)
        number = len(given.rewards)
        if not number:
            return np.empty(0, np.int64)
        self._check(given)
        # Side by side, so that nodes are numbered in the order of time.
        both = {key: np.stack([array, given.after[key]], axis=1) for key, array in given.before.items()}
        nodes = self._node_map.extend(nest({key: array.reshape(-1, *array.shape[2:]) for key, array in both.items()}))
        sources, targets = nodes[::2], nodes[1::2]
        before = len(self._edge_map)
        edges: Integers = self._edge_map.extend({"source": sources, "target": targets, **_actions(given.actions)})
        self._grow(before)
        for name, more in (
            ("count", np.ones(number, np.int64)),
            ("terminated", given.dones == 1),
            ("truncated", given.dones == 2),
            ("reward", given.rewards),
        ):
            np.add.at(self._memory[name], edges, more)
        self._memory["source"][edges], self._memory["target"][edges] = sources, targets
        self._link(before)
        if self._extra is not None:
            self._extra.extend({"edge": edges}, nest(given.extra))
        return edges

    def _transitions(self, rollouts: Any, batch_dims: int | None) -> Transitions:
        """Convert rollouts to transitions. Rows with a field "next" have the layout TED; other rows have the alignment
        "arrived".

        Raises:
            SchemaError, MissingFieldError, DataError, ConfigError: See ``extend``.
        """
        if hasattr(rollouts, "snapshot"):
            raise SchemaError(f"rollouts: expected rows, found {rollouts!r:.100}; store[:] returns the rows of a store")
        if isinstance(rollouts, list):
            rollouts = stack(rollouts)
        given = flatten(rollouts)
        rows = _Rows(given, _batch_dims(given, batch_dims))
        ahead = any(isinstance(key, tuple) and key[0] == "next" for key in given)
        seen, actions, extra = (
            rows.fields(self._observation),
            rows.fields(self._action),
            rows.fields(self._extra_fields),
        )
        if ahead:  # each row is a transition
            after = {key: rows.field(("next", *path_of(key))) for key in self._observation}
            places: list[FieldKey] = [("next", *path_of(self._reward)), self._reward]
            dones = rows.dones(("next",))
        # a transition leads from each row to the next row of its episode, which has the transition's action and reward
        else:
            after, places, dones = seen, [self._reward], None
        dones = rows.dones(()) if dones is None else dones
        first, second = (slice(None), slice(None)) if ahead else (slice(None, -1), slice(1, None))
        shape = next(iter(seen.values())).shape[:2]
        reward = next(filter(rows.has, places), None)
        rewards = np.zeros(shape) if reward is None else rows.number(reward)
        chosen = np.ones(shape, np.bool_)[:, first]
        if rows.mask is not None:
            chosen &= rows.mask[:, first] & rows.mask[:, second]
        if not ahead:
            times = [rows.number(name) for name in _TIMES if rows.has(name)]
            if dones is None and not times:
                raise MissingFieldError(
                    "rows: expected a field 'next', or a field such as 'done' that marks the ends of episodes, found "
                    f"{list(rows.given)}"
                )
            if dones is not None:
                chosen &= dones[:, first] == 0
            for time in times:
                chosen &= time[:, second] != 0
        rewards = rewards[:, second][chosen].astype(np.float64)
        wrong = np.flatnonzero(~np.isfinite(rewards))
        if wrong.size:
            raise DataError(f"rows: {self._reward!r}: expected finite numbers, found {rewards[wrong[0]]}")
        return Transitions(
            before={key: array[:, first][chosen] for key, array in seen.items()},
            after={key: array[:, second][chosen] for key, array in after.items()},
            actions={key: array[:, second][chosen] for key, array in actions.items()},
            rewards=rewards,
            dones=np.zeros(len(rewards), np.int8) if dones is None else dones[:, second][chosen],
            extra={key: array[:, second][chosen] for key, array in extra.items()},
        )

    def _grow(self, before: int) -> None:
        """Enlarge the memory so that every edge has a place; edges from index ``before`` on are new."""
        length = len(self._edge_map)
        if length > len(self._memory):
            larger = np.empty(max(length, len(self._memory) * 3 // 2, 16), _EDGE)
            larger[:before] = self._memory[:before]
            self._memory = larger
        self._memory[before:length] = 0

    def _link(self, before: int) -> None:
        """Link the edges from index ``before`` on: each new edge becomes the newest edge of its source node."""
        if self.num_nodes > len(self._latest):  # at least twice as long, so that it is copied seldom
            self._latest = np.append(self._latest, np.full(self.num_nodes, -1))
        sources = self._memory["source"][before : len(self)]
        order = np.argsort(sources, kind="stable")
        sources, new = sources[order], before + order
        # Example: the edges 7, 9, 8 have the sources 3, 3, 5. The previous edge of edge 7 is the newest edge of node 3,
        # of edge 9 it is edge 7, and of edge 8 it is the newest edge of node 5.
        same = np.diff(sources, prepend=-1) == 0
        self._memory["previous"][new] = np.where(same, np.roll(new, 1), self._latest[sources])
        self._latest[sources] = new  # of equal sources the last one stays

    def _check(self, given: Transitions) -> None:
        """Raise every error that adding the transitions can cause, before any part of the forest is changed."""
        one = {key: array[:1] for key, array in given.before.items()}
        after = {key: array[:1] for key, array in given.after.items()}
        for key, array in one.items():
            if array.dtype != after[key].dtype or array.shape != after[key].shape:
                raise SchemaError(
                    f"rows: {('next', key)!r}: expected {array.dtype} of shape {array.shape[1:]} as in {key!r}, found "
                    f"{after[key].dtype} of shape {after[key].shape[1:]}"
                )
        self._node_map.index(nest(one))
        zero = np.zeros(1, np.int64)
        actions = {key: array[:1] for key, array in given.actions.items()}
        self._edge_map.index({"source": zero, "target": zero, **_actions(actions)})
        if self._extra is not None:  # an edge that never exists, which defines the fields of all other edges
            self._extra.extend({"edge": zero - 1}, nest({key: array[:1] for key, array in given.extra.items()}))

    # ------------------------------------------------------------------ reading

    def index(self, rows: Any) -> Integers:
        """Return the nodes of the given observations, int64 ``[n]``; -1 for an unknown observation.

        Args:
            rows: A tree of arrays ``[n, ...]``; fields that are not part of the observation are ignored.

        Raises:
            SchemaError: The observations differ in shape or dtype from the observations in the forest.
        """
        nodes: Integers = self._node_map.index(rows)
        return nodes

    def contains(self, rows: Any) -> npt.NDArray[np.bool_]:
        """Return whether the forest has a node for each observation, bool ``[n]``; raise the errors of ``index``."""
        return self.index(rows) >= 0

    def get_children(self, root: Any) -> Any:
        """Return the outcomes of each action at an observation.

        Args:
            root: A single observation (without an axis of rows), or the index of a node.

        Returns:
            Rows in the layout TED, ``[n, ...]``: one row for each edge that leaves the observation, with the mean
            reward and a field "count".

        Raises:
            MissingRowError: The observation is not in the forest.
        """
        return self.get_tree(root, max_depth=1, compact=False).rows()

    def get_tree(self, root: Any, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """Return the tree of recorded rollouts that begin at an observation.

        Args:
            root: A single observation (without an axis of rows), or the index of a node. Fields that are not part of
                the observation are ignored.
            max_depth: The largest number of edges from the root to a vertex; None: no limit.
            compact: Whether an observation with one incoming and one outgoing edge becomes part of an edge instead of a
                vertex.

        Returns:
            The tree. Later changes of the forest do not affect the tree.

        Raises:
            MissingRowError: The observation is not in the forest.
            ConfigError: ``max_depth`` is negative.
        """
        if max_depth is not None and max_depth < 0:
            raise ConfigError(f"max_depth: expected at least 0, found {max_depth}")
        columns = [self._memory[name] for name in ("previous", "target", "terminated", "count")]
        # Reading single items of a memoryview takes half the time of reading an array, because they are Python numbers.
        links = Links(*(memoryview(column) for column in (self._latest, *columns)))  # type: ignore[arg-type]
        graph = collect(links, self._node(root), max_depth, compact)
        steps = self._steps(graph.steps, graph.nodes)
        begins, ends = graph.bounds[:-1], graph.bounds[1:] - 1
        return Tree(
            nodes=graph.nodes[: graph.vertices],
            edges=graph.edges,
            counts=steps.counts[begins],
            rewards=np.add.reduceat(steps.rewards, begins) if len(begins) else np.zeros(0),
            dones=steps.dones[ends],
            ended=graph.ended,
            bounds=graph.bounds,
            steps=steps,
            observations=as_arrays(self._node_map.rows(graph.nodes)),
            reward_key=self._reward,
        )

    def _node(self, root: Any) -> int:
        if isinstance(root, int | np.integer):
            if not 0 <= root < self.num_nodes:
                raise MissingRowError(f"root: expected a node in 0..{self.num_nodes - 1}, found {root}")
            return int(root)
        fields = flatten(root)
        missing = [key for key in self._observation if key not in fields]
        if missing:
            raise MissingRowError(f"root: expected the fields {list(self._observation)}, found {list(fields)}")
        rows = nest({key: np.asarray(fields[key])[None] for key in self._observation})
        node = int(self.index(rows)[0])
        if node < 0:
            raise MissingRowError(f"root: expected an observation of the forest, found {rows}")
        return node

    def _steps(self, edges: Integers, nodes: Integers) -> Steps:
        """Return edges as steps between nodes; a step refers to a node by the node's position in ``nodes``."""
        order = np.argsort(nodes, kind="stable")

        def place(node: Integers) -> Integers:
            return order[np.searchsorted(nodes, node, sorter=order)]

        rows = as_arrays(self._edge_map.rows(edges))
        fields: dict[FieldKey, Any] = {key: rows["action"][str(n)] for n, key in enumerate(self._action)}
        if self._extra is not None and len(edges):
            fields |= flatten(as_arrays(self._extra[{"edge": edges}]))
        values = self._memory[edges]
        counts, terminated, truncated = values["count"], values["terminated"], values["truncated"]
        return Steps(
            sources=place(values["source"]),
            targets=place(values["target"]),
            counts=counts,
            rewards=values["reward"] / counts,
            dones=np.where(terminated == counts, 1, np.where(terminated + truncated == counts, 2, 0)).astype(np.int8),
            terminated=terminated,
            truncated=truncated,
            fields=fields,
        )

    # ------------------------------------------------------------------ files

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save the forest to a file; after an error, an existing file is unchanged.

        Raises:
            StorageError: The file cannot be written.
        """
        parts = {"nodes": self._node_map, "edges": self._edge_map, "extra": self._extra}
        states = {name: None if part is None else part.state_dict() for name, part in parts.items()}
        fields = (self._observation, self._action, [self._reward], self._extra_fields)
        names = [[list(path_of(key)) for key in keys] for keys in fields]
        columns = {name: self._memory[name][: len(self)] for name in _EDGE.names or ()}
        saved = {"format": _FORMAT, "kind": "forest", "names": names, "columns": columns, **states}
        write_checkpoint(path, saved)

    @classmethod
    def loads(cls, path: str | PathLike[str]) -> Forest:
        """Return the forest that ``dumps`` saved; nodes and edges keep their indices.

        Raises:
            StateError: The file is damaged, does not contain a forest, or was written by a newer version.
            StorageError: The file cannot be read.
        """
        state = read_checkpoint(path)
        if state.get("kind") != "forest":
            raise StateError(f"{path}: expected a saved forest, found {state.get('kind', 'something else')}")
        if state.get("format") != _FORMAT:
            raise StateError(f"{path}: expected a forest of version {_FORMAT}, found version {state.get('format')}")
        try:
            names = [[key_of(tuple(key)) for key in keys] for keys in state["names"]]
            observation, action, (reward,), extra = names
            forest = cls(observation=observation, action=action, reward=reward, extra=extra)
            forest._node_map.load_state_dict(state["nodes"])
            forest._edge_map.load_state_dict(state["edges"])
            if forest._extra is not None:
                forest._extra.load_state_dict(state["extra"])
            forest._grow(0)
            for name, column in state["columns"].items():
                forest._memory[name][: len(forest)] = column
            forest._link(0)
        except UNREADABLE as error:
            raise StateError(f"{path}: expected a forest, found {error!r}") from error
        return forest


def _actions(fields: dict[FieldKey, npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the fields of actions for the key of an edge. The names of the fields are replaced by numbers, because a
    field may have the name of another part of the key.
    """
    return {"action": {str(number): array for number, array in enumerate(fields.values())}} if fields else {}
