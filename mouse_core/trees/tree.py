"""Tree: the recorded rollouts that begin at an observation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import MissingRowError, SchemaError
from mouse_core.maps import RowMap
from mouse_core.nested import FieldKey, flatten, map_tree, nest, path_of

Integers = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """The S steps of a tree, as arrays.

    Attributes:
        sources, targets: The positions in the tree of the observations before and after each step, int64 ``[S]``.
        counts: The number of transitions of each step, int64 ``[S]``.
        rewards: The mean reward, float64 ``[S]``.
        dones: Done codes, int8 ``[S]``; see ``Tree``.
        terminated, truncated: The number of episodes that terminated, or were truncated, with the step, int64 ``[S]``.
        fields: Actions and other fields ``[S, ...]``, with the values of each step's latest transition.
    """

    sources: Integers
    targets: Integers
    counts: Integers
    rewards: npt.NDArray[np.float64]
    dones: npt.NDArray[np.int8]
    terminated: Integers
    truncated: Integers
    fields: dict[FieldKey, npt.NDArray[Any]]


def as_arrays(rows: Any) -> Any:
    """Convert lists in rows to arrays: lists of text, and lists of values that differ in length."""
    if isinstance(rows, dict):
        return {name: as_arrays(child) for name, child in rows.items()}
    if not isinstance(rows, list) or all(isinstance(value, str) for value in rows):
        return np.asarray(rows)
    values = np.empty(len(rows), object)
    values[:] = rows
    return values


Path = tuple[int, ...]
Edges = list[list[tuple[int, int, bool]]]


def components(edges: Edges) -> list[list[int]]:
    """Return the strongly connected components: vertices on a common cycle form one group. In the result, a group comes
    after all groups to which the edges of the group lead.

    The algorithm is from Tarjan (1972), "Depth-first search and linear graph algorithms", here without recursion.
    """
    groups: list[list[int]] = []
    number, lowest = [-1] * len(edges), [0] * len(edges)
    waiting: list[int] = []
    grouped = bytearray(len(edges))
    places = [0] * len(edges)
    count = 0
    for root in range(len(edges)):
        way = [root] if number[root] < 0 else []
        while way:
            vertex = way[-1]
            if number[vertex] < 0:
                number[vertex] = lowest[vertex] = count
                count += 1
                waiting.append(vertex)
            if places[vertex] < len(edges[vertex]):
                _, child, ended = edges[vertex][places[vertex]]
                if not ended and number[child] < 0:
                    way.append(child)  # process this edge once more when the child is done
                    continue
                places[vertex] += 1
                if not ended and not grouped[child]:
                    lowest[vertex] = min(lowest[vertex], lowest[child])
                continue
            way.pop()
            if lowest[vertex] == number[vertex]:
                groups.append(_taken(waiting, vertex))
                for member in groups[-1]:
                    grouped[member] = 1
    return groups


def _taken(waiting: list[int], vertex: int) -> list[int]:
    """Pop vertices from a stack, down to and including a vertex; return the popped vertices."""
    taken = [waiting.pop()]
    while taken[-1] != vertex:
        taken.append(waiting.pop())
    return taken


def paths(edges: Edges, groups: list[list[int]]) -> Iterator[Path]:
    """Yield all paths from the root to their ends, paths with fewer edges first."""
    # A path can return to a vertex only inside its group, so a bit mask marks the vertices of the group on the path.
    bits = [0] * len(edges)
    member = [0] * len(edges)
    for number, group in enumerate(groups):
        for place, vertex in enumerate(group):
            bits[vertex], member[vertex] = 1 << place, number
    waiting: deque[tuple[int, int, Path]] = deque([(0, bits[0], ())])
    while waiting:
        vertex, passed, path = waiting.popleft()
        if vertex < 0 or not edges[vertex]:
            yield path
            continue
        for number, (_, child, ended) in enumerate(edges[vertex]):
            same = member[child] == member[vertex]
            # -1: the path ends with this edge, and is yielded after all shorter paths.
            if ended or (same and passed & bits[child]):
                waiting.append((-1, 0, (*path, number)))
            else:
                waiting.append((child, (passed if same else 0) | bits[child], (*path, number)))


def folded(edges: Edges, groups: list[list[int]]) -> tuple[int, int]:
    """Return the number of edges of the longest path, and the number of vertices; a vertex is counted once for each
    path that leads to the vertex.

    Paths inside a group are enumerated from each entry vertex; other paths are counted by sums.
    """
    member = [0] * len(edges)
    for number, group in enumerate(groups):
        for vertex in group:
            member[vertex] = number
    entered = {0} | {
        child
        for parent, leave in enumerate(edges)
        for _, child, ended in leave
        if not ended and member[parent] != member[child]
    }
    longest, below = [0] * len(edges), [1] * len(edges)
    for group in groups:
        for vertex in entered.intersection(group):
            for length, child in _ways(edges, member, vertex):
                longest[vertex] = max(longest[vertex], length + (longest[child] if child >= 0 else 0))
                below[vertex] += below[child] if child >= 0 else 1
    return longest[0], below[0]


def _ways(edges: Edges, member: list[int], begin: int) -> Iterator[tuple[int, int]]:
    """Yield, for each path within a group that visits no vertex twice, the length of the path and the first vertex
    after the group. This vertex is -1 if the path ends in the group.
    """
    passed = {begin}
    way = [(begin, iter(edges[begin]))]
    while way:
        vertex, left = way[-1]
        for _, child, ended in left:
            if not ended and member[child] != member[begin]:
                yield len(way), child
                continue
            yield len(way), -1
            if not ended and child not in passed:
                passed.add(child)
                way.append((child, iter(edges[child])))
                break
        else:
            way.pop()
            passed.discard(vertex)


def _observation(tree: Tree, edge: int) -> Any:
    return _plain(tree.observation(int(tree.edges[edge, 1])))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _places(tree: Tree) -> tuple[list[float], list[int]]:
    """Return the positions of vertices in a plot: leaves lie next to each other, and other vertices are centred above
    their children.
    """
    down, below = [0] * len(tree), [[] for _ in range(len(tree))]  # type: list[int], list[list[int]]
    seen = {0}
    for parent, child in tree.edges.tolist():
        if child not in seen:
            seen.add(child)
            down[child] = down[parent] + 1
            below[parent].append(child)
    across = [0.0] * len(tree)
    leaves = 0
    waiting = [(0, False)]
    while waiting:
        vertex, again = waiting.pop()
        if not below[vertex]:
            across[vertex], leaves = float(leaves), leaves + 1
        elif again:
            across[vertex] = float(np.mean([across[child] for child in below[vertex]]))
        else:
            waiting.append((vertex, True))
            waiting += [(child, False) for child in reversed(below[vertex])]
    return across, down


@dataclass(frozen=True, eq=False)
class Tree:
    """The recorded rollouts that begin at an observation. A tree has vertices (observations) and edges; an edge
    consists of the steps between two vertices.

    Vertices are ordered by their distance from the root, which is vertex 0; edges are ordered by their start vertex. A
    path is a tuple: for each vertex on the path, the index of the chosen edge among the edges that leave the vertex.
    ``(0, 2)`` is the first edge of the root, followed by the third edge of the next vertex. An observation is one
    vertex even if several edges, and therefore several paths, lead to the observation. A path ends in three cases: with
    an edge that leads back to a vertex of the path, with an edge with which every episode terminated, or at a vertex
    that no edge leaves.

    ``Forest.get_tree`` creates a tree; later changes of the forest do not affect the tree.

    Attributes:
        nodes: The index of each vertex in the forest, int64 ``[V]``.
        edges: The start and end vertex of each edge, int64 ``[E, 2]``.
        counts: The number of transitions of each edge's first step, int64 ``[E]``.
        rewards: The sum of the mean rewards of an edge's steps, float64 ``[E]``.
        dones: Done codes, int8 ``[E]``: 1 if every episode terminated with the edge; 2 if every episode ended with the
            edge, but not all terminated; else 0. ``steps`` contains the numbers of terminated and truncated episodes.
        ended: For each edge, whether all episodes that took the edge terminated there, bool ``[E]``.
        bounds: Edge e consists of the steps ``bounds[e] .. bounds[e + 1] - 1``, int64 ``[E + 1]``.
        steps: All steps, in the order of the edges.
        observations: The observations of the vertices, followed by the observations inside edges, as a tree of arrays.
        reward_key: The name of the reward in rollouts.
    """

    nodes: Integers
    edges: Integers
    counts: Integers
    rewards: npt.NDArray[np.float64]
    dones: npt.NDArray[np.int8]
    ended: npt.NDArray[np.bool_]
    bounds: Integers
    steps: Steps
    observations: Any
    reward_key: FieldKey = "reward"

    def __len__(self) -> int:
        """The number of vertices."""
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} vertices, {len(self.edges)} edges, {len(self.steps.sources)} steps)"

    # ------------------------------------------------------------------ vertices and edges

    def observation(self, vertex: int | Integers) -> Any:
        """Return the observation of a vertex, or of several vertices, as a tree of arrays."""
        return map_tree(lambda leaf: leaf[vertex], self.observations)

    def leaving(self, vertex: int) -> Integers:
        """Return the edges that leave a vertex, in the order of their first transitions."""
        return np.arange(self._offsets[vertex], self._offsets[vertex + 1])

    def entering(self, vertex: int) -> Integers:
        """Return the edges that lead to a vertex."""
        return np.flatnonzero(self.edges[:, 1] == vertex)

    def children(self, vertex: int) -> Integers:
        """Return the end vertices of the edges that leave a vertex, one for each edge."""
        children: Integers = self.edges[self.leaving(vertex), 1]
        return children

    def parents(self, vertex: int) -> Integers:
        """Return the distinct vertices from which an edge leads to a vertex."""
        return np.unique(self.edges[self.entering(vertex), 0])

    def edges_along(self, path: Sequence[int]) -> Integers:
        """Return the edges of a path.

        Raises:
            MissingRowError: The path does not exist.
        """
        found: list[int] = []
        passed = {0}
        vertex, over = 0, False
        for place, number in enumerate(path):
            leaving = [] if over else self._leaving[vertex]
            if not 0 <= number < len(leaving):
                raise MissingRowError(
                    f"path {tuple(path)}: expected one of {len(leaving)} edges at position {place}, found {number}"
                )
            edge, vertex, ended = leaving[number]
            found.append(edge)
            over = ended or vertex in passed
            passed.add(vertex)
        return np.array(found, np.int64)

    def vertex_at(self, path: Sequence[int]) -> int:
        """Return the vertex to which a path leads; the root for the empty path.

        Raises:
            MissingRowError: The path does not exist.
        """
        edges = self.edges_along(path)
        return int(self.edges[edges[-1], 1]) if len(edges) else 0

    def index(self, rows: Any) -> Integers:
        """Return the vertices of the given observations, int64 ``[n]``; -1 for an unknown observation.

        Args:
            rows: A tree of arrays ``[n, ...]`` with the fields of the observation; other fields are ignored.

        Raises:
            SchemaError: Fields differ in dtype or shape from the observation's fields.
        """
        vertices: Integers = self._known.index(rows)
        return vertices

    def contains(self, rows: Any) -> npt.NDArray[np.bool_]:
        """Return whether the tree has a vertex for each observation, bool ``[n]``; raise the errors of ``index``."""
        return self.index(rows) >= 0

    # ------------------------------------------------------------------ paths

    def valid_paths(self) -> Iterator[Path]:
        """Yield all paths from the root to their ends, paths with fewer edges first.

        The number of paths can be very large if several paths lead to the same observations; therefore paths are
        created one by one.
        """
        return paths(self._leaving, self._groups)

    def max_length(self) -> int:
        """Return the number of edges on the longest path.

        Paths through cycles are enumerated one by one, so the call can take long if there are very many paths.
        """
        return folded(self._leaving, self._groups)[0]

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """Return the number of vertices.

        Args:
            count_repeat: Whether a vertex is counted once for each path to the vertex; as in ``max_length``, the call
                can then take long.
        """
        return folded(self._leaving, self._groups)[1] if count_repeat else len(self)

    def select_by(self, scores: npt.ArrayLike | Callable[[Tree], npt.ArrayLike]) -> Path:
        """Return the path that follows, at each vertex, the edge with the largest score; of several edges with equal
        scores, the first edge.

        Args:
            scores: A number for each edge, ``[E]``, such as ``counts``; or a function that takes the tree and returns
                these numbers.

        Returns:
            The path up to its end.

        Raises:
            SchemaError: ``scores`` does not have one number for each edge.
        """
        numbers = np.asarray(scores(self) if callable(scores) else scores)
        if numbers.shape != self.counts.shape:
            raise SchemaError(f"scores: expected shape {self.counts.shape}, found {numbers.shape}")
        path: list[int] = []
        passed: set[int] = set()
        vertex, over = 0, False
        while not over and vertex not in passed and (leaving := self.leaving(vertex)).size:
            passed.add(vertex)
            path.append(int(np.argmax(numbers[leaving])))
            _, vertex, over = self._leaving[vertex][path[-1]]
        return tuple(path)

    # ------------------------------------------------------------------ rollouts

    def rollout(self, edge: int) -> Any:
        """Return the steps of an edge as rows in the layout TED: a nested dict of arrays ``[n, ...]``, with a field
        "count".
        """
        return self.rows(np.arange(self.bounds[edge], self.bounds[edge + 1]))

    def rollout_from_path(self, path: Sequence[int]) -> Any:
        """Return the steps of all edges of a path; see ``rollout``. The empty path has no steps.

        Raises:
            MissingRowError: The path does not exist.
        """
        steps = [np.arange(self.bounds[edge], self.bounds[edge + 1]) for edge in self.edges_along(path)]
        return self.rows(np.concatenate([np.empty(0, np.int64), *steps]))

    def rows(self, steps: Any = slice(None)) -> Any:
        """Return the given steps, by default all steps, as rows in the layout TED: arrays ``[n, ...]``, with a field
        "count".
        """
        taken = self.steps
        dones = taken.dones[steps]
        rows = {key: array[steps] for key, array in taken.fields.items()}
        for key, leaf in flatten(self.observations).items():
            rows[key] = leaf[taken.sources[steps]]
            rows["next", *path_of(key)] = leaf[taken.targets[steps]]
        rows["next", *path_of(self.reward_key)] = taken.rewards[steps]
        rows |= {("next", "done"): dones != 0, ("next", "terminated"): dones == 1, ("next", "truncated"): dones == 2}
        return nest(rows | {"count": taken.counts[steps]})

    # ------------------------------------------------------------------ texts and plots

    def to_string(self, format: Callable[[Tree, int], Any] | None = None) -> str:
        """Return a text with a line for each path to a vertex, indented by the length of the path. If the text already
        contains the lines below a vertex, "..." replaces these lines.

        Args:
            format: A function ``format(tree, edge)`` that returns the text of an edge; by default the observation at
                its end.
        """
        say = format or _observation
        lines, shown = [], {0}
        waiting: list[tuple[tuple[int, ...], int]] = []
        waiting += [((number,), int(edge)) for number, edge in enumerate(self.leaving(0))][::-1]
        way = [0]  # the vertices on the path of the current line
        while waiting:
            path, edge = waiting.pop()
            del way[len(path) :]
            lines.append(f"{' ' * (len(path) - 1)}{path} {say(self, edge)}")
            vertex = int(self.edges[edge, 1])
            leaving = () if self.ended[edge] or vertex in way else self.leaving(vertex)
            way.append(vertex)
            if len(leaving) and vertex in shown:
                lines.append(f"{' ' * len(path)}...")
                continue
            shown |= {vertex} if len(leaving) else set()
            waiting += [((*path, number), int(below)) for number, below in enumerate(leaving)][::-1]
        return "\n".join(lines)

    def plot(self, ax: Any = None, *, label: Callable[[Tree, int], Any] | None = None) -> Any:
        """Draw the tree with matplotlib. Vertices are placed by their depth; edges with more transitions are drawn
        wider.

        Args:
            ax: The axes to draw on; by default new axes.
            label: A function ``label(tree, vertex)`` that returns the text of a vertex; by default the index of the
                vertex.

        Returns:
            The axes.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots()
        across, down = _places(self)
        largest = max(int(self.counts.max(initial=1)), 1)
        for edge, (parent, child) in enumerate(self.edges.tolist()):
            leads_back = down[child] <= down[parent]
            style = {
                "arrowstyle": "->",
                "linewidth": 0.5 + 2.5 * float(self.counts[edge]) / largest,
                "linestyle": "--" if self.ended[edge] or leads_back else "-",
                "color": "0.5",
                "shrinkA": 8,
                "shrinkB": 8,
                # Edges that lead back are curved, so that they do not cover the forward edges.
                "connectionstyle": f"arc3,rad={0.2 if leads_back else 0}",
            }
            ax.annotate("", (across[child], -down[child]), (across[parent], -down[parent]), arrowprops=style)
        ax.scatter(across, [-depth for depth in down], s=180, zorder=2)
        for vertex in range(len(self)):
            text = str(vertex if label is None else label(self, vertex))
            ax.text(across[vertex], -down[vertex], text, ha="center", va="center", zorder=3, fontsize="small")
        ax.set_axis_off()
        return ax

    @cached_property
    def _leaving(self) -> Edges:
        """Return the edges that leave each vertex. For each edge: its index, its end vertex, and whether every episode
        terminated with the edge.
        """
        edges: Edges = [[] for _ in range(len(self))]
        for edge, ((parent, child), ended) in enumerate(zip(self.edges.tolist(), self.ended.tolist(), strict=True)):
            edges[parent].append((edge, child, ended))
        return edges

    @cached_property
    def _groups(self) -> list[list[int]]:
        return components(self._leaving)

    @cached_property
    def _offsets(self) -> list[int]:
        """Return the index of the first edge that leaves each vertex."""
        found: list[int] = np.searchsorted(self.edges[:, 0], np.arange(len(self) + 1)).tolist()
        return found

    @cached_property
    def _known(self) -> RowMap:
        known = RowMap(keys=flatten(self.observations))
        known.extend(self.observation(np.arange(len(self))))
        return known
