"""Replay on a device, written once: pure functions over arrays, state in and state out.

``arrays`` has the functions that a framework provides, ``episodes`` and ``sum_tree`` the indices that rows are found
in, ``samplers`` the samplers, ``options`` the arguments of users, and ``moving`` what goes to the host and comes back.
"""

from mouse_core.replay.device.arrays import Arrays as Arrays
from mouse_core.replay.device.arrays import DrawKey as DrawKey
from mouse_core.replay.device.arrays import Ring as Ring
from mouse_core.replay.device.options import Order as Order
from mouse_core.replay.device.options import Slices as Slices
from mouse_core.replay.device.samplers import DeviceSampler as DeviceSampler
from mouse_core.replay.device.samplers import HostSampler as HostSampler
from mouse_core.replay.device.samplers import Plan as Plan
