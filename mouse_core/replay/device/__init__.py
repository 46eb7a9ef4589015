"""Replay on a device, written once: pure functions over arrays, state in and state out.

``arrays`` has the functions that a framework provides, ``episodes`` and ``sum_tree`` the indices that rows are found
in, ``samplers`` the samplers, ``options`` the arguments of users, and ``moving`` what goes to the host and comes back.
"""

from mouse_core.replay.device.arrays import Arrays, DrawKey, Ring
from mouse_core.replay.device.episodes import EpisodeIndex
from mouse_core.replay.device.options import Order, Slices
from mouse_core.replay.device.samplers import DeviceSampler, HostSampler, RowPlan, RowUnits, SliceUnits
from mouse_core.replay.device.sum_tree import SumTree
from mouse_core.replay.samplers.episodes import EpisodeFields

__all__ = [
    "Arrays",
    "DeviceSampler",
    "DrawKey",
    "EpisodeFields",
    "EpisodeIndex",
    "HostSampler",
    "Order",
    "Ring",
    "RowPlan",
    "RowUnits",
    "SliceUnits",
    "Slices",
    "SumTree",
]
