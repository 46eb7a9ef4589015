"""Rollouts and examples as Arrow columns."""
