"""The engine in plain Python: slow, readable, the in-tree statement of the semantics.

`core` is one pass of the scheduler, `kv` the block pool, `sequence` one request's tokens and blocks, `clock` the
arithmetic of time, `rng` the seeded generator of speculative decoding, `collector` the report, `script` a driver for
recorded scripts and `scripts` makes random ones. Nothing here imports the package under test.
"""
