"""Transforms of batches on their way out of a replay buffer, and of rows on their way in.

A transform is any callable from a batch to a batch. Those here are pure functions of nested dicts of arrays, of NumPy
or torch on any device, and share with the batch that they are given what they do not change. ``protocols.Transform``
says what else a transform may have.
"""
