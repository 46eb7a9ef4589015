"""Transforms of batches on their way out of a replay buffer, and of rows on their way in.

A transform is any callable from a batch to a batch. The transforms of this package are pure functions of nested dicts
of arrays, of NumPy or torch on any device. Unchanged fields are shared with the input batch. ``protocols.Transform``
describes the optional attributes of a transform.
"""
