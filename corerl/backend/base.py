"""What every backend extends: all hooks, made of a few primitives that only the backend can answer.

A subclass writes `build`, `train`, `forward`, `local_state`, `tensors` and `after_load`. It gets init, sharded loading,
resume, save (in the background too), the weight stream, snapshots, sleep and wake_up, and may override any of them.
"""
