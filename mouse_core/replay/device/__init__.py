"""Replay on a device, shared by torch and JAX: pure functions that take arrays and a state, and return arrays and the
next state.

``arrays`` has the array functions that a framework provides, ``layout`` checks users' arguments, and ``units`` finds
rows and slices. ``sum_tree`` has the weights of rows, ``samplers`` has the samplers, and ``moving`` copies replays to
and from the host.
"""

from mouse_core.replay.device.arrays import Arrays, DrawKey, Ring
from mouse_core.replay.device.layout import Layout, Order
from mouse_core.replay.device.samplers import DeviceSampler, HostSampler
from mouse_core.replay.device.units import RowPlan, RowUnits, Slices, SliceUnits

__all__ = [
    "Arrays",
    "DeviceSampler",
    "DrawKey",
    "HostSampler",
    "Layout",
    "Order",
    "Ring",
    "RowPlan",
    "RowUnits",
    "SliceUnits",
    "Slices",
]
