"""Replay buffers: storages, writers, samplers and transforms that compose."""
