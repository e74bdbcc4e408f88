"""torchtnt.framework.predict."""

from echelon.loop.run import predict

__all__ = ["predict"]
