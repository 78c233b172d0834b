"""What the native classes of ``mooncake.engine`` and ``mooncake.store`` do in Python.

* :mod:`header`: the header of stored tensors and the manifest of sharded ones; bytes in, bytes out
* :mod:`parallel`: how a tensor is divided among ranks, and under which keys its shards are stored
* :mod:`tensors`: the tensor methods of the store, over torch

torch is imported by the first method that needs it. Names here are private to Snowskin.
"""
