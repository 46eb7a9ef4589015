"""Batches for trainers on several ranks, and producers that wait for them."""
