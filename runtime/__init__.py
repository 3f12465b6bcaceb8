"""The training runtime: one optimizer step of a PyTorch model over sharded ranks.

Knows nothing of the tuner. Import the pieces from their modules (`runtime.config`,
`runtime.engine`, ...); this package itself imports nothing, so that it stays cheap to load.
"""
