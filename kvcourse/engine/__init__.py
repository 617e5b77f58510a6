"""Many requests on one paged cache."""

from kvcourse.engine.loop import Engine, Request

__all__ = ["Engine", "Request"]
