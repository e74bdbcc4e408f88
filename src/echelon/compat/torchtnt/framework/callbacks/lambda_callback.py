"""torchtnt.framework.callbacks.lambda_callback."""

from echelon.loop.callbacks.functions import Lambda

__all__ = ["Lambda"]
