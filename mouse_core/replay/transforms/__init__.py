"""Transforms of batches that a replay buffer delivers, and of rows that are written to a replay buffer.

A transform is any callable from a batch to a batch. The transforms in this package are pure functions of nested dicts
of NumPy arrays or torch tensors on any device. Unchanged fields are shared with the input batch.
``protocols.Transform`` describes the optional attributes of a transform.
"""
