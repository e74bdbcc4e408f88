"""Pipeline parallelism: each rank has some of the layers and sends activations to the next.

`stages` says where a module is cut, `gates` runs the author's own forward pass for one stage, `walk` finds out which tensors the
stages exchange, `schedules` builds torch's schedules, `pipeline` runs an update.
"""
